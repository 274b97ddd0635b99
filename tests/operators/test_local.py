"""What is known of functions near a point: second derivatives in ball arithmetic, pieces exactly, windows by torch."""

import math
from fractions import Fraction

import flint
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gramcert.operators.elementwise import TABLE, Curvature, Pieces
from gramcert.operators.graph import BadModel, Builder
from gramcert.operators.windows import adaptive_max, max_pool

# Of balls with 160 bits, where a bound is met exactly.
ROUNDED = flint.arb(2) ** -100
# Around 0, where an even second derivative is met exactly.
NEAR = 2.0**-7
END = 40.0


@pytest.fixture(autouse=True)
def _precision():
    before, flint.ctx.prec = flint.ctx.prec, 160
    yield
    flint.ctx.prec = before


def sigmoid(x):
    return 1 / (1 + (-x).exp())


def tanh(x):
    return 1 - 2 / ((2 * x).exp() + 1)


def twice_inside(x):
    """Of the hyperbolic tangent in the approximation of GELU."""
    return 2 * (2 / flint.arb.pi()).sqrt() * (x + flint.arb("0.044715") * x * x * x)


def below(x):
    """log(1 + e^x), where its tail is on the left; it is x + below(-x), too."""
    return (1 + x.exp()).log()


# Functions of a series, or one for each side of 0, written so that wide balls stay narrow.
CURVED = {
    "tanh": (tanh, {}),
    "sigmoid": (sigmoid, {}),
    "softplus": ((below, lambda x: x + below(-x)), {}),
    "softplus, beta 2": ((lambda x: below(2 * x) / 2, lambda x: x + below(-2 * x) / 2), {"beta": 2.0}),
    "gelu": (lambda x: x * (1 + (x / flint.arb(2).sqrt()).erf()) / 2, {}),
    "gelu_tanh": (
        (lambda x: x * (1 - 1 / (1 + twice_inside(x).exp())), lambda x: x / (1 + (-twice_inside(x)).exp())),
        {},
    ),
    "silu": (lambda x: x * sigmoid(x), {}),
    "mish": (lambda x: x * tanh((1 + x.exp()).log()), {}),
    "erf": (lambda x: x.erf(), {}),
    "softsign": ((lambda x: x / (1 - x), lambda x: x / (1 + x)), {}),
    "log_sigmoid": ((lambda x: x - below(x), lambda x: -below(-x)), {}),
    "tanhshrink": (lambda x: x - tanh(x), {}),
    "elu": ((lambda x: x.exp() - 1, lambda x: x), {}),
    "celu": ((lambda x: x.exp() - 1, lambda x: x), {}),
    "celu, alpha ½": ((lambda x: ((2 * x).exp() - 1) / 2, lambda x: x), {"alpha": 0.5}),
    "sin": (lambda x: x.sin(), {}),
    "cos": (lambda x: x.cos(), {}),
    "atan": (lambda x: x.atan(), {}),
    "asinh": ((lambda x: -((1 + x * x).sqrt() - x).log(), lambda x: ((1 + x * x).sqrt() + x).log()), {}),
}
# Whose second derivative is even, and largest or least at 0.
EVEN = {"softplus": 1, "softplus, beta 2": 1, "silu": 1, "log_sigmoid": -1}
# Whose second derivative is a sine itself, and takes its bounds ever again.
PERIODIC = ("sin", "cos")


def named(case):
    return case.partition(",")[0]


def curvature(case):
    return TABLE[named(case)].local_for(CURVED[case][1])


def derivatives(function, ball, count=3):
    """From the second one on."""
    found = function(flint.arb_series([ball, 1], prec=count + 2))
    return [found[order] * math.factorial(order) for order in range(2, count + 2)]


def sides(case):
    """Functions and where they hold."""
    function = CURVED[case][0]
    return [(function, -END, END)] if callable(function) else [(function[0], -END, 0.0), (function[1], 0.0, END)]


def test_all_that_bend_are_here():
    bending = {name for name, entry in TABLE.items() if isinstance(entry.local_for({}), Curvature)}
    assert bending == set(map(named, CURVED))


