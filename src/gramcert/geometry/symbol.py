r"""The symbol E(ω) = Σ_a K[a] e^(-ia·ω) of a kernel on equidistant grids of frequencies.

The grid of sizes m and shifts θ is ω = 2π(j + θ)/m, j = 0, ..., m-1 on each axis. A real kernel has E(-ω) equal to
the conjugate of E(ω), with the same singular values, and grids with shift 0 or ½ are symmetric, so half of the last
axis represents the whole grid.

Symbols are sums over the taps as products with a table of twiddle factors, not FFTs: kernels are small, the blocks
come out contiguous for the batched products that follow, and kernels larger than the grid wrap by themselves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}

# Longest axis whose inverse transform is a product with a table.
TABLE_LENGTH = 256

# Bytes of symbol blocks worked on at a time: few enough to stay in the cache and to reuse freed memory.
CHUNK_BYTES = 2**21


@dataclass(frozen=True)
class FrequencyGrid:
    """Product grid with ``sizes`` frequencies per axis, shifted by ``shifts`` (0 or ½) of a step."""

    sizes: tuple[int, ...]
    shifts: tuple[float, ...]

    @classmethod
    def unshifted(cls, sizes: tuple[int, ...]) -> "FrequencyGrid":
        """The grid of a circulant of these sizes."""
        return cls(sizes, (0.0,) * len(sizes))

    @property
    def half_size(self) -> int:
        """How many frequencies of the last axis represent it up to sign: {j, -j-2θ} are pairs modulo m."""
        size, shift = self.sizes[-1], self.shifts[-1]
        return size // 2 + 1 if shift == 0 else (size + 1) // 2

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the half grid."""
        return (*self.sizes[:-1], self.half_size)

    def __len__(self) -> int:
        return math.prod(self.shape)

    def chunks(self, taps: Tensor) -> tuple[Tensor, ...]:
        """Consecutive indices of the half grid in pieces whose symbols and twiddles fit ``CHUNK_BYTES``."""
        each = max(taps[0].numel(), taps.shape[0]) * taps.element_size()
        return torch.split(torch.arange(len(self), device=taps.device), max(1, CHUNK_BYTES // each))

    def multiplicity(self, device: torch.device) -> Tensor:
        """How many frequencies of the whole grid each one of the half grid stands for, 1 or 2, in float64."""
        size, shift = self.sizes[-1], self.shifts[-1]
        last = torch.arange(self.half_size, device=device)
        own_partner = (2 * last + round(2 * shift)) % size == 0
        counts = torch.where(own_partner, 1.0, 2.0).double()
        return counts.expand(self.shape).reshape(-1)

    def tables(self, positions: Sequence[Sequence[int]], like: Tensor) -> list[Tensor]:
        """For each axis the table of e^(-iaω), a row per frequency, a column per place a of a tap, in complex ``like``.

        The angle at index j is π·(a(2j + 2θ) mod 2m)/m: reduced in integers, so that large a·j lose nothing, and taken
        in float64.
        """
        tables = []
        for count, size, shift, places in zip(self.shape, self.sizes, self.shifts, positions, strict=True):
            index = torch.arange(count, device=like.device)[:, None]
            turns = torch.tensor(places, device=like.device) * (2 * index + round(2 * shift)) % (2 * size)
            angles = turns.double() * (-math.pi / size)
            tables.append(torch.polar(torch.ones_like(angles), angles).to(COMPLEX[like.dtype]))
        return tables

    def twiddles(self, indices: Tensor, tables: Sequence[Tensor]) -> Tensor:
        """Table of e^(-ia·ω) over all axes: a row per index into the half grid, a column per tap."""
        result = torch.ones(len(indices), 1, dtype=tables[0].dtype, device=indices.device)
        for size, table in zip(reversed(self.shape), reversed(tables), strict=True):
            rows = table[indices % size]
            result = (rows[:, :, None] * result[:, None, :]).flatten(1)
            indices = indices // size
        return result


def taps_first(kernel: Tensor, axes: int) -> Tensor:
    """A kernel (..., channels, channels, *sizes) as complex matrices, one per tap: (taps, ..., channels, channels)."""
    return kernel.reshape(*kernel.shape[: kernel.dim() - axes], -1).movedim(-1, 0).to(COMPLEX[kernel.dtype])


def symbols(taps: Tensor, twiddles: Tensor) -> Tensor:
    """E at each row of twiddles: (frequencies, ..., channels, channels)."""
    return (twiddles @ taps.reshape(taps.shape[0], -1)).reshape(twiddles.shape[0], *taps.shape[1:])


def symbols_adjoint(blocks: Tensor, twiddles: Tensor, shape: torch.Size) -> Tensor:
    """Adjoint of kernel -> symbols: Re Σ_ω conj(twiddle)·block, as a kernel of the given shape."""
    taps = torch.real(twiddles.mH @ blocks.reshape(blocks.shape[0], -1))
    return taps.reshape(-1, *blocks.shape[1:]).movedim(0, -1).reshape(shape)


class InverseTransform:
    """Inverse of :func:`symbols` on an unshifted grid: real filters (points, channels) from (frequencies, channels).

    Axis by axis. On a short axis it is a product with a table, several times faster than an FFT.
    """

    def __init__(self, grid: FrequencyGrid, like: Tensor) -> None:
        self.grid = grid
        *leading, last = grid.sizes
        self.leading = [
            _roots_of_unity(size, size, like.device).to(COMPLEX[like.dtype]) if size <= TABLE_LENGTH else None
            for size in leading
        ]
        self.last: Tensor | None = None
        if last <= TABLE_LENGTH:
            # Re Σ_j m_j (cos + i sin)(a_j + ib_j) as one real product with the stacked real and imaginary parts.
            counts = grid.multiplicity(like.device)[: grid.half_size]
            roots = _roots_of_unity(last, grid.half_size, like.device) * (counts / math.prod(grid.sizes))
            self.last = torch.cat([roots.real, -roots.imag], 1).to(like.dtype)

    def __call__(self, spectra: Tensor) -> Tensor:
        """The filters; the places of an axis are counted modulo its size."""
        *leading, last = self.grid.sizes
        values = spectra
        for axis, (size, table) in enumerate(zip(leading, self.leading, strict=True)):
            values = values.reshape(math.prod(leading[:axis]), size, -1)
            values = torch.fft.ifft(values, dim=1, norm="forward") if table is None else table @ values
        values = values.reshape(math.prod(leading), self.grid.half_size, -1)
        result: Tensor
        if self.last is None:
            result = torch.fft.irfft(values, last, dim=1, norm="forward") / math.prod(self.grid.sizes)
        else:
            result = self.last @ torch.view_as_real(values).movedim(-1, 1).flatten(1, 2)
        return result.flatten(0, 1)


def _roots_of_unity(size: int, frequencies: int, device: torch.device) -> Tensor:
    """e^(2πi·xj/size) for x < size, j < frequencies, in complex128."""
    turns = torch.arange(size, device=device)[:, None] * torch.arange(frequencies, device=device) % size
    angles = turns.double() * (2 * math.pi / size)
    return torch.polar(torch.ones_like(angles), angles)
