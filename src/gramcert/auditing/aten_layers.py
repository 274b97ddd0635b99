"""Operators of torch: linear layers, sums and products, values side by side."""

import math
from typing import Any

import torch
from torch import Tensor

from gramcert.auditing.aten_arguments import (
    Arguments,
    Context,
    Rule,
    further_results,
    known,
    number_of,
    registering,
    require_real,
    spread,
)
from gramcert.operators import joining, rules
from gramcert.operators.graph import Variable
from gramcert.operators.indexing import merged
from gramcert.operators.rules import Unknown
from gramcert.rounding import gamma, norm_up, up

IN_TRAINING = "batch normalisation in training mode mixes the examples of a batch"
WITHOUT_STATISTICS = (
    "batch normalisation that keeps no running statistics (track_running_stats=False) normalises by the batch itself, "
    "in evaluation mode too"
)

RULES: dict[str, Rule] = {}
rule = registering(RULES)


@rule("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _convolution(t: Context, a: Arguments) -> Variable:
    padding = a.get("padding", 0)
    result = rules.convolution(
        t.b,
        a.x(),
        a.weight(),
        stride=a.get("stride", 1),
        padding=padding,
        dilation=a.get("dilation", 1),
        groups=a.get("groups", 1),
        transposed=a.op.startswith("conv_transpose") or bool(a.get("transposed", False)),
        output_padding=a.get("output_padding", 0),
    )
    return rules.biased(t.b, result, a.constant("bias"), 1 - a.weight().dim())


@rule("linear")
def _linear(t: Context, a: Arguments) -> Variable:
    return rules.biased(t.b, rules.matrix(t.b, a.x(), a.weight()), a.constant("bias"))


def kept(t: Context, value: Any, beside: Variable) -> Tensor | None:
    """A constant in float64 as it is beside a value; ``None`` if it is not finite, which no difference shows."""
    value = known(value)
    if isinstance(value, Tensor) and value.dim():
        wide = value.double()
    elif not math.isfinite(value):
        return None
    else:
        wide = torch.tensor(rules.typed(float(value), t.like(beside)), dtype=torch.float64)
    return wide if bool(wide.isfinite().all()) else None


def _plus_multiple(t: Context, x: Variable, constant: Any, factor: float) -> Variable:
    """Plus a multiple of a constant, which may be rounded."""
    values, factor = kept(t, constant, x), rules.typed(factor, t.like(x))
    if values is None:
        raise Unknown("its summand has entries that are not finite")
    x, offset = t.b.spread(x, tuple(values.shape)), factor * values
    off = 0.0 if abs(factor) == 1 else up(gamma(2) * norm_up(offset.expand(x.shape)))
    return t.b.shifted(x, offset, off)


@rule("batch_norm", "_native_batch_norm_legit_no_training", "native_batch_norm")
def _batch_norm(t: Context, a: Arguments) -> Any:
    if a.get("training", False):
        kept = a.values.get("running_mean") is not None
        raise Unknown(f"{IN_TRAINING}; {t.remedy}" if kept else WITHOUT_STATISTICS)
    mean, variance = a.constant("running_mean"), a.constant("running_var")
    weight, bias = a.constant("weight"), a.constant("bias")
    result = rules.batch_norm(t.b, a.x(), weight, bias, mean, variance, a.number("eps", 1e-5))
    return result if a.op == "batch_norm" else [result, *further_results(t, a, 3)]


@rule("add", "sub", "rsub")
def _add(t: Context, a: Arguments) -> Variable:
    first, second = a.values["self"], a.get("other")
    sign = -1 if a.op != "add" else 1
    if a.op == "rsub":
        first, second = second, first
    alpha = a.number("alpha", 1)
    like = t.like(first, second)
    if alpha != 1 and isinstance(second, Variable):
        second = rules.times(t.b, second, alpha, like)
    elif alpha != 1:
        return _plus_multiple(t, first, known(second), sign * alpha)
    return t.patterns.sum(known(first), known(second), sign, like)


@rule("mul")
def _mul(t: Context, a: Arguments) -> Variable:
    first, second = known(a.values["self"]), known(a.values["other"])
    return t.patterns.product(first, second, t.like(first, second))


@rule("div", "true_divide")
def _div(t: Context, a: Arguments) -> Variable:
    if a.get("rounding_mode") is not None:
        raise Unknown("a division that is rounded jumps")
    first, second = known(a.values["self"]), known(a.values["other"])
    return t.patterns.quotient(first, second, t.like(first, second))


@rule("neg")
def _neg(t: Context, a: Arguments) -> Variable:
    return t.b.scaled(a.x(), -1.0)


@rule("mean", "sum")
def _reduce(t: Context, a: Arguments) -> Variable:
    axes = a.get("dim", [])
    axes = [axes] if isinstance(axes, int) else axes
    require_real(a.get("dtype"))
    return rules.reduce_linear(t.b, a.x(), axes, keep=bool(a.get("keepdim", False)), mean=a.op == "mean")


@rule("where")
def _where(t: Context, a: Arguments) -> Variable:
    condition, first, second = (a.values[name] for name in ("condition", "self", "other"))
    if isinstance(condition, Variable):
        number = number_of(first)
        found = None
        shapes = [tuple(getattr(value, "shape", ())) for value in (condition, first, second)]
        is_plain = tuple(torch.broadcast_shapes(*shapes)) == shapes[2] == shapes[0]
        if number is not None and isinstance(second, Variable) and is_plain:
            found = t.patterns.guard(condition, number, second)
        if found is None:
            found = _choice(t, condition, known(first), known(second))
        if found is None:
            raise Unknown("a choice that depends on the input")
        return found
    if isinstance(first, Variable) and isinstance(second, Variable):
        shape = tuple(torch.broadcast_shapes(condition.shape, first.shape, second.shape))
        mask = condition.expand(shape)
        return merged(
            t.b, t.b.spread(first, shape), mask.flatten().nonzero().flatten(), t.b.spread(second, shape), mask
        )
    x, constant, chosen = (first, second, ~condition) if isinstance(first, Variable) else (second, first, condition)
    numbers, y = kept(t, constant, x), spread(t, t.b.scaled(x, (~chosen).double()), constant)
    return t.b.shifted(y, None if numbers is None else torch.where(chosen, numbers, 0.0))


def _choice(t: Context, condition: Variable, first: Any, second: Any) -> Variable | None:
    """A choice that is a known function, with numbers as they are beside the value."""
    beside = [value for value in (first, second) if isinstance(value, Variable)]
    if not beside:
        return None
    values = [value if isinstance(value, Variable) else _limit(t, value, beside[0]) for value in (first, second)]
    yes, no = values
    return None if yes is None or no is None else t.patterns.choices.choice(condition, yes, no)


def _limit(t: Context, value: Any, beside: Variable) -> Tensor | None:
    """A number as it is beside a value; ``None`` where it may be rounded here and not there.

    That is in half precision, and of tensors whose type may be promoted.
    """
    dtype = t.type_of(beside)
    if dtype not in (torch.float32, torch.float64) or number_of(value) is None:
        return None
    if isinstance(value, Tensor) and value.item() != value.to(dtype).item():
        return None
    return kept(t, value, beside)


@rule("gt", "ge", "lt", "le")
def _compared(t: Context, a: Arguments) -> Variable:
    first, second = known(a.values["self"]), known(a.values["other"])
    if isinstance(first, Variable) and isinstance(second, Variable):
        raise Unknown("a comparison jumps")
    x, constant = (first, second) if isinstance(first, Variable) else (second, first)
    return t.patterns.choices.compared(spread(t, x, constant), a.op, _limit(t, constant, x), swapped=x is second)


@rule("log")
def _log(t: Context, a: Arguments) -> Variable:
    return t.patterns.logarithm(a.x())


@rule("masked_fill")
def _masked_fill(t: Context, a: Arguments) -> Variable:
    if isinstance(a.values["mask"], Variable):
        raise Unknown(rules.CHOICE)
    if isinstance(a.values["value"], Variable):
        raise Unknown("its value depends on the input")
    mask, number = a.weight("mask"), kept(t, a.values["value"], a.x())
    x = t.b.scaled(a.x(), (~mask).double())
    return t.b.shifted(x, None if number is None else torch.where(mask, number, 0.0))


@rule("eq")
def _eq(t: Context, a: Arguments) -> Variable:
    if number_of(a.values["other"]) != 0:
        raise Unknown("a comparison jumps")
    return t.patterns.zero_test(spread(t, a.x(), a.values["other"]))


@rule("cat", "concat", "concatenate")
def _cat(t: Context, a: Arguments) -> Variable:
    return _concatenated(t, a.get("tensors"), a.get("dim", 0))


def _concatenated(t: Context, parts: list[Any], axis: int) -> Variable:
    return joining.concatenated(t.b, [known(part) for part in parts], axis)


@rule("stack")
def _stack(t: Context, a: Arguments) -> Variable:
    axis = a.get("dim", 0)
    parts = [
        part.unsqueeze(axis) if isinstance(part, Tensor) else t.b.moved(part, lambda places: places.unsqueeze(axis))
        for part in a.get("tensors")
    ]
    return _concatenated(t, parts, axis)
