"""The radius against exact rational arithmetic: never above the exact one by a single unit, and hardly below it."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import tensors
from gramcert.certified.margins import radii

EPS = torch.finfo(torch.float64).eps
LARGEST = torch.finfo(torch.float64).max
SMALLEST = 2.0**-1074


def is_valid(radius, weight, logits, lipschitz, logit_error, feature_error):
    """Whether L·‖w_y - w_i‖·(radius + e/L) <= f_y - f_i - 2·error for every i, in exact arithmetic by squares."""
    rows = [[Fraction(value) for value in row] for row in weight.double().tolist()]
    values = [Fraction(value) for value in logits.double().tolist()]
    winner = values.index(max(values))
    for i in set(range(len(values))) - {winner}:
        margin = values[winner] - values[i] - 2 * Fraction(logit_error)
        square = sum((a - b) ** 2 for a, b in zip(rows[winner], rows[i], strict=True))
        reach = Fraction(radius) * Fraction(lipschitz) + Fraction(feature_error)
        if margin < 0 or square * reach**2 > margin**2:
            return False
    return True


def one_radius(weight, logits, lipschitz=1.0, logit_error=0.0, feature_error=0.0):
    """The radius of one input."""
    errors = (torch.tensor([error], dtype=torch.float64) for error in (logit_error, feature_error))
    return float(radii(weight, logits[None], lipschitz, *errors))


@st.composite
def cases(draw):
    """A last layer and logits of all sizes, with errors."""
    classes, features = draw(st.integers(2, 5)), draw(st.integers(1, 6))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    scale = draw(st.sampled_from([1.0, 1e-30, 1e30]))
    weight = draw(tensors((classes, features), dtype)) * scale
    logits = draw(tensors((classes, 1), torch.float64))[:, 0] * draw(st.sampled_from([1.0, 1e-8, 1e200]))
    if draw(st.booleans()):  # far ahead of the others
        logits[draw(st.integers(0, classes - 1))] += float(logits.abs().max()) + draw(st.sampled_from([EPS, 1e-9, 3]))
    lipschitz = draw(st.one_of(st.just(1.0), st.floats(1e-30, 1e30)))
    errors = [draw(st.sampled_from([0.0, 1e-16, 1e-9, 0.1])) for _ in range(2)]
    return weight, logits, lipschitz, *errors


@given(cases())
def test_never_above_the_exact_radius(case):
    radius = one_radius(*case)
    assert 0 <= radius <= LARGEST
    assert radius == 0 or is_valid(radius, *case)


def gaussian_cases(count, dtype=torch.float64):
    """Ordinary ones."""
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        weight, logits = (torch.randn(shape, generator=generator, dtype=dtype) for shape in ((3, 4), (3,)))
        yield weight, logits, 0.9 + number / count, 1e-12, 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hardly_below_the_exact_radius(dtype):
    for case in gaussian_cases(100, dtype):
        radius = one_radius(*case)
        assert is_valid(radius, *case)
        assert not is_valid(radius * (1 + 100 * EPS), *case)


@pytest.mark.parametrize("lipschitz", [1.0, 5e-324, 1e-300, 1e300, math.inf])
def test_ties_certify_nothing(lipschitz):
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for logits in ([1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [-2.0, 5.0, 5.0]):
        assert one_radius(weight, torch.tensor(logits), lipschitz) == 0
    # Equal rows move together, but a tie is a tie.
    assert one_radius(torch.ones(2, 3), torch.tensor([1.0, 1.0]), lipschitz) == 0


def test_margins_within_the_rounding_certify_nothing():
    weight, logits = torch.eye(2), torch.tensor([1.0, 0.0])
    assert one_radius(weight, logits, logit_error=0.5) == 0
    assert one_radius(weight, logits, logit_error=0.5 - 2 * EPS) > 0
    assert one_radius(weight, logits, feature_error=math.sqrt(0.5) * (1 + EPS)) == 0
    assert one_radius(weight, logits, feature_error=math.sqrt(0.5) * (1 - 100 * EPS)) > 0
    assert one_radius(weight, logits, logit_error=math.inf) == 0
    assert one_radius(weight, logits, feature_error=math.inf) == 0
    assert one_radius(weight, logits, feature_error=math.nan) == 0


def test_equal_rows_never_change_places():
    """Whatever the input: the exact radius is infinite, and the nearest other row decides."""
    weight = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    assert one_radius(weight[:2], torch.tensor([2.0, 1.0])) > 1e100
    radius = one_radius(weight, torch.tensor([2.0, 1.0, 0.0]))
    assert 2 * (1 - 1e-12) <= radius < 2


def test_one_unit_in_the_last_place():
    """The logits and the rows differ by one unit: nothing is gained from rounding to nearest."""
    weight = torch.tensor([[1.0 + EPS, 1 / 3], [1.0, 1 / 3]], dtype=torch.float64)
    logits = torch.tensor([1.0 + EPS, 1.0], dtype=torch.float64)
    for lipschitz in (1.0, 1.0 + EPS, 1 / 3, 3.0):
        case = (weight, logits, lipschitz, 0.0, 0.0)
        radius = one_radius(*case)
        assert is_valid(radius, *case)
        assert radius * lipschitz >= 1 - 1e-12
    # A margin that is too small for a difference of floats.
    case = (torch.eye(2), torch.tensor([SMALLEST, 0.0], dtype=torch.float64), 1.0, 0.0, 0.0)
    assert one_radius(*case) == 0


@pytest.mark.parametrize("lipschitz", [SMALLEST, 1e-310, 1e-200, 1e200, LARGEST, math.inf])
def test_constants_that_overflow_or_vanish(lipschitz):
    case = (torch.eye(3), torch.tensor([3.0, 1.0, 0.0]), lipschitz, 0.0, 1e-9)
    radius = one_radius(*case)
    assert 0 <= radius <= LARGEST
    if lipschitz < math.inf:
        assert is_valid(radius, *case) or radius == 0
    if 1e-300 < lipschitz < 1e300:
        assert radius * lipschitz == pytest.approx(math.sqrt(2), rel=1e-8)


def test_logits_and_rows_that_overflow():
    logits = torch.tensor([LARGEST, -LARGEST], dtype=torch.float64)
    case = (torch.eye(2), logits, 1.0, 0.0, 0.0)
    assert one_radius(*case) > 1e307
    assert is_valid(one_radius(*case), *case)
    huge = torch.tensor([[LARGEST], [-LARGEST]], dtype=torch.float64)
    assert one_radius(huge, torch.tensor([1.0, 0.0])) == 0


def test_each_input_has_its_own_errors():
    weight, logits = torch.eye(2), torch.tensor([[1.0, 0.0]]).repeat(3, 1)
    found = radii(weight, logits, 1.0, torch.tensor([0.0, 0.25, 0.0]).double(), torch.tensor([0.0, 0.0, 0.25]).double())
    root = math.sqrt(0.5)
    torch.testing.assert_close(found, torch.tensor([root, root / 2, root - 0.25], dtype=torch.float64))


def test_without_directed_rounding_the_radius_is_wrong(monkeypatch):
    """The mutation check: rounded to nearest, about half of the radii are too large."""
    drawn = list(gaussian_cases(100))
    assert all(is_valid(one_radius(*case), *case) for case in drawn)
    for name in ("next_up", "next_down"):
        monkeypatch.setattr(f"gramcert.certified.margins.{name}", lambda values: values)
    monkeypatch.setattr("gramcert.certified.margins.row_norms_up", lambda rows: rows.norm(dim=-1))
    assert sum(not is_valid(one_radius(*case), *case) for case in drawn) >= 10
