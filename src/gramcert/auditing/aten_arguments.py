"""The arguments of one call of an operator of torch, and what all of its rules need."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gramcert.auditing.program import Call
from gramcert.operators import rules
from gramcert.operators.graph import MOST_ENTRIES, Builder, Variable
from gramcert.operators.patterns import Patterns
from gramcert.operators.rules import Unknown

Rule = Callable[["Context", "Arguments"], Any]


class Context:
    """What rules may use of the translation that they are part of."""

    def __init__(self) -> None:
        self.b = Builder()
        self.patterns = Patterns(self.b)
        self.types = self.b.graph.types  # of values that depend on the input, by the names of their nodes
        self.remedy = "export it again from evaluation mode"  # of layers in training mode
        self.shapeless: set[str] = set()  # names of nodes whose shape is not known

    def like(self, *values: Any) -> torch.dtype:
        """The type that scalars are rounded to beside these values: float32 also for half precision."""
        types = [self.type_of(x) for x in variables_in(list(values))]
        return torch.float64 if torch.float64 in types else torch.float32

    def type_of(self, x: Variable) -> torch.dtype:
        """That of a value; of one that a rule has just made, that of what it is made of."""
        name = x.name
        while name not in self.types and self.b.graph.nodes[name].inputs:
            name = self.b.graph.nodes[name].inputs[0]
        return self.types.get(name, torch.float32)


def registering(table: dict[str, Rule]) -> Callable[..., Callable[[Rule], Rule]]:
    """A decorator that puts a rule into a table under the names of operators."""

    def rule(*names: str) -> Callable[[Rule], Rule]:
        def register(function: Rule) -> Rule:
            table.update(dict.fromkeys(names, function))
            return function

        return register

    return rule


class Arguments:
    """The arguments of one call: constants, and :class:`Variable` for what depends on the input."""

    def __init__(self, call: Call, values: dict[str, Any]) -> None:
        self.target, self.values = call.target, values
        self.parts = call.target.split(".")

    @property
    def op(self) -> str:
        """Name without namespace, overload, and the mark of operators that overwrite their input."""
        return self.parts[1].rstrip("_") if len(self.parts) > 1 else self.parts[0]

    @property
    def in_place(self) -> bool:
        """Whether it overwrites its first argument."""
        return len(self.parts) > 1 and self.parts[1].endswith("_") and not self.parts[1].endswith("__")

    def get(self, name: str, default: Any = None) -> Any:
        """An argument that may be left out."""
        value = self.values.get(name, default)
        return default if value is None else value

    def x(self, *names: str) -> Variable:
        """The value it acts on."""
        for name in names or ("self", "input", "x"):
            value = self.values.get(name)
            if isinstance(value, Variable):
                return value
        raise Unknown("a constant where a value that depends on the input was expected")

    def constant(self, name: str) -> Tensor | None:
        """A tensor that does not depend on the input, or ``None``."""
        value = self.values.get(name)
        if isinstance(value, Variable):
            raise Unknown(f"its {name} depends on the input")
        if isinstance(value, Opaque):
            raise Unknown(f"its {name} is not known: {value.reason}")
        return value if isinstance(value, Tensor) else None

    def weight(self, name: str = "weight") -> Tensor:
        """A tensor that does not depend on the input."""
        value = self.constant(name)
        if value is None:
            raise Unknown(f"without a {name}")
        return value

    def number(self, name: str, default: float) -> float:
        """A number."""
        value = self.get(name, default)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, (int, float)):
            raise Unknown(f"its {name} is not a number")
        if not math.isfinite(value):
            raise Unknown(f"its {name} is not finite")
        return float(value)

    def ints(self, name: str, default: Any = None) -> list[int]:
        """Integers."""
        value = self.get(name, default)
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if not all(isinstance(item, int) for item in values):
            raise Unknown(f"its {name} are not integers")
        return values

    def per_axis(self, name: str, axes: int, default: Any) -> list[int]:
        """One integer per axis."""
        values = self.ints(name, default) or self.ints("", default)
        return values * axes if len(values) == 1 else values


class Opaque:
    """A constant that was not computed, for a reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def run(target: str, values: dict[str, Any]) -> Any:
    """An operator of torch by its name, after its result's size was looked at without making it."""
    _, op, overload = target.split(".")
    function = getattr(getattr(torch.ops.aten, op), overload)
    clean = {name: value for name, value in values.items() if name not in ("pin_memory", "layout", "device")}
    if isinstance(clean.get("indices"), list):
        clean["indices"] = [index for given in clean["indices"] for index in _without_mask(given)]
    takes_device = any(argument.name == "device" for argument in function._schema.arguments)
    planned = function(**_on_meta(clean), **({"device": "meta"} if takes_device else {}))
    total = sum(
        part.numel()
        for part in (planned if isinstance(planned, (list, tuple)) else [planned])
        if isinstance(part, Tensor)
    )
    if total > MOST_ENTRIES:
        raise Unknown(f"a constant of {total} entries")
    return function(**clean)


def _without_mask(index: Any) -> list[Any]:
    """Indices for a mask, one for each of its axes: the size of a result must not depend on its entries."""
    is_mask = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
    return list(index.nonzero().unbind(1)) if is_mask else [index]


def require_real(dtype: Any) -> None:
    """Refuse types whose values jump."""
    if isinstance(dtype, torch.dtype) and dtype not in rules.REAL:
        raise Unknown(f"rounding to {str(dtype).removeprefix('torch.')} jumps")


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {name: _on_meta(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_on_meta(item) for item in value]
    return value


def variables_in(values: Any) -> list[Variable]:
    """All values that depend on the input, in lists too."""
    if isinstance(values, Variable):
        return [values]
    if isinstance(values, Opaque):
        return []
    items = values.values() if isinstance(values, dict) else values if isinstance(values, (list, tuple)) else []
    return [found for item in items for found in variables_in(item)]


def constants_in(values: Any) -> list[object]:
    """What is left of the arguments without the values that depend on the input."""
    if isinstance(values, (Variable, Opaque)):
        return []
    if isinstance(values, dict):
        return [found for name in sorted(values) for found in (name, *constants_in(values[name]))]
    if isinstance(values, (list, tuple)):
        return [found for item in values for found in constants_in(item)]
    return [values]


def known(value: Any) -> Any:
    """A value or constant, unless it is one that was not computed."""
    if isinstance(value, Opaque):
        raise Unknown(value.reason)
    return value


def number_of(value: Any) -> float | None:
    """A number, also as a tensor with one entry."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    return float(value) if isinstance(value, (int, float)) else None


def spread(t: Context, x: Variable, *others: Any) -> Variable:
    """A value repeated to the shape that it has beside others."""
    return t.b.spread(x, *(tuple(getattr(other, "shape", ())) for other in others))


def further_results(t: Context, a: Arguments, count: int) -> list[Variable]:
    """Further results, of which nothing is known."""
    results = [t.b.unbounded((a.x(),), (), f"{a.op}: its further results are not followed") for _ in range(count)]
    t.shapeless.update(x.name for x in results)
    return results
