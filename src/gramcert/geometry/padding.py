"""Padding as an index map: where each place of the padded axis takes its value from."""

from typing import Literal

import torch
from torch import Tensor

Pairs = tuple[tuple[int, int], ...]
PaddingMode = Literal["zeros", "circular", "reflect", "replicate"]


def source_indices(size: int, before: int, after: int, mode: PaddingMode) -> Tensor:
    """For each place of the padded axis the place of the input it repeats, for every mode but zeros."""
    places = torch.arange(-before, size + after)
    if mode == "circular":
        return places % size
    if mode == "replicate":
        return places.clamp(0, size - 1)
    return size - 1 - (size - 1 - places.abs()).abs()


def pad(x: Tensor, padding: Pairs, mode: PaddingMode) -> Tensor:
    """Pad the trailing axes of x. Circular padding wraps as often as needed."""
    if mode == "zeros":
        return pad_with_zeros(x, padding)
    for axis, (before, after) in enumerate(padding, x.dim() - len(padding)):
        if before or after:
            x = x.index_select(axis, source_indices(x.shape[axis], before, after, mode).to(x.device))
    return x


def pad_adjoint(y: Tensor, input_size: tuple[int, ...], padding: Pairs, mode: PaddingMode) -> Tensor:
    """Adjoint of :func:`pad`: every padded place is added to the place it came from."""
    if mode == "zeros":
        return pad_with_zeros(y, tuple((-before, -after) for before, after in padding))
    first = y.dim() - len(padding)
    for axis, (size, (before, after)) in enumerate(zip(input_size, padding, strict=True), first):
        if before or after:
            indices = source_indices(size, before, after, mode).to(y.device)
            shape = (*y.shape[:axis], size, *y.shape[axis + 1 :])
            y = y.new_zeros(shape).index_add(axis, indices, y)
    return y


def pad_with_zeros(x: Tensor, padding: Pairs) -> Tensor:
    """Zero padding per axis and side; negative amounts crop, after the positive ones have been added."""
    flat = [amount for pair in reversed(padding) for amount in pair]
    for amounts in ([max(0, amount) for amount in flat], [min(0, amount) for amount in flat]):
        if any(amounts):
            x = torch.nn.functional.pad(x, amounts)
    return x


def largest_repetition(size: int, before: int, used: int, mode: PaddingMode) -> int:
    """How often the most repeated place occurs among the first ``used`` places of the padded axis.

    The square root of it is the norm of the padding map on this axis, because the map sends orthogonal unit vectors to
    orthogonal vectors of squared length the number of repetitions.
    """
    if mode == "circular":
        return -(-used // size)
    first, last = -before, used - 1 - before
    if mode == "replicate":
        at_first, at_last = min(last, 0) - first + 1, last - max(first, size - 1) + 1
        return used if size == 1 else max(1, at_first, at_last)
    # The places that are read themselves, by reflection at the beginning, and by reflection at the end: as many of
    # these intervals as meet anywhere meet where one of them begins.
    end = 2 * (size - 1)
    intervals = (
        (max(0, first), min(last, size - 1)),
        (max(1, -last), min(-first, size - 1)),
        (max(0, end - last), min(end - first, size - 2)),
    )
    return max(sum(low <= place <= high for low, high in intervals) for place, _ in intervals)


def largest_repetition_of_any_size(before: int, after: int, mode: PaddingMode) -> int:
    """The largest of :func:`largest_repetition` over all input sizes that the padding allows."""
    if mode == "reflect":  # a place can be reflected at each end once; both at n = max(pads) + 1, or 3 for pads of 1
        return 1 + (before > 0) + (after > 0)
    return 1 + before + after  # an input of size 1 is repeated everywhere
