r"""The norm at one input size, proved by one Cholesky factorisation.

λ_max(TᵀT) <= s follows if s·I - TᵀT, less all rounding, has a Cholesky factor. Taps couple only places nearby, so with
the places of one axis in a good order the matrix is block banded, the blocks being all places of the other axes and all
channels. The factorisation runs through a window of the band: a panel is factorised, its update is subtracted from the
rest of the window, the window moves on. Nothing else is kept, so the memory is that of the window.

The matrix is put together from the kernel. With I_b the 0/1 matrix that says which place each output reads with tap b,
T = Σ_b I_b ⊗ K_b, so

    TᵀT = Σ_(b,b') (I_bᵀI_b') ⊗ (K_bᵀK_b'),      TTᵀ = Σ_(b,b') (I_bI_b'ᵀ) ⊗ (K_bK_b'ᵀ),

and over several axes the first factor is a Kronecker product of one such matrix of small integers per axis. That holds
for every stride, dilation, padding and padding mode.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from gramcert.certified.tapwise import at_tap
from gramcert.certified.work import Work
from gramcert.geometry.axis import Axis
from gramcert.rounding import (
    absolute_sums,
    banded_cholesky_error,
    diagonal_error,
    down,
    gamma,
    row_norms_up,
    underflow,
    up,
)

Side = Literal["input", "output"]

# What an axis takes for each place and tap while its pattern is made.
AXIS_BYTES = 208

# The factor of a panel of rows, and what it solves for in the rows after it.
Panel = tuple[Tensor, Tensor]

# What is added to a Gram matrix before it is inverted, in units of its diagonal: at first, and less than this.
REGULAR, MOST_REGULAR = 1e-14, 1e-9

# Orders of panels below which a factorisation is mostly overhead, and rows of the rest that are updated at a time.
SMALLEST_PANEL, ROWS = 192, 512


def smaller_grams(kernels: Tensor, axes: tuple[Axis, ...]) -> list["BandedGram"]:
    """TᵀT or TTᵀ of each group, whichever is less work; what depends on the axes alone is shared."""
    sides: tuple[Side, Side] = ("input", "output")
    first = min((BandedGram(kernels[0], axes, side) for side in sides), key=lambda gram: gram.flops)
    return [first, *(BandedGram(kernel, axes, first.side, first.axis_grams) for kernel in kernels[1:])]


def band_bytes(axes: tuple[Axis, ...]) -> int:
    """What is taken at most to find out about the axes, of both sides; half of it is kept."""
    return sum(AXIS_BYTES * max(axis.size, axis.outputs) * axis.taps + 32 * axis.used for axis in axes)


def band_operations(kernel: Tensor, axes: tuple[Axis, ...]) -> float:
    """About how many operations the factorisation takes, from the sizes alone."""
    sides = []
    for side in (0, 1):
        places = [axis.outputs if side == 0 else axis.size for axis in axes]
        # Without a stride, places of different residues of a dilation do not meet, and lie apart.
        reach = [(axis.dilation if axis.stride > 1 else 1) * (axis.taps - 1) for axis in axes]
        steps = [axis.stride if side == 0 else 1 for axis in axes]
        for along, size in enumerate(places):
            block = kernel.shape[side] * math.prod(places) / size
            sides.append(size * block**3 * min(size, reach[along] // steps[along] + 1) ** 2)
    return min(sides)


class AxisGram:
    """I_bᵀI_b' (or I_bI_b'ᵀ) of one axis for all pairs of taps, its places in an order with a small bandwidth."""

    def __init__(self, axis: Axis, side: Side) -> None:
        # scipy is slow to import and needed for proofs at one size only.
        import numpy as np
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import reverse_cuthill_mckee

        sources = axis.sources().numpy()
        incidence = []
        for tap in range(axis.taps):
            rows = np.flatnonzero(sources[:, tap] < axis.size)
            entries = (np.ones(len(rows)), (rows, sources[rows, tap]))
            matrix = csr_array(entries, shape=(axis.outputs, axis.size))
            incidence.append(matrix.T.tocsr() if side == "input" else matrix)
        self.size = axis.size if side == "input" else axis.outputs
        whole: Any = sum(incidence[1:], incidence[0])  # of numbers that are not negative: nothing cancels
        pattern = (whole @ whole.T).tocsr()
        pattern.sort_indices()
        natural = np.arange(self.size)
        folded = np.stack([natural, natural[::-1]], 1).ravel()[: self.size]  # 0, n-1, 1, n-2, ...: for circles
        found = reverse_cuthill_mckee(pattern, symmetric_mode=True).astype(np.int64)  # as for dilations
        orders = [natural, folded, found]
        self.bandwidth, order = min(
            ((_bandwidth(pattern, order), order) for order in orders), key=lambda candidate: candidate[0]
        )
        self._place = np.empty(self.size, dtype=np.int64)
        self._place[order] = natural
        self.order = torch.from_numpy(order.copy())  # the places one after the other
        self._incidence = incidence
        self.taps = axis.taps

    def entries(self, first: int, second: int) -> tuple[Tensor, Tensor, Tensor]:
        """The matrix of one pair of taps: rows, columns, values."""
        coordinates = (self._incidence[first] @ self._incidence[second].T).tocoo()
        rows, columns = self._place[coordinates.row], self._place[coordinates.col]
        return torch.from_numpy(rows), torch.from_numpy(columns), torch.from_numpy(coordinates.data)

    @functools.cached_property
    def all_entries(self) -> dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]]:
        """The matrices of all pairs of taps."""
        taps = range(self.taps)
        return {(first, second): self.entries(first, second) for first in taps for second in taps}

    @functools.cached_property
    def counts(self) -> Any:
        """How often each pair of taps couples places x and x + offset: an array (places, bandwidth + 1, pairs)."""
        counts = torch.zeros(self.size, self.bandwidth + 1, self.taps**2, dtype=torch.int32)
        for first, second in itertools.product(range(self.taps), repeat=2):
            rows, columns, values = self.entries(first, second)
            upper = columns >= rows
            counts[rows[upper], (columns - rows)[upper], first * self.taps + second] = values[upper].int()
        return counts.numpy()


def _bandwidth(pattern: Any, order: Any) -> int:
    import numpy as np

    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    coordinates = pattern.tocoo()
    return int(np.abs(place[coordinates.row] - place[coordinates.col]).max(initial=0))


class BandedGram:
    """TᵀT or TTᵀ of one group's kernel (out, in, *taps) in float64 at one input size."""

    def __init__(
        self, kernel: Tensor, axes: tuple[Axis, ...], side: Side, axis_grams: list[AxisGram] | None = None
    ) -> None:
        self.channels = kernel.shape[1] if side == "input" else kernel.shape[0]
        self.axis_grams = grams = axis_grams or [AxisGram(axis, side) for axis in axes]
        # The axis along which the window moves: the one that gives the least work.
        sizes = [gram.size for gram in grams]
        self._along = min(range(len(axes)), key=lambda axis: self._work(grams, sizes, axis))
        self._outer = grams[self._along]
        self._inner = [gram for axis, gram in enumerate(grams) if axis != self._along]
        self._kernel = kernel.movedim(2 + self._along, 2)
        self.side: Side = side
        self.block = self.channels * math.prod(gram.size for gram in self._inner)
        self.positions = self._outer.size
        self.bandwidth = self._outer.bandwidth
        self.order = self.positions * self.block
        self.half_bandwidth = (self.bandwidth + 1) * self.block - 1
        self.flops = self._work(grams, sizes, self._along)
        self.panel = min(self.positions, max(1, -(-SMALLEST_PANEL // self.block)))
        # The window, the factor of a panel and what it solves for, the blocks that are kept and one that is built.
        blocks = (
            (self.panel + self.bandwidth) ** 2 + self.panel * (self.panel + 2 * self.bandwidth) + self.bandwidth + 4
        )
        counts = 4 * self._outer.taps**2 * self.positions * (self.bandwidth + 1)
        entries = sum(24 * gram.size * gram.taps**2 for gram in self._inner)
        self.window_bytes = 8 * self.block**2 * blocks
        self.kept = counts + entries  # of the axes, shared by all groups
        self.storing_error = _storing_error(kernel, axes, side)
        # Above the diagonal: an entry of T is a sum of as many weights as a place is repeated times, at most.
        copies = math.prod(axis.repetition for axis in axes)
        squares = row_norms_up(kernel.transpose(0, int(side == "input")).flatten(1)).max().square()
        self._largest_square = up(up(up(float(squares)) * copies**2) + self.storing_error)
        self._blocks: dict[bytes, Tensor] = {}

    @property
    def description(self) -> str:
        """What is factorised."""
        return f"order {self.order} and half-bandwidth {self.half_bandwidth}"

    def _work(self, grams: list[AxisGram], sizes: list[int], axis: int) -> float:
        block = self.channels * math.prod(sizes) / sizes[axis]
        band = min(grams[axis].bandwidth, sizes[axis] - 1) + 1
        return sizes[axis] * block**3 * band**2

    def _coupling(self, row: int, column: int) -> Tensor | None:
        """The block of the Gram matrix at two outer positions, row <= column; positions inside the layer share it."""
        counts = self._outer.counts[row, column - row]
        if not counts.any():
            return None
        key = counts.tobytes()
        block = self._blocks.pop(key, None)
        if block is None:
            taps = self._kernel.shape[2]
            block = self._build([(*divmod(pair, taps), count) for pair, count in enumerate(counts.tolist()) if count])
            while len(self._blocks) > self.bandwidth + 1:  # those of the borders are needed once
                self._blocks.pop(next(iter(self._blocks)))
        self._blocks[key] = block  # the latest last
        return block

    def _build(self, pairs: list[tuple[int, int, int]]) -> Tensor:
        sizes = [gram.size for gram in self._inner]
        places = math.prod(sizes)
        block = torch.zeros(places, places, self.channels, self.channels, dtype=torch.float64)
        taps = [range(size) for size in self._kernel.shape[3:]]
        for first, second, count in pairs:
            for left, right in itertools.product(itertools.product(*taps), repeat=2):
                rows, columns, counts = _kronecker(
                    [
                        gram.all_entries[pair]
                        for gram, pair in zip(self._inner, zip(left, right, strict=True), strict=True)
                    ],
                    sizes,
                )
                if not len(rows):
                    continue
                one, two = at_tap(self._kernel, (first, *left)), at_tap(self._kernel, (second, *right))
                product = one.T @ two if self.side == "input" else one @ two.T
                block[rows, columns] += (counts * count)[:, None, None] * product
        return block.transpose(1, 2).reshape(self.block, self.block)

    def dense(self) -> Tensor:
        """The whole Gram matrix, symmetric, places in the order of the band, within ``storing_error`` in norm."""
        matrix = torch.zeros(self.order, self.order, dtype=torch.float64)
        for row in range(self.positions):
            for column in range(row, min(self.positions, row + self.bandwidth + 1)):
                block = self._coupling(row, column)
                if block is not None:
                    matrix[_span(row, self.block), _span(column, self.block)] = block
        # One of the two roundings of each entry.
        return matrix.triu() + matrix.triu(1).T

    def proves_below(self, level: float, work: Work) -> bool:
        """Whether λ_max <= level was proved, rounding included; False says nothing."""
        return self._proves(level, work, 1)

    def proves_above(self, level: float, work: Work) -> bool:
        """Whether λ_min >= level was proved, rounding included; False says nothing."""
        return self._proves(level, work, -1)

    @property
    def error_above(self) -> float:
        """What rounding takes at least of a level that is proved to be below λ_min."""
        return self._error(0.0, self._largest_square)

    def _error(self, level: float, size: float) -> float:
        """All rounding of a proof where the diagonal of what is factorised is at most ``size``."""
        window = min((self.panel + self.bandwidth) * self.block, self.order)
        largest = up(size + diagonal_error(size, torch.float64))
        error = banded_cholesky_error(window, self.half_bandwidth, largest)
        return up(error + up(self.storing_error + diagonal_error(up(level + size), torch.float64)))

    def _proves(self, level: float, work: Work, sign: int) -> bool:
        # The Gram matrix makes the diagonal of the one smaller, the level that of the other.
        error = self._error(level, level if sign > 0 else self._largest_square)
        shifted = down(level - error) if sign > 0 else up(level + error)
        if shifted <= 0:
            return False
        return self._factorise(sign, shifted, work) is not None

    @property
    def factor_bytes(self) -> int:
        """What all panels of a factor take."""
        return 8 * self.block**2 * self.positions * (self.panel + self.bandwidth)

    def inverse(self, work: Work) -> Callable[[Tensor], Tensor] | None:
        """About (Gram)⁻¹ on inputs, or outputs, (channels, *sizes), for iteration; ``None`` if it is too singular."""
        panels, regular = None, REGULAR
        while panels is None and regular < MOST_REGULAR:  # singular but for rounding
            panels = self._factorise(-1, -regular * self._largest_square, work, keep=True)
            regular *= 64
        if panels is None:
            return None
        axes = [self._outer, *self._inner]
        shape = [self.positions, *(gram.size for gram in self._inner), self.channels]

        def solve(x: Tensor) -> Tensor:
            band = x.movedim(1 + self._along, 1).movedim(0, -1)
            for dim, gram in enumerate(axes):
                band = band.index_select(dim, gram.order)
            band = band.reshape(-1, 1).clone()
            start, parts = 0, []
            for factor, solved in panels:
                stop = start + len(factor)
                parts.append(torch.linalg.solve_triangular(factor, band[start:stop], upper=False))
                band[stop : stop + solved.shape[1]] -= solved.T @ parts[-1]
                start = stop
            for (factor, solved), part in zip(reversed(panels), reversed(parts), strict=True):
                stop, start = start, start - len(factor)
                right = part - solved @ band[stop : stop + solved.shape[1]]
                band[start:stop] = torch.linalg.solve_triangular(factor.T, right, upper=True)
            result = band.reshape(shape)
            for dim, gram in enumerate(axes):
                result = torch.empty_like(result).index_copy_(dim, gram.order, result)
            return result.movedim(-1, 0).movedim(1, 1 + self._along)

        return solve

    def _factorise(self, sign: int, level: float, work: Work, *, keep: bool = False) -> list[Panel] | None:
        """The panels of the factor of sign·(level - Gram), if they are kept; ``None`` if that is not positive."""
        try:
            return self._factor(sign, level, work, keep)
        finally:
            self._blocks.clear()  # there may be many groups

    def _factor(self, sign: int, level: float, work: Work, keep: bool) -> list[Panel] | None:
        window = (self.panel + self.bandwidth) * self.block
        matrix = torch.zeros(window, window, dtype=torch.float64)  # nothing below its diagonal is read
        panels: list[Panel] = []
        for position in range(min(self.positions, self.panel + self.bandwidth)):
            self._enter(matrix, position, 0, sign, level)
        for start in range(0, self.positions, self.panel):
            work.tick("banded Cholesky proof", start / self.positions)
            width = min(self.panel, self.positions - start) * self.block
            rest = min(self.positions - start, self.panel + self.bandwidth) * self.block - width
            factor, info = torch.linalg.cholesky_ex(matrix[:width, :width].T)
            if int(info):
                return None
            solved = torch.linalg.solve_triangular(factor, matrix[:width, width : width + rest], upper=False)
            if keep:
                panels.append((factor, solved))
            if rest:
                later = matrix[width : width + rest, width : width + rest]
                for first in range(0, rest, ROWS):
                    rows = slice(first, first + ROWS)
                    later[rows, first:].addmm_(solved[:, rows].T, solved[:, first:], alpha=-1)
                for first in range(0, rest, self.block):  # rows are overwritten only after they have moved
                    rows = slice(first, first + self.block)
                    matrix[rows, first:rest] = later[rows, first:]
            matrix[rest:] = 0
            matrix[:rest, rest:] = 0
            first_new = start + self.panel + self.bandwidth
            for position in range(first_new, min(self.positions, first_new + self.panel)):
                self._enter(matrix, position, start + self.panel, sign, level)
        return panels

    def _enter(self, matrix: Tensor, position: int, origin: int, sign: int, level: float) -> None:
        """Write sign·(level - Gram) at one outer position, and above it its couplings to those before it."""
        here = _span(position - origin, self.block)
        for other in range(max(origin, position - self.bandwidth), position + 1):
            block = self._coupling(other, position)
            if block is not None:
                torch.mul(block, -sign, out=matrix[_span(other - origin, self.block), here])
        matrix[here, here].diagonal().add_(sign * level)


def _span(position: int, block: int) -> slice:
    return slice(position * block, (position + 1) * block)


def _kronecker(factors: list[tuple[Tensor, Tensor, Tensor]], sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Entries of a Kronecker product of sparse matrices: rows, columns, values."""
    one = torch.zeros(1, dtype=torch.int64)
    rows, columns, values = one, one, torch.ones(1, dtype=torch.float64)
    for (row, column, value), size in zip(factors, sizes, strict=True):
        rows = (rows[:, None] * size + row).flatten()
        columns = (columns[:, None] * size + column).flatten()
        values = (values[:, None] * value).flatten()
    return rows, columns, values


def _storing_error(kernel: Tensor, axes: tuple[Axis, ...], side: Side) -> float:
    """Norm of the rounding errors of the stored Gram matrix.

    An entry is a sum over channels and pairs of taps, so its error is at most γ·(|T|ᵀ|T|), whose norm is at most
    ‖|T|‖₁‖|T|‖_∞: the absolute sums of the kernel over what an output reads and over what reads an input.
    """
    contracted = kernel.shape[0] if side == "input" else kernel.shape[1]
    terms = contracted + math.prod(kernel.shape[2:]) ** 2 + 4
    rows, columns = absolute_sums(kernel)
    columns = up(columns * math.prod(axis.repetition for axis in axes))
    return up(up(gamma(terms) * up(rows * columns)) + underflow(8 * terms * kernel.numel()))
