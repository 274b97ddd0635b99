"""From the operators of ONNX to the graph, one small rule for each."""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import torch
from torch import Tensor

from gramcert.auditing import activations, rules
from gramcert.auditing.digits import shown_text
from gramcert.auditing.graph import MOST_ENTRIES, Builder, Graph, Nonlinear, Unbounded, Variable
from gramcert.auditing.linear import Move, Scale, Shape
from gramcert.auditing.onnx_constants import MOVES, Call, axis_of, bounded, folded, reduced_axes, register, sizes_of
from gramcert.auditing.onnx_file import DTYPES, OnnxModel, OnnxNode
from gramcert.auditing.patterns import SIGN, SQUARE, Patterns
from gramcert.auditing.program import BadModel
from gramcert.auditing.rules import REAL, Unknown
from gramcert.geometry.padding import PaddingMode
from gramcert.rounding import root_up

# Entries of all constants and places together.
MOST_OF_ALL = 4 * MOST_ENTRIES

Value = Variable | Tensor
Result = Value | list[Variable] | list[Value]
Rule = Callable[["Translator", Call], Result]

# The numbers of the file are taken as they are: an attribute is a float32, a constant has its own type.
EXACT = torch.float64

_NAMES = {
    "Relu": "relu",
    "Sigmoid": "sigmoid",
    "HardSwish": "hardswish",
    "Tanh": "tanh",
    "Softplus": "softplus",
    "Softsign": "softsign",
    "Erf": "erf",
    "Mish": "mish",
    "Swish": "silu",  # x·sigmoid(αx) has the same slopes for every α
    "Abs": "abs",
    "Sin": "sin",
    "Cos": "cos",
    "Atan": "atan",
    "Asinh": "asinh",
    "Exp": "exp",
    "Log": "log",
    "Reciprocal": "reciprocal",
    "Tan": "tan",
    "Floor": "floor",
    "Ceil": "ceil",
    "Round": "round",
}
_BOTH = "a product of two values that both depend on the input"
_REASONS = {
    "Hardmax": "it jumps",
    "ArgMax": "an index jumps",
    "ArgMin": "an index jumps",
    "NonZero": "an index jumps",
    "IsNaN": "a comparison jumps",
    "IsInf": "a comparison jumps",
    "Not": "a comparison jumps",
    "Attention": "attention has no Lipschitz constant on all inputs",
    "LpNormalization": "it jumps where all entries are 0",
    "QuantizeLinear": "rounding jumps",
    "DynamicQuantizeLinear": "rounding jumps",
}
# What may be done to integers, which wrap around and are divided by truncation.
_OF_INTEGERS = {*MOVES, "Cast", "CastLike", "Shape", "Size", "Concat"}

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register what some operators do."""
    return register(RULES, names)


def graph_of(model: OnnxModel, shapes: dict[str, Shape]) -> Graph:
    """The graph of a model.

    Args:
        model: from :func:`gramcert.auditing.onnx_file.read_onnx`.
        shapes: of each input, the batch included.
    """
    for name, declared in model.inputs.items():
        shape = shapes.get(name)
        fits = shape is not None and len(shape) == len(declared) and min(shape, default=1) >= 1
        if not fits or any(known not in (None, size) for known, size in zip(declared, shape or (), strict=True)):
            shown = tuple("?" if size is None else size for size in declared)
            raise BadModel(f"the input {shown_text(name)} has the shape {shown}, got {shape}")
    if extra := shapes.keys() - model.inputs.keys():
        raise BadModel(f"expected the inputs {sorted(model.inputs)}, got also {sorted(extra)}")
    return Translator(model).run({name: shapes[name] for name in model.inputs})


class Translator:
    """Walks through a model."""

    def __init__(self, model: OnnxModel) -> None:
        self.model = model
        self.b = Builder()
        self.patterns = Patterns(self.b)
        self._values: dict[str, Value] = dict(model.tensors)
        self._inputs: tuple[Variable, ...] = ()
        self._types: dict[str, torch.dtype] = {}  # of values, by the names of their nodes
        self._shapeless: set[str] = set()  # names of nodes whose shape is not known
        self._entries = 0

    def run(self, shapes: dict[str, Shape]) -> Graph:
        """The graph for inputs of these shapes."""
        for name, shape in shapes.items():
            self._values[name] = x = self.b.input(name, shape)
            self._inputs += (x,)
            self._types[x.name] = self.model.types[name]
        for node in self.model.nodes:
            self._follow(node)
        for name in self.model.outputs:
            self.b.output(name, self._values[name])
        return self.b.graph

    def _follow(self, node: OnnxNode) -> None:
        c = Call(node, [self._values[name] if name else None for name in node.inputs], self.model.opset)
        label = shown_text(node.name or next(filter(None, node.outputs), node.op_type))
        self.b.at(label, f"{node.domain}::{node.op_type}".removeprefix("::"), _constants(c))
        variables = tuple(value for value in c.values if isinstance(value, Variable))
        variables = self._inputs if node.has_subgraph else variables
        try:
            results = self._results(c, variables)
        except Exception as error:  # a hostile file can make an operator raise anything
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            results = [self._lost(variables, f"{shown_text(node.op_type)}: {shown_text(reason)}")]
            results *= len(node.outputs)
        for place, name in enumerate(node.outputs):
            if name and place >= len(results):
                results.append(self._lost(variables, f"{node.op_type}: its output {place + 1} is not followed"))
            if name:
                self._values[name] = results[place]

    def _lost(self, variables: tuple[Variable, ...], reason: str) -> Variable:
        """A value of which nothing is known; without inputs it may still be random, or use others in its subgraph."""
        result = self.b.unbounded(variables or self._inputs, (), reason)
        self._types[result.name] = torch.float32
        self._shapeless.add(result.name)
        return result

    def _results(self, c: Call, variables: tuple[Variable, ...]) -> list[Value]:
        if c.node.has_subgraph or c.op in ("If", "Loop", "Scan"):
            raise Unknown("control flow that depends on data")
        if c.node.domain:
            raise Unknown(f"an operator of the domain {c.node.domain}, of which nothing is known")
        if any(x.name in self._shapeless for x in variables):
            raise Unknown("it acts on a value of which nothing is known")
        if any(self.type_of(x) not in REAL for x in variables) and c.op not in _OF_INTEGERS:
            raise Unknown("integers that depend on the input may wrap around")
        result = self._translated(c) if variables else folded(c)
        results: list[Value] = [_plain(part) for part in (result if isinstance(result, list) else [result])]
        self._entries += sum(part.numel() for part in results if isinstance(part, Tensor))
        self._require_room()
        for part in results:
            if isinstance(part, Variable) and variables and not c.op.startswith("Cast"):
                self._types[part.name] = self.type_of(variables[0])
        return results

    def type_of(self, x: Value, new: torch.dtype | None = None) -> torch.dtype:
        """That of a value; ``new`` sets it."""
        if isinstance(x, Tensor):
            return x.dtype
        self._types[x.name] = new or self._types[x.name]
        return self._types[x.name]

    def _translated(self, c: Call) -> Result:
        if c.op in MOVES:
            return self._moved(c)
        if c.op in RULES:
            return RULES[c.op](self, c)
        if c.op in _NAMES:
            return rules.activation(self.b, c.x(), _NAMES[c.op])
        raise Unknown(_REASONS.get(c.op, "no rule is known for this operator"))

    def _moved(self, c: Call) -> Result:
        """By what the operator does to a tensor of places."""
        x, do, name = c.x(), MOVES[c.op], c.op.lower()
        if c.op == "Identity":
            return self.b.same(x)
        places = torch.arange(1, math.prod(bounded(x.shape)) + 1).reshape(x.shape)
        moved = do(places, c)
        parts = moved if isinstance(moved, list) else [moved]
        return [self.moved(x, lambda _, part=part: part, name) for part in parts]  # type: ignore[misc]

    def moved(self, x: Variable, move: Callable[[Tensor], Tensor], name: str = "reshape") -> Variable:
        """Entries moved, within the limits of memory."""
        self._entries += math.prod(x.shape)
        self._require_room()
        result = self.b.moved(x, move, name)
        self._entries += math.prod(result.shape) - math.prod(x.shape)
        self._require_room()
        return result

    def _require_room(self) -> None:
        if self._entries > MOST_OF_ALL:
            raise Unknown("too large to be followed: the model moves too many entries")

    def spread(self, x: Variable, *shapes: Shape) -> Variable:
        """Broadcast to the shape it has together with others."""
        shape = bounded(torch.broadcast_shapes(x.shape, *shapes))
        return x if shape == x.shape else self.moved(x, lambda places: places.expand(shape), "expand")

    def shifted(self, x: Variable) -> Variable:
        """The value plus some constants, which patterns must know of: √(x² - 1) has no constant."""
        return self.patterns.shifted(x, None)

    def merged(self, first: Value, taken: Tensor, second: Value, mask: Tensor) -> Variable:
        """Where the mask is true the taken places of the flattened first value, elsewhere the entries of the second."""
        parts = [self._taken(first, taken), self._taken(second, (~mask).flatten().nonzero().flatten())]
        order = torch.cat([mask.flatten().nonzero(), (~mask).flatten().nonzero()]).flatten().argsort()
        together = rules.concatenated(self.b, parts, 0)
        result = self.moved(together, lambda places: places[order].reshape(mask.shape))
        return self.shifted(result) if any(isinstance(part, Tensor) and bool(part.any()) for part in parts) else result

    def _taken(self, value: Value, taken: Tensor) -> Value:
        if isinstance(value, Tensor):
            return rules.exact(value, "constant").flatten()[taken]
        return self.moved(value, lambda places: places.flatten()[taken], "slice")


def _plain(value: Value) -> Value:
    """Constants with an entry of memory for each of theirs."""
    if isinstance(value, Tensor):
        return value.clone(memory_format=torch.contiguous_format) if value.numel() == 1 else value.contiguous()
    return value


def _constants(c: Call) -> Iterator[object]:
    """Everything constant that a node is made with."""
    for name in sorted(c.node.attributes):
        value = c.node.attributes[name]
        yield name
        yield from value if isinstance(value, list) else [value]
    for place, value in enumerate(c.values):
        if isinstance(value, Tensor):
            yield place
            yield value


# Linear layers


def _pairs(c: Call, sizes: Shape, taps: list[int], strides: list[int], dilations: list[int]) -> list[tuple[int, int]]:
    """Padding before and after each axis."""
    mode, pads = c.text("auto_pad", "NOTSET"), c.integers("pads")
    if min(strides, default=1) < 1:
        raise Unknown("strides that are not positive")
    if mode == "VALID" or (mode == "NOTSET" and pads is None):
        return [(0, 0)] * len(taps)
    if mode == "NOTSET":
        assert pads is not None
        pairs = list(zip(pads[: len(taps)], pads[len(taps) :], strict=True))
        for size, k, pair in zip(sizes, taps, pairs, strict=True):
            bounded([size + sum(pair), k])  # a window for each place
        return pairs
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        raise Unknown(f"padding of the kind {mode}")
    pairs = []
    for size, k, s, d in zip(sizes, taps, strides, dilations, strict=True):
        bounded([size + d * k, k])
        total = max(0, (-(-size // s) - 1) * s + d * (k - 1) + 1 - size)
        pairs.append((total // 2, total - total // 2) if mode == "SAME_UPPER" else (total - total // 2, total // 2))
    return pairs


def _per_axis(c: Call, name: str, axes: int) -> list[int]:
    values = c.integers(name)
    values = [1] * axes if values is None else values
    if len(values) != axes:
        raise Unknown(f"{len(values)} {name} for {axes} axes")
    return values


def _kernel(c: Call) -> tuple[Tensor, list[int], list[int], list[int]]:
    """The weight, its taps, strides and dilations."""
    x, weight, bias = c.x(), c.constant(1, "weight"), c.optional(2, "bias")
    if bias is not None:
        rules.exact(bias, "bias")
    taps = list(weight.shape[2:])
    if weight.dim() < 3 or x.dim != weight.dim() or c.integers("kernel_shape") not in (None, taps):
        raise Unknown(f"a weight of shape {tuple(weight.shape)} for an input of shape {x.shape}")
    return weight, taps, _per_axis(c, "strides", len(taps)), _per_axis(c, "dilations", len(taps))


@rule("Conv")
def _conv(t: Translator, c: Call) -> Variable:
    x, (weight, taps, strides, dilations) = c.x(), _kernel(c)
    padding = _pairs(c, x.shape[2:], taps, strides, dilations)
    groups = c.integer("group", 1)
    return rules.convolution(t.b, x, weight, stride=strides, padding=padding, dilation=dilations, groups=groups)


@rule("ConvTranspose")
def _conv_transpose(t: Translator, c: Call) -> Variable:
    x, (weight, taps, strides, dilations) = c.x(), _kernel(c)
    extra = c.integers("output_padding") or [0] * len(taps)
    wanted = c.integers("output_shape")
    if c.text("auto_pad", "NOTSET").startswith("SAME") and wanted is None:
        wanted = [size * s for size, s in zip(x.shape[2:], strides, strict=True)]
    padding = _pairs(c, x.shape[2:], taps, strides, dilations) if wanted is None else []
    for size, k, s, d, out in zip(x.shape[2:], taps, strides, dilations, wanted or [], strict=wanted is not None):
        cropped = s * (size - 1) + d * (k - 1) + 1 - out
        if any(extra) or cropped < 0 or cropped % 2:
            raise Unknown("an output shape that can be had in several ways")
        padding.append((cropped // 2, cropped // 2))
    bounded([s * size + d * k for size, k, s, d in zip(x.shape[2:], taps, strides, dilations, strict=True)])
    return rules.convolution(
        t.b,
        x,
        weight,
        stride=strides,
        padding=padding,
        dilation=dilations,
        groups=c.integer("group", 1),
        transposed=True,
        output_padding=extra,
    )


@rule("Gemm")
def _gemm(t: Translator, c: Call) -> Variable:
    first, second = (
        _turned(t, value) if c.integer(name, 0) else value
        for value, name in zip(c.all()[:2], ("transA", "transB"), strict=True)
    )
    if len(first.shape) != 2 or len(second.shape) != 2:
        raise Unknown("a product of more than two axes")
    y = _product(t, first, second)
    if (alpha := c.real("alpha", 1.0)) != 1:
        y = y * alpha if isinstance(y, Tensor) else rules.times(t.b, y, alpha, EXACT)
    summand, beta = c.get(2), c.real("beta", 1.0)
    if summand is None or beta == 0:
        if isinstance(y, Tensor):
            raise Unknown("it does not depend on its input")
        return y
    if tuple(torch.broadcast_shapes(summand.shape, y.shape)) != tuple(y.shape):
        raise Unknown(f"a summand of shape {tuple(summand.shape)}")
    if isinstance(summand, Variable):
        summand = rules.times(t.b, summand, beta, EXACT) if beta != 1 else summand
    else:
        summand = rules.exact(summand, "bias") * beta
    return t.patterns.sum(y, summand, 1, EXACT)


def _turned(t: Translator, x: Value) -> Value:
    return x.mT if isinstance(x, Tensor) else t.moved(x, lambda places: places.mT, "transpose")


@rule("MatMul")
def _matmul(t: Translator, c: Call) -> Value:
    return _product(t, *c.all())


def _product(t: Translator, first: Value, second: Value) -> Value:
    """As torch.matmul: a constant matrix acts along one axis, several of them as a grouped convolution."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return rules.exact(first) @ rules.exact(second)
    if isinstance(first, Variable) and isinstance(second, Variable):
        shapes = (torch.empty(value.shape, device="meta") for value in (first, second))
        return t.b.unbounded((first, second), tuple(torch.matmul(*shapes).shape), _BOTH)
    x, weight = (first, second) if isinstance(first, Variable) else (second, first)
    assert isinstance(x, Variable)
    assert isinstance(weight, Tensor)
    if not x.dim or not weight.dim():
        raise Unknown("a product with a number")
    axis = -1 if x is first or x.dim == 1 else -2
    if weight.dim() > 2:
        return _batched(t, x, weight) if x is first else _turned(t, _batched(t, _rows(t, x), weight.mT))
    if weight.dim() == 1:
        y = rules.matrix(t.b, x, weight[None], axis)
        return t.moved(y, lambda places: places.squeeze(axis))
    return rules.matrix(t.b, x, (weight.T if x is first else weight).contiguous(), axis)


