"""The constant of a network by forms: multipliers are searched for, then proved, and only the proof counts."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gramcert.networks.coupling import MOST_COUPLED
from gramcert.networks.elimination import Eliminated, Elimination
from gramcert.networks.filters import NotDescribedError
from gramcert.networks.increments import program_of
from gramcert.networks.pattern import Pattern
from gramcert.networks.program import MANY_FREQUENCIES, Program
from gramcert.networks.proof import is_proved
from gramcert.networks.search import Budget, Keep, Proposal, closed_form, descend, is_finished
from gramcert.operators.composition import is_identity
from gramcert.operators.graph import Graph, Joint, Nonlinear, Sum
from gramcert.operators.linear import LinearMap
from gramcert.progress import Report
from gramcert.rounding import root_up

# What is added, relative and once more for each variable, until the proof succeeds; fewer trials where each takes
# long, and larger ones where cells stand for more frequencies than there are.
MARGINS = (1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
FEW_MARGINS, MARGINS_OF_CELLS = (1e-5, 1e-4, 1e-3, 1e-2), (3e-3, 1e-2, 3e-2)

# Frequencies of one component that the search goes by, at most and at least, and operations that one pass may take.
SEARCHED, LEAST_SEARCHED, PASS_OPERATIONS = 640, 8, 3e10

# By how much the logarithms of multipliers grow from variable to variable until they are large enough at frequencies
# that the search did not see.
GROWN = (0.0, 1e-4, 1e-3, 1e-2, 1e-1)

# A closed form so many times above the product is not worth a descent.
HOPELESS = 4.0

# By how much the logarithm of the closed form has to fall, so that the search is likely to end lower too, and the
# components up to which each is tried alone.
WORTH_SHIFTING, FEW_COMPONENTS = 0.02, 8

# What is told of it.
CLOSED_FORM = "multipliers in closed form"

# Entries that may be held, four times as many for a pass with gradients, and operations that a proof may take.
MOST_HELD, MOST_OPERATIONS = 1.5e8, 8e12


@dataclass(frozen=True)
class Block:
    """A part of a network that forms take as one.

    Attributes:
        node: of the value that it begins with, or of one that has the same entries.
        factor: its part of the constant.
        lattice: for people: frequencies of the torus, or that it is a matrix.
    """

    node: str
    factor: float
    lattice: str


@dataclass(frozen=True, eq=False)
class Forms:
    """What forms say of a network.

    Attributes:
        upper: proved constant; ``inf`` where there is none.
        multipliers: of each variable, that of the input being ρ; with them anybody can repeat the proof.
        shifts: which of its frequencies each component goes by.
        blocks: from the input to the output.
        reason: why there is nothing, for people.
        is_cut: whether the search ended by its budget, so that a longer one may find more.
    """

    upper: float = math.inf
    multipliers: tuple[Tensor, ...] = ()
    shifts: tuple[bool, ...] = ()
    blocks: tuple[Block, ...] = ()
    reason: str = ""
    is_cut: bool = False


def bound_by_forms(
    graph: Graph,
    budget: Budget,
    *,
    below: float = math.inf,
    norms: Mapping[str, float] | None = None,
    most_operations: float = math.inf,
    start: Callable[[], Proposal | None] = lambda: None,
    keep: Keep = lambda _: None,
) -> Forms:
    """The constant of a graph from its input to all outputs together.

    Args:
        graph: without nodes that no output needs.
        budget: for the descent from the closed form.
        below: what the constant has to be below to be of use.
        norms: proved ones of linear maps, by their nodes, for those that are too large for a form.
        most_operations: of one proof; for those who cannot wait for more.
        start: an earlier proposal to go on from.
        keep: told of proposals to go on from.
    """
    if not is_worth_trying(graph):
        return Forms(reason="norms say all that there is")
    try:
        costs = _described(graph, norms)
    except NotDescribedError as error:
        return Forms(reason=str(error))
    if costs.of_proof > most_operations:
        return Forms(reason=f"a proof takes {costs.of_proof:.1g} operations")
    elimination, proposal = _going_on(costs, start()) or _shifted(costs, budget.report)
    if proposal is None:
        return Forms(reason="no multipliers were found")
    if costs.can_descend and proposal.logarithm < 2 * math.log(HOPELESS * below):
        proposal = descend(elimination, proposal, budget, keep)
        found = _proved(costs, elimination, proposal, below, budget.report)
        return replace(found, is_cut=not is_finished(proposal))
    return _proved(costs, elimination, proposal, below, budget.report)


def is_proved_by(
    graph: Graph, multipliers: list[Tensor], shifts: list[bool], norms: Mapping[str, float] | None = None
) -> bool:
    """Whether these prove that the root of the first multiplier is a constant."""
    try:
        program = _described(graph, norms).program
    except NotDescribedError:
        return False
    return program.shift(shifts) and is_proved(program, multipliers)


def proof_operations(graph: Graph) -> float:
    """About what one proof takes; ``inf`` where forms do not reach."""
    try:
        return _described(graph, None).of_proof
    except NotDescribedError:
        return math.inf


def is_worth_trying(graph: Graph) -> bool:
    """Whether there are two linear maps with something between them, or values that meet."""
    maps = 0
    for node in graph.nodes.values():
        if isinstance(node.operation, (Sum, Joint)):
            return True
        if isinstance(node.operation, LinearMap):
            maps += not (node.operation.is_part or is_identity(node.operation))
    return maps > 1 and any(isinstance(node.operation, Nonlinear) for node in graph.nodes.values())


def _shifted(costs: "Costs", report: Report) -> tuple[Elimination, Proposal | None]:
    """The closed form on the frequencies of each component that suit it better."""
    program, elimination = costs.program, costs.elimination()
    count = len(program.components)
    can_be = [component.can_be_shifted for component in program.components]
    alone = [[number == other for other in range(count)] for number in range(count) if can_be[number]]
    trials = alone if count <= FEW_COMPONENTS else [can_be]
    report(CLOSED_FORM, 0, len(trials) + 1)
    few = None if elimination.has_all else closed_form(costs.elimination(LEAST_SEARCHED))
    best = closed_form(elimination, few.closed if few is not None else None)
    chosen = [False] * count
    for done, added in enumerate(trials, 1):
        report(CLOSED_FORM, done, len(trials) + 1)
        if best is None or best.closed is None:
            break
        tried = [one or other for one, other in zip(chosen, added, strict=True)]
        program.shift(tried)
        other = costs.elimination()
        found = closed_form(other, best.closed)
        if found is not None and found.logarithm < best.logarithm - WORTH_SHIFTING:
            elimination, best, chosen = other, found, tried
    program.shift(chosen)
    return elimination, best


def _going_on(costs: "Costs", earlier: Proposal | None) -> tuple[Elimination, Proposal] | None:
    """From an earlier proposal, if it is one for this network."""
    program = costs.program
    sizes = [variable.relation.multipliers for variable in program.variables]
    if earlier is None or [part.numel() for part in earlier.parameters] != sizes:
        return None
    if not program.shift(list(earlier.shifts)):
        return None
    elimination = costs.elimination()
    with torch.no_grad():
        passed = elimination.run(earlier.parameters, math.inf)
    if passed is None or not math.isfinite(float(passed.logarithm)):
        program.shift([False] * len(program.components))
        return None
    return elimination, replace(earlier, logarithm=float(passed.logarithm))


def _proved(costs: "Costs", elimination: Elimination, proposal: Proposal, below: float, report: Report) -> Forms:
    program, parameters = costs.program, proposal.parameters
    count = len(program.variables)
    with torch.no_grad():
        if elimination.has_all:
            passed = elimination.run(parameters, math.inf)
        else:
            passed = elimination.settle(parameters, GROWN, report) or _grown(costs, elimination, parameters)
    if passed is None:
        return Forms(reason="the search did not see the worst frequencies")
    has_cells = any(component.has_cells for component in program.components)
    margins = MARGINS_OF_CELLS if has_cells else MARGINS if costs.of_proof <= PASS_OPERATIONS else FEW_MARGINS
    for margin in margins:
        multipliers = [given * (1 + margin) ** (count - v) for v, given in enumerate(passed.multipliers)]
        upper = root_up(float(multipliers[0]))
        if not upper < below:
            return Forms(reason="the product of norms is not larger")
        if is_proved(program, multipliers, report):
            shifts = tuple(component.is_shifted for component in program.components)
            return Forms(upper, tuple(multipliers), shifts, _blocks(program, passed.gains))
    return Forms(reason="rounding left no room for a proof")


def _grown(costs: "Costs", searched: Elimination, parameters: list[Tensor]) -> Eliminated | None:
    """For components that wait for each other: at all frequencies, if there is memory for them."""
    count, passed = len(parameters), None
    elimination = Elimination(costs.program, None) if costs.of_all <= MOST_HELD else searched
    for growth in GROWN:
        grown = [part + growth * (count - v) for v, part in enumerate(parameters)]
        passed = passed or elimination.run(grown, math.inf)
    return passed


def _blocks(program: Program, gains: dict[int, float]) -> tuple[Block, ...]:
    found = []
    for v, gain in sorted(gains.items()):
        sizes = program.components[program.home[v]].sizes
        lattice = f"{'×'.join(map(str, sizes))} frequencies" if sizes else "one matrix"
        found.append(Block(program.variables[v].name, math.exp(gain / 2), lattice))
    return tuple(found)


@dataclass(frozen=True)
class Costs:
    """Of each component, for one frequency.

    Attributes:
        program: whose they are.
        operations: of its factorisation.
        entries: that are held.
    """

    program: Program
    operations: list[float]
    entries: list[float]

    @classmethod
    def of(cls, program: Program) -> "Costs":
        """By the patterns of P."""
        patterns = [Pattern(program, component) for component in program.components]
        # A complex product is four real ones and as many additions.
        kinds = [8 if component.sizes else 2 for component in program.components]
        operations = [kind * pattern.elimination[1] for kind, pattern in zip(kinds, patterns, strict=True)]
        return cls(program, operations, [pattern.entries for pattern in patterns])

    @property
    def of_proof(self) -> float:
        """Operations at all frequencies, or about as many cells."""
        components = self.program.components
        counts = [MANY_FREQUENCIES if component.has_cells else component.count for component in components]
        return sum(count * each for count, each in zip(counts, self.operations, strict=True))

    @property
    def of_all(self) -> float:
        """Entries at all frequencies."""
        counts = [component.count for component in self.program.components]
        return sum(count * each for count, each in zip(counts, self.entries, strict=True))

    @property
    def is_small(self) -> bool:
        """Whether there is time and memory for it, one component after the other."""
        counts = [min(component.count, LEAST_SEARCHED) for component in self.program.components]
        held = max(count * each for count, each in zip(counts, self.entries, strict=True))
        return self.of_proof <= MOST_OPERATIONS and held <= MOST_HELD

    @property
    def searched(self) -> list[int]:
        """Frequencies of each component that a pass has time and memory for: what one spares has another."""
        left, found = PASS_OPERATIONS, [0] * len(self.entries)
        counts = [min(component.count, SEARCHED) for component in self.program.components]
        by_cost = sorted(range(len(counts)), key=lambda n: counts[n] * self.operations[n])
        for rank, n in enumerate(by_cost):
            here = left / (len(counts) - rank)
            found[n] = max(min(counts[n], LEAST_SEARCHED), min(counts[n], int(here / self.operations[n])))
            left = max(left - found[n] * self.operations[n], 0.0)
        return found

    def elimination(self, most: int = SEARCHED) -> Elimination:
        """For the search, at so many frequencies of each component."""
        searched = [min(most, count) for count in self.searched]
        return Elimination(self.program, searched, keeps_symbols=self.can_descend)

    @property
    def can_descend(self) -> bool:
        """Whether a pass with gradients has the memory."""
        return 4 * sum(n * each for n, each in zip(self.searched, self.entries, strict=True)) <= MOST_HELD


def _described(graph: Graph, norms: Mapping[str, float] | None) -> Costs:
    """The relations of a graph in components that are small enough."""
    for most in (MOST_COUPLED, MOST_COUPLED / 8, 0.0):
        costs = Costs.of(program_of(graph, most, norms))
        if costs.is_small:
            return costs
    raise NotDescribedError("it is too large for forms")
