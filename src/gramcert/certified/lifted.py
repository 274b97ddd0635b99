"""The weights of a layer as exact float64 numbers of moderate size, without taps that make no difference."""

import math
from dataclasses import dataclass

from torch import Tensor

from gramcert.geometry.axis import Axis
from gramcert.geometry.convolution import Convolution
from gramcert.geometry.padding import Pairs
from gramcert.geometry.reduction import every_size_square, reduced_kernels
from gramcert.rounding import down, lift, scaled_down, scaled_up, up


@dataclass(frozen=True)
class LiftedLayer:
    """A layer's kernels times a power of two, (groups, out, in, *taps), for every input size or for one.

    Taps at the borders that are zero, or that no output reads a place of the input with, are left out, and only then is
    the rest scaled: what remains has its largest entry in [½, 1).

    Attributes:
        layer: the layer itself.
        axes: of the remaining kernels at one input size, or ``None`` for every size.
        kernels: float64 on the CPU; of a transposed layer those of its adjoint; empty where nothing remains.
        square: the squared norm of the padding map for every size, or 1 where pixels do not repeat.
        exponent: the remaining weights are kernels·2^exponent.
        lost: how far scaling may have moved the norm, absolutely, in scaled units.
    """

    layer: Convolution
    axes: tuple[Axis, ...] | None
    kernels: Tensor
    square: int
    exponent: int
    lost: float

    @classmethod
    def of(cls, layer: Convolution, axes: tuple[Axis, ...] | None = None) -> "LiftedLayer":
        """Trim and scale the weights of a layer, at one input size if its axes are given."""
        exact = layer.kernel.detach().cpu().double()
        kernels, trimmed = _trim(exact.reshape(layer.groups, -1, *exact.shape[1:]))
        square = every_size_square(layer, trimmed)
        if axes is not None and kernels.numel():
            axes = _without(axes, trimmed)
            for dim, axis in enumerate(axes, 3):
                kernels = kernels * axis.reads().reshape(-1, *(1,) * (kernels.dim() - 1 - dim))
            kernels, unread = _trim(kernels)
            axes = _without(axes, unread)
        if not kernels.numel():
            return cls(layer, axes, kernels, 1, 0, 0.0)
        scaled, lost, exponent = lift(kernels)
        # Each tap contributes at most √(repetitions) times the norm of its matrix.
        copies = square if axes is None else math.prod(axis.repetition for axis in axes)
        return cls(layer, axes, scaled, square, exponent, up(up(lost * scaled.numel()) * copies) if lost else 0.0)

    @property
    def is_zero(self) -> bool:
        """Whether no weight is left."""
        return not self.kernels.numel()

    def reduced(self) -> Tensor:
        """Stride-1 kernels, (groups, out, in·phases, *taps)."""
        return reduced_kernels(self.kernels, self.layer.stride, self.layer.dilation)

    def bounds(self, lower: float, upper: float) -> tuple[float, float]:
        """Bounds for the layer itself from those of the scaled one."""
        if self.lost:
            lower, upper = max(0.0, down(lower - self.lost)), up(upper + self.lost)
        return scaled_down(lower, self.exponent), scaled_up(upper, self.exponent)


def _trim(kernels: Tensor) -> tuple[Tensor, Pairs]:
    """Drop taps at the borders that are zero everywhere; say how many at the beginning and the end of each axis."""
    trimmed = []
    for dim in range(3, kernels.dim()):
        used = kernels.ne(0).movedim(dim, 0).flatten(1).any(1).nonzero()[:, 0].tolist()
        first, last = (used[0], used[-1]) if used else (0, -1)
        trimmed.append((first, kernels.shape[dim] - 1 - last))
        kernels = kernels.narrow(dim, first, last - first + 1)
    return kernels.contiguous(), tuple(trimmed)


def _without(axes: tuple[Axis, ...], trimmed: Pairs) -> tuple[Axis, ...]:
    return tuple(axis.without_taps(*cut) for axis, cut in zip(axes, trimmed, strict=True))