def _rows(t: Translator, x: Variable) -> Variable:
    return t.moved(x, lambda places: places.mT, "transpose")


def _batched(t: Translator, x: Variable, weight: Tensor) -> Variable:
    """A matrix for each place of a batch."""
    if x.dim < 2:
        raise Unknown("a batch of matrices and one vector")
    batch = torch.broadcast_shapes(x.shape[:-2], weight.shape[:-2])
    (rows, inner), (of_weight, outer), groups = x.shape[-2:], weight.shape[-2:], math.prod(batch)
    bounded([groups, max(rows, outer), inner])
    if of_weight != inner:
        raise Unknown(f"a matrix with {of_weight} rows for {inner} entries")
    columns = t.moved(
        x, lambda places: places.expand(*batch, rows, inner).mT.reshape(1, groups * inner, rows), "transpose"
    )
    kernel = weight.expand(*batch, inner, outer).mT.reshape(groups * outer, inner, 1)
    y = rules.convolution(t.b, columns, kernel, groups=groups)
    return t.moved(y, lambda places: places.reshape(*batch, outer, rows).mT, "transpose")


@rule("CumSum")
def _cumsum(t: Translator, c: Call) -> Variable:
    x = c.x()
    axis = axis_of(int(c.constant(1, "axis")), x.dim)
    bounded([x.shape[axis], x.shape[axis]])
    ones = torch.ones(x.shape[axis], x.shape[axis], dtype=torch.float64)
    weight = ones.tril(-1 if c.integer("exclusive", 0) else 0)
    weight = weight.T.contiguous() if c.integer("reverse", 0) else weight
    return rules.matrix(t.b, x, weight, axis, "cumulative sum")


