"""Operators of torch: padding, pooling, resizing."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from gramcert.auditing.aten_arguments import Arguments, Context, Rule, further_results, registering, run
from gramcert.geometry.padding import pad
from gramcert.operators import rules, windows
from gramcert.operators.graph import Variable
from gramcert.operators.resizing import FLOATS, agreed, require_change
from gramcert.operators.rules import Unknown
from gramcert.operators.sampling import grid_sampled

# Places of an axis that may be resized: a matrix is made for each.
LARGEST_RESIZED = 2**13

RULES: dict[str, Rule] = {}
rule = registering(RULES)


@rule(
    "constant_pad_nd",
    "pad",
    "reflection_pad1d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
    "_pad_circular",
)
def _pad(t: Context, a: Arguments) -> Variable:
    amounts = a.ints("pad", a.get("padding"))
    pairs = [(amounts[i], amounts[i + 1]) for i in range(len(amounts) - 2, -1, -2)]
    mode = a.get("mode", "constant")
    for name, known in (("reflect", "reflect"), ("replicat", "replicate"), ("circular", "circular")):
        if a.op.startswith(name) or name in str(mode) or name in a.op:
            return rules.padded(t.b, a.x(), pairs, known)  # type: ignore[arg-type]
    result, value = rules.padded(t.b, a.x(), pairs, "zeros"), a.number("value", 0)
    if not value:
        return result
    inside = pad(torch.ones(a.x().shape), tuple(pairs), "zeros") > 0
    filled = torch.full(inside.shape, rules.typed(value, t.like(a.x())), dtype=torch.float64)
    return t.b.shifted(result, torch.where(inside, 0.0, filled))


@rule(
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "max_pool1d_with_indices",
)
def _max_pool(t: Context, a: Arguments) -> Any:
    axes = int(a.op[8])
    taps = a.per_axis("kernel_size", axes, None)
    stride = a.per_axis("stride", axes, taps) if a.get("stride") else taps
    padding = [(side, side) for side in a.per_axis("padding", axes, 0)]
    dilation = a.per_axis("dilation", axes, 1)
    result = windows.max_pool(t.b, a.x(), taps, stride, padding, dilation, round_up=bool(a.get("ceil_mode", False)))
    return [result, *further_results(t, a, 1)] if a.op.endswith("indices") else result


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(t: Context, a: Arguments) -> Variable:
    axes, x = int(a.op[8]), a.x()
    taps = a.per_axis("kernel_size", axes, None)
    stride = a.per_axis("stride", axes, taps) if a.get("stride") else taps
    padding = a.per_axis("padding", axes, 0)
    divisor = a.get("divisor_override")
    matrices = []
    for size, k, s, p in zip(x.shape[-axes:], taps, stride, padding, strict=True):
        counted = bool(a.get("count_include_pad", True))
        round_up = bool(a.get("ceil_mode", False))
        window = windows.average_matrix(size, k, s, p, p, round_up=round_up, count_padding=counted)
        matrices.append((window > 0).double() if divisor else window)
    x = windows.average(t.b, x, matrices)
    return rules.times(t.b, x, float(divisor), torch.float64, divide=True) if divisor else x


@rule(
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"
)
def _adaptive_avg(t: Context, a: Arguments) -> Variable:
    axes, x = int(a.op[-2]), a.x()
    outputs = _adaptive_outputs(a, axes, x)
    sizes = x.shape[-axes:]
    return windows.average(t.b, x, [windows.adaptive_matrix(n, m) for n, m in zip(sizes, outputs, strict=True)])


@rule("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max(t: Context, a: Arguments) -> Any:
    axes = int(a.op[-2])
    return [windows.adaptive_max(t.b, a.x(), _adaptive_outputs(a, axes, a.x())), *further_results(t, a, 1)]


def _adaptive_outputs(a: Arguments, axes: int, x: Variable) -> list[int]:
    values = list(a.get("output_size")) if isinstance(a.get("output_size"), (list, tuple)) else [a.get("output_size")]
    values = values * axes if len(values) == 1 else values
    return [size if value is None else value for value, size in zip(values, x.shape[-axes:], strict=True)]


@rule(
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
)
def _upsample(t: Context, a: Arguments) -> Variable:
    x, axes = a.x(), int(a.op[-2])
    factors = a.get("scale_factors") or [
        scale for name in ("scales", "scales_d", "scales_h", "scales_w") if (scale := a.get(name)) is not None
    ]
    # Torch computes new sizes in float64, on every device.
    sizes = a.get("output_size") or a.get("size") or [int(n * f) for n, f in zip(x.shape[-axes:], factors, strict=True)]
    if max(*x.shape[-axes:], *sizes) > LARGEST_RESIZED or min(sizes) < 1:
        raise Unknown(f"resizing {x.shape[-axes:]} to {sizes}")
    # A scale that is not positive counts as none.
    scales = [float(f) if f > 0 else None for f in factors] if factors else [None] * axes
    for size, out, scale in zip(x.shape[-axes:], sizes, scales, strict=True):
        require_change(size, out, scale)
    if "nearest" in a.op:
        return t.b.moved(x, lambda places: _nearest(places, sizes, scales, a), "upsample")
    matrices = [
        _interpolation(n, m, scale, "cubic" in a.op, bool(a.get("align_corners", False)))
        for n, m, scale in zip(x.shape[-axes:], sizes, scales, strict=True)
    ]
    return windows.average(t.b, x, matrices, "upsample")


def _nearest(places: Tensor, sizes: list[int], scales: Sequence[float | None], a: Arguments) -> Tensor:
    """Which place each output takes: torch's own operator on coordinates, if every device and type takes the same."""
    name, axes = "self" if "self" in a.values else "input", len(sizes)
    before = places.shape[-axes:]
    for axis, (size, out, scale) in enumerate(zip(before, sizes, scales, strict=True)):
        shape = [size if other == axis else 1 for other in range(axes)]
        choices = _choices(size, out, scale, centred="exact" in a.op)
        for dtype in FLOATS:
            coordinate = torch.arange(size, dtype=dtype).reshape(1, 1, *shape).expand(1, 1, *before).contiguous()
            taken = run(a.target, a.values | {name: coordinate}).movedim(2 + axis, -1)[(0, 0, *(0,) * (axes - 1))]
            choices.append([int(place) for place in taken.tolist()])
        chosen = [agreed(found, "the nearest place") for found in zip(*choices, strict=True)]
        places = places.index_select(places.dim() - axes + axis, torch.tensor(chosen))
    return places


