"""Operators of ONNX: values written by constant indices, windows put back into an image."""

from collections.abc import Callable

import torch
from torch import Tensor

from gramcert.auditing.onnx_call import Call, Context, Rule, axis_of, register
from gramcert.auditing.onnx_layers import per_axis
from gramcert.operators import indexing
from gramcert.operators.graph import Variable
from gramcert.operators.indexing import positions, written
from gramcert.operators.rules import Unknown

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register what some operators do."""
    return register(RULES, names)


def _written(t: Context, c: Call, targets: Tensor) -> Variable:
    data, updates = c.get(0), c.get(2)
    reduction = c.text("reduction", "none")
    if data is None or updates is None or reduction not in ("none", "add"):
        raise Unknown(f"the reduction {reduction}")
    return written(t.b, data, targets, updates, add=reduction == "add")


@rule("ScatterND")
def _scatter_nd(t: Context, c: Call) -> Variable:
    data, indices = c.all()[0], c.constant(1, "indices").long()
    return _written(t, c, positions(tuple(data.shape))[tuple(indices.unbind(-1))])


@rule("ScatterElements", "Scatter")
def _scatter_elements(t: Context, c: Call) -> Variable:
    data, indices = c.all()[0], c.constant(1, "indices").long()
    axis = axis_of(c.integer("axis", 0), len(data.shape))
    indices = torch.where(indices < 0, indices + data.shape[axis], indices)
    return _written(t, c, positions(tuple(data.shape)).gather(axis, indices))


@rule("Col2Im")
def _col2im(t: Context, c: Call) -> Variable:
    image, taps = c.integers("image_shape", 1) or [], c.integers("block_shape", 2) or []
    strides, dilations = (per_axis(c, name, len(taps)) for name in ("strides", "dilations"))
    amounts = c.integers("pads") or [0] * 2 * len(taps)
    padding = list(zip(amounts[: len(taps)], amounts[len(taps) :], strict=True))
    return indexing.folded(t.b, c.x(), image, taps, strides, padding, dilations)
