r"""The Gram symbol G(ω) = E(ω)E(ω)* of a stride-1 kernel, and proofs about it with all rounding included.

With the matrices K_b of the taps, p by q with p <= q (transposed if need be: the singular values stay),

    G(ω) = Σ_a C_a e^(-ia·ω),   C_a = Σ_b K_(b+a) K_bᵀ,   C_(-a) = C_aᵀ,

so the lags a of one half space suffice: Re G = C_0 + Σ cos(a·ω)(C_a + C_aᵀ), Im G = -Σ sin(a·ω)(C_a - C_aᵀ). A batch
of frequencies is then two real matrix products, several times cheaper than products of symbols.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.bounds.symmetric import symmetric_sum
from gramcert.certified.factorisation import factorise, terms
from gramcert.certified.frequencies import Frequencies, all_combinations
from gramcert.certified.staircase import diagonals, is_blocked, packed, packed_size, staircase, whole
from gramcert.certified.work import Work
from gramcert.rounding import (
    TWIDDLE_ERROR,
    absolute_sums,
    cholesky_error,
    complex_gamma,
    diagonal_error,
    factor_error,
    gamma,
    lift_by,
    norm_up,
    quotient_bounds,
    room_like,
    root_up,
    sums_up,
    underflow,
    up,
)

# Bytes of matrices, or of sines and cosines, worked on at a time: they are read several times while in the cache.
BATCH_BYTES = 2**23

# Large matrices: so many frequencies at least, within so many bytes, share one pass over the coefficients.
SHARED, LARGE_BATCH_BYTES = 16, 2**27


# Orders up to which coefficients of real and imaginary parts lie side by side, half of them zeros, which takes more
# memory and less time.
INTERLEAVED = 1024

# Weights that are lifted to float64 at a time, and bytes that this takes for each of them: from another device, in
# float64, and their moduli.
PIECE, PIECE_BYTES = 2**22, 24

# Orders of single matrices above which one factorisation has to do, and none is decomposed.
FACTORISED_ONCE = 1024

# Bytes for each entry of the Gram matrix of a single matrix: in both precisions, and factorised; where it is decomposed
# or solved with, as smaller ones are and all of them for their smallest value, the copies that this takes. And numbers
# for each of its rows: Krylov vectors, and panels of a factorisation.
FACTORISED_BYTES, DECOMPOSED_BYTES, ROW_NUMBERS = 20, 48, 640

# Entries whose absolute values are summed at a time.
AMOUNT = 2**18

# What ‖|R*||R|‖ is taken for at first, in units of the level; and how much more than seen so far.
EXPECTED_SIZE, RESERVE = 64.0, 1.25


@dataclass(frozen=True)
class Table:
    """Coefficients of the cosines and of the sines in one precision.

    ``pairs`` has them all, a row for each cosine and each sine, real and imaginary parts of an entry side by side, for
    the entries of the upper rows.
    """

    even: Tensor
    odd: Tensor
    pairs: Tensor | None


class GramSymbol:
    """G(ω) of one kernel (out, in, *taps) times 2^exponent. Axes with one tap are left out: G is constant along them.

    A matrix, with one tap, stays as it is stored, in any type and anywhere: it is lifted to float64 piece by piece.
    """

    def __init__(self, kernel: Tensor, batch: int | None = None, *, exponent: int = 0) -> None:
        self.axes = [axis for axis, size in enumerate(kernel.shape[2:]) if size > 1]
        if self.axes:
            kernel, exponent = lift_by(kernel, exponent), 0
        self._exponent = exponent
        self._transposed = kernel.shape[0] > kernel.shape[1]
        kernel = kernel.transpose(0, 1) if self._transposed else kernel
        self.sizes = [kernel.shape[2 + axis] for axis in self.axes]
        self.kernel = kernel.reshape(*kernel.shape[:2], *self.sizes)
        self.taps = self.kernel.reshape(*kernel.shape[:2], -1)  # the same with all taps on one axis
        self.order = kernel.shape[0]
        self.degrees = [(size - 1) / 2 for size in self.sizes]
        # Lags of one half space: those of all of these combinations that do not come before 0, which is in the middle
        # of those with the first entry 0.
        self._lag_ranges = [torch.arange(1 - size if axis else 0, size) for axis, size in enumerate(self.sizes)]
        self._skipped = math.prod(2 * size - 1 for size in self.sizes[1:]) // 2
        self._lag_count = math.prod(2 * size - 1 for size in self.sizes) // 2 + 1
        self._batch = batch or _usual_batch(self.order, self._lag_count)
        self._columns = max(1, PIECE // self.taps[:, 0].numel())  # of a piece
        self.bytes = 0  # what it may come to take, where that is limited
        self._tables: dict[torch.dtype, Table] = {}
        self._lent: dict[torch.dtype, Tensor] = {}
        self._sizes = dict.fromkeys((torch.float32, torch.float64), EXPECTED_SIZE)

    @classmethod
    def within(cls, name: str, kernel: Tensor, work: Work, *, exponent: int = 0, sign: int = 1) -> "GramSymbol":
        """The symbol of a kernel, whose batches are small enough for the memory; stops where no tables fit into it.

        ``sign`` is that of G where its largest value is searched.
        """
        order = min(kernel.shape[:2])
        lags = math.prod(2 * size - 1 for size in kernel.shape[2:]) // 2 + 1
        if lags == 1:
            each = FACTORISED_BYTES if sign > 0 and order > FACTORISED_ONCE else DECOMPOSED_BYTES
            symbol = cls(kernel, 1, exponent=exponent)
            symbol.work_within(name, each * order**2 + 8 * ROW_NUMBERS * order, work)
            return symbol
        # The kernel transposed, with the taps before the columns, and two parts of it that are multiplied.
        fixed = 32 * kernel.numel() + 24 * lags * (kernel.dim() - 2)
        # Correlations, even and odd coefficients, and those in float32 or what they are made from.
        fixed += 8 * order**2 * ((7 if order <= INTERLEAVED else 4) * lags + 8)
        # In float32 twice as many: sines and cosines in both precisions; real and imaginary parts, the matrices made of
        # them, their factors.
        each = 64 * lags + 80 * order**2
        work.require_bytes(name, fixed + each)
        # Half of the memory is left for the frequencies themselves.
        batch = max(1, min(_usual_batch(order, lags), (work.available // 2 - fixed) // each))
        symbol = cls(kernel, batch, exponent=exponent)
        symbol.bytes = fixed + batch * each
        return symbol

    def work_within(self, name: str, fixed: int, work: Work) -> None:
        """Make pieces of a matrix small enough for the memory beside so many bytes; stop where none are."""
        rows, columns = self.taps.shape[:2]
        fixed += 80 * columns  # an image in complex numbers, while it is put together, and its moduli
        column = PIECE_BYTES * rows
        work.require_bytes(name, fixed + column)
        self._columns = min(self._columns, (work.available - fixed) // column)

    def _pieces(self) -> Iterator[Tensor]:
        """The kernel in float64, (p, some columns, taps), one piece after the other in the same memory."""
        pieces = self.taps.split(self._columns, 1)
        room = torch.empty(0 if self.axes else pieces[0].numel(), dtype=torch.float64)
        for piece in pieces:
            yield lift_by(piece, self._exponent, room)

    def apply(self, vector: Tensor) -> Tensor:
        """About Gv for a single matrix and a real vector of its type, without G and without a copy."""
        matrix, image = self.taps[..., 0], vector
        before = self._exponent // 2  # half of the scale before each product, half after it: nothing overflows
        for factor in (matrix.T, matrix):
            product = factor @ lift_by(image, before).to(matrix)
            image = lift_by(product, self._exponent - before)
        return image.to(vector)

    @property
    def is_large_matrix(self) -> bool:
        """Whether it is a single matrix that should be factorised only once."""
        return not self.is_complex and self.order > FACTORISED_ONCE

    @functools.cached_property
    def crude(self) -> float:
        """A bound of every λ_max(G), and of Σ_a of the absolute sums that C_a is made of."""
        crude = crude_norm(self.kernel, self._exponent)
        return up(crude * crude)

    @functools.cached_property
    def lags(self) -> Tensor:
        """a, a row each, from 0 on."""
        return all_combinations(self._lag_ranges)[self._skipped :]

    @functools.cached_property
    def correlations(self) -> Tensor:
        """C_a for each lag."""
        without_lag = symmetric_sum((piece.flatten(1) for piece in self._pieces()), self.order)[None]
        if not self.is_complex:
            return without_lag
        result = self.kernel.new_empty(len(self.lags), self.order, self.order)
        result[:1] = without_lag
        kernel = self.kernel.movedim(1, -1).contiguous()  # so that parts of it are copied in long pieces
        for index, lag in enumerate(self.lags[1:].tolist(), 1):
            later = tuple(slice(max(0, a), size + min(0, a)) for a, size in zip(lag, self.sizes, strict=True))
            earlier = tuple(slice(max(0, -a), size - max(0, a)) for a, size in zip(lag, self.sizes, strict=True))
            left, right = (kernel[(slice(None), *part)].flatten(1) for part in (later, earlier))
            torch.mm(left, right.T, out=result[index])
        return result

    @property
    def correlation_terms(self) -> int:
        """At least the number of roundings that a product in one entry of C_a meets.

        With n products there are n - 1 additions and the product itself, in whichever pieces and order they are added.
        """
        return self.kernel[0].numel() + 2

    @property
    def is_complex(self) -> bool:
        """Whether G depends on ω; a constant G is real."""
        return bool(self.axes)

    def _coefficients(self) -> tuple[Tensor, Tensor]:
        """Those of the cosines and, but for lag 0, of the sines: a row each."""
        if not self.is_complex:
            return self.correlations.flatten(1), self.correlations[:0].flatten(1)
        others = self.correlations[1:]
        even = self.correlations + self.correlations.mT
        even[0] = self.correlations[0]
        return even.flatten(1), (others.mT - others).flatten(1)

    def table(self, dtype: torch.dtype) -> Table:
        """The coefficients in one precision."""
        if dtype not in self._tables:
            even, odd = self._coefficients()
            pairs = None
            if self.is_complex and self.order <= INTERLEAVED:
                pairs = torch.zeros(len(even) + len(odd), packed_size(self.order), 2, dtype=dtype)
                for part, place in ((even, pairs[: len(even), :, 0]), (odd, pairs[len(even) :, :, 1])):
                    matrices = part.unflatten(1, (self.order, self.order))
                    for panel, values in zip(packed(place, self.order), staircase(matrices), strict=True):
                        panel.copy_(values)
                pairs = pairs.flatten(1)
                even = odd = pairs[:0]
            self._tables[dtype] = Table(even.to(dtype), odd.to(dtype), pairs)
        return self._tables[dtype]

    def error(self, dtype: torch.dtype) -> float:
        """The norm of all that rounding does to G in one precision.

        It is bounded entry by entry, and the norm of those bounds by their row sums. C_a is off by at most
        γ·Σ_b |K_(b+a)||K_b|ᵀ, over all lags γ·SSᵀ with S = Σ_b |K_b|, whose norm is at most ``crude``.
        """
        count, roundings = len(self.lags), self.correlation_terms
        # Adding C_a and C_aᵀ, storing the coefficient, storing and computing the twiddle, and the sum over lags.
        relative = up(gamma(count + 4, dtype) + TWIDDLE_ERROR)
        error = up(up(relative * self._amount) + up(gamma(roundings) * self.crude))
        # Real and imaginary part of an entry: what is stored, multiplied and summed for each lag.
        lost = up(underflow(8 * self.order * (count + 4), dtype) + underflow(4 * self.order * count * roundings))
        return up(error + lost)

    @functools.cached_property
    def _amount(self) -> float:
        """Upper bound of the row sums of all absolute coefficients: |c + d| + |c - d| = 2·max(|c|, |d|)."""
        sums, rows = torch.zeros(self.order, dtype=torch.float64), max(1, AMOUNT // self.order)
        for number, matrix in enumerate(self.correlations):
            for part, here, there in zip(sums.split(rows), matrix.split(rows), matrix.T.split(rows), strict=True):
                part += torch.maximum(here.abs(), there.abs()).sum(1) * (2 if number else 1)
        terms = self.order * 2 * len(self.correlations)
        return up(up(float(sums.max()) * (1 + 2 * gamma(terms))) + underflow(terms))

    def evaluate(self, frequencies: Frequencies, dtype: torch.dtype) -> Tensor:
        """G at each frequency, within ``error(dtype)`` in norm, to be read only."""
        pairs = self.table(dtype).pairs
        if pairs is None:
            return self._matrices(frequencies, dtype, 1, None)
        return whole(self._upper_rows(pairs, frequencies, 1, None))

    def lend(self, frequencies: Frequencies, dtype: torch.dtype, sign: int = 1) -> list[Tensor]:
        """Upper rows of sign·G, panel by panel.

        They are in memory that is used again by the next call: for large batches new memory takes most of the time.
        """
        pairs = self.table(dtype).pairs
        each = self.order**2 if pairs is None else packed_size(self.order)
        numbers = (2 if self.is_complex else 1) * len(frequencies) * each
        if dtype not in self._lent or self._lent[dtype].numel() < numbers:
            self._lent[dtype] = torch.empty(numbers, dtype=dtype)
        memory = self._lent[dtype][:numbers]
        if pairs is None:
            return staircase(self._matrices(frequencies, dtype, sign, memory))
        return self._upper_rows(pairs, frequencies, sign, memory)

    def _matrices(self, frequencies: Frequencies, dtype: torch.dtype, sign: int, memory: Tensor | None) -> Tensor:
        """Whole ones: of constant or very large symbols."""
        table, shape = self.table(dtype), (len(frequencies), self.order, self.order)
        if self.is_complex:
            cosines, sines = self._waves(frequencies, dtype, sign)
            return torch.complex(cosines @ table.even, sines @ table.odd).reshape(shape)
        matrix = table.even.reshape(1, *shape[1:])
        out = None if memory is None else memory[: matrix.numel()].reshape(matrix.shape)
        if out is not None or sign != 1:
            matrix = torch.mul(matrix, sign, out=out)
        return matrix if len(frequencies) == 1 else matrix.repeat(len(frequencies), 1, 1)

    def _upper_rows(self, pairs: Tensor, frequencies: Frequencies, sign: int, memory: Tensor | None) -> list[Tensor]:
        out = None if memory is None else memory.reshape(len(frequencies), -1)
        parts = torch.mm(torch.cat(self._waves(frequencies, pairs.dtype, sign), 1), pairs, out=out)
        return packed(torch.view_as_complex(parts.unflatten(1, (-1, 2))), self.order)

    def _waves(self, frequencies: Frequencies, dtype: torch.dtype, sign: int) -> tuple[Tensor, Tensor]:
        cosines, sines = frequencies.waves(self._lag_ranges)
        return sign * cosines[:, self._skipped :].to(dtype), sign * sines[:, self._skipped + 1 :].to(dtype)

    def batch(self, dtype: torch.dtype) -> int:
        """How many frequencies to work on at a time."""
        return self._batch * (2 if dtype == torch.float32 else 1)

    def all_below(
        self,
        frequencies: Frequencies,
        level: float,
        dtype: torch.dtype,
        sign: int = 1,
        lifted: Tensor | None = None,
        *,
        hopeful: bool = True,
        worth: float = 0.0,
    ) -> Tensor:
        """For each frequency whether λ_max(sign·G) <= level was proved, for the G of real numbers.

        The proof is a Cholesky factor of (level - error)·I - sign·G, where the error is that of storing this matrix and
        of factorising it. With columns V in ``lifted`` VV* is added to the matrix: what is proved then is that all but
        so many of the eigenvalues, counted from the largest, are at most the level. A ``hopeful`` proof takes off what
        factors were off by before, and is one only if these are not off by more; errors below ``worth`` are not.
        """
        panels = self.lend(frequencies, dtype, -sign)
        added = 0.0
        if lifted is not None:
            for panel in panels:
                start = self.order - panel.shape[-1]
                panel += lifted[start : start + panel.shape[1]] @ lifted[start:].mH
            # VV* is rounded in its sums; where it is added, the sum is.
            columns = up(norm_up(lifted) * norm_up(lifted))
            sums = up(up(complex_gamma(lifted.shape[1] + 2) * columns) + underflow(8 * lifted.numel()))
            added = up(sums + up(gamma(2, dtype) * up(self._amount + columns)))
        diagonal = torch.cat(diagonals(panels), 1)
        real = diagonal.real if self.is_complex else diagonal
        size = float(real.abs().max()) + abs(level)
        stored = up(up(self.error(dtype) + added) + diagonal_error(size, dtype))
        trace = up(float(real.double().sum(-1).max()) + self.order * level)
        # Its terms may cancel: the sum is off by γ times their sizes.
        doubt = up(up(gamma(self.order + 2) * size) + diagonal_error(size, dtype))
        trace = up(max(0.0, trace) + up(2 * self.order * doubt))
        certain = self._certain_error(trace, dtype)
        # Where the error known beforehand matters little there is no need to look afterwards.
        hopeful = hopeful and is_blocked(self.order) and certain > worth
        allowed = min(certain, self._expected_error(level, dtype)) if hopeful else certain
        for piece in diagonals(panels):
            piece.add_(level - up(stored + allowed))
        passed, sizes = factorise(panels, measure=allowed < certain)
        if sizes is None:
            return passed
        sizes = sums_up(sizes, self.order, dtype)
        errors = torch.tensor([self._factor_error(each, dtype) for each in sizes.tolist()], dtype=torch.float64)
        proved = passed & (errors <= allowed)
        if bool(passed.any()):
            self._sizes[dtype] = RESERVE * float(sizes[passed].max()) / self._scale(level)
        doubtful = (passed & ~proved).nonzero()[:, 0]
        if len(doubtful):
            proved[doubtful] = self.all_below(frequencies[doubtful], level, dtype, sign, lifted, hopeful=False)
        return proved

    def _factor_error(self, size: float, dtype: torch.dtype) -> float:
        """That of factors with ‖|R*||R|‖ at most ``size``."""
        return factor_error(self.order, size, dtype, is_complex=self.is_complex, terms=terms(self.order))

    def _certain_error(self, trace: float, dtype: torch.dtype) -> float:
        return cholesky_error(self.order, trace, dtype, is_complex=self.is_complex, terms=terms(self.order))

    def _expected_error(self, level: float, dtype: torch.dtype) -> float:
        """What factors are off by if they are like those before; certain only after they have been looked at."""
        return (
            self._factor_error(self._sizes[dtype] * self._scale(level), dtype) if is_blocked(self.order) else math.inf
        )

    @functools.cached_property
    def mean(self) -> float:
        """About the mean of all eigenvalues at all frequencies."""
        return float(self.correlations[0].trace()) / self.order

    def _scale(self, level: float) -> float:
        """About the size of what is factorised: the level, or for small ones the mean of the eigenvalues."""
        return max(abs(level), self.mean, 1e-300)

    def rounding(self, level: float, dtype: torch.dtype, sign: int = 1) -> float:
        """About what :meth:`all_below` loses to rounding at this level."""
        trace = max(0.0, self.order * (level - sign * self.mean))  # at the mean over all frequencies
        factor = min(self._certain_error(trace, dtype), self._expected_error(level, dtype))
        return factor + self.error(dtype)

    def norm_below(self, frequency: Frequencies, vector: Tensor) -> float:
        """A lower bound of σ(E) at one frequency."""
        return self.gain(frequency, vector)[0]

    def gain(self, frequency: Frequencies, vector: Tensor) -> tuple[float, float]:
        """Bounds of ‖E*v‖/‖v‖ for a vector of p entries: one below the largest σ(E), one above the smallest."""
        image, amounts = self._adjoint(frequency, vector)
        amount = up(norm_up(amounts) * (1 + 4 * gamma(self.kernel[:, 0].numel() + 4)))
        # Each part of the image is a sum over p and the taps; the moduli of the two parts add at most a factor √2.
        relative = up(2 * complex_gamma(self.order + math.prod(self.sizes) + 8) + 2 * TWIDDLE_ERROR)
        error = up(up(relative * amount) + underflow(8 * self.kernel.numel()))
        return quotient_bounds(image, error, vector)

    def right_vector(self, frequency: Frequencies, vector: Tensor) -> Tensor:
        """The input of the kernel as it was given, before transposing, that belongs to an eigenvector of G."""
        return vector.conj().to(torch.complex128) if self._transposed else self._adjoint(frequency, vector)[0]

    def _adjoint(self, frequency: Frequencies, vector: Tensor) -> tuple[Tensor, Tensor]:
        """E*v in complex128, and Σ|K||v| for each of its entries, which its rounding is proportional to."""
        cosines, sines = frequency.waves([torch.arange(size) for size in self.sizes])
        parts, sizes = torch.view_as_real(vector.to(torch.complex128)).contiguous(), vector.abs().double()
        columns, count = self.taps.shape[1:]
        products, amounts = torch.empty(columns, count, 2, dtype=torch.float64), sizes.new_empty(columns)
        room = sizes.new_empty(self.taps[:, : self._columns].numel())
        places = zip(products.split(self._columns), amounts.split(self._columns), strict=True)
        for piece, (product, amount) in zip(self._pieces(), places, strict=True):
            torch.mm(piece.flatten(1).T, parts, out=product.flatten(0, 1))
            moduli = torch.abs(piece, out=room_like(piece, room))
            torch.mv((moduli.sum(-1) if self.axes else moduli[..., 0]).T, sizes, out=amount)
        return torch.view_as_complex(products) @ torch.complex(cosines[0], sines[0]), amounts


def _usual_batch(order: int, lags: int) -> int:
    """Frequencies worked on at a time in float64 if memory is plenty."""
    each = 16 * order**2
    return max(1, BATCH_BYTES // max(each, 16 * lags), min(SHARED, LARGE_BATCH_BYTES // each))


def crude_norm(kernel: Tensor, exponent: int = 0) -> float:
    """√(‖S‖₁‖S‖_∞) with S = Σ_b |K_b|: above every σ(E), and above the layer at every size without repeated pixels.

    Of the weights times 2^exponent, in little memory.
    """
    rows, columns = absolute_sums(kernel, exponent)
    return root_up(up(rows * columns))
