"""Rules of activations, normalisations and other functions, against their slopes and Jacobians."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramcert
from auditing_networks import ROUNDING, Function, audited, check_function, expect, sampled
from gramcert import nn as gnn
from reference import jacobian_norm

IMAGE = (4, 6, 6)

# The input at which the slope is largest, and the constant.
ACTIVATIONS = {
    "relu": (nn.ReLU(), 1.0, 1.0),
    "relu6": (nn.ReLU6(), 1.0, 1.0),
    "leaky": (nn.LeakyReLU(0.2), 1.0, 1.0),
    "steep leaky": (nn.LeakyReLU(1.5), -1.0, 1.5),
    "elu": (nn.ELU(2.0), -1e-9, 2.0),
    "selu": (nn.SELU(), -1e-12, 1.7580993408473766),
    "celu": (nn.CELU(0.5), -1e-9, 1.0),
    "gelu": (nn.GELU(), math.sqrt(2), 1.1289041451851548),
    "gelu tanh": (nn.GELU("tanh"), 1.4185040087908283, 1.1289930686587718),
    "silu": (nn.SiLU(), 2.3993572805154677, 1.0998393201288669),
    "mish": (nn.Mish(), 1.4905711794854285, 1.0884981612517279),
    "softplus": (nn.Softplus(), 30.0, 1.0),
    "tanh": (nn.Tanh(), 0.0, 1.0),
    "sigmoid": (nn.Sigmoid(), 0.0, 0.25),
    "hardsigmoid": (nn.Hardsigmoid(), 0.0, 1 / 6),
    "hardswish": (nn.Hardswish(), 3 - 1e-9, 1.5),
    "hardtanh": (nn.Hardtanh(-2, 2), 0.0, 1.0),
    "softsign": (nn.Softsign(), 1e-9, 1.0),
    "log sigmoid": (nn.LogSigmoid(), -40.0, 1.0),
    "softshrink": (nn.Softshrink(), 2.0, 1.0),
    "tanhshrink": (nn.Tanhshrink(), 30.0, 1.0),
    "prelu": (nn.PReLU(4, init=-1.25), -1.0, 1.25),
    "rrelu": (nn.RReLU(1.0, 2.0), -1.0, 1.5),
    "abs": (gnn.Abs(), 1.0, 1.0),
    "clamp": (Function(lambda x: x.clamp(min=-1)), 0.0, 1.0),
    "sine": (Function(torch.sin), 0.0, 1.0),
    "erf": (Function(torch.erf), 0.0, 1.1283791670955126),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_have_their_exact_constant(name):
    module, place, constant = ACTIVATIONS[name]
    model, found = audited(module, (4, 3))
    x = torch.full((1, 4, 3), place, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x)
    expect(found, constant)
    reached = float(slope.abs().max())
    assert reached <= found.upper * (1 + ROUNDING)
    assert found.upper <= reached * (1 + 1e-6)
    assert sampled(model, (4, 3), scale=3.0) <= found.upper * (1 + ROUNDING)


# Functions of several entries, and their constants.
NONLINEAR = {
    "softmax": (nn.Softmax(1), 0.5),
    "log softmax": (nn.LogSoftmax(1), 2.0),
    "layer norm": (nn.LayerNorm([4, 6, 6]), 1 / math.sqrt(1e-5)),
    "instance norm": (nn.InstanceNorm2d(4), 1 / math.sqrt(1e-5)),
    "group norm": (nn.GroupNorm(2, 4), 1 / math.sqrt(1e-5)),
    "rms norm": (nn.RMSNorm([4, 6, 6], eps=1e-2), 10.0),
    "max-min": (gnn.MaxMin(), 1.0),
    "group sort": (gnn.GroupSort(2), 1.0),
    "centring": (gnn.LayerCentering(4), 1.0),
    "norm": (Function(lambda x: torch.linalg.vector_norm(x, dim=1)), 1.0),
    "largest": (Function(lambda x: x.amax((2, 3))), 1.0),
    "maximum": (Function(lambda x: torch.maximum(x, 2 * x)), math.sqrt(5)),
}


@pytest.mark.parametrize("name", NONLINEAR)
def test_other_functions_have_their_constant(name):
    check_function(*NONLINEAR[name], IMAGE)


@pytest.mark.parametrize(
    ("module", "point", "constant"),
    [
        (nn.Softmax(1), [0.0, 0.0, -60.0], 0.5),
        (nn.LogSoftmax(1), [60.0, 0.0, 0.0, 0.0], 2.0),
        (nn.LayerNorm(4, eps=1e-2), [0.0] * 4, 10.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_softmax_and_normalisation_reach_their_constants(module, point, constant):
    model, found = audited(module, (len(point),))
    expect(found, constant)
    assert float(jacobian_norm(model, torch.tensor([point]))) == pytest.approx(constant)


def test_scalars_are_those_of_the_value_s_own_type():
    """Half precision rounds an epsilon and a factor as torch does, float64 does not."""
    tenth = float(torch.tensor(0.1))
    expect(gramcert.audit(Function(lambda x: x.double() * 0.7), (4,)), 0.7, ROUNDING)
    expect(gramcert.audit(Function(lambda x, h: x * 0.1 + h, h=torch.zeros(1).half()), (4,)), tenth, ROUNDING)
    expect(gramcert.audit(nn.LayerNorm(4, eps=1e-7).half(), (4,)), 1e7**0.5)
    narrow = Function(lambda x, h: F.layer_norm(x.float(), (4,), eps=1e-7), h=torch.zeros(1).half())
    expect(gramcert.audit(narrow, (4,)), 1e7**0.5)
    assert float(jacobian_norm(narrow, torch.zeros(1, 4))) == pytest.approx(1e7**0.5)
