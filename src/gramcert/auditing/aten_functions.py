"""Operators of torch: activations, orders and lengths, normalisation, sizes."""

import math
from typing import Any

import torch
from torch import Tensor

from gramcert.auditing import activations, rules
from gramcert.auditing.aten_arguments import (
    Arguments,
    Context,
    Rule,
    further_results,
    known,
    number_of,
    registering,
    spread,
    with_bias,
)
from gramcert.auditing.graph import Nonlinear, Variable
from gramcert.auditing.patterns import SIGN, SQUARE
from gramcert.auditing.rules import Unknown

RULES: dict[str, Rule] = {}
rule = registering(RULES)


@rule("leaky_relu")
def _leaky(t: Context, a: Arguments) -> Variable:
    return rules.activation(t.b, a.x(), "leaky_relu", activations.leaky(a.number("negative_slope", 0.01)))


@rule("rrelu")
def _rrelu(t: Context, a: Arguments) -> Variable:
    if a.get("training", False):
        raise Unknown("in training mode its slope is random: .eval(), and export it again")
    slope = (a.number("lower", 1 / 8) + a.number("upper", 1 / 3)) / 2
    return rules.activation(t.b, a.x(), "rrelu", activations.leaky(slope))


@rule("elu", "selu", "celu")
def _elu(t: Context, a: Arguments) -> Variable:
    if a.op == "celu":
        return rules.activation(t.b, a.x(), "celu", activations.celu(a.number("alpha", 1.0)) or "its alpha is negative")
    if a.op == "selu":
        slopes = activations.elu(1.6732632423543772, 1.0507009873554805)
    else:
        slopes = activations.elu(a.number("alpha", 1), a.number("scale", 1), a.number("input_scale", 1))
    return rules.activation(t.b, a.x(), a.op, slopes or "its slope grows")


@rule("softplus")
def _softplus(t: Context, a: Arguments) -> Variable:
    beta = a.number("beta", 1)
    name = "softplus" if beta == 1 else "softplus with beta"  # which is no part of Mish
    return rules.activation(t.b, a.x(), name, activations.softplus(beta, a.number("threshold", 20)))


@rule("gelu")
def _gelu(t: Context, a: Arguments) -> Variable:
    name = "gelu_tanh" if a.get("approximate", "none") == "tanh" else "gelu"
    return rules.activation(t.b, a.x(), name)


@rule("prelu", "_prelu_kernel")
def _prelu(t: Context, a: Arguments) -> Variable:
    return rules.prelu(t.b, a.x(), a.weight())


@rule("hardtanh", "clamp", "clamp_min", "clamp_max", "relu6")
def _clamp(t: Context, a: Arguments) -> Variable:
    if any(isinstance(value, Variable) for name, value in a.values.items() if name != "self"):
        raise Unknown("bounds that depend on the input")
    bounds = [known(value) for name, value in a.values.items() if name != "self"]
    return rules.activation(t.b, spread(t, a.x(), *bounds), "clamp")


@rule("threshold")
def _threshold(t: Context, a: Arguments) -> Variable:
    is_continuous = a.number("threshold", 0) == a.number("value", 0)
    return rules.activation(t.b, a.x(), "threshold", (0.0, 1.0) if is_continuous else None)


@rule("sign", "sgn")
def _sign(t: Context, a: Arguments) -> Variable:
    return t.b.unbounded((a.x(),), a.x().shape, SIGN)


@rule("pow", "square")
def _pow(t: Context, a: Arguments) -> Variable:
    exponent = 2.0 if a.op == "square" else number_of(a.values["exponent"])
    if exponent == 2:
        return t.b.unbounded((a.x(),), a.x().shape, SQUARE)
    if exponent == 0.5:
        return t.patterns.root(a.x())
    if exponent == 1:
        return t.b.same(a.x())
    return rules.activation(t.b, a.x(), "pow")


@rule("sqrt")
def _sqrt(t: Context, a: Arguments) -> Variable:
    return t.patterns.root(a.x())


@rule("softmax", "_softmax", "log_softmax", "_log_softmax")
def _softmax(t: Context, a: Arguments) -> Variable:
    return rules.softmax(t.b, a.x(), a.get("dim", -1), log="log" in a.op)


