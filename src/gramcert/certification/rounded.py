"""Layers in float64, each with a bound of its own rounding for every sample.

Sums of products are matrix products on the CPU, so that no convolution routine has to be trusted; a sum of n products,
in any order, is off by at most γ_n·Σ|products|, and Σ|products| over all entries is at most ‖|A|‖·‖x‖ in norm. Weights
are widened to float64, which loses nothing.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gramcert.certified.tapwise import TapwiseLayer
from gramcert.geometry.axis import layer_axes
from gramcert.geometry.convolution import Convolution, effective_weight
from gramcert.nn.activations import Abs, GroupSort, Householder, MaxMin
from gramcert.nn.pooling import L2Pool, ScaledAvgPool, Subsample
from gramcert.nn.shaping import BatchCentering, Centering, PadChannels, Shift
from gramcert.nn.torch_layers import Size
from gramcert.rounding import gamma, next_up, norm_up, root_up, row_norms_up, underflow, up

# What a layer does to a batch in float64: its values, and for each sample a bound of the rounding in them.
Rounded = Callable[[Tensor], tuple[Tensor, Tensor]]

# They move, select or negate numbers, and round nothing.
_EXACT: tuple[type[nn.Module], ...] = (
    nn.Identity,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
    nn.ReLU,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    PadChannels,
    Subsample,
    MaxMin,
    GroupSort,
    Abs,
)


class Linear:
    """x ↦ Ax by matrix products; A a matrix on the last axis, or a convolution at one input size, without its bias.

    Args:
        name: what errors call it.
        layer: A.
        size: spatial size of the input of a convolution.
    """

    def __init__(self, name: str, layer: Convolution | Tensor, size: Size) -> None:
        self.matrix: Tensor | None = None
        if isinstance(layer, Tensor):
            self.matrix = _real(name, layer)
            layer, size = Convolution(self.matrix[:, :, None]), (1,)
        assert size is not None
        self.name = name
        self.shape = (layer.in_channels,) if self.matrix is not None else (layer.in_channels, *size)
        kernel = _real(name, layer.kernel)
        self.taps = TapwiseLayer(kernel.reshape(layer.groups, -1, *kernel.shape[1:]), layer_axes(layer, size))
        self.transposed, self.groups = layer.transposed, layer.groups
        self.terms = self.taps.adjoint_terms if layer.transposed else self.taps.terms
        self.norm = self.taps.absolute_norm

    @classmethod
    def of(cls, call: str, layer: nn.Module, size: Size) -> "Linear":
        """The weights that a layer of torch uses."""
        name = f"{call}({own_type(layer).__name__})"
        if isinstance(layer, nn.Linear):
            return cls(name, effective_weight(call, layer, nn.Linear), None)
        return cls(name, Convolution.of(layer, call=call), size)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Ax + b on a batch, and the bound γ·(‖|A|‖·‖x‖ + ‖b‖)."""
        if tuple(x.shape[-len(self.shape) :]) != self.shape:
            wanted = ", ".join(map(str, self.shape))
            raise ValueError(f"{self.name}: expected inputs of shape (..., {wanted}), got {tuple(x.shape)}")
        amount = next_up(norms(x) * self.norm)
        if self.matrix is not None:
            y = x @ self.matrix.mT
        else:
            grouped = x.unflatten(1, (self.groups, -1))
            y = (self.taps.adjoint if self.transposed else self.taps.apply)(grouped).flatten(1, 2)
        if bias is not None:
            offset = _real(self.name, bias)
            if self.matrix is None:
                offset = offset.reshape(-1, *(1,) * (y.dim() - 2))
            y = y + offset
            amount = next_up(amount + norm_up(offset.expand(y.shape[1:])))
        return y, error(self.terms + 1, amount, y)


def _real(name: str, weight: Tensor) -> Tensor:
    """A weight in float64, which loses nothing of a real one."""
    if weight.is_complex():
        raise TypeError(f"{name}: expected real weights, got {weight.dtype}")
    return weight.detach().cpu().double()


def rule(layer: nn.Module) -> Rounded | None:
    """How a layer without a matrix computes and rounds; ``None`` if that is not known."""
    kind = own_type(layer)
    if kind not in _EXACT and kind not in _RULES:
        return None
    layer = copy.deepcopy(layer).cpu()  # wherever it is
    if kind in _EXACT:
        return lambda x: (layer(x), x.new_zeros(len(x)))
    return _RULES[kind](layer)


def own_type(layer: nn.Module) -> type[nn.Module]:
    """The class of a layer; of a parametrised one that before torch made a class for its parametrisation."""
    kind: type[nn.Module] = parametrize.type_before_parametrizations(layer)
    return kind


def norms(x: Tensor) -> Tensor:
    """Upper bounds of the norms of the samples."""
    return row_norms_up(x.flatten(1))


