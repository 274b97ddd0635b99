"""The constant of a network by forms: multipliers are searched for, then proved, and only the proof counts."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gramcert.networks.elimination import Elimination
from gramcert.networks.filters import NotDescribedError
from gramcert.networks.increments import program_of
from gramcert.networks.program import Program
from gramcert.networks.proof import is_proved
from gramcert.networks.search import Budget, Keep, Proposal, closed_form, descend
from gramcert.operators.composition import is_identity
from gramcert.operators.graph import Graph, Joint, Nonlinear, Sum
from gramcert.operators.linear import LinearMap
from gramcert.rounding import root_up

# What is added, relative and once more for each variable, until the proof succeeds.
MARGINS = (1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)

# Frequencies of one component that the search goes by.
SEARCHED = 640

# By how much the logarithms of multipliers grow from variable to variable until they are large enough at frequencies
# that the search did not see.
GROWN = (0.0, 1e-4, 1e-3, 1e-2, 1e-1)

# A closed form so many times above the product is not worth a descent.
HOPELESS = 4.0

# By how much the logarithm of the closed form has to fall, so that the search is likely to end lower too.
WORTH_SHIFTING = 0.02

# Entries that may be held, four times as many for a pass with gradients, and operations that a proof may take.
MOST_HELD, MOST_OPERATIONS = 1e8, 4e12


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
    """

    upper: float = math.inf
    multipliers: tuple[Tensor, ...] = ()
    shifts: tuple[bool, ...] = ()
    blocks: tuple[Block, ...] = ()
    reason: str = ""


def bound_by_forms(
    graph: Graph,
    budget: Budget,
    *,
    below: float = math.inf,
    start: Callable[[], Proposal | None] = lambda: None,
    keep: Keep = lambda _: None,
) -> Forms:
    """The constant of a graph from its input to all outputs together.

    Args:
        graph: without nodes that no output needs.
        budget: for the descent from the closed form.
        below: what the constant has to be below to be of use.
        start: an earlier proposal to go on from.
        keep: told of proposals to go on from.
    """
    if not is_worth_trying(graph):
        return Forms(reason="norms say all that there is")
    try:
        program = program_of(graph)
        _require_room(program)
    except NotDescribedError as error:
        return Forms(reason=str(error))
    elimination, proposal = _going_on(program, start()) or _shifted(program)
    if proposal is None:
        return Forms(reason="no multipliers were found")
    if proposal.logarithm < 2 * math.log(HOPELESS * below):
        proposal = descend(elimination, proposal, budget, keep)
    return _proved(program, _on_all_frequencies(program, elimination), proposal, below)


def is_proved_by(graph: Graph, multipliers: list[Tensor], shifts: list[bool]) -> bool:
    """Whether these prove that the root of the first multiplier is a constant."""
    try:
        program = program_of(graph)
        _require_room(program)
    except NotDescribedError:
        return False
    return program.shift(shifts) and is_proved(program, multipliers)


def proof_operations(graph: Graph) -> float:
    """About what one proof takes; ``inf`` where forms do not reach."""
    try:
        program = program_of(graph)
        _require_room(program)
        return _operations(program)
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


def _shifted(program: Program) -> tuple[Elimination, Proposal | None]:
    """The closed form on the frequencies of each component that suit it better."""
    elimination = Elimination(program, SEARCHED)
    best = closed_form(elimination)
    chosen = [False] * len(program.components)
    for number, component in enumerate(program.components):
        if best is None or best.closed is None or not component.can_be_shifted:
            continue
        tried = [is_shifted or number == other for other, is_shifted in enumerate(chosen)]
        program.shift(tried)
        other = Elimination(program, SEARCHED)
        found = closed_form(other, best.closed)
        if found is not None and found.logarithm < best.logarithm - WORTH_SHIFTING:
            elimination, best, chosen = other, found, tried
    program.shift(chosen)
    return elimination, best


def _going_on(program: Program, earlier: Proposal | None) -> tuple[Elimination, Proposal] | None:
    """From an earlier proposal, if it is one for this network."""
    sizes = [variable.relation.multipliers for variable in program.variables]
    if earlier is None or [part.numel() for part in earlier.parameters] != sizes:
        return None
    if not program.shift(list(earlier.shifts)):
        return None
    elimination = Elimination(program, SEARCHED)
    with torch.no_grad():
        passed = elimination.run(earlier.parameters, math.inf)
    if passed is None or not math.isfinite(float(passed.logarithm)):
        program.shift([False] * len(program.components))
        return None
    return elimination, replace(earlier, logarithm=float(passed.logarithm))


def _on_all_frequencies(program: Program, searched: Elimination) -> Elimination:
    """For the last pass, which needs no gradients; that of the search where it has all of them, or memory is short."""
    has_all = all(component.count <= SEARCHED for component in program.components)
    return searched if has_all or _held(program, math.inf) > MOST_HELD else Elimination(program, 2**62)


def _proved(program: Program, elimination: Elimination, proposal: Proposal, below: float) -> Forms:
    count = len(program.variables)
    passed = None
    for growth in GROWN:
        with torch.no_grad():
            grown = [part + growth * (count - v) for v, part in enumerate(proposal.parameters)]
            passed = passed or elimination.run(grown, math.inf)
    if passed is None:
        return Forms(reason="the search did not see the worst frequencies")
    for margin in MARGINS:
        multipliers = [given * (1 + margin) ** (count - v) for v, given in enumerate(passed.multipliers)]
        upper = root_up(float(multipliers[0]))
        if not upper < below:
            return Forms(reason="the product of norms is not larger")
        if is_proved(program, multipliers):
            shifts = tuple(component.is_shifted for component in program.components)
            return Forms(upper, tuple(multipliers), shifts, _blocks(program, passed.gains))
    return Forms(reason="rounding left no room for a proof")


def _blocks(program: Program, gains: dict[int, float]) -> tuple[Block, ...]:
    found = []
    for v, gain in sorted(gains.items()):
        sizes = program.components[program.home[v]].sizes
        lattice = f"{'×'.join(map(str, sizes))} frequencies" if sizes else "one matrix"
        found.append(Block(program.variables[v].name, math.exp(gain / 2), lattice))
    return tuple(found)


def _require_room(program: Program) -> None:
    """Refuse what would take too much memory or time."""
    if 4 * _held(program, SEARCHED) > MOST_HELD or _operations(program) > MOST_OPERATIONS:
        raise NotDescribedError("it is too large for forms")


def _held(program: Program, frequencies: float) -> float:
    """Entries of a matrix for each variable and frequency."""
    return sum(
        min(frequencies, component.count) * sum(float(program.order(v)) ** 2 for v in component.variables)
        for component in program.components
    )


def _operations(program: Program) -> float:
    """Of a chain of variables, of which each is coupled to a few others."""
    return sum(
        16 * component.count * sum(float(program.order(v)) ** 3 for v in component.variables)
        for component in program.components
    )
