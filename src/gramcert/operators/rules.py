"""What the operators of both kinds of files do, as nodes of the graph; shared by the readers of aten and of ONNX."""

import math
from typing import Any

import torch
from torch import Tensor

from gramcert.geometry.convolution import Convolution
from gramcert.geometry.padding import PaddingMode, pad
from gramcert.operators import elementwise
from gramcert.operators.graph import MOST_ENTRIES, BadModel, Builder, Nonlinear, Variable
from gramcert.operators.linear import AxisMatrix, Convolve, Scale, Shape
from gramcert.rounding import absolute_sums, gamma, root_up, up

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
    b: Builder, x: Variable, weight: Tensor | None, mean: Tensor | None, variance: Tensor | None, epsilon: float
) -> Variable:
    """In evaluation mode: each channel times w/√(σ² + ε), ε rounded to the type of σ² as torch does."""
    if mean is None or variance is None:
        raise Unknown("batch normalisation by the statistics of the batch itself (training mode, or none were kept)")
    shape = (-1, *(1,) * (x.dim - 2))
    spread = exact(variance, "running variance") + typed(epsilon, variance.dtype)
    if not bool((spread > 0).all()):
        raise Unknown("a running variance plus epsilon that is not positive")
    factors = (torch.ones(len(spread), dtype=torch.float64) if weight is None else exact(weight)) / spread.sqrt()
    if len(factors) != x.shape[1]:
        raise BadModel(f"batch normalisation of {len(factors)} channels got an input of shape {x.shape}")
    exact(mean, "running mean")
    exact(factors, "factor")
    distance = up(gamma(4) * float(factors.abs().max()))
    return b.linear(x, Scale(x.shape, factors.reshape(shape), distance))


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


