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
from gramcert.networks.program import MANY_FREQUENCIES, Program, Relation, Term
from gramcert.progress import Report, silent

# Smaller entries of a diagonal, relative to the largest, are raised to this.
LEAST_SHAPE = 1e-6

# Of a form that vanishes.
TINY = 1e-300

# Orders of matrices above which only their largest eigenvalue is looked for, and in how many rounds.
WIDE, ROUNDS = 192, 24

# Entries of the matrices that a pass at all frequencies holds at a time.
BATCH_ENTRIES = 10**7

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
        """Eigenvalues of d^(-½)Md^(-½), without zeros where the other side is smaller; the largest of a wide one."""
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
        """The largest eigenvalue at each frequency by Lanczos' method, with the gradient of its Rayleigh quotient."""
        scaled = [(sign, left * root) for sign, left, _ in self.factors]
        with torch.no_grad():
            v = self._leading(scaled, len(root))
            image = _image(scaled, v)
            value = (v.conj() * image).sum(-1, keepdim=True)
            missing = (image - value * v).norm(dim=-1)  # about what is missing to the largest one
        parts = [sign * _times(left, v).abs().square().sum(-1) for sign, left in scaled]
        found: Tensor = torch.stack(parts).sum(0) + missing
        return found[:, None]

    @staticmethod
    def _leading(scaled: list[tuple[int, Tensor]], order: int) -> Tensor:
        """Unit vectors near those of the largest eigenvalues of Σ ±A*A."""
        count, kind = max(left.shape[0] for _, left in scaled), scaled[0][1].dtype
        generator = torch.Generator().manual_seed(0)
        v = torch.randn(count, order, dtype=torch.float64, generator=generator).to(kind)
        basis = (v / v.norm(dim=-1, keepdim=True))[:, None]  # rows
        images: list[Tensor] = []
        for _ in range(min(ROUNDS, order)):
            image = _image(scaled, basis[:, -1])
            images.append(image)
            for _ in range(2):  # what is left of the image beside the basis
                image = image - ((basis.conj() @ image[..., None]).mT @ basis)[:, 0]
            norms = image.norm(dim=-1, keepdim=True)
            basis = torch.cat([basis, (image / norms.clamp_min(TINY))[:, None]], 1)
        basis = basis[:, : len(images)]
        _, vectors = torch.linalg.eigh(basis.conj() @ torch.stack(images, 2))
        found = (vectors[:, None, :, -1] @ basis)[:, 0]
        unit: Tensor = found / found.norm(dim=-1, keepdim=True).clamp_min(TINY)
        return unit


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
        most_frequencies: of each component; where it has more, some of them on all axes. ``None`` for all.
        keeps_symbols: whether symbols are kept for the next pass.
    """

    def __init__(self, program: Program, most_frequencies: list[int] | None, *, keeps_symbols: bool = True) -> None:
        self.program, self._keeps_symbols = program, keeps_symbols
        self._kept: dict[tuple[Term, ...], dict[int, Tensor]] = {}
        self._frequencies = []
        self.has_all = True
        for number, component in enumerate(program.components):
            most = component.count if most_frequencies is None else most_frequencies[number]
            self._frequencies.append(_some(component.frequencies, most))
            self.has_all &= component.count <= most and not component.has_cells
        self.ties, self.source_ties = [], []
        for v, variable in enumerate(program.variables):
            relation = variable.relation
            self.ties.append(relation.ties.repeat_interleave(program.order(v) // variable.channels))
            rows = program.taps(relation.terms[0]).matrices.shape[1] if relation.terms else 0
            self.source_ties.append(relation.source_ties.repeat_interleave(rows // max(1, len(relation.source_ties))))

    def _symbols(self, terms: tuple[Term, ...], frequencies: Frequencies | None = None) -> dict[int, Tensor]:
        """The sum of the terms of each variable, at given frequencies or at those of the search."""
        if frequencies is None and terms in self._kept:
            return self._kept[terms]
        found: dict[int, Tensor] = {}
        for term in terms:
            v = term.variable
            there = self._frequencies[self.program.home[v]] if frequencies is None else frequencies
            symbol = self.program.taps(term).at(there)
            found[v] = total(found[v], symbol) if v in found else symbol
        if frequencies is None and self._keeps_symbols:
            self._kept[terms] = found
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
        for terms in program.outputs:
            symbols = self._symbols(terms)
            _add(live, symbols, 1)
            for v in symbols:
                scales[program.home[v]] = 1.0
        count = len(program.variables)
        used: list[Tensor] = [torch.zeros(0)] * count
        found: list[Tensor] = [torch.zeros(0)] * count
        logarithm = torch.tensor(-math.inf, dtype=torch.float64)
        gains: dict[int, float] = {}
        for v in reversed(range(count)):
            relation, ties = program.variables[v].relation, self.ties[v]
            given = None if parameters is None else parameters[v]
            here = program.home[v]
            block = live.pop((v, v), None)
            beside = {j: live.pop((i, j)) for i, j in list(live) if i == v}
            if block is None:  # nothing depends on it
                used[v] = torch.zeros(relation.multipliers, dtype=torch.float64)
                found[v] = torch.zeros(relation.multipliers, dtype=torch.float64) if given is None else given
                continue
            symbols = self._symbols(relation.terms)
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
            scale = scales[here]
            if given is None:
                shape = self._shape(block, relation, ties, power)
                size = _largest(block.scaled_spectrum(shape.exp()[ties]), math.inf)
                given = size + shape + math.log(factor) - _log(scale)
                if relation.slopes is None:
                    given = given + math.log(2)
            used[v], found[v] = given.exp() * scale, given
            if not self._eliminate(v, used[v], (block, beside), symbols, live):
                return None
            if relation.slopes is None and relation.terms:
                there = program.home[relation.terms[0].variable]
                scales[there] = scales[there] + relation.square * used[v].log().mean().exp()
        return Eliminated(logarithm, used, found, gains)

    def _eliminate(
        self,
        v: int,
        multipliers: Tensor,
        blocks: tuple[_Block, dict[int, _Block]],
        symbols: dict[int, Tensor],
        live: dict[tuple[int, int], _Block],
    ) -> bool:
        """What is left when a variable is gone; whether its multipliers were large enough."""
        own, beside = blocks
        a, b, c = self.program.variables[v].relation.weights
        weight, matrix = multipliers[self.ties[v]], own.matrix()
        lower, failed = factorised(total((a * weight)[None].to(matrix.dtype), -matrix))
        if bool(failed.any()):
            return False
        right: dict[int, Tensor] = {j: block.matrix() for j, block in beside.items()}
        if b:
            for j, symbol in symbols.items():
                coupled = with_rows(b * weight, symbol)
                right[j] = total(right[j], coupled) if j in right else coupled
        _add(live, {j: solved(lower, r) for j, r in right.items()}, 1)
        if c:
            root = (abs(c) * multipliers[self.source_ties[v]]).sqrt()
            _add(live, {j: with_rows(root, symbol) for j, symbol in symbols.items()}, 1 if c > 0 else -1)
        return True

    def settle(
        self, parameters: list[Tensor], growths: tuple[float, ...], report: Report = silent
    ) -> Eliminated | None:
        """A pass at all frequencies, one component after the other, a few frequencies at a time.

        The logarithms of the multipliers of a component grow from variable to variable until they are large enough at
        all of its frequencies. ``None`` if they never are, or where components wait for each other.
        """
        program, order = self.program, self._from_last_to_first()
        if order is None:
            return None
        used = [torch.zeros(variable.relation.multipliers, dtype=torch.float64) for variable in program.variables]
        scales, gains, logarithm = [0.0] * len(program.components), dict[int, float](), -math.inf
        for terms in program.outputs:
            scales[program.home[terms[0].variable]] = 1.0
        for done, number in enumerate(order):
            report("forms at all frequencies", done, len(order))
            variables = program.components[number].variables
            for growth in growths:
                given = [part + growth * (variables[-1] - v + 1) for v, part in enumerate(parameters)]
                for v in variables:
                    used[v] = given[v].exp() * scales[number]
                sizes = self._sizes(number, used, given)
                if sizes is not None:
                    break
            else:
                return None
            for v in variables:
                relation = program.variables[v].relation
                if v in sizes:
                    shape = given[v] if relation.multipliers > 1 else torch.zeros(1, dtype=torch.float64)
                    used[v] = (sizes[v] + shape).exp()
                    gains[v] = sizes[v] + float(shape.mean()) - _log(scales[number])
                if not relation.terms:
                    logarithm = sizes.get(v, -math.inf)
                elif relation.slopes is None and bool(used[v].any()):
                    mean = relation.square * float(used[v].log().mean().exp())
                    scales[program.home[relation.terms[0].variable]] += mean
        return Eliminated(torch.tensor(logarithm, dtype=torch.float64), used, parameters, gains)

    def _sizes(self, number: int, used: list[Tensor], given: list[Tensor]) -> dict[int, float] | None:
        """Of the variables that a component begins with, the logarithms; unused ones have no multipliers."""
        program, component = self.program, self.program.components[number]
        entering: list[tuple[tuple[Term, ...], int | None]] = [(terms, None) for terms in program.outputs]
        for reader, variable in enumerate(program.variables):
            if variable.relation.terms and program.home[reader] != number:
                entering.append((variable.relation.terms, reader))
        entering = [(terms, v) for terms, v in entering if program.home[terms[0].variable] == number]
        batch = max(1, BATCH_ENTRIES // sum(program.order(v) ** 2 for v in component.variables))
        found: dict[int, float] = {}
        reached = set[int]()
        most = MANY_FREQUENCIES if component.has_cells else component.count
        for piece in _some(component.frequencies, most).split(batch):
            live: dict[tuple[int, int], _Block] = {}
            for terms, by in entering:
                symbols = self._symbols(terms, piece)
                if by is not None:
                    weight = program.variables[by].relation.square * used[by][self.source_ties[by]]
                    symbols = {j: with_rows(weight.sqrt(), symbol) for j, symbol in symbols.items()}
                _add(live, symbols, 1)
            for v in reversed(component.variables):
                block = live.pop((v, v), None)
                beside = {j: live.pop((i, j)) for i, j in list(live) if i == v}
                if block is None:
                    continue
                reached.add(v)
                relation = program.variables[v].relation
                if relation.slopes is None and not beside:
                    shape = given[v].exp() if relation.multipliers > 1 else torch.ones(1, dtype=torch.float64)
                    size = float(_largest(block.scaled_spectrum(shape[self.ties[v]]), math.inf))
                    found[v] = max(size, found.get(v, size))
                    continue
                here = {term.variable for term in relation.terms} <= set(component.variables)
                symbols = self._symbols(relation.terms, piece) if here else {}
                if not self._eliminate(v, used[v], (block, beside), symbols, live):
                    return None
        for v in component.variables:
            if v not in reached:
                used[v] = torch.zeros_like(used[v])
        return found

    def _from_last_to_first(self) -> list[int] | None:
        """Components, each after all that read it; ``None`` if there is no such order."""
        program = self.program
        readers: list[set[int]] = [set() for _ in program.components]
        for v, variable in enumerate(program.variables):
            for term in variable.relation.terms:
                readers[program.home[term.variable]].add(program.home[v])
        order: list[int] = []
        while len(order) < len(readers):
            ready = [n for n, found in enumerate(readers) if n not in order and found <= {n, *order}]
            if not ready:
                return None
            order += ready
        return order

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
    if adjoint:  # without a conjugate of the block
        return (v.conj()[:, None] @ block)[:, 0].conj()
    return (block @ v[..., None])[..., 0]


def _image(factors: list[tuple[int, Tensor]], v: Tensor) -> Tensor:
    """Σ ±A*A v."""
    found = torch.zeros_like(v)
    for sign, left in factors:
        found = found + sign * _times(left, _times(left, v), adjoint=True)
    return found


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
