r"""A network as relations between increments: what forms are made of.

For two inputs let every value stand for the difference of its two versions. Each nonlinear step has a variable y for
its result; what it acts on, s, is a sum of filters of earlier variables, because constants drop out. What is known of a
step is that for all multipliers Λ = diag(λ) >= 0, constant on each channel,

    slopes in [α, β]:      (y - αs)*Λ(βs - y) >= 0,
    only a constant √κ:    κ·s*Λs - y*Λy >= 0.

So √ρ is a constant of the network if, for some λ, the quadratic form

    ρ|x|² - |out|² - Σ (such terms)

is nowhere negative. The form commutes with shifts, and is a Hermitian matrix P(ω) for each frequency; variables that no
relation couples are apart, each of these components on a lattice of its own, and one without axes has one frequency.
"""

import functools
import math
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from gramcert.certified.frequencies import Cells, Frequencies
from gramcert.geometry.symbol import FrequencyGrid
from gramcert.networks.filters import Filter, NotDescribedError, Taps
from gramcert.operators.linear import Shape

Steps = tuple[Fraction, ...]

# Frequencies of a torus above which cells that cover all frequencies may be fewer; the radius of the first cells, and
# how many are looked at.
MANY_FREQUENCIES, FIRST_RADIUS, MOST_CELLS = 8192, 0.2, 2**15


class CoupledPaddingError(NotDescribedError):
    """A torus of circular padding is no other one."""


@dataclass(frozen=True, eq=False)
class Term:
    """A filter of a variable."""

    variable: int
    filter: Filter


@dataclass(frozen=True, eq=False)
class Relation:
    """What is known of a variable y and of s, a sum of terms.

    Attributes:
        terms: s; empty for the input of the network.
        slopes: α and β, where y and s have the same channels; ``None`` where only a constant is known.
        square: κ, rounded up.
        ties: for each channel of y the multiplier that belongs to it.
        source_ties: the same for the channels of s.
    """

    terms: tuple[Term, ...]
    slopes: tuple[float, float] | None
    square: float
    ties: Tensor
    source_ties: Tensor

    @property
    def multipliers(self) -> int:
        """How many there are."""
        return int(self.ties.max()) + 1

    @property
    def weights(self) -> tuple[float, float, float]:
        """(a, b, c) with λ(a|y|² - b(y*s + s*y) - c|s|²) <= 0, each rounded a few times."""
        if self.slopes is None:
            return 1.0, 0.0, self.square
        low, high = self.slopes
        return 2.0, low + high, -2 * low * high


@dataclass(frozen=True, eq=False)
class Variable:
    """A value that is not linear in earlier ones, or is treated so.

    Attributes:
        name: of its node.
        channels: how many; all entries where there are no axes.
        sizes: of the window on each axis.
        step: distance of its places.
        relation: what is known of it.
    """

    name: str
    channels: int
    sizes: Shape
    step: Steps
    relation: Relation


@dataclass
class Component:
    """Variables that relations couple, on one lattice.

    Attributes:
        variables: in the order of the network.
        lattice: distance of the places of the lattice that all of them have.
        sizes: of the torus, in such distances.
        phases: of each variable on each axis.
        is_circular: whether the torus is that of circular padding.
        is_shifted: whether the frequencies are those halfway between those of the torus. Where nothing comes round the
            torus, what comes round may as well have its sign changed, and these are the frequencies then.
        degrees: the largest lag in P on each axis, at least 1.
    """

    variables: list[int]
    lattice: Steps
    sizes: Shape
    phases: dict[int, Shape]
    is_circular: bool
    is_shifted: bool = False
    degrees: tuple[float, ...] = ()

    @property
    def count(self) -> int:
        """How many frequencies there are."""
        return len(self._grid) if self.sizes else 1

    @property
    def frequencies(self) -> Frequencies:
        """One of each pair ±ω."""
        if not self.sizes:
            return Frequencies(torch.zeros(1, 0, dtype=torch.int64), ())
        return Frequencies.of_grid(self._grid, list(range(len(self.sizes))))

    @property
    def _grid(self) -> FrequencyGrid:
        return FrequencyGrid(self.sizes, (0.5 if self.is_shifted else 0.0,) * len(self.sizes))

    @property
    def has_cells(self) -> bool:
        """Whether it is proved for all frequencies there are, and not for those of the torus alone."""
        if not self.sizes or self.count <= MANY_FREQUENCIES:
            return False
        return Cells.most(list(self.degrees), FIRST_RADIUS) <= MOST_CELLS // 4  # so that some can be split

    @property
    def can_be_shifted(self) -> bool:
        """Whether there are frequencies in between that are proved, and nothing goes round."""
        return bool(self.sizes) and not self.is_circular and not self.has_cells


