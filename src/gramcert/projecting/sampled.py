r"""The kernels of a layer as the matrices that its symbols are sums of, and symbols on a grid as those kernels again.

A layer reduces to stride-1 kernels (see :mod:`gramcert.geometry.reduction`), each weight at one place of them; places
that hold none are zeros. On a grid of N frequencies with at least as many per axis as taps, the map from such kernels
to their symbols, divided by √N, keeps lengths: Σ_a ‖K_a‖² = mean_j ‖E(ω_j)‖². Its adjoint, the mean of E(ω_j)e^(iaω_j)
at the taps and nothing elsewhere, is therefore also its pseudoinverse: the kernel nearest to given symbols.
"""

import math

import torch
from torch import Tensor

from gramcert.geometry.convolution import Convolution
from gramcert.geometry.reduction import grouped_kernels, reduced_kernels
from gramcert.geometry.symbol import FrequencyGrid

# Most bytes of the symbols on one grid; grids of larger layers are coarser.
GRID_BYTES = 2**28

# Grid frequencies per tap interval, from the one that is wanted to the one that must do.
OVERSAMPLING = (8, 6, 4, 3, 2)


class Places:
    """Where each weight of a layer is among its taps, (taps, groups, rows, columns) with rows >= columns.

    Transposing all symbols changes no singular value, and brings the smaller side to the Gram matrices.

    Args:
        layer: the layer.
        read: which taps count, of the shape of its kernel sizes; ``None`` for all.
    """

    def __init__(self, layer: Convolution, read: Tensor | None = None) -> None:
        weights = grouped_kernels(layer)
        numbers = torch.arange(1, weights.numel() + 1, device=weights.device).reshape(weights.shape)
        if read is not None:
            numbers = numbers * read.to(weights.device)
        reduced = reduced_kernels(numbers, layer.stride, layer.dilation)
        self.taps = tuple(reduced.shape[3:])
        if reduced.shape[1] < reduced.shape[2]:
            reduced = reduced.transpose(1, 2)
        self._numbers = reduced.flatten(3).movedim(-1, 0).contiguous()
        self.hold = self._numbers > 0

    def gather(self, kernel: Tensor) -> Tensor:
        """The weights as matrices, one per tap."""
        return torch.where(self.hold, kernel.flatten()[(self._numbers - 1).clamp_min(0)], 0)

    def scatter(self, matrices: Tensor, kernel: Tensor) -> Tensor:
        """A kernel with these weights, and those of ``kernel`` at taps that do not count."""
        result = kernel.flatten().clone()
        result[self._numbers[self.hold] - 1] = matrices[self.hold].to(result.dtype)
        return result.reshape(kernel.shape)


class Sampling:
    """Symbols of matrices (taps, groups, rows, columns) at frequencies, and the kernel nearest to symbols."""

    def __init__(self, twiddles: Tensor, weights: Tensor) -> None:
        self.twiddles, self.weights = twiddles, weights
        self._back = (twiddles * weights[:, None]).mT.contiguous()

    @classmethod
    def on(cls, grid: FrequencyGrid, taps: tuple[int, ...], like: Tensor) -> "Sampling":
        """On a grid, for kernels of these sizes in the type and on the device of a tensor."""
        tables = grid.tables([range(size) for size in taps], like)
        counts = grid.multiplicity(like.device)
        twiddles = grid.twiddles(grid.indices(like.device), tables)
        return cls(twiddles, (counts / counts.sum()).to(like.dtype))

    def __len__(self) -> int:
        return len(self.twiddles)

    def chosen(self, indices: Tensor) -> "Sampling":
        """Some of the frequencies, with the weights that they have among all."""
        return Sampling(self.twiddles[indices], self.weights[indices])

    def symbols(self, matrices: Tensor) -> Tensor:
        """(frequencies, groups, rows, columns), complex."""
        flat = matrices.flatten(1)
        values = torch.complex(self.twiddles.real @ flat, self.twiddles.imag @ flat)
        return values.reshape(-1, *matrices.shape[1:])

    def adjoint(self, symbols: Tensor) -> Tensor:
        """The adjoint for the mean over the grid: (taps, groups, rows, columns), real."""
        flat = symbols.flatten(1)
        values = self._back.real @ flat.real + self._back.imag @ flat.imag
        return values.reshape(-1, *symbols.shape[1:])


def sampling_grid(taps: tuple[int, ...], entries: int, most: int = OVERSAMPLING[0]) -> FrequencyGrid:
    """A grid for all frequencies of kernels with these taps, whose symbols have so many entries each.

    Shifted by half a step along the last axis, so that exactly half of the frequencies do.
    """
    for oversampling in OVERSAMPLING:
        sizes = tuple(max(1, oversampling * (size - 1)) for size in taps)
        if oversampling <= most and 4 * math.prod(sizes) * entries <= GRID_BYTES:
            break
    return FrequencyGrid(sizes, (*(0.0,) * (len(sizes) - 1), 0.5 if sizes[-1] > 1 else 0.0))
