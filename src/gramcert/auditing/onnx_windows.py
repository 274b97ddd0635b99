"""Operators of ONNX: pooling, reductions, resizing."""

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from gramcert.auditing.onnx_call import (
    EXACT,
    Call,
    Context,
    Rule,
    axis_of,
    bounded,
    register,
)
from gramcert.auditing.onnx_folding import reduced_axes
from gramcert.auditing.onnx_layers import pads, per_axis
from gramcert.operators import rules, windows
from gramcert.operators.graph import Nonlinear, Variable
from gramcert.operators.joining import extreme_entry
from gramcert.operators.resizing import FLOATS, agreed, agreed_size, require_change
from gramcert.operators.rules import Unknown
from gramcert.rounding import gamma, root_up

RULES: dict[str, Rule] = {}

# Exact numbers, or those of a type of floating point.
_N = TypeVar("_N", Fraction, Tensor)
_Shrinking = Callable[[_N | int], _N]


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register what some operators do."""
    return register(RULES, names)


def _windows(c: Call) -> tuple[list[int], list[int], list[tuple[int, int]], list[int], bool]:
    """Taps, strides, padding, dilations and whether sizes are rounded up."""
    x, taps = c.x(), c.integers("kernel_shape") or []
    if x.dim < 3 or len(taps) != x.dim - 2:
        raise Unknown(f"windows {taps} of an input of shape {x.shape}")
    strides, dilations = (per_axis(c, name, len(taps)) for name in ("strides", "dilations"))
    return taps, strides, pads(c, x.shape[2:], taps, strides, dilations), dilations, bool(c.integer("ceil_mode", 0))


@rule("MaxPool")
def _max_pool(t: Context, c: Call) -> Variable:
    taps, strides, padding, dilations, round_up = _windows(c)
    return windows.max_pool(t.b, c.x(), taps, strides, padding, dilations, round_up=round_up)


@rule("AveragePool")
def _average_pool(t: Context, c: Call) -> Variable:
    x, (taps, strides, padding, dilations, round_up) = c.x(), _windows(c)
    if set(dilations) != {1}:
        raise Unknown("dilated averages")
    counted = bool(c.integer("count_include_pad", 0))
    for size, s, pair in zip(x.shape[2:], strides, padding, strict=True):
        bounded([size, (size + sum(pair)) // s])
    matrices = [
        windows.average_matrix(size, k, s, *pair, round_up=round_up, count_padding=counted)
        for size, k, s, pair in zip(x.shape[2:], taps, strides, padding, strict=True)
    ]
    return windows.average(t.b, x, matrices)


@rule("LpPool")
def _lp_pool(t: Context, c: Call) -> Variable:
    """Norms of windows: each entry is counted in how many of them it is."""
    x, (taps, strides, padding, dilations, round_up) = c.x(), _windows(c)
    _require_two(c)
    if round_up:
        raise Unknown("windows beyond the padding, of which runtimes make different norms")
    shares, shape = windows.shared_windows(x.shape, windows.window_places(x.shape, taps, strides, padding, dilations))
    constant = 1.0 if shares <= 1 else root_up(shares)
    why = f"√{shares}: a place is in up to {shares} windows"
    return t.b.nonlinear(x, Nonlinear(constant, "l2 pool", why=why), shape)


def _require_two(c: Call) -> None:
    if c.node.attributes.get("p", 2) != 2:
        raise Unknown("a norm of another order than 2")


@rule("GlobalAveragePool")
def _global_average(t: Context, c: Call) -> Variable:
    return rules.reduce_linear(t.b, c.x(), _spatial(c), keep=True, mean=True)


def _spatial(c: Call) -> list[int]:
    if c.x().dim < 3:
        raise Unknown("without spatial axes")
    return list(range(2, c.x().dim))


@rule("GlobalMaxPool", "GlobalLpPool")
def _global_pool(t: Context, c: Call) -> Variable:
    if c.op == "GlobalLpPool":
        _require_two(c)
    return _reduced(t, c, _spatial(c), keep=True)


@rule("ReduceMean", "ReduceSum", "ReduceL1")
def _reduce_linear(t: Context, c: Call) -> Variable:
    x = c.x()
    axes = reduced_axes(c, x.dim)
    x = rules.activation(t.b, x, "abs") if c.op == "ReduceL1" else x
    if not axes:
        return t.b.same(x)
    return rules.reduce_linear(t.b, x, axes, keep=bool(c.integer("keepdims", 1)), mean=c.op == "ReduceMean")


@rule("ReduceMax", "ReduceMin", "ReduceL2", "ReduceLogSumExp")
def _reduce(t: Context, c: Call) -> Variable:
    return _reduced(t, c, reduced_axes(c, c.x().dim), keep=bool(c.integer("keepdims", 1)))


def _reduced(t: Context, c: Call, axes: list[int], *, keep: bool) -> Variable:
    """One entry of disjoint groups: its gradient is no longer than 1."""
    x = c.x()
    shape = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape) if keep or axis not in axes)
    if not axes:
        return rules.activation(t.b, x, "abs") if c.op == "ReduceL2" else t.b.same(x)
    if c.op in ("ReduceMax", "ReduceMin", "GlobalMaxPool"):
        return extreme_entry(t.b, x, axes, shape, largest=c.op != "ReduceMin")
    if c.op == "ReduceLogSumExp":
        return rules.log_sum_exp(t.b, x, axes, shape)
    return rules.length(t.b, x, axes, shape)


@rule("TopK")
def _top_k(t: Context, c: Call) -> Variable:
    x = c.x()
    axis = axis_of(c.integer("axis", -1), x.dim)
    count = c.integer("k") if c.opset < 10 else int(c.constant(1, "count"))
    if not c.integer("sorted", 1) or not 1 <= count <= x.shape[axis]:
        raise Unknown("in an order that is not known")
    shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    return t.b.nonlinear(x, Nonlinear(1.0, "largest entries", why="entries of a sorted value"), shape)


# Resizing


@rule("Resize", "Upsample")
def _resize(t: Context, c: Call) -> Variable:
    x, plain = c.x(), c.op == "Upsample" or c.opset < 11
    if c.integer("antialias", 0) or c.integer("exclude_outside", 0):
        raise Unknown("filters that depend on the border or the scale")
    if c.text("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise Unknown("sizes that keep the aspect ratio")
    axes = c.axes(x.dim, None)
    axes = list(range(x.dim)) if axes is None else axes
    outputs, scales = _resized(c, [x.shape[axis] for axis in axes], plain)
    mode = c.text("mode", "nearest")
    place = "asymmetric" if plain else c.text("coordinate_transformation_mode", "half_pixel")
    rounding = "floor" if plain else c.text("nearest_mode", "round_prefer_floor")
    resized: dict[int, Tensor] = {}
    a = Fraction(c.real("cubic_coeff_a", -0.75))
    for axis, out, scale in zip(axes, outputs, scales, strict=True):
        size = x.shape[axis]
        bounded([max(out, 2**11), max(size, 2**11)])
        if place == "align_corners" and out != size * scale:
            raise Unknown("corners of a size that is not a whole number")
        require_change(size, out, scale)
        shrunk: _Shrinking[Fraction] = partial(_quotient, by=scale)
        places = [_original(place, Fraction(i), size, out, shrunk) for i in range(out)]
        if mode == "nearest":
            # Versions before 11 do not say which neighbour: where they shrink, some runtimes take the one above.
            roundings = ["floor", "ceil"] if plain and scale < 1 else [rounding]
            places = _nearest(places, roundings, place, size, scale)
        if places != list(range(size)):
            resized[axis] = _interpolation(places, size, mode, a)
    if not resized:
        return t.b.same(x)
    trailing = range(min(resized), x.dim)
    bounded([max(x.shape[axis] for axis in trailing)] * 2)
    matrices = [resized[axis] if axis in resized else torch.eye(x.shape[axis], dtype=EXACT) for axis in trailing]
    return windows.average(t.b, x, matrices, "upsample")


def _resized(c: Call, sizes: list[int], plain: bool) -> tuple[list[int], list[Fraction]]:
    """New sizes and scales of some axes."""
    given = c.node.attributes.get("scales")
    factors = c.optional(1 if plain else 2, "scales")
    values = given if given is not None else factors.flatten().tolist() if factors is not None else []
    wanted = None if plain else c.optional(3, "sizes")
    if wanted is not None and wanted.numel():
        outputs = [int(size) for size in wanted.flatten().tolist()]
        scales = [Fraction(out, size) for out, size in zip(outputs, sizes, strict=True)]
    else:
        scales = [Fraction(value) for value in values]
        if min(scales, default=0) <= 0:
            raise Unknown(f"resizing {sizes} by {values}")
        outputs = [agreed_size(size, scale) for size, scale in zip(sizes, scales, strict=True)]
    if min(outputs, default=0) < 1:
        raise Unknown(f"resizing {sizes} to {outputs}")
    return outputs, scales


def _quotient(value: _N | int, by: _N) -> _N:
    return value / by


def _original(mode: str, place: _N, size: int, out: int, shrunk: _Shrinking[_N]) -> _N:
    """Where a place of the result is in the source, as the format defines it, in the arithmetic of the arguments.

    Twice the places are integers too; otherwise this rounds where the format's own formulas do.
    """
    if mode == "align_corners":
        return place * (size - 1) / (out - 1) if out > 1 else place
    if mode == "pytorch_half_pixel" and out == 1:
        return place
    if mode == "asymmetric":
        return shrunk(place)
    if mode in ("half_pixel", "pytorch_half_pixel"):
        return (shrunk(2 * place + 1) - 1) / 2
    if mode == "half_pixel_symmetric":
        return (size * (1 - shrunk(out) / size) + shrunk(2 * place + 1) - 1) / 2
    raise Unknown(f"coordinates of the kind {mode}")


def _nearest(places: list[Fraction], roundings: list[str], mode: str, size: int, scale: Fraction) -> list[Fraction]:
    """The places that are taken: the same in exact arithmetic, in float64 and float32, by quotients and reciprocals.

    Other orders of a few operations in float32 are within ``reach``. At multiples of ½, where models mean to be and the
    choice jumps, that counts only if the coordinate is itself a sum of rounded terms.
    """
    if not set(roundings) <= _ROUNDINGS.keys():
        raise Unknown(f"the nearest place of the kind {roundings[0]}")
    rounded = []
    for dtype in FLOATS:
        by, steps = torch.tensor(float(scale), dtype=dtype), torch.arange(len(places), dtype=dtype)
        ways: list[_Shrinking[Tensor]] = [partial(_quotient, by=by), partial(operator.mul, by.reciprocal())]
        rounded += [_original(mode, steps, size, len(places), way).tolist() for way in ways]
    chosen, is_sum = [], mode == "half_pixel_symmetric"
    for place, *others in zip(places, *rounded, strict=True):
        if is_sum or (2 * place).denominator > 1:
            reach = Fraction(gamma(4, torch.float32)) * (size if is_sum else 1 + abs(place))
            others += [place - reach, place + reach]
        choices = (
            max(0, min(size - 1, _ROUNDINGS[rounding](Fraction(value))))
            for rounding in roundings
            for value in (place, *others)
        )
        chosen.append(Fraction(agreed(choices, "the nearest place")))
    return chosen


_HALF = Fraction(1, 2)
_ROUNDINGS: dict[str, Callable[[Fraction], int]] = {
    "floor": math.floor,
    "ceil": math.ceil,
    "round_prefer_floor": lambda place: math.ceil(place - _HALF),
    "round_prefer_ceil": lambda place: math.floor(place + _HALF),
}


def _interpolation(places: list[Fraction], size: int, mode: str, a: Fraction) -> Tensor:
    """The matrix along one axis: which entries each place of the result is made of, the border repeated."""
    matrix = torch.zeros(len(places), size, dtype=torch.float64)
    for row, place in enumerate(places):
        weights: dict[int, Fraction] = {}
        for index, weight in _taps(place, mode, a):
            column = max(0, min(size - 1, index))
            weights[column] = weights.get(column, Fraction(0)) + weight
        for column, weight in weights.items():
            matrix[row, column] = float(weight)
    return matrix


def _taps(place: Fraction, mode: str, a: Fraction) -> list[tuple[int, Fraction]]:
    below = math.floor(place)
    ratio = place - below
    if mode == "nearest":
        return [(below, Fraction(1))]
    if mode == "linear":
        return [(below, 1 - ratio), (below + 1, ratio)]
    if mode == "cubic":  # https://ieeexplore.ieee.org/document/1163711, equation 4
        return [(below + offset, _cubic(abs(ratio - offset), a)) for offset in (-1, 0, 1, 2)]
    raise Unknown(f"interpolation of the kind {mode}")


def _cubic(s: Fraction, a: Fraction) -> Fraction:
    return (a + 2) * s**3 - (a + 3) * s**2 + 1 if s <= 1 else a * (s**3 - 5 * s**2 + 8 * s - 4)
