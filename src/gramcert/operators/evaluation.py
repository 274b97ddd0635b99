r"""A graph evaluated in float64, with a bound of how far the computed values are from the exact ones.

The exact network is a function of real numbers with the weights as stored. Let x̂ be what was computed for a value,
e >= ‖x̂ - x‖ its distance from the exact one, f what leads from it to another value, with the certified constant L, and
δ >= ‖f̂(x̂) - f(x̂)‖ what rounding does on the way. Then

    ‖f̂(x̂) - f(x)‖ <= δ + L·e.

Where L ≈ 1, errors add up and are never amplified, so this simple recursion is tight enough: 1e-12 or so where margins
are 0.1. On the way from one value to the next the roundings of several maps pass through those behind them, which are
bounded there by the norms of their absolute values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gramcert.operators.graph import Graph, Input, Joint, Node, Nonlinear, Sum, Unbounded
from gramcert.operators.linear import LinearMap, Shift
from gramcert.operators.propagation import Measure, Plan
from gramcert.operators.rounded import Rounded, exactly
from gramcert.rounding import next_up, product_up, up


class NotEvaluatedError(TypeError):
    """A value that cannot be computed here, for the reason in the message."""


@dataclass(frozen=True)
class Course:
    """A batch on its way through a network.

    Attributes:
        values: those that were asked for.
        local: what rounding did in the last operation to each value, for each sample.
        between: the same since the values at which the step to a value begins.
        distances: of these from the exact ones.
    """

    values: dict[str, Tensor]
    local: dict[str, Tensor]
    between: dict[str, Tensor]
    distances: dict[str, Tensor]


class Evaluation:
    """A network made ready for inputs of one shape."""

    def __init__(self, plan: Plan, measure: Measure) -> None:
        self.nodes, self.order = plan.graph.nodes, plan.order
        # Where the steps to each value begin, and the constant of each of them.
        self.steps: dict[str, tuple[tuple[str, ...], float]] = {}
        for name in plan.order:
            node = self.nodes[name]
            measured = plan.chains.get(name)
            if name in plan.residuals:
                origin, step = plan.residuals[name]
                measured = origin, [step]
            constant = node.operation.constant if isinstance(node.operation, Nonlinear) else 1.0
            for step in measured[1] if measured else ():
                constant = product_up(constant, measure(step.measurement).upper)
            self.steps[name] = (measured[0],) if measured else node.inputs, constant
        for node in self.nodes.values():
            _require_known(node)

    def __call__(self, x: Tensor, name: str) -> Rounded:
        """One output for a batch (samples, *shape) of inputs, and for each sample its distance from the exact one."""
        course = self.course(x, {name})
        return course.values[name], course.distances[name]

    def course(self, x: Tensor, kept: set[str]) -> "Course":
        """All that rounding does on the way, and the values that are asked for."""
        values, local = self._values(x, kept)
        between: dict[str, Tensor] = {}
        distances: dict[str, Tensor] = {}
        for place in self.order:
            origins, constant = self.steps[place]
            total = between[place] = self._rounding(self.nodes[place], set(origins), local)
            for origin in origins:
                # Where nothing was lost before, an infinite constant makes nothing of it.
                passed = torch.where(distances[origin] == 0, 0.0, next_up(distances[origin] * constant))
                total = next_up(total + passed)
            distances[place] = total
        return Course(values, local, between, distances)

    def _values(self, x: Tensor, kept: set[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The values that are asked for, and the rounding of the last operation to each value."""
        last_use = {name: node.name for node in self.nodes.values() for name in node.inputs}
        values: dict[str, Tensor] = {}
        local: dict[str, Tensor] = {}
        for node in self.nodes.values():
            inputs = [values[name] for name in node.inputs]
            values[node.name], local[node.name] = run_node(node, inputs) if inputs else exactly(x)
            assert tuple(values[node.name].shape[1:]) == node.shape, node.label
            for name in {*node.inputs} - kept:
                if last_use[name] == node.name:
                    del values[name]
        return values, local

    def _rounding(self, node: Node, origins: set[str], local: dict[str, Tensor]) -> Tensor:
        """What rounding does between the values at which a step begins and its end."""
        total = local[node.name]
        for name in node.inputs:
            if name not in origins:
                before = self._rounding(self.nodes[name], origins, local)
                total = next_up(total + next_up(before * stretch(node)))
        return total


def run_node(node: Node, inputs: list[Tensor]) -> Rounded:
    """What a node makes of batches in float64, and the rounding in it."""
    operation = node.operation
    if isinstance(operation, LinearMap):
        return operation.run(inputs[0])
    if isinstance(operation, Nonlinear):
        assert operation.compute is not None
        return operation.compute(inputs[0])
    if isinstance(operation, Sum):
        return operation.run(inputs)
    assert isinstance(operation, Joint)
    return exactly(operation.select(inputs))


def stretch(node: Node) -> float:
    """By how much an operation may stretch what rounding did before it, without a measurement."""
    if isinstance(node.operation, LinearMap):
        return up(node.operation.size + node.operation.error)
    return node.operation.constant if isinstance(node.operation, Nonlinear) else 1.0


def _require_known(node: Node) -> None:
    operation = node.operation
    if isinstance(operation, Unbounded):
        raise NotEvaluatedError(f"{node.label}: {operation.reason}")
    if isinstance(operation, Shift) and operation.offset is None:
        raise NotEvaluatedError(f"{node.label}: a constant that is added was not kept")
    if isinstance(operation, Nonlinear) and operation.compute is None:
        raise NotEvaluatedError(f"{node.label}: how {operation.name} rounds is not known, so nothing can be certified")
    assert isinstance(operation, (Input, LinearMap, Nonlinear, Sum, Joint))


class Runnable(nn.Module):
    """A graph with one output as a module that computes in float64, for gradients; nothing is said of rounding."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        (self.output,) = graph.outputs.values()
        self.graph = graph.needed()
        for node in self.graph.nodes.values():
            _require_known(node)

    def forward(self, x: Tensor) -> Tensor:
        """Batches (samples, *shape) to those of the output."""
        values: dict[str, Tensor] = {}
        for node in self.graph.nodes.values():
            inputs = [values[name] for name in node.inputs]
            values[node.name] = run_node(node, inputs)[0] if inputs else x.double()[:, None]
        return values[self.output][:, 0].to(x.dtype)
