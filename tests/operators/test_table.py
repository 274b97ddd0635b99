"""Every function of the table: its slopes against differences, and the same constant by every way to it."""

import math

import pytest
import torch
from torch import nn

import gramcert
from gramcert.operators.elementwise import TABLE, of_module

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
    if has_none(name, options):
        assert result.upper == math.inf
        with pytest.raises(TypeError, match="it has no constant"):
            gramcert.lipschitz_bound(module)
        return
    assert gramcert.lipschitz_bound(module) == result.upper == max(map(abs, slopes))


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
