"""ONNX operators whose entries only move: constants are moved by these, and so are the places of other values."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gramcert.auditing.onnx_call import Call, axis_of, bounded, register
from gramcert.operators.rules import Unknown

Results = Tensor | list[Tensor]
Move = Callable[[Tensor, Call], Results]

MOVES: dict[str, Move] = {}


def move(*names: str) -> Callable[[Move], Move]:
    """Register what some operators do to the places of a tensor."""
    return register(MOVES, names)


@move("Identity")
def _identity(x: Tensor, c: Call) -> Tensor:
    return x


@move("Reshape")
def _reshape(x: Tensor, c: Call) -> Tensor:
    sizes = c.integers("shape", 1) or []
    if not c.integer("allowzero", 0):
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


@move("Flatten")
def _flatten(x: Tensor, c: Call) -> Tensor:
    axis = c.integer("axis", 1)
    axis = axis if axis == x.dim() else axis_of(axis, x.dim())
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@move("Transpose")
def _transpose(x: Tensor, c: Call) -> Tensor:
    order = c.integers("perm")
    return x.permute(list(range(x.dim()))[::-1] if order is None else order)


@move("Squeeze")
def _squeeze(x: Tensor, c: Call) -> Tensor:
    axes = c.axes(x.dim())
    if axes is None:
        return x.squeeze()
    if any(x.shape[axis] != 1 for axis in axes):
        raise Unknown("an axis with more than one place")
    return x.reshape([size for axis, size in enumerate(x.shape) if axis not in axes])


@move("Unsqueeze")
def _unsqueeze(x: Tensor, c: Call) -> Tensor:
    given = c.integers("axes", 1) or []
    axes = {axis_of(axis, x.dim() + len(given)) for axis in given}
    sizes = iter(x.shape)
    return x.reshape([1 if axis in axes else next(sizes) for axis in range(x.dim() + len(axes))])


@move("Expand")
def _expand(x: Tensor, c: Call) -> Tensor:
    shape = torch.broadcast_shapes(x.shape, c.integers("shape", 1) or [])
    return x.expand(bounded(shape)).contiguous()


@move("Tile")
def _tile(x: Tensor, c: Call) -> Tensor:
    repeats = c.integers("repeats", 1) or []
    if len(repeats) != x.dim():
        raise Unknown(f"{len(repeats)} repeats of {x.dim()} axes")
    bounded([size * count for size, count in zip(x.shape, repeats, strict=True)])
    return x.repeat(repeats)


@move("Slice")
def _slice(x: Tensor, c: Call) -> Tensor:
    starts, ends = c.integers("starts", 1), c.integers("ends", 2)
    if starts is None or ends is None:
        raise Unknown("without starts or ends")
    axes = c.axes(x.dim(), 3)
    axes = list(range(len(starts))) if axes is None else axes
    for start, end, axis, step in zip(starts, ends, axes, c.integers("steps", 4) or [1] * len(starts), strict=True):
        taken = range(*slice(start, end, step).indices(x.shape[axis]))
        places = torch.arange(taken.start, taken.stop, taken.step) if taken else torch.arange(0)
        x = x.index_select(axis, places)
    return x


@move("Split")
def _split(x: Tensor, c: Call) -> list[Tensor]:
    axis, count = axis_of(c.integer("axis", 0), x.dim()), len(c.node.outputs)
    size = x.shape[axis]
    sizes = c.integers("split", 1)
    if sizes is None:
        each = -(-size // count)
        sizes = [max(0, min(each, size - part * each)) for part in range(count)]
    if len(sizes) != count:
        raise Unknown(f"{len(sizes)} sizes of {count} parts")
    return list(x.split(sizes, axis))


def _indices(c: Call, size: int) -> Tensor:
    indices = c.constant(1, "indices").long()
    if indices.numel() and not (int(indices.min()) >= -size and int(indices.max()) < size):
        raise Unknown(f"indices outside of {size} places")
    return torch.where(indices < 0, indices + size, indices)


@move("Gather")
def _gather(x: Tensor, c: Call) -> Tensor:
    axis = axis_of(c.integer("axis", 0), x.dim())
    indices = _indices(c, x.shape[axis])
    shape = bounded([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])
    return x.index_select(axis, indices.flatten()).reshape(shape)


@move("GatherElements")
def _gather_elements(x: Tensor, c: Call) -> Tensor:
    axis = axis_of(c.integer("axis", 0), x.dim())
    return x.gather(axis, _indices(c, x.shape[axis]))


@move("GatherND")
def _gather_nd(x: Tensor, c: Call) -> Tensor:
    indices = c.constant(1, "indices").long()
    if c.integer("batch_dims", 0) or not 1 <= indices.shape[-1] <= x.dim():
        raise Unknown("indices with axes of a batch")
    bounded([*indices.shape[:-1], *x.shape[indices.shape[-1] :]])
    return x[tuple(indices.unbind(-1))]


@move("DepthToSpace")
def _depth_to_space(x: Tensor, c: Call) -> Tensor:
    (n, channels, height, width), side = x.shape, c.integer("blocksize")
    if c.text("mode", "DCR") == "CRD":
        x = x.reshape(n, channels // side**2, side, side, height, width).permute(0, 1, 4, 2, 5, 3)
    else:
        x = x.reshape(n, side, side, channels // side**2, height, width).permute(0, 3, 4, 1, 5, 2)
    return x.reshape(n, channels // side**2, height * side, width * side)


@move("SpaceToDepth")
def _space_to_depth(x: Tensor, c: Call) -> Tensor:
    (n, channels, height, width), side = x.shape, c.integer("blocksize")
    x = x.reshape(n, channels, height // side, side, width // side, side).permute(0, 3, 5, 1, 2, 4)
    return x.reshape(n, channels * side**2, height // side, width // side)


@move("Trilu")
def _trilu(x: Tensor, c: Call) -> Tensor:
    diagonal = c.optional(1, "diagonal")
    offset = 0 if diagonal is None else max(-(2**31), min(2**31, int(diagonal)))
    return x.triu(offset) if c.integer("upper", 1) else x.tril(offset)


@move("CenterCropPad")
def _center(x: Tensor, c: Call) -> Tensor:
    """Cropped or padded with zeros on both sides, the side that comes last by one more where they cannot be equal."""
    sizes, axes = c.integers("shape", 1) or [], c.axes(x.dim(), None)
    axes = list(range(x.dim())) if axes is None else axes
    if len(sizes) != len(axes) or len(set(axes)) != len(axes) or min(sizes, default=0) < 0:
        raise Unknown(f"sizes {sizes} of the axes {axes}")
    wanted = dict(zip(axes, sizes, strict=True))
    bounded([wanted.get(axis, size) for axis, size in enumerate(x.shape)])
    for axis, size in wanted.items():
        have = x.shape[axis]
        if size <= have:
            x = x.narrow(axis, (have - size) // 2, size)
        else:
            result = x.new_zeros([size if other == axis else n for other, n in enumerate(x.shape)])
            result.narrow(axis, (size - have) // 2, have).copy_(x)
            x = result
    return x
