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

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.geometry.convolution import Convolution
from gramcert.geometry.padding import largest_repetition, largest_repetition_of_any_size
from gramcert.geometry.symbol import FrequencyGrid


@dataclass(frozen=True)
class GridBound:
    """The norm is at most ``factor`` times the largest σ(E) of the reduced kernels on a grid, for each of the grids."""

    grids: tuple[FrequencyGrid, ...]
    factor: float


def reduced_kernels(layer: Convolution) -> Tensor:
    r"""Stride-1 kernels with the same symbols up to the norm: (groups, out, in·phases, \*sizes), differentiable."""
    kernel = layer.kernel
    groups = kernel.reshape(layer.groups, -1, *kernel.shape[1:])
    for axis, (stride, dilation) in enumerate(zip(layer.stride, layer.dilation, strict=True), 3):
        step = stride // math.gcd(stride, dilation)
        if step > 1:
            groups = _split_phases(groups, axis, step)
    return groups


def _split_phases(kernels: Tensor, axis: int, step: int) -> Tensor:
    """K_φ[b] = K[sb + φ] along one axis, φ joined to the input channels."""
    length = -(-kernels.shape[axis] // step)
    amounts = [0, 0] * (kernels.dim() - 1 - axis) + [0, length * step - kernels.shape[axis]]
    padded = torch.nn.functional.pad(kernels, amounts)
    split = padded.reshape(*padded.shape[:axis], length, step, *padded.shape[axis + 1 :])
    return split.movedim(axis + 1, 3).flatten(2, 3)


def every_size_factor(layer: Convolution) -> float:
    """The norm at every input size is at most this factor times sup σ(E) over all frequencies."""
    square = 1
    for axis in range(layer.axes):
        before, after = layer.padding[axis]
        span = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
        harmless = layer.stride[axis] == 1 and before + after <= span
        if layer.padding_mode == "zeros" or (layer.padding_mode == "circular" and harmless):
            continue
        square *= largest_repetition_of_any_size(before, after, layer.padding_mode)
    return math.sqrt(square)


def one_size_bound(layer: Convolution, input_size: tuple[int, ...]) -> GridBound:
    """Grids whose largest σ(E), times the factor, bounds the norm at this input size."""
    smaller = layer.output_size(input_size)
    # A transposed layer has the norm of its adjoint, which takes the transposed layer's output as input.
    inputs, outputs = (smaller, input_size) if layer.transposed else (input_size, smaller)
    sizes, shiftable, square = [], [], 1
    for axis, (n, n_out) in enumerate(zip(inputs, outputs, strict=True)):
        taps, stride, dilation = layer.kernel_size[axis], layer.stride[axis], layer.dilation[axis]
        before = layer.padding[axis][0]
        if layer.padding_mode == "circular" and n % stride == 0 and n_out * stride <= n:
            common = math.gcd(stride, dilation)
            period = (n // common) // math.gcd(n // common, dilation // common)
            sizes.append(period // (stride // common))
            shiftable.append(False)
            continue
        if layer.padding_mode != "zeros":
            used = (n_out - 1) * stride + dilation * (taps - 1) + 1
            square *= largest_repetition(n, before, used, layer.padding_mode)
            n, before = used, 0
        sizes.append(embedding_size(n, n_out, before, taps, stride, dilation))
        shiftable.append(True)
    shifts = {(0.0,) * layer.axes, tuple(0.5 if free else 0.0 for free in shiftable)}
    return GridBound(tuple(FrequencyGrid(tuple(sizes), shift) for shift in sorted(shifts)), math.sqrt(square))


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
