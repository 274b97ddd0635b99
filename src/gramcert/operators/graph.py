"""The one internal graph: what each node of a model does, whether it came from torch.export or from ONNX."""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gramcert.geometry.padding import PaddingMode, Pairs
from gramcert.operators.elementwise import Local
from gramcert.operators.linear import LinearMap, Move, Scale, Shape, Shift
from gramcert.operators.measurement import Measurement
from gramcert.operators.rounded import Compute, Rounded, exactly, norms, rounding
from gramcert.rounding import next_up

# The name of what is unbounded only because of what it acts on.
CONSEQUENCE = "consequence"

Moving = Callable[[Tensor], Tensor]
PaddingOf = tuple[PaddingMode, Pairs] | None

_ONE = torch.ones((), dtype=torch.float64)

# Entries of a tensor that may be followed place by place, and of constants that may be computed.
MOST_ENTRIES = 2**27


class BadModel(ValueError):  # noqa: N818 - it names what the caller gave, not a failure of the program
    """A model or file that cannot be read, for the reason in the message."""


@dataclass(frozen=True)
class Input:
    """What the model is given.

    Attributes:
        fixed: names of its other inputs, and in words what these were fixed to.
    """

    fixed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Nonlinear:
    """A function of one tensor with a known constant.

    Attributes:
        constant: certified Lipschitz constant on all reals.
        name: such as ``relu``.
        slopes: between which its slopes lie, if it acts on each entry alone.
        why: how the constant is known.
        parameters: numbers that it was made with, by their names in the table of elementwise functions.
        compute: what it does to a batch in float64, with its rounding; ``None`` where that is not known.
        local: what is known near a point of a function of each entry.
        windows: of a function that takes the largest entry of each of some windows: for each of these, in a row, the
            places in the flattened value that it reads, and one beyond the last for nothing.
    """

    constant: float
    name: str
    slopes: tuple[float, float] | None = None
    why: str = "closed form"
    parameters: dict[str, float] = field(default_factory=dict)
    compute: Compute | None = field(default=None, compare=False)
    local: Local = field(default=None, compare=False)
    windows: Callable[[], Tensor] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Sum:
    """The sum of its inputs with signs, shapes equal."""

    signs: tuple[int, ...]

    def run(self, values: list[Tensor]) -> Rounded:
        """Each addition is rounded once, relative to what comes out of it."""
        y = values[0] if self.signs[0] == 1 else -values[0]
        amount = exactly(y)[1]
        for value, sign in zip(values[1:], self.signs[1:], strict=True):
            y = torch.add(y, value, alpha=sign)
            amount = next_up(amount + norms(y))
        return y, rounding(1, amount, y) if len(values) > 1 else amount


@dataclass(frozen=True)
class Joint:
    """Values side by side, or their larger or smaller ones: no further from each other than its inputs together.

    Attributes:
        name: which.
        select: what it does to batches, without rounding.
    """

    name: str
    select: Callable[[list[Tensor]], Tensor] = field(compare=False)


@dataclass(frozen=True)
class Unbounded:
    """Nothing is known of it, or it has no constant, for a reason.

    Attributes:
        reason: for people.
        name: of a known function, such as ``square``, by which patterns find it.
    """

    reason: str
    name: str = ""


@dataclass(frozen=True)
class Layer:
    """A layer whose constant is measured, for values of which no shape is known."""

    measurement: Measurement


Operation = Input | LinearMap | Layer | Nonlinear | Sum | Joint | Unbounded


@dataclass(frozen=True)
class Node:
    """One value of a model.

    Attributes:
        name: unique.
        label: for people.
        source: the operator in the file.
        operation: what it does.
        inputs: names of the nodes it acts on.
        shape: of its value.
        digest: of everything constant that it was made with, biases included.
    """

    name: str
    label: str
    source: str
    operation: Operation
    inputs: tuple[str, ...]
    shape: Shape
    digest: str


@dataclass
class Graph:
    """Nodes in the order of their execution; each name once.

    Attributes:
        nodes: by their names.
        outputs: names of nodes by those of the results.
        constant_outputs: names of results that do not depend on the input.
        types: of values, by the names of their nodes, where they are known.
    """

    nodes: dict[str, Node] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    constant_outputs: list[str] = field(default_factory=list)
    types: dict[str, torch.dtype] = field(default_factory=dict)

    def needed(self) -> "Graph":
        """Without the nodes that no output depends on."""
        wanted = set(self.outputs.values())
        for node in reversed(self.nodes.values()):
            if node.name in wanted:
                wanted.update(node.inputs)
        nodes = {name: node for name, node in self.nodes.items() if name in wanted or isinstance(node.operation, Input)}
        return Graph(nodes, self.outputs, self.constant_outputs, self.types)


@dataclass(frozen=True)
class Variable:
    """A value that depends on the input of the model."""

    name: str
    shape: Shape

    @property
    def dim(self) -> int:
        """Number of axes."""
        return len(self.shape)


def added(node: Node) -> float:
    """What a node adds to a value; NaN where that is not one number."""
    if not isinstance(node.operation, Shift):
        return 0.0
    offset = node.operation.offset
    is_number = offset is not None and offset.numel() == 1 and not node.operation.off
    return float(offset) if is_number and offset is not None else math.nan


