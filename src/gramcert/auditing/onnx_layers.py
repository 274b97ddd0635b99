"""Operators of ONNX: linear layers, sums and products, moves of entries."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gramcert.auditing.onnx_call import (
    EXACT,
    Call,
    Context,
    Rule,
    Value,
    axis_of,
    bounded,
    register,
)
from gramcert.auditing.onnx_file import DTYPES
from gramcert.auditing.onnx_folding import sizes_of
from gramcert.geometry.padding import PaddingMode, pad
from gramcert.operators import contraction, joining, rules
from gramcert.operators.graph import Unbounded, Variable
from gramcert.operators.indexing import merged
from gramcert.operators.linear import Move, Scale, Shape
from gramcert.operators.rules import REAL, Unknown

_BOTH = "a product of two values that both depend on the input"

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register what some operators do."""
    return register(RULES, names)


def pads(c: Call, sizes: Shape, taps: list[int], strides: list[int], dilations: list[int]) -> list[tuple[int, int]]:
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
        total = (-(-size // s) - 1) * s + d * (k - 1) + 1 - size
        if total < -1:  # -1 is rounded to 0 by all
            raise Unknown("strides that leave out places, of which runtimes take different ones")
        total = max(0, total)
        pairs.append((total // 2, total - total // 2) if mode == "SAME_UPPER" else (total - total // 2, total // 2))
    return pairs


def per_axis(c: Call, name: str, axes: int) -> list[int]:
    """An attribute with one integer per axis, 1 where it is left out."""
    values = c.integers(name)
    values = [1] * axes if values is None else values
    if len(values) != axes:
        raise Unknown(f"{len(values)} {name} for {axes} axes")
    return values


def _kernel(c: Call) -> tuple[Tensor, list[int], list[int], list[int]]:
    """The weight, its taps, strides and dilations."""
    x, weight = c.x(), c.constant(1, "weight")
    taps = list(weight.shape[2:])
    if weight.dim() < 3 or x.dim != weight.dim() or c.integers("kernel_shape") not in (None, taps):
        raise Unknown(f"a weight of shape {tuple(weight.shape)} for an input of shape {x.shape}")
    return weight, taps, per_axis(c, "strides", len(taps)), per_axis(c, "dilations", len(taps))


@rule("Conv")
def _conv(t: Context, c: Call) -> Variable:
    x, (weight, taps, strides, dilations) = c.x(), _kernel(c)
    padding = pads(c, x.shape[2:], taps, strides, dilations)
    groups = c.integer("group", 1)
    y = rules.convolution(t.b, x, weight, stride=strides, padding=padding, dilation=dilations, groups=groups)
    return rules.biased(t.b, y, c.optional(2, "bias"), 1)


@rule("ConvTranspose")
def _conv_transpose(t: Context, c: Call) -> Variable:
    x, (weight, taps, strides, dilations) = c.x(), _kernel(c)
    extra = c.integers("output_padding") or [0] * len(taps)
    wanted = c.integers("output_shape")
    if c.text("auto_pad", "NOTSET").startswith("SAME") and wanted is None:
        wanted = [size * s for size, s in zip(x.shape[2:], strides, strict=True)]
    padding = pads(c, x.shape[2:], taps, strides, dilations) if wanted is None else []
    for size, k, s, d, out in zip(x.shape[2:], taps, strides, dilations, wanted or [], strict=wanted is not None):
        cropped = s * (size - 1) + d * (k - 1) + 1 - out
        if any(extra) or cropped < 0 or cropped % 2:
            raise Unknown("an output shape that can be had in several ways")
        padding.append((cropped // 2, cropped // 2))
    bounded([s * size + d * k for size, k, s, d in zip(x.shape[2:], taps, strides, dilations, strict=True)])
    y = rules.convolution(
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
    return rules.biased(t.b, y, c.optional(2, "bias"), 1)


@rule("Gemm")
def _gemm(t: Context, c: Call) -> Variable:
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
    if isinstance(summand, Variable) and beta != 1:
        summand = rules.times(t.b, summand, beta, EXACT)
    elif beta != 1 and isinstance(y, Variable) and isinstance(summand, Tensor):
        rules.exact(summand, "bias")
        return t.b.shifted(y, None)  # a multiple whose rounding is not followed
    if isinstance(y, Tensor):  # nor is that of a product of constants
        assert isinstance(summand, Variable)
        return t.b.shifted(t.spread(summand, tuple(y.shape)), None)
    return t.patterns.sum(y, summand, 1, EXACT)


def _turned(t: Context, x: Value) -> Value:
    return x.mT if isinstance(x, Tensor) else t.moved(x, lambda places: places.mT, "transpose")


@rule("MatMul")
def _matmul(t: Context, c: Call) -> Value:
    return _product(t, *c.all())


def _product(t: Context, first: Value, second: Value) -> Value:
    """As torch.matmul."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return rules.exact(first) @ rules.exact(second)
    if isinstance(first, Variable) and isinstance(second, Variable):
        shapes = (torch.empty(value.shape, device="meta") for value in (first, second))
        return t.b.unbounded((first, second), tuple(torch.matmul(*shapes).shape), _BOTH)
    one, two, output = contraction.matrix_labels(len(first.shape), len(second.shape))
    if isinstance(first, Variable):
        assert isinstance(second, Tensor)
        return contraction.contracted(t.b, first, one, [(second, two)], output)
    assert isinstance(second, Variable)
    return contraction.contracted(t.b, second, two, [(first, one)], output)


@rule("CumSum")
def _cumsum(t: Context, c: Call) -> Variable:
    x = c.x()
    axis = axis_of(int(c.constant(1, "axis")), x.dim)
    exclusive, reverse = (bool(c.integer(name, 0)) for name in ("exclusive", "reverse"))
    return rules.cumulative_sum(t.b, x, axis, exclusive=exclusive, reverse=reverse)


# Sums and products


@rule("Add", "Sub", "Sum")
def _sum(t: Context, c: Call) -> Value:
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


def _is_in_place(t: Context, x: Variable) -> bool:
    """Whether no entry was moved since it was computed: x minus its mean is only then a projection."""
    node = t.b.node(x)
    while isinstance(node.operation, Move):
        if not (node.operation.is_view and node.operation.source == node.operation.target):
            return False
        node = t.b.graph.nodes[node.inputs[0]]
    return True


@rule("Mean")
def _mean(t: Context, c: Call) -> Variable:
    total = _sum(t, c)
    assert isinstance(total, Variable)
    return rules.times(t.b, total, float(len(c.values)), EXACT, divide=True)


@rule("Mul")
def _mul(t: Context, c: Call) -> Variable:
    first, second = c.all()
    return t.patterns.product(first, second, EXACT)


@rule("Div")
def _div(t: Context, c: Call) -> Variable:
    first, second = c.all()
    return finite(t, t.patterns.quotient(first, second, EXACT))


def finite(t: Context, y: Variable) -> Variable:
    """Quotients of finite numbers need not be."""
    operation = t.b.node(y).operation
    if isinstance(operation, Scale) and not bool(operation.factors.isfinite().all()):
        raise Unknown("a factor that is not finite")
    return y


@rule("Neg")
def _neg(t: Context, c: Call) -> Variable:
    return t.b.scaled(c.x(), -1.0)


@rule("Max", "Min")
def _extremum(t: Context, c: Call) -> Variable:
    """With a constant it is a clamp."""
    name, limit = ("maximum", "min") if c.op == "Max" else ("minimum", "max")
    y, *others = sorted(c.all(), key=lambda value: isinstance(value, Tensor))
    assert isinstance(y, Variable)
    y = y if others else t.b.same(y)
    for other in others:
        y = joining.extremum(t.b, y, other, name) if isinstance(other, Variable) else _clamped(t, y, **{limit: other})
    return y


def _clamped(t: Context, x: Variable, **limits: Tensor | None) -> Variable:
    return rules.clamped(t.b, x, {name: limit for name, limit in limits.items() if limit is not None})


@rule("Clip")
def _clip(t: Context, c: Call) -> Variable:
    limits = {"min": c.optional(1, "minimum"), "max": c.optional(2, "maximum")}
    if c.opset < 11:
        found = {name: c.node.attributes.get(name) for name in limits}
        limits = {name: None if limit is None else torch.tensor(float(limit)) for name, limit in found.items()}
    return _clamped(t, c.x(), **limits)


@rule("Pow")
def _pow(t: Context, c: Call) -> Variable:
    exponent = c.constant(1, "exponent")
    x = t.spread(c.x(), tuple(exponent.shape))
    return t.patterns.power(x, float(exponent) if exponent.numel() == 1 else None)


@rule("Sqrt")
def _sqrt(t: Context, c: Call) -> Variable:
    return t.patterns.root(c.x())


@rule("Reciprocal")
def _reciprocal(t: Context, c: Call) -> Variable:
    return t.patterns.reciprocal(c.x())


@rule("Log")
def _log(t: Context, c: Call) -> Variable:
    return t.patterns.logarithm(c.x())


@rule("Sign")
def _sign(t: Context, c: Call) -> Variable:
    return rules.activation(t.b, c.x(), "sign")


@rule("Equal")
def _equal(t: Context, c: Call) -> Variable:
    constants = [value for value in c.all() if isinstance(value, Tensor)]
    if len(constants) == 1 and constants[0].numel() == 1 and float(constants[0]) == 0:
        x = next(value for value in c.all() if isinstance(value, Variable))
        result = t.patterns.zero_test(t.spread(x, tuple(constants[0].shape)))
        t.type_of(result, torch.bool)
        return result
    return _comparison(t, c)


def _comparison(t: Context, c: Call) -> Variable:
    shape = tuple(torch.broadcast_shapes(*(value.shape for value in c.all())))
    variables = tuple(value for value in c.all() if isinstance(value, Variable))
    if len(variables) == 1 and len(c.all()) == 2:
        first, second = c.all()
        limit = second if isinstance(second, Tensor) else first
        assert isinstance(limit, Tensor)
        result = t.patterns.choices.compared(variables[0], c.op, limit, swapped=first is limit)
    else:
        result = t.b.unbounded(variables, shape, f"{c.op}: a comparison jumps")
    t.type_of(result, torch.bool)
    return result


RULES.update(dict.fromkeys(("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor"), _comparison))


@rule("Where")
def _where(t: Context, c: Call) -> Variable:
    condition, first, second = c.all()
    if isinstance(condition, Variable):
        known = t.patterns.choices.choice(condition, first, second)
        if known is not None:
            t.type_of(known, t.type_of(first if isinstance(first, Variable) else second))
            return known
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
    return merged(t.b, values[0], mask.flatten().nonzero().flatten(), values[1], mask)


# Moves


@rule("Concat")
def _concat(t: Context, c: Call) -> Variable:
    parts = c.all()
    for part in parts:
        if isinstance(part, Tensor):
            rules.exact(part, "constant")
    bounded([sum(math.prod(part.shape) for part in parts)])
    return joining.concatenated(t.b, parts, c.integer("axis"))


@rule("Shape", "Size")
def _shape(t: Context, c: Call) -> Tensor:
    return sizes_of(c, c.x().shape)


@rule("Cast", "CastLike")
def _cast(t: Context, c: Call) -> Value:
    x, other = c.get(0), c.get(1)
    dtype = t.type_of(other) if c.op == "CastLike" and other is not None else DTYPES.get(c.integer("to", 0))
    if isinstance(x, Tensor) and dtype is not None:
        return x.to(dtype)
    if dtype not in REAL:
        raise Unknown("rounding to integers, truth values or a few bits jumps")
    result = t.b.same(c.x())
    t.type_of(result, dtype)
    return result


@rule("Dropout")
def _dropout(t: Context, c: Call) -> Variable:
    training = c.optional(2, "mode")
    if training is not None and bool(training.any()):
        raise Unknown("in training mode it is random")
    return t.b.same(c.x())


_MODES: dict[str, PaddingMode] = {"constant": "zeros", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


@rule("Pad")
def _pad(t: Context, c: Call) -> Variable:
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
    if mode != "constant" or value == 0:
        return y
    inside = pad(torch.ones(x.shape), tuple(pairs[first:]), "zeros") > 0
    return t.b.shifted(y, torch.where(inside, 0.0, torch.full(inside.shape, value, dtype=torch.float64)))
