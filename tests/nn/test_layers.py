"""Activations, pooling, shaping and combining layers against their Jacobians, and the layers of Corollary 1."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gramcert.nn as gnn
from gramcert import lipschitz_bound
from reference import jacobian_norm

ROUNDING = 100 * torch.finfo(torch.float32).eps


def check(layer, x):
    """The Jacobian with the deployed weights is below the constant; the constant is returned."""
    bound = lipschitz_bound(layer)
    deployed = gnn.export(layer).double()
    assert jacobian_norm(deployed, x) <= bound * (1 + 1e-12)
    assert torch.allclose(gnn.export(layer)(x), layer.eval()(x))
    return bound


IMAGE = torch.linspace(-1, 1, 4 * 4 * 5).sin().mul(7).cos().reshape(1, 4, 4, 5)


@pytest.mark.parametrize(
    "layer",
    [
        gnn.MaxMin(),
        gnn.GroupSort(2),
        gnn.GroupSort(4),
        gnn.Abs(),
        gnn.ScaledAvgPool(2),
        gnn.ScaledAvgPool((2, 3), 1),
        gnn.ScaledL2NormPool(2),
        gnn.ScaledL2NormPool((3, 2), (2, 1)),
        gnn.Subsample(2),
        gnn.PadChannels(6),
        gnn.Shift([0.1, -0.2, 0.3, 1.0]),
        gnn.LayerCentering(4),
        gnn.BatchCentering(4).eval(),
        gnn.Flatten(),
        nn.ReLU(),
        nn.PixelUnshuffle(1),
    ],
    ids=lambda layer: str(layer).split("\n")[0],
)
def test_constant_is_exactly_one(layer):
    assert check(layer, IMAGE) == 1
    # And it is reached, or nearly, where the layer does not shrink by its nature.
    if not isinstance(layer, (gnn.ScaledL2NormPool, gnn.ScaledAvgPool)) or layer.overlap == 1:
        assert jacobian_norm(gnn.export(layer).double(), IMAGE) > 1 - 1e-7


@pytest.mark.parametrize(
    "layer", [gnn.ScaledAvgPool(2), gnn.ScaledL2NormPool(2), gnn.Concatenation(nn.Identity(), gnn.Abs())]
)
def test_layers_without_weights_compile_as_one_graph(layer):
    x = torch.randn(1, 2, 4, 4)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_pooling_of_any_overlap(axes, taps, stride, extra):
    """Windows that overlap or leave gaps, in one to three dimensions."""
    if axes == 3:
        taps, extra = min(taps, 2), min(extra, 1)
    x = torch.randn(1, 1, *(taps + extra,) * axes, generator=torch.Generator().manual_seed(taps))
    for kind in (gnn.ScaledAvgPool, gnn.ScaledL2NormPool):
        layer = kind(taps, stride, axes=axes)
        assert jacobian_norm(layer, x) <= lipschitz_bound(layer) * (1 + 1e-12) == 1 + 1e-12
    layer = gnn.Subsample(stride, axes=axes)
    assert jacobian_norm(layer, x) == 1


def test_pooling_values():
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert torch.equal(gnn.ScaledAvgPool(4)(x), x.sum().reshape(1, 1, 1, 1) / 4)
    torch.testing.assert_close(gnn.ScaledL2NormPool(4)(x).flatten(), x.norm().reshape(1))
    assert torch.equal(gnn.Subsample(2)(x).flatten(), torch.tensor([0.0, 2.0, 8.0, 10.0]))
    zero = torch.zeros(1, 1, 4, 4, requires_grad=True)
    gnn.ScaledL2NormPool(2)(zero).sum().backward()
    assert torch.equal(zero.grad, torch.zeros_like(zero))


def test_pooling_whose_stride_was_changed_afterwards():
    pool = gnn.ScaledAvgPool(2)
    pool.stride = (1, 1)
    assert jacobian_norm(pool, torch.zeros(1, 1, 4, 4)) <= lipschitz_bound(pool) <= 2 * (1 + ROUNDING)
    assert jacobian_norm(pool, torch.zeros(1, 1, 16, 16)) > 1.98


def test_householder():
    layer = gnn.Householder(6)
    x = torch.randn(3, 6, 2)
    torch.testing.assert_close(layer(x), gnn.MaxMin()(x))  # as it begins
    layer.normals = torch.randn(3, 2)
    for _ in range(5):
        assert check(layer, torch.randn(1, 6, 2)) <= 1 + 1e-6
    # Continuous across the line, and an isometry on each side.
    normal = layer.normals.detach()
    line = torch.stack([normal[:, 1], -normal[:, 0]], 1)
    near = torch.stack([(line + s * 1e-4 * normal).T.flatten() for s in (-1, 1)])
    assert (layer(near)[0] - layer(near)[1]).norm() < 1e-3
    torch.testing.assert_close(layer(x).norm(), x.norm())
    layer(x).square().sum().backward()
    assert layer.parametrizations.normals.original.grad is not None


def test_householder_says_when_its_normals_are_too_long():
    """Not assumed: with a normal of length 1.1 the reflection stretches."""
    layer = gnn.Householder(2)
    nn.utils.parametrize.remove_parametrizations(layer, "normals")
    with torch.no_grad():
        layer.normals.mul_(1.1)
    assert lipschitz_bound(layer) == pytest.approx(2 * 1.21 - 1, rel=1e-6)
    assert jacobian_norm(layer.double(), torch.tensor([[-1.0, 1.0]])) <= lipschitz_bound(layer)


def test_batch_centering():
    layer = gnn.BatchCentering(3, momentum=1.0)
    x = torch.randn(5, 3, 4, 4) + 2
    torch.testing.assert_close(layer(x).mean((0, 2, 3)), torch.zeros(3), atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match=r"lipschitz_bound\(BatchCentering\): in training mode"):
        lipschitz_bound(layer)
    torch.testing.assert_close(layer.eval()(x).mean((0, 2, 3)), torch.zeros(3), atol=1e-6, rtol=0)
    assert lipschitz_bound(layer) == 1


def test_centering_removes_the_mean():
    x = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(gnn.LayerCentering(3)(x).mean((2, 3)), torch.zeros(2, 3), atol=1e-6, rtol=0)


def test_combinations():
    def block():
        return nn.Sequential(gnn.SRLinear(6, 6), nn.Tanh())

    x = torch.randn(1, 6)
    assert check(gnn.Residual(block()), x) <= 1 + ROUNDING
    assert check(gnn.Residual(block(), 0.3), x) <= 1 + ROUNDING
    assert check(gnn.Concatenation(block(), nn.Identity(), gnn.Abs()), x) <= 1 + ROUNDING
    twice = nn.Linear(6, 6, bias=False)
    with torch.no_grad():
        twice.weight.copy_(2 * torch.eye(6))
    assert check(gnn.Residual(twice, None), x) == pytest.approx(3, rel=2e-3)
    assert check(gnn.Residual(twice, 0.25), x) == pytest.approx(1.25, rel=2e-3)
    assert check(gnn.Concatenation(twice, nn.Identity(), normalized=False), x) == pytest.approx(math.sqrt(5), rel=2e-3)
    assert check(gnn.Concatenation(twice, nn.Identity()), x) == pytest.approx(math.sqrt(2.5), rel=2e-3)
    assert lipschitz_bound(gnn.Residual(nn.Tanh(), None)) == 2


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (gnn.SRLinear(5, 7), torch.randn(1, 5)),
        (gnn.SRLinear(7, 5, iterations=1), torch.randn(1, 7)),
        (gnn.SRConv1d(2, 4, 3, stride=2, padding=1), torch.randn(1, 2, 9)),
        (gnn.SRConv2d(2, 3, 3, padding=1, form="frequency"), torch.randn(1, 2, 5, 4)),
        (gnn.SRConv2d(2, 4, (3, 2), groups=2, padding=1, padding_mode="replicate"), torch.randn(1, 2, 5, 4)),
        (gnn.SRConv3d(2, 2, 2), torch.randn(1, 2, 3, 3, 2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_dense_layers(layer, x):
    assert check(layer, x) <= 1 + ROUNDING
    assert any("original" in name for name in layer.state_dict())
    with torch.no_grad():
        layer.weight = torch.randn_like(layer.weight)
    assert 0.3 < check(layer, x) <= 1 + ROUNDING


def test_dense_layers_begin_orthogonal():
    """With at least as many outputs as inputs, rescaling leaves the initial weight as it is."""
    for layer in (gnn.SRLinear(5, 8), gnn.SRConv2d(4, 8, 3, padding=1, groups=2)):
        torch.testing.assert_close(layer.weight, layer.parametrizations.weight.original)
        assert lipschitz_bound(layer) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gnn.MaxMin()(torch.zeros(1, 3)), r"MaxMin\(x\): expected \(batch, an even number of channels, ...\)"),
        (lambda: gnn.GroupSort(3)(torch.zeros(1, 4)), r"GroupSort\(x\): expected \(batch, a multiple of 3 channels"),
        (lambda: gnn.GroupSort(0), r"GroupSort\(group_size=0\): expected a positive int"),
        (lambda: gnn.Householder(3), r"Householder\(channels=3\): expected a positive even number"),
        (lambda: gnn.Householder(4)(torch.zeros(1, 2)), r"Householder\(x\): expected \(batch, 4, ...\), got shape"),
        (lambda: gnn.ScaledAvgPool(3)(torch.zeros(1, 1, 2, 2)), r"ScaledAvgPool\(x\): expected .* at least \(3, 3\)"),
        (lambda: gnn.ScaledL2NormPool(2, axes=4), r"ScaledL2NormPool\(axes=4\): expected 1 to 3"),
        (lambda: gnn.Subsample(2)(torch.zeros(1, 1, 4)), r"Subsample\(x\): expected \(batch, channels, 2 sizes\)"),
        (lambda: gnn.PadChannels(2)(torch.zeros(1, 3)), r"PadChannels\(x\): expected \(batch, at most 2 channels"),
        (lambda: gnn.Shift([math.nan]), r"Shift\(values\): expected a sequence of finite numbers"),
        (lambda: gnn.Shift([1.0])(torch.zeros(1, 3)), r"Shift\(x\): expected \(batch, 1, ...\)"),
        (lambda: gnn.LayerCentering(2)(torch.zeros(1, 2)), r"LayerCentering\(x\): expected \(batch, 2, sizes\)"),
        (lambda: gnn.BatchCentering(2, 0), r"BatchCentering\(momentum=0\): expected 0 < momentum <= 1"),
        (lambda: gnn.Residual(nn.ReLU(), 2), r"Residual\(weight=2\): expected a number from 0 to 1"),
        (lambda: gnn.Concatenation(), r"Concatenation\(\): expected at least one module"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
