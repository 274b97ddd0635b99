r"""Layers with zero padding at one input size as parts of circulants.

**Dilation.** With g = gcd(s, d) of stride and dilation only every g-th place is read: s, d and the input are divided by
g. Then outputs o = ρ + d·o' of one class ρ mod d read places of one residue only, sρ - p + d(so' + a) for p places of
padding before, and other classes read other residues. On each axis the layer falls into such classes, which have
dilation 1; its norm is the largest of the norms of their combinations. Most of them are alike.

**Stride.** The layer y[o] = Σ_a K[a] x[so + a - p] is a part of a circulant with m outputs and sm inputs, if these
circles are so long that no output meets, beyond the end of the circle, an input that it does not read.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass

import torch

from gramcert.certified.work import OutOfBudgetError, Work
from gramcert.geometry.axis import Axis
from gramcert.geometry.symbol import FrequencyGrid

EMBEDDED = "circulant but for a few vectors"

# Places on an axis up to which a Fourier transform is one product with a matrix.
LONGEST = 1024


@dataclass(frozen=True)
class Embedding:
    """A circulant that has a layer without dilation as a part of its matrix.

    Attributes:
        axes: of the circulant.
        layer_axes: of the layer.
    """

    axes: tuple[Axis, ...]
    layer_axes: tuple[Axis, ...]

    @classmethod
    def of(cls, axes: tuple[Axis, ...]) -> "Embedding":
        """The smallest one; that it contains the layer is compared place by place."""
        circles = tuple(_circle(axis) for axis in axes)
        for circle, axis in zip(circles, axes, strict=True):
            if not _contains(circle, axis):
                raise ArithmeticError(f"spectral_norm: {circle} does not contain {axis}; please report this")
        return cls(circles, axes)

    @property
    def inputs(self) -> tuple[slice, ...]:
        """The places of the circulant's input that are the layer's."""
        return tuple(slice(max(0, axis.before), axis.before + axis.size) for axis in self.layer_axes)

    @property
    def outputs(self) -> tuple[slice, ...]:
        """The same of the outputs."""
        return tuple(slice(0, axis.outputs) for axis in self.layer_axes)

    @property
    def grid(self) -> FrequencyGrid:
        """The frequencies of the circulant, on the phases of the stride."""
        return FrequencyGrid.unshifted(tuple(axis.outputs for axis in self.axes))


def embeddings(axes: tuple[Axis, ...], work: Work) -> list[Embedding]:
    """Circulants for parts whose largest norm is that of the layer; stops where there are none of this kind."""
    work.require_bytes(EMBEDDED, sum(64 * (axis.size + 2 * axis.used + axis.outputs * axis.taps) for axis in axes))
    return [Embedding.of(part) for part in itertools.product(*map(_classes, axes))]


def _classes(axis: Axis) -> list[Axis]:
    """The axis without dilation: those of its classes that differ."""
    if axis.mode != "zeros":
        raise OutOfBudgetError(f"{EMBEDDED}: made for zero padding")
    if axis.taps == 1:  # the same matrix at each place that is read
        return [Axis(1, 1, 0, 1, 1, 1, "zeros")]
    common = math.gcd(axis.stride, axis.dilation)
    residue = -axis.before % common  # of the places that are read
    size, before = -(-(axis.size - residue) // common), (axis.before + residue) // common
    stride, dilation = axis.stride // common, axis.dilation // common
    if stride > axis.taps:  # where windows do not overlap sup is the norm itself
        raise OutOfBudgetError(f"{EMBEDDED}: not made for stride {axis.stride} with {axis.taps} taps")
    if max(size // dilation, dilation) > LONGEST:
        raise OutOfBudgetError(f"{EMBEDDED}: made for up to {LONGEST} places on an axis, got {size}")
    sources = axis.sources()
    found: dict[Axis, None] = {}  # in their order
    for number in range(min(dilation, axis.outputs)):
        start, first = divmod(stride * number - before, dilation)
        places, outputs = -(-(size - first) // dilation), -(-(axis.outputs - number) // dilation)
        part = dataclasses.replace(axis, size=max(0, places), outputs=outputs, before=-start, stride=stride, dilation=1)
        # Each place w of the class is place (first + d·w)·g of the axis, from its residue on.
        read = part.sources()
        moved = torch.where(read < part.size, (first + dilation * read) * common + residue, axis.size)
        if not torch.equal(moved, sources[number::dilation]):
            raise ArithmeticError(f"spectral_norm: class {number} of {axis} is not {part}; please report this")
        if bool((read < part.size).any()):
            found[part] = None
    return list(found)


def _circle(axis: Axis) -> Axis:
    """The smallest circle on which each output reads what it reads on the axis, and zeros outside the layer's input.

    That input begins at place ``before``, and what is read beyond the last place must end before it comes again.
    """
    size = max(axis.before + axis.size, axis.used - max(0, axis.before), axis.outputs * axis.stride)
    outputs = -(-size // axis.stride)
    return Axis(outputs * axis.stride, outputs, 0, axis.taps, axis.stride, 1, "circular")


def _contains(circle: Axis, axis: Axis) -> bool:
    """Whether the first outputs of the circle read the places of the axis, moved by ``before``, and no others."""
    places = circle.sources()[: axis.outputs] - axis.before
    inside = (places >= 0) & (places < axis.size)
    return torch.equal(torch.where(inside, places, axis.size), axis.sources())
