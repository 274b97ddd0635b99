"""Operators of torch: padding, pooling, resizing."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gramcert.auditing import rules
from gramcert.auditing.aten_arguments import Arguments, Rule, further_results, registering, run
from gramcert.auditing.graph import Variable
from gramcert.auditing.rules import Unknown

if TYPE_CHECKING:
    from gramcert.auditing.aten import Translator

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
def _pad(t: "Translator", a: Arguments) -> Variable:
    amounts = a.ints("pad", a.get("padding"))
    pairs = [(amounts[i], amounts[i + 1]) for i in range(len(amounts) - 2, -1, -2)]
    mode = a.get("mode", "constant")
    for name, known in (("reflect", "reflect"), ("replicat", "replicate"), ("circular", "circular")):
        if a.op.startswith(name) or name in str(mode) or name in a.op:
            return rules.padded(t.b, a.x(), pairs, known)  # type: ignore[arg-type]
    result = rules.padded(t.b, a.x(), pairs, "zeros")
    return t.patterns.shifted(result, None) if a.get("value", 0) else result


@rule(
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "max_pool1d_with_indices",
)
def _max_pool(t: "Translator", a: Arguments) -> Any:
    axes = int(a.op[8])
    taps = a.per_axis("kernel_size", axes, None)
    stride = a.per_axis("stride", axes, taps) if a.get("stride") else taps
    padding = [(side, side) for side in a.per_axis("padding", axes, 0)]
    dilation = a.per_axis("dilation", axes, 1)
    result = rules.max_pool(t.b, a.x(), taps, stride, padding, dilation, round_up=bool(a.get("ceil_mode", False)))
    return [result, *further_results(t, a, 1)] if a.op.endswith("indices") else result


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(t: "Translator", a: Arguments) -> Variable:
    axes, x = int(a.op[8]), a.x()
    taps = a.per_axis("kernel_size", axes, None)
    stride = a.per_axis("stride", axes, taps) if a.get("stride") else taps
    padding = a.per_axis("padding", axes, 0)
    divisor = a.get("divisor_override")
    matrices = []
    for size, k, s, p in zip(x.shape[-axes:], taps, stride, padding, strict=True):
        counted = bool(a.get("count_include_pad", True))
        round_up = bool(a.get("ceil_mode", False))
        window = rules.average_matrix(size, k, s, p, p, round_up=round_up, count_padding=counted)
        matrices.append((window > 0).double() if divisor else window)
    x = rules.average(t.b, x, matrices)
    return rules.times(t.b, x, float(divisor), torch.float64, divide=True) if divisor else x


@rule(
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"
)
def _adaptive_avg(t: "Translator", a: Arguments) -> Variable:
    axes, x = int(a.op[-2]), a.x()
    outputs = _adaptive_outputs(a, axes, x)
    sizes = x.shape[-axes:]
    return rules.average(t.b, x, [rules.adaptive_matrix(n, m) for n, m in zip(sizes, outputs, strict=True)])


@rule("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max(t: "Translator", a: Arguments) -> Any:
    axes = int(a.op[-2])
    return [rules.adaptive_max(t.b, a.x(), _adaptive_outputs(a, axes, a.x())), *further_results(t, a, 1)]


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
def _upsample(t: "Translator", a: Arguments) -> Variable:
    x, axes = a.x(), int(a.op[-2])
    factors = a.get("scale_factors") or [
        scale for name in ("scales", "scales_d", "scales_h", "scales_w") if (scale := a.get(name)) is not None
    ]
    sizes = a.get("output_size") or a.get("size") or [int(n * f) for n, f in zip(x.shape[-axes:], factors, strict=True)]
    if max(*x.shape[-axes:], *sizes) > LARGEST_RESIZED or min(sizes) < 1:
        raise Unknown(f"resizing {x.shape[-axes:]} to {sizes}")
    if "nearest" in a.op:
        return t.b.moved(x, lambda places: _nearest(places, axes, a, t.like(x)), "upsample")
    scales = [float(f) for f in factors] if factors else [None] * axes
    matrices = [
        _interpolation(n, m, scale, "cubic" in a.op, bool(a.get("align_corners", False)))
        for n, m, scale in zip(x.shape[-axes:], sizes, scales, strict=True)
    ]
    return rules.average(t.b, x, matrices, "upsample")


def _nearest(places: Tensor, axes: int, a: Arguments, like: torch.dtype) -> Tensor:
    """Which place each output takes: torch's own operator in the model's type, which rounds, on coordinates."""
    name = "self" if "self" in a.values else "input"
    sizes = places.shape[-axes:]
    for axis, size in enumerate(sizes):
        shape = [size if other == axis else 1 for other in range(axes)]
        coordinate = torch.arange(size, dtype=like).reshape(1, 1, *shape).expand(1, 1, *sizes).contiguous()
        chosen = run(a.target, a.values | {name: coordinate}).movedim(2 + axis, -1)[(0, 0, *(0,) * (axes - 1))]
        places = places.index_select(places.dim() - axes + axis, chosen.long())
    return places


def _interpolation(size: int, outputs: int, scale: float | None, cubic: bool, align: bool) -> Tensor:
    """The matrix along one axis, by torch's own operator on the unit vectors of that axis."""
    unit = torch.eye(size, dtype=torch.float64)[:, None, :, None]
    arguments = {"self": unit, "output_size": [outputs, 1], "scales_h": scale}
    name = "aten.upsample_bicubic2d.default" if cubic else "aten.upsample_bilinear2d.default"
    return run(name, arguments | {"align_corners": align})[:, 0, :, 0].T.contiguous()  # type: ignore[no-any-return]
