r"""The symbol E(ω) = Σ_a K[a] e^(-ia·ω) of a kernel on equidistant grids of frequencies.

The grid of sizes m and shifts θ is ω = 2π(j + θ)/m, j = 0, ..., m-1 on each axis. A real kernel has E(-ω) equal to
the conjugate of E(ω), with the same singular values, and grids with shift 0 or ½ are symmetric, so half of the last
axis represents the whole grid.

Symbols are sums over the taps as products with a table of twiddle factors, not FFTs: kernels are small, the blocks
come out contiguous for the batched products that follow, and kernels larger than the grid wrap by themselves.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.arguments import can_be_read

COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}

# Longest axis whose inverse transform is a product with a table.
TABLE_LENGTH = 256

# Longest axis whose tables are kept for the next call.
KEPT_LENGTH = 1024

# Bytes of symbol blocks worked on at a time: few enough to stay in the cache and to reuse freed memory.
CHUNK_BYTES = 2**21

# The same of real blocks that are squared and read on the way, on a CPU; other devices take what fills them. Of large
# blocks a few at a time share one pass over the filter.
REAL_BYTES, DEVICE_BYTES, FEW = 2**18, 2**26, 4

# Large filters: so many frequencies at least, within so many bytes, share one pass over the filter.
SHARED, SHARED_BYTES = 16, 2**25


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
        return _half_size(self.sizes[-1], self.shifts[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the half grid."""
        return (*self.sizes[:-1], self.half_size)

    def __len__(self) -> int:
        return math.prod(self.shape)

    def indices(self, device: torch.device) -> Tensor:
        """Those of the half grid, which :meth:`twiddles` takes."""
        return torch.arange(len(self), device=device)

    def chunks(self, taps: Tensor) -> tuple[Tensor, ...]:
        """Consecutive indices of the half grid in pieces whose symbols and twiddles fit ``CHUNK_BYTES``."""
        each = max(taps[0].numel(), taps.shape[0]) * taps.element_size()
        return torch.split(self.indices(taps.device), max(1, CHUNK_BYTES // each))

    def multiplicity(self, device: torch.device) -> Tensor:
        """How many frequencies of the whole grid each one of the half grid stands for, 1 or 2, in float64."""
        counts = _multiplicity(self.sizes[-1], self.shifts[-1], device)
        return counts.expand(self.shape).reshape(-1)

    def tables(self, positions: Sequence[Sequence[int]], like: Tensor) -> list[Tensor]:
        """For each axis the table of e^(-iaω), a row per frequency, a column per place a of a tap, in complex ``like``.

        The angle at index j is π·(a(2j + 2θ) mod 2m)/m: reduced in integers, so that large a·j lose nothing, and taken
        in float64.
        """
        return [
            kept_table(_twiddle_table, like, count, size, round(2 * shift), tuple(places))
            for count, size, shift, places in zip(self.shape, self.sizes, self.shifts, positions, strict=True)
        ]

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


class FilterSymbol:
    """The symbol of a real filter (places, ...) on a grid, chunk of frequencies by chunk, and the adjoint of that map.

    Args:
        filters: a row per place.
        grid: the frequencies.
        positions: the places, per axis; a filter with place 0 alone has a constant symbol, which stays real.
    """

    def __init__(self, filters: Tensor, grid: FrequencyGrid, positions: Sequence[Sequence[int]]) -> None:
        self.filters, self.indices, self._grid = filters, grid.indices(filters.device), grid
        self.is_constant = all(list(places) == [0] for places in positions)
        self._tables: list[Tensor] = []
        self._whole: Tensor | None = None
        if len(grid) <= KEPT_LENGTH:
            self._whole = kept_table(_whole_table, filters, len(grid), grid, tuple(map(tuple, positions)))
        else:
            self._tables = grid.tables(positions, filters)

    @property
    def chunks(self) -> list[slice]:
        """Consecutive frequencies whose symbols fit into the cache; of large ones a few."""
        complex_bytes = 2 * self.filters.element_size() * max(self.filters[0].numel(), len(self.filters))
        each = max(1, CHUNK_BYTES // complex_bytes, min(SHARED, SHARED_BYTES // complex_bytes))
        return [slice(start, start + each) for start in range(0, len(self._grid), each)]

    @property
    def real_chunks(self) -> list[slice]:
        """The same for :meth:`summed`."""
        most = REAL_BYTES if self.filters.device.type == "cpu" else DEVICE_BYTES
        each = max(FEW, most // (self.filters.element_size() * self.filters[0].numel()))
        return [slice(start, start + each) for start in range(0, len(self._grid), each)]

    def __call__(self, chosen: slice | Tensor) -> Tensor:
        """The symbol at the chosen indices: (frequencies, ...)."""
        twiddles, rows = self.twiddles(chosen), self.filters.flatten(1)
        real = twiddles.real @ rows
        blocks = real if self.is_constant else torch.complex(real, twiddles.imag @ rows)
        return blocks.reshape(-1, *self.filters.shape[1:])

    def summed(self, chosen: slice | Tensor) -> Tensor:
        """The sum of the real and the imaginary part: of a Hermitian symbol all there is to know, in real numbers."""
        twiddles = self.twiddles(chosen)
        waves = twiddles.real if self.is_constant else twiddles.real + twiddles.imag
        return (waves @ self.filters.flatten(1)).reshape(-1, *self.filters.shape[1:])

    def adjoint(self, chosen: slice | Tensor, blocks: Tensor) -> Tensor:
        """From cotangents of the symbol at the chosen indices to that of the filter."""
        twiddles = self.twiddles(chosen)
        rows = (twiddles.real if self.is_constant else twiddles).mH @ blocks.flatten(1)
        return torch.real(rows).reshape(self.filters.shape)

    def twiddles(self, chosen: slice | Tensor) -> Tensor:
        """The table of e^(-ix·ω): a row per frequency, a column per place."""
        return self._grid.twiddles(self.indices[chosen], self._tables) if self._whole is None else self._whole[chosen]


class InverseTransform:
    """Inverse of :func:`symbols` on an unshifted grid: real filters (points, columns) from (frequencies, columns).

    Axis by axis. On a short axis it is a product with a table, several times faster than an FFT.
    """

    def __init__(self, grid: FrequencyGrid, like: Tensor) -> None:
        self.grid, self.points = grid, math.prod(grid.sizes)
        *leading, last = grid.sizes
        self.leading = [kept_table(_roots_of_unity, like, size) if size <= TABLE_LENGTH else None for size in leading]
        self.last = kept_table(_real_part_table, like, last, self.points) if last <= TABLE_LENGTH else None

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
            result = torch.fft.irfft(values, last, dim=1, norm="forward") / self.points
        else:
            result = self.last @ torch.view_as_real(values).movedim(-1, 1).flatten(1, 2)
        return result.flatten(0, 1)

    def adjoint(self, filters: Tensor) -> Tensor:
        """(points, columns) → (frequencies, columns): the adjoint for the inner product Re Σ conj(a)·b."""
        *leading, last = self.grid.sizes
        values = filters.reshape(math.prod(leading), last, -1)
        if self.last is None:
            counts = _multiplicity(last, 0.0, filters.device) / self.points
            values = torch.fft.rfft(values, dim=1) * counts.to(values.dtype)[:, None]
        else:
            values = torch.complex(*(self.last.mT @ values).unflatten(1, (2, -1)).unbind(1))
        for axis, (size, table) in reversed(list(enumerate(zip(leading, self.leading, strict=True)))):
            values = values.reshape(math.prod(leading[:axis]), size, -1)
            values = torch.fft.fft(values, dim=1) if table is None else table.conj() @ values  # it is symmetric
        return values.reshape(len(self.grid), -1)


def kept_table(make: Callable[..., Tensor], like: Tensor, length: int, *others: object) -> Tensor:
    """A table for one axis in the type and on the device of a tensor; short ones with values are kept for next time."""
    if length > KEPT_LENGTH or not can_be_read(like):
        return make(length, *others, like.dtype, like.device)
    return _kept(make, length, *others, like.dtype, like.device)


@functools.lru_cache(maxsize=256)
def _kept(make: Callable[..., Tensor], *arguments: object) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():  # also what inference needs first may be trained with later
        return make(*arguments)


def _twiddle_table(
    count: int, size: int, double_shift: int, places: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    index = torch.arange(count, device=device)[:, None]
    turns = torch.tensor(places, device=device) * (2 * index + double_shift) % (2 * size)
    return _waves(turns.double() * (-math.pi / size)).to(COMPLEX[dtype])


def _whole_table(
    length: int, grid: FrequencyGrid, positions: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    like = torch.empty(0, dtype=dtype, device=device)
    return grid.twiddles(torch.arange(length, device=device), grid.tables(positions, like))


def _roots_of_unity(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """e^(2πi·xj/size) for x, j < size."""
    return _waves(_turns(size, size, device)).to(COMPLEX[dtype])


def _real_part_table(size: int, points: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Re Σ_j m_j (cos + i sin)(a_j + ib_j)/points as one real product with the stacked real and imaginary parts."""
    counts = _multiplicity(size, 0.0, device)
    roots = _waves(_turns(size, len(counts), device)) * (counts / points)
    return torch.cat([roots.real, -roots.imag], 1).to(dtype)


def _half_size(size: int, shift: float) -> int:
    return size // 2 + 1 if shift == 0 else (size + 1) // 2


def _multiplicity(size: int, shift: float, device: torch.device) -> Tensor:
    """How many frequencies of one axis each one of its half stands for."""
    own_partner = (2 * torch.arange(_half_size(size, shift), device=device) + round(2 * shift)) % size == 0
    return torch.where(own_partner, 1.0, 2.0).double()


def _turns(size: int, frequencies: int, device: torch.device) -> Tensor:
    """2π·(xj mod size)/size for x < size, j < frequencies, in float64."""
    steps = torch.arange(size, device=device)[:, None] * torch.arange(frequencies, device=device) % size
    return steps.double() * (2 * math.pi / size)


def _waves(angles: Tensor) -> Tensor:
    return torch.polar(torch.ones_like(angles), angles)
