r"""The largest and the smallest σ(E(ω)) over all frequencies, or over a grid of them, enclosed.

Both are the largest eigenvalue of H = ±G: σ² is its largest value for H = G, and minus that for H = -G, where E has
not more rows than columns, or its adjoint is taken.

**Cells.** Let ω* be a maximiser of λ_max(H) over the torus, M the maximum, u its unit vector, and μ <= λ_min(H)
everywhere. For a cell with centre c and radius r (see :mod:`~gramcert.certified.frequencies`) that contains ω*,
u*H(c)u >= M - κ(r) with each of

* κ = (M - μ)·sin²r: along the segment from ω* to c the function u*H(ω)u - (M + μ)/2 is of exponential type 2 in the
  weighted distance, in size at most (M - μ)/2, and starts at its maximum: it stays above (M - μ)/2·cos 2r (r <= π/2);
* κ = ½r²·Σ_(a≠0) max_j(a_j/d_j)²·‖C_a‖: the second derivative of u*H(ω)u, whose first one vanishes at ω*.

So M <= T follows if every cell of a cover has λ_max(H(c)) <= T - κ(r) with T in place of M in κ. Cells where that is
not proved are split. For H = G there is μ = 0, for H = -G minus a bound of the largest value. Where the symbol is flat
(orthogonal-like layers) a better μ, and the second rule, close at once where μ = 0 would have to cut the whole torus
into small cells.
"""

import bisect
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.certified.frequencies import Cells, Frequencies
from gramcert.certified.gram_symbol import GramSymbol
from gramcert.certified.peaks import Peaks
from gramcert.certified.work import OutOfBudgetError, Work
from gramcert.rounding import (
    down,
    gamma,
    largest_upper,
    least_lower,
    next_up,
    root_down,
    root_up,
    row_norms_up,
    total_up,
    underflow,
    up,
)

# Radius of the cells whose centres are looked at first, and the largest one to start proofs from; that of large
# matrices, of which fewer are looked at.
FIRST_RADIUS, LARGE_FIRST_RADIUS, LARGE = 0.4, 0.55, 192

# How many of the first cells are followed to their local maximum.
FOLLOWED = 2

# How many of the best are compared by their computed eigenvalues where it matters.
CLOSELY = 8

# Cells within this many radii of the maximiser found so far need not be followed again.
BASIN = 4.0

# The share of the room between lower bound and target that curvature may take in cells that should close.
SHARE = 0.9

# Radii that are considered for the first cells, between one and its double.
RADII = 4

# The largest λ_max where it was looked at first, as a part of what was found from there.
UNBIASED = 0.99

# Cells, or points of a grid, that are looked at for the smallest value at a time: it is more expensive to look for.
LOOKED_AT = 256

# The tolerance for the largest value where the smallest is searched for.
COARSE_CEILING = 0.2

# Eigenvalues that deviate from their mean by less than this share of it make a symbol worth to be called flat.
FLAT = 0.4

NEXT_LEVEL = "the next level of cells"
ROUNDING = "rounding in float64 leaves no room for this tolerance"
SINGULAR = "the smallest value is so small beside the largest that rounding leaves no room for a positive lower bound"

# Cells kept at a time, past which the search stops with what it has, and bytes for each of them and each axis: its
# centre, those of its children while they are made, what is known about it.
MOST_CELLS, CELL_BYTES = 2**21, 64

# Cells whose distances are computed at a time.
DISTANCES = 2**16

# Shares of the room, or of the curvature of cells that may be split, that rounding may take before float64 replaces
# float32.
FLOAT32_SHARE, FLOAT32_OF_CURVATURE = 0.1, 0.3

# What rounding may take of the room, or of the curvature, before it is looked how large it really is.
NEGLIGIBLE = 0.25

# Failing cells are searched for a better maximiser where curvature is at most this times the room, or where more than
# this share of the cells that were split still fail: around a maximum that is known a quarter does.
SUSPICIOUS, SUSPICIOUS_SHARE = 1.0, 0.4


@dataclass(frozen=True)
class Extremum:
    """Bounds of the largest or smallest σ(E), where it was found, and why the tolerance was missed, if it was."""

    lower: float
    upper: float
    frequency: Frequencies
    vector: Tensor
    evaluations: int
    missed: str = ""


