"""What the operators of both kinds of files do, as nodes of the graph; shared by the readers of aten and of ONNX."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gramcert.geometry.convolution import Convolution
from gramcert.geometry.padding import PaddingMode, pad
from gramcert.operators import elementwise
from gramcert.operators.graph import MOST_ENTRIES, BadModel, Builder, Nonlinear, Variable
from gramcert.operators.linear import Scale, Shape
from gramcert.operators.matrices import AxisMatrix, Convolve
from gramcert.operators.rounded import Compute, Rounded, exactly, norms, rounding
from gramcert.rounding import gamma, next_up, root_up, underflow, up

# Reasons that the readers of both kinds of files give.
EMBEDDING = "an embedding: indices that depend on the input"
CHOICE = "a choice of entries that depends on the input"

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# The constant of a softmax over two entries or more.
SOFTMAX = 0.5


class Unknown(Exception):  # noqa: N818 - not a failure: the node becomes unbounded
    """Nothing is known of this use of an operator, for the reason in the message."""


class Consequence(Unknown):
    """Nothing is known because nothing is known of a value that it acts on."""

    def __init__(self) -> None:
        super().__init__("it acts on a value of which nothing is known")


def reason_of(error: Exception) -> str:
    """What a rule stumbled over, in one line."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def exact(tensor: Tensor, what: str = "weight") -> Tensor:
    """A constant as float64 with the same values."""
    if tensor.dtype not in REAL and (tensor.is_complex() or tensor.is_floating_point()):
        raise Unknown(f"its {what} has the type {str(tensor.dtype).removeprefix('torch.')}")
    result = tensor.detach().cpu().double()
    if not tensor.is_floating_point() and bool((result.abs() >= 2.0**53).any()):
        raise Unknown(f"its {what} has integers that are too large for float64")
    if not bool(torch.isfinite(result).all()):
        raise Unknown(f"its {what} has entries that are not finite")
    return result


def typed(value: float, like: torch.dtype) -> float:
    """A number as the model has it: torch rounds scalars to the type of the tensor they meet, at least to float32."""
    if not math.isfinite(value):
        raise Unknown(f"a number that is not finite, {value}")
    return float(torch.tensor(value, dtype=torch.float64 if like == torch.float64 else torch.float32))


def require_room(entries: int) -> None:
    """Refuse what would take all memory."""
    if entries > MOST_ENTRIES:
        raise Unknown(f"too large to be followed: {entries} entries")


# Linear maps


def convolution(
    b: Builder,
    x: Variable,
    weight: Tensor,
    *,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    transposed: bool = False,
    output_padding: Any = 0,
) -> Variable:
    """A convolution by a constant kernel; without a batch axis too."""
    axes = weight.dim() - 2
    if axes not in (1, 2, 3):
        raise Unknown(f"a convolution with {axes} spatial axes")
    if x.dim not in (axes + 1, axes + 2):
        raise BadModel(f"a convolution with {axes} spatial axes got an input of shape {x.shape}")
    layer = Convolution(
        exact(weight), stride, padding, "zeros", dilation, groups, transposed, output_padding if transposed else 0
    )
    if x.shape[-axes - 1] != layer.in_channels:
        raise BadModel(f"a convolution of {layer.in_channels} channels got an input of shape {x.shape}")
    return b.linear(x, Convolve(x.shape, layer))


def matrix(b: Builder, x: Variable, weight: Tensor, axis: int = -1, name: str = "matrix") -> Variable:
    """A constant matrix (outputs, inputs) along one axis."""
    axis = axis_of(axis, x.dim)
    weight = exact(weight)
    if weight.dim() != 2 or weight.shape[1] != x.shape[axis]:
        raise BadModel(f"a matrix of shape {tuple(weight.shape)} got an input of shape {x.shape}")
    return b.linear(x, AxisMatrix(x.shape, weight, axis, name=name))


