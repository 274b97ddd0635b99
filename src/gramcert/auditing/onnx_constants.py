"""What ONNX operators do with constants: sizes and indices that exported models compute, and entries that only move.

The functions that move entries serve twice: constants are moved by them, and so are the places of a value that depends
on the input.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from gramcert.auditing.graph import MOST_ENTRIES, Variable
from gramcert.auditing.onnx_file import DTYPES, OnnxNode
from gramcert.auditing.rules import REAL, Unknown
from gramcert.rounding import exact_integers

if TYPE_CHECKING:
    from gramcert.auditing.onnx_nodes import Translator

# Products in a matrix product of constants, and integers that say what an operator is to do.
MOST_PRODUCTS, MOST_INTEGERS = 2**34, 2**12

Value = Variable | Tensor
Result = Value | list[Variable] | list[Value]
Rule = Callable[["Translator", "Call"], Result]

# The numbers of the file are taken as they are: an attribute is a float32, a constant has its own type.
EXACT = torch.float64

Results = Tensor | list[Tensor]
Move = Callable[[Tensor, "Call"], Results]
Fold = Callable[["Call"], Results]
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Call:
    """A node with the values that it acts on: constants, and :class:`Variable` for what depends on the input."""

    node: OnnxNode
    values: Sequence[Variable | Tensor | None]
    opset: int

    @property
    def op(self) -> str:
        """Such as ``Conv``."""
        return self.node.op_type

    def get(self, index: int) -> Variable | Tensor | None:
        """An input that may be left out."""
        return self.values[index] if index < len(self.values) else None

    def x(self, index: int = 0) -> Variable:
        """An input that depends on that of the model."""
        value = self.get(index)
        if not isinstance(value, Variable):
            raise Unknown("a constant where a value that depends on the input was expected")
        return value

    def all(self) -> list[Variable | Tensor]:
        """All inputs, of which none is left out."""
        if None in [value if value is None else 0 for value in self.values] or not self.values:
            raise Unknown("an input is left out")
        return [value for value in self.values if value is not None]

    def optional(self, index: int, what: str) -> Tensor | None:
        """A constant that may be left out."""
        value = self.get(index)
        if isinstance(value, Variable):
            raise Unknown(f"its {what} depends on the input")
        return value

    def constant(self, index: int, what: str) -> Tensor:
        """A constant."""
        value = self.optional(index, what)
        if value is None:
            raise Unknown(f"without a {what}")
        return value

    def real(self, name: str, default: float) -> float:
        """A number, which the format has in float32."""
        value = self.node.attributes.get(name, default)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise Unknown(f"its {name} is not a finite number")
        return float(torch.tensor(float(value), dtype=torch.float32))

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer."""
        value = self.node.attributes.get(name, default)
        if not isinstance(value, int):
            raise Unknown(f"its {name} is not an integer")
        return value

    def text(self, name: str, default: str) -> str:
        """A text."""
        return str(self.node.attributes.get(name, default))

    def integers(self, name: str, index: int | None = None) -> list[int] | None:
        """Integers, which older versions have as an attribute and newer ones as an input; ``None`` if left out."""
        found = None if index is None else self.optional(index, name)
        if found is not None and (found.is_floating_point() or found.dim() > 1 or found.numel() > MOST_INTEGERS):
            raise Unknown(f"its {name} are not integers")
        values = self.node.attributes.get(name) if found is None else found.reshape(-1).tolist()
        if values is None:
            return None
        if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
            raise Unknown(f"its {name} are not integers")
        return values

    def axes(self, dim: int, index: int | None = 1) -> list[int] | None:
        """Axes counted from the first; ``None`` if left out."""
        values = self.integers("axes", index)
        return None if values is None else [axis_of(axis, dim) for axis in values]


def axis_of(axis: int, dim: int) -> int:
    """An axis counted from the first."""
    if not -dim <= axis < dim:
        raise Unknown(f"axis {axis} of a value with {dim} axes")
    return axis % dim


