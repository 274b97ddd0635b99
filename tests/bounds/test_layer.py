import math

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from hypothesis import given
from torch import nn
from torch.autograd import gradcheck

from cases import layers
from gramcert import Convolution, gram_norm, norm2, norm2_circ
from gramcert.geometry.axis import layer_axes
from gramcert.geometry.reduction import grouped_kernels, one_size_bound, reduced_kernels
from reference import dense_norm

EPS = torch.finfo(torch.float64).eps


@given(layers())
def test_upper_bound_for_any_geometry(drawn):
    layer, sizes = drawn
    truth = dense_norm(layer, sizes)
    at_size, every_size = norm2(layer, sizes), norm2(layer)
    assert truth <= at_size * (1 + 100 * EPS)
    assert truth <= every_size * (1 + 100 * EPS)
    # Tight: the grid is exact for circular layers all of whose rows are there.
    outputs = layer.output_size(sizes)
    whole = all(out * s == n for out, s, n in zip(outputs, layer.stride, sizes, strict=True))
    if layer.padding_mode == "circular" and whole:
        order = min(reduced_kernels(grouped_kernels(layer), layer.stride, layer.dilation).shape[1:3])
        assert at_size <= truth * order ** (2.0**-7) * (1 + 100 * EPS) + 1e-300


@given(layers(torch.float32))
def test_float32_is_within_rounding_of_a_bound(drawn):
    layer, sizes = drawn
    rounding = 100 * torch.finfo(torch.float32).eps
    truth = dense_norm(layer, sizes).item()
    for value in (norm2(layer, sizes), norm2(layer)):
        assert value.dtype == torch.float32
        assert truth <= value.item() * (1 + rounding) + 1e-30


@given(layers())
def test_bound_at_one_size_is_not_above_that_for_every_size(drawn):
    """Each grid frequency is one of the torus, and no padding map repeats more than at the worst size."""
    layer, sizes = drawn
    assert norm2(layer, sizes, 8) <= norm2(layer, None, 8) * (1 + 100 * EPS)


def ones(*shape, **options):
    return Convolution(torch.ones(*shape, dtype=torch.float64), **options)


MEAN = ones(8, 1, 3, 3, padding=1, groups=8)
HALF_MEAN = Convolution(MEAN.kernel * 0.5 / 9, padding=1, groups=8)
QUARTER = Convolution(torch.ones(1, 1, 2, 2, dtype=torch.float64) / 4, padding=1, padding_mode="circular")


# Each row of the pitfalls: the layer, the size, the norm of the layer, and how far above it our bound may be.
@pytest.mark.parametrize(
    ("layer", "size", "truth", "slack"),
    [
        (ones(1, 1, 3, 1, padding="same"), 16, 2.96595, 1e-9),
        (ones(1, 1, 5, 1, padding="same"), 16, 4.84137, 0.03),
        (ones(1, 1, 5, 3, padding="same"), 16, 14.35923, 0.03),
        (ones(1, 1, 3, 3, padding="same", padding_mode="circular"), 2, 9.0, 1e-9),
        (HALF_MEAN, 8, 0.46060, 0.01),
        (ones(1, 1, 2, 2, stride=2, dilation=2), 16, 3.84776, 0.02),
        (QUARTER, 8, 1.33360, 0.6),
        (ones(1, 1, 1, 1, padding=1, padding_mode="circular"), 8, 2.0, 1e-9),
        (ones(1, 1, 3, stride=2, padding=1, padding_mode="circular"), 3, 2.44949, 0.6),
        (ones(1, 1, 3, stride=2, padding=1, padding_mode="circular"), 13, 2.34874, 0.4),
        (ones(1, 1, 3, dilation=2, padding=1), 7, 2.41421, 1e-9),
        (ones(1, 1, 3, stride=3, dilation=2, padding=3), 5, 1.73205, 1e-9),
        (ones(1, 1, 3, 3, padding=1, padding_mode="reflect"), 8, 9.53455, 0.9),
        (ones(1, 2, 1, 1), 4, math.sqrt(2), 1e-9),
    ],
)
def test_pitfalls(layer, size, truth, slack):
    assert float(dense_norm(layer, size)) == pytest.approx(truth, abs=6e-6)
    assert truth - 6e-6 <= float(norm2(layer, size)) <= truth * (1 + slack) + 6e-6


def test_grids_are_small():
    """B3: m = n + max(pads) for stride 1, and phases and dilations divide it."""
    cases = [
        (ones(1, 1, 3, padding=1), 16, 17),
        (ones(1, 1, 3, padding=((2, 0),)), 16, 18),
        (ones(1, 1, 3, padding=9), 16, 18),
        (ones(1, 1, 3), 16, 16),
        (ones(1, 1, 3, dilation=4, padding=4), 16, 5),
        (ones(1, 1, 4, stride=2, padding=1), 16, 9),
        (ones(1, 1, 3, padding=2, dilation=2, padding_mode="circular"), 16, 8),
        (ones(1, 1, 4, stride=2, padding=1, padding_mode="circular"), 16, 8),
    ]
    for layer, size, grid in cases:
        assert {g.sizes for g in one_size_bound(layer_axes(layer, (size,))).grids} == {(grid,)}


