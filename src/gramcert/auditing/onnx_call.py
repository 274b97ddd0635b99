"""One node of an ONNX file with the values that it acts on, and what all rules need."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gramcert.auditing.onnx_file import OnnxNode
from gramcert.operators.graph import MOST_ENTRIES, Builder, Variable
from gramcert.operators.linear import Shape
from gramcert.operators.patterns import Patterns
from gramcert.operators.rules import Unknown

# Entries of all constants and places together, and integers that say what an operator is to do.
MOST_OF_ALL, MOST_INTEGERS = 4 * MOST_ENTRIES, 2**12

Value = Variable | Tensor
Result = Value | list[Variable] | list[Value]
Rule = Callable[["Context", "Call"], Result]

# The numbers of the file are taken as they are: an attribute is a float32, a constant has its own type.
EXACT = torch.float64

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


class Context:
    """What rules may use of the translation that they are part of."""

    def __init__(self) -> None:
        self.b = Builder()
        self.patterns = Patterns(self.b)
        self.types = self.b.graph.types  # of values, by the names of their nodes
        self._entries = 0  # of all constants and places so far

    def type_of(self, x: Value, new: torch.dtype | None = None) -> torch.dtype:
        """That of a value; ``new`` sets it."""
        if isinstance(x, Tensor):
            return x.dtype
        self.types[x.name] = new or self.types[x.name]
        return self.types[x.name]

    def moved(self, x: Variable, move: Callable[[Tensor], Tensor], name: str = "reshape") -> Variable:
        """Entries moved, within the limits of memory."""
        self.count(math.prod(x.shape))
        result = self.b.moved(x, move, name)
        self.count(math.prod(result.shape) - math.prod(x.shape))
        return result

    def count(self, entries: int) -> None:
        """So many more are held; refuse what is too large."""
        self._entries += entries
        if self._entries > MOST_OF_ALL:
            raise Unknown("too large to be followed: the model moves too many entries")

    def spread(self, x: Variable, *shapes: Shape) -> Variable:
        """Broadcast to the shape it has together with others."""
        self.count(math.prod(bounded(torch.broadcast_shapes(x.shape, *shapes))))
        return self.b.spread(x, *shapes)
