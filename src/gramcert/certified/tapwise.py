r"""A layer at one input size as a sum over its taps, with a bound of its rounding; and vectors that it stretches most.

For any vector x, ‖Tx‖/‖x‖ is a lower bound of the norm. It does not matter where x comes from, so plane waves and
Lanczos iteration look for a good one without any guarantee, and only the last product is made with care. It is written
out here as k^D matrix products on gathered inputs, so that no convolution routine has to be trusted.
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from gramcert.certified.frequencies import Frequencies
from gramcert.certified.gram_symbol import GramSymbol, crude_norm
from gramcert.geometry.axis import Axis
from gramcert.rounding import gamma, norm_up, quotient_bounds, root_up, underflow, up


class TapwiseLayer:
    """The linear map of kernels (groups, out, in, *taps): float64, (groups, in, *sizes) to (groups, out, *outputs)."""

    def __init__(self, kernels: Tensor, axes: tuple[Axis, ...]) -> None:
        self.kernels, self.axes = kernels, axes
        groups, outputs, inputs = kernels.shape[:3]
        self.input_shape = (groups, inputs, *(axis.size for axis in axes))
        self.output_shape = (groups, outputs, *(axis.outputs for axis in axes))
        self._padded = [axis.padded() for axis in axes]
        # Taps first, so that the matrix of each of them is contiguous.
        taps = itertools.product(*(range(axis.taps) for axis in axes))
        self._matrices = list(zip(taps, kernels.flatten(3).movedim(-1, 0).contiguous(), strict=True))
        # ‖|T|‖, which the rounding of a product is proportional to.
        repetition = root_up(math.prod(axis.repetition for axis in axes))
        self._amount = up(max(crude_norm(kernel) for kernel in kernels) * repetition)

    @staticmethod
    def bytes_for(kernels: Tensor, axes: tuple[Axis, ...]) -> int:
        """What products take at most, beside their first input."""
        groups, outputs, inputs = kernels.shape[:3]
        padded = groups * inputs * math.prod(max(axis.size + 1, axis.used) for axis in axes)
        images = groups * outputs * math.prod(axis.outputs for axis in axes)
        # Two stages of the padded input and what one tap reads of it; images of one tap, of all, and their squares; the
        # places of each axis while they are found; the kernels with taps first.
        return 8 * (3 * padded + 3 * images + 5 * sum(axis.used for axis in axes) + kernels.numel())

    def apply(self, x: Tensor) -> Tensor:
        """The layer on inputs (..., groups, in, *sizes)."""
        first = x.dim() - len(self.axes)  # of the spatial dimensions
        x = torch.nn.functional.pad(x, (0, 1) * len(self.axes))  # the place that stands for a zero
        for dim, places in enumerate(self._padded, first):
            x = x.index_select(dim, places)
        shape = (*x.shape[: first - 2], *self.output_shape)
        y = x.new_zeros(*shape[:first], math.prod(shape[first:]))
        for tap, matrix in self._matrices:
            y += matrix @ self._read(x, tap).flatten(first)
        return y.reshape(shape)

    def adjoint(self, y: Tensor) -> Tensor:
        """The adjoint on outputs (..., groups, out, *outputs)."""
        first = y.dim() - len(self.axes)
        x = y.new_zeros(*y.shape[: first - 2], *self.input_shape[:2], *(axis.used for axis in self.axes))
        flat = y.flatten(first)
        for tap, matrix in self._matrices:
            part = self._read(x, tap)
            part += (matrix.mT @ flat).reshape(part.shape)
        for dim, (axis, places) in enumerate(zip(self.axes, self._padded, strict=True), first):
            folded = x.new_zeros(*x.shape[:dim], axis.size + 1, *x.shape[dim + 1 :])
            x = folded.index_add_(dim, places, x).narrow(dim, 0, axis.size)
        return x

    @property
    def absolute_norm(self) -> float:
        """Upper bound of the norm of |T|, the map with the absolute values of the weights; so also of T."""
        return self._amount

    @property
    def terms(self) -> int:
        """At least the number of products that are summed in one entry of Tx."""
        return self.kernels[0, 0].numel() + 1

    @property
    def adjoint_terms(self) -> int:
        """At least the number of products that are summed in one entry of Tᵀy."""
        copies = math.prod(axis.repetition for axis in self.axes)
        return self.kernels[0, :, 0].numel() * copies + len(self.axes) + 1

    def norm_below(self, x: Tensor) -> float:
        """Lower bound of ‖Tx‖/‖x‖, rounding included."""
        return self.gain(x)[0]

    def gain(self, x: Tensor) -> tuple[float, float]:
        """Bounds of ‖Tx‖/‖x‖, rounding included."""
        return self._gain(self.apply(x), x, self.terms)

    def adjoint_gain(self, y: Tensor) -> tuple[float, float]:
        """Bounds of ‖Tᵀy‖/‖y‖, rounding included."""
        return self._gain(self.adjoint(y), y, self.adjoint_terms)

    def _gain(self, image: Tensor, x: Tensor, terms: int) -> tuple[float, float]:
        error = up(up(gamma(terms) * up(self._amount * norm_up(x))) + underflow(2 * terms * image.numel()))
        return quotient_bounds(image, error, x)

    def _read(self, padded: Tensor, tap: tuple[int, ...]) -> Tensor:
        """A view of the padded input: what the outputs read with one tap."""
        places: tuple[Any, ...] = tuple(axis.read_by(index) for axis, index in zip(self.axes, tap, strict=True))
        return padded[(..., *places)]


def at_tap(kernels: Tensor, tap: tuple[int, ...]) -> Tensor:
    """The matrix of one tap: the trailing axes indexed."""
    for index in reversed(tap):
        kernels = kernels[..., index]
    return kernels


def dense_matrix(kernel: Tensor, axes: tuple[Axis, ...]) -> Tensor:
    """The matrix of one group's kernel (out, in, *taps), rows (channel, place) by columns (channel, place)."""
    outputs, inputs = kernel.shape[:2]
    rows, columns = (math.prod(sizes) for sizes in zip(*((axis.outputs, axis.size) for axis in axes), strict=True))
    matrix = kernel.new_zeros(outputs, rows, inputs, columns + 1)  # the last column collects what reads zeros
    sources = [axis.sources() for axis in axes]
    for tap in itertools.product(*(range(axis.taps) for axis in axes)):
        column = torch.zeros(1, dtype=torch.int64)
        inside = torch.ones(1, dtype=torch.bool)
        for axis, table, index in zip(axes, sources, tap, strict=True):
            column = (column[:, None] * axis.size + table[:, index]).flatten()
            inside = (inside[:, None] & (table[:, index] < axis.size)).flatten()
        column = torch.where(inside, column, columns)
        # Advanced indices around a slice put their own axis first.
        matrix[:, torch.arange(rows), :, column] += at_tap(kernel, tap)
    return matrix[..., :columns].reshape(outputs * rows, inputs * columns)