@pytest.mark.parametrize("case", CURVED)
def test_second_derivatives_stay_within_their_bounds(case):
    """On balls that cover all from -40 to 40, by their values or by those at the middle and the next derivative."""
    bounds = curvature(case)
    least, most = (flint.arb(bound) for bound in (bounds.least, bounds.most))
    for function, first, last in sides(case):
        parts = round(4 * (last - first))
        open_balls, checked = [(first + part / 4, first + (part + 1) / 4) for part in range(parts)], 0
        while open_balls:
            low, high = open_balls.pop()
            checked += 1
            assert checked < 20_000, (low, high)
            middle, radius = (low + high) / 2, (high - low) / 2
            if case in EVEN and abs(middle) + radius <= NEAR:
                continue
            if case in PERIODIC:
                continue
            ball = flint.arb(middle, radius)
            if not is_within(derivatives(function, ball)[0], least, most):
                second = derivatives(function, flint.arb(middle))[0]
                around = second + derivatives(function, ball)[1] * flint.arb(0, radius)
                if not is_within(around, least, most):
                    open_balls += [(low, middle), (middle, high)]
    if case in EVEN:  # it is at its bound at 0, flat there, and falls on both sides
        sign, bound = EVEN[case], bounds.most if EVEN[case] > 0 else bounds.least
        second, third, _ = derivatives(function, flint.arb(0))
        assert abs(second - bound) <= ROUNDED
        assert abs(third) <= ROUNDED
        assert sign * derivatives(function, flint.arb(0, NEAR))[2] < 0
    if case in PERIODIC:
        assert (bounds.least, bounds.most) == (-1, 1)


def is_within(ball, least, most):
    return bool(ball <= most + ROUNDED) and bool(ball >= least - ROUNDED)


@pytest.mark.parametrize("case", CURVED)
def test_bounds_of_second_derivatives_are_nearly_met(case):
    """Within a thousandth of their distance."""
    bounds, found = curvature(case), []
    for function, first, last in sides(case):
        first, last = max(first, -12.0), min(last, 12.0)
        places = [first + (last - first) * k / 1200 for k in range(1201)]
        found += [float(derivatives(function, flint.arb(place))[0].mid()) for place in places]
    slack = 1e-3 * min(bounds.most - bounds.least, abs(bounds.most) or math.inf, abs(bounds.least) or math.inf)
    assert bounds.most - slack <= max(found)
    assert min(found) <= bounds.least + slack


@pytest.mark.parametrize("case", CURVED)
def test_these_are_the_functions_of_torch(case):
    """Otherwise all of the above would be about others."""
    module = TABLE[named(case)].module
    chosen = {"gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "erf": torch.erf, "sin": torch.sin}
    chosen |= {"cos": torch.cos, "atan": torch.atan, "asinh": torch.asinh}
    action = chosen.get(case) or module(**CURVED[case][1])
    for function, first, last in sides(case):
        places = torch.linspace(max(first, -9.0), min(last, 9.0), 50, dtype=torch.float64)
        for place, value in zip(places.tolist(), action(places).tolist(), strict=True):
            exact = function(flint.arb_series([flint.arb(place), 1], prec=2))[0]
            assert abs(float(exact.mid()) - value) <= 1e3 * torch.finfo(torch.float64).eps * (1 + abs(value))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("elu", {"alpha": 1.5}),
        ("elu", {"scale": 1.25}),
        ("selu", {}),
        ("celu", {"alpha": 0.3}),  # which a network in float32 rounds
        ("softplus", {"beta": 0.7}),
        ("clamp", {"min": 0.1}),
        ("clamp", {"min": 1.0, "max": -1.0}),
        ("hardtanh", {"min_val": math.nan}),
        ("threshold", {}),
        ("hardswish", {}),
    ],
)
def test_nothing_is_said_of_functions_that_jump_in_their_slope_or_are_rounded(name, parameters):
    assert TABLE[name].local_for(parameters) is None


# Pieces

limits = st.sampled_from([-8.0, -1.0, -0.375, 0.0, 0.5, 2.0, 6.0])
points = st.one_of(limits, st.floats(-1e8, 1e8), st.floats(-10, 10), st.sampled_from([5e-324, -5e-324, 1e-300]))
PIECEWISE = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "clamp": torch.clamp,
    "abs": torch.abs,
    "leaky_relu": F.leaky_relu,
    "prelu": lambda x, weight: F.prelu(x, torch.as_tensor(weight, dtype=x.dtype)),
}


def test_all_that_have_pieces_are_here():
    found = {name for name, entry in TABLE.items() if isinstance(entry.local_for({}), tuple)}
    assert found == set(PIECEWISE)


