import math

import pytest

from gramcert import sampling_factor
from gramcert.experiments.factors import factor_rows

ROWS = {(row["t"], row["n0"]): row for row in factor_rows()}


def test_rows_are_the_formulas_of_the_paper_and_of_its_correction():
    # Theorem 5: α = 2^t⌊k/2⌋/n0; corrected: degree 2^(t-1)(k-1) on each of two axes.
    for (t, n), row in ROWS.items():
        alpha = 2**t / n
        assert row["as printed"] == (pytest.approx((1 / (1 - alpha)) ** (2**-t)) if alpha < 1 else None)
        beta = 2 ** (t + 1) / n
        assert row["corrected"] == (pytest.approx((1 / (1 - beta)) ** (2**-t)) if beta < 1 else None)
        assert row["sampling factor"] == sampling_factor((3, 3), (n, n))


def test_ours_is_below_the_corrected_factor_wherever_that_exists():
    for row in ROWS.values():
        assert row["sampling factor"] >= 1
        assert row["corrected"] is None or row["sampling factor"] < row["corrected"]


def test_figure_covers_the_sizes_of_the_paper():
    assert {t for t, _ in ROWS} == {1, 3, 5, 6}
    assert max(n for _, n in ROWS) == 224
    assert math.isclose(ROWS[1, 224]["sampling factor"], 1 / math.cos(math.pi / 224) ** 2)