class Builder:
    """Appends nodes to a graph. Operations that the file asks for are told by :meth:`at`, for names and digests."""

    def __init__(self) -> None:
        self.graph = Graph()
        self._label, self._source, self._constants = "", "", hashlib.sha256()
        self._moved = 0  # entries of all moves so far

    def at(self, label: str, source: str, constants: Iterable[object]) -> None:
        """The nodes that follow are made for this node of the file, with these constants."""
        self._label, self._source = label, source
        self._constants = hashlib.sha256(source.encode())
        for value in constants:
            self._constants.update(fingerprint(value))

    def input(self, name: str, shape: Shape) -> Variable:
        """What the model is given."""
        self.at(name, "input", [])
        return self._add(Input(), (), shape)

    def linear(self, x: Variable, linear: LinearMap) -> Variable:
        """A linear map of a value, whose shape has to be that of the map."""
        if linear.source != x.shape:
            raise BadModel(f"{self._label}: expected shape {linear.source}, got {x.shape}")
        return self._add(linear, (x,), linear.target)

    def same(self, x: Variable) -> Variable:
        """The value itself, with its own name and digest: dropout in evaluation mode."""
        return self._add(Scale(x.shape, _ONE), (x,), x.shape)

    def shifted(self, x: Variable, offset: Tensor | None, off: float = 0.0) -> Variable:
        """Plus a constant that broadcasts to its shape; ``off`` is how far that is from the true one."""
        return self._add(Shift(x.shape, _ONE, 0.0, offset, off), (x,), x.shape)

    def scaled(self, x: Variable, factors: Tensor | float, distance: float = 0.0) -> Variable:
        """Times constants, broadcast to its shape."""
        values = torch.as_tensor(factors, dtype=torch.float64)
        shape = tuple(torch.broadcast_shapes(x.shape, values.shape))
        return self.linear(self.spread(x, shape), Scale(shape, values, distance))

    def spread(self, x: Variable, *shapes: Shape) -> Variable:
        """Repeated to the shape that it has together with others."""
        shape = tuple(torch.broadcast_shapes(x.shape, *shapes))
        return x if shape == x.shape else self.moved(x, lambda places: places.expand(shape), "expand")

    def moved(self, x: Variable, move: Moving, name: str = "reshape", padding: PaddingOf = None) -> Variable:
        """Entries moved by a function that acts on a tensor of places (1 + index; 0 stands for a constant)."""
        count = torch.Size(x.shape).numel()
        if count > MOST_ENTRIES:
            return self.unbounded((x,), x.shape, f"too large to be followed: {count} entries")
        places = move(torch.arange(1, count + 1).reshape(x.shape))
        self._moved += places.numel()
        if self._moved > MOST_ENTRIES:
            return self.unbounded((x,), tuple(places.shape), f"too large to be followed: {self._moved} entries in all")
        return self.linear(x, Move(x.shape, places.contiguous(), padding, name))

    def layer(self, x: Variable, measurement: Measurement) -> Variable:
        """A layer on values without a shape."""
        return self._add(Layer(measurement), (x,), x.shape)

    def nonlinear(self, x: Variable, operation: Nonlinear, shape: Shape | None = None) -> Variable:
        """A function with a known constant; elementwise unless another shape is given."""
        return self._add(operation, (x,), x.shape if shape is None else shape)

    def sum(self, terms: list[tuple[Variable, int]]) -> Variable:
        """Values with signs, broadcast to one shape."""
        shape = tuple(torch.broadcast_shapes(*(x.shape for x, _ in terms)))
        return self._add(Sum(tuple(sign for _, sign in terms)), tuple(self.spread(x, shape) for x, _ in terms), shape)

    def joint(
        self, parts: list[Variable], name: str, shape: Shape, select: Callable[[list[Tensor]], Tensor]
    ) -> Variable:
        """Values side by side, their maximum or minimum."""
        return self._add(Joint(name, select), tuple(parts), shape)

    def unbounded(self, inputs: tuple[Variable, ...], shape: Shape, reason: str, name: str = "") -> Variable:
        """A value without a constant."""
        return self._add(Unbounded(reason, name), inputs, shape)

    def node(self, x: Variable) -> Node:
        """What made a value."""
        return self.graph.nodes[x.name]

    def output(self, name: str, x: object) -> None:
        """One of the results; constants are only noted."""
        if isinstance(x, Variable):
            again = sum(known.partition(" #")[0] == name for known in self.graph.outputs)
            self.graph.outputs[f"{name} #{again + 1}" if again else name] = x.name
        else:
            self.graph.constant_outputs.append(name)

    def _add(self, operation: Operation, inputs: tuple[Variable, ...], shape: Shape) -> Variable:
        name = f"{len(self.graph.nodes)}"
        self.graph.nodes[name] = Node(
            name,
            self._label,
            self._source,
            operation,
            tuple(x.name for x in inputs),
            tuple(shape),
            self._constants.hexdigest(),
        )
        return Variable(name, tuple(shape))


def fingerprint(value: object) -> bytes:
    """Constants to the last bit; lists and numbers by their text."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
        raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return repr((str(value.dtype), tuple(value.shape))).encode() + raw
    return repr(value).encode()
