"""Entries read and written by constant indices: moves, and sums of entries that meet in one place."""

import math

import torch
from torch import Tensor

from gramcert.operators.graph import MOST_ENTRIES, Builder, Variable
from gramcert.operators.joining import concatenated
from gramcert.operators.linear import Shape
from gramcert.operators.matrices import AxisMatrix
from gramcert.operators.rules import Unknown, exact
from gramcert.operators.windows import windows_of
from gramcert.rounding import gamma, norm_up, up

Value = Variable | Tensor


def positions(shape: Shape) -> Tensor:
    """The place of each entry in the flattened tensor."""
    count = math.prod(shape)
    if count > MOST_ENTRIES:
        raise Unknown(f"too large to be followed: {count} entries")
    return torch.arange(count).reshape(shape)


def summed_into(b: Builder, x: Variable, targets: Tensor, shape: Shape, name: str = "scatter") -> Variable:
    r"""Each entry of x added to the target that is given for it, or to none (-1): the adjoint of a move.

    The entries that meet are moved side by side, padded with zeros, and summed. The move has norm 1 and the sum √m, m
    being how many entries meet at most, which is the norm of both together.
    """
    flat = targets.flatten()
    used = (flat >= 0).nonzero().flatten()
    flat = flat[used]
    count = math.prod(shape)
    if not len(flat):
        return b.moved(x, lambda _: torch.zeros(shape, dtype=torch.int64), name)
    counts = torch.bincount(flat, minlength=count)
    most = int(counts.max())
    if count * most > MOST_ENTRIES:
        raise Unknown(f"too large to be followed: {count * most} entries")
    order = flat.argsort(stable=True)
    first = counts.cumsum(0) - counts
    rank = torch.arange(len(flat)) - first[flat[order]]
    index = torch.zeros(count, most, dtype=torch.int64)
    index[flat[order], rank] = used[order] + 1
    if most == 1:
        return b.moved(x, lambda _: index.reshape(shape), name)
    y = b.moved(x, lambda _: index, name)
    y = b.linear(y, AxisMatrix(y.shape, torch.ones(1, most, dtype=torch.float64), 1, name="sum"))
    return b.moved(y, lambda places: places.reshape(shape))


def merged(b: Builder, first: Value, taken: Tensor, second: Value, mask: Tensor) -> Variable:
    """Where the mask is true the taken places of the flattened first value, elsewhere the entries of the second."""
    others = (~mask).flatten().nonzero().flatten()
    parts = [_taken(b, first, taken), _taken(b, second, others)]
    order = torch.cat([mask.flatten().nonzero().flatten(), others]).argsort()
    together = concatenated(b, parts, 0)
    return b.moved(together, lambda places: places[order].reshape(mask.shape))


def _taken(b: Builder, value: Value, taken: Tensor) -> Value:
    if isinstance(value, Tensor):
        return exact(value, "constant").flatten()[taken]
    return b.moved(value, lambda places: places.flatten()[taken], "slice")


def written(b: Builder, base: Value, targets: Tensor, values: Value, *, add: bool) -> Variable:
    """Values written to, or added at, places of the flattened base; at least one of both depends on the input."""
    shape = tuple(base.shape)
    if tuple(values.shape) != tuple(targets.shape):
        raise Unknown(f"values of shape {tuple(values.shape)} for {tuple(targets.shape)} places")
    if not add:
        sources = torch.full((math.prod(shape),), -1)
        sources[targets.flatten()] = torch.arange(targets.numel())
        mask = sources >= 0
        if int(mask.sum()) != targets.numel():
            raise Unknown("indices that occur twice")
        return merged(b, values, sources[mask], base, mask.reshape(shape))
    if isinstance(values, Tensor):
        assert isinstance(base, Variable)
        flat, zeros = exact(values, "constant").flatten(), torch.zeros(math.prod(shape), dtype=torch.float64)
        constant, sizes = (zeros.index_add(0, targets.flatten(), part).reshape(shape) for part in (flat, flat.abs()))
        return b.shifted(base, constant, up(gamma(targets.numel()) * norm_up(sizes)))
    total = summed_into(b, values, targets, shape)
    if isinstance(base, Variable):
        return b.sum([(base, 1), (total, 1)])
    constant = exact(base, "constant")
    return b.shifted(total, constant) if bool(constant.any()) else total


def folded(
    b: Builder,
    x: Variable,
    image: list[int],
    taps: list[int],
    strides: list[int],
    padding: list[tuple[int, int]],
    dilations: list[int],
) -> Variable:
    """Windows (batch, channels·taps, windows) added where they were taken from an image: the adjoint of unfolding."""
    axes, targets = len(image), torch.zeros((), dtype=torch.int64)
    inside, counts = torch.ones((), dtype=torch.bool), []
    for axis, (size, k, s, (before, after), d) in enumerate(zip(image, taps, strides, padding, dilations, strict=True)):
        count, places = windows_of(size, k, s, before, after, d)
        counts.append(count)
        view = [1] * (2 * axes)  # taps, then windows
        view[axis], view[axes + axis] = k, count
        places = places.T.reshape(view)
        targets = targets * size + places
        inside = inside & (places >= 0) & (places < size)
    kernel, windows, pixels = math.prod(taps), math.prod(counts), math.prod(image)
    batch, columns = (1, x.shape) if x.dim == 2 else (x.shape[0], x.shape[1:])
    if x.dim not in (2, 3) or columns[1] != windows or columns[0] % kernel:
        raise Unknown(f"windows of shape {x.shape}, expected {windows} of {kernel} places")
    channels = columns[0] // kernel
    if batch * channels * kernel * windows > MOST_ENTRIES:
        raise Unknown(f"too large to be followed: {batch * channels * kernel * windows} entries")
    targets = torch.where(inside, targets, -1).reshape(1, kernel, windows)
    images = torch.arange(batch * channels).reshape(-1, 1, 1) * pixels
    targets = torch.where(targets >= 0, targets + images, -1)
    shape = (channels, *image) if x.dim == 2 else (batch, channels, *image)
    return summed_into(b, x, targets.reshape(x.shape), shape, "fold")
