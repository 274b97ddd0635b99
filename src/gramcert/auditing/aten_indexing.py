"""Operators of torch: entries read and written by constant indices and masks."""

from typing import Any

import torch
from torch import Tensor

from gramcert.auditing.aten_arguments import Arguments, Context, Rule, known, registering, run
from gramcert.operators import indexing, rules
from gramcert.operators.graph import Variable
from gramcert.operators.indexing import positions, written
from gramcert.operators.rules import Unknown

RULES: dict[str, Rule] = {}
rule = registering(RULES)

Value = Variable | Tensor

# What is written by an operator is where another one reads.
_READING = {
    "scatter": ("gather", ("dim", "index")),
    "scatter_add": ("gather", ("dim", "index")),
    "index_add": ("index_select", ("dim", "index")),
    "index_copy": ("index_select", ("dim", "index")),
    "index_put": ("index.Tensor", ("indices",)),
    "select_scatter": ("select.int", ("dim", "index")),
    "slice_scatter": ("slice.Tensor", ("dim", "start", "end", "step")),
    "diagonal_scatter": ("diagonal", ("offset", "dim1", "dim2")),
}


@rule(*_READING)
def _written(t: Context, a: Arguments) -> Variable:
    base = known(a.values["self"])
    reader, names = _READING[a.op]
    arguments = {name: a.values[name] for name in names if a.values.get(name) is not None}
    if any(isinstance(value, Variable) for value in _flat(arguments)):
        raise Unknown(rules.CHOICE if a.op == "index_put" else "indices that depend on the input")
    for value in _flat(arguments):
        known(value)
    if a.get("reduce") is not None:
        raise Unknown(f"the reduction {a.get('reduce')}")
    target = f"aten.{reader}" if "." in reader else f"aten.{reader}.default"
    targets = run(target, {"self": positions(tuple(base.shape))} | arguments)
    values = next(
        known(a.values[name]) for name in ("src", "source", "values", "value") if a.values.get(name) is not None
    )
    values = _fitting(t, values, targets, cut=a.op.startswith("scatter"))
    if (alpha := a.number("alpha", 1)) != 1:
        like = t.like(values)
        if not isinstance(values, Variable):
            return t.b.shifted(base, None)  # whose rounding is not followed
        values = rules.times(t.b, values, alpha, like)
    add = a.op in ("scatter_add", "index_add") or bool(a.get("accumulate", False))
    return written(t.b, base, targets, values, add=add)


def _fitting(t: Context, values: Any, targets: Tensor, *, cut: bool) -> Value:
    """Values in the shape of their targets: a number, or more than are written, as scatter allows, or fewer."""
    if isinstance(values, (int, float)):
        return torch.full(targets.shape, float(values), dtype=torch.float64)
    if cut and len(values.shape) == targets.dim():
        part = tuple(slice(0, size) for size in targets.shape)
        if isinstance(values, Tensor):
            return values[part]
        return t.b.moved(values, lambda places: places[part], "slice") if values.shape != targets.shape else values
    if tuple(values.shape) == tuple(targets.shape):
        return values  # type: ignore[no-any-return]
    if isinstance(values, Tensor):
        return values.expand(targets.shape)
    return t.b.moved(values, lambda places: places.expand(targets.shape), "expand")


def _flat(values: Any) -> list[Any]:
    items = values.values() if isinstance(values, dict) else values if isinstance(values, (list, tuple)) else None
    return [values] if items is None else [found for item in items for found in _flat(item)]


@rule("masked_select", "masked_scatter")
def _masked(t: Context, a: Arguments) -> Variable:
    """Entries where a constant mask is true, in a row; or others written there."""
    if isinstance(a.values["mask"], Variable):
        raise Unknown(rules.CHOICE)
    base, mask = known(a.values["self"]), a.weight("mask")
    if mask.dtype != torch.bool:
        raise Unknown("a mask that is none")
    shape = tuple(torch.broadcast_shapes(base.shape, mask.shape))
    chosen = positions(shape)[mask.expand(shape)]
    if a.op == "masked_select":
        return t.b.moved(a.x(), lambda places: places.expand(shape).flatten()[chosen], "slice")
    source = known(a.values["source"])
    if shape != tuple(base.shape):
        raise Unknown(f"a mask of shape {tuple(mask.shape)}")
    count = len(chosen)
    values = (
        source.flatten()[:count]
        if isinstance(source, Tensor)
        else t.b.moved(source, lambda places: places.flatten()[:count], "slice")
    )
    return written(t.b, base, chosen, values, add=False)


@rule("col2im")
def _fold(t: Context, a: Arguments) -> Variable:
    x, image = a.x(), a.ints("output_size")
    axes = len(image)
    padding = [(side, side) for side in a.per_axis("padding", axes, 0)]
    sizes = (a.per_axis(name, axes, default) for name, default in (("kernel_size", 1), ("stride", 1), ("dilation", 1)))
    taps, strides, dilations = sizes
    return indexing.folded(t.b, x, image, taps, strides, padding, dilations)
