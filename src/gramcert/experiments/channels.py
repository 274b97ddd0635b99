"""Figure 2: error and time of every method against the number of channels, for zero padding."""

import torch

from gramcert.baselines.comparison import compare_methods
from gramcert.certified.choose import spectral_norm
from gramcert.experiments.records import Records, Row
from gramcert.geometry.convolution import Convolution
from gramcert.progress import Report

TAPS, INPUT_SIZE, ITERATIONS = 3, 32, 6
CHANNELS = (1, 2, 4, 8, 16, 32)

KEY = ("channels", "seed", "method")
COLUMNS = ("channels", "seed", "truth", "truth by", "method", "source", "kind", "value", "relative error", "seconds")

# The truth is known this much better than any method reaches.
TRUTH_TOL = 1e-7


def channel_rows(records: Records, channels: tuple[int, ...], seeds: tuple[int, ...], report: Report) -> None:
    """Adds the rows of every kernel that is not there yet: one per method."""
    units = [(count, seed) for count in channels for seed in seeds]
    for done, (count, seed) in enumerate(units):
        if records.has(channels=count, seed=seed):
            continue
        report("kernels", done, len(units))
        records.add(_rows(count, seed))


def _rows(count: int, seed: int) -> list[Row]:
    """A Gaussian kernel as in the paper, in float32; the truth by the Cholesky proof at this size."""
    kernel = torch.randn(count, count, TAPS, TAPS, generator=torch.Generator().manual_seed(seed))
    layer = Convolution(kernel, padding="same")
    proven = spectral_norm(layer, INPUT_SIZE, tol=TRUTH_TOL)
    truth = (proven.lower + proven.upper) / 2
    comparison = compare_methods(layer, INPUT_SIZE, ITERATIONS, seed=seed, truth=truth)
    common = {"channels": count, "seed": seed, "truth": truth, "truth by": proven.method}
    return [
        common
        | {
            "method": row.name,
            "source": row.source,
            "kind": row.kind,
            "value": row.value,
            "relative error": row.relative_error,
            "seconds": row.seconds,
        }
        for row in comparison.rows
    ]
