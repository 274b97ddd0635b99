"""Functions that are written out of others: found wherever they stand, and only where they are what they look like."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramcert
from auditing_networks import Function, check_function, expect
from reference import jacobian_norm

# Written out, and torch's own layer.
WRITTEN = {
    "silu": (lambda x: x * torch.sigmoid(x), nn.SiLU()),
    "scaled silu": (lambda x: torch.sigmoid(1.702 * x) * x, nn.SiLU()),
    "gelu": (lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))), nn.GELU()),
    "gelu, half last": (lambda x: x * (torch.erf(x * 0.7071067811865476) + 1) * 0.5, nn.GELU()),
    "mish": (lambda x: x * torch.tanh(F.softplus(x)), nn.Mish()),
    "hardswish": (lambda x: x * F.hardsigmoid(x), nn.Hardswish()),
    "hardswish of clamp": (lambda x: x * (x + 3).clamp(0, 6) / 6, nn.Hardswish()),
    "hardswish of relu6": (lambda x: x * (F.relu6(x + 3) / 6), nn.Hardswish()),
    "hardswish of hardtanh": (lambda x: F.hardtanh(x + 3, 0.0, 6.0) * x * (1 / 6), nn.Hardswish()),
}


def affine():
    layer = nn.BatchNorm2d(2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.3, -0.9]))
        layer.bias.copy_(torch.tensor([1.0, -2.0]))
    return layer


# What may stand before it, where the function is no longer one of the input alone.
BEFORE = {
    "nothing": lambda: nn.Identity(),
    "a number": lambda: Function(lambda x: x + 0.75),
    "a bias": lambda: Function(lambda x: x + torch.tensor([0.5, -1.0], dtype=x.dtype)[:, None, None]),
    "a multiple": lambda: Function(lambda x: -2 * x + 1),
    "batch normalisation": affine,
    "a convolution": lambda: nn.Conv2d(2, 2, 1),
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("name", WRITTEN)
def test_written_out_functions_have_the_constant_of_the_layer(name, before):
    torch.manual_seed(0)
    written, layer = WRITTEN[name]
    first = BEFORE[before]()
    model = nn.Sequential(first, Function(written)).double().eval()
    known = gramcert.audit(nn.Sequential(first, layer).double().eval(), (2, 3, 3)).product
    found = gramcert.audit(model, (2, 3, 3)).product
    assert math.isfinite(found)
    assert found == pytest.approx(known, rel=1e-6)  # torch's own 1/6 is that of float32
    points = [4 * torch.randn(1, 2, 3, 3, dtype=torch.float64) for _ in range(20)]
    assert max(float(jacobian_norm(model, x)) for x in points) <= found


@pytest.mark.parametrize("shift", [-1.0, 0.0, 2.5])
@pytest.mark.parametrize("limits", [(0.0, 6.0), (-2.0, 1.0), (1.0, 1.5)])
def test_a_value_times_any_clamp_of_it(shift, limits):
    """Slopes at a dense set of points reach the constant, and none is above."""
    model = Function(lambda x: x * (0.5 * x + shift).clamp(*limits))
    found = gramcert.audit(model, (1,)).upper
    x = torch.linspace(-20, 20, 40001, dtype=torch.float64, requires_grad=True)
    (slopes,) = torch.autograd.grad(model(x).sum(), x)
    largest = float(slopes.abs().max())
    assert largest <= found <= largest + 5e-3


def test_an_infinite_limit_is_none():
    for limits in ((0.0, math.inf), (-math.inf, 1.0)):
        assert gramcert.audit(Function(lambda x, limits=limits: x.clamp(*limits)), (2,)).upper == 1
        assert gramcert.audit(Function(lambda x, limits=limits: x * x.clamp(*limits)), (2,)).upper == math.inf


def test_limits_that_half_precision_rounds_are_not_used():
    """0.3 is 0.30078125 in bfloat16."""
    model = Function(lambda x: x * x.to(torch.bfloat16).clamp(-0.1, 0.3))
    expect(gramcert.audit(model, (2,)), "a product of two values")


PRODUCT, QUOTIENT, ROOT = "a product of two values", "a quotient of two values", "its slope is unbounded near 0"

# Functions of 4×4 entries that look like known ones, and why they have no constant.
NOT_THESE = {
    "a gate of another argument": (lambda x: x * torch.sigmoid(x.flip(1)), PRODUCT),
    "a gate of another number": (lambda x: x * torch.sigmoid(x + 1), PRODUCT),
    "a gate of the other sign": (lambda x: x * torch.sigmoid(-x), PRODUCT),
    "a gate of the other sign and a number": (lambda x: x * torch.sigmoid(-3 * x + 9), PRODUCT),
    "a gate with a bias": (
        lambda x: x * torch.sigmoid(F.batch_norm(x, torch.zeros(4), torch.ones(4), bias=torch.full((4,), -20.0))),
        PRODUCT,
    ),
    "a number on one side": (lambda x: (x + 1) * torch.sigmoid(x), PRODUCT),
    "numbers that cancel in float64": (lambda x: (((x.double() + 1) + 1e-17) - 1) * torch.sigmoid(x.double()), PRODUCT),
    "erf without its 1": (lambda x: x * (2 + torch.erf(x)), PRODUCT),
    "erf with a multiple of 1": (lambda x: x * torch.add(torch.erf(x), 1.0, alpha=50), PRODUCT),
    "softplus with beta": (lambda x: x * torch.tanh(F.softplus(x, beta=2.0)), PRODUCT),
    "softsign with a multiple of 1": (lambda x: x / torch.add(x.abs(), 1.0, alpha=1e-3), QUOTIENT),
    "clamp below alone": (lambda x: x * (x + 3).clamp(min=0), PRODUCT),
    "clamp of a multiple with the other sign": (lambda x: x * (3 - x).clamp(0, 6), PRODUCT),
    "a length with a multiple of its epsilon": (
        lambda x: x / torch.sqrt(torch.add((x * x).mean(1, keepdim=True), 1.0, alpha=1e-4)),
        QUOTIENT,
    ),
    "lengths of other lines": (lambda x: x / torch.sqrt((x * x).mean(2, keepdim=True).mT + 1e-2), QUOTIENT),
    "lengths of lines read another way": (
        lambda x: x / torch.sqrt((x * x).mean(2, keepdim=True).view(1, 1, 4) + 1e-2),
        QUOTIENT,
    ),
    "lengths of lines the other way": (lambda x: x / torch.sqrt((x * x).mean(1).unsqueeze(2) + 1e-2), QUOTIENT),
    "lengths of other entries": (lambda x: x / torch.sqrt((x.flip(1) ** 2).mean(1, keepdim=True) + 1e-2), QUOTIENT),
    "a root of a sum with a bias": (
        lambda x: F.linear(x * x, torch.ones(2, 4, dtype=x.dtype), -torch.ones(2, dtype=x.dtype)).sqrt(),
        ROOT,
    ),
    "a root of a padded square": (lambda x: F.pad(x * x, (1, 0), value=-1.0).mean(1).sqrt(), ROOT),
    "a choice that jumps": (lambda x: torch.where(x == 0, 1.0, x), "a choice jumps"),
    "a root of a choice": (lambda x: torch.where(x == 0, 1.0, x * x).sqrt(), ROOT),
}


@pytest.mark.parametrize("name", NOT_THESE)
def test_what_only_looks_like_them_has_no_constant(name):
    function, reason = NOT_THESE[name]
    expect(gramcert.audit(Function(function), (4, 4)), reason)


def rms_norm(x):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-2)


# Functions of images that have a constant, if not always that of what they look like.
OTHERS = {
    "layer norm": (lambda x: rms_norm(x - x.mean(-1, keepdim=True)), 10.0),
    "rms norm": (rms_norm, 10.0),
    "lengths of resized squares": (lambda x: F.interpolate(x * x, scale_factor=2, mode="bilinear").sqrt(), 2.0),
    "rows minus means of columns": (lambda x: x - x.mean(3)[..., None, :], 2.0),
    "maximum and minimum of different pairs": (
        lambda x: torch.cat([torch.maximum(x[:, :2], x[:, 2:]), torch.minimum(x[:, :2], 2 * x[:, 2:])], 1),
        math.sqrt(6),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_have_their_constant(name):
    function, constant = OTHERS[name]
    check_function(Function(function), constant, (4, 4, 4))