def test_shifted_embedding_is_exact_for_symmetric_three_tap_kernels():
    for a, b, n in ((2.0, 1.0, 5), (0.0, 1.0, 5), (-3.0, 1.0, 4), (1.0, -2.0, 7)):
        layer = Convolution(torch.tensor([[[b, a, b]]], dtype=torch.float64), padding=1)
        assert float(norm2(layer, n)) == pytest.approx(float(dense_norm(layer, n)), rel=1e-12)


def test_circular_layers_are_algorithm_2():
    module = nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular", dtype=torch.float64)
    torch.testing.assert_close(norm2(module, (6, 5)), norm2_circ(module.weight, (6, 5)))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 3, (3, 2), stride=2, padding=1, dilation=(1, 2), dtype=torch.float64),
        nn.ConvTranspose1d(2, 4, 4, stride=2, groups=2, dtype=torch.float64),
        nn.Conv1d(2, 2, 3, padding=1, padding_mode="reflect", dtype=torch.float64),
    ],
)
@pytest.mark.parametrize("size", [None, 6])
def test_gradient_reaches_the_weight(layer, size):
    weight = layer.weight.detach().requires_grad_()
    description = Convolution.of(layer)

    def value(kernel):
        return norm2(
            Convolution(
                kernel,
                description.stride,
                description.padding,
                description.padding_mode,
                description.dilation,
                description.groups,
                description.transposed,
            ),
            size,
            3,
        )

    assert gradcheck(value, weight)
    layer.zero_grad()
    norm2(layer, size).backward()
    assert (layer.weight.grad * layer.weight).sum().item() == pytest.approx(norm2(layer, size).item(), rel=1e-9)


def test_linear():
    layer = nn.Linear(5, 3, dtype=torch.float64)
    torch.testing.assert_close(norm2(layer), gram_norm(layer.weight))
    with pytest.raises(ValueError, match=r"norm2\(input_size=8\): Linear has no spatial size"):
        norm2(layer, 8)


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(3), nn.ReLU(), nn.Sequential(nn.Conv1d(1, 1, 1)), torch.ones(2, 2)])
def test_unknown_layers_are_refused_by_name(layer):
    with pytest.raises(TypeError, match=rf"norm2\(layer\): cannot bound {type(layer).__name__}"):
        norm2(layer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype):
    """A bound computed in half precision would lie below the truth."""
    for layer, size in ((nn.Linear(64, 48), None), (nn.Conv2d(4, 5, 3, padding=1), 6)):
        expected = norm2(layer, size, 12)
        (gradient,) = torch.autograd.grad(expected, layer.weight)
        with torch.autocast("cpu", dtype):
            value = norm2(layer, size, 12)
            assert torch.equal(torch.autograd.grad(value, layer.weight)[0], gradient)
        assert torch.equal(value, expected)


def test_hooks_are_refused():
    """Old-style weight norm, pruning and output hooks change what the layer computes behind its weight."""
    doubled = nn.Conv2d(1, 1, 1)
    doubled.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(TypeError, match=r"norm2\(Conv2d\): its hook <lambda> may change the weight"):
        norm2(doubled, 4)
    pruned = nn.utils.prune.l1_unstructured(nn.Linear(3, 3), "weight", amount=1)
    with pytest.raises(TypeError, match=r"norm2\(Linear\): its hook L1Unstructured may change the weight"):
        norm2(pruned)


def test_numpy_integers_are_integers():
    layer = nn.Conv2d(1, 1, 3)
    assert torch.equal(norm2(layer, np.int64(8), np.int32(3)), norm2(layer, (8, 8), 3))


def test_bad_input():
    layer = nn.Conv2d(1, 1, 3)
    with pytest.raises(ValueError, match=r"norm2\(input_size=\(32,\)\): Conv2d needs 2 sizes, got 1"):
        norm2(layer, (32,))
    with pytest.raises(ValueError, match="the output would be empty"):
        norm2(layer, 2)
    with pytest.raises(ValueError, match=r"norm2\(iterations=-1\): expected at least 0"):
        norm2(layer, 8, -1)
    with pytest.raises(ValueError, match=r"norm2\(LazyLinear\): the layer has no weights yet"):
        norm2(nn.LazyLinear(3))
    assert norm2(nn.Conv2d(3, 4, 3, device="meta")).is_meta  # shapes without values give a shape
    with torch.no_grad():
        layer.weight[0, 0, 0, 0] = math.nan
    with pytest.raises(ValueError, match=r"norm2\(kernel\): expected finite values, got 1 NaN"):
        norm2(layer, 8)