def _choices(size: int, out: int, scale: float | None, *, centred: bool) -> list[list[int]]:
    """What torch's kernels take along one axis: by a factor of float32, of float64, or without rounding.

    Those for channels that lie side by side take a scale for 2 where it doubles the size.
    """
    exact = Fraction(size, out) if scale is None else 1 / Fraction(scale)
    shift = Fraction(1, 2) if centred else Fraction(0)
    choices = [[min(math.floor((i + shift) * exact), size - 1) for i in range(out)]]
    for dtype in FLOATS:
        factor = torch.tensor(size / out if scale is None else 1 / scale, dtype=dtype)
        taken = (torch.arange(out, dtype=dtype) + float(shift)) * factor
        choices.append(taken.floor().long().clamp_max(size - 1).tolist())
    if not centred and out == 2 * size:
        choices.append([i // 2 for i in range(out)])
    return choices


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def _grid_sample(t: Context, a: Arguments) -> Variable:
    modes, paddings = ("linear", "nearest", "cubic"), ("zeros", "border", "reflection")
    mode, padding = modes[a.get("interpolation_mode", 0)], paddings[a.get("padding_mode", 0)]
    return grid_sampled(t.b, a.x(), a.weight("grid"), mode, padding, align_corners=bool(a.get("align_corners", False)))


def _interpolation(size: int, outputs: int, scale: float | None, cubic: bool, align: bool) -> Tensor:
    """The matrix along one axis, by torch's own operator on the unit vectors of that axis."""
    unit = torch.eye(size, dtype=torch.float64)[:, None, :, None]
    arguments = {"self": unit, "output_size": [outputs, 1], "scales_h": scale}
    name = "aten.upsample_bicubic2d.default" if cubic else "aten.upsample_bilinear2d.default"
    return run(name, arguments | {"align_corners": align})[:, 0, :, 0].T.contiguous()  # type: ignore[no-any-return]
