"""Windows of axes: pooling by means and maxima, fixed and adaptive, at one size or at every one."""

import math

import torch
from torch import Tensor

from gramcert.operators.graph import BadModel, Builder, Nonlinear, Variable
from gramcert.operators.linear import Shape
from gramcert.operators.matrices import AxisMatrix
from gramcert.operators.rounded import selecting
from gramcert.operators.rules import require_room, root
from gramcert.rounding import absolute_sums, gamma, root_up, up


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
    require_room(count * taps)
    places = torch.arange(count)[:, None] * stride - before + dilation * torch.arange(taps)
    return count, places


def average_matrix(
    size: int, taps: int, stride: int, before: int, after: int, *, round_up: bool, count_padding: bool
) -> Tensor:
    """Average pooling along one axis. Windows that reach beyond the padding count only what is inside of it."""
    count, places = windows_of(size, taps, stride, before, after, round_up=round_up)
    inside = (places >= 0) & (places < size)
    counted = (places < size + after) if count_padding else inside
    require_room(count * (size + 1))
    matrix = torch.zeros(count, size + 1, dtype=torch.float64)
    matrix.scatter_add_(1, torch.where(inside, places, size), inside.double())
    return matrix[:, :size] / counted.sum(1, keepdim=True).clamp_min(1)


def adaptive_matrix(size: int, outputs: int) -> Tensor:
    """Adaptive average pooling along one axis."""
    require_room(outputs * size)
    spans = _adaptive_spans(size, outputs)
    matrix = torch.zeros(outputs, size, dtype=torch.float64)
    for row, (first, last) in enumerate(spans):
        matrix[row, first:last] = 1 / (last - first)
    return matrix


def _adaptive_spans(size: int, outputs: int) -> list[tuple[int, int]]:
    if outputs < 1:
        raise BadModel(f"adaptive pooling to {outputs} places")
    return [(o * size // outputs, -(-(o + 1) * size // outputs)) for o in range(outputs)]


def adaptive_max(b: Builder, x: Variable, outputs: list[int]) -> Variable:
    """The largest entry of each span."""
    sizes = x.shape[x.dim - len(outputs) :]
    return _max_pooled(b, x, [_span_places(size, count) for size, count in zip(sizes, outputs, strict=True)])


def _span_places(size: int, outputs: int) -> Tensor:
    """The places of each span, as many as the longest has; others beyond the last."""
    spans = _adaptive_spans(size, outputs)
    longest = max(last - first for first, last in spans)
    require_room(outputs * longest)
    first, last = torch.tensor(spans).T[:, :, None]
    places = first + torch.arange(longest)
    return torch.where(places < last, places, size)


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
    """The largest entry of each window."""
    return _max_pooled(b, x, window_places(x.shape, taps, stride, padding, dilation, round_up=round_up))


def window_places(
    shape: Shape,
    taps: list[int],
    stride: list[int],
    padding: list[tuple[int, int]],
    dilation: list[int],
    *,
    round_up: bool = False,
) -> list[Tensor]:
    """For each of the last axes the places (window, tap) that are read."""
    axes = zip(shape[len(shape) - len(taps) :], taps, stride, padding, dilation, strict=True)
    return [windows_of(size, k, s, *pair, d, round_up=round_up)[1] for size, k, s, pair, d in axes]


def shared_windows(shape: Shape, places: list[Tensor]) -> tuple[int, Shape]:
    """In how many windows the most shared place is, and the shape of what has one entry for each window."""
    shares, first = 1, len(shape) - len(places)
    for size, read in zip(shape[first:], places, strict=True):
        inside = read[(read >= 0) & (read < size)]
        shares *= int(torch.bincount(inside, minlength=1).max())
    return shares, (*shape[:first], *map(len, places))


def _max_pooled(b: Builder, x: Variable, places: list[Tensor]) -> Variable:
    """Its constant is the root of in how many windows the most shared place is."""
    shares, shape = shared_windows(x.shape, places)
    why = "windows share no place" if shares <= 1 else f"√{shares}: a place is in up to {shares} windows"
    constant = 1.0 if shares <= 1 else float(root(shares))

    def largest(x: Tensor) -> Tensor:
        """Axis by axis, with a place behind the last for what is outside."""
        for axis, read in enumerate(places, x.dim() - len(places)):
            beyond = x.shape[axis]
            inside = torch.where((read >= 0) & (read < beyond), read, beyond)
            edge = x.new_full((*x.shape[:axis], 1, *x.shape[axis + 1 :]), -math.inf)
            padded = torch.cat([x, edge], axis).movedim(axis, -1)
            x = padded[..., inside].amax(-1).movedim(-1, axis)
        return x

    def windows() -> Tensor:
        """Row by row of the result, the places that each window reads."""
        first = x.dim - len(places)
        count = math.prod(x.shape)
        index = torch.arange(count).reshape(x.shape)
        for axis, read in enumerate(places, first):
            # Taps of the axes so far are behind all others.
            edge = index.new_full((*index.shape[:axis], 1, *index.shape[axis + 1 :]), count)
            inside = torch.where((read >= 0) & (read < index.shape[axis]), read, index.shape[axis])
            index = torch.cat([index, edge], axis).movedim(axis, -1)[..., inside].movedim(-2, axis)
        return index.reshape(math.prod(shape), -1)

    axes = {"axes": float(len(places))}
    operation = Nonlinear(constant, "max pool", None, why, axes, selecting(largest), windows=windows)
    return b.nonlinear(x, operation, shape)


def windows_per_place(taps: int, stride: int, dilation: int = 1) -> int:
    """In how many windows one place of an axis of any size can be: taps a with stride·o + dilation·a = place."""
    return -(-taps // (stride // math.gcd(stride, dilation)))
