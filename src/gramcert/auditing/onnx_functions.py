"""Operators of ONNX: activations, normalisation, recurrent layers."""

import math
from collections.abc import Callable

import torch

from gramcert.auditing.onnx_call import (
    EXACT,
    Call,
    Context,
    Rule,
    axis_of,
    register,
)
from gramcert.operators import rules
from gramcert.operators.graph import Variable
from gramcert.operators.linear import Shape
from gramcert.operators.rules import Unknown
from gramcert.operators.written_out import gate

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register what some operators do."""
    return register(RULES, names)


@rule("LeakyRelu")
def _leaky(t: Context, c: Call) -> Variable:
    return rules.activation(t.b, c.x(), "leaky_relu", negative_slope=c.real("alpha", 0.01))


@rule("Elu", "Selu")
def _elu(t: Context, c: Call) -> Variable:
    selu = c.op == "Selu"
    alpha = c.real("alpha", 1.67326319217681884765625 if selu else 1.0)
    gamma = c.real("gamma", 1.05070102214813232421875) if selu else 1.0
    return rules.activation(t.b, c.x(), c.op.lower(), alpha=alpha, scale=gamma)


@rule("Celu")
def _celu(t: Context, c: Call) -> Variable:
    return rules.activation(t.b, c.x(), "celu", alpha=c.real("alpha", 1.0))


@rule("ThresholdedRelu")
def _thresholded(t: Context, c: Call) -> Variable:
    return rules.activation(t.b, c.x(), "threshold", threshold=c.real("alpha", 1.0), value=0.0)


@rule("Shrink")
def _shrink(t: Context, c: Call) -> Variable:
    threshold = c.real("lambd", 0.5)
    is_continuous = c.real("bias", 0.0) == threshold >= 0
    if is_continuous:
        return rules.activation(t.b, c.x(), "softshrink", lambd=threshold)
    return rules.activation(t.b, c.x(), "hardshrink")


@rule("PRelu")
def _prelu(t: Context, c: Call) -> Variable:
    x, slope = c.x(), c.constant(1, "slope")
    if tuple(torch.broadcast_shapes(x.shape, slope.shape)) != x.shape:
        raise Unknown(f"slopes of shape {tuple(slope.shape)} for an input of shape {x.shape}")
    return rules.prelu(t.b, x, slope)


@rule("HardSigmoid")
def _hard_sigmoid(t: Context, c: Call) -> Variable:
    """Named as torch's own where x times it is a hardswish, whose slopes are the same for every alpha > 0."""
    alpha, beta = c.real("alpha", 0.2), c.real("beta", 0.5)
    if alpha > 0 and beta == 0.5:
        return rules.activation(t.b, c.x(), "hardsigmoid", alpha=alpha)
    return rules.activation(t.b, c.x(), "hard sigmoid", alpha=alpha, beta=beta)


@rule("Gelu")
def _gelu(t: Context, c: Call) -> Variable:
    kinds = {"none": "gelu", "tanh": "gelu_tanh"}
    if (kind := c.text("approximate", "none")) not in kinds:
        raise Unknown(f"the approximation {kind}")
    return rules.activation(t.b, c.x(), kinds[kind])


@rule("Swish")
def _swish(t: Context, c: Call) -> Variable:
    """x·sigmoid(αx) has the same slopes for every α: with the other sign it is x minus that, and they are symmetric."""
    return rules.activation(t.b, c.x(), "silu", gate(torch.sigmoid, c.real("alpha", 1.0)))


@rule("Softmax", "LogSoftmax")
def _softmax(t: Context, c: Call) -> Variable:
    """Before version 13 of all axes from one on."""
    x, log = c.x(), c.op == "LogSoftmax"
    if c.opset >= 13:
        return rules.softmax(t.b, x, c.integer("axis", -1), log=log)
    axis = axis_of(c.integer("axis", 1), x.dim)
    if axis == x.dim - 1:
        return rules.softmax(t.b, x, axis, log=log)
    rows = t.moved(x, lambda places: places.reshape(math.prod(x.shape[:axis]), -1))
    y = rules.softmax(t.b, rows, 1, log=log)
    return t.moved(y, lambda places: places.reshape(x.shape))