def batch_norm(
    b: Builder,
    x: Variable,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    epsilon: float,
) -> Variable:
    """In evaluation mode: (x - μ)·w/√(σ² + ε) + b in each channel."""
    if mean is None or variance is None:
        raise Unknown("batch normalisation by the statistics of the batch itself (training mode, or none were kept)")
    factors, distance = batch_norm_factors(weight, variance, epsilon)
    if len(factors) != x.shape[1]:
        raise BadModel(f"batch normalisation of {len(factors)} channels got an input of shape {x.shape}")
    shape = (-1, *(1,) * (x.dim - 2))
    x = b.shifted(x, -exact(mean, "running mean").reshape(shape))
    x = b.linear(x, Scale(x.shape, factors.reshape(shape), distance))
    return x if bias is None else b.shifted(x, exact(bias, "bias").reshape(shape))


def batch_norm_factors(weight: Tensor | None, variance: Tensor, epsilon: float) -> tuple[Tensor, float]:
    """w/√(σ² + ε), ε rounded to the type of σ² as torch does, and how far each may be from the true one."""
    spread = exact(variance, "running variance") + typed(epsilon, variance.dtype)
    if not bool((spread > 0).all()):
        raise Unknown("a running variance plus epsilon that is not positive")
    factors = (torch.ones(len(spread), dtype=torch.float64) if weight is None else exact(weight)) / spread.sqrt()
    exact(factors, "factor")
    return factors, up(gamma(4) * float(factors.abs().max())) if factors.numel() else 0.0


def biased(b: Builder, x: Variable, bias: Tensor | None, axis: int = -1) -> Variable:
    """Plus one number for each place of an axis."""
    if bias is None:
        return x
    return b.shifted(x, exact(bias, "bias").reshape(-1, *(1,) * (x.dim - 1 - axis_of(axis, x.dim))))


def times(b: Builder, x: Variable, constant: Tensor | float, like: torch.dtype, *, divide: bool = False) -> Variable:
    """Times a constant, or divided by it."""
    number = constant if isinstance(constant, Tensor) else typed(float(constant), like)
    value = exact(torch.as_tensor(number, dtype=None if isinstance(number, Tensor) else torch.float64), "factor")
    if not divide:
        return b.scaled(x, value)
    if bool((value == 0).any()):
        raise Unknown("a division by zero")
    inverse = exact(1 / value, "inverse factor")
    return b.scaled(x, inverse, up(gamma(2) * float(inverse.abs().max())))


def reduce_linear(b: Builder, x: Variable, axes: list[int], *, keep: bool, mean: bool) -> Variable:
    """The mean or the sum over some axes."""
    axes = [axis_of(axis, x.dim) for axis in axes] if axes else list(range(x.dim))
    shape = tuple(1 if axis in axes else n for axis, n in enumerate(x.shape))
    for axis in axes:
        count = x.shape[axis]
        row = torch.full((1, count), 1 / count if mean else 1.0, dtype=torch.float64)
        distance = up(gamma(2) * root_up(1 / count)) if mean else 0.0
        x = b.linear(x, AxisMatrix(x.shape, row, axis, distance, "mean" if mean else "sum"))
    if not keep:
        shape = tuple(n for axis, n in enumerate(shape) if axis not in axes)
    return b.moved(x, lambda places: places.reshape(shape))


def cumulative_sum(b: Builder, x: Variable, axis: int, *, exclusive: bool = False, reverse: bool = False) -> Variable:
    """Of all entries before each one along an axis, itself included or not: a triangular matrix."""
    count = x.shape[axis]
    require_room(count * count)
    weight = torch.ones(count, count, dtype=torch.float64).tril(-1 if exclusive else 0)
    return matrix(b, x, weight.T.contiguous() if reverse else weight, axis, "cumulative sum")


def padded(b: Builder, x: Variable, pairs: list[tuple[int, int]], mode: PaddingMode) -> Variable:
    """Trailing axes padded or, by negative amounts, cropped."""
    if mode == "circular" and min(min(pair) for pair in pairs) < 0:
        raise Unknown("circular padding by a negative amount: of what is left, or of all")
    for (before, after), size in zip(pairs, x.shape[x.dim - len(pairs) :], strict=True):
        if size + before + after < 1:
            raise BadModel(f"padding {pairs} leaves nothing of an input of shape {x.shape}")
        if mode == "reflect" and max(before, after) >= size:
            raise BadModel(f"reflect padding {(before, after)} needs more than {max(before, after)} places, got {size}")
    known = (mode, tuple(pairs)) if min(min(pair) for pair in pairs) >= 0 else None
    return b.moved(x, lambda places: pad(places, tuple(pairs), mode), f"{mode} padding", known)