@st.composite
def with_pieces(draw):
    """Name, parameters."""
    name = draw(st.sampled_from(sorted(PIECEWISE)))
    low, high = sorted([draw(limits), draw(limits)])
    parameters = {}
    if name == "hardtanh":
        assume(low < high)
        parameters = {"min_val": low, "max_val": high}
    if name == "clamp":
        parameters = draw(st.sampled_from([{"min": low, "max": high}, {"min": low}, {"max": high}]))
    if name == "leaky_relu":
        parameters = {"negative_slope": draw(st.one_of(st.floats(-2, 2), st.just(0.01)))}
    if name == "prelu":
        parameters = {"weight": draw(st.floats(-2, 2, width=32))}
    return name, parameters


def value(pieces, x):
    """Exactly, of the piece on either side."""
    place = sum(x > Fraction(end) for end in pieces.breaks)
    return Fraction(float(pieces.slopes[place])) * x + Fraction(pieces.offsets[place])


@settings(max_examples=2 * settings.default.max_examples)
@given(with_pieces(), points)
def test_pieces_are_the_function(case, x):
    """In float64 and float32 one of them is what torch computes, which rounds one product at most."""
    name, parameters = case
    known = TABLE[name].local_for(parameters)
    for dtype in (torch.float64, torch.float32):
        at = torch.tensor([x], dtype=dtype)
        if dtype == torch.float32 and 0 < abs(float(at)) < 1e-30:
            continue  # products below the least normal number, which need not be rounded like others
        found = PIECEWISE[name](at, **parameters)
        truth = [float(value(pieces, Fraction(float(at)))) for pieces in known]
        assert float(found) in [float(torch.tensor(one, dtype=dtype)) for one in truth]


@given(with_pieces())
def test_pieces_are_continuous(case):
    for pieces in TABLE[case[0]].local_for(case[1]):
        assert isinstance(pieces, Pieces)
        assert len(pieces.slopes) == len(pieces.offsets) == len(pieces.breaks) + 1
        assert list(pieces.breaks) == sorted(pieces.breaks)
        for place, end in enumerate(map(Fraction, pieces.breaks)):
            left, right = (
                Fraction(float(pieces.slopes[k])) * end + Fraction(pieces.offsets[k]) for k in (place, place + 1)
            )
            assert left == right


# Windows

POOLS = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
ADAPTIVE = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)


def assert_reads(x, node, action):
    """Each place in turn above all others: the windows that show it are those which read it."""
    count = math.prod(x.shape)
    index = node.operation.windows()
    lit = action(-torch.ones(count, *x.shape[1:]) + 2 * torch.eye(count).reshape(count, *x.shape[1:]))
    assert tuple(lit.shape[1:]) == node.shape[1:]
    reads = torch.zeros(len(index), count + 1, dtype=torch.bool)
    reads[torch.arange(len(index))[:, None], index] = True
    assert torch.equal(reads[:, :count].T, lit.reshape(count, -1) == 1)


@st.composite
def geometries(draw):
    axes = draw(st.integers(1, 3))
    top = (9, 5, 3)[axes - 1]
    taps = [draw(st.integers(1, 3)) for _ in range(axes)]
    return {
        "shape": (1, draw(st.integers(1, 2)), *(draw(st.integers(1, top)) for _ in range(axes))),
        "taps": taps,
        "stride": [draw(st.integers(1, 3)) for _ in range(axes)],
        "padding": [draw(st.integers(0, tap // 2)) for tap in taps],
        "dilation": [draw(st.integers(1, 2)) for _ in range(axes)],
        "round_up": draw(st.booleans()),
    }


@given(geometries())
def test_windows_are_what_max_pooling_reads(case):
    shape, taps, stride, padding, dilation = (case[name] for name in ("shape", "taps", "stride", "padding", "dilation"))

    def action(x):
        return POOLS[len(taps) - 1](x, taps, stride, padding, dilation, case["round_up"])

    b = Builder()
    x = b.input("x", shape)
    try:
        action(torch.zeros(shape))
        y = max_pool(b, x, taps, stride, [(p, p) for p in padding], dilation, round_up=case["round_up"])
    except (RuntimeError, BadModel):  # there is no window, or none without what is beyond the padding
        assume(False)
    assert_reads(x, b.node(y), action)


@settings(max_examples=max(8, settings.default.max_examples // 2))
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data())
def test_windows_are_what_adaptive_max_pooling_reads(sizes, data):
    outputs = [data.draw(st.integers(1, size)) for size in sizes]
    b = Builder()
    x = b.input("x", (1, 2, *sizes))
    assert_reads(x, b.node(adaptive_max(b, x, outputs)), lambda x: ADAPTIVE[len(sizes) - 1](x, outputs))
