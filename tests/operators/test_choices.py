"""Choices by a comparison: functions of the table have their constant, what only looks like one has none."""

import math

import pytest
import torch
import torch.nn.functional as F

import gramcert
from auditing_networks import Function, expect
from gramcert.auditing.reading import Source
from gramcert.operators.elementwise import TABLE
from gramcert.operators.graph import Nonlinear
from tiny_onnx import Tiny, number, one

# Each with what it is: a function of the table, and its parameters.
CHOICES = {
    "larger": (lambda x: torch.where(x > 0.8, x, 0.8), "clamp", {"min": 0.8}),
    "larger, not strictly": (lambda x: torch.where(x >= 0.8, x, 0.8), "clamp", {"min": 0.8}),
    "larger, the other way round": (lambda x: torch.where(x <= 0.8, 0.8, x), "clamp", {"min": 0.8}),
    "smaller": (lambda x: torch.where(x < -0.3, x, -0.3), "clamp", {"max": -0.3}),
    "the number first": (lambda x: torch.where(torch.tensor([0.5], dtype=x.dtype) > x, 0.5, x), "clamp", {"min": 0.5}),
    "rectified after a shift": (lambda x: torch.where(x > 0.5, x - 0.5, 0.0), "clamp", {"min": 0.0}),
    "softplus": (lambda x: torch.where(x > 20, x, F.softplus(x)), "softplus", {}),
    "softplus of one multiple": (
        lambda x: (lambda t: torch.where(t > 25, x, F.softplus(t) / 3))(3 * x),
        "softplus",
        {"beta": 3.0},
    ),
    "softplus, times a half": (
        lambda x: (lambda t: torch.where(t > 25, x, F.softplus(t) * 0.5))(2 * x),
        "softplus",
        {"beta": 2.0},
    ),
    "softshrink": (
        lambda x: torch.where(x.abs() > 0.8, x - x.sign() * 0.8, x * 0.0),
        "softshrink",
        {"lambd": 0.8},
    ),
    "softshrink and zero": (lambda x: torch.where(x.abs() <= 1, 0.0, x - x.sign()), "softshrink", {"lambd": 1.0}),
    "softshrink in halves": (
        lambda x: torch.where(x < -0.5, x + 0.5, 0.0) + torch.where(x > 0.5, x - 0.5, 0.0),
        "softshrink",
        {"lambd": 0.5},
    ),
    "softshrink of clamps": (lambda x: (x - 0.5).relu() + (x + 0.5).clamp(max=0), "softshrink", {"lambd": 0.5}),
    "log of a sigmoid": (lambda x: x.sigmoid().log(), "log_sigmoid", {}),
}


def nonlinear_in(model, shape=(4,)):
    """The one function of a model that its output needs."""
    graph = Source.of("test", model).graph("test", shape).needed()
    (found,) = (node.operation for node in graph.nodes.values() if isinstance(node.operation, Nonlinear))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CHOICES)
def test_choices_that_are_functions_of_the_table(name, dtype):
    function, known, numbers = CHOICES[name]
    x = torch.cat([torch.linspace(-60, 60, 4801), torch.tensor([0.8, -0.8, 0.5, -0.5, 1.0, -1.0])]).to(dtype)
    # A tensor that nothing uses says in which type the model runs.
    model = Function(lambda x, _: function(x), _=torch.ones((), dtype=dtype))
    found = nonlinear_in(model, (len(x),))
    assert found.name == known
    rounded = {key: float(torch.tensor(value, dtype=dtype)) for key, value in numbers.items()}
    assert found.parameters == {**TABLE[known].parameters, **rounded}
    expect(gramcert.audit(model, (4,)), 1.0)
    # Softplus jumps at its threshold, which counts as rounding.
    values, off = found.compute(x.double()[None, :] - (0.5 if "after a shift" in name else 0.0))
    truth = function(x).double()[None, :]
    eps = torch.finfo(dtype).eps
    assert torch.allclose(values, truth, rtol=8 * eps, atol=64 * eps)
    assert math.isfinite(float(off))


