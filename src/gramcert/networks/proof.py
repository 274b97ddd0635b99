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
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.certified.frequencies import Frequencies
from gramcert.networks.filters import Taps
from gramcert.networks.program import Component, Program, Term
from gramcert.progress import Report, silent
from gramcert.rounding import (
    TWIDDLE_ERROR,
    absolute_sums,
    cholesky_error,
    complex_gamma,
    diagonal_error,
    gamma,
    root_up,
    total_up,
    underflow,
    up,
)

# Bytes of matrices that are factorised at a time.
BATCH_BYTES = 2**27

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
    total = len(program.components)
    for number, component in enumerate(program.components):
        report("proof of the forms", number, total)
        if not _Proof(program, component, multipliers).holds():
            return False
    report("proof of the forms", total, total)
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
        weighted: dict[int, Tensor] = {}
        for v, variable in enumerate(program.variables):
            relation, given = variable.relation, multipliers[v]
            a, b, c = relation.weights
            at_y = given[relation.ties].repeat_interleave(self._phases(v, variable.channels))
            if v in component.variables:
                weighted[v] = a * at_y
            if not relation.terms or program.home[relation.terms[0].variable] != program.components.index(component):
                continue
            terms = self._taps(relation.terms)
            rows = next(iter(terms.values()))[0].matrices.shape[1]
            at_s = given[relation.source_ties].repeat_interleave(rows // len(relation.source_ties))
            if c and bool(at_s.any()):
                self.sums.append(_Sum(terms, c * at_s))
            if b and bool(at_y.any()):
                self.coupled.append((v, _Sum(terms, b * at_y)))
        for output in program.outputs:
            if program.home[output[0].variable] == program.components.index(component):
                terms = self._taps(output)
                rows = next(iter(terms.values()))[0].matrices.shape[1]
                self.sums.append(_Sum(terms, torch.ones(rows, dtype=torch.float64)))
        # What has no multiplier and is in no sum is not in P.
        occurring = {v for part in self.sums for v in part.terms} | {v for _, part in self.coupled for v in part.terms}
        self.weighted = {v: values for v, values in weighted.items() if bool(values.any()) or v in occurring}
        self.start, self.order = {}, 0
        for v, values in self.weighted.items():
            self.start[v] = self.order
            self.order += len(values)

    def _phases(self, v: int, channels: int) -> int:
        return self.program.order(v) // channels

    def _taps(self, terms: tuple[Term, ...]) -> dict[int, list[Taps]]:
        found: dict[int, list[Taps]] = {}
        for term in terms:
            found.setdefault(term.variable, []).append(self.program.taps(term))
        return found

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
        held = sum(len(values) for values in self.weighted.values()) * max(map(len, self.weighted.values()))
        batch = max(1, BATCH_BYTES // (64 * held))
        pieces = self.component.frequencies.split(batch) if self.is_complex else [self.component.frequencies]
        return all(self._is_positive(piece, error) for piece in pieces)

    def _block(self, v: int) -> slice:
        return slice(self.start[v], self.start[v] + len(self.weighted[v]))

    def _symbols(self, part: _Sum, frequencies: Frequencies) -> dict[int, Tensor]:
        """Of each variable, its columns scaled."""
        found = {}
        for v, taps in part.terms.items():
            symbol = taps[0].at(frequencies)
            for further in taps[1:]:
                symbol = symbol + further.at(frequencies)
            found[v] = symbol * self.scale[v]
        return found

    def _matrix(self, frequencies: Frequencies) -> dict[tuple[int, int], Tensor]:
        """The blocks of P that are not zero, on the diagonal and below it."""
        kind = torch.complex128 if self.is_complex else torch.float64
        blocks: dict[tuple[int, int], Tensor] = {}
        for v, values in self.weighted.items():
            diagonal = (values * self.scale[v].square()).to(kind)
            blocks[v, v] = torch.diag_embed(diagonal.expand(len(frequencies), -1))
        for y, part in self.coupled:
            rows = (part.weights * self.scale[y])[:, None]
            for v, symbol in self._symbols(part, frequencies).items():
                _subtract(blocks, (y, v), rows * symbol)
        for part in self.sums:
            symbols = self._symbols(part, frequencies)
            for i, left in symbols.items():
                weighted = left.mH * part.weights
                for j, right in symbols.items():
                    if i >= j:
                        _subtract(blocks, (i, j), weighted @ right)
        return blocks

    def _error(self) -> float:
        """What P as it is stored may be away from the true one, in norm."""
        amounts = torch.zeros(self.order, self.order, dtype=torch.float64)
        lags, rows, apart = 1, 1, 0.0
        for v, values in self.weighted.items():
            amounts.diagonal()[self._block(v)] += values * self.scale[v].square()
        for part, y in [(part, None) for part in self.sums] + [(part, y) for y, part in self.coupled]:
            absolute = {v: sum(tap.amounts() for tap in taps) * self.scale[v] for v, taps in part.terms.items()}
            lags = max(lags, max(len(tap.matrices) for taps in part.terms.values() for tap in taps))
            rows = max(rows, len(part.weights) + sum(map(len, part.terms.values())))
            apart = up(apart + self._distance(part, y))
            weights = part.weights.abs()
            for i, left in absolute.items():
                if y is not None:
                    block = (weights * self.scale[y])[:, None] * left
                    amounts[self._block(y), self._block(i)] += block
                    amounts[self._block(i), self._block(y)] += block.T
                    continue
                for j, right in absolute.items():
                    amounts[self._block(i), self._block(j)] += (left.T * weights) @ right
        parts = len(self.sums) + 2 * len(self.coupled) + 2
        # A symbol: sums over lags of stored numbers times twiddles, in two parts. A product has two of them, and is a
        # sum over rows of products with weights that were rounded a few times; parts of P are added one by one.
        symbol = up(complex_gamma(lags + 8) + 2 * TWIDDLE_ERROR)
        relative = up(up(4 * symbol) + up(2 * complex_gamma(rows + parts + 32)))
        size = up(total_up(amounts) * (1 + 4 * gamma(rows + parts + lags + 32)))
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

    def _is_positive(self, frequencies: Frequencies, error: float) -> bool:
        """A factorisation from the last variable to the first: that of one matrix, but for blocks that stay zero."""
        blocks = self._matrix(frequencies)
        diagonals = [block.diagonal(dim1=-2, dim2=-1) for (i, j), block in blocks.items() if i == j]
        real = torch.cat([part.real if self.is_complex else part for part in diagonals], -1)
        largest = float(real.abs().max())
        trace = up(total_up(real.clamp_min(0)) + self.order * diagonal_error(largest, torch.float64))
        factorising = cholesky_error(self.order, trace, torch.float64, is_complex=self.is_complex)
        shift = up(up(error + factorising) + diagonal_error(largest + 1, torch.float64))
        if not shift < 1:
            return False
        for diagonal in diagonals:
            diagonal.sub_(shift)
        for v in sorted(self.weighted, reverse=True):
            factor, failed = torch.linalg.cholesky_ex(blocks.pop((v, v)))
            if int(failed.abs().max()):
                return False
            beside = {j: blocks.pop((i, j)) for i, j in list(blocks) if i == v}
            solved = {j: torch.linalg.solve_triangular(factor, block, upper=False) for j, block in beside.items()}
            for i, left in solved.items():
                for j, right in solved.items():
                    if i >= j:
                        _subtract(blocks, (i, j), left.mH @ right)
        return True


def _subtract(blocks: dict[tuple[int, int], Tensor], at: tuple[int, int], part: Tensor) -> None:
    """From a block, which is zero if it is not there."""
    if at in blocks:
        blocks[at] -= part
    else:
        blocks[at] = -part
