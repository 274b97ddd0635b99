r"""On which side a layer has fewer dimensions, and when its symbols bound its smallest singular value.

A layer with not more inputs than outputs has as smallest singular value min ‖Tx‖/‖x‖ over inputs x; any other one
min ‖Tᵀy‖/‖y‖ over outputs y. Let μ be the smallest σ(E) over all frequencies.

**Inputs.** If no output outside of the layer would read its input ("full" padding with zeros), Tx is all of the
convolution of x with the kernel on the whole lattice, so ‖Tx‖ >= μ‖x‖.

**Outputs.** If no output reads padding ("valid"), Tᵀy is all of the correlation of y with the kernel, so
‖Tᵀy‖ >= μ‖y‖.

**Circulants.** All rows of one: both. Some of its rows: outputs.

With any other padding the symbols say nothing. A shift has σ(E) = 1 everywhere, and with as much zero padding as keeps
the size it loses a pixel: its smallest singular value is 0. What remains then is **one tap** that reaches every place
of that side: the layer is at least as regular as its matrix, less the norm of all other taps.
"""

import math
from fractions import Fraction
from typing import Literal

import torch

from gramcert.certified.work import Work
from gramcert.geometry.axis import Axis, layer_axes
from gramcert.geometry.convolution import Convolution
from gramcert.geometry.padding import Pairs

Side = Literal["input", "output"]


def side_of(rows: int, columns: int) -> Side:
    """The side with fewer dimensions of a matrix."""
    return "input" if columns <= rows else "output"


def why_symbols_bound(axis: Axis, side: Side) -> set[str]:
    """The reasons, if any, for which the smallest σ(E) bounds the layer on that side, as far as this axis matters.

    A reason that holds at all sizes is one for every size; one reason here and another there is none.
    """
    span = axis.dilation * (axis.taps - 1)
    reasons = set()
    if side == "output":
        last = axis.stride * (axis.outputs - 1) + span - axis.before
        if axis.is_circulant:
            reasons.add("rows of a circulant")
        if axis.before <= 0 and last < axis.size:
            reasons.add("no output reads padding")
    elif axis.mode != "zeros":
        if axis.is_whole_circulant:
            reasons.add("a circulant")
    elif axis.before > span - axis.stride and axis.outputs * axis.stride >= axis.size + axis.before:
        reasons.add("no output outside would read the input")
    return reasons


def symbols_decide(sampled: list[tuple[Axis, ...]], side: Side) -> bool:
    """Whether the smallest σ(E) bounds a layer from below on that side at all sizes that these axes stand for."""
    return all(
        set.intersection(*(why_symbols_bound(axis, side) for axis in each)) for each in zip(*sampled, strict=True)
    )


def reaching_taps(axis: Axis, side: Side) -> set[int]:
    """The taps that read a place of the input for every output, or every place of the input, each once."""
    shifts = {tap: axis.dilation * tap - axis.before for tap in range(axis.taps)}
    last = axis.stride * (axis.outputs - 1)
    if side == "output":
        return {tap for tap, shift in shifts.items() if shift >= 0 and last + shift < axis.size}
    return {tap for tap, shift in shifts.items() if axis.stride == 1 and shift <= 0 and last + shift >= axis.size - 1}


