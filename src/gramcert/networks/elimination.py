r"""Forms backwards through a network, in floating point: for the search, nothing here is proved.

Variables are eliminated from the last to the first. When it is the turn of y, the form of everything that follows is
known in y and in what else is still there, o: y*My + 2Re y*Bo + …. Taking off its relation, λ(a|y|² - b(y*s + s*y) -
c|s|²) <= 0, and maximising over y leaves

    (Bo + bΛs)*(aΛ - M)⁻¹(Bo + bΛs) + c·s*Λs + …,   aΛ > M,

a form without y. Where nothing else is there and only a constant is known, the form of y itself is bounded by a
diagonal: Λ = d·max λ(d^(-½)Md^(-½)) for any shape d. So at the input, which gives ρ.

The maximum over frequencies and eigenvalues is smoothed by a mean of powers, which is above it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.certified.frequencies import Frequencies
from gramcert.networks.blocks import dense, factorised, is_diagonal, product, solved, total, with_rows
from gramcert.networks.program import Program, Relation, Term

# Smaller entries of a diagonal, relative to the largest, are raised to this.
LEAST_SHAPE = 1e-6

# Of a form that vanishes.
TINY = 1e-300

# Orders of matrices above which only their largest eigenvalue is looked for, in so many rounds, until it is settled.
WIDE, MOST_ROUNDS, SETTLED = 256, 100, 1e-5

Factor = tuple[int, Tensor, Tensor]  # sign, A, B: the block A*B


class _Block:
    """Sums of products A*B, kept as factors as long as it pays."""

    def __init__(self) -> None:
        self.factors: list[Factor] = []

    def matrix(self) -> Tensor:
        """The sum, as a block."""
        (sign, left, right), *others = self.factors
        found = sign * product(left, right)
        for sign, left, right in others:
            found = total(found, sign * product(left, right))
        return found

    def scaled_spectrum(self, shape: Tensor) -> Tensor:
        """Eigenvalues of d^(-½)Md^(-½) on the diagonal of a matrix; of a wide one only the largest, others are left out.

        Without zeros where the other side of the factors is smaller.
        """
        root = shape.rsqrt()
        if all(is_diagonal(left) for _, left, _ in self.factors):
            matrix = self.matrix()
            return (matrix.real if matrix.is_complex() else matrix) / shape
        rows = sum(shape.shape[0] if is_diagonal(left) else left.shape[-2] for _, left, _ in self.factors)
        is_flat = rows < shape.shape[0] and all(sign == 1 for sign, _, _ in self.factors)
        if min(rows if is_flat else math.inf, shape.shape[0]) > WIDE:
            return self._largest(root)
        if is_flat:
            stacked = torch.cat([left for _, left, _ in self.factors], -2) * root
            found: Tensor = torch.linalg.eigvalsh(stacked @ stacked.mH)
        else:
            found = torch.linalg.eigvalsh(root[:, None] * dense(self.matrix()) * root)
        return found

    def _largest(self, root: Tensor) -> Tensor:
        """The largest eigenvalue at each frequency by power iterations, with the gradient of its Rayleigh quotient."""
        scaled = [(sign, left * root) for sign, left, _ in self.factors]
        count = max(left.shape[0] for _, left in scaled)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            v = torch.randn(count, len(root), dtype=root.dtype, generator=generator).to(self.factors[0][1].dtype)
            before = torch.zeros(count, dtype=torch.float64)
            for _ in range(MOST_ROUNDS):
                moved = sum(sign * _times(left, _times(left, v), adjoint=True) for sign, left in scaled)
                assert isinstance(moved, Tensor)
                norms = moved.norm(dim=-1)
                v = moved / norms.clamp_min(TINY)[:, None]
                if bool((norms - before <= SETTLED * norms).all()):
                    break
                before = norms
        parts = [sign * _times(left, v).abs().square().sum(-1) for sign, left in scaled]
        return torch.stack(parts).sum(0)[:, None]


@dataclass(frozen=True, eq=False)
class Eliminated:
    """What a pass found.

    Attributes:
        logarithm: log ρ, smoothed.
        multipliers: λ of each variable.
        parameters: log λ, or the shape where the size follows, relative to the scale of its component.
        gains: for each variable at which a component begins, the logarithm of the component's part of ρ.
    """

    logarithm: Tensor
    multipliers: list[Tensor]
    parameters: list[Tensor]
    gains: dict[int, float]


class Elimination:
    """Symbols of all terms, and passes through them with given multipliers.

    Args:
        program: what is eliminated.
        most_frequencies: of each component; where it has more, some of them on all axes.
    """

    def __init__(self, program: Program, most_frequencies: int) -> None:
        self.program = program
        self._frequencies = [_some(component.frequencies, most_frequencies) for component in program.components]
        self.symbols = [self._symbols(variable.relation.terms) for variable in program.variables]
        self.outputs = [self._symbols(terms) for terms in program.outputs]
        self.ties, self.source_ties = [], []
        for v, variable in enumerate(program.variables):
            relation = variable.relation
            self.ties.append(relation.ties.repeat_interleave(program.order(v) // variable.channels))
            rows = next((symbol.shape[1] for symbol in self.symbols[v].values()), 0)
            self.source_ties.append(relation.source_ties.repeat_interleave(rows // max(1, len(relation.source_ties))))

    def _symbols(self, terms: tuple[Term, ...]) -> dict[int, Tensor]:
        """The sum of the terms of each variable."""
        found: dict[int, Tensor] = {}
        for term in terms:
            v = term.variable
            symbol = self.program.taps(term).at(self._frequencies[self.program.home[v]])
            found[v] = total(found[v], symbol) if v in found else symbol
        return found

    def closed_form(self, power: float, factor: float) -> Eliminated | None:
        """Multipliers from the diagonals of the forms that they have to be above."""
        with torch.no_grad():
            return self._run(None, math.inf, power, factor)

    def run(self, parameters: list[Tensor], sharpness: float) -> Eliminated | None:
        """With given ones; ``None`` where they are too small somewhere."""
        return self._run(parameters, sharpness, 0.0, 0.0)

    def _run(self, parameters: list[Tensor] | None, sharpness: float, power: float, factor: float) -> Eliminated | None:
        program = self.program
        live: dict[tuple[int, int], _Block] = {}
        scales: list[Tensor | float] = [0.0] * len(program.components)
        for symbols in self.outputs:
            _add(live, symbols, 1)
            for v in symbols:
                scales[program.home[v]] = 1.0
        count = len(program.variables)
        used: list[Tensor] = [torch.zeros(0)] * count
        found: list[Tensor] = [torch.zeros(0)] * count
        logarithm = torch.tensor(-math.inf, dtype=torch.float64)
        gains: dict[int, float] = {}
        for v in reversed(range(count)):
            relation, symbols, ties = program.variables[v].relation, self.symbols[v], self.ties[v]
            given = None if parameters is None else parameters[v]
            here = program.home[v]
            block = live.pop((v, v), None)
            beside = {j: live.pop((i, j)) for i, j in list(live) if i == v}
            if block is None:  # nothing depends on it
                used[v] = torch.zeros(relation.multipliers, dtype=torch.float64)
                found[v] = torch.zeros(relation.multipliers, dtype=torch.float64) if given is None else given
                continue
            if relation.slopes is None and not beside:
                shape = self._shape(block, relation, ties, power) if given is None else given
                if relation.multipliers == 1:
                    shape = torch.zeros(1, dtype=torch.float64)
                size = _largest(block.scaled_spectrum(shape.exp()[ties]), sharpness)
                used[v], found[v] = (size + shape).exp(), shape
                gains[v] = float((size + shape.mean()).detach()) - _log(scales[here])
                if not relation.terms:
                    logarithm = size
                    continue
                weight = relation.square * used[v][self.source_ties[v]]
                _add(live, {j: with_rows(weight.sqrt(), symbol) for j, symbol in symbols.items()}, 1)
                there = program.home[relation.terms[0].variable]
                scales[there] = scales[there] + relation.square * (size + shape.mean()).exp()
                continue
            matrix = block.matrix()
            scale = scales[here]
            if given is None:
                shape = self._shape(block, relation, ties, power)
                size = _largest(block.scaled_spectrum(shape.exp()[ties]), math.inf)
                given = size + shape + math.log(factor) - _log(scale)
                if relation.slopes is None:
                    given = given + math.log(2)
            found[v] = given
            used[v] = given.exp() * scale
            a, b, c = relation.weights
            weight = used[v][ties]
            own = (a * weight)[None].to(matrix.dtype)
            lower, failed = factorised(total(own, -matrix))
            if bool(failed.any()):
                return None
            right: dict[int, Tensor] = {j: found_block.matrix() for j, found_block in beside.items()}
            if b:
                for j, symbol in symbols.items():
                    coupled = with_rows(b * weight, symbol)
                    right[j] = total(right[j], coupled) if j in right else coupled
            _add(live, {j: solved(lower, r) for j, r in right.items()}, 1)
            if c:
                root = (abs(c) * used[v][self.source_ties[v]]).sqrt()
                _add(live, {j: with_rows(root, symbol) for j, symbol in symbols.items()}, 1 if c > 0 else -1)
        return Eliminated(logarithm, used, found, gains)

    @staticmethod
    def _shape(block: _Block, relation: Relation, ties: Tensor, power: float) -> Tensor:
        """Logarithms of the largest diagonal entries of each tie to a power, 0 on average."""
        squares = [
            sign * (left.abs().square() if is_diagonal(left) else left.abs().square().sum(-2))
            for sign, left, _ in block.factors
        ]
        entries = sum(squares[1:], squares[0]).amax(0)
        largest = torch.zeros(relation.multipliers, dtype=torch.float64).scatter_reduce(0, ties, entries, "amax")
        logs = power * largest.clamp_min(max(TINY, LEAST_SHAPE * float(largest.max()))).log()
        return logs - logs.mean()


def _add(live: dict[tuple[int, int], _Block], factors: dict[int, Tensor], sign: int) -> None:
    """Σ A_i*A_j over all pairs, kept for i >= j."""
    for i, left in factors.items():
        for j, right in factors.items():
            if i >= j:
                live.setdefault((i, j), _Block()).factors.append((sign, left, right))


def _times(block: Tensor, v: Tensor, *, adjoint: bool = False) -> Tensor:
    """A block, or its adjoint, times a vector for each frequency."""
    if is_diagonal(block):
        return (block.conj() if adjoint else block) * v
    return ((block.mH if adjoint else block) @ v[..., None])[..., 0]


def _largest(spectrum: Tensor, sharpness: float) -> Tensor:
    """Log of the largest eigenvalue, or (Σ λ^q)^(1/q), which is above it."""
    logs = spectrum.flatten().clamp_min(TINY).log()
    if math.isinf(sharpness):
        return logs.max()
    return torch.logsumexp(sharpness * logs, 0) / sharpness


def _log(scale: Tensor | float) -> float:
    return math.log(max(float(scale.detach()) if isinstance(scale, Tensor) else scale, TINY))


def _some(frequencies: Frequencies, most: int) -> Frequencies:
    """All of them, or those at multiples of a stride on all axes."""
    stride = 1
    while True:
        chosen = (frequencies.numerators // 2 % stride == 0).all(1)  # numerators are twice the index, or one more
        if int(chosen.sum()) <= most:
            return frequencies[chosen]
        stride += 1
