"""The weights of a layer as exact float64 numbers of moderate size, without taps that make no difference."""

import functools
import math
from dataclasses import dataclass

from torch import Tensor

from gramcert.certified.work import Work
from gramcert.geometry.axis import Axis
from gramcert.geometry.convolution import Convolution
from gramcert.geometry.padding import Pairs
from gramcert.geometry.reduction import every_size_square, reduced_kernels
from gramcert.rounding import down, largest_exponent, lift_by, lost_by_scaling, scaled_down, scaled_up, up


@dataclass(frozen=True)
class ScaledWeights:
    """Weights times 2^-exponent, which are made when they are asked for; matrices are read piece by piece instead."""

    stored: Tensor
    exponent: int

    @functools.cached_property
    def lifted(self) -> Tensor:
        """All of them in float64 on the CPU."""
        return lift_by(self.stored, -self.exponent).contiguous()


@dataclass(frozen=True)
class LiftedLayer:
    """A layer's kernels times a power of two, (groups, out, in, *taps), for every input size or for one.

    Taps at the borders that are zero, or that no output reads a place of the input with, are left out, and only then is
    the rest scaled: what remains has its largest entry in [½, 1).

    Attributes:
        layer: the layer itself.
        axes: of the remaining kernels at one input size, or ``None`` for every size.
        weights: the remaining ones, as stored; of a transposed layer those of its adjoint; empty where nothing remains.
        square: the squared norm of the padding map for every size, or 1 where pixels do not repeat.
        lost: how far scaling may have moved the norm, absolutely, in scaled units.
        trimmed: how many taps were left out at the beginning and at the end of each axis.
    """

    layer: Convolution
    axes: tuple[Axis, ...] | None
    weights: ScaledWeights
    square: int
    lost: float
    trimmed: Pairs

    @classmethod
    def of(cls, layer: Convolution, axes: tuple[Axis, ...] | None = None) -> "LiftedLayer":
        """Trim and scale the weights of a layer, at one input size if its axes are given."""
        stored = layer.kernel.detach().unflatten(0, (layer.groups, -1))
        kernels, trimmed = _trim(stored)
        square = every_size_square(layer, trimmed)
        if axes is not None and kernels.numel():
            axes = _without(axes, trimmed)
            for dim, axis in enumerate(axes, 3):
                read = axis.reads()
                if not bool(read.all()):
                    kernels = kernels.cpu() * read.reshape(-1, *(1,) * (kernels.dim() - 1 - dim))
            kernels, unread = _trim(kernels)
            axes = _without(axes, unread)
            trimmed = tuple((a + c, b + d) for (a, b), (c, d) in zip(trimmed, unread, strict=True))
        if not kernels.numel():
            return cls(layer, axes, ScaledWeights(kernels, 0), 1, 0.0, trimmed)
        exponent = largest_exponent(kernels)
        lost = lost_by_scaling(kernels, -exponent)
        # Each tap contributes at most √(repetitions) times the norm of its matrix.
        copies = square if axes is None else math.prod(axis.repetition for axis in axes)
        lost = up(up(lost * kernels.numel()) * copies) if lost else 0.0
        return cls(layer, axes, ScaledWeights(kernels, exponent), square, lost, trimmed)

    def lift(self, work: Work) -> None:
        """Make the kernels, for methods that work on all of them at once; stop where that does not fit."""
        work.require_bytes("weights in float64", self.bytes_for(self.layer))
        kept = (self.kernels, self.reduced, self.weights.stored)
        held = {weights.data_ptr(): weights.nbytes for weights in kept}
        held.pop(self.layer.kernel.data_ptr(), None)
        work.held += sum(held.values())

    @staticmethod
    def bytes_for(layer: Convolution) -> int:
        """What it takes to trim and scale the weights, and to reduce them.

        At one time those of the taps that are read, as stored, a copy in float64 of theirs, the scaled ones and these
        with their taps in order; at another the first, the scaled ones and two stages of the reduced ones, whose taps
        are filled up to a multiple of the phases.
        """
        phases = [
            min(taps, stride // math.gcd(stride, dilation))
            for taps, stride, dilation in zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
        ]
        filled = math.prod(-(-taps // count) * count for taps, count in zip(layer.kernel_size, phases, strict=True))
        reduced = 2 * filled // math.prod(layer.kernel_size) + 1 if max(phases) > 1 else 0
        return 8 * layer.kernel.numel() * max(4, 2 + reduced)

    @property
    def is_matrix(self) -> bool:
        """Whether one tap is left, so that every group has one symbol, its matrix."""
        return self.weights.stored[0, 0, 0].numel() == 1

    @property
    def exponent(self) -> int:
        """The remaining weights are kernels·2^exponent."""
        return self.weights.exponent

    @property
    def kernels(self) -> Tensor:
        """The remaining weights, scaled, in float64 on the CPU."""
        return self.weights.lifted

    @property
    def is_zero(self) -> bool:
        """Whether no weight is left."""
        return not self.weights.stored.numel()

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
    return kernels, tuple(trimmed)


def _without(axes: tuple[Axis, ...], trimmed: Pairs) -> tuple[Axis, ...]:
    return tuple(axis.without_taps(*cut) for axis, cut in zip(axes, trimmed, strict=True))
