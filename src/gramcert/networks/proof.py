r"""The proof that a network has a constant, for given multipliers, rounding included.

For each component and each frequency ω of its torus the Hermitian matrix

    P = Σ_y aΛ - b(Λs + (Λs)*) - c·s*Λs  -  Σ κ·s*Λs  -  out*out

of :mod:`~gramcert.networks.program`, the second sum over what leaves the component by a constant, has to be positive
semidefinite. It is scaled by powers of two to a diagonal near 1, which rounds nothing, and factorised with

* the rounding of P itself, at most ε·A entry by entry, A being the same sum with absolute values for all signs and
  Σ_l |K_l| for the symbols, so at most ε times the largest row sum of A in norm;
* the distance of the stored filters from the true ones, in operator norm, through every place where they occur: this
  distance need not commute with shifts, because P(ω) >= ε at every ω is P >= ε as an operator on the torus;
* the rounding of the factorisation, which is the conventional one of the whole matrix in another order of its rows

taken off its diagonal. The search is not trusted with anything: multipliers are checked to be finite and not negative.

**Cells.** A torus of many frequencies is not looked at one by one; P >= 0 is shown for all ω there are. Let -m be the
least eigenvalue of all P(ω), at ω* with the unit vector v, and suppose m > 0. The variables have k colours so that none
is coupled to another of its colour. With the k-th roots of unity as signs of the colours, the mean of k matrices that
are unitarily equivalent to P(ω) is its block diagonal, so P(ω) <= k·β + (k-1)·m, β being above its diagonal blocks. So
g(ω) = v*P(ω)v is between -m and kβ + (k-1)m. On the line through ω* and the centre c of the cell that ω* lies in, g is
of exponential type, with θ = Σ d_j|c_j - ω*_j| at c, d_j being the largest lag in P on axis j. A function of such a
type leaves its minimum no faster than a cosine between the same bounds (Duffin and Schaeffer 1938), therefore

    λ_min(P(c)) <= g(c) <= -m + k(β + m)·sin²(θ/2).

If P(c) >= kβ·sin²(θ/2) was proved, and k·sin²(θ/2) < 1, that is a contradiction. Cells where it cannot be are split.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.certified.frequencies import Cells, Frequencies
from gramcert.networks.blocks import factorised, is_diagonal, product, solved, total, with_rows
from gramcert.networks.filters import Taps
from gramcert.networks.pattern import Pattern, parts_of
from gramcert.networks.program import FIRST_RADIUS, MOST_CELLS, Component, Program
from gramcert.progress import Report, silent
from gramcert.rounding import (
    TWIDDLE_ERROR,
    absolute_sums,
    cholesky_error,
    complex_gamma,
    diagonal_error,
    gamma,
    root_up,
    sum_up,
    total_up,
    underflow,
    up,
)

# Bytes of matrices that are factorised at a time.
BATCH_BYTES = 2**27

# How often cells are split.
MOST_SPLITS = 6

# Multipliers and weights of relations are 0 or between these, so that no product of two of them leaves the numbers of
# full precision: rounding is charged relative to what was rounded.
LEAST, MOST = 2.0**-400, 2.0**400

# Above what underflow of symbols can make of P: a lost 2^-1022 is multiplied at most by the roots of two multipliers
# and scales, each below 2^201, and by entries of the scaled P, below 2^30 where the proof goes on.
UNDERFLOW = 2.0**-500


@dataclass(frozen=True, eq=False)
class _Sum:
    """s with a weight for each row: the terms by their variables."""

    terms: dict[int, list[Taps]]
    weights: Tensor


def is_proved(program: Program, multipliers: list[Tensor], report: Report = silent) -> bool:
    """Whether every component was proved; the first multiplier is ρ, about which the proof is."""
    if len(multipliers) != len(program.variables):
        return False
    for variable, given in zip(program.variables, multipliers, strict=True):
        if given.dtype != torch.float64 or given.shape != (variable.relation.multipliers,):
            return False
        if not all(map(_is_ordinary, (*variable.relation.weights, *given.tolist()))) or bool((given < 0).any()):
            return False
        low, high = variable.relation.slopes or (0.0, 0.0)
        if low and high and not variable.relation.weights[2]:  # their product was lost
            return False
    count = len(program.components)
    for number, component in enumerate(program.components):
        report("proof of the forms", number, count)
        if not _Proof(program, component, multipliers).holds():
            return False
    report("proof of the forms", count, count)
    return True


def _is_ordinary(value: float) -> bool:
    """Neither so small nor so large that products lose their precision, and a number."""
    return value == 0 or LEAST <= abs(value) <= MOST


class _Proof:
    def __init__(self, program: Program, component: Component, multipliers: list[Tensor]) -> None:
        self.program, self.component = program, component
        self.is_complex = bool(component.sizes)
        self.sums: list[_Sum] = []  # subtracted
        self.coupled: list[tuple[int, _Sum]] = []
        for part in parts_of(program, component):
            if part.variable is None:
                self.sums.append(_Sum(part.terms, torch.ones(part.rows, dtype=torch.float64)))
                continue
            relation, given = program.variables[part.variable].relation, multipliers[part.variable]
            _, b, c = relation.weights
            at_s = given[relation.source_ties].repeat_interleave(part.rows // len(relation.source_ties))
            if c and bool(at_s.any()):
                self.sums.append(_Sum(part.terms, c * at_s))
            if b and bool(given.any()):
                self.coupled.append((part.variable, _Sum(part.terms, b * self._spread(part.variable, given))))
        # What has no multiplier and is in no sum is not in P.
        occurring = {v for part in self.sums for v in part.terms} | {v for _, part in self.coupled for v in part.terms}
        self.weighted: dict[int, Tensor] = {}
        for v in component.variables:
            values = program.variables[v].relation.weights[0] * self._spread(v, multipliers[v])
            if bool(values.any()) or v in occurring:
                self.weighted[v] = values
        self.order = sum(map(len, self.weighted.values()))

    def _spread(self, v: int, given: Tensor) -> Tensor:
        """Multipliers of a variable, for each of its entries."""
        variable = self.program.variables[v]
        return given[variable.relation.ties].repeat_interleave(self.program.order(v) // variable.channels)

    def holds(self) -> bool:
        """Whether P >= 0 was proved at every frequency."""
        if not self.order:
            return True
        if any(not bool((values > 0).all()) for values in self.weighted.values()):
            return False
        # 2^-round(log₂(d)/2): a diagonal of 1 to within a factor of 2.
        self.scale = {v: torch.exp2(-(values.log2() / 2).round()) for v, values in self.weighted.items()}
        error = self._error()
        if not error < 1:
            return False
        pattern = Pattern(self.program, self.component)
        self.sequence = [v for v in pattern.elimination[0] if v in self.weighted]
        widest = max(map(len, self.weighted.values()))
        self.batch = max(1, BATCH_BYTES // (64 * self.order * widest))
        if self.component.has_cells:
            return self._holds_on_cells(error, pattern.colours())
        frequencies = self.component.frequencies
        return all(bool(self._is_positive(piece, error).all()) for piece in frequencies.split(self.batch))

    def _holds_on_cells(self, error: float, colours: int) -> bool:
        """The same for all frequencies there are."""
        level = up(colours * self._largest_block())
        cells, looked = Cells.cover(list(self.component.degrees), FIRST_RADIUS), 0
        for _ in range(MOST_SPLITS):
            looked += len(cells)
            if looked > MOST_CELLS:
                return False
            sine = up(up(math.sin(up(cells.radius / 2))))
            square = up(sine * sine)
            if up(colours * square) < 1:
                shift = up(error + up(level * square))
                held = torch.cat([self._is_positive(piece, shift) for piece in cells.centres.split(self.batch)])
                if bool(held.all()):
                    return True
                cells = cells.choose(~held)
            cells = cells.split()
        return False

    def _largest_block(self) -> float:
        """Above all eigenvalues of the diagonal blocks of P, at every frequency."""
        largest, lags = 0.0, 1
        for v, values in self.weighted.items():
            parts = [float((values * self.scale[v].square()).max())]
            for part in self.sums:  # with a negative weight they are added
                weight = -float(part.weights.min())
                if v in part.terms and weight > 0:
                    amounts = sum(tap.amounts() for tap in part.terms[v]) * self.scale[v]
                    assert isinstance(amounts, Tensor)
                    lags = max(lags, sum(len(tap.matrices) for tap in part.terms[v]))
                    parts.append(up(weight * up(math.prod(absolute_sums(amounts)))))
            largest = max(largest, sum_up(parts))
        return up(largest * (1 + 4 * gamma(self.order + lags + 64)))

    def _symbols(self, part: _Sum, frequencies: Frequencies) -> dict[int, Tensor]:
        """Of each variable, its columns scaled."""
        found = {}
        for v, taps in part.terms.items():
            symbol = taps[0].at(frequencies)
            for further in taps[1:]:
                symbol = total(symbol, further.at(frequencies))
            found[v] = symbol * self.scale[v]
        return found

    def _matrix(self, frequencies: Frequencies) -> dict[tuple[int, int], Tensor]:
        """The blocks of P that are not zero, on the diagonal and below it."""
        kind = torch.complex128 if self.is_complex else torch.float64
        blocks: dict[tuple[int, int], Tensor] = {}
        for v, values in self.weighted.items():
            blocks[v, v] = (values * self.scale[v].square()).to(kind).expand(len(frequencies), -1)
        for y, part in self.coupled:
            rows = part.weights * self.scale[y]
            for v, symbol in self._symbols(part, frequencies).items():
                _subtract(blocks, (y, v), with_rows(rows, symbol))
        for part in self.sums:
            symbols = self._symbols(part, frequencies)
            for i, left in symbols.items():
                weighted = with_rows(part.weights, left)
                for j, right in symbols.items():
                    if i >= j:
                        _subtract(blocks, (i, j), product(weighted, right))
        return blocks

    def _error(self) -> float:
        """What P as it is stored may be away from the true one, in norm."""
        amounts = {v: values * self.scale[v].square() for v, values in self.weighted.items()}  # row sums of A
        lags, rows, apart = 1, 1, 0.0
        for part, y in [(part, None) for part in self.sums] + [(part, y) for y, part in self.coupled]:
            lags = max(lags, max(len(tap.matrices) for taps in part.terms.values() for tap in taps))
            rows = max(rows, len(part.weights) + sum(map(len, part.terms.values())))
            apart = up(apart + self._distance(part, y))
            absolute = {v: sum(tap.amounts() for tap in taps) * self.scale[v] for v, taps in part.terms.items()}
            weights = part.weights.abs() * (1.0 if y is None else self.scale[y])
            across = torch.zeros(len(weights), dtype=torch.float64)
            for one in absolute.values():
                across += one.sum(1)
            if y is not None:
                amounts[y] = amounts[y] + weights * across
                across.fill_(1.0)
            for v, one in absolute.items():
                amounts[v] = amounts[v] + one.T @ (weights * across)
        parts = len(self.sums) + 2 * len(self.coupled) + 2
        # A symbol: sums over lags of stored numbers times twiddles, in two parts. A product has two of them, and is a
        # sum over rows of products with weights that were rounded a few times; parts of P are added one by one.
        symbol = up(complex_gamma(lags + 8) + 2 * TWIDDLE_ERROR)
        relative = up(up(4 * symbol) + up(2 * complex_gamma(rows + parts + 32)))
        largest = max(float(sums.max()) for sums in amounts.values())
        size = up(largest * (1 + 4 * gamma(2 * self.order + rows + parts + lags + 32)))
        lost = up(UNDERFLOW + underflow(64 * self.order * (rows + lags + parts)))
        return up(up(relative * size) + up(apart + lost))

    def _distance(self, part: _Sum, y: int | None) -> float:
        """What errors of the filters make of P, in norm."""
        error = size = 0.0
        for v, taps in part.terms.items():
            largest = float(self.scale[v].max())
            for tap in taps:
                error = up(error + up(largest * tap.error))
                size = up(size + up(largest * root_up(up(math.prod(absolute_sums(tap.amounts()))))))
        if not error:
            return 0.0
        rounded = up(1 + 2 * gamma(64 + max(len(tap.matrices) for taps in part.terms.values() for tap in taps)))
        error, size = up(error * rounded), up(size * rounded)
        if y is not None:
            return up(2 * up(float((part.weights.abs() * self.scale[y]).max()) * error))
        return up(float(part.weights.abs().max()) * up(up(2 * up(size * error)) + up(error * error)))

    def _is_positive(self, frequencies: Frequencies, error: float) -> Tensor:
        """At which of them: a factorisation of one matrix in this order of its rows, but for blocks that stay zero."""
        blocks = self._matrix(frequencies)
        diagonals = {v: blocks[v, v] for v in self.weighted}
        entries = [block if is_diagonal(block) else block.diagonal(dim1=-2, dim2=-1) for block in diagonals.values()]
        real = torch.cat([part.real if self.is_complex else part for part in entries], -1)
        largest = float(real.abs().max())
        trace = up(total_up(real.clamp_min(0)) + self.order * diagonal_error(largest, torch.float64))
        factorising = cholesky_error(self.order, trace, torch.float64, is_complex=self.is_complex)
        shift = up(up(error + factorising) + diagonal_error(largest + 1, torch.float64))
        held = torch.full((len(frequencies),), shift < 1)
        for v, block in diagonals.items():
            if is_diagonal(block):
                blocks[v, v] = block - shift
            else:
                block.diagonal(dim1=-2, dim2=-1).sub_(shift)
        for v in self.sequence:
            factor, failed = factorised(blocks.pop((v, v)))
            held &= ~failed
            if not bool(held.any()):
                break
            beside = {}
            for i, j in list(blocks):
                if v in (i, j):
                    block = blocks.pop((i, j))
                    beside[j if i == v else i] = block if i == v else _adjoint(block)
            rows = {j: solved(factor, block) for j, block in beside.items()}
            for i, left in rows.items():
                for j, right in rows.items():
                    if i >= j:
                        _subtract(blocks, (i, j), product(left, right))
        return held


def _adjoint(block: Tensor) -> Tensor:
    return block.conj() if is_diagonal(block) else block.mH


def _subtract(blocks: dict[tuple[int, int], Tensor], at: tuple[int, int], part: Tensor) -> None:
    """From a block, which is zero if it is not there."""
    if at not in blocks:
        blocks[at] = -part
    elif is_diagonal(blocks[at]) or is_diagonal(part):
        blocks[at] = total(blocks[at], -part)
    else:
        blocks[at] -= part
