r"""The search for the smallest singular value: every size at once, or one size (see :mod:`~gramcert.certified.sides`).

Lower bounds are Cholesky proofs with the sign turned: G - s²I >= 0 on cells of frequencies, on the grid of a circulant,
or for the matrix of a layer. Upper bounds are what the layer makes of a vector. Gram matrices have the squares of the
singular values, so values below 1e-7 of the norm are lost in them; of small matrices and symbols a decomposition, which
proves its own values, comes nearer.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from gramcert.certified.choose import Found
from gramcert.certified.decomposition import circulant_values, number_of_values, verified_values, written_out
from gramcert.certified.every_size import MATRIX, supremum
from gramcert.certified.frequencies import Frequencies
from gramcert.certified.gram_symbol import GramSymbol, crude_norm
from gramcert.certified.large_group import LargeGroup
from gramcert.certified.lifted import LiftedLayer
from gramcert.certified.one_size import BANDED, CIRCULANT
from gramcert.certified.sides import (
    Side,
    has_nothing_to_read,
    has_output_inside,
    reaching_taps,
    read_phases,
    side_at_every_size,
    side_of,
    symbols_decide,
    telling_axes,
)
from gramcert.certified.tapwise import at_tap, plane_waves
from gramcert.certified.torus import grid_minimum, torus_minimum
from gramcert.certified.work import OutOfBudgetError, Work
from gramcert.geometry.axis import Axis
from gramcert.geometry.reduction import one_size_bound, reduced_kernels
from gramcert.rounding import down, least_lower, root_up, up

# What is enclosed here.
LEAST = "the smallest singular value"
INFIMUM = "the infimum over all frequencies"

SYMBOLS = "search of all frequencies"
DECOMPOSED = "verified decomposition"
ONE_TAP = "one tap, less the norm of the others"
SPARE = "dimensions that cannot matter"

# Orders up to which decompositions come before proofs, and up to which they may replace them.
QUICKLY_DECOMPOSED, DECOMPOSED_ORDER = 192, 2048

# Points of a grid up to which it is searched itself, and not all frequencies first; singular values of a circulant up
# to which all of them are computed where rounding is too much for proofs.
SMALL_GRID, COMPUTED_VALUES = 2**14, 2**18

# Orders and entries of matrices that are written out.
DENSE_ORDER, DENSE_ENTRIES = 6144, 2**26

# The tolerances for symbols where they cannot close, and for one tap and all others.
FOR_AN_END, FOR_A_TAP = 1e-2, 1e-3


class Least(NamedTuple):
    """Bounds of a smallest singular value, what proved them, and why the tolerance was missed, if it was."""

    lower: float
    upper: float
    method: str
    missed: str = ""

    def is_within(self, tol: float) -> bool:
        """Whether the bounds are near enough."""
        return self.upper - self.lower <= tol * self.upper

    def and_also(self, other: "Least") -> "Least":
        """The same value by both of two methods; the one that is nearer from below gives its name."""
        better = other if other.lower >= self.lower else self
        return Least(better.lower, min(self.upper, other.upper), better.method, other.missed)


def smallest_of(parts: list[Least]) -> Least:
    """That of a layer with several groups, from theirs."""
    first = min(parts, key=lambda part: part.lower)
    missed = next((part.missed for part in parts if part.missed), "")
    return Least(first.lower, min(part.upper for part in parts), first.method, missed)


def least_at_every_size(call: str, lifted: LiftedLayer, tol: float, work: Work) -> Found:
    """The largest number below the smallest singular value at every input size."""
    sampled = telling_axes(lifted.layer, lifted.trimmed)
    side = side_at_every_size(call, lifted.layer, sampled)
    is_square = all(_shape(lifted.kernels, axes)[0] == _shape(lifted.kernels, axes)[1] for axes in sampled)
    if _has_spare_channels(lifted.kernels, side, is_square) or _has_spare_phases(lifted.kernels, sampled[0], side):
        return Found(0.0, 0.0, _named(SPARE, lifted, side), [])
    decided = symbols_decide(sampled, side)
    found = _infimum(lifted.reduced, tol if decided else max(tol, FOR_AN_END), work)
    work.record(found.method, found.lower, found.upper, found.missed, quantity=INFIMUM)
    notes = [found.missed] if found.missed else []
    if decided:
        return Found(found.lower, found.upper, _named(found.method, lifted, side), notes)
    taps = [set.intersection(*(reaching_taps(axis, side) for axis in each)) for each in zip(*sampled, strict=True)]
    lower = min(_one_tap(lifted, taps, side, work), found.upper)
    work.record(ONE_TAP, lower, found.upper, quantity=LEAST)
    notes.insert(
        0,
        "with this padding borders may lose what the inside keeps, however regular the symbols are: only the upper "
        "bound comes from them, and the enclosure cannot close; at a given input_size it can",
    )
    return Found(lower, found.upper, _named(ONE_TAP, lifted, side), notes)


def least_at_one_size(lifted: LiftedLayer, tol: float, work: Work) -> Found:
    """The smallest singular value at one input size."""
    kernels, axes = lifted.kernels, lifted.axes
    assert axes is not None
    rows, columns = _shape(kernels, axes)
    side, is_square = side_of(rows, columns), rows == columns
    if side == "input":  # rows of zeros make no difference
        axes = tuple(axis.without_idle_ends() for axis in axes)
        lifted = dataclasses.replace(lifted, axes=axes)
        rows, columns = _shape(kernels, axes)
    is_spare = _has_spare_channels(kernels, side, is_square) or _has_spare_places(axes, side, work)
    if is_spare or side != side_of(rows, columns):
        return Found(0.0, 0.0, _named(SPARE, lifted, side), [])
    if all(axis.is_whole_circulant for axis in axes):
        if _has_spare_phases(kernels, axes, side):
            return Found(0.0, 0.0, _named(SPARE, lifted, side), [])
        found = _of_circulants(lifted, tol, work)
    elif min(rows, columns) <= DENSE_ORDER and rows * columns <= DENSE_ENTRIES and 24 * rows * columns < work.available:
        found = _each_group(
            kernels, lambda group, ceiling: _of_small_group(kernels[group], axes, tol, work, ceiling), axes
        )
    else:
        found = _of_large_layer(lifted, side, tol, work)
    work.record(found.method, found.lower, found.upper, found.missed, quantity=LEAST)
    return Found(found.lower, found.upper, _named(found.method, lifted, side), [found.missed] if found.missed else [])


def _named(method: str, lifted: LiftedLayer, side: Side) -> str:
    """The method, with the side in the user's words: the kernels of a transposed layer are those of its adjoint."""
    users: Side = side if not lifted.layer.transposed else "output" if side == "input" else "input"
    return f"{method}, over all {users}s"


