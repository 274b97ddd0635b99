"""What a backward pass has to know of a network: which steps there are, and the certified constant of each."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gramcert.operators.elementwise import Curvature
from gramcert.operators.evaluation import Course, Evaluation, stretch
from gramcert.operators.graph import Graph, Input, Joint, Node, Nonlinear, Sum
from gramcert.operators.linear import LinearMap
from gramcert.operators.propagation import Follower, Measure, Plan
from gramcert.rounding import gamma, next_up, up

# Step of the difference quotient that stands for a slope.
_STEP = 2.0**-20


def widened(graph: Graph) -> Graph:
    """A graph with one output, which stays the first, and beside it all that nonlinear functions act on.

    For each of these a plan then has a constant.
    """
    (output,) = graph.outputs.values()
    needed = graph.needed()
    inputs = [name for node in needed.nodes.values() if _is_function(node) for name in node.inputs]
    return Graph(needed.nodes, {name: name for name in [output, *inputs]}, [], graph.types)


@dataclass(frozen=True)
class Layout:
    """A network with one output, and how values move when the input does.

    Linear functions of values go back node by node. Squares of distances go back from value to value: ``steps`` says
    from where to where, by constants that were measured. Where a residual layer has a constant of its own, they go past
    the activation inside of it.

    Attributes:
        nodes: in the order of their execution.
        output: name of the only result.
        evaluation: of values, with their rounding.
        constants: certified, from the input to each value.
        first: the maps from the input to each value that is linear in it.
        bent: functions through which linear functions pass: of each entry, or the largest of each window.
        cut: other functions, behind which nothing but squares of distances is left.
        sums: which add values that are not known to be a residual layer.
    """

    nodes: dict[str, Node]
    output: str
    evaluation: Evaluation
    constants: dict[str, float]
    first: dict[str, list[LinearMap]]
    bent: tuple[str, ...]
    cut: tuple[str, ...]
    sums: tuple[str, ...]
    joined: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, measure: Measure, output: str) -> "Layout":
        """From a plan of :func:`widened`, and its measurements."""
        evaluation = Evaluation(plan, measure)
        nodes = plan.graph.nodes
        live, bent, cut = {output}, [], []
        for node in reversed(nodes.values()):
            if node.name not in live:
                continue
            if _is_function(node) and not _is_bent(node):
                cut.append(node.name)
            else:
                live.update(node.inputs)
                if _is_function(node):
                    bent.append(node.name)
        constants = _constants(nodes, Follower(plan, measure).run().constants)
        first = {
            name: _path(nodes, name)
            for name, (origin, _) in plan.chains.items()
            if isinstance(nodes[origin].operation, Input)
        }
        sums = tuple(
            name for name in plan.order if isinstance(nodes[name].operation, Sum) and name not in plan.residuals
        )
        joined = {node.name: _places(node, nodes) for node in nodes.values() if _is_concatenation(node)}
        return cls(nodes, output, evaluation, constants, first, tuple(bent), tuple(cut), sums, joined)

    def centre(self, x: Tensor) -> "Centre":
        """Everything about the inputs (samples, *shape) around which minorants are made."""
        kept = {self.output, *(name for place in self.bent for name in self.nodes[place].inputs)}
        course = self.evaluation.course(x, kept)
        slopes = {}
        windows = {}
        for name in self.bent:
            operation, z = self.nodes[name].operation, course.values[self.nodes[name].inputs[0]]
            assert isinstance(operation, Nonlinear)
            if operation.windows is not None:
                windows[name] = Windows.of(operation.windows, z)
            elif operation.slopes is not None:
                slopes[name] = _slope(operation, z)
        return Centre(course, _distances(self.nodes, course), slopes, windows)

    @property
    def entries(self) -> int:
        """Of the slopes of one minorant, and of the values that it goes through."""
        return sum(math.prod(node.shape) for node in self.nodes.values())


@dataclass(frozen=True)
class Windows:
    """Of each window the place of its largest entry in the flattened value, and how far the next one is below it."""

    place: Tensor
    gap: Tensor

    @classmethod
    def of(cls, windows: Callable[[], Tensor], z: Tensor) -> "Windows":
        """At values (samples, *shape)."""
        index, flat = windows(), z.flatten(1)
        read = torch.nn.functional.pad(flat, (0, 1), value=-math.inf)[:, index]
        top = read.topk(min(2, index.shape[1]), dim=2)
        place = index.expand(len(z), -1, -1).gather(2, top.indices[:, :, :1])[:, :, 0]
        if index.shape[1] == 1:
            return cls(place, torch.full_like(top.values[:, :, 0], math.inf))
        gap = top.values[:, :, 0] - top.values[:, :, 1]
        # Not above the exact difference.
        return cls(place, torch.where(torch.isfinite(gap), torch.nextafter(gap, gap.new_zeros(())), math.inf))


@dataclass(frozen=True)
class Centre:
    """Some inputs, all values that they lead to, and how these were rounded.

    Attributes:
        course: values and their rounding.
        distances: of all values from the exact ones.
        slopes: of functions of each entry, and how far they may be off.
        windows: of functions that take the largest entry of each window.
    """

    course: Course
    distances: dict[str, Tensor]
    slopes: dict[str, tuple[Tensor, Tensor]]
    windows: dict[str, Windows]


def _slope(operation: Nonlinear, z: Tensor) -> tuple[Tensor, Tensor]:
    r"""Difference quotients, and how far they are from the slopes.

    |(φ(z + h) - φ(z))/h - φ'(z)| <= ½h·max|φ''|, and both values may be rounded. Where nothing is known of φ'' the
    quotient is only where a search begins.
    """
    assert operation.compute is not None
    there = z + _STEP
    step = there - z  # exact, for they are near each other; 0 where z is so large that it did not move
    (before, one), (behind, two) = operation.compute(z), operation.compute(there)
    has_moved = step > 0
    quotient = torch.where(has_moved, (behind - before) / step, 0.0)
    if not isinstance(operation.local, Curvature):
        return quotient, torch.zeros_like(quotient)
    bend = max(abs(operation.local.least), abs(operation.local.most))
    rounded = (one + two).reshape(-1, *[1] * (z.dim() - 1)) + gamma(4) * (before.abs() + behind.abs())
    off = step * bend + 2 * rounded / step + gamma(4) * quotient.abs()  # twice the first, for its own rounding
    return quotient, torch.where(has_moved, off, math.inf)


def _is_function(node: Node) -> bool:
    return isinstance(node.operation, Nonlinear) or (isinstance(node.operation, Joint) and not _is_concatenation(node))


def _is_bent(node: Node) -> bool:
    operation = node.operation
    return isinstance(operation, Nonlinear) and (operation.slopes is not None or operation.windows is not None)


def _is_concatenation(node: Node) -> bool:
    return isinstance(node.operation, Joint) and node.operation.name == "concatenate"


def _places(node: Node, nodes: dict[str, Node]) -> Tensor:
    """For each entry of values side by side its place among those of all parts in a row."""
    assert isinstance(node.operation, Joint)
    parts, first = [], 0
    for name in node.inputs:
        shape = nodes[name].shape
        parts.append(torch.arange(first, first + math.prod(shape)).reshape(1, *shape))
        first += math.prod(shape)
    return node.operation.select(parts).flatten()


def _path(nodes: dict[str, Node], name: str) -> list[LinearMap]:
    """The linear maps from the input to a value."""
    found: list[LinearMap] = []
    node = nodes[name]
    while isinstance(node.operation, LinearMap):
        found.append(node.operation)
        node = nodes[node.inputs[0]]
    return found[::-1]


def _constants(nodes: dict[str, Node], known: dict[str, float]) -> dict[str, float]:
    """Also of the values between those that are known."""
    found: dict[str, float] = {}
    for node in nodes.values():
        parts = [up(found[name] * stretch(node)) for name in node.inputs]
        found[node.name] = known.get(node.name, up(math.fsum(parts)))
    return found


def _distances(nodes: dict[str, Node], course: Course) -> dict[str, Tensor]:
    """The same for the distances of computed values from exact ones."""
    found: dict[str, Tensor] = {}
    for node in nodes.values():
        if node.name in course.distances:
            found[node.name] = course.distances[node.name]
            continue
        total = course.local[node.name]
        for name in node.inputs:
            total = next_up(total + next_up(found[name] * stretch(node)))
        found[node.name] = total
    return found
