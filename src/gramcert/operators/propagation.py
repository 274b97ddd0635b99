r"""Constants along the graph: what has to be measured, and what follows from the measurements.

For each value, L is a certified constant from the input of the model to it. A value that is a chain of linear maps of
another has L(value) <= L(other)·Π‖stage‖, the stages put together by :mod:`~gramcert.operators.composition`; a sum has
ΣL by the triangle inequality; values side by side, or their maxima, √ΣL²; and x - Vᵀφ(Wx + b) has L(x) times the
constant of its theorem, for which W and V need not be measured.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from gramcert.geometry.convolution import Convolution
from gramcert.operators.composition import Stage, composed, is_identity
from gramcert.operators.graph import CONSEQUENCE, Graph, Input, Joint, Layer, Node, Nonlinear, Sum, Unbounded
from gramcert.operators.linear import LinearMap, Move
from gramcert.operators.matrices import AxisMatrix, Convolve
from gramcert.operators.measurement import Measured, Measurement, Norm, ResidualLayer
from gramcert.operators.outputs import shared_origins, together_up
from gramcert.rounding import length_up, product_up, sum_up, up

Measure = Callable[[Measurement], Measured]

# Where the logarithms of all steps together are less than this, all of them are 1 but for rounding.
NO_SHARES = 1e-6

# Bounds of sizes below this may be about zeros, rounded up: only a measurement tells.
MAYBE_ZERO = 1e-100


@dataclass(frozen=True)
class Row:
    """One step from the input to the output.

    Attributes:
        name: the nodes of the model that it is about, joined by " + " where several were measured as one.
        kind: such as ``convolution``, ``matrix``, ``relu``, ``sum``, ``unbounded``.
        geometry: for people: ``3→16, 3×3, stride 1, padding 1, zeros, at 32×32``; empty where there is none.
        lower: certified lower bound of the norm of a linear map; ``None`` for anything else.
        upper: certified constant of the step; ``inf`` if there is none.
        constant: certified constant from the input of the model to the output of this step.
        share: |log upper| against the sum of these of all steps on the path that dominates L, negative where the step
            makes L smaller; ``None`` off this path, and where all of its steps are 1 but for rounding. Without their
            signs the shares add up to 1, however near to 1 L itself is.
        seconds: time spent on it; 0 for what is known in closed form.
        method: how ``upper`` was proved.
        notes: such as why a tolerance was missed.
        cached: whether the measurement came from the cache.
    """

    name: str
    kind: str
    geometry: str
    lower: float | None
    upper: float
    constant: float
    share: float | None
    seconds: float
    method: str
    notes: tuple[str, ...] = ()
    cached: bool = False

    @property
    def relative_width(self) -> float | None:
        """(upper - lower)/upper of a linear map."""
        if self.lower is None or not math.isfinite(self.upper):
            return None
        return (self.upper - self.lower) / self.upper if self.upper else 0.0


@dataclass(frozen=True)
class Step:
    """How one value follows from another by one measurement."""

    measurement: Measurement
    nodes: tuple[str, ...]


@dataclass
class Plan:
    """What has to be known of each value that is needed, in the order of the graph.

    Attributes:
        chains: for a value, where it comes from and the steps from there.
        residuals: sums that the theorem of the residual layer is about: x, and the step.
        is_measured: whether anything is to be measured; an unbounded constant can do without.
    """

    graph: Graph
    chains: dict[str, tuple[str, list[Step]]] = field(default_factory=dict)
    residuals: dict[str, tuple[str, Step]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    is_measured: bool = True
    _known: dict[tuple[str, ...], Step] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph) -> "Plan":
        """From the outputs back to the input, so that nothing is measured in vain."""
        plan = cls(graph)
        wanted, known = [*graph.outputs.values(), *(group.origin for group in shared_origins(graph))], set()
        while wanted:
            name = wanted.pop()
            if name not in known:
                known.add(name)
                wanted += plan._require(name)
        plan.order = [name for name in graph.nodes if name in known]
        return plan

    @property
    def steps(self) -> list[Step]:
        """All of them, each once, in the order of the graph."""
        found: list[Step] = []
        for name in self.order if self.is_measured else ():
            if name in self.chains:
                found += self.chains[name][1]
            elif name in self.residuals:
                found.append(self.residuals[name][1])
        return list(dict.fromkeys(found))

    @functools.cached_property
    def lost(self) -> set[str]:
        """Values without a constant whatever the measurements are: what is unbounded, but for multiples by 0."""
        found = set[str]()
        for node in self.graph.nodes.values():
            operation = node.operation
            is_lost = isinstance(operation, Unbounded) or not found.isdisjoint(node.inputs)
            if is_lost and isinstance(operation, LinearMap):
                is_lost = operation.size > MAYBE_ZERO
            if is_lost and isinstance(operation, Nonlinear):
                is_lost = operation.constant != 0
            if is_lost:
                found.add(node.name)
        return found

    @property
    def is_unbounded(self) -> bool:
        """Whether some output has no constant whatever the measurements are."""
        return not self.lost.isdisjoint(self.graph.outputs.values())

    def _require(self, name: str) -> list[str]:
        """Plan one value, and say which others it needs."""
        node = self.graph.nodes[name]
        if isinstance(node.operation, LinearMap):
            origin, stages = self._chain(node)
            self.chains[name] = origin.name, [self._step(stage) for stage in composed(stages)]
            return [origin.name]
        if isinstance(node.operation, Layer):
            self.chains[name] = node.inputs[0], [Step(node.operation.measurement, (name,))]
        if isinstance(node.operation, Sum):
            found = self._residual(node)
            if found is not None:
                self.residuals[name] = found
                return [found[0]]
        return list(node.inputs)

    def _step(self, stage: Stage) -> Step:
        """One for the same nodes, which several values may come by."""
        return self._known.setdefault(stage.nodes, Step(Norm(stage.map), stage.nodes))

    def _chain(self, node: Node, stop: str | None = None) -> tuple[Node, list[Stage]]:
        """The linear maps that lead to a value, and the value that they start from."""
        stages = []
        while isinstance(node.operation, LinearMap) and node.name != stop:
            stages.append(Stage(node.operation, (node.name,)))
            node = self.graph.nodes[node.inputs[0]]
        return node, stages[::-1]

    def _residual(self, node: Node) -> tuple[str, Step] | None:
        """Recognise x ± Vᵀφ(Wx + b)."""
        assert isinstance(node.operation, Sum)
        if len(node.inputs) != 2:
            return None
        for position in (0, 1):
            x, branch = node.inputs[position], node.inputs[1 - position]
            if node.operation.signs[position] != 1:
                continue
            found = self._theorem(x, self.graph.nodes[branch], node.operation.signs[1 - position])
            if found is not None:
                measurement, nodes = found
                return x, Step(measurement, (*nodes, node.name))
        return None

    def _theorem(self, x: str, branch: Node, sign: int) -> tuple[ResidualLayer, tuple[str, ...]] | None:
        start, maps = self._chain(branch, x)
        if start.name == x:  # φ is the identity
            stages = [stage for stage in maps if not is_identity(stage.map)]
            found = _residual_layer(stages[0].map, stages[1].map, sign) if len(stages) == 2 else None
            return None if found is None or not found.fits else (found, tuple(stage.nodes[0] for stage in stages))
        phi, outer = self._chain(branch)
        if not isinstance(phi.operation, Nonlinear) or phi.operation.slopes is None:
            return None
        if phi.operation.slopes[0] < 0 or phi.operation.slopes[1] > 1:
            return None
        origin, inner = self._chain(self.graph.nodes[phi.inputs[0]], x)
        if origin.name != x:
            return None
        inner, outer = (composed(stages) for stages in (inner, outer))
        if len(inner) != 1 or len(outer) != 1:
            return None
        measurement = _residual_layer(inner[0].map, outer[0].map, sign)
        if measurement is None or not measurement.fits:
            return None
        return measurement, (*inner[0].nodes, phi.name, *outer[0].nodes)


def _residual_layer(inner: LinearMap, outer: LinearMap, sign: int) -> ResidualLayer | None:
    """W and V as one layer, if V has the geometry of Wᵀ and no rounding is hidden in either."""
    if inner.error or outer.error or inner.source != outer.target:
        return None
    if isinstance(inner, AxisMatrix) and isinstance(outer, AxisMatrix) and inner.axis == outer.axis:
        layer = Convolution(inner.matrix[:, :, None])
        return ResidualLayer(layer, -sign * outer.matrix.T[:, :, None], None)
    if not isinstance(inner, Convolve) or not isinstance(outer, Convolve):
        return None
    one, two = inner.layer, outer.layer
    geometry = (one.stride, one.dilation, one.groups, one.padding, one.kernel.shape)
    same = geometry == (two.stride, two.dilation, two.groups, two.padding, two.kernel.shape)
    plain = set(one.stride) | set(one.dilation) | {one.groups} == {1} and one.padding_mode == "zeros"
    adjoint = two.transposed and not one.transposed and not any(two.output_padding)
    if not (same and plain and adjoint):
        return None
    return ResidualLayer(one, -sign * two.kernel, inner.input_size)


def known_norms(plan: Plan, measure: Measure) -> dict[str, float]:
    """Measured norms of linear maps by their nodes, where nothing but views was measured with them."""
    found = {}
    for step in plan.steps:
        *others, last = (plan.graph.nodes[name].operation for name in step.nodes)
        views = all(isinstance(other, Move) and other.is_view for other in others)
        if views and isinstance(step.measurement, Norm) and isinstance(last, LinearMap):
            found[step.nodes[-1]] = measure(step.measurement).upper
    return found


@dataclass
class Followed:
    """Constants of all values that were needed, and the rows that they are made of."""

    constants: dict[str, float]
    rows: list[Row]
    reasons: list[str]
    trivial: dict[str, int]
    upper: float
    outputs: dict[str, float]


class Follower:
    """Goes through a plan with the measurements."""

    def __init__(self, plan: Plan, measure: Measure) -> None:
        self.plan, self.graph, self.measure = plan, plan.graph, measure
        self.constants: dict[str, float] = {}
        self.rows: list[Row] = []
        self.reasons: list[str] = []
        self.trivial: dict[str, int] = {}
        self._before: dict[str, tuple[str, list[tuple[int, float]]]] = {}  # on the path that dominates a value

    def run(self) -> Followed:
        """All values in the order of the graph, then the outputs together."""
        if not self.plan.is_measured:
            return self._verdict()
        for name in self.plan.order:
            self._follow(self.graph.nodes[name])
        if not self.graph.outputs:  # nothing depends on the input
            return Followed({}, [], [], {}, 0.0, dict.fromkeys(self.graph.constant_outputs, 0.0))
        outputs = {name: self.constants[value] for name, value in self.graph.outputs.items()}
        upper = together_up(self.graph, self.constants)
        largest = max(self.graph.outputs.values(), key=lambda value: self.constants[value])
        factors = self._path(largest)
        if len(outputs) > 1:
            ratio = _ratio(upper, self.constants[largest])
            self._row("all outputs", "joint", "", ratio, upper, method="root of the sum of squares")
            factors.append((len(self.rows) - 1, ratio))
        self._share(factors, upper)
        # What has no constant may be multiplied by 0 later.
        reasons = self.reasons if math.isinf(upper) else []
        return Followed(self.constants, self.rows, reasons, self.trivial, upper, outputs)

    def _verdict(self) -> Followed:
        """What is known without measurements: which outputs are unbounded, and why."""
        for name in self.plan.order:
            node = self.graph.nodes[name]
            if isinstance(node.operation, Unbounded):
                self._unbounded(node, node.operation)
        outputs = {name: math.inf for name, value in self.graph.outputs.items() if value in self.plan.lost}
        reasons = self.reasons or [f"{name}: nothing is known of it" for name in outputs]
        return Followed({}, self.rows, reasons, {}, math.inf, outputs)

    def _follow(self, node: Node) -> None:
        operation, name = node.operation, node.name
        if isinstance(operation, Input):
            self.constants[name] = 1.0
        elif name in self.plan.residuals:
            x, step = self.plan.residuals[name]
            self._measured(name, x, [step])
        elif name in self.plan.chains:
            self._measured(name, *self.plan.chains[name])
        elif isinstance(operation, Nonlinear):
            self._nonlinear(node, operation)
        elif isinstance(operation, Unbounded):
            self._unbounded(node, operation)
            self.constants[name] = math.inf
        elif isinstance(operation, (Sum, Joint)):
            self._joined(node)

    def _unbounded(self, node: Node, operation: Unbounded) -> None:
        if operation.name == CONSEQUENCE:
            return
        repeated = operation.reason.startswith(f"{node.label}:")
        self.reasons.append(operation.reason if repeated else f"{node.label or node.name}: {operation.reason}")
        self._row(node.label, "unbounded", "", math.inf, math.inf, method=operation.reason)

    def _measured(self, name: str, origin: str, steps: list[Step]) -> None:
        constant, factors = self.constants[origin], []
        for step in steps:
            found = self.measure(step.measurement)
            if isinstance(step.measurement, Norm) and step.measurement.map.is_part:
                constant = product_up(constant, found.upper)  # 0 where nothing is taken
                self._count(step.measurement.kind)
                continue
            if not found.upper < math.inf and math.isfinite(constant):
                self.reasons.append(f"{self.label(step.nodes)}: its numbers are too large for float64")
            constant = product_up(constant, found.upper if found.upper < math.inf else math.inf)
            if math.isinf(constant) and not self.reasons:
                self.reasons.append(f"{self.label(step.nodes)}: the constant is too large for float64")
            self._row(
                self.label(step.nodes),
                step.measurement.kind,
                step.measurement.geometry,
                found.upper,
                constant,
                lower=found.lower,
                seconds=found.seconds,
                method=found.method,
                notes=found.notes,
                cached=found.cached,
            )
            factors.append((len(self.rows) - 1, found.upper))
        self.constants[name], self._before[name] = constant, (origin, factors)

    def _nonlinear(self, node: Node, operation: Nonlinear) -> None:
        before = self.constants[node.inputs[0]]
        constant = product_up(before, operation.constant)
        factors = []
        if operation.constant == 1:
            self._count(operation.name)
        else:
            self._row(node.label, operation.name, "", operation.constant, constant, method=operation.why)
            factors.append((len(self.rows) - 1, operation.constant))
        self.constants[node.name], self._before[node.name] = constant, (node.inputs[0], factors)

    def _joined(self, node: Node) -> None:
        parts = [self.constants[value] for value in node.inputs]
        if isinstance(node.operation, Sum):
            constant, name, note = sum_up(parts), "sum", " + ".join(_short(parts))
        else:
            assert isinstance(node.operation, Joint)
            constant, name = length_up(parts), node.operation.name
            note = f"√({' + '.join(f'{part}²' for part in _short(parts))})"
        largest = max(node.inputs, key=lambda value: self.constants[value])
        ratio = _ratio(constant, self.constants[largest])
        method = "triangle inequality" if isinstance(node.operation, Sum) else "root of the sum of squares"
        self._row(node.label, name, note, ratio, constant, method=method)
        self.constants[node.name], self._before[node.name] = constant, (largest, [(len(self.rows) - 1, ratio)])

    def _path(self, name: str) -> list[tuple[int, float]]:
        """The rows of the path that dominates a value, and their factors."""
        factors: list[tuple[int, float]] = []
        while name in self._before:
            name, rows = self._before[name]
            factors += rows
        return factors

    def _share(self, factors: list[tuple[int, float]], upper: float) -> None:
        """Each row's part of all stretching and shrinking, positive where it makes L larger."""
        if not 0 < upper < math.inf or any(factor <= 0 for _, factor in factors):
            return
        logs = [(row, math.log(factor)) for row, factor in factors]
        total = sum(abs(log) for _, log in logs)
        if total <= NO_SHARES:
            return
        for row, log in logs:
            self.rows[row] = dataclasses.replace(self.rows[row], share=log / total)

    def label(self, nodes: tuple[str, ...]) -> str:
        """Names for people, each once, without those of reshaping; of many only the module that they are in."""
        found = [self.graph.nodes[name] for name in nodes]
        shown = [node for node in found if not (isinstance(node.operation, LinearMap) and node.operation.is_isometry)]
        names = list(dict.fromkeys(node.label for node in shown or found))
        parents = {name.rpartition(".")[0] for name in names if "." in name}
        if len(names) > 2 and len(parents) == 1:
            return parents.pop()
        return " + ".join(names)

    def _count(self, kind: str) -> None:
        self.trivial[kind] = self.trivial.get(kind, 0) + 1

    def _row(
        self,
        name: str,
        kind: str,
        geometry: str,
        upper: float,
        constant: float,
        *,
        lower: float | None = None,
        seconds: float = 0.0,
        method: str = "",
        notes: tuple[str, ...] = (),
        cached: bool = False,
    ) -> None:
        self.rows.append(Row(name, kind, geometry, lower, upper, constant, None, seconds, method, tuple(notes), cached))


def _ratio(constant: float, largest: float) -> float:
    if math.isinf(constant):
        return math.inf
    return up(constant / largest) if largest > 0 and constant != largest else 1.0


def _short(values: list[float]) -> list[str]:
    return [f"{value:.4g}" for value in values]
