"""Linear maps that follow each other, put together where that is cheaper and tighter than the product of their norms.

Batch normalisation goes into the convolution beside it, padding into the convolution after it, matrices into matrices,
a convolution without padding or with one tap into its neighbour; and whatever is small as a matrix becomes one.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.geometry.convolution import Convolution
from gramcert.operators.linear import LinearMap, Move, Scale, composed_error
from gramcert.operators.matrices import AxisMatrix, Convolve
from gramcert.rounding import gamma, up

# Numbers in a kernel, taps on an axis and entries of a matrix up to which composing is cheaper than measuring twice.
MOST_WEIGHTS, MOST_TAPS, MOST_MATRIX = 2**20, 9, 2**20

# Entries of a dense matrix to be measured and its smaller side, and entries of the matrices it is made of.
SMALL_ENTRIES, SMALL_ORDER, SMALL_PART = 2**22, 1536, 2**24


@dataclass(frozen=True)
class Stage:
    """A linear map to be measured, and the nodes that it stands for."""

    map: LinearMap
    nodes: tuple[str, ...]


def composed(stages: list[Stage]) -> list[Stage]:
    """The same map as a shorter product."""
    stages = [stage for stage in stages if not is_identity(stage.map)]
    position = 0
    while position + 1 < len(stages):
        first, second = stages[position], stages[position + 1]
        merged = compose(first.map, second.map)
        if merged is None:
            position += 1
            continue
        stages[position : position + 2] = [Stage(merged, first.nodes + second.nodes)]
        position = max(0, position - 1)
    return _with_small_matrices(stages)


def is_identity(linear: LinearMap) -> bool:
    """Whether a map leaves every value as it is."""
    if isinstance(linear, Scale):
        return linear.error == 0 and bool((linear.factors == 1).all())
    return isinstance(linear, Move) and linear.is_view and linear.source == linear.target


def compose(first: LinearMap, second: LinearMap) -> LinearMap | None:
    """One map for two, if there is one of the known kinds that is not dearer and whose numbers do not overflow."""
    found = _composed(first, second)
    return found if found is not None and math.isfinite(up(found.size + found.error)) else None


def _composed(first: LinearMap, second: LinearMap) -> LinearMap | None:
    if isinstance(first, Move):
        return first.then(second) if isinstance(second, Move) else _padded(first, second)
    if isinstance(second, Move):
        return None
    if isinstance(first, Scale) and isinstance(second, Scale):
        return Scale(first.source, first.factors * second.factors, composed_error(first, second, 1))
    if isinstance(first, Scale) or isinstance(second, Scale):
        return _scaled(first, second)
    if isinstance(first, AxisMatrix) and isinstance(second, AxisMatrix) and first.axis == second.axis:
        rows, middle, columns = second.matrix.shape[0], *first.matrix.shape
        if rows * columns > max(MOST_MATRIX, rows * middle, middle * columns):
            return None
        error = composed_error(first, second, middle)
        return AxisMatrix(first.source, second.matrix @ first.matrix, first.axis, error)
    one, two = _as_convolution(first, second), _as_convolution(second, first)
    return _convolved(one, two) if one is not None and two is not None else None


def _padded(first: Move, second: LinearMap) -> LinearMap | None:
    """Padding, then a convolution."""
    if first.padding is None or not isinstance(second, Convolve) or second.layer.transposed:
        return None
    (mode, pairs), layer = first.padding, second.layer
    if len(pairs) > layer.axes:
        if any(map(any, pairs[: -layer.axes])):
            return None
        pairs = pairs[-layer.axes :]
    pairs = ((0, 0),) * (layer.axes - len(pairs)) + tuple(pairs)
    if mode == "zeros" and layer.padding_mode == "zeros":
        pairs = tuple((a + c, b + d) for (a, b), (c, d) in zip(pairs, layer.padding, strict=True))
    elif any(map(any, layer.padding)):
        return None
    geometry = Convolution(layer.kernel, layer.stride, pairs, mode, layer.dilation, layer.groups)
    return Convolve(first.source, geometry, second.distance)


def _scaled(first: LinearMap, second: LinearMap) -> LinearMap | None:
    """A matrix or a convolution with its rows or columns scaled."""
    scale, other, before = (first, second, True) if isinstance(first, Scale) else (second, first, False)
    assert isinstance(scale, Scale)
    error = composed_error(first, second, 1)
    if isinstance(other, AxisMatrix):
        factors = scale.along(other.axis)
        if factors is None:
            return None
        matrix = other.matrix * factors if before else factors[:, None] * other.matrix
        return AxisMatrix(other.source, matrix, other.axis, error, other.name)
    assert isinstance(other, Convolve)
    layer = other.layer
    factors = scale.along(len(scale.source) - layer.axes - 1)
    if factors is None:
        return None
    # The kernel's first axis holds the outputs, of a transposed layer the inputs; the second is per group.
    tail = (1,) * layer.axes
    if before == layer.transposed:
        kernel = layer.kernel * factors.reshape(-1, 1, *tail)
    else:
        kernels = layer.kernel.reshape(layer.groups, -1, *layer.kernel.shape[1:])
        kernel = (kernels * factors.reshape(layer.groups, 1, -1, *tail)).reshape(layer.kernel.shape)
    return Convolve(other.source, layer.with_kernel(kernel), error)


def _as_convolution(linear: LinearMap, beside: LinearMap) -> Convolve | None:
    """A convolution, or a matrix along the channels of the convolution beside it."""
    if isinstance(linear, Convolve):
        return linear
    if not isinstance(linear, AxisMatrix) or not isinstance(beside, Convolve):
        return None
    axes = beside.layer.axes
    if linear.axis != len(linear.source) - axes - 1:
        return None
    kernel = linear.matrix.reshape(*linear.matrix.shape, *(1,) * axes)
    return Convolve(linear.source, Convolution(kernel), linear.distance)


def _convolved(first: Convolve, second: Convolve) -> Convolve | None:
    """Two convolutions as one, where nothing is padded between them."""
    if _weights(first, second) > MOST_WEIGHTS:
        return None
    if second.is_pointwise and not second.layer.transposed:
        rows = second.full_kernel().flatten(1)
        kernel = first.full_kernel()
        if first.layer.transposed:
            kernel = torch.einsum("po,io...->ip...", rows, kernel)
        else:
            kernel = torch.einsum("po,oi...->pi...", rows, kernel)
        return _like(first, second, first.layer, kernel, rows.shape[1])
    if first.is_pointwise and not first.layer.transposed:
        columns = first.full_kernel().flatten(1)
        kernel = second.full_kernel()
        if second.layer.transposed:
            kernel = torch.einsum("mi,mo...->io...", columns, kernel)
        else:
            kernel = torch.einsum("om...,mi->oi...", kernel, columns)
        return _like(first, second, second.layer, kernel, columns.shape[0])
    if first.layer.transposed or second.layer.transposed or any(map(any, second.layer.padding)):
        return None
    inner, outer = _undilated(first), _undilated(second)
    steps = first.layer.stride
    taps = [k + s * (m - 1) for k, s, m in zip(inner.shape[2:], steps, outer.shape[2:], strict=True)]
    if max(taps) > MOST_TAPS:
        return None
    # y[o] = Σ_b K2[b] Σ_a K1[a] x[s1(s2·o + b) + a]: tap a + s1·b with stride s1·s2.
    kernel = inner.new_zeros(outer.shape[0], inner.shape[1], *taps)
    for place in torch.cartesian_prod(*(torch.arange(m) for m in outer.shape[2:])).reshape(-1, len(taps)).tolist():
        at = tuple(slice(s * b, s * b + k) for s, b, k in zip(steps, place, inner.shape[2:], strict=True))
        kernel[(slice(None), slice(None), *at)] += torch.einsum("om,mi...->oi...", outer[(..., *place)], inner)
    stride = tuple(s * t for s, t in zip(steps, second.layer.stride, strict=True))
    layer = Convolution(kernel, stride, first.layer.padding, first.layer.padding_mode)
    terms = outer[0].numel()
    return Convolve(first.source, layer, composed_error(first, second, terms))


def _like(first: Convolve, second: Convolve, layer: Convolution, kernel: Tensor, terms: int) -> Convolve:
    """The geometry of one of them, without groups, with a kernel of sums of so many products."""
    whole = Convolution(
        kernel,
        layer.stride,
        layer.padding,
        layer.padding_mode,
        layer.dilation,
        1,
        layer.transposed,
        layer.output_padding,
    )
    return Convolve(first.source, whole, composed_error(first, second, terms))


def _weights(first: Convolve, second: Convolve) -> int:
    """Numbers in a kernel between the channels at both ends, with the taps of both."""
    taps = math.prod(first.layer.kernel_size) * math.prod(second.layer.kernel_size)
    ends = first.layer.in_channels * second.layer.out_channels
    middle = first.layer.out_channels
    return max(ends * taps, middle * first.layer.in_channels * math.prod(first.layer.kernel_size))


def _undilated(linear: Convolve) -> Tensor:
    """The kernel with the places between its taps filled with zeros."""
    kernel = linear.full_kernel()
    spans = [d * (k - 1) + 1 for d, k in zip(linear.layer.dilation, linear.layer.kernel_size, strict=True)]
    spread = kernel.new_zeros(*kernel.shape[:2], *spans)
    taps = tuple(slice(None, None, d) for d in linear.layer.dilation)
    spread[(slice(None), slice(None), *taps)] = kernel
    return spread


def _with_small_matrices(stages: list[Stage]) -> list[Stage]:
    """The longest runs of maps that are small as one matrix are measured as one."""
    for length in range(len(stages), 1, -1):
        for start in range(len(stages) - length + 1):
            run = stages[start : start + length]
            if sum(not stage.map.is_isometry for stage in run) > 1 and _is_small([stage.map for stage in run]):
                merged = Stage(_matrix([stage.map for stage in run]), sum((stage.nodes for stage in run), ()))
                return [*_with_small_matrices(stages[:start]), merged, *_with_small_matrices(stages[start + length :])]
    return stages


def _is_small(maps: list[LinearMap]) -> bool:
    if not math.isfinite(math.prod(part.size for part in maps)):
        return False
    inputs, outputs = math.prod(maps[0].source), math.prod(maps[-1].target)
    parts = max(math.prod(part.source) * math.prod(part.target) for part in maps)
    return min(inputs, outputs) <= SMALL_ORDER and inputs * outputs <= SMALL_ENTRIES and parts <= SMALL_PART


def _matrix(maps: list[LinearMap]) -> AxisMatrix:
    """The product as a dense matrix, multiplied from its shorter end."""
    from_end = math.prod(maps[-1].target) <= math.prod(maps[0].source)
    ordered = maps[::-1] if from_end else maps
    size, error = ordered[0].size, up(ordered[0].error + ordered[0].dense_error)
    matrix = ordered[0].dense()
    for part in ordered[1:]:
        matrix = matrix @ part.dense() if from_end else part.dense() @ matrix
        terms = max(math.prod(part.source), math.prod(part.target))
        stored = _Product(up(part.size + part.dense_error), up(part.error + part.dense_error))
        error = composed_error(_Product(size, error), stored, terms)
        size = up(up(size * stored.size) * up(1 + gamma(terms)))  # also of the product as it was computed
    return AxisMatrix((math.prod(maps[0].source),), matrix, 0, error)


@dataclass(frozen=True)
class _Product:
    """What :func:`composed_error` asks of a product: bounds that hold for its factors' absolute values."""

    size: float
    error: float
