r"""A graph as steps that can be undone, from its output back to its input, each with the constant of its inverse.

* A linear map with as many outputs as inputs and smallest singular value s > 0: 1/s.
* A function of each entry whose slopes are at least s > 0, or at most -s: 1/s. It goes from -∞ to ∞, so it is onto.
* A sum Au + h(u), A such a linear map of a value u that everything else in the sum comes from, and h with a constant
  L < s: y = Au + h(u) is the fixed point equation u = A⁻¹(y - h(u)), whose right side contracts by L/s. So it has one
  solution for each y, and ‖y - y'‖ >= (s - L)‖u - u'‖: 1/(s - L). For an invertible residual block, 1/(1 - L).

Constants of h are upper bounds, as everywhere; those of what is undone have to be bounds from below, so a graph without
shapes, whose factors stand for the largest of many, has fewer such steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.certification.network import constant_of
from gramcert.certified.lanczos import conjugate_gradients
from gramcert.certified.smallest import smallest_singular_value
from gramcert.geometry.convolution import Convolution
from gramcert.operators.composition import Stage, composed
from gramcert.operators.evaluation import run_node
from gramcert.operators.graph import Graph, Input, Layer, Node, Nonlinear, Sum
from gramcert.operators.linear import LinearMap, Move, Scale
from gramcert.operators.matrices import AxisMatrix, Convolve
from gramcert.operators.measurement import NormOfLayer
from gramcert.operators.network import Network
from gramcert.rounding import down, product_down, reciprocal_up

# Tolerances of smallest singular values, and where they may be 1.
COARSE, FINE, NEAR_ONE = 1e-3, 1e-6, 5e-3

# Halvings of an interval that leave nothing of it in float64.
HALVINGS = 120

# Steps of conjugate gradients for a linear system, how often what is left is solved for again, and the relative change
# of a fixed point that is nothing but rounding.
SOLVING_STEPS, CORRECTIONS, STANDING = 500, 6, 1e-15

# Steps of an iteration: enough for blocks that contract by 0.99, and what is left is in the error.
MOST_STEPS = 5000


UNEQUAL = "it has not as many outputs as inputs, so that it is not invertible"


class NotInvertible(TypeError):  # noqa: N818 - it names what the caller gave, not a failure of the program
    """A model that is not known to be invertible, for the reason in the message."""


@dataclass(frozen=True)
class LinearStep:
    """Linear maps one after the other, with what is added on the way.

    Attributes:
        nodes: of the graph, from the first on.
        maps: the same without what is added, put together to ones with as many outputs as inputs.
        smallest: a lower bound of the product of their smallest singular values.
        sign: with which a sum has it.
    """

    nodes: tuple[Node, ...]
    maps: tuple[LinearMap, ...]
    smallest: float
    sign: int = 1

    @property
    def inverse(self) -> float:
        """The constant of its inverse."""
        return reciprocal_up(self.smallest)

    def undo(self, y: Tensor) -> Tensor:
        """About what it makes y of."""
        if not self.maps:
            return self.sign * y - self._added(y.shape)
        y = self.sign * y - self._added((len(y), *self.maps[0].source))
        for each in reversed(self.maps):
            y = _solved(each, y)
        return y

    def _added(self, shape: Sequence[int]) -> Tensor:
        """What it makes of zeros."""
        value = torch.zeros(1, *shape[1:], dtype=torch.float64)
        for node in self.nodes:
            value = run_node(node, [value])[0]
        return value


@dataclass(frozen=True)
class EntryStep:
    """A function of each entry with slopes between these, both of one sign."""

    node: Node
    slopes: tuple[float, float]

    @property
    def inverse(self) -> float:
        """The constant of its inverse."""
        return reciprocal_up(min(map(abs, self.slopes)))

    def undo(self, y: Tensor) -> Tensor:
        """By halving the intervals that the slopes give."""
        zero = torch.zeros_like(y)
        ends = [(y - run_node(self.node, [zero])[0]) / slope for slope in self.slopes]
        low, high = torch.minimum(*ends), torch.maximum(*ends)
        for _ in range(HALVINGS):
            middle = low + (high - low) / 2
            is_above = (run_node(self.node, [middle])[0] > y) == (self.slopes[0] > 0)
            low, high = torch.where(is_above, low, middle), torch.where(is_above, middle, high)
        return low + (high - low) / 2


@dataclass(frozen=True)
class ResidualStep:
    """Au + h(u), with the constant of h."""

    linear: LinearStep
    other: Graph
    other_constant: float

    @property
    def inverse(self) -> float:
        """The constant of its inverse."""
        return reciprocal_up(down(self.linear.smallest - self.other_constant))

    @property
    def rate(self) -> float:
        """By how much the iteration contracts at least."""
        return self.other_constant / self.linear.smallest

    def undo(self, y: Tensor) -> Tensor:
        """By iteration until it stands still, or has had its time: the error is certified afterwards in any case."""
        (name,) = self.other.outputs.values()
        u = self.linear.undo(y)
        for _ in range(self.most_steps):
            values: dict[str, Tensor] = {}
            for node in self.other.nodes.values():
                values[node.name] = run_node(node, [values[each] for each in node.inputs])[0] if node.inputs else u
            new = self.linear.undo(y - values[name])
            change, u = float((new - u).abs().max()), new
            if change <= STANDING * float(u.abs().max()):
                break
        return u

    @property
    def most_steps(self) -> int:
        """Until the first error has become as small as rounding, rate^steps <= 2^-60; of slow ones not so many."""
        if not 0 < self.rate < 1:
            return 2 if self.rate <= 0 else MOST_STEPS
        return min(MOST_STEPS, 2 + math.ceil(60 * math.log(2) / -math.log(self.rate)))


Step = LinearStep | EntryStep | ResidualStep


def steps_back(call: str, graph: Graph) -> list[Step]:
    """The steps from the only output back to the input; an error where one of them is not known to be invertible."""
    if len(graph.outputs) != 1:
        raise NotInvertible(f"{call}: expected one output that depends on the input, got {len(graph.outputs)}")
    graph = graph.needed()
    dominators = _dominators(graph)
    found: list[Step] = []
    node = graph.nodes[next(iter(graph.outputs.values()))]
    while not isinstance(node.operation, Input):
        step: Step
        origin = node.inputs[0]
        if isinstance(node.operation, Sum):
            step, origin = _residual(call, graph, node, dominators)
        elif isinstance(node.operation, LinearMap):
            found_there = _linear_step(call, graph, node, None)
            assert found_there is not None
            step, origin = found_there
        elif isinstance(node.operation, Layer):
            step = _layer_step(call, node)
        elif isinstance(node.operation, Nonlinear):
            step = _entrywise(call, node)
        else:
            reason = getattr(node.operation, "reason", "") or f"{node.source} joins several values"
            raise NotInvertible(f"{call}: {node.label}: {reason}")
        found.append(step)
        node = graph.nodes[origin]
    return found


def _dominators(graph: Graph) -> dict[str, set[str]]:
    """For each value those that every way from the input to it goes through, itself included."""
    found: dict[str, set[str]] = {}
    for name, node in graph.nodes.items():
        before = [found[each] for each in node.inputs]
        found[name] = (set.intersection(*before) if before else set()) | {name}
    return found


def _entrywise(call: str, node: Node) -> EntryStep:
    operation = node.operation
    assert isinstance(operation, Nonlinear)
    if operation.slopes is None:
        raise NotInvertible(f"{call}: {node.label}: {operation.name} is not known to be invertible")
    low, high = operation.slopes
    if low <= 0 <= high:
        raise NotInvertible(
            f"{call}: {node.label}: the slopes of {operation.name} are between {low:.6g} and {high:.6g}, so that it "
            f"may lose what it is given"
        )
    return EntryStep(node, (low, high))


def _residual(call: str, graph: Graph, node: Node, dominators: dict[str, set[str]]) -> tuple[ResidualStep, str]:
    """A sum with a linear term from the last value that all terms come from, and the others small enough."""
    assert isinstance(node.operation, Sum)
    common = set.intersection(*(dominators[each] for each in node.inputs))
    origin = [name for name in graph.nodes if name in common][-1]
    reasons = []
    for place, (name, sign) in enumerate(_terms(node)):
        try:
            found = _linear_step(call, graph, graph.nodes[name], origin, sign)
        except NotInvertible as error:  # another term may do
            reasons.append(str(error).removeprefix(f"{call}: "))
            continue
        if found is None:
            continue
        linear = found[0]
        others = [term for other, term in enumerate(_terms(node)) if other != place]
        branch = _between(graph, origin, node, others, dominators)
        network = Network(call, branch)
        network.require_bounded(f"{call}({node.label})")
        constant = network.follow().upper
        if branch.nodes[origin].shape:
            constant = constant_of(network, constant)
        if constant < linear.smallest:
            return ResidualStep(linear, branch, constant), origin
        by = f"smallest singular value of the linear one, {linear.smallest:.6g}"
        reasons.append(f"the constant of the other terms, {constant:.6g}, is not below the {by}")
    reason = reasons[0] if reasons else "no term is a linear map of what all terms come from"
    raise NotInvertible(f"{call}: {node.label}: this sum is not known to be invertible: {reason}")


def _terms(node: Node) -> list[tuple[str, int]]:
    assert isinstance(node.operation, Sum)
    return list(zip(node.inputs, node.operation.signs, strict=True))


def _between(
    graph: Graph, origin: str, node: Node, terms: list[tuple[str, int]], dominators: dict[str, set[str]]
) -> Graph:
    """The sum of some terms as a graph of its own, whose input is the value that they come from."""
    start = graph.nodes[origin]
    nodes = {origin: Node(origin, start.label, "input", Input(), (), start.shape, start.digest)}
    nodes |= {name: each for name, each in graph.nodes.items() if name != origin and origin in dominators[name]}
    names, signs = tuple(name for name, _ in terms), tuple(sign for _, sign in terms)
    nodes[node.name] = Node(node.name, node.label, node.source, Sum(signs), names, node.shape, node.digest)
    return Graph(nodes, {"others": node.name}, [], graph.types).needed()


def _linear_step(
    call: str, graph: Graph, node: Node, origin: str | None, sign: int = 1
) -> tuple[LinearStep, str] | None:
    """The linear maps that lead to a value, from another one or from where they begin, and that value.

    ``None`` if they do not begin there.
    """
    nodes: list[Node] = []
    while isinstance(node.operation, LinearMap) and node.name != origin:
        if not node.shape:  # at every size, where factors stand for the largest of many
            raise NotInvertible(f"{call}: {node.label}: its factors are only known at one input size; give input_shape")
        nodes.insert(0, node)
        node = graph.nodes[node.inputs[0]]
    if origin is not None and node.name != origin:
        return None
    stages = [Stage(each.operation, (each.name,)) for each in nodes if isinstance(each.operation, LinearMap)]
    if not all(stage.map.is_isometry for stage in stages):
        stages = composed(stages)
    smallest = 1.0
    for stage in stages:
        named = f"{call}: {' + '.join(graph.nodes[name].label for name in stage.nodes)}"
        smallest = product_down(smallest, _smallest_of_map(named, stage.map))
    return LinearStep(tuple(nodes), tuple(stage.map for stage in stages), smallest, sign), node.name


def _layer_step(call: str, node: Node) -> LinearStep:
    """A layer whose values have no shape."""
    assert isinstance(node.operation, Layer)
    measurement, name = node.operation.measurement, f"{call}: {node.label}"
    if not isinstance(measurement, NormOfLayer):
        raise NotInvertible(f"{name}: {node.source} is not known to be invertible")
    if not _keeps_sizes(measurement.layer, measurement.input_size):
        raise NotInvertible(f"{name}: {UNEQUAL}")
    return LinearStep((node,), (), _positive(name, _least(measurement.layer, measurement.input_size)))


def _smallest_of_map(name: str, linear: LinearMap) -> float:
    """A lower bound, above 0, of the smallest singular value of a linear map with as many outputs as inputs."""
    if math.prod(linear.source) != math.prod(linear.target):
        raise NotInvertible(f"{name}: {UNEQUAL}")
    if isinstance(linear, Move):
        found = 1.0 if linear.is_isometry else 0.0
    elif isinstance(linear, Scale):
        found = float(linear.factors.abs().min())
    elif isinstance(linear, Convolve):
        found = _least(linear.layer, linear.input_size)
    elif isinstance(linear, AxisMatrix):
        found = _least(linear.matrix, None)
    else:
        raise NotInvertible(f"{name}: {linear.kind} is not known to be invertible")
    return _positive(name, down(found - linear.error) if linear.error else found)


def _positive(name: str, smallest: float) -> float:
    if not smallest > 0:
        raise NotInvertible(f"{name}: its smallest singular value may be 0, so that it is not known to be invertible")
    return smallest


def _keeps_sizes(layer: Convolution, size: tuple[int, ...] | None) -> bool:
    """Whether a layer has as many outputs as inputs, at one size or at every one."""
    if size is not None:
        return layer.in_channels * math.prod(size) == layer.out_channels * math.prod(layer.output_size(size))
    spans = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    return layer.in_channels == layer.out_channels and all(
        stride == 1 and before + after == span + extra
        for stride, (before, after), span, extra in zip(
            layer.stride, layer.padding, spans, layer.output_padding, strict=True
        )
    )


def _least(layer: Convolution | Tensor, size: tuple[int, ...] | None) -> float:
    """The lower bound, and a much better one where the value may be 1."""
    found = smallest_singular_value(layer, size, COARSE)
    if abs(found.upper - 1) > NEAR_ONE:
        return found.lower
    return max(found.lower, smallest_singular_value(layer, size, FINE).lower)


def _solved(operation: LinearMap, y: Tensor) -> Tensor:
    """About the value that a linear map makes y of."""
    if isinstance(operation, Scale):
        return y / operation.factors
    if isinstance(operation, Move):
        return operation.adjoint(y)
    if isinstance(operation, AxisMatrix):
        moved = y.movedim(1 + operation.axis, -1)
        solved: Tensor = torch.linalg.solve(operation.matrix, moved[..., None])[..., 0]
        return solved.movedim(-1, 1 + operation.axis)
    solution = torch.zeros(len(y), *operation.source, dtype=y.dtype)
    for _ in range(CORRECTIONS):
        right = operation.adjoint(y - operation.apply(solution))
        if not bool(right.any()):
            break
        solution = solution + conjugate_gradients(lambda x: operation.adjoint(operation.apply(x)), right, SOLVING_STEPS)
    return solution