def root(value: int) -> float:
    """The square root of an integer, rounded up."""
    whole = math.isqrt(value)
    return float(whole) if whole * whole == value else root_up(value)


# Functions of each entry


def activation(
    b: Builder,
    x: Variable,
    name: str,
    compute: Compute | None = None,
    local: elementwise.Local = None,
    /,
    **parameters: elementwise.Number,
) -> Variable:
    """A function of each entry, by its name in the table; ``compute`` where it is a relative of that one."""
    function = elementwise.TABLE[name]
    slopes = function.slopes_for(parameters)
    if isinstance(slopes, str):
        return b.unbounded((x,), x.shape, f"{name}: {slopes}", name)
    given = {**function.parameters, **parameters}
    numbers = {parameter: number for parameter, number in given.items() if isinstance(number, float)}
    why = f"slopes in [{slopes[0]:.6g}, {slopes[1]:.6g}]"
    if compute is None:  # a relative has the same slopes, but bends otherwise
        compute, local = elementwise.computing(name, parameters), function.local_for(parameters)
    constant = max(abs(slopes[0]), abs(slopes[1]))
    return b.nonlinear(x, Nonlinear(constant, name, slopes, why, numbers, compute, local))


def prelu(b: Builder, x: Variable, weight: Tensor) -> Variable:
    """Slopes that broadcast to the value."""
    slopes = exact(weight)
    gain = 1 + float(slopes.abs().max()) if slopes.numel() else 1.0
    compute = _evaluated(lambda x: torch.where(x > 0, x, slopes * x), gain)
    return activation(b, x, "prelu", compute, elementwise.TABLE["prelu"].local_for({"weight": slopes}), weight=slopes)


def _evaluated(function: Callable[[Tensor], Tensor], gain: float = 1.0) -> Compute:
    return lambda x: elementwise.evaluated(x, function(x), gain)


def clamped(b: Builder, x: Variable, limits: dict[str, Tensor], types: Iterable[torch.dtype] = ()) -> Variable:
    """Between limits that broadcast with it, which the model may round to some types."""
    wide = {name: limit.double() for name, limit in limits.items()}
    if any(bool(limit.isnan().any()) for limit in wide.values()):
        raise Unknown("a limit that is not a number")
    rounded = [(limit - limit.to(dtype).double()).nan_to_num(0.0) for limit in wide.values() for dtype in types]
    off = max((float(part.abs().max()) for part in rounded if part.numel()), default=0.0)
    # Patterns ask for numbers that are known to the last bit, as they are not in half precision.
    like = min(types, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float64)
    is_known = torch.finfo(like).bits >= 32
    # What is not one such number is no number at all, lest it be taken for a limit that is missing.
    numbers = {
        name: float(limit.to(like)) if limit.numel() == 1 and is_known else math.nan for name, limit in wide.items()
    }

    def compute(x: Tensor) -> Rounded:
        return elementwise.evaluated(x, torch.clamp(x, **wide), 0.0, off) if wide else exactly(x)

    spread = b.spread(x, *(tuple(limit.shape) for limit in wide.values()))
    is_plain = not off and not any(map(math.isnan, numbers.values()))
    local = elementwise.bent_clamp(**numbers) if is_plain else None
    return activation(b, spread, "clamp", compute, local, **numbers)


