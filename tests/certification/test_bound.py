"""``lipschitz_bound``: what is known, with the right number; what is not, with an error and never a 1."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import gramcert.nn as gnn
from gramcert import lipschitz_bound, spectral_norm
from gramcert.parametrizations import spectral_rescaling
from reference import jacobian_norm

ROUNDING = 100 * torch.finfo(torch.float64).eps


def test_rescaled_layers_are_near_one_not_assumed_one():
    """1 + a few 1e-8 for weights rounded to float32, for a layer whose exact norm is 1."""
    for seed in range(10):
        torch.manual_seed(seed)
        layer = gnn.SRLinear(24, 24)
        bound = lipschitz_bound(layer)
        assert bound != 1
        assert abs(bound - 1) < 5e-7
        assert torch.linalg.matrix_norm(layer.weight.detach().double(), 2) <= bound
        residual = gnn.SLLConv2d(8, 8, 3, form="frequency", iterations=2)
        assert 1 < lipschitz_bound(residual) < 1 + 5e-7


def test_plain_layers():
    layer = nn.Conv2d(2, 3, 3, padding=1)
    for size in (None, 5):
        norm = spectral_norm(layer, size, tol=1e-6)
        assert norm.lower <= lipschitz_bound(layer, size) <= norm.upper * 1.001
    assert lipschitz_bound(layer.bfloat16()) > 0


@pytest.mark.parametrize(
    ("layer", "constant"),
    [
        (nn.Sigmoid(), 0.25),
        (nn.Tanh(), 1),
        (nn.LeakyReLU(0.1), 1),
        (nn.LeakyReLU(-3.0), 3),
        (nn.ELU(2.0), 2),
        (nn.Hardsigmoid(), 1 / 6),
        (nn.Dropout().eval(), 1),
        (nn.MaxPool2d(2), 1),
        (nn.MaxPool2d(3, stride=2), 2),
        (nn.MaxPool1d(3, stride=1), math.sqrt(3)),
        (nn.MaxPool1d(2, stride=2, dilation=2), math.sqrt(2)),
        (nn.AvgPool2d(2), 0.5),
        (nn.AvgPool1d(4, stride=2), math.sqrt(1 / 2)),
        (nn.PixelUnshuffle(2), 1),
        (nn.Sequential(nn.Flatten(), nn.Sequential(nn.Sigmoid(), nn.Sigmoid())), 1 / 16),
    ],
    ids=str,
)
def test_layers_without_weights(layer, constant):
    assert constant <= lipschitz_bound(layer) <= constant * (1 + 1e-7)
    shape = (1, 4, 12) if "1d" in str(layer) else (1, 4, 6, 6)
    for seed in range(5):
        x = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        assert jacobian_norm(layer, x) <= lipschitz_bound(layer) * (1 + 1e-12)


def test_overlapping_maxima_reach_their_constant():
    """A single bright pixel is the maximum of four windows: moving it moves four outputs."""
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, 2, 2] = 1
    assert jacobian_norm(nn.MaxPool2d(3, stride=2), x) == pytest.approx(2)


def test_size_is_followed_through_a_sequence():
    torch.manual_seed(0)
    model = nn.Sequential(
        gnn.PadChannels(4),
        gnn.SLLConv2d(4, 4, 3),
        nn.MaxPool2d(2, ceil_mode=True),
        gnn.ScaledAvgPool(2, 1),
        nn.Conv2d(4, 4, 3, padding=1),
        gnn.Subsample(2),
        nn.PixelShuffle(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    x = torch.randn(1, 1, 9, 9)
    bound = lipschitz_bound(model, 9)
    assert jacobian_norm(gnn.export(model).double(), x) <= bound
    conv = lipschitz_bound(model[4], 4)
    assert bound <= conv * lipschitz_bound(model[8])  # both, and what is between them, are measured as one map
    assert conv < lipschitz_bound(model[4])
    assert bound < lipschitz_bound(model)


def filled(layer, value):
    """A layer with all weights the same."""
    nn.init.constant_(layer.weight, value)
    return layer


def test_sizes_are_followed():
    """Linear layers change the last axis, shuffles only the last two, pooling drops windows beyond the input."""
    linear = nn.Linear(2, 32, bias=False)
    with torch.no_grad():
        linear.weight.zero_()
        linear.weight[:, 0] = 32**-0.5
    model = nn.Sequential(linear, filled(nn.Conv1d(1, 1, 3, padding=1, bias=False), 1))
    assert jacobian_norm(model.double(), torch.zeros(1, 1, 2)) <= lipschitz_bound(model, 2) <= 3
    model = nn.Sequential(nn.PixelUnshuffle(2), filled(nn.Conv3d(1, 1, (3, 1, 1), padding=(1, 0, 0), bias=False), 1))
    x = torch.zeros(1, 1, 2, 2, 2)
    assert jacobian_norm(model.double(), x) <= lipschitz_bound(model, input_shape=x) <= 3 * (1 + ROUNDING)
    assert jacobian_norm(model.double(), x) <= lipschitz_bound(model) <= 3 * (1 + ROUNDING)
    conv = nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular", bias=False)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([[[1.0, -2.0, 1.0]]]))
    model = nn.Sequential(nn.MaxPool1d(1, 2, ceil_mode=True), conv)
    assert (
        jacobian_norm(model.double(), torch.arange(4.0).reshape(1, 1, 4))
        <= lipschitz_bound(model, 4)
        <= 4 * (1 + ROUNDING)
    )


def test_values_that_are_not_numbers():
    layer = gnn.Householder(2)
    layer.normals = torch.full((1, 2), torch.nan)
    with pytest.raises(ValueError, match="expected finite values"):
        lipschitz_bound(layer)
    with pytest.raises(TypeError, match="it has no constant: a parameter that is not finite"):
        lipschitz_bound(nn.LeakyReLU(float("nan")))
    assert lipschitz_bound(nn.Sequential(filled(nn.Linear(2, 2).double(), 1e308), filled(nn.Linear(2, 2), 0))) == 0


class Doubled(gnn.MaxMin):
    def compute(self, x):
        return 2 * super().compute(x)


class Known(gnn.MaxMin):
    def compute(self, x):
        return 2 * super().compute(x)

    def describe_operators(self, outline, x):
        return outline.constant(x, 2.0, "doubled")


class Twice(nn.ReLU):
    def forward(self, x):
        return 2 * super().forward(x)


class Own(nn.Module):
    def forward(self, x):
        return x


def hooked():
    layer = gnn.MaxMin()
    layer.register_forward_hook(lambda module, args, output: 2 * output)
    return layer


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Own(), r"lipschitz_bound\(Own\): its constant is not known"),
        (nn.Sequential(nn.ReLU(), Own()), r"lipschitz_bound\(Own\): its constant is not known"),
        (nn.BatchNorm2d(3), r"lipschitz_bound\(BatchNorm2d\): it has no constant: in training mode it mixes"),
        (nn.BatchNorm2d(3, track_running_stats=False).eval(), r"it has no constant: it keeps no running statistics"),
        (nn.LogSoftmax(1), r"its constant is not known"),
        (nn.Dropout(), r"lipschitz_bound\(Dropout\): it has no constant: in training mode dropout is random"),
        (nn.Softplus(threshold=5), r"it has no constant: it jumps at its threshold 5"),
        (nn.Hardshrink(), r"it has no constant: it jumps"),
        (nn.RReLU(), r"it has no constant: in training mode its slope is random"),
        (nn.MultiheadAttention(4, 1), r"its constant is not known"),
        (
            Doubled(),
            r"lipschitz_bound\(Doubled\): Doubled overrides compute, so what it computes",
        ),
        (Twice(), r"lipschitz_bound\(Twice\): its constant is not known"),
        (hooked(), r"lipschitz_bound\(MaxMin\): its hook"),
        (nn.MaxPool2d(2, return_indices=True), r"with return_indices it has two outputs"),
        (gnn.Residual(Own()), r"lipschitz_bound\(Own\)"),
        (3, r"lipschitz_bound\(module\): expected a torch.nn.Module, got int"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unknown_layers_are_refused(module, message):
    with pytest.raises(TypeError, match=message):
        lipschitz_bound(module)


def test_a_subclass_may_describe_itself():
    assert lipschitz_bound(Known()) == 2


@pytest.mark.parametrize(
    ("module", "size", "message"),
    [
        (nn.Linear(2, 2), 3, r"lipschitz_bound\(input_size=3\): Linear has no spatial size"),
        (nn.Conv2d(1, 1, 3), (3,), r"lipschitz_bound\(input_size=\(3,\)\): Conv2d needs 2 sizes"),
        (nn.Conv2d(1, 1, 3), 2, r"lipschitz_bound\(input_size=\(2, 2\)\): the output would be empty"),
        (
            gnn.Residual(nn.Conv2d(1, 1, 3)),
            8,
            r"input of shape \(1, 8, 8\): Residual\(module\): expected an output",
        ),
        (gnn.Concatenation(nn.Conv2d(1, 1, 3), nn.ReLU()), 8, r"cannot take .*Sizes of tensors must match"),
        (spectral_rescaling(nn.Conv2d(1, 1, 1)), -1, r"expected sizes of at least 1, got -1"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_bad_input(module, size, message):
    with pytest.raises(ValueError, match=message):
        lipschitz_bound(module, size)


@pytest.mark.parametrize(
    "weight", [torch.tensor(0.1), np.float32(0.1), Fraction(1, 3), Decimal("0.1"), 2**53 + 1], ids=repr
)
def test_factors_of_every_type_are_taken_exactly(weight):
    """A factor that somebody set after construction; tensors and NumPy's scalars would round what they meet."""
    block = gnn.Residual(nn.Tanh())
    block.keep, block.weight = weight, weight
    total = 2 * Fraction(weight.item() if isinstance(weight, (torch.Tensor, np.generic)) else weight)
    bound = lipschitz_bound(block)
    assert type(bound) is float
    assert total <= Fraction(bound) <= total * (1 + Fraction(1, 2**50))


def test_channels_are_not_guessed_where_the_constant_depends_on_them():
    model = nn.Sequential(nn.LogSoftmax(1), gnn.Subsample(2))
    with pytest.raises(ValueError, match=r"lipschitz_bound\(input_size\): LogSoftmax does not say how many channels"):
        lipschitz_bound(model, 4)
    assert lipschitz_bound(model, input_shape=(64, 4, 4)) == 8
    assert lipschitz_bound(nn.Sequential(nn.ReLU(), gnn.MaxMin(), gnn.Subsample(2)), 4) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_an_epsilon_that_torch_chooses_is_the_smallest_one(dtype):
    layer = nn.RMSNorm(8, dtype=dtype)
    x = torch.zeros(2, 8, dtype=dtype)
    x[:, 0] = torch.tensor([1.0, -1.0]) * 2.0**-12
    values = layer(x).detach().double()
    quotient = float((values[0] - values[1]).norm() / (x[0] - x[1]).double().norm())
    assert quotient <= lipschitz_bound(layer) <= 1 / math.sqrt(torch.finfo(torch.float64).eps) * (1 + 1e-9)