def read_phases(axis: Axis) -> tuple[int, int]:
    """How many of the places in one step of the stride are read at all, of how many."""
    return min(axis.stride // math.gcd(axis.stride, axis.dilation), axis.taps), axis.stride


def has_output_inside(axis: Axis) -> bool:
    """Whether some output reads places of the input only."""
    first = max(0, -(-axis.before // axis.stride))
    last = axis.stride * first + axis.dilation * (axis.taps - 1) - axis.before
    return first < axis.outputs and last < axis.size


def has_nothing_to_read(axis: Axis, side: Side, work: Work) -> bool:
    """Whether some place of the input is read by no output, or some output reads nothing but zeros.

    With zero padding by intervals, which takes little memory however long the axis is.
    """
    if axis.mode != "zeros":
        if side == "output":
            return False
        work.require_bytes("places that are read", 40 * axis.used + axis.size)
        seen, padded = torch.zeros(axis.size, dtype=torch.bool), axis.padded()
        for tap in range(axis.taps):
            seen[padded[axis.read_by(tap)]] = True
        return not bool(seen.all())
    # The outputs that read a place of the input with each tap, and these places by their residues.
    stride, read = axis.stride, []
    for tap in range(axis.taps):
        shift = axis.dilation * tap - axis.before
        first, last = max(0, -(shift // stride)), min(axis.outputs - 1, (axis.size - 1 - shift) // stride)
        if first <= last:
            read.append((first, last, shift))
    if side == "output":
        return not _is_covered([(first, last) for first, last, _ in read], axis.outputs)
    by_residue: dict[int, list[tuple[int, int]]] = {}
    for first, last, shift in read:
        start, end = (stride * output + shift for output in (first, last))
        by_residue.setdefault(start % stride, []).append((start // stride, end // stride))
    if len(by_residue) < min(stride, axis.size):
        return True
    return not all(
        _is_covered(intervals, -(-(axis.size - residue) // stride)) for residue, intervals in by_residue.items()
    )


def _is_covered(intervals: list[tuple[int, int]], count: int) -> bool:
    """Whether these intervals, ends included, hold all numbers from 0 to count - 1."""
    reached = 0
    for first, last in sorted(intervals):
        if first > reached:
            return False
        reached = max(reached, last + 1)
    return reached >= count


def telling_axes(layer: Convolution, trimmed: Pairs) -> list[tuple[Axis, ...]]:
    """The axes of a layer, without trimmed taps, at a few sizes that stand for all of them.

    With e = outputs·stride - size, what is asked of an axis above depends on e and on whether the stride divides the
    size. e takes its values by size modulo the stride, falls by one from size to size, and then rises to its largest
    value. The quotient of outputs and size, (1 + e/size)/stride, falls with e; so its extremes are at the smallest
    size, on both sides of the first rise and before the next one, or are the limit for large sizes.
    """
    sizes = [_telling_sizes(layer, axis) for axis in range(layer.axes)]
    many = max(map(len, sizes))
    filled = [[*each, *[each[-1]] * (many - len(each))] for each in sizes]
    return [
        tuple(axis.without_taps(*cut) for axis, cut in zip(layer_axes(layer, size), trimmed, strict=True))
        for size in zip(*filled, strict=True)
    ]


def _telling_sizes(layer: Convolution, axis: int) -> list[int]:
    (before, after), stride = layer.padding[axis], layer.stride[axis]
    span = layer.dilation[axis] * (layer.kernel_size[axis] - 1) + 1
    if layer.transposed:  # e is the same for all; the adjoint's input is the output
        missing = before + after - span - layer.output_padding[axis] + 1
        least = 1 + max(0, -(-missing // stride))
        return [least, least + 1]
    least = max(1, span - before - after)
    if layer.padding_mode == "reflect":
        least = max(least, before + 1, after + 1)
    rise = least + (span - before - after - least) % stride
    return [least, *([rise - 1] if rise > least else []), rise, rise + stride - 1]


def side_at_every_size(call: str, layer: Convolution, sampled: list[tuple[Axis, ...]]) -> Side:
    """The side with fewer dimensions, if it is the same at every size; an error if not."""
    outputs, inputs = layer.kernel.shape[0] // layer.groups, layer.kernel.shape[1]
    smallest = largest = Fraction(outputs)
    for axes in zip(*sampled, strict=True):
        quotients = [Fraction(axis.outputs, axis.size) for axis in axes] + [Fraction(1, axes[0].stride)]
        smallest, largest = smallest * min(quotients), largest * max(quotients)
    if smallest >= inputs:
        return "input"
    if largest <= inputs:
        return "output"
    raise ValueError(
        f"{call}(input_size=None): this layer has more outputs than inputs at some sizes and fewer at others, so that "
        f"no smallest singular value is one for all of them; give input_size"
    )
