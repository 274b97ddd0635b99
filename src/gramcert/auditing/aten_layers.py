"""Operators of torch: linear layers, sums and products, values side by side."""

from typing import Any

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
    with_bias,
)
from gramcert.operators import joining, rules
from gramcert.operators.graph import Variable
from gramcert.operators.rules import Unknown

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
    return with_bias(t, a, result)


@rule("linear")
def _linear(t: Context, a: Arguments) -> Variable:
    return with_bias(t, a, rules.matrix(t.b, a.x(), a.weight()))


@rule("batch_norm", "_native_batch_norm_legit_no_training", "native_batch_norm")
def _batch_norm(t: Context, a: Arguments) -> Any:
    if a.get("training", False):
        raise Unknown(
            "batch normalisation in training mode mixes the examples of a batch: .eval(), and export it again"
        )
    mean, variance = a.constant("running_mean"), a.constant("running_var")
    result = rules.batch_norm(t.b, a.x(), a.constant("weight"), mean, variance, a.number("eps", 1e-5))
    result = t.patterns.shifted(result, None)
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
    total = t.patterns.sum(known(first), known(second), sign, like)
    return total if alpha == 1 or isinstance(second, Variable) else t.patterns.shifted(total, None)


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
        if number is not None and isinstance(second, Variable):
            found = t.patterns.guard(condition, number, second)
        if found is None:
            raise Unknown("a choice that depends on the input")
        return found
    terms = []
    for value, mask, other in ((first, condition, second), (second, ~condition, first)):
        if isinstance(value, Variable):
            terms.append((spread(t, t.b.scaled(value, mask.double()), other), 1))
    return t.b.sum(terms) if len(terms) > 1 else t.patterns.shifted(terms[0][0], None)


@rule("masked_fill")
def _masked_fill(t: Context, a: Arguments) -> Variable:
    a.constant("value")
    return t.patterns.shifted(t.b.scaled(a.x(), (~a.weight("mask")).double()), None)


@rule("eq")
def _eq(t: Context, a: Arguments) -> Variable:
    if number_of(a.values["other"]) != 0:
        raise Unknown("a comparison jumps")
    return t.patterns.zero_test(a.x())


@rule("cat", "concat", "concatenate")
def _cat(t: Context, a: Arguments) -> Variable:
    return _concatenated(t, a.get("tensors"), a.get("dim", 0))


def _concatenated(t: Context, parts: list[Any], axis: int) -> Variable:
    result = joining.concatenated(t.b, [known(part) for part in parts], axis)
    return t.patterns.shifted(result, None) if any(isinstance(part, Tensor) for part in parts) else result


@rule("stack")
def _stack(t: Context, a: Arguments) -> Variable:
    axis = a.get("dim", 0)
    parts = [
        part.unsqueeze(axis) if isinstance(part, Tensor) else t.b.moved(part, lambda places: places.unsqueeze(axis))
        for part in a.get("tensors")
    ]
    return _concatenated(t, parts, axis)