def torus_maximum(symbol: GramSymbol, tol: float, work: Work, floor: float = 0.0) -> Extremum:
    """Enclose the largest σ(E) over all frequencies.

    Args:
        symbol: of one kernel.
        tol: relative width asked for.
        work: limits.
        floor: a lower bound that something else has; the upper bound need not be nearer than the tolerance to it.
    """
    search = _Search(symbol, tol, work, floor, moving=True)

    def run() -> str:
        first = search.first_cells()
        search.look(first)
        # A single matrix is known at once as well as rounding allows, in a few factorisations; else in case that the
        # time runs out. Large matrices are factorised once, at less than the tolerance above what was found.
        if work.max_seconds is not None or not (symbol.is_complex or symbol.is_large_matrix):
            search.tighten(search.bound(first))
        elif symbol.is_large_matrix:
            search.tol /= 8
        search.measure_flatness(first)
        return search.close(search.cover(search.first_radius()))

    return search.result(run)


def torus_minimum(symbol: GramSymbol, tol: float, work: Work, ceiling: float = math.inf) -> Extremum:
    """Enclose the smallest σ(E) over all frequencies, of the side on which there are fewer.

    Args:
        symbol: of one kernel.
        tol: relative width asked for.
        work: limits.
        ceiling: an upper bound that something else has; the lower bound need not be nearer than the tolerance to it.
    """
    search = _Search(symbol, tol, work, ceiling, sign=-1, moving=True)

    def run() -> str:
        first = search.first_cells()
        search.look(first)
        if search.is_hopeless:
            return SINGULAR
        if symbol.is_complex and not search.measure_flatness(first):
            largest = torus_maximum(symbol, COARSE_CEILING, work)
            search.evaluations += largest.evaluations
            search.bottom = -min(-search.bottom, up(largest.upper * largest.upper))
        return search.close(search.cover(search.first_radius()))

    return search.result(run)


def grid_maximum(symbol: GramSymbol, grid: Frequencies, tol: float, work: Work, floor: float = 0.0) -> Extremum:
    """Enclose the largest σ(E) over the frequencies of a grid."""
    return _on_grid(_Search(symbol, tol, work, floor, moving=False), grid)


def grid_minimum(symbol: GramSymbol, grid: Frequencies, tol: float, work: Work, ceiling: float = math.inf) -> Extremum:
    """Enclose the smallest σ(E) over the frequencies of a grid, of the side on which there are fewer."""
    return _on_grid(_Search(symbol, tol, work, ceiling, sign=-1, moving=False), grid)


