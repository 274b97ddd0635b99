"""What P of one component is made of, which of its blocks are diagonals, and in what order variables are eliminated.

The order is greedy: whatever takes the fewest operations comes next. So a wide variable with a diagonal block, such as
what a cut begins with, goes before anything has filled its block.
"""

import functools
from dataclasses import dataclass

from gramcert.networks.filters import Taps
from gramcert.networks.program import Component, Program, Term


@dataclass(frozen=True, eq=False)
class Part:
    """A sum of terms that lies in a component.

    Attributes:
        variable: whose relation it belongs to; ``None`` for an output.
        terms: taps by their variables.
        rows: of the sum.
    """

    variable: int | None
    terms: dict[int, list[Taps]]
    rows: int

    def is_diagonal(self, v: int) -> bool:
        """Whether each row takes from one entry of a variable alone."""
        return all(taps.is_diagonal for taps in self.terms[v])


def parts_of(program: Program, component: Component) -> list[Part]:
    """Relations in the order of their variables, then outputs."""
    inside = set(component.variables)
    found = []
    read = [(v, variable.relation.terms) for v, variable in enumerate(program.variables)]
    for v, terms in [*read, *((None, terms) for terms in program.outputs)]:
        if terms and terms[0].variable in inside:
            taps = _by_variable(program, terms)
            found.append(Part(v, taps, next(iter(taps.values()))[0].matrices.shape[1]))
    return found


def _by_variable(program: Program, terms: tuple[Term, ...]) -> dict[int, list[Taps]]:
    found: dict[int, list[Taps]] = {}
    for term in terms:
        found.setdefault(term.variable, []).append(program.taps(term))
    return found


class Pattern:
    """The blocks of P that are not zero.

    Args:
        program: all of the network.
        component: the part of it that P is about.
    """

    def __init__(self, program: Program, component: Component) -> None:
        self.orders = {v: program.order(v) for v in component.variables}
        self.diagonal: dict[tuple[int, int], bool] = {(v, v): True for v in self.orders}
        for part in parts_of(program, component):
            relation = None if part.variable is None else program.variables[part.variable].relation
            _, b, c = (1.0, 0.0, 1.0) if relation is None else relation.weights
            if b and part.variable is not None:
                for v in part.terms:
                    self._add(self.diagonal, part.variable, v, is_diagonal=part.is_diagonal(v))
            for i in part.terms if c else ():
                for j in part.terms:
                    if i >= j:
                        both = part.is_diagonal(i) and part.is_diagonal(j)
                        self._add(self.diagonal, i, j, is_diagonal=both)

    @staticmethod
    def _add(blocks: dict[tuple[int, int], bool], i: int, j: int, *, is_diagonal: bool) -> None:
        at = max(i, j), min(i, j)
        blocks[at] = blocks.get(at, True) and is_diagonal

    @property
    def entries(self) -> float:
        """Numbers that P of one frequency has."""
        return float(sum(self.orders[i] * (1 if known else self.orders[j]) for (i, j), known in self.diagonal.items()))

    @functools.cached_property
    def elimination(self) -> tuple[list[int], float]:
        """The order, and about how many products of two numbers one frequency takes."""
        order: list[int] = []
        blocks, operations = dict(self.diagonal), 0.0
        while len(order) < len(self.orders):
            beside: dict[int, dict[int, bool]] = {v: {} for v in self.orders if v not in order}
            for (i, j), is_diagonal in blocks.items():
                if i != j:
                    beside[i][j] = beside[j][i] = is_diagonal
            costs = {v: self._cost(v, blocks[v, v], others) for v, others in beside.items()}
            chosen = min(costs, key=lambda v: (costs[v], -v))
            order.append(chosen)
            operations += costs[chosen]
            own = blocks.pop((chosen, chosen))
            for v in beside[chosen]:
                blocks.pop((max(v, chosen), min(v, chosen)))
            for i, one in beside[chosen].items():
                for j, two in beside[chosen].items():
                    if i >= j:
                        self._add(blocks, i, j, is_diagonal=own and one and two)
        return order, operations

    def _cost(self, v: int, own: bool, beside: dict[int, bool]) -> float:
        """Of the factor, of what it is divided into, and of the products that are taken off the other blocks."""
        n = float(self.orders[v])
        operations = n if own else n**3 / 3
        for j, is_diagonal in beside.items():
            operations += n * (1 if is_diagonal else self.orders[j]) if own else n**2 * self.orders[j]
        widths = [1.0 if own and is_diagonal else float(self.orders[j]) for j, is_diagonal in beside.items()]
        return operations + n * sum(widths) ** 2

    def colours(self) -> int:
        """So many classes of variables, none coupled to one of its own class."""
        colour: dict[int, int] = {}
        for v in self.orders:
            taken = {colour[i + j - v] for i, j in self.diagonal if v in (i, j) and i != j and i + j - v in colour}
            colour[v] = next(c for c in range(len(self.orders)) if c not in taken)
        return max(colour.values()) + 1