def _shape(kernels: Tensor, axes: tuple[Axis, ...]) -> tuple[int, int]:
    """Rows and columns of the matrix of one group."""
    places = zip(*((axis.outputs, axis.size) for axis in axes), strict=True)
    rows, columns = (channels * math.prod(sizes) for channels, sizes in zip(kernels.shape[1:3], places, strict=True))
    return rows, columns


def _has_spare_channels(kernels: Tensor, side: Side, is_square: bool) -> bool:
    """Whether some channel of that side, or of any side of a square matrix, has no weights: the value is 0."""
    used = kernels.flatten(3).any(3)
    sides = [1, 2] if is_square else [1 if side == "input" else 2]
    return not all(bool(used.any(dim).all()) for dim in sides)


def _has_spare_places(axes: tuple[Axis, ...], side: Side, work: Work) -> bool:
    """Whether some place of that side cannot matter; not, if that is not known within the limits."""
    try:
        return any(has_nothing_to_read(axis, side, work) for axis in axes)
    except OutOfBudgetError:
        return False


def _has_spare_phases(kernels: Tensor, axes: tuple[Axis, ...], side: Side) -> bool:
    """Whether a step of the stride has places that no tap reads, or the outputs of a step read too few for them all."""
    phases = [read_phases(axis) for axis in axes]
    if side == "input":
        return any(read < stride for read, stride in phases)
    return kernels.shape[1] > kernels.shape[2] * math.prod(read for read, _ in phases)