@dataclass
class Program:
    """All of a network.

    Attributes:
        variables: the input first.
        outputs: terms of each output.
        needs: for each variable the least size of its torus, and whether it is the only one.
    """

    variables: list[Variable]
    outputs: list[tuple[Term, ...]]
    needs: list[tuple[int, Shape, bool]]
    _taps: dict[Term, Taps] = field(default_factory=dict)

    @functools.cached_property
    def components(self) -> list[Component]:
        """In the order of their first variables."""
        parent = list(range(len(self.variables)))

        def root(v: int) -> int:
            while parent[v] != v:
                v = parent[v]
            return v

        def unite(variables: list[int]) -> None:
            for v in variables[1:]:
                parent[root(v)] = root(variables[0])

        for v, variable in enumerate(self.variables):
            together = [term.variable for term in variable.relation.terms]
            unite([v, *together] if variable.relation.slopes is not None else together)
        for terms in self.outputs:
            unite([term.variable for term in terms])
        groups: dict[int, list[int]] = {}
        for v in range(len(self.variables)):
            groups.setdefault(root(v), []).append(v)
        found = [self._component(group) for group in groups.values()]
        for component in found:
            component.degrees = self._degrees(component)
        return found

    def shift(self, shifts: list[bool]) -> bool:
        """Choose the frequencies of each component; whether that can be done."""
        if len(shifts) != len(self.components):
            return False
        for component, is_shifted in zip(self.components, shifts, strict=True):
            if is_shifted and not component.can_be_shifted:
                return False
            component.is_shifted = is_shifted
        return True

    @functools.cached_property
    def home(self) -> list[int]:
        """The component of each variable."""
        found = [0] * len(self.variables)
        for number, component in enumerate(self.components):
            for v in component.variables:
                found[v] = number
        return found

    def order(self, v: int) -> int:
        """Channels times phases."""
        return self.variables[v].channels * math.prod(self.components[self.home[v]].phases[v])

    def taps(self, term: Term) -> Taps:
        """A term on the lattice of its component."""
        if term not in self._taps:
            component = self.components[self.home[term.variable]]
            self._taps[term] = term.filter.on_phases(_coarser_phases(term, component))
        return self._taps[term]

    def _degrees(self, component: Component) -> tuple[float, ...]:
        """Of couplings their lags, of squares the differences of two of them."""
        inside, found = set(component.variables), [1] * len(component.sizes)
        for v, terms in self._read():
            if not terms or terms[0].variable not in inside:
                continue
            _, b, c = (1.0, 0.0, 1.0) if v is None else self.variables[v].relation.weights
            lags = [term.filter.lags(_coarser_phases(term, component)) for term in terms]
            for axis in range(len(found)):
                least, most = min(lag[axis][0] for lag in lags), max(lag[axis][1] for lag in lags)
                found[axis] = max(found[axis], max(-least, most) if b else 0, most - least if c else 0)
        return tuple(map(float, found))

    def _component(self, group: list[int]) -> Component:
        steps = [self.variables[v].step for v in group]
        axes = len(steps[0])
        if any(len(step) != axes for step in steps):
            raise NotDescribedError("values of different numbers of axes are coupled")
        # Also the places of what is read from it with a stride.
        for _, terms in self._read():
            for term in terms:
                if term.variable in group and not term.filter.adjoint:
                    at = self.variables[term.variable].step
                    steps.append(tuple(a * s for a, s in zip(at, term.filter.stride, strict=True)))
        lattice = tuple(_common_multiple([step[axis] for step in steps]) for axis in range(axes))
        sizes = [1] * axes
        exact: set[tuple[Fraction, ...]] = set()
        for v, least, is_exact in self.needs:
            if v not in group:
                continue
            spans = [n * a / b for n, a, b in zip(least, self.variables[v].step, lattice, strict=True)]
            sizes = [max(size, math.ceil(span)) for size, span in zip(sizes, spans, strict=True)]
            if is_exact:
                exact.add(tuple(spans))
        if exact and exact != {tuple(map(Fraction, sizes))}:
            raise CoupledPaddingError("circular padding is coupled with another padding or size")
        phases = {v: tuple(int(b / a) for a, b in zip(self.variables[v].step, lattice, strict=True)) for v in group}
        return Component(group, lattice, tuple(sizes), phases, bool(exact))

    def _read(self) -> list[tuple[int | None, tuple[Term, ...]]]:
        """All sums of terms, with the variable that they lead to."""
        found: list[tuple[int | None, tuple[Term, ...]]] = [
            (v, variable.relation.terms) for v, variable in enumerate(self.variables)
        ]
        return found + [(None, terms) for terms in self.outputs]


def _coarser_phases(term: Term, component: Component) -> Shape:
    """Of the coarser side of a filter."""
    phases = component.phases[term.variable]
    if term.filter.adjoint:
        return phases
    return tuple(t // s for t, s in zip(phases, term.filter.stride, strict=True))


def _common_multiple(values: list[Fraction]) -> Fraction:
    denominator = math.lcm(*(value.denominator for value in values))
    return Fraction(math.lcm(*(int(value * denominator) for value in values)), denominator)