# Sums and products


@rule("Add", "Sub", "Sum")
def _sum(t: Translator, c: Call) -> Value:
    result, *others = c.all()
    result = t.b.same(result) if isinstance(result, Variable) and not others else result
    for other in others:
        if isinstance(result, Tensor) and isinstance(other, Tensor):
            result = rules.exact(result, "summand") + rules.exact(other, "summand")
        elif isinstance(result, Variable) and isinstance(other, Variable) and not _is_in_place(t, other):
            result = t.b.sum([(result, 1), (other, -1 if c.op == "Sub" else 1)])
        else:
            result = t.patterns.sum(result, other, -1 if c.op == "Sub" else 1, EXACT)
    return result


def _is_in_place(t: Translator, x: Variable) -> bool:
    """Whether no entry was moved since it was computed: x minus its mean is only then a projection."""
    node = t.b.node(x)
    while isinstance(node.operation, Move):
        if not (node.operation.is_view and node.operation.source == node.operation.target):
            return False
        node = t.b.graph.nodes[node.inputs[0]]
    return True


@rule("Mean")
def _mean(t: Translator, c: Call) -> Variable:
    total = _sum(t, c)
    assert isinstance(total, Variable)
    return rules.times(t.b, total, float(len(c.values)), EXACT, divide=True)


