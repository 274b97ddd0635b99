"""The extrema of slopes again, by ball arithmetic: no point of the line is above, and one is at the constant."""

import math

import pytest
import torch

from gramcert.operators import elementwise

flint = pytest.importorskip("flint")

# Around the extrema, where balls alone would not come to an end.
NEAR = 2.0**-6


@pytest.fixture(autouse=True)
def _precision():
    before, flint.ctx.prec = flint.ctx.prec, 160
    yield
    flint.ctx.prec = before


def tanh(t):
    return 1 - 2 / ((2 * t).exp() + 1)


def sigmoid(t):
    return 1 / (1 + (-t).exp())


def silu(t):
    return sigmoid(t) * (1 + t * (1 - sigmoid(t)))


def gelu(t):  # in t = x/√2
    return (1 + t.erf()) / 2 + t * (-t * t).exp() / flint.arb.pi().sqrt()


def gelu_tanh(t):
    scale, cubic = (2 / flint.arb.pi()).sqrt(), flint.arb("0.044715")
    gate = tanh(scale * (t + cubic * t * t * t))
    return (1 + gate) / 2 + t * (1 - gate * gate) * scale * (1 + 3 * cubic * t * t) / 2


def mish(t):
    gate = tanh((1 + t.exp()).log())
    return gate + t * (1 - gate * gate) * sigmoid(t)


CASES = {
    "SILU": (silu, 2.3993572805154677, -2.3993572805154677),
    "GELU": (gelu, 1.0, -1.0),
    "GELU_TANH": (gelu_tanh, 1.4185040087908283, -1.4185040087908283),
    "MISH": (mish, 1.4905711794854285, -2.2563763963607931),
}


def series(slope, ball):
    """The slope and its first two derivatives on a ball."""
    found = slope(flint.arb_series([ball, 1], prec=3))
    return found[0], found[1], 2 * found[2]


@pytest.mark.parametrize("name", CASES)
def test_slopes_stay_between_their_extrema_and_reach_them(name):
    slope, highest, lowest = CASES[name]
    least, largest = getattr(elementwise, name)
    for place, bound, sign in ((highest, largest, 1), (lowest, least, -1)):
        value, derivative, _ = series(slope, flint.arb(place))
        assert sign * value <= sign * bound <= float(sign * value.mid()) + 8 * 2.0**-52
        # The slope is concave (convex) here, so it stays below (above) its tangent.
        for part in range(-32, 32):
            middle = flint.arb(place) + (part + 0.5) / 32 * NEAR
            assert sign * series(slope, middle + flint.arb(0, NEAR / 64))[2] < 0
        assert sign * value + abs(derivative) * NEAR <= sign * bound
    open_balls, checked = [(-30.0, 30.0)], 0  # beyond, the slope is within 1e-9 of 0 or 1
    while open_balls:
        first, last = open_balls.pop()
        checked += 1
        assert checked < 50_000
        middle, radius = (first + last) / 2, (last - first) / 2
        if min(abs(middle - highest), abs(middle - lowest)) + radius <= NEAR:
            continue
        value = slope(flint.arb(middle, radius))
        if not (value < largest and value > least):
            open_balls += [(first, middle), (middle, last)]


def test_hardswish_and_hardsigmoid_take_a_sixth_as_torch_does():
    sixth = float(torch.tensor(1 / 6, dtype=torch.float32))
    assert sixth == elementwise.SIXTH
    assert (-3 * sixth, 9 * sixth) == elementwise.HARDSWISH
    assert elementwise.ERF[1] >= math.nextafter(2 / math.sqrt(math.pi), 2)