def average(b: Builder, x: Variable, windows: list[Tensor], name: str = "average pool") -> Variable:
    """Matrices along the last axes, one after the other, each within two roundings of its true entries."""
    for axis, window in enumerate(windows, x.dim - len(windows)):
        rows, columns = absolute_sums(window)
        distance = up(gamma(4) * root_up(up(rows * columns)))
        if name == "upsample":
            # Coordinates of up to n places, rounded a few times, move the four weights of a row, whose slopes are at
            # most 2.25, by up to 64·nu each; a column has at most 4(m/n + 2) of them.
            outputs, inputs = window.shape
            entry = 64 * max(outputs, inputs) * gamma(1)
            distance = up(distance + up(entry * root_up(16.0 * (outputs // inputs + 3))))
        x = b.linear(x, AxisMatrix(x.shape, window, axis, distance, name))
    return x


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
    _require_room(count * count)
    weight = torch.ones(count, count, dtype=torch.float64).tril(-1 if exclusive else 0)
    return matrix(b, x, weight.T.contiguous() if reverse else weight, axis, "cumulative sum")


def padded(b: Builder, x: Variable, pairs: list[tuple[int, int]], mode: PaddingMode) -> Variable:
    """Trailing axes padded or, by negative amounts, cropped."""
    for (before, after), size in zip(pairs, x.shape[x.dim - len(pairs) :], strict=True):
        if size + before + after < 1:
            raise BadModel(f"padding {pairs} leaves nothing of an input of shape {x.shape}")
        if mode == "reflect" and max(before, after) >= size:
            raise BadModel(f"reflect padding {(before, after)} needs more than {max(before, after)} places, got {size}")
    known = (mode, tuple(pairs)) if min(min(pair) for pair in pairs) >= 0 else None
    return b.moved(x, lambda places: pad(places, tuple(pairs), mode), f"{mode} padding", known)


# Windows


def windows_of(
    size: int, taps: int, stride: int, before: int, after: int, dilation: int = 1, *, round_up: bool = False
) -> tuple[int, Tensor]:
    """How many windows pooling takes, and the place that each (row) reads with each tap (column)."""
    if min(taps, stride, dilation) < 1 or min(before, after) < 0:
        raise BadModel(f"pooling with kernel {taps}, stride {stride}, padding {(before, after)}, dilation {dilation}")
    room = size + before + after - dilation * (taps - 1) - 1
    if room < 0:
        raise BadModel(f"pooling with kernel {taps} and padding {(before, after)} of {size} places")
    count = (-(-room // stride) if round_up else room // stride) + 1
    if round_up and (count - 1) * stride >= size + before:
        count -= 1
    _require_room(count * taps)
    places = torch.arange(count)[:, None] * stride - before + dilation * torch.arange(taps)
    return count, places


def average_matrix(
    size: int, taps: int, stride: int, before: int, after: int, *, round_up: bool, count_padding: bool
) -> Tensor:
    """Average pooling along one axis. Windows that reach beyond the padding count only what is inside of it."""
    count, places = windows_of(size, taps, stride, before, after, round_up=round_up)
    inside = (places >= 0) & (places < size)
    counted = (places < size + after) if count_padding else inside
    _require_room(count * (size + 1))
    matrix = torch.zeros(count, size + 1, dtype=torch.float64)
    matrix.scatter_add_(1, torch.where(inside, places, size), inside.double())
    return matrix[:, :size] / counted.sum(1, keepdim=True).clamp_min(1)


def adaptive_matrix(size: int, outputs: int) -> Tensor:
    """Adaptive average pooling along one axis."""
    _require_room(outputs * size)
    spans = _adaptive_spans(size, outputs)
    matrix = torch.zeros(outputs, size, dtype=torch.float64)
    for row, (first, last) in enumerate(spans):
        matrix[row, first:last] = 1 / (last - first)
    return matrix


def _require_room(entries: int) -> None:
    if entries > MOST_ENTRIES:
        raise Unknown(f"too large to be followed: {entries} entries")


def _adaptive_spans(size: int, outputs: int) -> list[tuple[int, int]]:
    if outputs < 1:
        raise BadModel(f"adaptive pooling to {outputs} places")
    return [(o * size // outputs, -(-(o + 1) * size // outputs)) for o in range(outputs)]


def adaptive_max(b: Builder, x: Variable, outputs: list[int]) -> Variable:
    """Each place counted in how many windows it is."""
    shares = 1
    sizes = x.shape[x.dim - len(outputs) :]
    for size, count in zip(sizes, outputs, strict=True):
        inside = torch.zeros(size, dtype=torch.int64)
        for first, last in _adaptive_spans(size, count):
            inside[first:last] += 1
        shares *= int(inside.max())
    return _pooled(b, x, shares, (*x.shape[: x.dim - len(outputs)], *outputs))


def max_pool(
    b: Builder,
    x: Variable,
    taps: list[int],
    stride: list[int],
    padding: list[tuple[int, int]],
    dilation: list[int],
    *,
    round_up: bool = False,
) -> Variable:
    """The root of in how many windows the most shared place is."""
    return _pooled(b, x, *shared_windows(x.shape, taps, stride, padding, dilation, round_up=round_up))


def shared_windows(
    shape: Shape,
    taps: list[int],
    stride: list[int],
    padding: list[tuple[int, int]],
    dilation: list[int],
    *,
    round_up: bool = False,
) -> tuple[int, Shape]:
    """In how many windows the most shared place is, and the shape of what has one entry for each window."""
    shares, outputs, first = 1, [], len(shape) - len(taps)
    for size, k, s, (before, after), d in zip(shape[first:], taps, stride, padding, dilation, strict=True):
        count, places = windows_of(size, k, s, before, after, d, round_up=round_up)
        inside = places[(places >= 0) & (places < size)]
        shares *= int(torch.bincount(inside, minlength=1).max())
        outputs.append(count)
    return shares, (*shape[:first], *outputs)


def _pooled(b: Builder, x: Variable, shares: int, shape: Shape) -> Variable:
    why = "windows share no place" if shares <= 1 else f"√{shares}: a place is in up to {shares} windows"
    constant = 1.0 if shares <= 1 else float(_root(shares))
    return b.nonlinear(x, Nonlinear(constant, "max pool", why=why), shape)


def _root(value: int) -> float:
    root = math.isqrt(value)
    return float(root) if root * root == value else root_up(value)


# Functions of each entry


def activation(b: Builder, x: Variable, name: str, **parameters: elementwise.Number) -> Variable:
    """A function of each entry, by its name in the table."""
    function = elementwise.TABLE[name]
    slopes = function.slopes_for(parameters)
    if isinstance(slopes, str):
        return b.unbounded((x,), x.shape, f"{name}: {slopes}", name)
    given = {**function.parameters, **parameters}
    numbers = {parameter: number for parameter, number in given.items() if isinstance(number, float)}
    why = f"slopes in [{slopes[0]:.6g}, {slopes[1]:.6g}]"
    return b.nonlinear(x, Nonlinear(max(abs(slopes[0]), abs(slopes[1])), name, slopes, why, numbers))


def prelu(b: Builder, x: Variable, weight: Tensor) -> Variable:
    """One slope for all channels or one for each."""
    return activation(b, x, "prelu", weight=exact(weight))


def softmax(b: Builder, x: Variable, axis: int, *, log: bool = False) -> Variable:
    r"""½ for the softmax: diag(p) - ppᵀ is largest at p = (½, ½, 0, …). √n for its logarithm: I - 1pᵀ at p = e_1."""
    count = x.shape[axis_of(axis, x.dim)]
    if count == 1:
        return b.nonlinear(x, Nonlinear(0.0, "softmax", why="of one entry it is constant"))
    if log:
        return b.nonlinear(x, Nonlinear(_root(count), "log softmax", why=f"√{count}, at the corners of the simplex"))
    return b.nonlinear(x, Nonlinear(0.5, "softmax", why="½, at p = (½, ½, 0, …)"))


def normalised(b: Builder, x: Variable, count: int, epsilon: float, like: torch.dtype, name: str) -> Variable:
    r"""z/√(|z|²/n + ε) of n entries, centred before or not: its slope is 1/√ε across at z = 0, and less elsewhere."""
    epsilon = typed(epsilon, like)
    if epsilon <= 0:
        return b.unbounded((x,), x.shape, f"{name} without an epsilon: it jumps where all entries are equal")
    if count == 1 and name != "rms norm":
        return b.nonlinear(x, Nonlinear(0.0, name, why="of one entry it is constant"))
    constant = up(1 / math.sqrt(math.nextafter(epsilon, 0.0)))
    return b.nonlinear(x, Nonlinear(up(constant), name, why=f"1/√ε with ε = {epsilon:.3g}, where entries are equal"))


def axis_of(axis: int, dim: int) -> int:
    """An axis counted from the first."""
    if not -dim <= axis < max(dim, 1):
        raise BadModel(f"axis {axis} of a value with {dim} axes")
    return axis % dim if dim else 0