def _is_regular(kernels: Tensor, axes: tuple[Axis, ...], side: Side) -> bool:
    """Whether the symbols have not more dimensions on that side than on the other."""
    if _has_spare_phases(kernels, axes, side):
        return False
    return side == "output" or kernels.shape[1] >= kernels.shape[2] * math.prod(axis.stride for axis in axes)


def _each_group(kernels: Tensor, search: Callable[[int, float], Least], axes: tuple[Axis, ...] = ()) -> Least:
    """The smallest of what a search finds for each group, given what was attained in those before.

    At one size the axes say how often pixels repeat, for what is known without a search.
    """
    repetition = root_up(math.prod(axis.repetition for axis in axes))
    parts: list[Least] = []
    for group, kernel in enumerate(kernels):
        ceiling = min((part.upper for part in parts), default=math.inf)
        try:
            parts.append(search(group, ceiling))
        except OutOfBudgetError as error:
            crude = up(crude_norm(kernel) * repetition)
            parts.append(Least(0.0, crude, "sums of absolute weights", str(error)))
    return smallest_of(parts)


def _infimum(kernels: Tensor, tol: float, work: Work) -> Least:
    """The smallest σ(E) of stride-1 kernels (groups, out, in, *taps) over all frequencies and groups."""

    def search(group: int, ceiling: float) -> Least:
        if max(kernels.shape[3:]) == 1:
            return of_matrix(kernels[group].flatten(1), tol, work, ceiling)
        found = torus_minimum(GramSymbol.within(SYMBOLS, kernels[group], work), tol, work, ceiling)
        return Least(found.lower, found.upper, SYMBOLS, found.missed)

    return _each_group(kernels, search)


def of_matrix(matrix: Tensor, tol: float, work: Work, ceiling: float = math.inf) -> Least:
    """The smallest singular value of a matrix in float64; below ``ceiling`` it need not be known better than that."""
    order = min(matrix.shape)
    found = Least(0.0, math.inf, MATRIX)
    if order > QUICKLY_DECOMPOSED:
        proved = torus_minimum(GramSymbol.within(MATRIX, matrix[..., None], work, sign=-1), tol, work, ceiling)
        found = Least(proved.lower, proved.upper, MATRIX, proved.missed)
    if not found.missed and math.isfinite(found.upper):
        return found
    if order <= DECOMPOSED_ORDER:
        work.require_bytes(DECOMPOSED, 64 * matrix.numel())
        (values,), error = verified_values(matrix[None], matrix.shape)
        least = float(values[-1])
        found = found.and_also(Least(max(0.0, down(least - error)), up(least + error), DECOMPOSED))
        is_near = found.is_within(tol) or (ceiling < math.inf and found.lower >= least_lower(ceiling, tol))
        return found if is_near else found._replace(missed=f"{DECOMPOSED}: its error is {error:.1g}")
    return found


def _of_small_group(kernel: Tensor, axes: tuple[Axis, ...], tol: float, work: Work, ceiling: float) -> Least:
    """That of one group whose matrix is small enough to be written out."""
    matrix, doubt = written_out(kernel, axes)
    found = of_matrix(matrix, tol, work, ceiling)
    if not doubt:
        return found
    return found._replace(lower=max(0.0, down(found.lower - doubt)), upper=up(found.upper + doubt))


