r"""A margin from below by a quadratic function of the input, made backwards through the network.

Around a centre, whose values are v̂, let Δv = v - v̂. The pass keeps, for all inputs of the network at once,

    margin >= constant + Σ_v (c_v·Δv - ½d_v·‖Δv‖²)

over the values v that have not been passed yet. It begins with c = e_y - e_i at the logits. At a value v:

* v = Au + b: c_u += Aᵀc_v. Squares go back to where the step to v begins: ‖Δv‖ <= L·‖Δu‖, d_u += L²·d_v.
* v = φ(u), entry by entry: for any g and e > 0 the constant falls by what :mod:`gramcert.minorants.units` finds, and
  c_u += g, d_u += d_v·s² + e.
* v = f(u) with no more than a constant L: c·Δv >= -‖c‖²/2t - ½t‖Δv‖², and d_u += (d_v + t)·L² for any t > 0.
* v = Σu_k: c goes to all; ‖ΣΔ_k‖² <= Σ(S/w_k)‖Δ_k‖² for any weights w_k > 0 with sum S.

At the input stands a concave quadratic function below the margin, on the whole space. What is found by a search are g,
e, t and w, the multipliers; whatever they are, the function is below the margin.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gramcert.minorants.layout import Centre, Layout
from gramcert.minorants.units import Problem, Slope, largest, lowest
from gramcert.operators.graph import Input, Joint, Node, Nonlinear, Sum
from gramcert.operators.linear import LinearMap


@dataclass(frozen=True)
class Pairs:
    """Samples of a batch, the class that each has, and another class."""

    samples: Tensor
    winners: Tensor
    others: Tensor

    def __getitem__(self, places: Tensor) -> "Pairs":
        """Some of them."""
        return Pairs(self.samples[places], self.winners[places], self.others[places])

    def __len__(self) -> int:
        return len(self.samples)

    def margins(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """f_y - f_i from the logits of each pair, and its slope e_y - e_i."""
        places, slope = torch.arange(len(self)), torch.zeros_like(logits)
        slope[places, self.winners], slope[places, self.others] = 1.0, -1.0
        return logits[places, self.winners] - logits[places, self.others], slope


@dataclass(frozen=True)
class Multipliers:
    """What may be chosen, for each of some pairs of a sample and a class.

    Attributes:
        slopes: g of functions of each entry or window, (pairs, *shape).
        extras: e of these, and t of others, (pairs,).
        weights: w of the terms of sums, (pairs, terms).
        room: by how much the curvature of the function that is added at the input exceeds what it has to, (pairs,).
    """

    slopes: dict[str, Tensor]
    extras: dict[str, Tensor]
    weights: dict[str, Tensor]
    room: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """All of them by names."""
        groups = {"slopes": self.slopes, "extras": self.extras, "weights": self.weights}
        named = {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}
        return named | {"room": self.room}

    @classmethod
    def of_tensors(cls, named: dict[str, Tensor]) -> "Multipliers":
        """From all of them by names."""
        groups: dict[str, dict[str, Tensor]] = {"slopes": {}, "extras": {}, "weights": {}}
        for name, value in named.items():
            group, _, place = name.partition("/")
            if place:
                groups[group][place] = value
        return cls(**groups, room=named["room"])

    def __getitem__(self, places: Tensor) -> "Multipliers":
        """Of some of the pairs."""
        return self.of_tensors({name: value[places] for name, value in self.tensors().items()})

    def fits(self, layout: Layout, count: int) -> bool:
        """Whether they are floating-point numbers for so many pairs, all that a pass needs, and no others."""
        shapes = {f"slopes/{name}": layout.nodes[name].shape for name in layout.bent}
        shapes |= {f"extras/{name}": () for name in (*layout.bent, *layout.cut)}
        shapes |= {f"weights/{name}": (len(layout.nodes[name].inputs),) for name in layout.sums}
        shapes |= {"room": ()}
        given = self.tensors()
        return given.keys() == shapes.keys() and all(
            value.is_floating_point() and tuple(value.shape) == (count, *shapes[name]) for name, value in given.items()
        )


@dataclass
class Minorant:
    """constant + c·δ - ½d·‖δ‖² - ½Σ_z q_z·‖A_zδ‖², z = A_zx + b the values that are linear in the input."""

    constant: Tensor
    slope: Tensor
    curvature: Tensor
    first: dict[str, Tensor]


@dataclass
class _State:
    constant: Tensor
    slopes: dict[str, Tensor] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)


class Backward(ABC):
    """One pass, for pairs of samples of a batch and classes; how it counts is up to who searches and who proves."""

    is_proof: bool

    def __init__(self, layout: Layout, centre: Centre, samples: Tensor) -> None:
        self.layout, self.centre, self.samples = layout, centre, samples

    def __call__(self, constant: Tensor, slope: Tensor, multipliers: Multipliers) -> Minorant:
        """From the logits back to the input."""
        state = _State(constant, {self.layout.output: slope})
        for node in reversed(self.layout.nodes.values()):
            c, d = state.slopes.pop(node.name, None), state.squares.pop(node.name, None)
            if isinstance(node.operation, Input):
                zero = constant.new_zeros(len(constant))
                c = constant.new_zeros(len(constant), *node.shape) if c is None else c
                return Minorant(state.constant, c, zero if d is None else d, state.first)
            if c is not None:
                self.rounded(node.name, c)
            if node.name in self.layout.bent and c is not None:
                self._bent(state, node, c, d, multipliers)
            elif node.name in self.layout.cut and c is not None:
                extra = multipliers.extras[node.name]
                state.constant = self.less(state.constant, self.over(self.square(c), 2 * extra))
                self._squares(state, node, extra if d is None else self.up(d + extra), multipliers)
            else:
                if d is not None:
                    self._squares(state, node, d, multipliers)
                if c is not None:
                    self._linear(state, node, c)
        raise AssertionError("a network without an input")

    def _bent(self, state: _State, node: Node, c: Tensor, d: Tensor | None, multipliers: Multipliers) -> None:
        operation, (origin,) = node.operation, node.inputs
        assert isinstance(operation, Nonlinear)
        g, extra = multipliers.slopes[node.name], multipliers.extras[node.name]
        d = torch.zeros_like(extra) if d is None else self.unrounded(node.name, d)
        constant = operation.constant
        shaped = (-1, *[1] * (c.dim() - 1))
        windows = self.centre.windows.get(node.name)
        if windows is None:
            steepest = self.squared(constant)
            total = self.up(self.up(d * steepest) + extra)
            at = self.centre.slopes[node.name]
            assert operation.slopes is not None
            z = self.value(self.centre.course.values[origin])
            problem = Problem(z, c, g, d.reshape(shaped), extra.reshape(shaped), steepest)
            near = Slope(self.value(at[0]), self.value(at[1]))
            low = lowest(problem, operation.slopes, operation.local, near, is_proof=self.is_proof)
            back = g
        else:
            total = self.up(self.up(d + extra) * self.squared(constant))
            problem = Problem(c, c, g, d.reshape(shaped), extra.reshape(shaped), 1.0)
            gap = self.value(windows.gap).reshape(c.shape)
            low = largest(problem, gap, is_proof=self.is_proof)
            shape = self.layout.nodes[origin].shape
            back = g.new_zeros(len(g), math.prod(shape) + 1)  # the last for windows that read nothing
            back = back.scatter_add(1, windows.place[self.samples], g.flatten(1))[:, :-1].reshape(-1, *shape)
            self.gathered(origin, g, constant)
        state.constant = self.plus(state.constant, low, problem)
        self._add_slope(state, origin, back)
        self._add_square(state, origin, total)

    def _linear(self, state: _State, node: Node, c: Tensor) -> None:
        operation = node.operation
        if isinstance(operation, LinearMap):
            self._add_slope(state, node.inputs[0], self.pull(node, c))
        elif isinstance(operation, Sum):
            for name, sign in zip(node.inputs, operation.signs, strict=True):
                self._add_slope(state, name, sign * c)
        else:
            assert isinstance(operation, Joint)
            shapes = [self.layout.nodes[name].shape for name in node.inputs]
            row = c.new_zeros(len(c), sum(map(math.prod, shapes)))
            row = row.index_copy(1, self.layout.joined[node.name], c.flatten(1))
            parts = row.split([math.prod(shape) for shape in shapes], 1)
            for name, shape, part in zip(node.inputs, shapes, parts, strict=True):
                self._add_slope(state, name, part.reshape(-1, *shape))

    def _squares(self, state: _State, node: Node, d: Tensor, multipliers: Multipliers) -> None:
        """-½d‖Δv‖² in terms of the values where the step to v begins."""
        origins, constant = self.layout.evaluation.steps[node.name]
        d = self.unrounded(node.name, d)
        if node.name in self.layout.first:
            known = state.first.get(node.name)
            state.first[node.name] = d if known is None else self.up(known + d)
        elif node.name in self.layout.sums:
            weights = multipliers.weights[node.name]
            total = self.sum_up(weights)
            for number, origin in enumerate(origins):
                self._add_square(state, origin, self.up(d * self.over(total, weights[:, number])))
        else:
            for origin in origins:
                self._add_square(state, origin, self.up(d * self.squared(constant)))

    def _add_slope(self, state: _State, name: str, c: Tensor) -> None:
        known = state.slopes.get(name)
        state.slopes[name] = c if known is None else self.added(name, known, c)

    def _add_square(self, state: _State, name: str, d: Tensor) -> None:
        known = state.squares.get(name)
        state.squares[name] = d if known is None else self.up(known + d)

    # How to count

    @abstractmethod
    def pull(self, node: Node, c: Tensor) -> Tensor:
        """Aᵀc."""

    @abstractmethod
    def value(self, values: Tensor) -> Tensor:
        """Values of samples as those of pairs."""

    def squared(self, constant: float) -> float:
        """L², not below it."""
        return constant * constant

    def square(self, c: Tensor) -> Tensor:
        """‖c‖² of each pair."""
        return c.flatten(1).square().sum(1)

    def over(self, first: Tensor, second: Tensor) -> Tensor:
        """A quotient, not below it."""
        return self.up(first / second)

    def up(self, values: Tensor) -> Tensor:
        """What was rounded once, not below it."""
        return values

    def sum_up(self, weights: Tensor) -> Tensor:
        """Of each row."""
        return weights.sum(1)

    def less(self, constant: Tensor, loss: Tensor) -> Tensor:
        """A difference, not above it."""
        return constant - loss

    def plus(self, constant: Tensor, low: Tensor, problem: Problem) -> Tensor:
        """With the least values of all units of a problem."""
        return constant + low.flatten(1).sum(1)

    def added(self, name: str, first: Tensor, second: Tensor) -> Tensor:
        """Two slopes of one value."""
        return first + second

    def gathered(self, name: str, g: Tensor, constant: float) -> None:  # noqa: B027 - a search counts no rounding
        """Slopes of windows were summed to those of a value, of which each place is in at most L² windows."""

    def rounded(self, name: str, c: Tensor) -> None:  # noqa: B027
        """The centre of a value was computed from the centres before it, and rounded, where its slope is c."""

    def unrounded(self, name: str, d: Tensor) -> Tensor:
        """A factor for the square of the distance without that rounding."""
        return d
