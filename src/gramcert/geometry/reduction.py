r"""Any convolution reduced to stride-1 kernels and frequency grids that bound its norm.

On one axis a layer computes y[o] = Σ_a K[a] x̃[so + da], x̃ the padded input, s the stride, d the dilation.

**Stride and dilation.** With g = gcd(s, d) only the places so + da ≡ 0 mod g are used: s and d can be divided by g.
Now gcd(s, d) = 1. Outputs o = ρ + do' of one class ρ mod d use the places sρ + d(so' + a): on the sublattice of step d
the layer has dilation 1, and classes use different sublattices, so the norm is the largest over the classes. What
remains has stride s and dilation 1: with a = sb + φ it is a stride-1 convolution with kernel K_φ[b] = K[sb + φ] on the
s phases x̃[sw + φ] of the input, taken as channels.

**Zeros.** The input is zero outside an interval, so the layer is a part of the matrix of a circulant of any size m for
which no used place is met by a wrapped one, and of every shifted circulant (its conjugation by the unitary diagonal
e^(iθx)). Its norm is at most the largest σ(E) over the m frequencies with any shift θ.

**Circular.** Let s divide n and n_out·s <= n. After s, d and n are divided by g, and n and d by e = gcd(n, d), d is a
unit of Z_n; multiplication by its inverse removes the dilation and maps the multiples of s to themselves. So the layer
consists of rows of circulants of size n/s on the phases: the grid of n/s frequencies is an upper bound, exact if all
rows are there, n_out·s = n. Otherwise pixels repeat.

**Repeated pixels** (reflect, replicate, circular otherwise): the padding map, whose norm is √(largest repetition),
followed by a layer without padding.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.geometry.axis import Axis
from gramcert.geometry.convolution import Convolution
from gramcert.geometry.padding import Pairs, largest_repetition_of_any_size
from gramcert.geometry.symbol import FrequencyGrid


@dataclass(frozen=True)
class GridBound:
    """The norm is at most √square times the largest σ(E) of the reduced kernels on a grid, for each of the grids."""

    grids: tuple[FrequencyGrid, ...]
    square: int

    @property
    def factor(self) -> float:
        """√square, rounded."""
        return math.sqrt(self.square)


def grouped_kernels(layer: Convolution) -> Tensor:
    r"""The kernels of the groups, (groups, out, in, \*sizes); of a transposed layer those of its adjoint."""
    return layer.kernel.reshape(layer.groups, -1, *layer.kernel.shape[1:])


def reduced_kernels(groups: Tensor, stride: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    r"""Stride-1 kernels with the same symbols up to the norm: (groups, out, in·phases, \*sizes), differentiable.

    K_φ[b] = K[sb + φ] along each axis, the φ joined to the input channels; phases that no tap has are left out.
    """
    taps = groups.shape[3:]
    steps = [min(s // math.gcd(s, d), k) for s, d, k in zip(stride, dilation, taps, strict=True)]
    if max(steps) == 1:
        return groups
    lengths = [-(-k // step) for k, step in zip(taps, steps, strict=True)]
    missing = [length * step - k for length, step, k in zip(lengths, steps, taps, strict=True)]
    if any(missing):
        groups = torch.nn.functional.pad(groups, [amount for size in reversed(missing) for amount in (0, size)])
    split = groups.reshape(*groups.shape[:3], *itertools.chain(*zip(lengths, steps, strict=True)))
    axes = len(taps)
    # All at once, as each copy of a large kernel is a pass over the memory.
    phases, places = range(4, 4 + 2 * axes, 2), range(3, 3 + 2 * axes, 2)
    return split.permute(0, 1, 2, *phases, *places).flatten(2, 2 + axes)


def every_size_square(layer: Convolution, trimmed: Pairs | None = None) -> int:
    """The squared norm at every input size is at most this integer times sup σ(E)² over all frequencies.

    Args:
        layer: the layer.
        trimmed: taps at the beginning and the end of each axis that are zero, so that less padding is read.
    """
    square = 1
    for axis, (first, last) in enumerate(trimmed or ((0, 0),) * layer.axes):
        before, after = layer.padding[axis]
        stride, dilation = layer.stride[axis], layer.dilation[axis]
        harmless = stride == 1 and before + after <= dilation * (layer.kernel_size[axis] - 1)
        if layer.padding_mode == "zeros" or (layer.padding_mode == "circular" and harmless):
            continue
        read = max(0, before - dilation * first), max(0, after - dilation * last)
        square *= largest_repetition_of_any_size(*read, layer.padding_mode)
    return square


def one_size_bound(axes: tuple[Axis, ...]) -> GridBound:
    """Grids whose largest σ(E), times the factor, bounds the norm at one input size."""
    sizes, shifts, square = [], [], 1
    for axis in axes:
        if axis.is_circulant:
            common = math.gcd(axis.stride, axis.dilation)
            period = (axis.size // common) // math.gcd(axis.size // common, axis.dilation // common)
            sizes.append(period // (axis.stride // common))
            shifts.append(0.0)
            continue
        square *= axis.repetition
        n, before = (axis.size, axis.before) if axis.mode == "zeros" else (axis.used, 0)
        sizes.append(embedding_size(n, axis.outputs, before, axis.taps, axis.stride, axis.dilation))
        shifts.append(0.5)
    unshifted = FrequencyGrid.unshifted(tuple(sizes))
    grids = (unshifted, FrequencyGrid(tuple(sizes), tuple(shifts))) if any(shifts) else (unshifted,)
    return GridBound(grids, square)


def embedding_size(n: int, n_out: int, before: int, taps: int, stride: int = 1, dilation: int = 1) -> int:
    """Smallest circulant, on the phases, that has the zero-padded layer on n places as a part of its matrix.

    The layer is y[o] = Σ_a K[a] x[so + da - before], 0 <= o < n_out. It is split into classes as described above; an
    input of one class has n'' places and starts at place ``left`` of the padded axis, which may be negative.
    """
    common = math.gcd(stride, dilation)
    stride, dilation = stride // common, dilation // common
    residue = -before % common
    n, before = -(-(n - residue) // common), (before + residue) // common
    size = 1
    for output_class in range(min(dilation, n_out)):
        start, residue = divmod(stride * output_class - before, dilation)
        places = -(-(n - residue) // dilation)
        outputs = -(-(n_out - output_class) // dilation)
        size = max(size, _phase_embedding(places, outputs, -start, taps, stride))
    return size


def _phase_embedding(n: int, n_out: int, left: int, taps: int, stride: int) -> int:
    """The same for dilation 1: y[o] = Σ_b K_φ[b] x_φ[o + b] where phase place w holds x[sw + φ - left]."""
    if n < 1:
        return 1
    reach = -(-taps // stride) - 1
    first_in, last_in = left // stride, (n - 1 + left) // stride
    # Outputs that see the input, and inputs that are seen.
    first_out, last_out = max(0, first_in - reach), min(n_out - 1, last_in)
    if first_out > last_out:
        return 1
    first_in, last_in = max(first_in, first_out), min(last_in, last_out + reach)
    # A place o + b wrapped by m must not meet an input: m exceeds every difference of the two, in both directions.
    return max(last_out - first_out + 1, last_out + reach - first_in + 1, last_in - first_out + 1)
