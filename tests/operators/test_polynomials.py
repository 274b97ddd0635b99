"""GELU by tanh that is written out: its slopes by ball arithmetic, and which numbers count as those of GELU."""

import math

import pytest
import torch

import gramcert
from auditing_cases import assert_constant, exported, function
from auditing_networks import Function
from gramcert.operators import elementwise
from gramcert.operators.polynomials import RATIO, REACH, is_tanh_gelu

flint = pytest.importorskip("flint")

# GELU's own numbers.
SCALE, CUBIC = math.sqrt(2 / math.pi), 0.044715


@pytest.fixture(autouse=True)
def _precision():
    before, flint.ctx.prec = flint.ctx.prec, 160
    yield
    flint.ctx.prec = before


def gate_of(v, ratio):
    """tanh(v + ρv³)."""
    return 1 - 2 / ((2 * (v + ratio * v * v * v)).exp() + 1)


def slope(v, ratio):
    """Of v·½(1 + tanh(v + ρv³))."""
    gate = gate_of(v, ratio)
    return (1 + gate) / 2 + v * (1 - gate * gate) * (1 + 3 * ratio * v * v) / 2


def change(v, ratio):
    """Its derivative in ρ."""
    gate = gate_of(v, ratio)
    rest = 1 - gate * gate
    return rest * v**3 * (4 - 2 * gate * v * (1 + 3 * ratio * v * v)) / 2


def test_slopes_hold_for_all_numbers_in_reach_and_are_met():
    """Those of GELU itself are proved beside the table; from there on, ρ changes them by half of its own change."""
    ratio = flint.arb("0.044715") * flint.arb.pi() / 2
    assert abs(ratio - RATIO) < 1e-15
    ratios = ratio * flint.arb(1, REACH * (1 + 1e-9))
    open_balls, checked = [(-24.0, 24.0)], 0
    while open_balls:
        first, last = open_balls.pop()
        checked += 1
        assert checked < 50_000
        try:
            value = change(flint.arb((first + last) / 2, (last - first) / 2), ratios)
        except ZeroDivisionError:
            value = flint.arb(0, 1)
        if not abs(value) < 0.5:
            open_balls += [(first, (first + last) / 2), ((first + last) / 2, last)]
    # Beyond |v| = 24 it is less than 4|v|⁶·e^(-2|v|), which decreases.
    assert 4 * 24.0**6 * math.exp(-48) < 1e-11
    for bound, own in zip(elementwise.GELU_BY_TANH, elementwise.GELU_TANH, strict=True):
        assert RATIO * REACH / 2 <= abs(bound - own) <= 1e-6
    # And the derivative is that of the slope.
    step = flint.arb(1e-20)
    quotient = (slope(flint.arb(1.1), ratio + step) - slope(flint.arb(1.1), ratio)) / step
    assert abs(quotient - change(flint.arb(1.1), ratio)) < 1e-15


def test_only_the_numbers_of_gelu_are_taken_for_it():
    for factor in (1.0, 3.0, 1e-3):
        assert is_tanh_gelu((0.0, SCALE * factor, 0.0, SCALE * CUBIC * factor**3))
    assert is_tanh_gelu((0.0, 0.797885, 0.0, 0.797885 * CUBIC))
    assert not is_tanh_gelu((0.0, SCALE, 0.0, SCALE * CUBIC * (1 + 2 * REACH)))
    assert not is_tanh_gelu((1e-9, SCALE, 0.0, SCALE * CUBIC))
    assert not is_tanh_gelu((0.0, SCALE, 1e-9, SCALE * CUBIC))
    assert not is_tanh_gelu((0.0, -SCALE, 0.0, -SCALE * CUBIC))
    assert not is_tanh_gelu((0.0, math.inf, 0.0, math.inf))


WRITTEN = {
    "pow": lambda x: 0.5 * x * (1 + torch.tanh(SCALE * (x + CUBIC * torch.pow(x, 3.0)))),
    "factored": lambda x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + CUBIC * x * x))),
    "products": lambda x: x * (0.5 * (1 + torch.tanh(0.79788456 * (x + CUBIC * x * x * x)))),
    "of a multiple": lambda x: (3 * x) * (1 + torch.tanh(SCALE * (3 * x + CUBIC * (3 * x) ** 3))) / 6,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_written_out_it_has_the_constant_of_gelu(name, tmp_path):
    """Finite."""
    model = function(WRITTEN[name])
    found = assert_constant(model, (5, 6), 1.128994, scale=1.4)
    assert found.upper >= elementwise.GELU_TANH[1]
    path = exported(model, (5, 6), tmp_path / "model.pt2")
    assert found.upper == gramcert.audit(path, (5, 6)).upper


OTHERS = {
    "another scale": lambda x: 0.5 * x * (1 + torch.tanh(0.79 * (x + CUBIC * x**3))),
    "another power": lambda x: 0.5 * x * (1 + torch.tanh(SCALE * (x + CUBIC * x**4))),
    "another offset": lambda x: 0.5 * x * (2 + torch.tanh(SCALE * (x + CUBIC * x**3))),
    "another value": lambda x: 0.5 * x.flip(1) * (1 + torch.tanh(SCALE * (x + CUBIC * x**3))),
    "shifted": lambda x: 0.5 * (x + 1) * (1 + torch.tanh(SCALE * (x + CUBIC * x**3))),
    "a constant inside": lambda x: 0.5 * x * (1 + torch.tanh(SCALE * (x + CUBIC * x**3 + 1e-3))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_unbounded(name):
    assert gramcert.audit(Function(OTHERS[name]), (4,)).upper == math.inf
