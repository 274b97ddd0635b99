"""Operators of torch: activations, normalisation, sizes."""

import math
from typing import Any

import torch
from torch import Tensor

from gramcert.auditing import aten_statistics
from gramcert.auditing.aten_arguments import (
    Arguments,
    Context,
    Rule,
    further_results,
    known,
    registering,
)
from gramcert.operators import elementwise, joining, rules
from gramcert.operators.graph import Variable
from gramcert.operators.rules import Unknown

RULES: dict[str, Rule] = {"sgn": lambda t, a: rules.activation(t.b, a.x(), "sign")}
rule = registering(RULES)


def of_table(t: Context, a: Arguments) -> Variable:
    """A function of each entry, whose parameters have the names of the table."""
    defaults = elementwise.TABLE[a.op].parameters
    given = {name: a.number(name, 0.0) for name in defaults if a.values.get(name) is not None}
    return rules.activation(t.b, a.x(), a.op, None, **given)


@rule("rrelu")
def _rrelu(t: Context, a: Arguments) -> Variable:
    if a.get("training", False):
        raise Unknown(f"in training mode its slope is random; {t.remedy}")
    return of_table(t, a)


@rule("gelu")
def _gelu(t: Context, a: Arguments) -> Variable:
    return rules.activation(t.b, a.x(), "gelu_tanh" if a.get("approximate", "none") == "tanh" else "gelu")


@rule("prelu", "_prelu_kernel")
def _prelu(t: Context, a: Arguments) -> Variable:
    x, weight = a.x(), a.weight()
    is_per_channel = a.op == "prelu" and x.dim > 1 and weight.numel() > 1
    return rules.prelu(t.b, x, weight.reshape(-1, *(1,) * (x.dim - 2)) if is_per_channel else weight)


@rule("hardtanh", "clamp", "clamp_min", "clamp_max", "relu6")
def _clamp(t: Context, a: Arguments) -> Variable:
    if any(isinstance(value, Variable) for name, value in a.values.items() if name != "self"):
        raise Unknown("bounds that depend on the input")
    defaults = {"hardtanh": {"min": -1.0, "max": 1.0}, "relu6": {"min": 0.0, "max": 6.0}}.get(a.op, {})
    given = {name.removesuffix("_val"): known(value) for name, value in a.values.items() if name != "self"}
    limits = {name: _limit(value) for name, value in (defaults | given).items() if value is not None}
    nowhere = {"min": -math.inf, "max": math.inf}
    finite = {name: limit for name, limit in limits.items() if not bool((limit == nowhere[name]).all())}
    x = t.b.spread(a.x(), *(tuple(limit.shape) for limit in limits.values()))
    return rules.clamped(t.b, x, finite, [t.type_of(a.x())])


def _limit(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64).double()


@rule("softmax", "_softmax", "log_softmax", "_log_softmax")
def _softmax(t: Context, a: Arguments) -> Variable:
    return rules.softmax(t.b, a.x(), a.get("dim", -1), log="log" in a.op)


@rule("maximum", "minimum", "max", "min")
def _extremum(t: Context, a: Arguments) -> Any:
    name = "maximum" if a.op.startswith("max") else "minimum"
    if a.values.get("other") is None:
        return aten_statistics.largest(t, a)
    first, second = a.values["self"], a.values["other"]
    if isinstance(first, Variable) and isinstance(second, Variable):
        return joining.extremum(t.b, first, second, name)
    x, constant = (first, second) if isinstance(first, Variable) else (second, first)
    if not isinstance(constant, Tensor):
        raise Unknown("the constant was not computed")
    return rules.clamped(t.b, x, {"min" if name == "maximum" else "max": constant})


# Normalisation


@rule("layer_norm", "native_layer_norm")
def _layer_norm(t: Context, a: Arguments) -> Any:
    shape = a.ints("normalized_shape")
    x = rules.normalised(t.b, a.x(), math.prod(shape), a.number("eps", 1e-5), t.like(a.x()), "layer norm")
    x = _affine(t, a, x)
    return [x, *further_results(t, a, 2)] if a.op.startswith("native") else x


@rule("rms_norm")
def _rms_norm(t: Context, a: Arguments) -> Variable:
    like = t.like(a.x())
    epsilon = a.number("eps", torch.finfo(like).eps)
    x = rules.normalised(t.b, a.x(), math.prod(a.ints("normalized_shape")), epsilon, like, "rms norm")
    return _affine(t, a, x)


def _affine(t: Context, a: Arguments, x: Variable, *tail: int) -> Variable:
    """Times a weight, plus a bias."""
    weight, bias = a.constant("weight"), a.constant("bias")
    x = x if weight is None else t.b.scaled(x, rules.exact(weight).reshape(*weight.shape, *tail))
    return x if bias is None else t.b.shifted(x, rules.exact(bias, "bias").reshape(*bias.shape, *tail))


@rule("instance_norm", "group_norm", "native_group_norm")
def _group_norm(t: Context, a: Arguments) -> Any:
    x = a.x()
    if a.op == "instance_norm" and not a.get("use_input_stats", True):
        weight, bias, mean, variance = (a.constant(name) for name in ("weight", "bias", "running_mean", "running_var"))
        return rules.batch_norm(t.b, x, weight, bias, mean, variance, a.number("eps", 1e-5))
    groups = x.shape[1] if a.op == "instance_norm" else a.get("num_groups", a.get("group", 1))
    count = math.prod(x.shape[1:]) // groups
    name = a.op.removeprefix("native_").replace("_", " ")
    y = rules.normalised(t.b, x, count, a.number("eps", 1e-5), t.like(x), name)
    y = _affine(t, a, y, *(1,) * (x.dim - 2))
    return [y, *further_results(t, a, 2)] if a.op.startswith("native") else y


@rule("sym_size", "sym_numel")
def _size(t: Context, a: Arguments) -> int:
    x = a.x()
    return x.shape[a.get("dim")] if a.op == "sym_size" else math.prod(x.shape)