def softmax(b: Builder, x: Variable, axis: int, *, log: bool = False) -> Variable:
    r"""½ for the softmax: diag(p) - ppᵀ is largest at p = (½, ½, 0, …). √n for its logarithm: I - 1pᵀ at p = e_1."""
    axis = axis_of(axis, x.dim)
    count, function = x.shape[axis], torch.log_softmax if log else torch.softmax
    # A sum of n exponentials more, which are relative to themselves; its logarithm is at most log n beyond the entries.
    compute = _evaluated(lambda x: function(x, axis + 1), count + 1.0)
    if count == 1:
        return b.nonlinear(x, Nonlinear(0.0, "softmax", why="of one entry it is constant", compute=compute))
    if log:
        why = f"√{count}, at the corners of the simplex"
        return b.nonlinear(x, Nonlinear(root(count), "log softmax", why=why, compute=compute))
    return b.nonlinear(x, Nonlinear(SOFTMAX, "softmax", why="½, at p = (½, ½, 0, …)", compute=compute))


def log_sum_exp(b: Builder, x: Variable, axes: list[int], shape: Shape) -> Variable:
    """Its gradient is a softmax, whose entries are not negative and add up to 1."""
    count = math.prod(x.shape[axis] for axis in axes)
    why = "of disjoint parts, each with a gradient of at most 1"

    def compute(x: Tensor) -> Rounded:
        return elementwise.evaluated(
            x, torch.logsumexp(x, [axis + 1 for axis in axes]).reshape(-1, *shape), count + 1.0
        )

    return b.nonlinear(x, Nonlinear(1.0, "log sum exp", why=why, compute=compute), shape)


def length(b: Builder, x: Variable, axes: list[int], shape: Shape) -> Variable:
    """The l2 norm over some axes: relative rounding, but for squares that vanish."""
    count = math.prod(x.shape[axis] for axis in axes)

    def compute(x: Tensor) -> Rounded:
        y = x.square().sum([axis + 1 for axis in axes]).sqrt().reshape(-1, *shape)
        lost = up(root_up(underflow(4 * (count + 5))) * float(max(1, y[0].numel())))
        return y, next_up(rounding(count + 5, norms(y), y) + lost)

    return b.nonlinear(x, Nonlinear(1.0, "l2 norm", why="a norm of disjoint parts", compute=compute), shape)


def normalised(b: Builder, x: Variable, count: int, epsilon: float, like: torch.dtype, name: str) -> Variable:
    r"""z/√(|z|²/n + ε) of n consecutive entries, centred before unless it is an rms norm."""
    epsilon, is_centred = typed(epsilon, like), name != "rms norm"
    constant = _steepest(epsilon)

    def compute(x: Tensor) -> Rounded:
        groups = x.reshape(len(x), -1, count)
        z = groups - groups.mean(2, keepdim=True) if is_centred else groups
        y = (z / (z.square().mean(2, keepdim=True) + epsilon).sqrt()).reshape(x.shape)
        # What centring rounds passes through the slopes; the rest, squares being too small to matter beside ε, is
        # relative, unless they overflow.
        centred = rounding(count + 3, next_up(2 * norms(x)), x)
        return y, next_up(next_up(centred * constant) + rounding(2 * count + 8, norms(y), y))

    return normalised_by(b, x, count, epsilon, name, compute if epsilon >= 2.0**-900 else None)


def normalised_by(b: Builder, x: Variable, count: int, epsilon: float, name: str, compute: Compute | None) -> Variable:
    """A normalisation of n entries in any form: its slope is 1/√ε across at z = 0, and less elsewhere."""
    if not math.isfinite(_steepest(epsilon)):
        return b.unbounded((x,), x.shape, f"{name} without an epsilon: it jumps where all entries are equal")
    if count == 1 and name != "rms norm":
        return b.nonlinear(x, Nonlinear(0.0, name, why="of one entry it is constant", compute=compute))
    why = f"1/√ε with ε = {epsilon:.3g}, where entries are equal"
    return b.nonlinear(x, Nonlinear(_steepest(epsilon), name, why=why, compute=compute))


def _steepest(epsilon: float) -> float:
    below = math.nextafter(epsilon, -math.inf)
    return up(up(1 / math.sqrt(below))) if below > 0 else math.inf


def axis_of(axis: int, dim: int) -> int:
    """An axis counted from the first."""
    if not -dim <= axis < max(dim, 1):
        raise BadModel(f"axis {axis} of a value with {dim} axes")
    return axis % dim if dim else 0
