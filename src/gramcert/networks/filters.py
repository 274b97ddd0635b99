r"""Linear maps that commute with the shifts of a lattice, and their symbols on a coarser one.

A filter is y[n] = Σ_a K_a·x[s·n + a + f], or the adjoint of such a map, on all places of Z^D. Without axes it is a
matrix. Values on different strides meet on one coarse lattice. A value with t places for each of the coarse one becomes
t^D values there, its phases: place n = t·N + p is phase p of place N. So

    s·n + a + f = t_x·(N + ⌊(s·p + a + f)/t_x⌋) + (s·p + a + f) mod t_x,   t_x = s·t_y:

tap a of phase p reads phase (s·p + a + f) mod t_x at lag ⌊(s·p + a + f)/t_x⌋.
"""

import functools
import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gramcert.certified.frequencies import Frequencies
from gramcert.certified.gram_symbol import crude_norm
from gramcert.certified.tapwise import at_tap
from gramcert.geometry.axis import Axis
from gramcert.operators.linear import LinearMap, Move, Scale, Shape, composed_error
from gramcert.operators.matrices import AxisMatrix, Convolve
from gramcert.rounding import norm_up

# Entries of all taps of one filter on the coarse lattice.
MOST_TAPS = 4 * 10**7


@dataclass(frozen=True, eq=False)
class Filter:
    """One map, stored in float64.

    Attributes:
        kernel: (outputs, inputs, *taps); of an adjoint that of the map whose adjoint it is.
        stride: for each axis.
        first: the place that tap 0 reads for output 0.
        error: distance from the true map, in operator norm.
        adjoint: whether the map is the adjoint of this one.
    """

    kernel: Tensor
    stride: Shape
    first: Shape
    error: float = 0.0
    adjoint: bool = False

    @property
    def taps(self) -> Shape:
        """Length on each axis."""
        return tuple(self.kernel.shape[2:])

    @property
    def size(self) -> float:
        """Bound of the norm of the map with the absolute values of its numbers."""
        return crude_norm(self.kernel)

    @property
    def is_pointwise(self) -> bool:
        """Whether it is a matrix at every place."""
        return set(self.taps) | set(self.stride) <= {1} and not any(self.first)

    def support(self, sizes: Shape) -> list[tuple[int, int]]:
        """The first and the last place of each axis where something may come out, from inputs of such a size."""
        found = []
        for n, k, s, f in zip(sizes, self.taps, self.stride, self.first, strict=True):
            if self.adjoint:
                found.append((f, s * (n - 1) + k - 1 + f))
            else:
                found.append((-((k - 1 + f) // s), (n - 1 - f) // s))
        return found

    def reach(self, sizes: Shape, outputs: Shape) -> list[tuple[int, int]]:
        """The first and last place of the larger side that the other side is coupled to."""
        smaller = sizes if self.adjoint else outputs
        axes = zip(smaller, self.taps, self.stride, self.first, strict=True)
        return [(f, s * (n - 1) + k - 1 + f) for n, k, s, f in axes]

    def after(self, first: "Filter") -> "Filter | None":
        """This one behind another, where one of them has a single tap and what results is of this kind."""
        if self.adjoint or first.adjoint:
            return self._after_adjoint(first)
        if set(self.taps) != {1} and set(first.taps) != {1}:
            return None
        # y[n] = Σ_b K'_b Σ_a K_a x[s(s'n + b + f') + a + f]: tap a + s·b, stride s·s', first place s·f' + f.
        axes = list(zip(first.stride, self.stride, first.first, self.first, strict=True))
        taps = [k + s * (m - 1) for k, s, m in zip(first.taps, first.stride, self.taps, strict=True)]
        kernel = self.kernel.new_zeros(self.kernel.shape[0], first.kernel.shape[1], *taps)
        for place in itertools.product(*map(range, self.taps)):
            at = tuple(slice(s * b, s * b + k) for s, b, k in zip(first.stride, place, first.taps, strict=True))
            product = torch.einsum("om,mi...->oi...", at_tap(self.kernel, place), first.kernel)
            kernel[(slice(None), slice(None), *at)] += product
        stride, start = tuple(s * t for s, t, _, _ in axes), tuple(s * g + f for s, _, f, g in axes)
        return Filter(kernel, stride, start, _composed_error(first, self, self.kernel[0].numel()))

    def _after_adjoint(self, first: "Filter") -> "Filter | None":
        """With a matrix at every place on the other side: B after A* is (AB*)*, and A* after B is (B*A)*."""
        if self.is_pointwise and not self.adjoint:
            matrix = self.kernel.flatten(1)
            kernel = torch.einsum("nm...,om->no...", first.kernel, matrix)
            return replace(first, kernel=kernel, error=_composed_error(first, self, matrix.shape[1]))
        if first.is_pointwise and not first.adjoint:
            matrix = first.kernel.flatten(1)
            kernel = torch.einsum("mo...,mi->io...", self.kernel, matrix)
            return replace(self, kernel=kernel, error=_composed_error(first, self, matrix.shape[0]))
        return None

    def signed(self, sign: int) -> "Filter":
        """Times ±1."""
        return self if sign == 1 else Filter(-self.kernel, self.stride, self.first, self.error, self.adjoint)

    def lags(self, scale: Shape) -> list[tuple[int, int]]:
        """The least and the largest lag of each axis on that lattice."""
        axes = zip(self.taps, self.stride, self.first, scale, strict=True)
        found = [(f // (s * t), (s * (t - 1) + k - 1 + f) // (s * t)) for k, s, f, t in axes]
        return [(-most, -least) for least, most in found] if self.adjoint else found

    def on_phases(self, scale: Shape) -> "Taps":
        """On the lattice on which its coarser side has so many phases per axis."""
        axes = len(scale)
        fine = tuple(s * t for s, t in zip(self.stride, scale, strict=True))
        entries: dict[Shape, list[tuple[int, int, Shape]]] = {}
        phases = list(itertools.product(*map(range, scale)))
        for row, phase in enumerate(phases):
            for tap in itertools.product(*map(range, self.taps)):
                places = [s * p + a + f for s, p, a, f in zip(self.stride, phase, tap, self.first, strict=True)]
                lag = tuple(place // t for place, t in zip(places, fine, strict=True))
                column = 0
                for place, t in zip(places, fine, strict=True):
                    column = column * t + place % t
                entries.setdefault(lag, []).append((row, column, tap))
        ranges = [range(min(lag[j] for lag in entries), max(lag[j] for lag in entries) + 1) for j in range(axes)]
        outputs, inputs = self.kernel.shape[:2]
        shape = (outputs, len(phases), inputs, math.prod(fine))
        if math.prod(map(len, ranges)) * math.prod(shape) > MOST_TAPS:
            raise TooManyTapsError
        matrices = self.kernel.new_zeros(*map(len, ranges), *shape)
        for lag, reads in entries.items():
            target = matrices[tuple(place - r.start for place, r in zip(lag, ranges, strict=True))]
            for row, column, tap in reads:
                target[:, row, :, column] += at_tap(self.kernel, tap)
        flat = matrices.reshape(-1, outputs * len(phases), inputs * math.prod(fine))
        if self.adjoint:
            flat = flat.flip(0).mT.contiguous()
            ranges = [range(1 - r.stop, 1 - r.start) for r in ranges]
        return Taps(flat, tuple(ranges), self.error)


def _composed_error(first: Filter, second: Filter, terms: int) -> float:
    """That of a product, but nothing where one of them is zero."""
    is_zero = any(not part.error and not bool(part.kernel.any()) for part in (first, second))
    return 0.0 if is_zero else composed_error(first, second, terms)


class NotDescribedError(Exception):
    """Forms do not reach this network, for the reason in the message."""


class TooManyTapsError(NotDescribedError):
    """Of a filter whose symbol would have more numbers than there is room for; at least as many as the filter has."""

    def __init__(self) -> None:
        super().__init__("a filter has too many taps and phases")


@dataclass(frozen=True, eq=False)
class Taps:
    """E(ω) = Σ_l K_l e^(i l·ω) on a lattice.

    Attributes:
        matrices: K_l for all combinations of lags in lexicographic order.
        ranges: of the lags on each axis.
        error: distance from the true map, in operator norm.
    """

    matrices: Tensor
    ranges: tuple[range, ...]
    error: float

    @functools.cached_property
    def is_diagonal(self) -> bool:
        """Whether all K_l are."""
        _, rows, columns = self.matrices.shape
        return rows == columns and int(self.matrices.count_nonzero()) == int(self._diagonals.count_nonzero())

    @property
    def _diagonals(self) -> Tensor:
        return self.matrices.diagonal(dim1=-2, dim2=-1)

    def at(self, frequencies: Frequencies) -> Tensor:
        """The symbol at each frequency, as a block; real without axes."""
        kept = self._diagonals if self.is_diagonal else self.matrices
        if not self.ranges:
            return kept
        flat = kept.reshape(len(kept), -1)
        cosines, sines = frequencies.waves([torch.arange(r.start, r.stop) for r in self.ranges])
        return torch.complex(cosines @ flat, sines @ flat).reshape(-1, *kept.shape[1:])

    def amounts(self) -> Tensor:
        """Σ_l |K_l|, above the absolute values of every symbol."""
        return self.matrices.abs().sum(0)


def channel_axis(shape: Shape, axes: int) -> int:
    """Of a value ([1, ...,] channels, *sizes)."""
    return len(shape) - axes - 1


def is_image(shape: Shape, axes: int) -> bool:
    """Whether a value is one tensor of channels on so many axes."""
    at = channel_axis(shape, axes)
    return at >= 0 and math.prod(shape[:at]) == 1 and 0 not in shape


def filter_of(linear: LinearMap, axes: int) -> Filter | None:
    """A linear map of images as a filter, its outputs those inside of a window; ``None`` if it is none.

    Padding other than by zeros is one only where it closes a circle; see :func:`is_circle`.
    """
    if not (is_image(linear.source, axes) and is_image(linear.target, axes)):
        return None
    channel = channel_axis(linear.source, axes)
    ones = (1,) * axes
    if isinstance(linear, Convolve):
        return _of_convolution(linear) if linear.layer.axes == axes else None
    if isinstance(linear, Scale):
        factors = linear.along(channel)
        return None if factors is None else Filter(_spread(torch.diag(factors), axes), ones, (0,) * axes, linear.error)
    if isinstance(linear, AxisMatrix):
        if linear.axis == channel:
            return Filter(_spread(linear.matrix, axes), ones, (0,) * axes, linear.error)
        return _of_windows(linear, channel, axes) if linear.axis > channel else None
    if isinstance(linear, Move):
        return _of_move(linear, channel, axes)
    return None


def is_circle(linear: LinearMap) -> bool:
    """Whether a convolution pads so that every axis closes a circle."""
    return isinstance(linear, Convolve) and linear.layer.padding_mode == "circular" and _padded(linear)


def _padded(linear: Convolve) -> bool:
    return any(axis.before or axis.used > axis.size for axis in linear.axes)


def _of_convolution(linear: Convolve) -> Filter | None:
    axes, layer = linear.axes, linear.layer
    if layer.padding_mode != "zeros" and _padded(linear):
        closes = layer.padding_mode == "circular" and all(axis.is_whole_circulant for axis in axes)
        if not closes or layer.transposed:
            return None
    return convolution_filter(linear, tuple(-axis.before for axis in axes))


def convolution_filter(linear: Convolve, first: Shape) -> Filter:
    """The taps of a convolution, dilation filled with zeros, from a given first place on."""
    kernel, axes = linear.full_kernel(), linear.axes
    spans = [axis.dilation * (axis.taps - 1) + 1 for axis in axes]
    spread = kernel.new_zeros(*kernel.shape[:2], *spans)
    spread[(slice(None), slice(None), *(slice(None, None, axis.dilation) for axis in axes))] = kernel
    stride = tuple(axis.stride for axis in axes)
    return Filter(spread, stride, first, linear.error, linear.layer.transposed)


def padding_square(axes: tuple[Axis, ...]) -> int:
    """The square of the norm of a padding map."""
    return math.prod(axis.repetition for axis in axes)


def _of_windows(linear: AxisMatrix, channel: int, axes: int) -> Filter | None:
    """A matrix along a spatial axis whose rows are one row, moved on by a stride."""
    matrix = linear.matrix
    outputs, inputs = matrix.shape
    if outputs < 2:
        return None
    used = [row.nonzero().flatten() for row in matrix]
    if not all(len(places) for places in used):
        return None
    # The longest row is the whole window; others may be cut off at the ends.
    whole = max(range(outputs), key=lambda row: len(used[row]))
    first, last = int(used[whole][0]), int(used[whole][-1])
    taps = matrix[whole, first : last + 1]
    strides = {int(b[-1]) - int(a[-1]) for a, b in itertools.pairwise(used) if int(b[-1]) < inputs - 1}
    strides |= {int(b[0]) - int(a[0]) for a, b in itertools.pairwise(used) if int(a[0]) > 0}
    if len(strides) != 1 or (stride := strides.pop()) < 1:
        return None
    start = first - stride * whole
    rows = torch.arange(outputs)[:, None] * stride + start + torch.arange(len(taps))
    inside = (rows >= 0) & (rows < inputs)
    again = torch.zeros(outputs, inputs + 1, dtype=torch.float64)
    again.scatter_add_(1, torch.where(inside, rows, inputs), torch.where(inside, taps, 0.0))
    if not torch.equal(again[:, :inputs], matrix):
        return None
    axis = linear.axis - channel - 1
    shape = [1] * axes
    shape[axis] = len(taps)
    channels = linear.source[channel]
    kernel = torch.eye(channels, dtype=torch.float64).reshape(channels, channels, *(1,) * axes) * taps.reshape(shape)
    at = [1 if j != axis else stride for j in range(axes)]
    return Filter(kernel, tuple(at), tuple(start if j == axis else 0 for j in range(axes)), linear.error)


def _of_move(linear: Move, channel: int, axes: int) -> Filter | None:
    """Channels chosen, filled with zeros, and the same part of every axis: slices, subsampling, padding by zeros."""
    if len(linear.source) != len(linear.target):
        return None
    source, target = linear.source[channel:], linear.target[channel:]
    index = linear.index.reshape(target)
    places = index.flatten() - 1
    held = places >= 0
    if not bool(held.any()):
        return None
    coordinates = torch.stack(torch.unravel_index(places.clamp_min(0), source)).reshape(axes + 1, *target)
    held = held.reshape(target)
    outputs, inputs = target[0], source[0]
    choice = torch.zeros(outputs, inputs, dtype=torch.float64)
    for row in range(outputs):
        found = coordinates[0, row][held[row]]
        if len(found):
            choice[row, int(found[0])] = 1
    stride, first = [], []
    for axis in range(axes):
        line = coordinates[axis + 1].movedim(axis + 1, 0).flatten(1)
        known = held.movedim(axis + 1, 0).flatten(1)
        seen = [(n, int(line[n][known[n]][0])) for n in range(len(line)) if bool(known[n].any())]
        step = (seen[1][1] - seen[0][1]) // (seen[1][0] - seen[0][0]) if len(seen) > 1 else 1
        if step < 1:
            return None
        stride.append(step)
        first.append(seen[0][1] - step * seen[0][0])
    # The index that this filter would have.
    expected = torch.zeros(target, dtype=torch.int64)
    chosen = choice.argmax(1)
    flat, valid = chosen.reshape(-1, *(1,) * axes).expand(target).clone(), (choice.sum(1) > 0).reshape(-1, *(1,) * axes)
    valid = valid.expand(target).clone()
    for axis in range(axes):
        line = torch.arange(target[axis + 1]) * stride[axis] + first[axis]
        shape = [1] * (axes + 1)
        shape[axis + 1] = len(line)
        valid &= ((line >= 0) & (line < source[axis + 1])).reshape(shape)
        flat = flat * source[axis + 1] + line.reshape(shape)
    expected[valid] = flat[valid] + 1
    return Filter(_spread(choice, axes), tuple(stride), tuple(first)) if torch.equal(expected, index) else None


def row_length(linear: LinearMap, axes: int) -> float | None:
    """‖w‖ of a map that sums an axis of an image with weights w into one place; ``None`` if it does something else."""
    if not isinstance(linear, AxisMatrix) or not is_image(linear.source, axes) or linear.matrix.shape[0] != 1:
        return None
    if linear.axis <= channel_axis(linear.source, axes):
        return None
    return norm_up(linear.matrix)


def _spread(matrix: Tensor, axes: int) -> Tensor:
    return matrix.reshape(*matrix.shape, *(1,) * axes)