@rule("maximum", "minimum", "max", "min")
def _extremum(t: Context, a: Arguments) -> Any:
    name = "maximum" if a.op.startswith("max") else "minimum"
    if a.values.get("other") is None:
        return _largest(t, a)
    first, second = a.values["self"], a.values["other"]
    if isinstance(first, Variable) and isinstance(second, Variable):
        return rules.extremum(t.b, first, second, name)
    x, constant = (first, second) if isinstance(first, Variable) else (second, first)
    if not isinstance(constant, Tensor):
        raise Unknown("the constant was not computed")
    return rules.activation(t.b, spread(t, x, constant), "clamp")


@rule("amax", "amin")
def _largest(t: Context, a: Arguments) -> Any:
    """The largest entry along some axes: no further from each other than the entries."""
    x, axes = a.x(), a.get("dim", [])
    axes = [axis % x.dim for axis in ([axes] if isinstance(axes, int) else axes)] or list(range(x.dim))
    keep = bool(a.get("keepdim", False))
    shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape) if keep or i not in axes)
    result = t.b.nonlinear(x, Nonlinear(1.0, "largest entry", why="entries occur once"), shape)
    return [result, *further_results(t, a, 1)] if a.parts[-1] == "dim" else result


@rule("sort", "msort")
def _sort(t: Context, a: Arguments) -> Any:
    result = t.b.nonlinear(a.x(), Nonlinear(1.0, "sort", why="a permutation of its input"))
    return [result, *further_results(t, a, 1)] if a.op == "sort" else result


@rule("linalg_vector_norm", "norm")
def _norm(t: Context, a: Arguments) -> Variable:
    order = number_of(a.get("ord", a.get("p", 2)))
    if order != 2:
        raise Unknown(f"a norm of order {order}")
    x, axes = a.x(), a.get("dim", [])
    axes = [axis % x.dim for axis in ([axes] if isinstance(axes, int) else axes)] or list(range(x.dim))
    keep = bool(a.get("keepdim", False))
    shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape) if keep or i not in axes)
    return t.b.nonlinear(x, Nonlinear(1.0, "l2 norm", why="a norm of disjoint parts"), shape)


# Normalisation


@rule("layer_norm", "native_layer_norm")
def _layer_norm(t: Context, a: Arguments) -> Any:
    shape = a.ints("normalized_shape")
    x = rules.normalised(t.b, a.x(), math.prod(shape), a.number("eps", 1e-5), t.like(a.x()), "layer norm")
    weight = a.constant("weight")
    x = with_bias(t, a, x if weight is None else t.b.scaled(x, rules.exact(weight)))
    return [x, *further_results(t, a, 2)] if a.op.startswith("native") else x


@rule("rms_norm")
def _rms_norm(t: Context, a: Arguments) -> Variable:
    like = t.like(a.x())
    epsilon = a.number("eps", torch.finfo(like).eps)
    x = rules.normalised(t.b, a.x(), math.prod(a.ints("normalized_shape")), epsilon, like, "rms norm")
    weight = a.constant("weight")
    return x if weight is None else t.b.scaled(x, rules.exact(weight))


@rule("instance_norm", "group_norm", "native_group_norm")
def _group_norm(t: Context, a: Arguments) -> Any:
    x = a.x()
    if a.op == "instance_norm" and not a.get("use_input_stats", True):
        statistics = a.constant("running_mean"), a.constant("running_var")
        y = rules.batch_norm(t.b, x, a.constant("weight"), *statistics, a.number("eps", 1e-5))
        return t.patterns.shifted(y, None)
    groups = x.shape[1] if a.op == "instance_norm" else a.get("num_groups", a.get("group", 1))
    count = math.prod(x.shape[1:]) // groups
    name = a.op.removeprefix("native_").replace("_", " ")
    y = rules.normalised(t.b, x, count, a.number("eps", 1e-5), t.like(x), name)
    weight = a.constant("weight")
    y = y if weight is None else t.b.scaled(y, rules.exact(weight).reshape(-1, *(1,) * (x.dim - 2)))
    y = with_bias(t, a, y)
    return [y, *further_results(t, a, 2)] if a.op.startswith("native") else y


@rule("sym_size", "sym_numel")
def _size(t: Context, a: Arguments) -> int:
    x = a.x()
    return x.shape[a.get("dim")] if a.op == "sym_size" else math.prod(x.shape)
