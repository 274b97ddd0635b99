"""What ONNX operators do with constants: sizes and indices that exported models compute."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from gramcert.auditing.onnx_call import Call, axis_of, bounded, register
from gramcert.auditing.onnx_file import DTYPES
from gramcert.auditing.onnx_moves import MOVES, Results
from gramcert.operators.rules import REAL, Unknown
from gramcert.rounding import exact_integers

# Products in a matrix product of constants.
MOST_PRODUCTS = 2**34

Fold = Callable[[Call], Results]

# Constants

FOLDS: dict[str, Fold] = {}

_EACH: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "Log": torch.log,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": torch.nn.functional.softplus,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
_PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Max": torch.maximum,
    "Min": torch.minimum,
    "Mul": torch.mul,
    "Or": torch.logical_or,
    "Sub": torch.sub,
    "Sum": torch.add,
    "Xor": torch.logical_xor,
}


def fold(*names: str) -> Callable[[Fold], Fold]:
    """Register what some operators do with constants."""
    return register(FOLDS, names)


def folded(c: Call) -> Results:
    """The results of a node that only has constants."""
    if c.op in FOLDS:
        return FOLDS[c.op](c)
    if c.op in MOVES:
        return MOVES[c.op](c.constant(0, "data"), c)
    raise Unknown("computed from constants by an operator that is not known")


def _tensors(c: Call) -> list[Tensor]:
    return [value for value in c.all() if isinstance(value, Tensor)]


@fold(*_EACH)
def _each(c: Call) -> Tensor:
    return _EACH[c.op](c.constant(0, "data"))


@fold(*_PAIRS)
def _pairs(c: Call) -> Tensor:
    first, *others = _tensors(c)
    for other in others:
        bounded(torch.broadcast_shapes(first.shape, other.shape))
        first = _PAIRS[c.op](first, other)
    return first


@fold("Pow")
def _pow(c: Call) -> Tensor:
    base, exponent = _tensors(c)
    bounded(torch.broadcast_shapes(base.shape, exponent.shape))
    return torch.pow(base, exponent).to(base.dtype)


@fold("Div", "Mod")
def _divided(c: Call) -> Tensor:
    """Integers by truncation. By -1 without a division, which stops the process for the smallest integer."""
    first, second = _tensors(c)
    bounded(torch.broadcast_shapes(first.shape, second.shape))
    if c.op == "Div" and first.dtype in REAL:
        return first / second
    by = second if second.dtype in REAL or not second.dtype.is_signed else torch.where(second == -1, 1, second)
    if c.op == "Mod":
        return torch.fmod(first, by) if c.integer("fmod", 0) else torch.remainder(first, by)
    quotient = torch.div(first, by, rounding_mode="trunc")
    return quotient if by is second else torch.where(second == -1, -quotient, quotient)


@fold("Constant")
def _constant(c: Call) -> Tensor:
    for name, dtype in (("value_int", torch.int64), ("value_ints", torch.int64)):
        if name in c.node.attributes:
            return torch.tensor(c.node.attributes[name], dtype=dtype)
    for name in ("value_float", "value_floats"):
        if name in c.node.attributes:
            return torch.tensor(c.node.attributes[name], dtype=torch.float32)
    value = c.node.attributes.get("value")
    if not isinstance(value, Tensor):
        raise Unknown("a constant that is not a tensor of numbers")
    return value


@fold("ConstantOfShape")
def _constant_of_shape(c: Call) -> Tensor:
    shape = bounded(c.integers("shape", 0) or [])
    value = c.node.attributes.get("value", torch.zeros(1))
    return value.reshape(()).expand(shape).contiguous()  # type: ignore[no-any-return]


@fold("Range")
def _range(c: Call) -> Tensor:
    """Runtimes add steps up or multiply them, in types of their own: only what none of them rounds is known."""
    start, limit, step = (value.item() for value in _tensors(c))
    exact = [Fraction(value) for value in (start, limit, step)]
    count = max(0, math.ceil((exact[1] - exact[0]) / exact[2]))
    bounded([count])
    dtype = c.constant(0, "start").dtype
    if dtype in REAL:
        unit = math.lcm(*(value.denominator for value in exact))
        if unit * max(map(abs, (*exact, exact[0] + count * exact[2]))) > exact_integers(dtype):
            raise Unknown("a range that depends on how a runtime rounds")
    steps = torch.arange(count, dtype=torch.float64 if dtype in REAL else torch.int64)
    return (start + step * steps).to(dtype)


@fold("Shape", "Size")
def _shape(c: Call) -> Tensor:
    return sizes_of(c, c.constant(0, "data").shape)


def sizes_of(c: Call, shape: Sequence[int]) -> Tensor:
    """Shape or Size of what has this shape."""
    if c.op == "Size":
        return torch.tensor(math.prod(shape))
    end = c.node.attributes.get("end")
    return torch.tensor(list(shape)[slice(c.integer("start", 0), end)], dtype=torch.int64)


@fold("Cast", "CastLike")
def _cast(c: Call) -> Tensor:
    dtype = c.constant(1, "type").dtype if c.op == "CastLike" else DTYPES.get(c.integer("to"))
    if dtype is None:
        raise Unknown("an unknown type")
    return c.constant(0, "data").to(dtype)


@fold("Concat")
def _concat(c: Call) -> Tensor:
    parts = _tensors(c)
    bounded([sum(part.numel() for part in parts)])
    return torch.cat(parts, axis_of(c.integer("axis", 1), parts[0].dim()))


@fold("Where")
def _where(c: Call) -> Tensor:
    condition, first, second = _tensors(c)
    bounded(torch.broadcast_shapes(condition.shape, first.shape, second.shape))
    return torch.where(condition.bool(), first, second)


@fold("Clip")
def _clip(c: Call) -> Tensor:
    if c.opset < 11:
        raise Unknown("computed from constants by an operator that is not known")
    return torch.clamp(c.constant(0, "data"), c.optional(1, "minimum"), c.optional(2, "maximum"))


@fold("ScatterND")
def _scatter_nd(c: Call) -> Tensor:
    data, indices, updates = _tensors(c)
    if c.text("reduction", "none") != "none":
        raise Unknown("a reduction")
    result = data.clone()
    result[tuple(indices.long().unbind(-1))] = updates
    return result


@fold("MatMul")
def _matmul(c: Call) -> Tensor:
    return _product(*_tensors(c))


def _product(first: Tensor, second: Tensor) -> Tensor:
    planned = torch.matmul(first.to("meta"), second.to("meta"))
    bounded(planned.shape)
    if planned.numel() * first.shape[-1] > MOST_PRODUCTS:
        raise Unknown("a product of large constants")
    return torch.matmul(first, second)


_BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "ReduceL1": torch.abs,
    "ReduceL2": torch.square,
    "ReduceSumSquare": torch.square,
    "ReduceLogSumExp": torch.exp,
}
_AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "ReduceL2": torch.sqrt,
    "ReduceLogSum": torch.log,
    "ReduceLogSumExp": torch.log,
}


@fold("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")
def _reduce_function(c: Call) -> Tensor:
    x = c.constant(0, "data")
    x = _BEFORE[c.op](x) if c.op in _BEFORE else x
    axes = reduced_axes(c, x.dim())
    x = x.sum(axes, bool(c.integer("keepdims", 1)), dtype=x.dtype) if axes else x
    return _AFTER[c.op](x) if c.op in _AFTER else x


@fold("Einsum")
def _einsum(c: Call) -> Tensor:
    operands, equation = _tensors(c), c.text("equation", "")
    sizes = torch.einsum(equation, *(operand.to("meta") for operand in operands))
    bounded(sizes.shape)
    if math.prod(operand.numel() for operand in operands) > MOST_PRODUCTS:
        raise Unknown("a product of large constants")
    return torch.einsum(equation, *operands)


@fold("Gemm")
def _gemm(c: Call) -> Tensor:
    first, second, *others = _tensors(c)
    first, second = (
        value.mT if c.integer(name, 0) else value for name, value in (("transA", first), ("transB", second))
    )
    if first.shape[0] * first.shape[1] * second.shape[1] > MOST_PRODUCTS:
        raise Unknown("a product of large constants")
    bounded([first.shape[0], second.shape[1]])
    product = c.real("alpha", 1.0) * (first @ second)
    return product + c.real("beta", 1.0) * others[0] if others else product


@fold("CumSum")
def _cumsum(c: Call) -> Tensor:
    x = c.constant(0, "data")
    if c.integer("exclusive", 0) or c.integer("reverse", 0):
        raise Unknown("computed from constants in an order that is not known")
    return x.cumsum(axis_of(int(c.constant(1, "axis")), x.dim()), dtype=x.dtype)


@fold("Softmax", "LogSoftmax")
def _softmax(c: Call) -> Tensor:
    if c.opset < 13:
        raise Unknown("computed from constants by an operator that is not known")
    x = c.constant(0, "data")
    axis = axis_of(c.integer("axis", -1), x.dim())
    return x.softmax(axis) if c.op == "Softmax" else x.log_softmax(axis)


@fold("InstanceNormalization")
def _instance_norm(c: Call) -> Tensor:
    x, scale, bias = _tensors(c)
    return torch.nn.functional.instance_norm(x, weight=scale, bias=bias, eps=c.real("epsilon", 1e-5))


@fold("LayerNormalization")
def _layer_norm(c: Call) -> Tensor:
    x, scale, bias = c.constant(0, "data"), c.constant(1, "scale"), c.optional(2, "bias")
    shape = x.shape[axis_of(c.integer("axis", -1), x.dim()) :]
    shifts = None if bias is None else bias.expand(shape)
    return torch.nn.functional.layer_norm(x, shape, scale.expand(shape), shifts, c.real("epsilon", 1e-5))


@fold("ReduceProd", "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin")
def _reduce(c: Call) -> Tensor:
    x = c.constant(0, "data")
    axes, keep = reduced_axes(c, x.dim()), bool(c.integer("keepdims", 1))
    for axis in sorted(axes, reverse=True):
        if c.op in ("ReduceMax", "ReduceMin"):
            x = x.amax(axis, keep) if c.op == "ReduceMax" else x.amin(axis, keep)
        elif c.op == "ReduceProd":
            x = x.prod(axis, keep, dtype=x.dtype)
        else:
            x = x.sum(axis, keep, dtype=x.dtype) if c.op == "ReduceSum" else x.mean(axis, keep)
    return x


def reduced_axes(c: Call, dim: int) -> list[int]:
    """Over which axes a reduction goes; none of them if it is to do nothing."""
    axes = c.axes(dim)
    if not axes:
        return [] if c.integer("noop_with_empty_axes", 0) else list(range(dim))
    return sorted(set(axes))