def bounded(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape, before anything of it is made."""
    count = math.prod(shape)
    if count > MOST_ENTRIES or min(shape, default=0) < 0:
        raise Unknown(f"too large to be followed: {count} entries")
    return tuple(shape)


def register(table: dict[str, _F], names: tuple[str, ...]) -> Callable[[_F], _F]:
    """Under several names."""

    def decorator(function: _F) -> _F:
        table.update(dict.fromkeys(names, function))
        return function

    return decorator


# Entries that only move


MOVES: dict[str, Move] = {}


def move(*names: str) -> Callable[[Move], Move]:
    """Register what some operators do to the places of a tensor."""
    return register(MOVES, names)


@move("Identity")
def _identity(x: Tensor, c: Call) -> Tensor:
    return x


@move("Reshape")
def _reshape(x: Tensor, c: Call) -> Tensor:
    sizes = c.integers("shape", 1) or []
    if not c.integer("allowzero", 0):
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


@move("Flatten")
def _flatten(x: Tensor, c: Call) -> Tensor:
    axis = c.integer("axis", 1)
    axis = axis if axis == x.dim() else axis_of(axis, x.dim())
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@move("Transpose")
def _transpose(x: Tensor, c: Call) -> Tensor:
    order = c.integers("perm")
    return x.permute(list(range(x.dim()))[::-1] if order is None else order)


@move("Squeeze")
def _squeeze(x: Tensor, c: Call) -> Tensor:
    axes = c.axes(x.dim())
    if axes is None:
        return x.squeeze()
    if any(x.shape[axis] != 1 for axis in axes):
        raise Unknown("an axis with more than one place")
    return x.reshape([size for axis, size in enumerate(x.shape) if axis not in axes])


@move("Unsqueeze")
def _unsqueeze(x: Tensor, c: Call) -> Tensor:
    given = c.integers("axes", 1) or []
    axes = {axis_of(axis, x.dim() + len(given)) for axis in given}
    sizes = iter(x.shape)
    return x.reshape([1 if axis in axes else next(sizes) for axis in range(x.dim() + len(axes))])


@move("Expand")
def _expand(x: Tensor, c: Call) -> Tensor:
    shape = torch.broadcast_shapes(x.shape, c.integers("shape", 1) or [])
    return x.expand(bounded(shape)).contiguous()


@move("Tile")
def _tile(x: Tensor, c: Call) -> Tensor:
    repeats = c.integers("repeats", 1) or []
    if len(repeats) != x.dim():
        raise Unknown(f"{len(repeats)} repeats of {x.dim()} axes")
    bounded([size * count for size, count in zip(x.shape, repeats, strict=True)])
    return x.repeat(repeats)


@move("Slice")
def _slice(x: Tensor, c: Call) -> Tensor:
    starts, ends = c.integers("starts", 1), c.integers("ends", 2)
    if starts is None or ends is None:
        raise Unknown("without starts or ends")
    axes = c.axes(x.dim(), 3)
    axes = list(range(len(starts))) if axes is None else axes
    for start, end, axis, step in zip(starts, ends, axes, c.integers("steps", 4) or [1] * len(starts), strict=True):
        taken = range(*slice(start, end, step).indices(x.shape[axis]))
        places = torch.arange(taken.start, taken.stop, taken.step) if taken else torch.arange(0)
        x = x.index_select(axis, places)
    return x


@move("Split")
def _split(x: Tensor, c: Call) -> list[Tensor]:
    axis, count = axis_of(c.integer("axis", 0), x.dim()), len(c.node.outputs)
    size = x.shape[axis]
    sizes = c.integers("split", 1)
    if sizes is None:
        each = -(-size // count)
        sizes = [max(0, min(each, size - part * each)) for part in range(count)]
    if len(sizes) != count:
        raise Unknown(f"{len(sizes)} sizes of {count} parts")
    return list(x.split(sizes, axis))


def _indices(c: Call, size: int) -> Tensor:
    indices = c.constant(1, "indices").long()
    if indices.numel() and not (int(indices.min()) >= -size and int(indices.max()) < size):
        raise Unknown(f"indices outside of {size} places")
    return torch.where(indices < 0, indices + size, indices)


@move("Gather")
def _gather(x: Tensor, c: Call) -> Tensor:
    axis = axis_of(c.integer("axis", 0), x.dim())
    indices = _indices(c, x.shape[axis])
    shape = bounded([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])
    return x.index_select(axis, indices.flatten()).reshape(shape)


@move("GatherElements")
def _gather_elements(x: Tensor, c: Call) -> Tensor:
    axis = axis_of(c.integer("axis", 0), x.dim())
    return x.gather(axis, _indices(c, x.shape[axis]))


@move("GatherND")
def _gather_nd(x: Tensor, c: Call) -> Tensor:
    indices = c.constant(1, "indices").long()
    if c.integer("batch_dims", 0) or not 1 <= indices.shape[-1] <= x.dim():
        raise Unknown("indices with axes of a batch")
    bounded([*indices.shape[:-1], *x.shape[indices.shape[-1] :]])
    return x[tuple(indices.unbind(-1))]


@move("DepthToSpace")
def _depth_to_space(x: Tensor, c: Call) -> Tensor:
    (n, channels, height, width), side = x.shape, c.integer("blocksize")
    if c.text("mode", "DCR") == "CRD":
        x = x.reshape(n, channels // side**2, side, side, height, width).permute(0, 1, 4, 2, 5, 3)
    else:
        x = x.reshape(n, side, side, channels // side**2, height, width).permute(0, 3, 4, 1, 5, 2)
    return x.reshape(n, channels // side**2, height * side, width * side)


@move("SpaceToDepth")
def _space_to_depth(x: Tensor, c: Call) -> Tensor:
    (n, channels, height, width), side = x.shape, c.integer("blocksize")
    x = x.reshape(n, channels, height // side, side, width // side, side).permute(0, 3, 5, 1, 2, 4)
    return x.reshape(n, channels * side**2, height // side, width // side)


@move("Trilu")
def _trilu(x: Tensor, c: Call) -> Tensor:
    diagonal = c.optional(1, "diagonal")
    offset = 0 if diagonal is None else max(-(2**31), min(2**31, int(diagonal)))
    return x.triu(offset) if c.integer("upper", 1) else x.tril(offset)


# Constants

FOLDS: dict[str, Fold] = {}

_EACH: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
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
    "Sqrt": torch.sqrt,
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
    first, second = _tensors(c)
    planned = torch.matmul(first.to("meta"), second.to("meta"))
    bounded(planned.shape)
    if planned.numel() * first.shape[-1] > MOST_PRODUCTS:
        raise Unknown("a product of large constants")
    return torch.matmul(first, second)


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