@rule("Mul")
def _mul(t: Translator, c: Call) -> Variable:
    first, second = c.all()
    return t.patterns.product(first, second, EXACT)


@rule("Div")
def _div(t: Translator, c: Call) -> Variable:
    first, second = c.all()
    return _finite(t, t.patterns.quotient(first, second, EXACT))


def _finite(t: Translator, y: Variable) -> Variable:
    """Quotients of finite numbers need not be."""
    operation = t.b.node(y).operation
    if isinstance(operation, Scale) and not bool(operation.factors.isfinite().all()):
        raise Unknown("a factor that is not finite")
    return y


@rule("Neg")
def _neg(t: Translator, c: Call) -> Variable:
    return t.b.scaled(c.x(), -1.0)


@rule("Max", "Min")
def _extremum(t: Translator, c: Call) -> Variable:
    """With a constant it is a clamp."""
    name = "maximum" if c.op == "Max" else "minimum"
    y, *others = sorted(c.all(), key=lambda value: isinstance(value, Tensor))
    assert isinstance(y, Variable)
    y = y if others else t.b.same(y)
    for other in others:
        y = rules.extremum(t.b, y, other, name) if isinstance(other, Variable) else _clamped(t, y, other)
    return y


def _clamped(t: Translator, x: Variable, *limits: Tensor | None) -> Variable:
    known = [limit for limit in limits if limit is not None]
    if any(bool(limit.isnan().any()) for limit in known):
        raise Unknown("a limit that is not a number")
    return rules.activation(t.b, t.spread(x, *(tuple(limit.shape) for limit in known)), "clamp")


@rule("Clip")
def _clip(t: Translator, c: Call) -> Variable:
    limits = [c.optional(1, "minimum"), c.optional(2, "maximum")]
    if c.opset < 11:
        limits = [torch.tensor(float(c.node.attributes.get(name, 0.0))) for name in ("min", "max")]
    return _clamped(t, c.x(), *limits)


@rule("Pow")
def _pow(t: Translator, c: Call) -> Variable:
    exponent = c.constant(1, "exponent")
    x = t.spread(c.x(), tuple(exponent.shape))
    power = float(exponent) if exponent.numel() == 1 else math.nan
    if power == 2:
        return t.b.unbounded((x,), x.shape, SQUARE)
    if power == 0.5:
        return t.patterns.root(x)
    return t.b.same(x) if power == 1 else rules.activation(t.b, x, "pow")


@rule("Sqrt")
def _sqrt(t: Translator, c: Call) -> Variable:
    return t.patterns.root(c.x())


@rule("Sign")
def _sign(t: Translator, c: Call) -> Variable:
    return t.b.unbounded((c.x(),), c.x().shape, SIGN)


