"""What a unit adds to a minorant: never above the truth, in exact or ball arithmetic, and nearly it."""

import itertools
import math
from fractions import Fraction

import flint
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramcert.minorants.layout import _slope
from gramcert.minorants.units import Problem, Slope, largest, lowest
from gramcert.operators.elementwise import TABLE, computing, leaky
from gramcert.operators.graph import Nonlinear
from gramcert.rounding import up

EPS = Fraction(torch.finfo(torch.float64).eps)
# Roundings that a proof may count for one unit, and what it may take off for underflow.
ROUNDINGS, LOST = 200 * EPS, Fraction(2) ** -390

scales = st.integers(-8, 8).map(lambda power: 10.0**power)
signed = st.builds(lambda size, scale: size * scale, st.floats(-1, 1), scales)
positive = st.builds(lambda size, scale: size * scale, st.floats(0.1, 1), scales)


@pytest.fixture(autouse=True)
def _precision():
    before, flint.ctx.prec = flint.ctx.prec, 400
    yield
    flint.ctx.prec = before


def few(share):
    return settings(max_examples=max(8, settings.default.max_examples // share))


# Piecewise linear functions by their definition, as (break, slope behind it) from the left, through (0, φ(0)).
def clamp(low, high):
    return lambda x: min(max(x, low), high)


def with_slope(slope):
    return lambda x: x if x > 0 else Fraction(slope) * x


FLOAT32 = float(torch.tensor(0.01, dtype=torch.float32))
PIECEWISE = {
    "relu": ("relu", {}, [lambda x: max(x, Fraction(0))], [0.0]),
    "relu6": ("relu6", {}, [clamp(Fraction(0), Fraction(6))], [0.0, 6.0]),
    "hardtanh": ("hardtanh", {}, [clamp(Fraction(-1), Fraction(1))], [-1.0, 1.0]),
    "hardtanh, other limits": (
        "hardtanh",
        {"min_val": 0.375, "max_val": 2.5},
        [clamp(Fraction(3, 8), Fraction(5, 2))],
        [0.375, 2.5],
    ),
    "clamp from above": ("clamp", {"max": -0.5}, [lambda x: min(x, Fraction(-1, 2))], [-0.5]),
    "abs": ("abs", {}, [abs], [0.0]),
    "identity": ("identity", {}, [lambda x: x], []),
    "leaky": ("leaky_relu", {"negative_slope": 0.01}, [with_slope(0.01), with_slope(FLOAT32)], [0.0]),
    "leaky, turned": ("leaky_relu", {"negative_slope": -1.5}, [with_slope(-1.5)], [0.0]),
}


@st.composite
def problems(draw, constant, count=3):
    """Of one pair with a few units."""
    rows = [[draw(signed) for _ in range(count)] for _ in range(3)]
    centre, c, g = (torch.tensor([row], dtype=torch.float64) for row in rows)
    if draw(st.booleans()):
        g = c * constant * draw(st.floats(0, 1))
    d = torch.tensor([[draw(st.one_of(st.just(0.0), positive))]], dtype=torch.float64)
    extra = torch.tensor([[draw(positive)]], dtype=torch.float64)
    return Problem(centre, c, g, d, extra, up(constant * constant))


def units(problem):
    """The numbers of each unit, exactly, with λ = d·s² + e behind d."""
    d, extra = Fraction(float(problem.d)), Fraction(float(problem.extra))
    shared = (d, d * Fraction(problem.steepest) + extra, extra)
    for entry in range(problem.c.shape[1]):
        own = [Fraction(float(part[0, entry])) for part in (problem.centre, problem.c, problem.g)]
        yield entry, (*own, *shared)


def left(function, numbers, z):
    """h at a place z."""
    centre, c, g, d, total, _ = numbers
    rise, step = function(z) - function(centre), z - centre
    return c * rise - d * rise**2 / 2 - g * step + total * step**2 / 2


def least(function, breaks, numbers):
    """The exact minimum of h, where it is, from the parabola of each piece."""
    centre, c, g, d, total, _ = numbers
    inner = [Fraction(place) for place in breaks]
    ends = [None, *inner, None]
    found = []
    for first, last in itertools.pairwise(ends):
        # Two points of the piece give its slope.
        one = first if first is not None else (last - 1 if last is not None else Fraction(0))
        two = last if last is not None else one + 1
        slope = (function(two) - function(one)) / (two - one)
        offset = function(one) - slope * one - function(centre)
        place = (g - c * slope + total * centre + d * slope * offset) / (total - d * slope**2)
        place = max(place, first) if first is not None else place
        place = min(place, last) if last is not None else place
        found.append((left(function, numbers, place), place))
    return min(found)


def allowed(function, numbers, z, steepest):
    """What a proof may lose to the rounding of numbers as large as these."""
    centre, c, g, d, total, extra = numbers
    rises, steps = abs(function(z)) + abs(function(centre)) + 16, abs(z) + abs(centre)
    amount = abs(c) * rises + abs(g) * steps + (total * steps**2 + d * rises**2) / 2
    change = abs(c) * steepest + d * steepest * rises + abs(g) + total * steps
    return ROUNDINGS * amount + (ROUNDINGS * change) ** 2 / (2 * extra) + LOST


@pytest.mark.parametrize("kind", PIECEWISE)
@few(4)
@given(data=st.data())
def test_piecewise_units_are_at_their_minimum(kind, data):
    """Below the exact one, and by no more than rounding; for several functions below that of each."""
    name, parameters, functions, breaks = PIECEWISE[kind]
    slopes, local = TABLE[name].slopes_for(parameters), TABLE[name].local_for(parameters)
    constant = max(map(abs, slopes))
    problem = data.draw(problems(constant))
    low = lowest(problem, slopes, local, None, is_proof=True)
    assert low.shape == problem.c.shape
    for entry, numbers in units(problem):
        found = Fraction(float(low[0, entry]))
        truth = [least(function, breaks, numbers) for function in functions]
        lowest_truth, place = min(truth)
        room = max(allowed(function, numbers, where, constant) for function, (_, where) in zip(functions, truth))  # noqa: B905
        assert lowest_truth - room <= found <= lowest_truth <= 0
        for other in (place + 1, -place, *map(Fraction, breaks), numbers[0] + Fraction(data.draw(signed))):
            assert all(found <= left(function, numbers, other) for function in functions)


@few(4)
@given(data=st.data())
def test_prelu_has_a_slope_for_each_channel(data):
    weight = torch.tensor([-0.7, 0.25, 1.5], dtype=torch.float64)
    slopes, local = TABLE["prelu"].slopes_for({"weight": weight}), TABLE["prelu"].local_for({"weight": weight})
    problem = data.draw(problems(1.5))
    low = lowest(problem, slopes, local, None, is_proof=True)
    for entry, numbers in units(problem):
        function = with_slope(float(weight[entry]))
        truth, place = least(function, [0.0], numbers)
        assert truth - allowed(function, numbers, place, 2) <= Fraction(float(low[0, entry])) <= truth


def test_without_a_proof_it_is_the_same_number():
    """What a search sees is what the proof finds, up to float32."""
    torch.manual_seed(0)
    parts = [torch.randn(5, 40, dtype=torch.float64) for _ in range(3)]
    d, extra = torch.rand(5, 1, dtype=torch.float64), 0.5 + torch.rand(5, 1, dtype=torch.float64)
    problem = Problem(*parts, d, extra, 1.0)
    narrow = Problem(*(part.float() for part in (*parts, d, extra)), 1.0)
    for name in ("relu", "relu6", "abs"):
        slopes, local = TABLE[name].slopes_for({}), TABLE[name].local_for({})
        found = lowest(narrow, slopes, local, None, is_proof=False)
        proved = lowest(problem, slopes, local, None, is_proof=True)
        torch.testing.assert_close(found.double(), proved, rtol=0, atol=100 * torch.finfo(torch.float32).eps)


def exact(value):
    return flint.arb(flint.fmpq(*Fraction(value).as_integer_ratio()))


def sigmoid(x):
    return 1 / (1 + (-x).exp()) if x >= 0 else x.exp() / (1 + x.exp())


def softplus(x):
    return x.max(0) + (1 + (-abs(x)).exp()).log()


CURVED = {
    "tanh": lambda x: 2 * sigmoid(2 * x) - 1,
    "sigmoid": sigmoid,
    "softplus": softplus,
    "gelu": lambda x: x * (1 + (x / flint.arb(2).sqrt()).erf()) / 2,
    "silu": lambda x: x * sigmoid(x),
    "elu": lambda x: x.max(0) + x.min(0).exp() - 1,
    "softsign": lambda x: x / (1 + abs(x)),
    "sin": lambda x: x.sin(),
    "mish": lambda x: x * (2 * sigmoid(2 * softplus(x)) - 1),
}


def slope_at(name, z):
    """As a proof has it."""
    slopes = TABLE[name].slopes_for({})
    operation = Nonlinear(1.0, name, slopes, compute=computing(name, {}), local=TABLE[name].local_for({}))
    return Slope(*_slope(operation, z))


@pytest.mark.parametrize("name", CURVED)
@few(4)
@given(data=st.data())
def test_curved_units_are_below_balls(name, data):
    slopes, function = TABLE[name].slopes_for({}), CURVED[name]
    problem = data.draw(problems(max(map(abs, slopes)), count=1))
    if data.draw(st.booleans()):  # where the curvature has something to say
        centre = problem.centre.clamp(-4, 4)
        c = problem.extra * data.draw(st.floats(-1, 1))
        g = c * slope_at(name, centre).value
        problem = Problem(centre, c, g, problem.d, problem.extra, problem.steepest)
    low = float(lowest(problem, slopes, TABLE[name].local_for({}), slope_at(name, problem.centre), is_proof=True))
    ((_, numbers),) = units(problem)
    centre, c, g, d, total, extra = numbers
    best = [(g - c * Fraction(slope)) / extra for slope in (*slopes, float(slope_at(name, problem.centre).value))]
    steps = [*best, *(Fraction(sign * 10.0**power) for power in range(-8, 9, 2) for sign in (1, -1)), Fraction(0)]
    at_centre = function(exact(centre))
    for step in steps:
        rise = function(exact(centre + step)) - at_centre
        value = exact(c) * rise - exact(d) * rise * rise / 2 - exact(g * step - total * step**2 / 2)
        assert value > exact(low)


@pytest.mark.parametrize("name", [name for name in CURVED if name != "softplus"])  # whose jump hides its slope
def test_curved_units_are_nearly_at_their_minimum(name):
    """With the slope at the centre next to nothing is lost; with another one what the parabola at the centre loses."""
    z = torch.linspace(-3, 3, 61, dtype=torch.float64)[None]
    at, slopes = slope_at(name, z), TABLE[name].slopes_for({})
    extra = torch.full((1, 1), 10.0, dtype=torch.float64)
    zero, c = torch.zeros_like(extra), torch.ones_like(z)
    curvature = TABLE[name].local_for({})
    for away in (0.0, 0.25):
        problem = Problem(z, c, c * at.value + away, zero, extra, 1.0)
        low = lowest(problem, slopes, curvature, at, is_proof=True)
        room = 10.0 + min(0.0, curvature.least)
        off = float(at.off.max()) + 1e3 * float(EPS)
        assert off < 2.0**-16
        assert bool((low >= -((away + off) ** 2) / (2 * room) * (1 + 1e3 * float(EPS)) - 1e-300).all())
        assert bool((low <= -(away**2) / 20.0).all() if away else (low <= 0).all())


@pytest.mark.parametrize("gap", [1e-3, 0.0, -1e-3])
def test_where_the_bend_takes_all_of_the_room_slopes_are_left(gap):
    """At e = b and below, the parabola of the curvature says nothing."""
    z, c = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    curvature = TABLE["tanh"].local_for({})
    extra = torch.full_like(c, -curvature.least + gap)
    problem = Problem(z, c, c.clone(), torch.zeros_like(c), extra, 1.0)
    low = float(lowest(problem, (0.0, 1.0), curvature, slope_at("tanh", z), is_proof=True))
    by_slopes = -1 / (2 * float(extra))
    if gap > 0:
        assert by_slopes < low <= 0
    else:
        assert low == pytest.approx(by_slopes, rel=1e3 * float(EPS))


@few(2)
@given(data=st.data())
def test_slopes_alone(data):
    """-(cD - g)²/2e at the worse of both slopes, which functions with these slopes come as near to as they like."""
    slopes = leaky(0.01)
    problem = data.draw(problems(1.0))
    low = lowest(problem, slopes, None, None, is_proof=True)
    for entry, numbers in units(problem):
        _, c, g, _, _, extra = numbers
        steepest = max(abs(c * Fraction(slope) - g) for slope in slopes)
        found, room = Fraction(float(low[0, entry])), ROUNDINGS * (abs(c) + abs(g))
        assert -((steepest + room) ** 2) * (1 + ROUNDINGS) / (2 * extra) - LOST <= found <= -(steepest**2) / (2 * extra)
        for function in (with_slope(slopes[0]), lambda x: x):
            assert found <= least(function, [0.0], numbers)[0]


@st.composite
def pools(draw):
    """A window of up to four entries, and the distance of the two largest."""
    entries = [draw(signed) for _ in range(draw(st.integers(1, 4)))]
    if len(entries) > 1 and draw(st.booleans()):
        entries[1] = entries[0]
    top = sorted(entries, reverse=True)
    gap = math.nextafter(top[0] - top[1], 0.0) if len(top) > 1 else math.inf
    return entries, gap


@few(1)
@given(data=st.data())
def test_the_largest_of_a_window(data):
    """c·Δy - ½dΔy² - gΔ_t + ½(d + e)ΣΔ² is nowhere below; and it is met where the bound says so."""
    entries, gap = data.draw(pools())
    c, g = data.draw(signed), data.draw(signed)
    d, extra = data.draw(st.one_of(st.just(0.0), positive)), data.draw(positive)
    numbers = (torch.tensor([[number]], dtype=torch.float64) for number in (c, c, g, d, extra))
    low = Fraction(float(largest(Problem(*numbers, 1.0), torch.tensor([[gap]], dtype=torch.float64), is_proof=True)))
    z = [Fraction(entry) for entry in entries]
    top = max(range(len(z)), key=lambda place: z[place])
    c, g, d, extra = map(Fraction, (c, g, d, extra))

    def value(step):
        rise = max(a + b for a, b in zip(z, step, strict=True)) - z[top]
        squares = sum(part**2 for part in step)
        return c * rise - d * rise**2 / 2 - g * step[top] + (d + extra) * squares / 2

    tried = [[Fraction(0)] * len(z)]
    for curvature in (extra, d + extra):
        for place in range(len(z)):
            step = [Fraction(0)] * len(z)
            step[top] = (g - c) / curvature if place == top else g / curvature
            if place != top:
                step[place] = -c / curvature
            tried.append(step)
    tried += [[Fraction(data.draw(signed)) for _ in z] for _ in range(3)]
    values = [value(step) for step in tried]
    assert low <= min(values)
    assert low <= 0
    if d == 0 and len(z) == 1:
        room = ROUNDINGS * (abs(c) + abs(g))
        assert -((abs(c - g) + room) ** 2) * (1 + ROUNDINGS) / (2 * extra) - LOST <= low
    if d == 0 and c < 0 and gap == 0 and g <= -c:  # another entry of the window takes over at once
        assert min(values) - ROUNDINGS * (c**2 + g**2) / extra - LOST <= low


def test_a_window_of_one_is_the_entry_itself():
    """Without another entry the gap is infinite, whatever the sign of c."""
    for c in (-1.0, 1.0):
        parts = (torch.full((1, 1), value, dtype=torch.float64) for value in (c, c, c, 0.0, 1.0))
        low = largest(Problem(*parts, 1.0), torch.full((1, 1), math.inf, dtype=torch.float64), is_proof=True)
        assert -ROUNDINGS <= Fraction(float(low)) <= 0


def test_a_wide_gap_is_worth_something():
    """Where the next entry is far below, a negative slope passes as if it were alone; where it is near, it does not."""
    parts = [torch.full((1, 1), value, dtype=torch.float64) for value in (-1.0, -1.0, -1.0, 0.0, 1.0)]
    wide, near = (torch.full((1, 1), gap, dtype=torch.float64) for gap in (1.5, 0.25))
    assert float(largest(Problem(*parts, 1.0), wide, is_proof=True)) >= -float(ROUNDINGS)
    assert float(largest(Problem(*parts, 1.0), near, is_proof=True)) == pytest.approx(-0.75, rel=float(ROUNDINGS))
