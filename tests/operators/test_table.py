"""Every function of the table: slopes against differences, values against balls, one constant by every way to it."""

import math
import re

import flint
import pytest
import torch
from torch import nn

import gramcert
from gramcert.operators.elementwise import SIXTH, TABLE, computing, of_module

EPS = torch.finfo(torch.float64).eps

# Other parameters than the defaults, where a layer has some.
OTHERS = {
    "leaky_relu": {"negative_slope": -1.7},
    "rrelu": {"lower": 1.5, "upper": 2.5},
    "prelu": {"init": -2.0},
    "elu": {"alpha": 1.3},
    "celu": {"alpha": 0.3},
    "softplus": {"beta": 3.0, "threshold": 25.0},
    "threshold": {"threshold": 0.5, "value": 0.5},
}
# What torch's layers cannot be made without.
REQUIRED = {"threshold": {"threshold": 0.0, "value": 0.0}}

LAYERS = [
    pytest.param(name, options, id=f"{name}{'-other' if options is OTHERS.get(name) else ''}")
    for name, function in TABLE.items()
    if function.module is not None
    for options in (REQUIRED.get(name, {}), OTHERS.get(name))
    if options is not None
]


def layer(name, options):
    return TABLE[name].module(**options).double().eval()


def has_none(name, options):
    return isinstance(of_module(layer(name, options)), str)


@pytest.mark.parametrize(("name", "options"), LAYERS)
def test_a_layer_has_one_constant_by_every_way(name, options):
    module = layer(name, options)
    result = gramcert.audit(module, (3,))
    slopes = of_module(module)
    classifier = nn.Sequential(module, nn.Linear(3, 2)).double().eval()
    batch = torch.randn(2, 3, dtype=torch.float64), torch.tensor([0, 1])
    if has_none(name, options):
        assert result.upper == math.inf
        with pytest.raises(TypeError, match="it has no constant"):
            gramcert.lipschitz_bound(module)
        with pytest.raises(TypeError, match=rf"certify\(model\): .*{re.escape(slopes)}"):
            gramcert.certify(classifier, [batch], [])
        return
    assert gramcert.lipschitz_bound(module) == result.upper == max(map(abs, slopes))
    assert gramcert.lipschitz_bound(module, input_shape=(3,)) == result.upper
    assert gramcert.certify(classifier, [batch], []).lipschitz == result.upper


# Points where functions turn, cancel, saturate, overflow and underflow.
POINTS = [0.0, 1e-300, 1e-9, 0.1, 0.5, 1.0, 2.9999, 3.0, 5.9, 6.0, 19.9, 20.1, 37.0, 709.0, 711.0, 1e5, 1e150]
POINTS = [sign * point for point in POINTS for sign in (1, -1)]


def balls(name, numbers):
    """A function in ball arithmetic, of a ball without an interior."""
    one, half = flint.arb(1), flint.arb("0.5")
    exact = {key: flint.arb(value) for key, value in numbers.items() if math.isfinite(value)}

    def sigmoid(x):
        return one / (one + (-x).exp()) if x >= 0 else x.exp() / (one + x.exp())

    def softplus(x):
        return x.max(0) + (one + (-abs(x)).exp()).log()

    def clamp(x, low, high):
        return x.max(low).min(high)

    def tanh(x):
        return 2 * sigmoid(2 * x) - 1

    def elu(x):
        below = exact["alpha"] * ((exact["input_scale"] * x.min(0)).exp() - 1)
        return exact["scale"] * (x if x > 0 else below)

    def leaky(x):
        slope = exact.get("negative_slope", (exact.get("lower", 0) + exact.get("upper", 0)) / 2)
        return x if x > 0 else slope * x

    return {
        "identity": lambda x: x,
        "relu": lambda x: x.max(0),
        "relu6": lambda x: clamp(x, 0, 6),
        "hardtanh": lambda x: clamp(x, -1, 1),
        "clamp": lambda x: x,
        "leaky_relu": leaky,
        "rrelu": leaky,
        "threshold": lambda x: x.max(exact["threshold"]),
        "elu": elu,
        "selu": elu,
        "celu": lambda x: x.max(0) + exact["alpha"] * ((x.min(0) / exact["alpha"]).exp() - 1),
        "softplus": lambda x: softplus(exact["beta"] * x) / exact["beta"],
        "tanh": tanh,
        "softsign": lambda x: x / (one + abs(x)),
        "log_sigmoid": lambda x: -softplus(-x),
        "softshrink": lambda x: (x - half).max(0) + (x + half).min(0),
        "tanhshrink": lambda x: x - tanh(x),
        "sigmoid": sigmoid,
        "hardsigmoid": lambda x: clamp(exact["alpha"] * x + half, 0, 1),
        "hard sigmoid": lambda x: clamp(exact["alpha"] * x + exact["beta"], 0, 1),
        "hardswish": lambda x: x * clamp(x + 3, 0, 6) * flint.arb(SIXTH),
        "silu": lambda x: x * sigmoid(x),
        "gelu": lambda x: x * (one + (x / flint.arb(2).sqrt()).erf()) / 2,
        "gelu_tanh": lambda x: x * (one + tanh((2 / flint.arb.pi()).sqrt() * (x + flint.arb("0.044715") * x**3))) / 2,
        "mish": lambda x: x * tanh(softplus(x)),
        "erf": lambda x: x.erf(),
        "abs": abs,
        "sin": lambda x: x.sin(),
        "cos": lambda x: x.cos(),
        "atan": lambda x: x.atan(),
        "asinh": lambda x: x.asinh(),
    }[name]


