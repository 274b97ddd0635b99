"""Torch's own layers at every input size: reshaping, pooling, normalisation, elementwise activations."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gramcert.geometry.padding import PaddingMode, largest_repetition_of_any_size
from gramcert.operators import elementwise, rules, windows
from gramcert.operators.graph import Builder, Nonlinear, Variable
from gramcert.rounding import root_up

Rule = Callable[[Builder, Variable, Any], Variable]

_RULES: dict[type[nn.Module], Rule] = {}


def describe_torch_layer(call: str, b: Builder, x: Variable, module: nn.Module) -> Variable:
    """Append what a layer of torch without a matrix does; what is not known is an error."""
    name = f"{call}({type(module).__name__})"
    rule = _RULES.get(type(module))
    if rule is not None:
        try:
            return rule(b, x, module)
        except rules.Unknown as error:
            raise TypeError(f"{name}: it has no constant: {error}") from None
    slopes = elementwise.of_module(module)
    if isinstance(slopes, str):
        raise TypeError(f"{name}: it has no constant: {slopes}")
    if slopes is None:
        raise TypeError(
            f"{name}: its constant is not known; expected a layer of gramcert.nn, Linear, a Conv or ConvTranspose "
            f"layer, an elementwise activation, pooling, normalisation, Flatten or a Sequential of such, or with "
            f"input_shape, the shape of one example, whatever torch can trace"
        )
    return b.nonlinear(x, Nonlinear(max(map(abs, slopes)), type(module).__name__, slopes))


def _rule(*kinds: type[nn.Module]) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(kinds, rule))
        return rule

    return register


@_rule(nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)
@_rule(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)
def _moved(b: Builder, x: Variable, module: Any) -> Variable:
    """No entry occurs twice."""
    return b.nonlinear(x, Nonlinear(1.0, "move"))


@_rule(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
def _dropout(b: Builder, x: Variable, module: Any) -> Variable:
    if module.training:
        raise rules.Unknown("in training mode dropout is random; call .eval() first")
    return b.same(x)


@_rule(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d)
@_rule(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d)
@_rule(nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d)
def _padded(b: Builder, x: Variable, module: Any) -> Variable:
    """The root of how often a place can occur; amounts that crop drop some."""
    modes: dict[str, PaddingMode] = {"Refl": "reflect", "Repl": "replicate", "Circ": "circular"}
    mode, amounts = modes[type(module).__name__[:4]], [max(0, amount) for amount in module.padding]
    copies = 1
    for before, after in zip(amounts[::2], amounts[1::2], strict=True):
        copies *= largest_repetition_of_any_size(before, after, mode)
    return b.nonlinear(x, Nonlinear(rules.root(copies), "padding"))


# Pooling


@_rule(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
def _max_pool(b: Builder, x: Variable, module: Any) -> Variable:
    """The root of how many windows share a place."""
    if module.return_indices:
        raise rules.Unknown("with return_indices it has two outputs")
    axes = int(type(module).__name__[-2])
    geometry = [_per_axis(value, axes) for value in (module.kernel_size, module.stride, module.dilation)]
    shares = math.prod(windows.windows_per_place(*axis) for axis in zip(*geometry, strict=True))
    return b.nonlinear(x, Nonlinear(rules.root(shares), "max pool"))


@_rule(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
def _average_pool(b: Builder, x: Variable, module: Any) -> Variable:
    """√(rows·columns) of absolute sums: each output is a mean, and each place is in so many windows, by 1/taps."""
    axes = int(type(module).__name__[-2])
    taps, stride = _per_axis(module.kernel_size, axes), _per_axis(module.stride, axes)
    shares = math.prod(windows.windows_per_place(*axis) for axis in zip(taps, stride, strict=True))
    if getattr(module, "divisor_override", None):
        sums = math.prod(taps) / module.divisor_override
        return b.nonlinear(x, Nonlinear(_root_of(sums * shares / module.divisor_override), "average pool"))
    if module.ceil_mode or (any(_per_axis(module.padding, axes)) and not module.count_include_pad):
        # A window of which only one place counts has it with the weight 1.
        return b.nonlinear(x, Nonlinear(rules.root(shares), "average pool"))
    return b.nonlinear(x, Nonlinear(_root_of(shares / math.prod(taps)), "average pool"))


@_rule(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
@_rule(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
def _adaptive_pool(b: Builder, x: Variable, module: Any) -> Variable:
    """An axis of one place is repeated as often as there are outputs; one whose size is kept is left alone."""
    if getattr(module, "return_indices", False):
        raise rules.Unknown("with return_indices it has two outputs")
    outputs = _per_axis(module.output_size, int(type(module).__name__[-2]))
    return b.nonlinear(x, Nonlinear(rules.root(math.prod(count or 1 for count in outputs)), "adaptive pool"))


def _per_axis(value: Any, axes: int) -> tuple[Any, ...]:
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * axes if len(values) == 1 else values


def _root_of(square: float) -> float:
    """Of a quotient that was rounded a few times."""
    return root_up(square * (1 + 2.0**-50))


# Normalisation


@_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
def _batch_norm(b: Builder, x: Variable, module: Any) -> Variable:
    if module.running_var is None:
        raise rules.Unknown("it keeps no running statistics, so it normalises by the batch itself")
    if module.training:
        raise rules.Unknown("in training mode it mixes the examples of a batch; call .eval() first")
    factors, distance = rules.batch_norm_factors(module.weight, module.running_var, module.eps)
    return b.scaled(x, factors.abs().max(), distance)


@_rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def _instance_norm(b: Builder, x: Variable, module: Any) -> Variable:
    if module.track_running_stats:
        return _batch_norm(b, x, module)
    return _normalised(b, x, module, "instance norm")


@_rule(nn.LayerNorm)
def _layer_norm(b: Builder, x: Variable, module: Any) -> Variable:
    return _normalised(b, x, module, "layer norm", math.prod(module.normalized_shape))


@_rule(nn.GroupNorm)
def _group_norm(b: Builder, x: Variable, module: Any) -> Variable:
    return _normalised(b, x, module, "group norm")


@_rule(nn.RMSNorm)
def _rms_norm(b: Builder, x: Variable, module: Any) -> Variable:
    return _normalised(b, x, module, "rms norm", math.prod(module.normalized_shape))


def _normalised(b: Builder, x: Variable, module: Any, name: str, count: int = 0) -> Variable:
    """Of so many entries, 0 where that depends on the size; times the largest weight."""
    # Without an ε torch takes that of the type of the input, of which a layer does not know.
    epsilon = torch.finfo(torch.float64).eps if module.eps is None else module.eps
    epsilon = min(rules.typed(epsilon, torch.float32), epsilon)  # whatever the type of the input is
    y = rules.normalised(b, x, count, epsilon, torch.float64, name)
    if module.weight is not None:
        y = b.scaled(y, rules.exact(module.weight).abs().max())
    return y


@_rule(nn.Softmax, nn.Softmin, nn.Softmax2d)
def _softmax(b: Builder, x: Variable, module: Any) -> Variable:
    return b.nonlinear(x, Nonlinear(rules.SOFTMAX, "softmax"))
