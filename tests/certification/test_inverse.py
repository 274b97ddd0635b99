"""Inverses: constants against Jacobians, values against what they came from, refusals with their reasons."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gramcert
from gramcert import inverse_bound, invert, smallest_singular_value, spectral_norm


def seeded(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return module


def contracting(layer, norm, seed=0):
    seeded(layer, seed)
    with torch.no_grad():
        layer.weight.mul_(norm / spectral_norm(layer).upper)
    return layer


class Block(nn.Module):
    """x + W φ(V φ(x)), or minus, or around a linear map, in plain torch."""

    def __init__(self, channels, norm, seed, *, minus=False, around=None):
        super().__init__()
        self.first = contracting(nn.Conv2d(channels, 5, 3, padding=1), norm, seed)
        self.second = contracting(nn.Conv2d(5, channels, 3, padding=1), 1.0, seed + 1)
        self.minus, self.around = minus, around

    def forward(self, x):
        y = self.second(torch.tanh(self.first(torch.nn.functional.elu(x))))
        x = x if self.around is None else self.around(x)
        return x - y if self.minus else x + y


def jacobian(module, x):
    flat = torch.func.jacrev(lambda v: module(v[None])[0])(x)
    return flat.reshape(x.numel(), x.numel())


@settings(max_examples=8)
@given(st.integers(0, 1000), st.floats(0.05, 0.9), st.booleans(), st.booleans())
def test_constants_hold_at_every_point(seed, norm, minus, linear):
    around = contracting(nn.Conv2d(4, 4, 1, bias=False), 1.0, seed + 9) if linear else None
    if around is not None:
        with torch.no_grad():
            around.weight.copy_(torch.linalg.qr(around.weight[..., 0, 0])[0][..., None, None])
    network = nn.Sequential(nn.PixelUnshuffle(2), Block(4, norm, seed, minus=minus, around=around), nn.LeakyReLU(0.3))
    constant = inverse_bound(network, input_shape=(1, 4, 4))
    points = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(seed)).double()
    network.double()
    for point in points:
        smallest = torch.linalg.svdvals(jacobian(network, point).detach())[-1].item()
        assert 1 / smallest <= constant * (1 + 1e-9)


@settings(max_examples=8)
@given(st.integers(0, 1000), st.floats(0.05, 0.9))
def test_inverses_are_as_near_as_they_say(seed, norm):
    network = nn.Sequential(Block(3, norm, seed), nn.LeakyReLU(0.25), Block(3, norm, seed + 5, minus=True))
    x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    exact = network.double()(x).detach()  # up to its own rounding, which the constant carries back
    found = invert(network.float(), exact)
    assert found.x.dtype == found.error.dtype == torch.float64
    doubt = 1e-13 * found.constant * float(exact.abs().sum())
    assert bool(((found.x - x).flatten(1).norm(dim=1) <= found.error + doubt).all())
    assert bool((found.error <= 1e-10 * found.constant).all())


def test_residual_blocks_have_one_over_one_minus_l():
    block = gramcert.nn.Residual(nn.Sequential(contracting(nn.Linear(6, 6), 0.5), nn.Tanh()), weight=None)
    assert 1.99 <= inverse_bound(block) <= 2.001
    assert inverse_bound(block, input_shape=(6,)) == pytest.approx(inverse_bound(block), rel=2e-3)
    conv = gramcert.nn.Residual(nn.Sequential(contracting(nn.Conv2d(2, 2, 3, padding=1), 0.5), nn.ReLU()), weight=None)
    assert inverse_bound(conv, 8) <= inverse_bound(conv) * (1 + 1e-3) <= 2.003


def test_linear_layers():
    layer = seeded(nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"))
    smallest = smallest_singular_value(layer, 7)
    assert inverse_bound(layer, 7) == pytest.approx(1 / smallest.lower, rel=2e-3)
    x = torch.randn(2, 3, 7, 7, dtype=torch.float64)
    found = invert(layer, layer.double()(x).detach())
    assert bool(((found.x - x).flatten(1).norm(dim=1) <= found.error + 1e-12 * found.constant).all())
    orthogonal = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(0)))[0]
    rotation = nn.Linear(5, 5)
    with torch.no_grad():
        rotation.weight.copy_(orthogonal)
    assert inverse_bound(rotation) <= 1 + 1e-5
    assert inverse_bound(nn.Sequential(nn.Flatten(), nn.Unflatten(1, (2, 3))), input_shape=(3, 2)) == 1.0


class Mixed(nn.Module):
    """The first term of the sum is singular, the second an invertible map that outweighs it."""

    def forward(self, x):
        return 0.1 * (x + x.flip(1)) + 3 * x


def test_any_term_of_a_sum_may_be_the_one_that_is_undone():
    assert inverse_bound(Mixed(), input_shape=(4,)) == pytest.approx(1 / 2.8, rel=1e-3)


def test_batch_normalisation_in_evaluation_mode():
    norm = nn.BatchNorm2d(3).eval()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([2.0, -0.25, 1.0]))
    assert inverse_bound(norm, input_shape=(3, 4, 4)) == pytest.approx(4, rel=1e-3)
    with pytest.raises(TypeError, match="only known at one input size"):  # where the largest factor stands for all
        inverse_bound(norm)


@pytest.mark.parametrize(
    ("module", "shape", "reason"),
    [
        (nn.ReLU(), (3,), "slopes of relu are between 0 and 1"),
        (nn.Linear(3, 4), (3,), "not as many outputs as inputs"),
        (nn.Conv2d(2, 2, 3), (2, 5, 5), "not as many outputs as inputs"),
        (gramcert.nn.MaxMin(), (4,), "not known to be invertible"),
        (gramcert.nn.Residual(nn.Linear(3, 3), weight=None), (3,), "this sum is not known to be invertible"),
        (nn.Softmax(1), (4,), "not known to be invertible"),
        (nn.Sequential(nn.Tanh(), nn.LayerNorm(4)), (4,), "not known to be invertible"),
    ],
)
def test_what_is_not_known_to_be_invertible_is_refused(module, shape, reason):
    if isinstance(module, gramcert.nn.Residual):
        contracting(module.module, 1.5)
    with pytest.raises(TypeError, match=rf"inverse_bound\({type(module).__name__}\).*{reason}"):
        inverse_bound(module, input_shape=shape)


def test_singular_layers_are_refused():
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.ones(3, 3))
    with pytest.raises(TypeError, match="smallest singular value may be 0"):
        inverse_bound(layer)
    shift = nn.Conv1d(1, 1, 3, padding=1, bias=False)
    with torch.no_grad():
        shift.weight.copy_(torch.tensor([[[0.0, 0.0, 1.0]]]))
    with pytest.raises(TypeError, match="smallest singular value may be 0"):
        inverse_bound(shift)


def test_errors():
    network = contracting(nn.Linear(3, 3), 1.0)
    with pytest.raises(TypeError, match=r"invert\(y\): expected a batch"):
        invert(network, torch.zeros(3))
    with pytest.raises(TypeError, match=r"invert\(y\): expected a batch"):
        invert(network, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"invert\(y\): expected finite"):
        invert(network, torch.full((2, 3), torch.nan))
    with pytest.raises(ValueError, match=r"invert\(y\): expected outputs of shape \(3,\), got \(4,\)"):
        invert(network, torch.zeros(2, 4), input_shape=(3,))
    with pytest.raises(TypeError, match=r"inverse_bound\(module\): expected a torch.nn.Module"):
        inverse_bound(torch.eye(3))
    with pytest.raises(ValueError, match="expected one of them, got both"):
        inverse_bound(network, 3, input_shape=(3,))
