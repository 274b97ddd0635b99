"""The weights of a layer as exact float64 numbers of moderate size, without taps that are zero anyway."""

from dataclasses import dataclass

from torch import Tensor

from gramcert.geometry.axis import Axis
from gramcert.geometry.convolution import Convolution
from gramcert.geometry.padding import Pairs
from gramcert.geometry.reduction import every_size_square, reduced_kernels
from gramcert.rounding import down, lift, scaled_down, scaled_up, up


@dataclass(frozen=True)
class LiftedLayer:
    """A layer's kernels times a power of two, (groups, out, in, *taps), trimmed of all-zero taps at the borders.

    Attributes:
        layer: the layer itself, for its geometry.
        kernels: scaled to a largest entry in [½, 1), in float64 on the CPU; of a transposed layer those of its adjoint.
        exponent: the weights are kernels·2^exponent.
        lost: how far scaling may have moved the norm, absolutely, in scaled units.
        trimmed: zero taps left out at the beginning and the end of each axis.
    """

    layer: Convolution
    kernels: Tensor
    exponent: int
    lost: float
    trimmed: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, layer: Convolution) -> "LiftedLayer":
        """Lift and trim the weights of a layer with at least one that is not zero."""
        scaled, lost, exponent = lift(layer.kernel)
        kernels, trimmed = _trim(scaled.reshape(layer.groups, -1, *scaled.shape[1:]))
        # A weight is at most one entry of each row of the matrix, and of each column once per repetition of a pixel.
        moved = lost * kernels.numel() * every_size_square(layer)
        return cls(layer, kernels, exponent, moved, trimmed)

    def reduced(self, kernels: Tensor) -> Tensor:
        """Stride-1 kernels, (groups, out, in·phases, *taps)."""
        return reduced_kernels(kernels, self.layer.stride, self.layer.dilation)

    def at(self, axes: tuple[Axis, ...]) -> tuple[Tensor, tuple[Axis, ...]]:
        """Kernels and axes at one input size, without taps that no output reads a place of the input with."""
        axes = tuple(axis.without_taps(*cut) for axis, cut in zip(axes, self.trimmed, strict=True))
        kernels = self.kernels
        for dim, axis in enumerate(axes, 3):
            reads = (axis.sources() < axis.size).any(0)
            kernels = kernels * reads.reshape(-1, *(1,) * (kernels.dim() - 1 - dim))
        kernels, trimmed = _trim(kernels)
        return kernels, tuple(axis.without_taps(*cut) for axis, cut in zip(axes, trimmed, strict=True))

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
