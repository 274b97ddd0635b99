"""Layers over the rational numbers: what a network computes with its weights as stored, if nothing is rounded.

A sample is an array of fractions of shape (channels, *sizes). Convolutions are written out from their definition, and
roots are not rational: the layers that need one give a lower bound within 2⁻²⁴⁰⁰ of them.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
import torch
from torch import nn

import gramcert.nn as gnn
from gramcert import Convolution
from gramcert.geometry.convolution import LAYERS

PAD = {"zeros": "constant", "circular": "wrap", "reflect": "reflect", "replicate": "edge"}
ROOT_BITS = 2400

# Layers that only move entries, or leave some out.
MOVING = (nn.Identity, nn.Flatten, nn.PixelShuffle, nn.PixelUnshuffle, gnn.Subsample, nn.Dropout, nn.AlphaDropout)
MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
AVERAGE_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
RESIDUAL_CONVOLUTIONS = (gnn.SLLConv1d, gnn.SLLConv2d, gnn.SLLConv3d)


def fractions(tensor):
    """A tensor as an array of exact numbers."""
    values = tensor.detach().double()
    flat = [Fraction(value) for value in values.flatten().tolist()]
    return np.array([*flat, None], dtype=object)[:-1].reshape(tuple(values.shape))


def square_distance(computed, truth):
    """‖computed - truth‖² of one sample, exactly."""
    return sum(((a - b) ** 2 for a, b in zip(fractions(computed).flat, truth.flat, strict=True)), Fraction(0))


def is_within(computed, truth, bound):
    """Whether each computed sample is at most its bound away from the exact one."""
    return all(
        math.isinf(limit) or square_distance(row, exact) <= Fraction(limit) ** 2
        for row, exact, limit in zip(computed, truth, bound.tolist(), strict=True)
    )


def exact_batch(layers, x):
    """The exact values of a chain of layers on each sample of a batch."""
    result = []
    for sample in x:
        value = fractions(sample)
        for layer in layers:
            value = exact(layer, value)
        result.append(value)
    return result


def exact(layer, x):
    """The exact value of one layer on one sample."""
    if isinstance(layer, nn.Sequential):
        for part in layer:
            x = exact(part, x)
        return x
    if isinstance(layer, MOVING):
        return moved(layer, x)
    if isinstance(layer, nn.Linear):
        return _plus(x @ fractions(layer.weight).T, layer.bias)
    if isinstance(layer, LAYERS):
        return _plus_channels(convolved(Convolution.of(layer), x), layer.bias)
    if isinstance(layer, gnn.SLLLinear):
        hidden = exact(layer.activation, _plus(x @ fractions(layer.weight).T, layer.bias))
        return x - hidden @ fractions(layer.outer_weight())
    if isinstance(layer, RESIDUAL_CONVOLUTIONS):
        inner = Convolution(layer.weight.detach().double(), padding=layer.padding)
        outer = Convolution(layer.outer_weight().detach().double(), padding=layer.padding, transposed=True)
        hidden = exact(layer.activation, _plus_channels(convolved(inner, x), layer.bias))
        return x - convolved(outer, hidden)
    if isinstance(layer, gnn.Residual):
        value = exact(layer.module, x)
        return x + value if layer.weight is None else Fraction(layer.keep) * x + Fraction(layer.weight) * value
    if isinstance(layer, gnn.Concatenation):
        return Fraction(layer.factor) * np.concatenate([exact(part, x) for part in layer.parts])
    if isinstance(layer, (*MAX_POOLS, *AVERAGE_POOLS, gnn.ScaledAvgPool, gnn.ScaledL2NormPool)):
        return pooled(layer, x)
    return _elementwise(layer, x)


def convolved(layer, x):
    """A convolution without its bias, from the definition."""
    kernel, sizes = fractions(layer.kernel), x.shape[1:]
    out = layer.output_size(sizes)
    taps = list(itertools.product(*map(range, layer.kernel_size)))
    inputs, outputs = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    pairs = [
        (group * inputs + i, group * outputs + o, i, o)
        for group in range(layer.groups)
        for i in range(inputs)
        for o in range(outputs)
    ]
    if not layer.transposed:
        options = {"constant_values": Fraction(0)} if layer.padding_mode == "zeros" else {}
        padded = np.pad(x, [(0, 0), *layer.padding], mode=PAD[layer.padding_mode], **options)
        y = _zeros((layer.out_channels, *out))
        for (source, target, i, _), tap in itertools.product(pairs, taps):
            y[target] += kernel[(target, i, *tap)] * padded[(source, *_reads(layer, tap, out))]
        return y
    # Each input adds its multiple of the kernel to a full output, which is then cropped or extended by zeros.
    spans = [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    full = [(n - 1) * s + span for n, s, span in zip(sizes, layer.stride, spans, strict=True)]
    y = _zeros((layer.out_channels, *(n + extra for n, extra in zip(full, layer.output_padding, strict=True))))
    for (source, target, _, o), tap in itertools.product(pairs, taps):
        y[(target, *_reads(layer, tap, sizes))] += kernel[(source, o, *tap)] * x[source]
    crop = tuple(slice(before, before + n) for (before, _), n in zip(layer.padding, out, strict=True))
    return y[(slice(None), *crop)]


def _reads(layer, tap, count):
    """The places that belong to one tap: stride·o + dilation·a."""
    steps = zip(tap, count, layer.stride, layer.dilation, strict=True)
    return tuple(slice(d * a, d * a + s * (n - 1) + 1, s) for a, n, s, d in steps)


def moved(layer, x):
    """The layer on the numbers of the places says where each entry goes."""
    places = torch.arange(float(x.size), dtype=torch.float64).reshape(1, *x.shape)
    index = layer(places)[0].long().numpy()
    return x.reshape(-1)[index]


def pooled(layer, x):
    """Maxima, means or lengths of windows."""
    axes = x.ndim - 1

    def per_axis(value):
        values = (value,) if isinstance(value, int) else tuple(value)
        return values * axes if len(values) == 1 else values

    taps, stride = per_axis(layer.kernel_size), per_axis(layer.stride)
    padding, dilation = per_axis(getattr(layer, "padding", 0)), per_axis(getattr(layer, "dilation", 1))
    out = layer(torch.zeros(1, *x.shape)).shape[2:]
    y = _zeros((len(x), *out))
    for channel, *place in itertools.product(range(len(x)), *map(range, out)):
        entries = []
        for tap in itertools.product(*map(range, taps)):
            where = [s * o + d * a - p for s, o, d, a, p in zip(stride, place, dilation, tap, padding, strict=True)]
            if all(0 <= w < n for w, n in zip(where, x.shape[1:], strict=True)):
                entries.append(x[(channel, *where)])
        y[(channel, *place)] = _of_window(layer, entries, math.prod(taps))
    return y


def _of_window(layer, entries, taps):
    if isinstance(layer, MAX_POOLS):
        return max(entries)
    if isinstance(layer, AVERAGE_POOLS):
        return sum(entries, Fraction(0)) / taps
    if isinstance(layer, gnn.ScaledAvgPool):
        return Fraction(layer.factor) * sum(entries, Fraction(0)) / taps
    return Fraction(layer.factor) * root(sum((entry**2 for entry in entries), Fraction(0)) / taps)


def root(square):
    """A lower bound of the square root within 2⁻²⁴⁰⁰; exact where that is possible."""
    scaled = (square.numerator << (2 * ROOT_BITS)) * square.denominator
    return Fraction(math.isqrt(scaled), square.denominator << ROOT_BITS)


def _elementwise(layer, x):
    """Activations and shifts."""
    if isinstance(layer, nn.LeakyReLU):
        return np.where(x > 0, x, Fraction(layer.negative_slope) * x)
    if isinstance(layer, nn.Hardtanh):  # and ReLU6
        return np.minimum(np.maximum(x, Fraction(layer.min_val)), Fraction(layer.max_val))
    if isinstance(layer, nn.ReLU):
        return np.maximum(x, Fraction(0))
    if isinstance(layer, gnn.Abs):
        return np.abs(x)
    if isinstance(layer, gnn.MaxMin):
        first, second = np.split(x, 2)
        return np.concatenate([np.maximum(first, second), np.minimum(first, second)])
    if isinstance(layer, gnn.GroupSort):
        return np.sort(x.reshape(-1, layer.group_size, *x.shape[1:]), axis=1).reshape(x.shape)
    if isinstance(layer, gnn.Householder):
        return np.concatenate(list(_reflected(fractions(layer.normals), *np.split(x, 2))))
    if isinstance(layer, gnn.PadChannels):
        return np.concatenate([x, _zeros((layer.channels - len(x), *x.shape[1:]))])
    if isinstance(layer, gnn.Shift):
        return _plus_channels(x, layer.values)
    if isinstance(layer, gnn.LayerCentering):
        flat = x.reshape(len(x), -1)
        means = flat.sum(1, keepdims=True) / Fraction(flat.shape[1])
        return _plus_channels((flat - means).reshape(x.shape), layer.bias)
    if isinstance(layer, gnn.BatchCentering):
        return _plus_channels(_plus_channels(x, -layer.running_mean), layer.bias)
    raise TypeError(f"exact: {type(layer).__name__}")


def _reflected(normals, first, second):
    """The pairs z as z - 2·min(vᵀz, 0)·v."""
    a, b = (normals[:, side].reshape(-1, *(1,) * (first.ndim - 1)) for side in (0, 1))
    depth = np.minimum(a * first + b * second, Fraction(0))
    return first - 2 * depth * a, second - 2 * depth * b


def _plus(x, bias):
    return x if bias is None else x + fractions(bias)


def _plus_channels(x, bias):
    return x if bias is None else x + fractions(bias).reshape(-1, *(1,) * (x.ndim - 1))


def _zeros(shape):
    return np.full(shape, Fraction(0), dtype=object)
