"""The weights of a layer as exact float64 numbers of moderate size, without taps that make no difference."""

import functools
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
        trimmed: how many taps were left out at the beginning and at the end of each axis.
    """

    layer: Convolution
    axes: tuple[Axis, ...] | None
    kernels: Tensor
    square: int
    exponent: int
    lost: float
    trimmed: Pairs

    @classmethod
    def of(cls, layer: Convolution, axes: tuple[Axis, ...] | None = None) -> "LiftedLayer":
        """Trim and scale the weights of a layer, at one input size if its axes are given."""
        exact = layer.kernel.detach().cpu().double()
        kernels, trimmed = _trim(exact.reshape(layer.groups, -1, *exact.shape[1:]))
        square = every_size_square(layer, trimmed)
        if axes is not None and kernels.numel():
            axes = _without(axes, trimmed)
            for dim, axis in enumerate(axes, 3):
                read = axis.reads()
                if not bool(read.all()):
                    kernels = kernels * read.reshape(-1, *(1,) * (kernels.dim() - 1 - dim))
            kernels, unread = _trim(kernels)
            axes = _without(axes, unread)
            trimmed = tuple((a + c, b + d) for (a, b), (c, d) in zip(trimmed, unread, strict=True))
        if not kernels.numel():
            return cls(layer, axes, kernels, 1, 0, 0.0, trimmed)
        scaled, lost, exponent = lift(kernels, overwrite=exact.data_ptr() != layer.kernel.data_ptr())
        # Each tap contributes at most √(repetitions) times the norm of its matrix.
        copies = square if axes is None else math.prod(axis.repetition for axis in axes)
        lost = up(up(lost * scaled.numel()) * copies) if lost else 0.0
        return cls(layer, axes, scaled, square, exponent, lost, trimmed)

    @staticmethod
    def bytes_for(layer: Convolution) -> int:
        """What it takes to trim and scale the weights, and to reduce them.

        At one time a copy of the weights, one without the taps that are not read, the scaled ones and those scaled
        back; at another the scaled ones and two stages of the reduced ones, whose taps are filled up to a multiple of
        the phases.
        """
        phases = [
            min(taps, stride // math.gcd(stride, dilation))
            for taps, stride, dilation in zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
        ]
        filled = math.prod(-(-taps // count) * count for taps, count in zip(layer.kernel_size, phases, strict=True))
        reduced = 2 * filled // math.prod(layer.kernel_size) + 1 if max(phases) > 1 else 0
        return 8 * layer.kernel.numel() * max(4, 1 + reduced)

    @property
    def bytes(self) -> int:
        """What is kept of them."""
        return sum({weights.data_ptr(): weights.nbytes for weights in (self.kernels, self.reduced)}.values())

    @property
    def is_zero(self) -> bool:
        """Whether no weight is left."""
        return not self.kernels.numel()

    @functools.cached_property
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
        used = [index for index in range(kernels.shape[dim]) if bool(kernels.select(dim, index).count_nonzero())]
        first, last = (used[0], used[-1]) if used else (0, -1)
        trimmed.append((first, kernels.shape[dim] - 1 - last))
        kernels = kernels.narrow(dim, first, last - first + 1)
    return kernels.contiguous(), tuple(trimmed)


def _without(axes: tuple[Axis, ...], trimmed: Pairs) -> tuple[Axis, ...]:
    return tuple(axis.without_taps(*cut) for axis, cut in zip(axes, trimmed, strict=True))
