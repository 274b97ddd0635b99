"""Images read at constant places between their pixels: interpolation as a matrix, the nearest pixel as a move.

A place is computed from a coordinate in [-1, 1] by a few roundings, which move it by a few units of its size. The
weights of interpolation are continuous in it, with slope 1 along each axis. The nearest pixel is known where no such
rounding in float32 decides, as in :mod:`~gramcert.operators.resizing`.
"""

import itertools
import math

import torch
from torch import Tensor

from gramcert.operators.contraction import contracted
from gramcert.operators.graph import BadModel, Builder, Variable
from gramcert.operators.rules import Unknown, exact
from gramcert.rounding import gamma, root_up, up

# Entries of the matrix of an interpolation, and coordinates that still say something about pixels.
MOST_MATRIX, FARTHEST = 2**22, 2.0**16


def grid_sampled(b: Builder, x: Variable, grid: Tensor, mode: str, padding: str, *, align_corners: bool) -> Variable:
    """Entries of x (batch, channels, *sizes) at places (batch, *outputs, axes), the last axis of x first."""
    axes = x.dim - 2
    coordinates = exact(grid, "grid")
    if axes < 1 or coordinates.dim() != x.dim or coordinates.shape[-1] != axes or len(coordinates) != x.shape[0]:
        raise BadModel(f"a grid of shape {tuple(grid.shape)} for an input of shape {x.shape}")
    if mode not in ("linear", "nearest") or padding not in ("zeros", "border", "reflection"):
        raise Unknown(f"interpolation of the kind {mode} with padding {padding}")
    if bool((coordinates.abs() > FARTHEST).any()):
        raise Unknown("coordinates that are far outside")
    sizes, outputs = x.shape[2:], tuple(coordinates.shape[1:-1])
    flat = b.moved(x, lambda places: places.flatten(2))
    lines = coordinates.flatten(1, -2)
    places = [
        _places(lines[..., axes - 1 - axis], size, padding, align_corners=align_corners)
        for axis, size in enumerate(sizes)
    ]
    if mode == "nearest":
        index = _nearest(lines, places, sizes)
        taken = b.moved(flat, lambda before: _taken(before, index), "grid sample")
    else:
        taken = _interpolated(b, flat, places, sizes, float(lines.abs().max()))
    return b.moved(taken, lambda before: before.reshape(*x.shape[:2], *outputs))


def _places(coordinates: Tensor, size: int, padding: str, *, align_corners: bool) -> Tensor:
    """Along one axis, in pixels."""
    place = (coordinates + 1) / 2 * (size - 1) if align_corners else ((coordinates + 1) * size - 1) / 2
    if padding == "reflection":
        first, last = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
        span = last - first
        if span == 0:
            return torch.zeros_like(place)
        turned = (place - first).abs() % (2 * span)
        place = first + torch.minimum(turned, 2 * span - turned)
    return place if padding == "zeros" else place.clamp(0, size - 1)


def _nearest(coordinates: Tensor, places: list[Tensor], sizes: tuple[int, ...]) -> Tensor:
    """1 + the place in the flattened image, 0 outside of it, for each batch and output."""
    index = torch.zeros_like(places[0], dtype=torch.int64)
    inside = torch.ones_like(index, dtype=torch.bool)
    for axis, (place, size) in enumerate(zip(places, sizes, strict=True)):
        sizes_of = coordinates[..., len(sizes) - 1 - axis].abs()
        reach = gamma(8, torch.float32) * ((1 + sizes_of) * size + 1)
        below, above = (place - reach).round(), (place + reach).round()
        if not torch.equal(below, above):
            raise Unknown("the nearest place depends on how a runtime computes it")
        chosen = below.long()
        inside &= (chosen >= 0) & (chosen < size)
        index = index * size + chosen.clamp(0, size - 1)
    return torch.where(inside, index + 1, 0)


def _taken(places: Tensor, index: Tensor) -> Tensor:
    padded = torch.cat([places.new_zeros(*places.shape[:2], 1), places], 2)
    return padded.gather(2, index[:, None].expand(-1, places.shape[1], -1))


def _interpolated(b: Builder, x: Variable, places: list[Tensor], sizes: tuple[int, ...], farthest: float) -> Variable:
    batch, outputs = places[0].shape
    pixels, axes = math.prod(sizes), len(sizes)
    if batch * outputs * pixels > MOST_MATRIX:
        raise Unknown(f"an interpolation of {pixels} pixels at {outputs} places is too large for a matrix")
    matrix = torch.zeros(batch, outputs, pixels, dtype=torch.float64)
    for corner in itertools.product((0, 1), repeat=axes):
        index, weight = torch.zeros(batch, outputs, dtype=torch.int64), torch.ones(batch, outputs, dtype=torch.float64)
        for place, size, step in zip(places, sizes, corner, strict=True):
            low = place.floor()
            ratio = place - low
            pixel = low.long() + step
            weight = weight * (ratio if step else 1 - ratio) * ((pixel >= 0) & (pixel < size))
            index = index * size + pixel.clamp(0, size - 1)
        matrix.scatter_add_(2, index[..., None], weight[..., None])
    # Each of up to 3 pixels along each axis, around a place that is off by 16 roundings of what it was before it was
    # reflected, may have a weight that is off by as much for each of its factors.
    entry = up(axes * up(gamma(32) * ((1 + farthest) * max(sizes) + 1)))
    distance = up(entry * root_up(batch * outputs * 3.0**axes))
    return contracted(b, x, ["n", "c", "s"], [(matrix, ["n", "p", "s"])], ["n", "c", "p"], distance)