# Functions of four entries that look like these, and jump or have a slope that is not known.
NOT_THESE = {
    "another number": lambda x: torch.where(x > 0.8, x, 0.7),
    "a number of another type": lambda x: torch.where(x.double() > 0.8, x.double(), float(torch.tensor(0.8))),
    "the other side": lambda x: torch.where(x > 0.8, 0.8, -x),
    "the smaller of the wrong side": lambda x: torch.where(x > 0.8, x - 0.8, 0.8),
    "a shift that does not meet": lambda x: torch.where(x > 0.5, x - 0.4, 0.0),
    "numbers": lambda x: torch.where(x > 0.5, 1.0, 0.0),
    "of another value": lambda x: torch.where(x.flip(0) > 0.8, x, 0.8),
    "a limit for each entry": lambda x: torch.where(x > torch.arange(4.0), x, torch.arange(4.0)),
    "softplus too early": lambda x: torch.where(x > 5, x, F.softplus(x)),
    "softplus for ever": lambda x: torch.where(x < 20, x, F.softplus(x)),
    "softplus of another": lambda x: torch.where(x > 20, x, F.softplus(x.flip(0))),
    "another value above softplus": lambda x: torch.where(x > 20, x.flip(0), F.softplus(x)),
    "softplus of a multiple": lambda x: (lambda t: torch.where(t > 25, x, F.softplus(t)))(3 * x),
    "softplus divided by another number": lambda x: (lambda t: torch.where(t > 25, x, F.softplus(t) / 4))(3 * x),
    "softplus times almost a third": lambda x: (lambda t: torch.where(t > 25, x, F.softplus(t) * (1 / 3)))(3 * x),
    # Whose inverse in float64 is the same.
    "softplus divided by its neighbour": lambda x: (
        lambda t: torch.where(t > 25, x, F.softplus(t) / math.nextafter(1.9, 2.0))
    )(1.9 * x.double()),
    "softplus with a negative factor": lambda x: (lambda t: torch.where(t > 25, x, F.softplus(t) / -3))(-3 * x),
    "softplus times zero": lambda x: (lambda t: torch.where(t > 25, x, F.softplus(t) * 0.0))(0.0 * x),
    "softshrink by another number": lambda x: torch.where(x.abs() > 0.8, x - x.sign() * 0.7, x * 0.0),
    "softshrink without a sign": lambda x: torch.where(x.abs() > 0.8, x - 0.8, x * 0.0),
    "softshrink with the other sign": lambda x: torch.where(x.abs() > 0.8, x + x.sign() * 0.8, x * 0.0),
    "softshrink the wrong way": lambda x: torch.where(x.abs() < 0.8, x - x.sign() * 0.8, x * 0.0),
    "softshrink by a negative number": lambda x: torch.where(x.abs() > -0.8, x - x.sign() * -0.8, x * 0.0),
    "softshrink of another": lambda x: torch.where(x.flip(0).abs() > 0.8, x - x.sign() * 0.8, x * 0.0),
    "softshrink to something": lambda x: torch.where(x.abs() > 0.8, x - x.sign() * 0.8, x * 0.5),
    "softshrink to a number": lambda x: torch.where(x.abs() > 0.8, x - x.sign() * 0.8, 0.5),
    "hardshrink": lambda x: torch.where(x.abs() > 0.8, x, 0.0),
    "one is not compared": lambda x: torch.where(x != 0.8, x, 0.8),
    # Compared in float32, which rounds the first tensor and not the second.
    "a tensor that is rounded": lambda x: torch.where(x > torch.tensor([2**40 + 2**15]), x, float(2**40 + 2**15)),
    "half precision": lambda x: (lambda h: torch.where(h > 0.3, h, 0.3))(x.bfloat16()),
}


@pytest.mark.parametrize("name", NOT_THESE)
def test_choices_that_look_like_known_functions_have_no_constant(name):
    found = gramcert.audit(Function(NOT_THESE[name]), (4,))
    expect(found, "jumps|choice|its beta is not positive")


@pytest.mark.parametrize(
    ("written", "constant"),
    [
        # Functions of a slope of at most 1 in halves that are not a softshrink: the sum of both constants.
        (lambda x: (x - 0.5).relu() + (x + 0.25).clamp(max=0), 2.0),
        (lambda x: (x + 0.5).relu() + (x - 0.5).clamp(max=0), 2.0),  # slope 2 between
        (lambda x: (x - 0.5).relu() + (x + 0.5).clamp(max=0.25), 2.0),
        (lambda x: (x - 0.5).relu() + (x.flip(1) + 0.5).clamp(max=0), 2.0),
        (lambda x: (x - 0.5).relu() - (x + 0.5).clamp(max=0), 2.0),
        # Limits for each entry are limits, too.
        (lambda x: (x - 0.5).relu() + (x + 0.5).clamp(torch.zeros(4), torch.tensor(0.0)), 2.0),
        (lambda x: (x - 0.5).clamp(torch.tensor(0.0), torch.zeros(4)) + (x + 0.5).clamp(max=0), 2.0),
    ],
)
def test_halves_that_do_not_fit_are_added(written, constant):
    expect(gramcert.audit(Function(written), (4,)), constant)


def test_logarithms_of_anything_else_have_none():
    expect(gramcert.audit(Function(lambda x: (2 * x.sigmoid()).log()), (4,)), "its slope 1/x is unbounded near 0")
    expect(gramcert.audit(Function(lambda x: (x.sigmoid() + x.sigmoid()).log()), (4,)), "its slope 1/x")


@pytest.mark.parametrize(
    ("steps", "constant"),
    [
        ([("Less", (number(0.5), "x"), {}), ("Where", ("v0", "x", number(0.5)), {})], 1.0),
        ([("Greater", (number(0.5), "x"), {}), ("Where", ("v0", "x", number(0.5)), {})], 1.0),
        ([("Less", (number(0.5), "x"), {}), ("Where", ("v0", number(0.5), "x"), {})], 1.0),
        ([one("Greater", number(math.nan)), ("Where", ("v0", "x", number(math.nan)), {})], math.inf),
        ([one("Greater", number(math.inf)), ("Where", ("v0", "x", number(math.inf)), {})], math.inf),
        # One number of more axes makes the value larger.
        ([one("Greater", number(0.5).reshape(1, 1, 1)), ("Where", ("v0", "x", number(0.5)), {})], math.inf),
        ([one("Greater", number(0.5)), ("Where", ("v0", "x", number(0.5).reshape(1, 1, 1)), {})], math.inf),
        ([one("Greater", number(0.5)), ("Not", ("v0",), {}), ("Where", ("v1", "x", number(0.5)), {})], math.inf),
        ([one("Greater", "x"), ("Where", ("v0", "x", number(0.5)), {})], math.inf),
    ],
)
def test_choices_of_onnx(steps, constant, tmp_path):
    tiny = Tiny(tmp_path, steps, (2, 3))
    assert gramcert.audit(tmp_path / "tiny.onnx").upper == constant
    if constant < math.inf:  # either the larger or the smaller of both
        x = torch.linspace(-2, 2, 6, dtype=torch.float64)
        assert torch.equal(tiny(x), x.clamp(min=0.5)) or torch.equal(tiny(x), x.clamp(max=0.5))
        (operation,) = (n.operation for n in tiny.graph.needed().nodes.values() if isinstance(n.operation, Nonlinear))
        assert torch.equal(operation.compute(x.reshape(1, 2, 3))[0].flatten(), tiny(x))
