"""Operators of ONNX: sums of products in Einstein's notation, Fourier transforms, images read between their pixels."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gramcert.auditing.onnx_call import Call, Context, Rule, axis_of, bounded, register
from gramcert.geometry.convolution import Convolution
from gramcert.operators import rules
from gramcert.operators.contraction import contracted, parsed
from gramcert.operators.graph import Variable
from gramcert.operators.matrices import Convolve
from gramcert.operators.rules import Unknown
from gramcert.operators.sampling import grid_sampled
from gramcert.rounding import gamma, root_up, up

RULES: dict[str, Rule] = {}

# Roundings of an angle below 2π, of its sine and of a product with it, of numbers up to 1.
_ENTRY = 64


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register what some operators do."""
    return register(RULES, names)


@rule("Einsum")
def _einsum(t: Context, c: Call) -> Variable:
    operands = c.all()
    labels, output = parsed(c.text("equation", ""), [len(operand.shape) for operand in operands])
    terms = list(zip(operands, labels, strict=True))
    variables = [(operand, names) for operand, names in terms if isinstance(operand, Variable)]
    if len(variables) != 1:
        raise Unknown("a product of two values that both depend on the input")
    constants = [(operand, names) for operand, names in terms if isinstance(operand, Tensor)]
    return contracted(t.b, *variables[0], constants, output)


@rule("GridSample")
def _grid_sample(t: Context, c: Call) -> Variable:
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(c.text("mode", "linear"), c.text("mode", "linear"))
    padding, align = c.text("padding_mode", "zeros"), bool(c.integer("align_corners", 0))
    return grid_sampled(t.b, c.x(), c.constant(1, "grid"), mode, padding, align_corners=align)


def _fourier(length: int, used: int, parts: int, bins: int, *, inverse: bool) -> Tensor:
    r"""e^(∓2πijk/n) as real numbers (used, parts, bins, 2): parts of the entries, which may be complex, of the result.

    Angles are those of jk mod n, so that none is above 2π.
    """
    bounded([used * parts, bins * 2])
    steps = torch.arange(used)[:, None] * torch.arange(bins) % length
    angles = steps.double() * (2 * math.pi / length)
    cosine, sine = angles.cos(), angles.sin() * (-1 if inverse else 1)
    # (a + ib)(cos - i·sin) = a·cos + b·sin + i(b·cos - a·sin)
    rows = [torch.stack([cosine, -sine], -1), torch.stack([sine, cosine], -1)][:parts]
    return torch.stack(rows, 1) / (length if inverse else 1)


def _bins(c: Call, length: int, parts: int, *, one_sided: bool) -> int:
    if length < 1 or parts not in (1, 2) or (one_sided and parts == 2):
        raise Unknown(f"a transform of {length} entries of {parts} parts")
    return length // 2 + 1 if one_sided else length


@rule("DFT")
def _dft(t: Context, c: Call) -> Variable:
    """Complex numbers are pairs of real ones in the last axis."""
    x, inverse, one_sided = c.x(), bool(c.integer("inverse", 0)), bool(c.integer("onesided", 0))
    given = c.optional(2, "axis") if c.opset >= 20 else None
    axis = axis_of(c.integer("axis", 1) if c.opset < 20 else -2 if given is None else int(given), x.dim)
    if axis == x.dim - 1 or (inverse and one_sided):
        raise Unknown("a transform of parts of complex numbers")
    wanted = c.optional(1, "length")
    length, parts = x.shape[axis] if wanted is None else int(wanted), x.shape[-1]
    bins, used = _bins(c, length, parts, one_sided=one_sided), min(length, x.shape[axis])
    x = t.moved(x, lambda places: places.narrow(axis, 0, used), "slice") if used < x.shape[axis] else x
    matrix = _fourier(length, used, parts, bins, inverse=inverse)
    distance = up(gamma(_ENTRY) * root_up(matrix.numel()) / (length if inverse else 1))
    labels = [f"axis {place}" for place in range(x.dim)]
    output = ["bin" if place == axis else label for place, label in enumerate(labels)]
    output[-1] = "part"
    names = [labels[axis], labels[-1], "bin", "part"]
    return contracted(t.b, x, labels, [(matrix, names)], output, distance)


@rule("STFT")
def _stft(t: Context, c: Call) -> Variable:
    """A convolution: each tap of a window times the waves of all bins."""
    x, step, window = c.x(), int(c.constant(1, "step")), c.optional(2, "window")
    given = c.optional(3, "length")
    if x.dim != 3 or (given is None and window is None) or step < 1:
        raise Unknown(f"a transform of windows of a signal of shape {x.shape}")
    length = int(given) if given is not None else len(window if window is not None else ())
    weights = torch.ones(length, dtype=torch.float64) if window is None else rules.exact(window, "window")
    if weights.shape != (length,) or not 1 <= length <= x.shape[1]:
        raise Unknown(f"a window of {tuple(weights.shape)} places for {length}")
    parts = x.shape[2]
    bins = _bins(c, length, parts, one_sided=bool(c.integer("onesided", 1)))
    waves = _fourier(length, length, parts, bins, inverse=False) * weights.reshape(-1, 1, 1, 1)
    kernel = waves.permute(2, 3, 1, 0).reshape(bins * 2, parts, length).contiguous()
    # The norm of a convolution is at most the sum of those of its taps.
    entry = up(gamma(_ENTRY) * float(weights.abs().max()))
    distance = up(up(entry * length) * root_up(bins * 2 * parts))
    signal = t.moved(x, lambda places: places.mT, "transpose")
    y = t.b.linear(signal, Convolve(signal.shape, Convolution(kernel, step), distance))
    frames = y.shape[2]
    return t.moved(y, lambda places: places.reshape(-1, bins, 2, frames).permute(0, 3, 1, 2), "transpose")
