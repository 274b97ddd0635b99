"""Operators of torch: orders, lengths, means of squares and their roots."""

from typing import Any

import torch

from gramcert.auditing.aten_arguments import Arguments, Context, Rule, further_results, number_of, registering
from gramcert.operators import joining, rules
from gramcert.operators.graph import Nonlinear, Variable
from gramcert.operators.linear import Shape
from gramcert.operators.rounded import selecting
from gramcert.operators.rules import Unknown

RULES: dict[str, Rule] = {}
rule = registering(RULES)


def reduced(a: Arguments, default: int | None = None) -> tuple[list[int], Shape]:
    """Over which axes an operator goes, all if nothing else is said, and the shape of its result."""
    x, axes = a.x(), a.get("dim", [] if default is None else default)
    axes = [rules.axis_of(axis, x.dim) for axis in ([axes] if isinstance(axes, int) else axes)] or list(range(x.dim))
    keep = bool(a.get("keepdim", False))
    return axes, tuple(1 if axis in axes else n for axis, n in enumerate(x.shape) if keep or axis not in axes)


@rule("amax", "amin")
def largest(t: Context, a: Arguments) -> Any:
    """The largest or smallest entry along some axes."""
    result = joining.extreme_entry(t.b, a.x(), *reduced(a), largest="max" in a.op)
    return [result, *further_results(t, a, 1)] if a.parts[-1] == "dim" else result


@rule("sort", "msort")
def _sort(t: Context, a: Arguments) -> Any:
    axis = rules.axis_of(a.get("dim", -1 if a.op == "sort" else 0), a.x().dim) + 1
    is_falling = bool(a.get("descending", False))
    compute = selecting(lambda x: x.sort(axis, descending=is_falling).values)
    result = t.b.nonlinear(a.x(), Nonlinear(1.0, "sort", why="a permutation of its input", compute=compute))
    return [result, *further_results(t, a, 1)] if a.op == "sort" else result


@rule("topk")
def _topk(t: Context, a: Arguments) -> Any:
    x, count = a.x(), int(a.number("k", 1))
    axis = rules.axis_of(a.get("dim", -1), x.dim)
    if not a.get("sorted", True) or not 0 <= count <= x.shape[axis]:
        raise Unknown("in an order that is not known")
    shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    is_falling = bool(a.get("largest", True))
    compute = selecting(lambda x: x.sort(axis + 1, descending=is_falling).values.narrow(axis + 1, 0, count))
    operation = Nonlinear(1.0, "largest entries", why="entries of a sorted value", compute=compute)
    return [t.b.nonlinear(x, operation, shape), *further_results(t, a, 1)]


@rule("kthvalue", "median")
def _one_of_sorted(t: Context, a: Arguments) -> Any:
    """Torch's median is an entry too, the lower one of two in the middle."""
    shape = reduced(a, -1 if a.op == "kthvalue" else None)[1]
    result = t.b.nonlinear(a.x(), Nonlinear(1.0, "entry of a sorted value", why="entries occur once"), shape)
    return [result, *further_results(t, a, 1)] if a.op == "kthvalue" or a.parts[-1] == "dim" else result


@rule("logsumexp")
def _log_sum_exp(t: Context, a: Arguments) -> Variable:
    return rules.log_sum_exp(t.b, a.x(), *reduced(a))


@rule("linalg_vector_norm", "norm", "linalg_norm")
def _norm(t: Context, a: Arguments) -> Variable:
    r"""‖x‖_p <= ‖x‖₂ for p >= 2; ‖x‖₁ is a sum of sizes."""
    order = a.get("ord", a.get("p", 2))
    order = 2.0 if order == "fro" else number_of(order)
    axes, shape = reduced(a)
    if a.op == "linalg_norm" and a.get("ord") is not None and len(axes) != 1 and a.get("ord") != "fro":
        raise Unknown("a norm of matrices")
    if isinstance(a.get("dtype"), torch.dtype) and a.get("dtype") not in rules.REAL:
        raise Unknown("a norm of complex numbers")
    if order == 1:
        sizes = rules.activation(t.b, a.x(), "abs")
        return rules.reduce_linear(t.b, sizes, axes, keep=bool(a.get("keepdim", False)), mean=False)
    if order is None or not order >= 2:
        raise Unknown(f"a norm of order {order}")
    if order == 2:
        return rules.length(t.b, a.x(), axes, shape)
    return t.b.nonlinear(a.x(), Nonlinear(1.0, f"norm of order {order:g}", why="a norm of disjoint parts"), shape)


@rule("var", "std", "var_mean", "std_mean")
def _variance(t: Context, a: Arguments) -> Any:
    """The variance has no constant, its root one."""
    x, (axes, _), keep = a.x(), reduced(a), bool(a.get("keepdim", False))
    correction = a.get("correction", 1) if a.get("unbiased", True) else 0
    if not isinstance(correction, (int, float)):
        raise Unknown("a correction that is not a number")
    result = t.patterns.variance(x, axes, keep=keep, correction=float(correction))
    result = t.patterns.root(result) if a.op.startswith("std") else result
    if not a.op.endswith("mean"):
        return result
    return [result, rules.reduce_linear(t.b, x, axes, keep=keep, mean=True)]


@rule("pow", "square")
def _pow(t: Context, a: Arguments) -> Variable:
    if a.op == "pow" and isinstance(a.values["exponent"], Variable):
        raise Unknown("an exponent that depends on the input")
    if a.op == "square":
        return t.patterns.power(a.x(), 2.0)
    exponent = a.values["exponent"]
    return t.patterns.power(t.b.spread(a.x(), tuple(getattr(exponent, "shape", ()))), number_of(exponent))


@rule("sqrt")
def _sqrt(t: Context, a: Arguments) -> Variable:
    return t.patterns.root(a.x())


@rule("rsqrt")
def _rsqrt(t: Context, a: Arguments) -> Variable:
    return t.patterns.inverse_root(a.x())


@rule("reciprocal")
def _reciprocal(t: Context, a: Arguments) -> Variable:
    return t.patterns.reciprocal(a.x())