# Normalisation


@rule("BatchNormalization")
def _batch_norm(t: Context, c: Call) -> Variable:
    if c.integer("training_mode", 0) or any(c.node.outputs[1:]):
        raise Unknown("in training mode it normalises by the batch itself")
    if c.integer("spatial", 1) != 1:
        raise Unknown("statistics of each place")
    scale, bias, mean, variance = (
        c.constant(place, name) for place, name in enumerate(("scale", "bias", "mean", "variance"), 1)
    )
    return rules.batch_norm(t.b, c.x(), scale, bias, mean.double(), variance.double(), c.real("epsilon", 1e-5))


def _normalised(t: Context, c: Call, count: int, name: str, shape: Shape | None) -> Variable:
    """Normalised groups of so many entries, times scales of a shape, plus a bias."""
    x = c.x()
    y = rules.normalised(t.b, x, count, c.real("epsilon", 1e-5), EXACT, name)
    scale, bias = c.optional(1, "scale"), c.optional(2, "bias")
    if scale is not None:
        factors = rules.exact(scale, "scale").reshape(shape or scale.shape)
        if tuple(torch.broadcast_shapes(x.shape, factors.shape)) != x.shape:
            raise Unknown(f"scales of shape {tuple(scale.shape)} for an input of shape {x.shape}")
        y = t.b.scaled(y, factors)
    return y if bias is None else t.b.shifted(y, rules.exact(bias, "bias").reshape(shape or bias.shape))


@rule("InstanceNormalization")
def _instance_norm(t: Context, c: Call) -> Variable:
    x = c.x()
    return _normalised(t, c, math.prod(x.shape[2:]), "instance norm", (x.shape[1], *(1,) * (x.dim - 2)))


@rule("GroupNormalization")
def _group_norm(t: Context, c: Call) -> Variable:
    """Before version 21 with one scale for each group."""
    x, groups = c.x(), c.integer("num_groups")
    if groups < 1 or x.shape[1] % groups:
        raise Unknown(f"{groups} groups of {x.shape[1]} channels")
    if c.opset < 21:
        each = x.shape[1] // groups
        scale, bias = (c.constant(place, name).repeat_interleave(each) for place, name in ((1, "scale"), (2, "bias")))
        c = Call(c.node, [x, scale, bias], c.opset)
    shape = (x.shape[1], *(1,) * (x.dim - 2))
    return _normalised(t, c, math.prod(x.shape[1:]) // groups, "group norm", shape)


@rule("LayerNormalization", "RMSNormalization")
def _layer_norm(t: Context, c: Call) -> Variable:
    axis = axis_of(c.integer("axis", -1), c.x().dim)
    name = "layer norm" if c.op.startswith("Layer") else "rms norm"
    return _normalised(t, c, math.prod(c.x().shape[axis:]), name, None)


# Recurrent layers


@rule("GRU", "LSTM", "RNN")
def _recurrent(t: Context, c: Call) -> list[Variable]:
    """Without a constant, but of known shapes, so that what follows can be told."""
    x = c.x()
    (steps, batch, _), hidden = x.shape, c.integer("hidden_size")
    directions = 2 if c.text("direction", "forward") == "bidirectional" else 1
    state = (directions, batch, hidden)
    shapes = [(steps, *state), state, state]
    if c.integer("layout", 0):
        shapes = [(batch, steps, directions, hidden), *[(batch, directions, hidden)] * 2]
    inputs = tuple(value for value in c.values if isinstance(value, Variable))
    return [
        t.b.unbounded(inputs, shape, f"{c.op}: a recurrent layer") for shape in shapes[: 3 if c.op == "LSTM" else 2]
    ]