@rule("Equal")
def _equal(t: Translator, c: Call) -> Variable:
    constants = [value for value in c.all() if isinstance(value, Tensor)]
    if len(constants) == 1 and constants[0].numel() == 1 and float(constants[0]) == 0:
        x = next(value for value in c.all() if isinstance(value, Variable))
        return t.patterns.zero_test(t.spread(x, tuple(constants[0].shape)))
    return _comparison(t, c)


def _comparison(t: Translator, c: Call) -> Variable:
    shape = tuple(torch.broadcast_shapes(*(value.shape for value in c.all())))
    variables = tuple(value for value in c.all() if isinstance(value, Variable))
    return t.b.unbounded(variables, shape, f"{c.op}: a comparison jumps")


RULES.update(dict.fromkeys(("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor"), _comparison))


@rule("Where")
def _where(t: Translator, c: Call) -> Variable:
    condition, first, second = c.all()
    if isinstance(condition, Variable):
        if isinstance(first, Tensor) and first.numel() == 1 and isinstance(second, Variable):
            number = float(first)
            found = t.patterns.guard(condition, number, second) if second.shape == condition.shape else None
            # Another number than 0 is a jump, which only a later choice can take back.
            if found is not None and (number == 0 or isinstance(t.b.node(found).operation, Unbounded)):
                return found
        shape = tuple(torch.broadcast_shapes(condition.shape, first.shape, second.shape))
        variables = tuple(value for value in (condition, first, second) if isinstance(value, Variable))
        return t.b.unbounded(variables, shape, "Where: a choice that depends on the input jumps")
    shape = bounded(torch.broadcast_shapes(condition.shape, first.shape, second.shape))
    values = [
        t.spread(value, shape) if isinstance(value, Variable) else value.expand(shape) for value in (first, second)
    ]
    mask = condition.bool().expand(shape)
    return t.merged(values[0], mask.flatten().nonzero().flatten(), values[1], mask)


# Moves


@rule("Concat")
def _concat(t: Translator, c: Call) -> Variable:
    parts = c.all()
    for part in parts:
        if isinstance(part, Tensor):
            rules.exact(part, "constant")
    bounded([sum(math.prod(part.shape) for part in parts)])
    result = rules.concatenated(t.b, parts, c.integer("axis"))
    return t.shifted(result) if any(isinstance(part, Tensor) and bool(part.any()) for part in parts) else result


@rule("ScatterND")
def _scatter_nd(t: Translator, c: Call) -> Variable:
    data, indices, updates = c.get(0), c.constant(1, "indices").long(), c.get(2)
    if data is None or updates is None or c.text("reduction", "none") != "none":
        raise Unknown("a reduction")
    shape = bounded(data.shape)
    target = torch.zeros(shape, dtype=torch.int64)
    count = math.prod(updates.shape)
    target[tuple(indices.unbind(-1))] = torch.arange(1, count + 1).reshape(updates.shape)
    written = target > 0
    if int(written.sum()) != count:
        raise Unknown("indices that occur twice")
    return t.merged(updates, target[written] - 1, data, written)


@rule("Shape", "Size")
def _shape(t: Translator, c: Call) -> Tensor:
    return sizes_of(c, c.x().shape)


@rule("Cast", "CastLike")
def _cast(t: Translator, c: Call) -> Value:
    x, other = c.get(0), c.get(1)
    dtype = t.type_of(other) if c.op == "CastLike" and other is not None else DTYPES.get(c.integer("to", 0))
    if isinstance(x, Tensor) and dtype is not None:
        return x.to(dtype)
    if dtype not in REAL:
        raise Unknown("rounding to integers or truth values jumps")
    result = t.b.same(c.x())
    t.type_of(result, dtype)
    return result


@rule("Dropout")
def _dropout(t: Translator, c: Call) -> Variable:
    training = c.optional(2, "mode")
    if training is not None and bool(training.any()):
        raise Unknown("in training mode it is random")
    return t.b.same(c.x())


