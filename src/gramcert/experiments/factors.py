"""Figure 1: by what factor the norm on a small grid must be multiplied to bound every size."""

from gramcert.bounds.transfer import factor_as_printed, factor_corrected, sampling_factor
from gramcert.experiments.records import Row

INPUT_SIZE, TAPS, STEPS = 224, 3, (1, 3, 5, 6)

KEY = ("t", "n0")
COLUMNS = ("t", "n0", "as printed", "corrected", "sampling factor")


def factor_rows() -> list[Row]:
    """For each t and grid size n0: Theorem 5 as printed, corrected, and :func:`gramcert.sampling_factor`.

    All for two axes; the printed factor does not depend on their number, which is one of its mistakes. ``None`` where
    a theorem needs a larger grid.
    """
    rows: list[Row] = []
    for step in STEPS:
        for grid in range(TAPS, INPUT_SIZE + 1):
            printed = factor_as_printed(TAPS, grid, step) if grid > 2**step * (TAPS // 2) else None
            corrected = factor_corrected(TAPS, grid, step) ** 2 if grid > 2**step * (TAPS - 1) else None
            ours = sampling_factor((TAPS, TAPS), (grid, grid))
            rows.append({"t": step, "n0": grid, "as printed": printed, "corrected": corrected, "sampling factor": ours})
    return rows