def plane_waves(
    symbol: GramSymbol, frequency: Frequencies, vector: Tensor, axes: tuple[Axis, ...], channels: int
) -> Tensor:
    """Real and imaginary part of a plane wave of the reduced kernel under a sine window: (2, in, *sizes).

    Output class 0 of the layer reads the places q = d(s'w + φ) of the padded input, phase φ of place w (see
    :mod:`gramcert.geometry.reduction`, s' = s/gcd(s, d)). There the input is v_φ·e^(-iω·w), v the right singular
    vector. Phases that no tap reads are zero.
    """
    values = symbol.right_vector(frequency, vector)
    phases = [axis.stride // math.gcd(axis.stride, axis.dilation) for axis in axes]
    turns = dict(zip(symbol.axes, frequency.values()[0].tolist(), strict=True))
    read = [min(count, axis.taps) for axis, count in zip(axes, phases, strict=True)]
    wave = torch.nn.functional.pad(values.reshape(channels, *read), (0, 1) * len(axes))
    for number, (axis, count) in enumerate(zip(axes, phases, strict=True)):
        places = torch.arange(axis.size)
        reached, spare = (places + axis.before) // axis.dilation, (places + axis.before) % axis.dilation
        window = torch.sin((places + 1).double() * (math.pi / (axis.size + 1))) * (spare == 0)
        factor = torch.exp(-1j * turns.get(number, 0.0) * (reached // count)) * window
        # The phases of this axis become its places, moved behind those of the axes before.
        wave = wave.index_select(1, (reached % count).clamp_max(read[number])).movedim(1, -1) * factor
    return torch.stack([wave.real, wave.imag])