def _of_circulants(lifted: LiftedLayer, tol: float, work: Work) -> Least:
    """That of a layer that is a circulant: the smallest σ(E) on its grid; large grids by way of all frequencies."""
    axes = lifted.axes or ()
    grid = one_size_bound(axes).grids[0]

    def search(group: int, ceiling: float) -> Least:
        kernel = lifted.reduced[group]
        if max(kernel.shape[2:]) == 1:
            return of_matrix(kernel.flatten(1), tol, work, ceiling)
        symbol = GramSymbol.within(CIRCULANT, kernel, work)
        lower = 0.0
        if len(grid) > SMALL_GRID:
            everywhere = torus_minimum(symbol, tol / 2, work, ceiling)
            lower = everywhere.lower
        work.require_bytes(CIRCULANT, symbol.bytes + 64 * len(grid))
        found = grid_minimum(symbol, Frequencies.of_grid(grid, symbol.axes), tol, work, ceiling)
        return Least(max(lower, found.lower), found.upper, CIRCULANT, found.missed)

    found = _each_group(lifted.reduced, search, axes)
    if found.missed and number_of_values(lifted) <= COMPUTED_VALUES:
        values, error = circulant_values(lifted)
        least = float(values.min())
        found = found.and_also(Least(max(0.0, down(least - error)), up(least + error), DECOMPOSED))
        if not found.is_within(tol):
            found = found._replace(missed=f"{DECOMPOSED}: its error is {error:.1g}")
    return found


def _one_tap(lifted: LiftedLayer, taps: list[set[int]], side: Side, work: Work) -> float:
    """A lower bound from a tap among these that reaches all of a side: its matrix, less the norm of all other taps."""
    bounds = []
    for group, kernel in enumerate(lifted.kernels):
        choices = list(itertools.product(*taps))
        if not choices:
            return 0.0
        tap = max(choices, key=lambda choice: float(at_tap(kernel, choice).norm()))
        if side != side_of(*kernel.shape[:2]) and kernel.shape[0] != kernel.shape[1]:
            return 0.0  # its matrix is not regular on this side
        matrix, others = at_tap(kernel, tap).contiguous(), lifted.kernels[group : group + 1].clone()
        at_tap(others, tap).zero_()
        rest = reduced_kernels(others, lifted.layer.stride, lifted.layer.dilation)
        recorded = len(work.steps)
        try:
            least = of_matrix(matrix, FOR_A_TAP, work).lower
            outweighed = supremum(rest, FOR_A_TAP, work).upper if bool(others.any()) else 0.0
        except OutOfBudgetError:
            return 0.0
        del work.steps[recorded:]  # about other layers than the one that was asked for
        copies = lifted.square if lifted.axes is None else math.prod(axis.repetition for axis in lifted.axes)
        bounds.append(down(least - up(outweighed * root_up(copies))))
    return max(0.0, min(bounds))


def _of_large_layer(lifted: LiftedLayer, side: Side, tol: float, work: Work) -> Least:
    """That of a layer whose matrix is too large to be written out."""
    axes = lifted.axes or ()
    decided = _is_regular(lifted.kernels, axes, side) and symbols_decide([axes], side)
    if decided and max(lifted.reduced.shape[3:]) == 1 and all(has_output_inside(axis) for axis in axes):
        return _infimum(lifted.reduced, tol, work)  # each output reads places of its own, all in the same way
    by_tap = Least(_one_tap(lifted, [reaching_taps(axis, side) for axis in axes], side, work), math.inf, ONE_TAP)

    def search(group: int, ceiling: float) -> Least:
        found, start, kernel = by_tap, None, lifted.kernels[group]
        if decided:
            symbol = GramSymbol.within(SYMBOLS, lifted.reduced[group], work)
            inside = torus_minimum(symbol, tol / 2, work)
            found = found.and_also(Least(inside.lower, math.inf, SYMBOLS))
            waves = plane_waves(symbol, inside.frequency, inside.vector, axes, kernel.shape[1])
            start = max(waves, key=lambda wave: float(wave.norm()))[None]
        large = LargeGroup(kernel, axes, side, tol, work)
        large.enclose(found.lower, ceiling, start)
        method = BANDED if large.lower > found.lower else found.method
        return Least(large.lower, large.upper, method, large.missed)

    return _each_group(lifted.kernels, search, axes)