_MODES: dict[str, PaddingMode] = {"constant": "zeros", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


@rule("Pad")
def _pad(t: Translator, c: Call) -> Variable:
    x, mode, amounts = c.x(), c.text("mode", "constant"), c.integers("pads", 1) or []
    axes = c.axes(x.dim, 3)
    axes = list(range(x.dim)) if axes is None else axes
    given = c.optional(2, "value")
    value = c.real("value", 0.0) if given is None else float(given)
    if mode not in _MODES or len(amounts) != 2 * len(axes) or len(set(axes)) != len(axes):
        raise Unknown(f"padding {amounts} of the kind {mode}")
    if not math.isfinite(value):
        raise Unknown("padding by what is not finite")
    if mode != "constant" and min(amounts, default=0) < 0:
        raise Unknown(f"negative padding of the kind {mode}")
    pairs = [(0, 0)] * x.dim
    for axis, before, after in zip(axes, amounts[: len(axes)], amounts[len(axes) :], strict=True):
        pairs[axis] = (before, after)
    first = next((axis for axis, pair in enumerate(pairs) if any(pair)), x.dim)
    bounded([size + before + after for size, (before, after) in zip(x.shape, pairs, strict=True)])
    y = rules.padded(t.b, x, pairs[first:], _MODES[mode]) if pairs[first:] else t.b.same(x)
    return t.shifted(y) if mode == "constant" and value != 0 else y


# Windows


def _windows(c: Call) -> tuple[list[int], list[int], list[tuple[int, int]], list[int], bool]:
    """Taps, strides, padding, dilations and whether sizes are rounded up."""
    x, taps = c.x(), c.integers("kernel_shape") or []
    if x.dim < 3 or len(taps) != x.dim - 2:
        raise Unknown(f"windows {taps} of an input of shape {x.shape}")
    strides, dilations = (_per_axis(c, name, len(taps)) for name in ("strides", "dilations"))
    return taps, strides, _pairs(c, x.shape[2:], taps, strides, dilations), dilations, bool(c.integer("ceil_mode", 0))


@rule("MaxPool")
def _max_pool(t: Translator, c: Call) -> Variable:
    taps, strides, padding, dilations, round_up = _windows(c)
    return rules.max_pool(t.b, c.x(), taps, strides, padding, dilations, round_up=round_up)


@rule("AveragePool")
def _average_pool(t: Translator, c: Call) -> Variable:
    x, (taps, strides, padding, dilations, round_up) = c.x(), _windows(c)
    if set(dilations) != {1}:
        raise Unknown("dilated averages")
    counted = bool(c.integer("count_include_pad", 0))
    for size, s, pair in zip(x.shape[2:], strides, padding, strict=True):
        bounded([size, (size + sum(pair)) // s])
    windows = [
        rules.average_matrix(size, k, s, *pair, round_up=round_up, count_padding=counted)
        for size, k, s, pair in zip(x.shape[2:], taps, strides, padding, strict=True)
    ]
    return rules.average(t.b, x, windows)


@rule("LpPool")
def _lp_pool(t: Translator, c: Call) -> Variable:
    """Norms of windows: each entry is counted in how many of them it is."""
    x, (taps, strides, padding, dilations, round_up) = c.x(), _windows(c)
    _require_two(c)
    shares, sizes = 1, []
    for size, k, s, (before, after), d in zip(x.shape[2:], taps, strides, padding, dilations, strict=True):
        count, places = rules.windows_of(size, k, s, before, after, d, round_up=round_up)
        inside = places[(places >= 0) & (places < size)]
        shares *= int(torch.bincount(inside, minlength=1).max())
        sizes.append(count)
    constant = 1.0 if shares <= 1 else root_up(shares)
    why = f"√{shares}: a place is in up to {shares} windows"
    return t.b.nonlinear(x, Nonlinear(constant, "l2 pool", why=why), (*x.shape[:2], *sizes))


def _require_two(c: Call) -> None:
    if c.node.attributes.get("p", 2) != 2:
        raise Unknown("a norm of another order than 2")


@rule("GlobalAveragePool")
def _global_average(t: Translator, c: Call) -> Variable:
    return rules.reduce_linear(t.b, c.x(), _spatial(c), keep=True, mean=True)


def _spatial(c: Call) -> list[int]:
    if c.x().dim < 3:
        raise Unknown("without spatial axes")
    return list(range(2, c.x().dim))


@rule("GlobalMaxPool", "GlobalLpPool")
def _global_pool(t: Translator, c: Call) -> Variable:
    if c.op == "GlobalLpPool":
        _require_two(c)
    return _reduced(t, c, _spatial(c), keep=True)


@rule("ReduceMean", "ReduceSum", "ReduceL1")
def _reduce_linear(t: Translator, c: Call) -> Variable:
    x = c.x()
    axes = reduced_axes(c, x.dim)
    x = rules.activation(t.b, x, "abs") if c.op == "ReduceL1" else x
    if not axes:
        return t.b.same(x)
    return rules.reduce_linear(t.b, x, axes, keep=bool(c.integer("keepdims", 1)), mean=c.op == "ReduceMean")


@rule("ReduceMax", "ReduceMin", "ReduceL2", "ReduceLogSumExp")
def _reduce(t: Translator, c: Call) -> Variable:
    return _reduced(t, c, reduced_axes(c, c.x().dim), keep=bool(c.integer("keepdims", 1)))


def _reduced(t: Translator, c: Call, axes: list[int], *, keep: bool) -> Variable:
    """One entry of disjoint groups: its gradient is no longer than 1."""
    x = c.x()
    shape = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape) if keep or axis not in axes)
    names = {"ReduceL2": "l2 norm", "GlobalLpPool": "l2 norm", "ReduceLogSumExp": "log sum exp"}
    name = names.get(c.op, "largest entry")
    return t.b.nonlinear(x, Nonlinear(1.0, name, why="of disjoint parts, each with a gradient of at most 1"), shape)


@rule("TopK")
def _top_k(t: Translator, c: Call) -> Variable:
    x = c.x()
    axis = axis_of(c.integer("axis", -1), x.dim)
    count = c.integer("k") if c.opset < 10 else int(c.constant(1, "count"))
    if not c.integer("sorted", 1) or not 1 <= count <= x.shape[axis]:
        raise Unknown("in an order that is not known")
    shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    return t.b.nonlinear(x, Nonlinear(1.0, "largest entries", why="entries of a sorted value"), shape)


# Resizing


@rule("Resize", "Upsample")
def _resize(t: Translator, c: Call) -> Variable:
    x, plain = c.x(), c.op == "Upsample" or c.opset < 11
    if c.integer("antialias", 0) or c.integer("exclude_outside", 0):
        raise Unknown("filters that depend on the border or the scale")
    if c.text("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise Unknown("sizes that keep the aspect ratio")
    axes = c.axes(x.dim, None)
    axes = list(range(x.dim)) if axes is None else axes
    outputs, scales = _resized(c, [x.shape[axis] for axis in axes], plain)
    mode = c.text("mode", "nearest")
    place = "asymmetric" if plain else c.text("coordinate_transformation_mode", "half_pixel")
    rounding = "floor" if plain else c.text("nearest_mode", "round_prefer_floor")
    windows: dict[int, Tensor] = {}
    a = Fraction(c.real("cubic_coeff_a", -0.75))
    for axis, out, scale in zip(axes, outputs, scales, strict=True):
        size = x.shape[axis]
        bounded([max(out, 2**11), max(size, 2**11)])
        places = [_original(place, i, size, out, scale) for i in range(out)]
        if places != list(range(size)):
            windows[axis] = _interpolation(places, size, mode, rounding, a)
    if not windows:
        return t.b.same(x)
    trailing = range(min(windows), x.dim)
    bounded([max(x.shape[axis] for axis in trailing)] * 2)
    matrices = [windows[axis] if axis in windows else torch.eye(x.shape[axis], dtype=EXACT) for axis in trailing]
    return rules.average(t.b, x, matrices, "upsample")


def _resized(c: Call, sizes: list[int], plain: bool) -> tuple[list[int], list[Fraction]]:
    """New sizes and scales of some axes."""
    given = c.node.attributes.get("scales")
    factors = c.optional(1 if plain else 2, "scales")
    values = given if given is not None else factors.flatten().tolist() if factors is not None else []
    wanted = None if plain else c.optional(3, "sizes")
    if wanted is not None and wanted.numel():
        outputs = [int(size) for size in wanted.flatten().tolist()]
        scales = [Fraction(out, size) for out, size in zip(outputs, sizes, strict=True)]
    else:
        scales = [Fraction(value) for value in values]
        outputs = [math.floor(size * scale) for size, scale in zip(sizes, scales, strict=True)]
    if min(outputs, default=0) < 1 or min(scales) <= 0:
        raise Unknown(f"resizing {sizes} to {outputs}")
    return outputs, scales


def _original(mode: str, place: int, size: int, out: int, scale: Fraction) -> Fraction:
    """Where a place of the result is in the source, as the format defines it, without rounding."""
    half = Fraction(1, 2)
    if mode == "asymmetric":
        return place / scale
    if mode == "align_corners" and out == size * scale:
        return Fraction(place * (size - 1), out - 1) if out > 1 else Fraction(0)
    if mode == "pytorch_half_pixel" and out == 1:
        return Fraction(0)
    if mode in ("half_pixel", "pytorch_half_pixel"):
        return (place + half) / scale - half
    if mode == "half_pixel_symmetric":
        return size * half * (1 - out / (size * scale)) + (place + half) / scale - half
    raise Unknown(f"coordinates of the kind {mode}")


def _interpolation(places: list[Fraction], size: int, mode: str, rounding: str, a: Fraction) -> Tensor:
    """The matrix along one axis: which entries each place of the result is made of, the border repeated."""
    matrix = torch.zeros(len(places), size, dtype=torch.float64)
    for row, place in enumerate(places):
        weights: dict[int, Fraction] = {}
        for index, weight in _taps(place, mode, rounding, a):
            column = max(0, min(size - 1, index))
            weights[column] = weights.get(column, Fraction(0)) + weight
        for column, weight in weights.items():
            matrix[row, column] = float(weight)
    return matrix


def _taps(place: Fraction, mode: str, rounding: str, a: Fraction) -> list[tuple[int, Fraction]]:
    below = math.floor(place)
    ratio, one = place - below, Fraction(1)
    if mode == "linear":
        return [(below, 1 - ratio), (below + 1, ratio)]
    if mode == "cubic":  # https://ieeexplore.ieee.org/document/1163711, equation 4
        return [(below + offset, _cubic(abs(ratio - offset), a)) for offset in (-1, 0, 1, 2)]
    half = Fraction(1, 2)
    nearest = {
        "floor": below,
        "ceil": math.ceil(place),
        "round_prefer_floor": math.ceil(place - half),
        "round_prefer_ceil": math.floor(place + half),
    }
    if mode != "nearest" or rounding not in nearest:
        raise Unknown(f"interpolation of the kind {mode}, {rounding}")
    return [(nearest[rounding], one)]


def _cubic(s: Fraction, a: Fraction) -> Fraction:
    return (a + 2) * s**3 - (a + 3) * s**2 + 1 if s <= 1 else a * (s**3 - 5 * s**2 + 8 * s - 4)


# Activations


@rule("LeakyRelu")
def _leaky(t: Translator, c: Call) -> Variable:
    return rules.activation(t.b, c.x(), "leaky_relu", activations.leaky(c.real("alpha", 0.01)))


@rule("Elu", "Selu")
def _elu(t: Translator, c: Call) -> Variable:
    selu = c.op == "Selu"
    alpha = c.real("alpha", 1.67326319217681884765625 if selu else 1.0)
    gamma = c.real("gamma", 1.05070102214813232421875) if selu else 1.0
    return rules.activation(t.b, c.x(), c.op.lower(), activations.elu(alpha, gamma))


@rule("Celu")
def _celu(t: Translator, c: Call) -> Variable:
    return rules.activation(t.b, c.x(), "celu", activations.celu(c.real("alpha", 1.0)) or "its alpha is not positive")


@rule("ThresholdedRelu")
def _thresholded(t: Translator, c: Call) -> Variable:
    is_continuous = c.real("alpha", 1.0) == 0
    return rules.activation(t.b, c.x(), "threshold", (0.0, 1.0) if is_continuous else None)


@rule("Shrink")
def _shrink(t: Translator, c: Call) -> Variable:
    threshold = c.real("lambd", 0.5)
    is_continuous = c.real("bias", 0.0) == threshold >= 0
    return rules.activation(t.b, c.x(), "softshrink" if is_continuous else "hardshrink")


@rule("PRelu")
def _prelu(t: Translator, c: Call) -> Variable:
    x, slope = c.x(), c.constant(1, "slope")
    if tuple(torch.broadcast_shapes(x.shape, slope.shape)) != x.shape:
        raise Unknown(f"slopes of shape {tuple(slope.shape)} for an input of shape {x.shape}")
    return rules.prelu(t.b, x, slope)


@rule("HardSigmoid")
def _hard_sigmoid(t: Translator, c: Call) -> Variable:
    """Named as torch's own where x times it is a hardswish, whose slopes are the same for every alpha > 0."""
    alpha, beta = c.real("alpha", 0.2), c.real("beta", 0.5)
    name = "hardsigmoid" if alpha > 0 and beta == 0.5 else "hard sigmoid"
    return rules.activation(t.b, c.x(), name, activations.hard_sigmoid(alpha))


@rule("Gelu")
def _gelu(t: Translator, c: Call) -> Variable:
    kinds = {"none": "gelu", "tanh": "gelu_tanh"}
    if (kind := c.text("approximate", "none")) not in kinds:
        raise Unknown(f"the approximation {kind}")
    return rules.activation(t.b, c.x(), kinds[kind])


@rule("Softmax", "LogSoftmax")
def _softmax(t: Translator, c: Call) -> Variable:
    """Before version 13 of all axes from one on."""
    x, log = c.x(), c.op == "LogSoftmax"
    if c.opset >= 13:
        return rules.softmax(t.b, x, c.integer("axis", -1), log=log)
    axis = axis_of(c.integer("axis", 1), x.dim)
    if axis == x.dim - 1:
        return rules.softmax(t.b, x, axis, log=log)
    rows = t.moved(x, lambda places: places.reshape(math.prod(x.shape[:axis]), -1))
    y = rules.softmax(t.b, rows, 1, log=log)
    return t.moved(y, lambda places: places.reshape(x.shape))


# Normalisation


@rule("BatchNormalization")
def _batch_norm(t: Translator, c: Call) -> Variable:
    if c.integer("training_mode", 0) or any(c.node.outputs[1:]):
        raise Unknown("in training mode it normalises by the batch itself")
    if c.integer("spatial", 1) != 1:
        raise Unknown("statistics of each place")
    scale, bias, mean, variance = (
        c.constant(place, name) for place, name in enumerate(("scale", "bias", "mean", "variance"), 1)
    )
    rules.exact(bias, "bias")
    y = rules.batch_norm(t.b, c.x(), scale, mean.double(), variance.double(), c.real("epsilon", 1e-5))
    return t.shifted(_finite(t, y))


def _normalised(t: Translator, c: Call, count: int, name: str, shape: Shape | None) -> Variable:
    """Normalised groups of so many entries, times scales of a shape, plus a bias."""
    x = c.x()
    y = rules.normalised(t.b, x, count, c.real("epsilon", 1e-5), EXACT, name)
    scale, bias = c.optional(1, "scale"), c.optional(2, "bias")
    if bias is not None:
        rules.exact(bias, "bias")
    if scale is None:
        return y
    factors = rules.exact(scale, "scale").reshape(shape or scale.shape)
    if tuple(torch.broadcast_shapes(x.shape, factors.shape)) != x.shape:
        raise Unknown(f"scales of shape {tuple(scale.shape)} for an input of shape {x.shape}")
    return t.b.scaled(y, factors)


@rule("InstanceNormalization")
def _instance_norm(t: Translator, c: Call) -> Variable:
    x = c.x()
    return _normalised(t, c, math.prod(x.shape[2:]), "instance norm", (x.shape[1], *(1,) * (x.dim - 2)))


@rule("GroupNormalization")
def _group_norm(t: Translator, c: Call) -> Variable:
    """Before version 21 with one scale for each group."""
    x, groups = c.x(), c.integer("num_groups")
    if groups < 1 or x.shape[1] % groups:
        raise Unknown(f"{groups} groups of {x.shape[1]} channels")
    if c.opset < 21:
        scale = c.constant(1, "scale").repeat_interleave(x.shape[1] // groups)
        c = Call(c.node, [x, scale, c.get(2)], c.opset)
    shape = (x.shape[1], *(1,) * (x.dim - 2))
    return _normalised(t, c, math.prod(x.shape[1:]) // groups, "group norm", shape)


@rule("LayerNormalization", "RMSNormalization")
def _layer_norm(t: Translator, c: Call) -> Variable:
    axis = axis_of(c.integer("axis", -1), c.x().dim)
    name = "layer norm" if c.op.startswith("Layer") else "rms norm"
    return _normalised(t, c, math.prod(c.x().shape[axis:]), name, None)


# Recurrent layers


@rule("GRU", "LSTM", "RNN")
def _recurrent(t: Translator, c: Call) -> list[Variable]:
    """Without a constant, but of known shapes, so that what follows can be told."""
    x = c.x()
    (steps, batch, _), hidden = x.shape, c.integer("hidden_size")
    directions = 2 if c.text("direction", "forward") == "bidirectional" else 1
    state = (directions, batch, hidden)
    shapes = [(steps, *state), state, state]
    if c.integer("layout", 0):
        shapes = [(batch, steps, directions, hidden), *[(batch, directions, hidden)] * 2]
    inputs = tuple(value for value in c.values if isinstance(value, Variable))
    return [
        t.b.unbounded(inputs, shape, f"{c.op}: a recurrent layer") for shape in shapes[: 3 if c.op == "LSTM" else 2]
    ]