def error(terms: int, amount: Tensor, y: Tensor, factor: float = 1.0) -> Tensor:
    """γ·amount, and what the operations of that many terms per entry may lose to underflow, before a factor."""
    lost = up(up(underflow(2 * terms) * float(max(1, y[0].numel()))) * max(1.0, abs(factor)))
    return next_up(next_up(amount * gamma(terms)) + lost)


def _shift(layer: Any) -> Rounded:
    """One sum."""

    def apply(x: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x)  # torch widens the float32 numbers of the layer
        return y, error(1, norms(y), y)

    return apply


def _flatten(layer: Any) -> Rounded:
    """Nothing is rounded, if the first axis remains that of the batch."""

    def apply(x: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x)
        if y.dim() < 2 or len(y) != len(x):
            raise ValueError(f"{layer}: it joins inputs of a batch, of shape {tuple(x.shape)}, to {tuple(y.shape)}")
        return y, x.new_zeros(len(x))

    return apply


def _clipping(layer: Any) -> Rounded:
    """Nothing is rounded, but a network that runs in float32 has other limits than one in float64."""
    off = max(_off(layer.min_val), _off(layer.max_val))

    def apply(x: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x)
        return y, x.new_full((len(x),), up(off * root_up(y[0].numel())) if off else 0.0)

    return apply


def _leaky(layer: Any) -> Rounded:
    """One product; and a network that runs in float32 has another slope than one in float64."""
    off = _off(layer.negative_slope)

    def apply(x: Tensor) -> tuple[Tensor, Tensor]:
        moved = next_up(norms(x) * off)  # before the layer, which may overwrite x
        y = layer(x)
        return y, next_up(moved + error(1, norms(y), y))

    return apply


def _off(number: float) -> float:
    """How far a number is from itself in float32."""
    rounded = float(torch.tensor(float(number), dtype=torch.float32))
    return up(abs(number - rounded)) if rounded != number else 0.0


def _means(layer: Any, factor: float = 1.0, constant: float = 1.0) -> Rounded:
    """Sum, quotient, factor; the same layer on |x|, with |factor|, has the same constant."""
    terms = _taps(layer) + 3

    def apply(x: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x)
        return y, error(terms, next_up(norms(x) * constant), y, factor)

    return apply


def _scaled_means(layer: ScaledAvgPool) -> Rounded:
    """Means times a factor."""
    return _means(layer, layer.factor, layer.guarantee(type(layer).__name__, None)[0])


def _lengths(layer: L2Pool) -> Rounded:
    """Squares, a mean of them, a root, a factor: relative to the output, but for squares that underflow."""
    terms = _taps(layer) + 5

    def apply(x: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x)
        # √(a + ε) - √a <= √ε in each entry.
        lost = up(up(root_up(underflow(4 * terms)) * abs(layer.factor)) * float(y[0].numel()))
        return y, next_up(error(terms, norms(y), y) + lost)

    return apply


def _taps(layer: Any) -> int:
    """Places of a window; one size, alone or in a tuple, is that of every axis."""
    sizes = (layer.kernel_size,) if isinstance(layer.kernel_size, int) else tuple(layer.kernel_size)
    axes = layer.axes if isinstance(layer, (ScaledAvgPool, L2Pool)) else int(type(layer).__name__[-2])
    return math.prod(sizes) if len(sizes) == axes else int(sizes[0] ** axes)


def _centering(layer: Any) -> Rounded:
    """In x - mean + bias the means of |x| are no longer than x."""

    def apply(x: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x)
        places = x[0, 0].numel()
        bias = up(norm_up(layer.bias.detach().cpu().double()) * root_up(places))
        return y, error(places + 4, next_up(2 * norms(x) + bias), y)

    return apply


def _batch_centering(layer: Any) -> Rounded:
    """One shift, mean - bias, made in float64."""
    mean, bias = (part.detach().cpu().double() for part in (layer.running_mean, layer.bias))

    def apply(x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x.movedim(1, -1) - (mean - bias)).movedim(-1, 1)
        shift = up(up(norm_up(mean) + norm_up(bias)) * root_up(x[0, 0].numel()))
        return y, error(3, next_up(norms(x) + shift), y)

    return apply


def _householder(layer: Any) -> Rounded:
    """In z - 2·min(vᵀz, 0)·v sums of |z| + 2|v||v|ᵀ|z|."""
    largest = float(row_norms_up(layer.normals.detach().cpu().double()).max())
    amount = up(1 + up(2 * up(largest * largest)))

    def apply(x: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x)
        return y, error(8, next_up(norms(x) * amount), y, amount)

    return apply


_RULES: dict[type[nn.Module], Callable[[Any], Rounded]] = {
    Shift: _shift,
    nn.Flatten: _flatten,
    nn.ReLU6: _clipping,
    nn.Hardtanh: _clipping,
    nn.LeakyReLU: _leaky,
    nn.AvgPool1d: _means,
    nn.AvgPool2d: _means,
    nn.AvgPool3d: _means,
    ScaledAvgPool: _scaled_means,
    L2Pool: _lengths,
    Centering: _centering,
    BatchCentering: _batch_centering,
    Householder: _householder,
}