EVALUATED = [name for name, function in TABLE.items() if not isinstance(function.slopes, str)]


@pytest.mark.parametrize("name", [name for name in EVALUATED if name not in ("prelu", "gated clamp", "gelu by tanh")])
def test_values_are_as_near_the_true_ones_as_is_assumed(name):
    """In each entry alone; the parameters are numbers of float32, and count as they are."""
    before, flint.ctx.prec = flint.ctx.prec, 4000
    try:
        numbers = {key: float(torch.tensor(value)) for key, value in TABLE[name].parameters.items()}
        values, bounds = computing(name, numbers)(torch.tensor(POINTS, dtype=torch.float64)[:, None])
        function = balls(name, numbers)
        for point, value, bound in zip(POINTS, values.flatten().tolist(), bounds.tolist(), strict=True):
            assert abs(function(flint.arb(point)) - flint.arb(value)) <= flint.arb(bound), point
            # Torch's sixth is one of float32 where the network is, and its softplus jumps.
            assert bound <= (1e-6 if name in ("softplus", "hardswish", "hardsigmoid") else 1e3 * EPS) * (1 + abs(point))
        assert not TABLE[name].is_exact or not bounds.any()
    finally:
        flint.ctx.prec = before


@pytest.mark.parametrize(("name", "options"), [case for case in LAYERS if not has_none(*case.values)])
def test_slopes_hold_the_differences_and_are_met(name, options):
    module = layer(name, options)
    slopes = of_module(module)
    x = torch.linspace(-12, 12, 24001, dtype=torch.float64)
    with torch.no_grad():
        found = module(x).diff() / x.diff()
    slack = 1e-6  # of differences of values, where slopes lie close to their ends
    assert slopes[0] - slack <= float(found.min())
    assert float(found.max()) <= slopes[1] + slack
    assert max(map(abs, slopes)) <= float(found.abs().max()) + 2e-3


def test_every_elementwise_layer_of_torch_is_in_the_table():
    """But those that are of several entries, or random."""
    others = {"GLU", "MultiheadAttention", "Softmax", "Softmax2d", "Softmin", "LogSoftmax"}
    listed = {name for name in nn.modules.activation.__all__ if name not in others}
    assert listed <= {function.module.__name__ for function in TABLE.values() if function.module is not None}


def test_subclasses_are_not_known():
    class Loud(nn.ReLU):
        pass

    assert of_module(Loud()) is None


@pytest.mark.parametrize(
    ("module", "name", "constant"),
    [
        (nn.ELU(), "scale", 1.0),
        (nn.ELU(), "input_scale", 1.0),
        (nn.SELU(), "scale", None),
        (nn.SELU(), "alpha", None),
        (nn.Hardsigmoid(), "alpha", None),
        (nn.LeakyReLU(), "weight", 1.0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_what_hangs_on_a_layer_that_does_not_use_it_changes_nothing(module, name, constant):
    constant = max(map(abs, of_module(type(module)()))) if constant is None else constant
    setattr(module, name, 1e-3)
    assert gramcert.lipschitz_bound(module) == constant


@pytest.mark.parametrize("module", [nn.LeakyReLU(1e300), nn.ELU(1e300)], ids=str)
def test_slopes_beyond_all_numbers_are_a_reason(module):
    assert of_module(module) == "its slopes are too large"
    with pytest.raises(TypeError, match="it has no constant: its slopes are too large"):
        gramcert.lipschitz_bound(module)
