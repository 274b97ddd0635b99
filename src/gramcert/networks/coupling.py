"""Which variables share a component while a network is read, and where it pays to cut it off.

Components cost the cubes of their orders at every frequency. Where one would become too large, a value is cut off: only
its size in each channel goes on, and a new component begins. That loses least where nothing else of the component is
read later, as between two residual blocks; so components end only there.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from gramcert.networks.program import MANY_FREQUENCIES, Steps, Variable
from gramcert.operators.graph import Graph, Node, Nonlinear
from gramcert.operators.linear import Move, Shape

# Cubes of orders times frequencies up to which values of different strides stay in one component, and values of one.
WORTH_COUPLING, MOST_COUPLED = 1e8, 4e10


@dataclass(frozen=True)
class _Need:
    """What a torus has to hold, in places of the input."""

    spans: tuple[Fraction, ...]
    is_exact: bool


class Coupling:
    """The components of variables that have been added.

    Args:
        graph: what is read.
        axes: of its lattice.
        most: cost of one component.
    """

    def __init__(self, graph: Graph, axes: int, most: float) -> None:
        self._nodes, self._axes, self._most = list(graph.nodes.values()), axes, most
        self._place = {node.name: place for place, node in enumerate(self._nodes)}
        self._last = dict.fromkeys(self._place, -1.0)  # where each is read last
        for place, node in enumerate(self._nodes):
            self._last.update(dict.fromkeys(node.inputs, float(place)))
        self._last.update(dict.fromkeys(graph.outputs.values(), math.inf))
        self._variables: list[Variable] = []
        self._groups: list[set[int]] = []  # of each variable
        self._needs: dict[int, list[_Need]] = {}

    def add(self, variable: Variable) -> None:
        """One more."""
        v, together = len(self._variables), [term.variable for term in variable.relation.terms]
        self._variables.append(variable)
        self._groups.append({v})
        if variable.relation.slopes is not None:
            together.append(v)
        united = set[int]().union(*(self._groups[w] for w in together))
        for w in united:
            self._groups[w] = united

    def group(self, variables: list[int]) -> set[int]:
        """All that is in the components of these."""
        return set[int]().union(*(self._groups[v] for v in variables))

    # Sizes of tori

    def need(self, v: int, sizes: Shape, *, is_exact: bool) -> None:
        """The torus of this variable has to be at least so large, or exactly."""
        self._needs.setdefault(v, []).append(_Need(self._spans(sizes, self._variables[v].step), is_exact))

    def has_room(self, variables: list[int], sizes: Shape, step: Steps, *, is_exact: bool) -> bool:
        """Whether a torus can have these sizes, in places at such a distance, beside all that is needed of it."""
        new = _Need(self._spans(sizes, step), is_exact)
        needs = [new, *(need for v in self.group(variables) for need in self._needs.get(v, []))]
        exact = {need.spans for need in needs if need.is_exact}
        if not exact:
            return True
        largest = tuple(map(max, zip(*(need.spans for need in needs), strict=True)))
        return exact == {largest}

    @staticmethod
    def _spans(sizes: Shape, step: Steps) -> tuple[Fraction, ...]:
        return tuple(n * a for n, a in zip(sizes, step, strict=True))

    # Costs

    def is_worth(self, variables: list[int], step: Steps) -> bool:
        """Whether the component stays small enough on a coarser lattice, if it begins there or is on it anyway."""
        group = self.group(variables)
        coarsest = [max(self._variables[v].step[axis] for v in group) for axis in range(len(step))]
        is_there = all((b / a).denominator == 1 for a, b in zip(step, coarsest, strict=True))
        return self._begins(group) or is_there or self._cost(group, step) <= WORTH_COUPLING

    def kept_with(self, name: str) -> list[str]:
        """Other values that are there after a node and are read later."""
        return [other for other in self._kept(self._place[name]) if other != name]

    def is_full(self, name: str, variables: list[int], others: list[list[int]]) -> bool:
        """Whether a component should end with a value, nothing else of it being read later."""
        group = self.group(variables)
        if self._begins(group) or any(not group.isdisjoint(self.group(other)) for other in others):
            return False
        if all(self._cuts(node) for node in self._nodes if name in node.inputs):
            return False
        here = self._variables[max(group)].step
        nodes = self._next(self._place[name])
        if not nodes:
            return False
        sizes = [self._sizes(node) for node in nodes]
        places = min(math.prod(size) for size in sizes)
        orders = self._orders(group, here) + [math.prod(node.shape) / places for node in nodes]
        largest = max(float(places), self._places(group, here))
        return _cost(orders, largest if here else None, ends=2) > self._most

    def _cuts(self, node: Node) -> bool:
        """Whether what a node does belongs to what it acts on, or to nothing."""
        is_flat = isinstance(node.operation, Move) and node.operation.is_view and len(node.shape) <= self._axes
        return isinstance(node.operation, Nonlinear) or is_flat

    def _begins(self, group: set[int]) -> bool:
        return all(self._variables[v].relation.slopes is None for v in group)

    def _cost(self, group: set[int], step: Steps) -> float:
        return _cost(self._orders(group, step), self._places(group, step) if step else None)

    def _orders(self, group: set[int], step: Steps) -> list[float]:
        """Channels times phases on a lattice."""
        found = []
        for v in group:
            phases = math.prod(max(Fraction(1), b / a) for a, b in zip(self._variables[v].step, step, strict=True))
            found.append(float(self._variables[v].channels * phases))
        return found

    def _places(self, group: set[int], step: Steps) -> float:
        last = self._variables[max(group)]
        return math.prod(float(n * a / b) for n, a, b in zip(last.sizes, last.step, step, strict=True))

    def _kept(self, place: int) -> set[str]:
        return {name for name, last in self._last.items() if self._place[name] <= place < last}

    def _next(self, place: int) -> list[Node]:
        """What is not linear until the next value that is all that is left of it."""
        kept, name = self._kept(place), self._nodes[place].name
        nodes: list[Node] = []
        for later in range(place + 1, len(self._nodes)):
            node = self._nodes[later]
            if isinstance(node.operation, Nonlinear):
                nodes.append(node)
            now = self._kept(later)
            if nodes and name not in now and now - kept == {node.name}:
                break
        return nodes

    def _sizes(self, node: Node) -> Shape:
        return node.shape[-self._axes :] if 0 < self._axes < len(node.shape) else ()


def _cost(orders: list[float], places: float | None, *, ends: int = 0) -> float:
    """Half of all frequencies, and complex numbers, which are four times the work of real ones.

    The widest ones, if they are ``ends`` of the component, have diagonal blocks and cost as much as what they are
    coupled to.
    """
    ordered = sorted(orders)
    inner, outer = ordered[: len(ordered) - ends], ordered[len(ordered) - ends :]
    widest = max(inner, default=min(outer, default=0.0))
    cubes = sum(order**3 for order in inner) + sum(order * min(order, widest) ** 2 for order in outer)
    return cubes / 4 if places is None else cubes * min(max(places / 2, 1.0), MANY_FREQUENCIES)
