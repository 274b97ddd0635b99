r"""Hermitian matrices G = A + iB on grids of frequencies, as pairs of real matrices: A symmetric, B antisymmetric.

Real products of the two parts need three multiplications for a square where complex ones take the work of four, and
everything from the filter of G to its powers and back is then a real matrix product on contiguous memory. Tensors have
the shape (parts, frequencies, ..., rows, rows) with two parts, or one where G is real.
"""

import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gramcert.arguments import can_be_read
from gramcert.geometry.symbol import FrequencyGrid

# Bytes of matrices worked on at a time: few enough to stay in the cache.
PIECE_BYTES = 2**21


def evaluation_table(grid: FrequencyGrid, places: Sequence[range], like: Tensor) -> Tensor:
    """The cosine and minus the sine of x·ω, a column per place x of a filter: (parts, frequencies, places)."""
    make = _kept_evaluation_table if can_be_read(like) else _evaluation_table
    return make(grid, tuple(places), like.dtype, like.device)


def _evaluation_table(
    grid: FrequencyGrid, places: tuple[range, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    if all(list(axis) == [0] for axis in places):
        return torch.ones(1, len(grid), 1, dtype=dtype, device=device)
    angles = torch.zeros(1, 1, dtype=torch.float64, device=device)
    for count, size, shift, axis in zip(grid.shape, grid.sizes, grid.shifts, places, strict=True):
        # xω = π·(x(2j + 2θ) mod 2m)/m: reduced in integers, so that nothing is lost.
        index = 2 * torch.arange(count, device=device)[:, None] + round(2 * shift)
        turns = torch.tensor(list(axis), device=device) * index % (2 * size)
        angles = (angles[:, None, :, None] + turns.double()[:, None] * (math.pi / size)).flatten(2).flatten(0, 1)
    return torch.stack([angles.cos(), -angles.sin()]).to(dtype)


@functools.lru_cache(maxsize=64)
def _kept_evaluation_table(
    grid: FrequencyGrid, places: tuple[range, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():  # also what inference needs first may be trained with later
        return _evaluation_table(grid, places, dtype, device)


def evaluate(table: Tensor, filters: Tensor) -> Tensor:
    """The matrices of a filter (places, ..., rows, rows) at the frequencies of a table."""
    return (table.flatten(0, 1) @ filters.flatten(1)).reshape(*table.shape[:2], *filters.shape[1:])


def evaluate_adjoint(table: Tensor, matrices: Tensor) -> Tensor:
    """The transpose of :func:`evaluate`."""
    return (table.flatten(0, 1).mT @ matrices.flatten(0, 1).flatten(1)).reshape(-1, *matrices.shape[2:])


def square(matrix: Tensor) -> Tensor:
    """(A + iB)² = (A² - B²) + i(AB + BA)."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        real, *rest = matrix
        if not rest:
            return matrix @ matrix
        return torch.stack([real @ real - rest[0] @ rest[0], real @ rest[0] + rest[0] @ real])
    # Into one piece of memory, part by part: fresh memory costs more than the products. The second product of AB + BA
    # costs less than the transpose of the first would.
    result = torch.empty_like(matrix)
    for out, part in _pieces(result, matrix):
        torch.bmm(part[0], part[0], out=out[0])
        if len(part) == 2:
            out[0].baddbmm_(part[1], part[1], alpha=-1)
            torch.bmm(part[0], part[1], out=out[1]).baddbmm_(part[1], part[0])
    return result


def square_rows(matrix: Tensor, first: int, last: int) -> Tensor:
    """Rows ``first`` to ``last`` of the square, the columns from ``first`` on, for matrices with two parts."""
    real, imaginary = matrix.flatten(1, -3)
    top, b_top = real[:, first:last], imaginary[:, first:last]
    right, b_right = real[:, :, first:], imaginary[:, :, first:]
    parts = [
        torch.bmm(top, right).baddbmm(b_top, b_right, alpha=-1),
        torch.bmm(top, b_right).baddbmm(b_top, right),
    ]
    return torch.stack(parts).reshape(*matrix.shape[:3], last - first, -1)


def square_adjoint_(cotangent: Tensor, matrix: Tensor) -> None:
    """CG + GC for a Hermitian C, in its place: twice the Hermitian part of CG."""
    for out, piece in _pieces(cotangent, matrix):
        first = torch.bmm(out[0], piece[0])
        if len(piece) == 2:
            first.baddbmm_(out[1], piece[1], alpha=-1)
            second = torch.bmm(out[0], piece[1]).baddbmm_(out[1], piece[0])
            torch.sub(second, second.mT, out=out[1])
        torch.add(first, first.mT, out=out[0])


def modulus(matrix: Tensor) -> Tensor:
    """|G| entry by entry."""
    return matrix[0].abs() if len(matrix) == 1 else torch.hypot(*matrix)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    flat = [tensor.flatten(1, -3) for tensor in tensors]
    each = max(1, PIECE_BYTES // (flat[0][:, :1].numel() * flat[0].element_size()))
    return zip(*(tensor.split(each, 1) for tensor in flat), strict=True)


class FilterTransform:
    """Real filters, a row per place modulo the sizes of the grid, from the pairs of their spectra on half of it.

    Separable: one product per axis. The table of a leading axis maps (part, frequency) to (place, part), so that the
    next axis finds its own (part, frequency) contiguous.
    """

    def __init__(self, grid: FrequencyGrid, dtype: torch.dtype, device: torch.device) -> None:
        self.grid, self.places = grid, math.prod(grid.sizes)
        *leading, last = grid.sizes
        self.leading = [_complex_table(size, device).to(dtype) for size in leading]
        counts = grid.multiplicity(device)[: grid.half_size]
        turns = _turns(last, grid.half_size, device)
        weights = counts / self.places
        self.last = torch.cat([turns.cos() * weights, -turns.sin() * weights], 1).to(dtype)

    @classmethod
    def of(cls, grid: FrequencyGrid, like: Tensor) -> "FilterTransform":
        """The transform in the type of a tensor."""
        return (_kept_transform if can_be_read(like) else cls)(grid, like.dtype, like.device)

    def __call__(self, spectra: Tensor) -> Tensor:
        """(2, frequencies, columns) → (places, columns)."""
        values, done = spectra, 1
        for size, table in zip(self.grid.sizes, self.leading, strict=False):
            values = table @ values.reshape(done, 2 * size, -1)
            done *= size
        return (self.last @ values.reshape(done, 2 * self.grid.half_size, -1)).flatten(0, 1)

    def adjoint(self, filters: Tensor) -> Tensor:
        """(places, columns) → (2, frequencies, columns), the transpose of the transform."""
        done = math.prod(self.grid.sizes[:-1])
        values = self.last.mT @ filters.reshape(done, self.grid.sizes[-1], -1)
        for size, table in zip(reversed(self.grid.sizes[:-1]), reversed(self.leading), strict=True):
            done //= size
            values = table.mT @ values.reshape(done, 2 * size, -1)
        return values.reshape(2, len(self.grid), -1)


@functools.lru_cache(maxsize=64)
def _kept_transform(grid: FrequencyGrid, dtype: torch.dtype, device: torch.device) -> FilterTransform:
    with torch.inference_mode(False), torch.no_grad():
        return FilterTransform(grid, dtype, device)


def _complex_table(size: int, device: torch.device) -> Tensor:
    """e^(2πi·xj/size) acting on pairs: rows (x, part), columns (part, j)."""
    turns = _turns(size, size, device)
    cosine, sine = turns.cos(), turns.sin()
    rows = torch.stack([torch.cat([cosine, -sine], 1), torch.cat([sine, cosine], 1)], 1)
    return rows.reshape(2 * size, 2 * size)


def _turns(size: int, frequencies: int, device: torch.device) -> Tensor:
    """2π·(xj mod size)/size, in float64; reduced in integers, so that nothing is lost."""
    steps = torch.arange(size, device=device)[:, None] * torch.arange(frequencies, device=device) % size
    return steps.double() * (2 * math.pi / size)
