"""Rounding sample by sample against exact rationals: sums of values, and norms."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gramcert import rounding
from gramcert.operators.graph import Sum
from gramcert.operators.rounded import norms

UNIT = torch.finfo(torch.float64).eps / 2


def exact_square(numbers):
    return sum((Fraction(number) ** 2 for number in numbers), Fraction(0))


@given(
    st.lists(st.sampled_from([1, -1]), min_size=1, max_size=4),
    st.integers(0, 2**16),
    st.sampled_from([1.0, 2.0**-1060, 2.0**40]),
)
def test_sums_are_as_near_the_exact_ones_as_is_said_and_hardly_nearer(signs, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(3, 2, 5, dtype=torch.float64, generator=generator) * scale**n for n in range(len(signs))]
    y, bound = Sum(tuple(signs)).run(values)
    for sample in range(3):
        terms = [value[sample].flatten().tolist() for value in values]
        truth = [
            sum(s * Fraction(t) for s, t in zip(signs, column, strict=True)) for column in zip(*terms, strict=True)
        ]
        distance = exact_square(Fraction(a) - b for a, b in zip(y[sample].flatten().tolist(), truth, strict=True))
        assert distance <= Fraction(float(bound[sample])) ** 2
    amount = sum(value.flatten(1).norm(dim=1) for value in values)
    assert bool((bound <= len(signs) * UNIT * amount * (1 + 1e-9) + 2.0**-1000).all())


def test_one_addition_is_counted_as_one():
    """1 + 2⁻⁵³ is 1 in float64: the error is a whole unit roundoff, and the bound hardly more."""
    one, unit = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), UNIT, dtype=torch.float64)
    y, bound = Sum((1, 1)).run([one, unit])
    assert float(y) == 1
    assert UNIT <= float(bound) <= UNIT * (1 + 100 * UNIT)


def test_one_value_is_not_rounded():
    x = torch.randn(2, 3, dtype=torch.float64)
    y, bound = Sum((-1,)).run([x])
    assert torch.equal(y, -x)
    assert bound.tolist() == [0, 0]


@pytest.mark.parametrize("piece", [1, 7, 2**16])
@pytest.mark.parametrize("shape", [(5, 3), (1, 200), (4, 1), (3, 0)])
def test_norms_are_above_the_exact_ones_in_any_portions(piece, shape, monkeypatch):
    monkeypatch.setattr(rounding, "_PIECE", piece)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    found = norms(x)
    assert found.shape == shape[:1]
    for sample, norm in zip(x, found.tolist(), strict=True):
        square = exact_square(sample.tolist())
        assert square <= Fraction(norm) ** 2 <= square * (1 + Fraction(1, 10**12)) + Fraction(1, 10**290)


def test_the_norm_of_one_row():
    assert float(rounding.row_norms_up(torch.tensor([3.0, 4.0], dtype=torch.float64))) == pytest.approx(5)
