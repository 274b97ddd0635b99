"""What the operators of both kinds of files do, as nodes of the graph; shared by the readers of aten and of ONNX."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gramcert.geometry.convolution import Convolution
from gramcert.geometry.padding import PaddingMode, pad
from gramcert.operators import elementwise
from gramcert.operators.graph import MOST_ENTRIES, BadModel, Builder, Joint, Nonlinear, Variable
from gramcert.operators.linear import AxisMatrix, Convolve, Move, Scale, Shape
from gramcert.operators.rounded import Compute, Rounded, exactly, norms, rounding, selecting
from gramcert.rounding import absolute_sums, gamma, next_up, root_up, underflow, up

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
    axis = _axis(axis, x.dim)
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
    return b.shifted(x, exact(bias, "bias").reshape(-1, *(1,) * (x.dim - 1 - _axis(axis, x.dim))))


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
    axes = [_axis(axis, x.dim) for axis in axes] if axes else list(range(x.dim))
    shape = tuple(1 if axis in axes else n for axis, n in enumerate(x.shape))
    for axis in axes:
        count = x.shape[axis]
        row = torch.full((1, count), 1 / count if mean else 1.0, dtype=torch.float64)
        distance = up(gamma(2) * root_up(1 / count)) if mean else 0.0
        x = b.linear(x, AxisMatrix(x.shape, row, axis, distance, "mean" if mean else "sum"))
    if not keep:
        shape = tuple(n for axis, n in enumerate(shape) if axis not in axes)
    return b.moved(x, lambda places: places.reshape(shape))


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
    """The largest entry of each span."""
    sizes = x.shape[x.dim - len(outputs) :]
    return _max_pooled(b, x, [_span_places(size, count) for size, count in zip(sizes, outputs, strict=True)])


def _span_places(size: int, outputs: int) -> Tensor:
    """The places of each span, as many as the longest has; others beyond the last."""
    spans = _adaptive_spans(size, outputs)
    longest = max(last - first for first, last in spans)
    _require_room(outputs * longest)
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

    return b.nonlinear(x, Nonlinear(constant, "max pool", why=why, compute=selecting(largest)), shape)


def windows_per_place(taps: int, stride: int, dilation: int = 1) -> int:
    """In how many windows one place of an axis of any size can be: taps a with stride·o + dilation·a = place."""
    return -(-taps // (stride // math.gcd(stride, dilation)))


def root(value: int) -> float:
    """The square root of an integer, rounded up."""
    whole = math.isqrt(value)
    return float(whole) if whole * whole == value else root_up(value)


# Functions of each entry


def activation(
    b: Builder, x: Variable, name: str, compute: Compute | None = None, /, **parameters: elementwise.Number
) -> Variable:
    """A function of each entry, by its name in the table; ``compute`` where it is a relative of that one."""
    function = elementwise.TABLE[name]
    slopes = function.slopes_for(parameters)
    if isinstance(slopes, str):
        return b.unbounded((x,), x.shape, f"{name}: {slopes}", name)
    given = {**function.parameters, **parameters}
    numbers = {parameter: number for parameter, number in given.items() if isinstance(number, float)}
    why = f"slopes in [{slopes[0]:.6g}, {slopes[1]:.6g}]"
    compute = compute or elementwise.computing(name, parameters)
    return b.nonlinear(x, Nonlinear(max(abs(slopes[0]), abs(slopes[1])), name, slopes, why, numbers, compute))


def prelu(b: Builder, x: Variable, weight: Tensor) -> Variable:
    """Slopes that broadcast to the value."""
    slopes = exact(weight)
    gain = 1 + float(slopes.abs().max()) if slopes.numel() else 1.0
    compute = _evaluated(lambda x: torch.where(x > 0, x, slopes * x), gain)
    return activation(b, x, "prelu", compute, weight=slopes)


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
    numbers = {name: float(limit.to(like)) for name, limit in wide.items() if limit.numel() == 1 and is_known}

    def compute(x: Tensor) -> Rounded:
        return elementwise.evaluated(x, torch.clamp(x, **wide), 0.0, off) if wide else exactly(x)

    spread = b.spread(x, *(tuple(limit.shape) for limit in wide.values()))
    return activation(b, spread, "clamp", compute, **numbers)


def softmax(b: Builder, x: Variable, axis: int, *, log: bool = False) -> Variable:
    r"""½ for the softmax: diag(p) - ppᵀ is largest at p = (½, ½, 0, …). √n for its logarithm: I - 1pᵀ at p = e_1."""
    axis = _axis(axis, x.dim)
    count, function = x.shape[axis], torch.log_softmax if log else torch.softmax
    # A sum of n exponentials more, which are relative to themselves; its logarithm is at most log n beyond the entries.
    compute = _evaluated(lambda x: function(x, axis + 1), count + 1.0)
    if count == 1:
        return b.nonlinear(x, Nonlinear(0.0, "softmax", why="of one entry it is constant", compute=compute))
    if log:
        why = f"√{count}, at the corners of the simplex"
        return b.nonlinear(x, Nonlinear(root(count), "log softmax", why=why, compute=compute))
    return b.nonlinear(x, Nonlinear(SOFTMAX, "softmax", why="½, at p = (½, ½, 0, …)", compute=compute))


def length(b: Builder, x: Variable, axes: list[int], shape: Shape, name: str = "l2 norm") -> Variable:
    """The l2 norm over some axes: relative rounding, but for squares that vanish."""
    count = math.prod(x.shape[axis] for axis in axes)

    def compute(x: Tensor) -> Rounded:
        y = x.square().sum([axis + 1 for axis in axes]).sqrt().reshape(-1, *shape)
        lost = up(root_up(underflow(4 * (count + 5))) * float(max(1, y[0].numel())))
        return y, next_up(rounding(count + 5, norms(y), y) + lost)

    return b.nonlinear(x, Nonlinear(1.0, name, why="a norm of disjoint parts", compute=compute), shape)


def largest(b: Builder, x: Variable, axes: list[int], shape: Shape, *, smallest: bool = False) -> Variable:
    """The largest entry along some axes, or the smallest: no further from each other than the entries."""
    extreme = torch.amin if smallest else torch.amax
    compute = selecting(lambda x: extreme(x, [axis + 1 for axis in axes]).reshape(-1, *shape))
    return b.nonlinear(x, Nonlinear(1.0, "largest entry", why="entries occur once", compute=compute), shape)


def normalised(
    b: Builder, x: Variable, count: int, epsilon: float, like: torch.dtype, name: str, axes: Iterable[int] | None = None
) -> Variable:
    r"""z/√(|z|²/n + ε) of n entries, centred before or not: its slope is 1/√ε across at z = 0, and less elsewhere.

    The entries are consecutive ones unless the axes are given.
    """
    epsilon = typed(epsilon, like)
    if epsilon <= 0:
        return b.unbounded((x,), x.shape, f"{name} without an epsilon: it jumps where all entries are equal")
    constant = up(up(1 / math.sqrt(math.nextafter(epsilon, 0.0))))
    is_centred = name != "rms norm"
    dims = (2,) if axes is None else tuple(axis + 1 for axis in axes)

    def compute(x: Tensor) -> Rounded:
        groups = x.reshape(len(x), -1, count) if axes is None else x
        z = groups - groups.mean(dims, keepdim=True) if is_centred else groups
        y = (z / (z.square().mean(dims, keepdim=True) + epsilon).sqrt()).reshape(x.shape)
        # What centring rounds passes through the slopes; the rest, squares being too small to matter beside ε, is
        # relative, unless they overflow.
        centred = rounding(count + 3, next_up(2 * norms(x)), x)
        return y, next_up(next_up(centred * constant) + rounding(2 * count + 8, norms(y), y))

    if count == 1 and is_centred:
        return b.nonlinear(x, Nonlinear(0.0, name, why="of one entry it is constant", compute=compute))
    why = f"1/√ε with ε = {epsilon:.3g}, where entries are equal"
    return b.nonlinear(x, Nonlinear(constant, name, why=why, compute=compute))


# Several values


def concatenated(b: Builder, parts: list[Variable | Tensor], axis: int) -> Variable:
    """Side by side: parts of one value make a move of its entries, maxima and minima of the same two a sorting."""
    shapes = [tuple(part.shape) for part in parts]
    axis = _axis(axis, len(shapes[0]))
    if any(s[:axis] != shapes[0][:axis] or s[axis + 1 :] != shapes[0][axis + 1 :] for s in shapes):
        raise BadModel(f"shapes {shapes} cannot be side by side on axis {axis}")
    shape = (*shapes[0][:axis], sum(s[axis] for s in shapes), *shapes[0][axis + 1 :])
    variables = [part for part in parts if isinstance(part, Variable)]
    if len(variables) == 1 and len(parts) == 1:
        return b.same(variables[0])
    if len(variables) < len(parts):  # the constants are added where places were left for them
        held, constants = list[Variable | Tensor](), []
        for part in parts:
            held.append(part if isinstance(part, Variable) else _left_open(b, part, variables[0]))
            constants.append(exact(part if isinstance(part, Tensor) else torch.zeros(part.shape), "constant"))
        together, offset = concatenated(b, held, axis), torch.cat(constants, axis)
        return b.shifted(together, offset) if bool(offset.any()) else together
    stacked = _stacked_moves(b, variables, axis)
    if stacked is not None:
        return stacked
    if len(parts) == 2 and len(variables) == 2:
        first, second = (b.node(part) for part in variables)
        names = [node.operation.name for node in (first, second) if isinstance(node.operation, Joint)]
        if (
            set(names) == {"maximum", "minimum"}
            and set(first.inputs) == set(second.inputs)
            and len(set(first.inputs)) == 2
        ):
            pair: list[Variable | Tensor] = [Variable(name, b.graph.nodes[name].shape) for name in first.inputs]
            if all(tuple(part.shape) == first.shape for part in pair):
                together = concatenated(b, pair, axis)
                return b.nonlinear(together, _max_min(axis + 1, largest_first=names[0] == "maximum"))
    return b.joint(variables, "concatenate", shape, lambda values: torch.cat(values, axis + 1))


def _left_open(b: Builder, part: Tensor, beside: Variable) -> Variable:
    """Places for a constant: a move that takes nothing of what the value beside it was moved from."""
    node = b.node(beside)
    if isinstance(node.operation, Move):
        beside = Variable(node.inputs[0], node.operation.source)
    return b.moved(beside, lambda _: torch.zeros(part.shape, dtype=torch.int64), "constant")


def _max_min(axis: int, *, largest_first: bool) -> Nonlinear:
    """The larger and the smaller ones of the two halves of an axis."""

    def compute(x: Tensor) -> Rounded:
        halves = x.chunk(2, axis)
        both = [torch.maximum(*halves), torch.minimum(*halves)]
        return exactly(torch.cat(both if largest_first else both[::-1], axis))

    return Nonlinear(1.0, "max-min", why="a permutation of its input", compute=compute)


def _stacked_moves(b: Builder, parts: list[Variable], axis: int) -> Variable | None:
    """Parts that are entries of one and the same value as one move of its entries."""
    origins, moves = set(), []
    for part in parts:
        node = b.node(part)
        if isinstance(node.operation, Move):
            origins.add(node.inputs[0])
            moves.append(node.operation.index)
        else:
            origins.add(node.name)
            count = math.prod(part.shape)
            moves.append(torch.arange(1, count + 1).reshape(part.shape))
    if len(origins) != 1:
        return None
    origin = b.graph.nodes[origins.pop()]
    return b.linear(
        Variable(origin.name, origin.shape), Move(origin.shape, torch.cat(moves, axis), None, "concatenate")
    )


def extremum(b: Builder, first: Variable, second: Variable, name: str) -> Variable:
    """The larger, or the smaller, of two values: |max(a, b) - max(a', b')| <= max(|a - a'|, |b - b'|)."""
    shape = tuple(torch.broadcast_shapes(first.shape, second.shape))
    select = torch.maximum if name == "maximum" else torch.minimum
    return b.joint([b.spread(x, shape) for x in (first, second)], name, shape, lambda values: select(*values))


def _axis(axis: int, dim: int) -> int:
    if not -dim <= axis < max(dim, 1):
        raise BadModel(f"axis {axis} of a value with {dim} axes")
    return axis % dim if dim else 0