def _on_grid(search: "_Search", grid: Frequencies) -> Extremum:
    def run() -> str:
        step = 1 if search.sign > 0 else -(-len(grid) // LOOKED_AT)
        search.look(Cells(grid[slice(None, None, step)], 0.0))
        return SINGULAR if search.is_hopeless else search.close(Cells(grid, 0.0))

    return search.result(run)


class _Search:
    """For the largest λ_max(H), H = sign·G. Levels are those of H; σ of an extremum is √(sign·level).

    ``attained`` is a σ that a vector was found for, ``proved`` one that was proved not to be passed: the lower and the
    upper bound of the largest σ, or the upper and the lower one of the smallest.
    """

    def __init__(
        self, symbol: GramSymbol, tol: float, work: Work, known: float, *, moving: bool, sign: int = 1
    ) -> None:
        self.symbol, self.tol, self.work, self.known, self.moving, self.sign = symbol, tol, work, known, moving, sign
        # A single matrix has no curvature: where it is factorised several times, its norm is known as well as λ_max is.
        is_single = not symbol.is_complex and not symbol.is_large_matrix
        self.peaks = Peaks(symbol, tol / 5 if is_single else tol, moving=moving, sign=sign)
        self.typical = torch.zeros(0)  # estimates of λ_max(H) at the cells that were looked at first
        self.curvature = _curvature(symbol)
        self.evaluations = 0
        # Known in any case: 0 <= σ² <= crude.
        self.attained, self.proved = (0.0, root_up(symbol.crude)) if sign > 0 else (math.inf, 0.0)
        self.bottom = 0.0 if sign > 0 else -symbol.crude  # μ
        self.frequency = Frequencies(torch.zeros(1, len(symbol.axes), dtype=torch.int64), (1,) * len(symbol.axes))
        self.vector = self.peaks.random(1, torch.float64)[0]

    def first_cells(self) -> Cells:
        """Those that are looked at first."""
        return self.cover(LARGE_FIRST_RADIUS if self.symbol.order >= LARGE else FIRST_RADIUS)

    def cover(self, radius: float) -> Cells:
        """Cells of at most this radius for all frequencies, if they fit into the memory."""
        degrees = self.symbol.degrees
        self.work.require_bytes("cells", self._bytes_with(Cells.most(degrees, radius)))
        return Cells.cover(degrees, radius)

    def _bytes_with(self, cells: int) -> int:
        return self.symbol.bytes + CELL_BYTES * len(self.symbol.axes) * cells

    def _is_better(self, value: float) -> bool:
        """Whether some σ is more extreme than the one found so far."""
        return value > self.attained if self.sign > 0 else value < self.attained

    def tighten(self, level: float) -> None:
        """λ_max(H) <= level was proved."""
        if self.sign > 0:
            self.proved = min(self.proved, root_up(max(0.0, level)))
        else:
            self.proved = max(self.proved, root_down(-level))

    @property
    def _best(self) -> float:
        """The most extreme σ that is known to be attained, here or elsewhere."""
        return max(self.attained, self.known) if self.sign > 0 else min(self.attained, self.known)

    @property
    def target(self) -> float:
        """What has to be proved of σ for the tolerance, and not more."""
        return largest_upper(self._best, self.tol) if self.sign > 0 else least_lower(self._best, self.tol)

    @property
    def _top(self) -> float:
        """The level of the target, such that λ_max(H) <= that proves it."""
        square = self.target * self.target
        return down(square) if self.sign > 0 else -up(square)

    @property
    def room(self) -> float:
        """How far λ_max(H) may rise from what is known to the target."""
        return self.sign * (self.target**2 - self._best**2)

    def look(self, cells: Cells) -> None:
        """Look for a more extreme σ in the most promising of these cells.

        Where curvature has become unimportant it is the centres themselves that are too large, as on flat symbols, and
        eigenvalues are too close for a few Krylov steps: then they are computed.
        """
        is_first = not len(self.typical)
        closely = (self.moving or self.sign < 0) and not is_first and self._allowance(cells.radius) <= self.room / 4
        if self.moving and not is_first and not closely:  # what was found so far has been followed to its end
            far = [self._distance(part) > BASIN * cells.radius for part in cells.centres.split(DISTANCES)]
            cells = cells.choose(torch.cat(far).nonzero()[:, 0])
        if not len(cells):
            return
        best, vectors, values = self._rank(cells, CLOSELY if closely else FOLLOWED if is_first else 1, self.sign)
        if self.symbol.is_large_matrix and not is_first:  # it is not decomposed, but vectors can be improved
            vectors, closely = self.vector[None], False
        elif closely and self.symbol.is_complex:
            exact = self.sign * torch.linalg.eigvalsh(self.symbol.evaluate(cells.centres[best], torch.float64))
            chosen = exact.amax(1).argmax()[None]
            best, vectors = best[chosen], vectors[chosen]
        share = math.sin(min(cells.radius, 1.5)) ** 2
        for index, value, vector in zip(best, values[best].tolist(), vectors, strict=True):
            # Within the radius λ_max(H) rises by that at most; the estimate may be a few per cent low.
            least = self._found * (1 - share) + self.bottom * share
            if value + 0.05 * abs(value) >= least:
                self._follow(cells.centres[index[None]], vector, dense=closely)
        if is_first:
            self.typical = values
            if self.sign > 0:  # a few Krylov steps are too low, of large matrices by several per cent, as at the best
                self.typical = values * max(1.0, UNBIASED * self._found / max(float(values.max()), 1e-300))

    @property
    def _found(self) -> float:
        """The level that was found."""
        return self.sign * self.attained**2

    def _distance(self, frequencies: Frequencies) -> Tensor:
        """Σ_j d_j|ω_j - ω*_j| from where the best was found, or from its mirror image, whichever is nearer."""
        here, there = frequencies.values(), self.frequency.values()
        turns = [torch.remainder(here - sign * there + math.pi, 2 * math.pi) - math.pi for sign in (1, -1)]
        degrees = torch.tensor(self.symbol.degrees, dtype=torch.float64)
        return torch.stack([turn.abs() @ degrees for turn in turns]).amin(0)

    def first_radius(self) -> float:
        """Where proofs start: the radius with the fewest factorisations in all, if λ_max is as where it was looked at.

        A cell that fails is cut into 2^D; those of the closing radius should not fail. How many fail of a level is
        taken for independent of the level before, which is right for symbols that vary quickly, and no great mistake
        for isolated maxima.
        """
        smallest = self._closing_radius()
        levels = math.log2(max(1.0, FIRST_RADIUS / smallest))
        radii: list[float] = [smallest * 2.0 ** (step / RADII) for step in range(1 + math.ceil(RADII * levels))]
        typical, highest = sorted(self.typical.tolist()), self._top

        def factorisations(radius: float) -> float:
            count, children = Cells.most(self.symbol.degrees, radius), 2.0 ** len(self.symbol.axes)
            shares = []
            while radius > smallest and typical:
                shares.append(1 - bisect.bisect_right(typical, highest - self._allowance(radius)) / len(typical))
                radius /= 2
            each: float = 1.0
            for share in reversed(shares):
                each = 1 + children * share * each
            return count * each

        return min(radii, key=factorisations)

    def _closing_radius(self) -> float:
        """The radius at which every cell should close."""
        spread = self._top - self.bottom
        room = max(SHARE * self.room, 1e-15 * max(abs(self._top), spread))
        if not spread > 0:
            return FIRST_RADIUS
        closing = math.asin(math.sqrt(min(0.9, room / max(spread, room))))
        return max(closing, min(4.0, math.sqrt(2 * room / max(self.curvature, 1e-300))))

    @functools.cached_property
    def is_flat(self) -> bool:
        """Whether all eigenvalues at all frequencies are near to their mean."""
        if not self.symbol.is_complex:
            return False
        energy = self.symbol.correlations.square().sum((1, 2))
        deviation = math.sqrt(max(0.0, float(2 * energy.sum() - energy[0]) / self.symbol.order - self.symbol.mean**2))
        return deviation <= FLAT * self.symbol.mean

    def measure_flatness(self, cells: Cells) -> bool:
        """Find a better μ, if the symbol looks flat and that would help; say whether.

        With λ_max(H) <= α and λ_min(H) >= β at the centres of a cover, M <= α + (M - μ)sin²r and
        μ >= β - (M - μ)sin²r for the largest such μ, whence M - μ <= (α - β)/cos 2r.
        """
        if not self.is_flat or self._closing_radius() >= FIRST_RADIUS:
            return False
        slack = self.room / 4
        highest, lowest = self._certified_level(cells, slack, 1), -self._certified_level(cells, slack, -1)
        spread = up(up(highest - lowest) / down(down(math.cos(up(2 * cells.radius)))))
        excess = up(spread * _sine_squared(cells.radius))
        self.bottom = max(self.bottom, down(lowest - excess))
        self.tighten(up(highest + excess))
        return True

    def result(self, run: Callable[[], str]) -> Extremum:
        """What a run proved; it returns why the tolerance was missed, if it was, or is stopped by the limits."""
        try:
            missed = run()
        except OutOfBudgetError as error:
            missed = str(error)
            if not self.attained or math.isinf(self.attained):  # where the run began
                self.attained = self._gain(self.frequency, self.vector)
        lower, upper = (self.attained, self.proved) if self.sign > 0 else (self.proved, self.attained)
        if upper < lower:
            raise ArithmeticError(f"{self.work.call}: proved {lower} <= σ <= {upper}; please report this")
        return Extremum(lower, upper, self.frequency, self.vector, self.evaluations, missed)

    def close(self, cells: Cells) -> str:
        """Prove the target on every cell, splitting where that fails; say why if that ends too early."""
        missed, highest, is_first = self._relax(), -math.inf, True
        while len(cells):
            start = time.perf_counter()
            allowance = self._allowance(cells.radius)
            dtype = self._precision(allowance)
            failing = self._failing(cells, self._level(cells), dtype)
            if dtype == torch.float32 and allowance <= self.room / 4:  # splitting would not help much, exactness may
                failing = failing[self._failing(cells.choose(failing), self._level(cells), torch.float64)]
            seconds = time.perf_counter() - start
            if not len(failing):
                break
            share, cells = len(failing) / len(cells), cells.choose(failing)
            before = self.target
            curved = allowance > SUSPICIOUS * self.room
            if self.sign < 0:  # a climb may have ended on a saddle, and zeros may lie on curves
                self.look(cells.choose(torch.arange(0, len(cells), -(-len(cells) // LOOKED_AT))))
            elif not (curved and (is_first or share < SUSPICIOUS_SHARE)):
                self.look(cells)
            is_first = False
            if self.sign * (self.target - before) > before * self.tol / 20:
                if self.is_hopeless:
                    return SINGULAR
                continue  # a better one was found: the same cells may pass now
            reason = self._reason_to_stop(cells, seconds * share)
            if reason:
                missed = reason
                highest = self.bound(cells)
                break
            cells = cells.split()
        self.tighten(max(self._top, highest))
        return missed

    @property
    def is_hopeless(self) -> bool:
        """Whether what was found is so small that rounding leaves no room for a positive lower bound."""
        if self.sign > 0:
            return False
        return self._best**2 <= 4 * self.symbol.rounding(self._found, torch.float64, self.sign)

    def _relax(self) -> str:
        """Ask for no more than rounding leaves room for; say so if that is less than what was asked."""
        size = max(self.target, self._best) ** 2
        finest = 2 * self.symbol.rounding(self._top, torch.float64, self.sign) / size if size else 0.0
        if self.tol >= finest:
            return ""
        self.tol = min(finest, 0.5)
        return ROUNDING

    def bound(self, cells: Cells) -> float:
        """A bound of λ_max(H) if the maximiser is in one of these cells."""
        level = self._certified_level(cells, self._allowance(cells.radius) / 8, 1)
        if not cells.radius:
            return level
        candidates = [up(level + up(self.curvature * up(cells.radius * cells.radius)) / 2)]
        if cells.radius < 1.5:
            # From level >= M - (M - μ)s, which grows with s for level >= μ.
            share = _sine_squared(cells.radius)
            over = up(level - down(self.bottom * share))
            under = down(1 - share) if over >= 0 else up(1 - share)
            candidates.append(up(over / under) if level >= self.bottom else math.inf)
        return min(candidates)

    def _allowance(self, radius: float) -> float:
        """κ(r) if the maximum is the target's level."""
        if not radius:
            return 0.0
        allowance = up(up(self.curvature * up(radius * radius)) / 2)
        if radius < math.pi / 2:
            square = self.target * self.target
            spread = up((up(square) if self.sign > 0 else -down(square)) - self.bottom)
            allowance = min(allowance, up(spread * _sine_squared(radius)))
        return allowance

    def _level(self, cells: Cells) -> float:
        """What λ_max(H) at the centres has to stay below to prove the target."""
        return down(self._top - self._allowance(cells.radius))

    def _precision(self, allowance: float = 0.0) -> torch.dtype:
        """For cells with that allowance; where it is large they would rather be split than proved more exactly."""
        if not self.symbol.is_complex:  # one matrix, once
            return torch.float64
        coarse = self.symbol.rounding(self._top, torch.float32, self.sign)
        enough = max(FLOAT32_SHARE * self.room, FLOAT32_OF_CURVATURE * allowance, SHARE * self.room - allowance)
        return torch.float32 if coarse <= min(enough, self.room / 2) else torch.float64

    def _failing(self, cells: Cells, level: float, dtype: torch.dtype, sign: int = 1) -> Tensor:
        """Indices of the cells for whose centres λ_max(sign·H) <= level was not proved."""
        passed = torch.zeros(len(cells), dtype=torch.bool)
        worth = NEGLIGIBLE * max(self.room, self._allowance(cells.radius))
        for start in range(0, len(cells), self.symbol.batch(dtype)):
            part = slice(start, start + self.symbol.batch(dtype))
            passed[part] = self.symbol.all_below(cells.centres[part], level, dtype, sign * self.sign, worth=worth)
            self.work.tick("frequencies", start / len(cells))
        self.evaluations += len(cells)
        return (~passed).nonzero()[:, 0]

    def _certified_level(self, cells: Cells, slack: float, sign: int) -> float:
        """A level that λ_max(sign·H) is proved not to exceed at the centres, about ``slack`` above the largest."""
        estimate = self._found if sign > 0 else float(self._rank(cells, 1, -self.sign)[2].max())
        limit = self.symbol.crude if sign * self.sign > 0 else 0.0  # 0 <= G <= crude
        size = max(abs(estimate), abs(self._top), self.symbol.mean)
        dtype = self._precision()
        margin = max(slack, self.symbol.rounding(estimate, dtype, sign * self.sign) + 1e-13 * size)
        while estimate + margin < limit:
            cells = cells.choose(self._failing(cells, estimate + margin, dtype, sign))
            if not len(cells):
                return estimate + margin
            margin *= 4
        return limit

    def _reason_to_stop(self, cells: Cells, seconds: float) -> str:
        if self._allowance(cells.radius) <= self.room / 50:
            return ROUNDING
        children = 2 ** len(self.symbol.axes)
        if children * len(cells) > MOST_CELLS:
            return f"the symbol is too flat: more than {MOST_CELLS} cells would be needed"
        try:
            self.work.require_bytes(NEXT_LEVEL, self._bytes_with(children * len(cells)))
            self.work.require_seconds(NEXT_LEVEL, children * seconds)
            self.work.require_operations(NEXT_LEVEL, children * len(cells) * 4 * self.symbol.order**3)
        except OutOfBudgetError as error:
            return str(error)
        return ""

    def _rank(self, cells: Cells, wanted: int, sign: int) -> tuple[Tensor, Tensor, Tensor]:
        """The cells with the largest λ_max(sign·G), their vectors, and estimates of it for all of them."""
        self.evaluations += len(cells)
        tick = functools.partial(self.work.tick, "frequencies")
        return self.peaks.rank(cells.centres, wanted, tick, sign, is_flat=self.is_flat)

    def _follow(self, start: Frequencies, vector: Tensor, *, dense: bool) -> None:
        """Improve what was found by the local maximum of λ_max(H) from a frequency, which stays on a grid."""
        frequency, vector = self.peaks.follow(start, vector, self._found, dense=dense)
        value = self._gain(frequency, vector)
        if self._is_better(value):
            self.attained, self.frequency, self.vector = value, frequency, vector

    def _gain(self, frequency: Frequencies, vector: Tensor) -> float:
        """What E* makes of a vector: a bound of the extremal σ from inside."""
        return self.symbol.gain(frequency, vector)[0 if self.sign > 0 else 1]


def _curvature(symbol: GramSymbol) -> float:
    """Σ_(a≠0) max_j(a_j/d_j)²·‖C_a‖ rounded up, ‖C_a‖ by the smaller of Frobenius norm and √(‖·‖₁‖·‖_∞).

    A computed C_a differs from the exact one by at most γ·Σ_b |K_(b+a)||K_b|ᵀ in each entry, and by at most
    ε_a = γ·Σ_b ν_(b+a)·ν_b in norm, with ν_b = ‖K_b‖_F, the Frobenius norm of |K_b| too. As |a_j| <= 2d_j, the weights
    are at most 4, and Σ_(a≠0) 4ε_a <= 4γ·(Σ_b ν_b)². The norm of Σ_a Σ_b |K_(b+a)||K_b|ᵀ would not do: norms of terms
    may add up to more than the norm of their sum.
    """
    if not symbol.axes:
        return 0.0
    matrices = symbol.correlations[1:]
    totals = [(part.sum(0), part.sum(1)) for part in map(torch.abs, matrices)]
    sums = [next_up(torch.stack(parts).amax(1)) for parts in zip(*totals, strict=True)]
    mixed = [next_up(next_up(total * (1 + 2 * gamma(symbol.order))).sqrt()) for total in sums]
    norms = torch.minimum(row_norms_up(matrices.flatten(1)), next_up(mixed[0] * mixed[1]))
    degrees = torch.tensor(symbol.degrees, dtype=torch.float64)
    weights = next_up(symbol.lags[1:].abs().double() / degrees).amax(1)
    half = total_up(next_up(next_up(weights * weights) * norms))
    size = total_up(row_norms_up(symbol.taps.permute(2, 0, 1).flatten(1)))
    error = up(up(4 * gamma(symbol.correlation_terms)) * up(size * size))
    # Underflow in each entry of each C_a, times the weights.
    lost = underflow(8 * symbol.correlations.numel() * symbol.correlation_terms)
    return up(up(2 * half) + up(error + lost))


def _sine_squared(radius: float) -> float:
    sine = up(up(math.sin(radius)))
    return min(1.0, up(sine * sine))
