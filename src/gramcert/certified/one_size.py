r"""One input size: the frequencies of a circulant, or the layer itself.

A layer that is a circulant has the norm max σ(E) over the frequencies of that circulant. Any other one is bounded from
above by sup σ(E) over all frequencies and by the circulants that contain it, shifted or not, both times the norm of the
padding map; and by the banded proof, which alone comes arbitrarily near. From below it is bounded by what it does to a
vector.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from gramcert.certified.banded import BandedGram, band_bytes, band_operations, smaller_grams
from gramcert.certified.deflation import TooLowError
from gramcert.certified.dense import DenseGram
from gramcert.certified.embedded import EmbeddedLayer
from gramcert.certified.embedding import EMBEDDED, embeddings
from gramcert.certified.every_size import supremum
from gramcert.certified.frequencies import Frequencies, all_combinations
from gramcert.certified.gram_symbol import GramSymbol
from gramcert.certified.groups import group_bounds
from gramcert.certified.lanczos import top_vector
from gramcert.certified.lifted import LiftedLayer
from gramcert.certified.tapwise import TapwiseLayer, plane_waves
from gramcert.certified.torus import ROUNDING, Extremum, grid_maximum, torus_maximum
from gramcert.certified.work import OutOfBudgetError, Work
from gramcert.geometry.axis import Axis
from gramcert.geometry.reduction import one_size_bound
from gramcert.geometry.symbol import FrequencyGrid
from gramcert.rounding import down, largest_upper, root_up, up

ALL_FREQUENCIES = "sup over all frequencies"
BANDED = "banded Cholesky proof"
DENSE = "dense Cholesky proof"
CIRCULANT = "all frequencies of the circulant"
EMBEDDING = "circulants that contain the layer"
LANCZOS = "Lanczos iteration on the layer"
ABSOLUTE_SUMS, ALL_GROUPS = "sums of absolute weights", "all groups on one grid of frequencies"

# Orders and entries of matrices whose dense factorisation costs no more than looking at the symbol first.
SMALL_ORDER, SMALL_ENTRIES = 1536, 2**22

# Operations that putting a pair of taps into a block of the band is worth.
PAIR_OPERATIONS = 5e6

# Places of several groups up to which iteration with all of them is quick.
QUICK = 8192

# Operations up to which the banded proof takes about a second, so that nothing else needs to be tried first.
QUICK_BAND = 1e10

# The tolerance for sup where it cannot help but by a frequency to start from: where the norm should be so many
# tolerances below it.
FOR_A_START, HOPELESS = 0.2, 2.0

# Tolerances from which Lanczos iteration runs in float32.
COARSE = 1e-5

# Taps on an axis up to which the band is put together: the work grows with their square.
MOST_TAPS = 128

# Grids up to this many frequencies are searched without looking at all frequencies first.
SMALL_GRID = 2048

# Steps of Lanczos iteration at a time, and how often it may go on.
LANCZOS_STEPS, LANCZOS_ROUNDS = 400, 6

# Vectors that have to fit into the memory for it to be worth while.
LANCZOS_FEWEST = 10

# Numbers in a plane wave: enough to come within 1e-4 of the supremum in two dimensions.
WAVE_NUMBERS = 2**22

# The circulants that contain the layer come several times nearer than sup; they are tried if that may be enough.
EMBEDDING_GAIN = 8.0


class OneSize:
    """The search for one layer at one input size; ``lower`` and ``upper`` hold at any time."""

    def __init__(self, lifted: LiftedLayer, tol: float, work: Work) -> None:
        assert lifted.axes is not None
        self.tol, self.work = tol, work
        self.kernels, self.axes, self.reduced = lifted.kernels, lifted.axes, lifted.reduced
        self.bound = one_size_bound(self.axes)
        self.repetition = root_up(math.prod(axis.repetition for axis in self.axes))
        bounds = group_bounds(self.reduced, work, self.bound.grids)
        self._known = [up(bound * root_up(self.bound.square)) for bound in bounds]  # above the norm of each group
        self.lower, self.upper, self.method = 0.0, max(self._known), ALL_GROUPS if len(bounds) > 1 else ABSOLUTE_SUMS
        self.reasons: list[str] = []
        self._best: dict[int, Tensor] = {}  # what is stretched most, of each group that it has a part in
        self._settled = tol / 50  # what Lanczos iteration takes for standing still

    @property
    def target(self) -> float:
        """The largest upper bound that satisfies the tolerance."""
        return largest_upper(self.lower, self.tol)

    @property
    def finished(self) -> bool:
        """Whether the tolerance is reached."""
        return self.upper <= self.target or self.upper == self.lower

    def run(self) -> None:
        """Try the methods in the order of their cost."""
        for name, method in self._methods():
            self._attempt(name, method)
            if self.finished:
                break
        numbers = len(self.kernels) * self._sides[1]
        if self._best and 8 * numbers <= self.work.available:
            shape = (len(self.kernels), self.kernels.shape[2], *(axis.size for axis in self.axes))
            self.work.witness = torch.zeros(shape, dtype=torch.float64)
            for group, part in self._best.items():
                self.work.witness[group] = part

    def _methods(self) -> list[tuple[str, Callable[[], str]]]:
        if all(axis.is_whole_circulant for axis in self.axes):
            return [(CIRCULANT, self._circulant)]
        if self._is_small:
            return [(LANCZOS, self._lanczos), (DENSE, self._proof)]
        looked = [(ALL_FREQUENCIES, self._all_frequencies), (LANCZOS, self._lanczos)]
        looked.append((EMBEDDING, self._promising_embedding))
        proofs = [(EMBEDDED, self._embedded), (DENSE if self._is_dense else BANDED, self._proof)]
        if any(axis.mode != "zeros" for axis in self.axes):
            del proofs[0]
        elif len(self.kernels) * band_operations(self.kernels[0], self.axes) <= QUICK_BAND:
            proofs.reverse()
        return [*looked, *proofs, (EMBEDDING, self._embedding)]

    @property
    def _sides(self) -> tuple[int, int]:
        """Rows and columns of the matrix of one group."""
        outputs, inputs = self.kernels.shape[1:3]
        return (
            outputs * math.prod(axis.outputs for axis in self.axes),
            inputs * math.prod(axis.size for axis in self.axes),
        )

    @functools.cached_property
    def _is_small(self) -> bool:
        """Whether the matrix itself is quickly factorised, within the memory."""
        order, entries = min(self._sides), math.prod(self._sides)
        if order > SMALL_ORDER or entries > SMALL_ENTRIES:
            return False
        return self._dense_bytes <= self.work.available

    @functools.cached_property
    def _is_dense(self) -> bool:
        """Whether to factorise the matrix itself rather than a band, which is as wide where there are as many taps."""
        order, longer = sorted(self._sides)
        cheaper = order**2 * (longer + order / 3) <= band_operations(self.kernels[0], self.axes) + self._band_building
        return self._is_small or (cheaper and self._dense_bytes <= self.work.available)

    @property
    def _dense_bytes(self) -> int:
        """The matrix of the last group while it is made, beside all Gram matrices; or a shifted one and its factor."""
        order, entries, others = min(self._sides), math.prod(self._sides), len(self.kernels) - 1
        return 8 * max(3 * entries + others * order**2, entries + (others + 1) * order**2, (others + 3) * order**2)

    @property
    def _band_building(self) -> float:
        """Operations to put the band together: blocks near the borders differ, and each is a sum over pairs of taps."""
        pairs = math.prod(axis.taps**2 for axis in self.axes)
        return PAIR_OPERATIONS * pairs / 2 * min(min(axis.size, 2 * axis.taps) for axis in self.axes)

    def _attempt(self, name: str, method: Callable[[], str]) -> None:
        try:
            self.work.require_seconds(name, 0.0)
            note = method()
        except OutOfBudgetError as error:
            note = str(error)
            self.reasons.append(note)
        self.work.record(name, self.lower, self.upper, note)

    def _tighten(self, value: float, method: str) -> None:
        if value < self.lower:
            raise ArithmeticError(f"spectral_norm: {method} proved {value}, below {self.lower}; please report this")
        if value < self.upper:
            self.upper, self.method = value, method

    def _circulant(self) -> str:
        """Exact: the largest σ(E) on the grid; large grids by way of all frequencies, which are fewer to look at."""
        highest, evaluations = 0.0, 0
        for group in self._groups_by_size():
            if self._known[group] <= self.target:
                highest = max(highest, self._known[group])
                continue
            found = self._circulant_group(self._symbol(CIRCULANT, group))
            evaluations += found.evaluations
            self.lower, highest = max(self.lower, found.lower), max(highest, found.upper)
            if found.missed:
                self.reasons.append(found.missed)
        self._tighten(highest, CIRCULANT)
        return f"{evaluations} symbols"

    def _circulant_group(self, symbol: GramSymbol) -> Extremum:
        grid = self.bound.grids[0]
        if len(grid) <= SMALL_GRID:
            return grid_maximum(symbol, Frequencies.of_grid(grid, symbol.axes), self.tol, self.work, self.lower)
        everywhere = torus_maximum(symbol, self.tol / 2, self.work, self.lower)
        near = grid_maximum(symbol, _neighbours(grid, symbol.axes, everywhere.frequency), self.tol / 4, self.work)
        best = dataclasses.replace(near, upper=everywhere.upper, missed=everywhere.missed)
        if best.upper > largest_upper(max(best.lower, self.lower), self.tol):
            points = self._points(CIRCULANT, grid, symbol)
            whole = grid_maximum(symbol, points, self.tol, self.work, max(best.lower, self.lower))
            best = dataclasses.replace(whole, lower=max(best.lower, whole.lower), upper=min(best.upper, whole.upper))
        return best

    def _points(self, name: str, grid: FrequencyGrid, symbol: GramSymbol) -> Frequencies:
        self.work.require_bytes(name, symbol.bytes + 64 * len(grid))
        return Frequencies.of_grid(grid, symbol.axes)

    def _all_frequencies(self) -> str:
        """Sup σ(E) bounds the layer up to the norm of the padding map; a plane wave at the maximiser comes near it."""
        # Where sup alone cannot close it need not be known well.
        tol = self.tol / 2
        if self.bound.square > 1:  # pixels repeat
            tol = max(tol, 1e-2)
        elif self._distance_from_supremum > HOPELESS * self.tol:
            tol = max(tol, FOR_A_START)
        found = supremum(self.reduced, tol, self.work)
        self._tighten(up(found.upper * root_up(self.bound.square)), ALL_FREQUENCIES)
        if found.missed:
            self.reasons.append(found.missed)
        if found.best is not None:
            self._use_wave(*found.best)
        return found.missed

    @property
    def _distance_from_supremum(self) -> float:
        """About how far below sup the norm is, relatively.

        A wave in a box of n places has a frequency that is uncertain by π/(n + 1), and σ(E) falls from its maximum by
        at most ½(dπ/(n + 1))², d the degree; Gaussian kernels had about a quarter of that.
        """
        reduced = self.reduced.shape[3:]
        angles = [(taps - 1) / 2 * math.pi / (axis.outputs + 1) for taps, axis in zip(reduced, self.axes, strict=True)]
        return sum(angle**2 for angle in angles) / 8

    def _use_wave(self, group: int, best: Extremum) -> None:
        """A plane wave at the maximiser; of large inputs only on a part.

        Outputs that read no padding, and of those the first ones, which read the first places only, are a smaller layer
        with zero padding, so its norm is a lower bound of the whole one.
        """
        kernels, axes = self.kernels[group : group + 1], self.axes
        if self._is_long(axes):
            axes = tuple(axis.inside() for axis in axes)
        while self._is_long(axes):
            longest = max(axes, key=lambda axis: axis.size)
            if longest.size == 1:
                self.work.require_bytes("a plane wave", self._wave_bytes(axes))
            axes = tuple(axis.first_places(axis.size // 2) if axis is longest else axis for axis in axes)
        symbol = GramSymbol(self.reduced[group])
        waves = plane_waves(symbol, best.frequency, best.vector, axes, self.kernels.shape[2])
        wave = max(waves, key=lambda wave: float(wave.norm()))
        self.lower = max(self.lower, TapwiseLayer(kernels, axes).norm_below(wave[None]))
        if axes is self.axes and bool(wave.any()):
            self._best = {group: wave}

    def _is_long(self, axes: tuple[Axis, ...]) -> bool:
        """Whether a plane wave would take too much memory, or does not need to be as long."""
        numbers = self.kernels.shape[2] * math.prod(axis.size for axis in axes)
        return self._wave_bytes(axes) > self.work.available or (axes[0].mode == "zeros" and numbers > WAVE_NUMBERS)

    def _wave_bytes(self, axes: tuple[Axis, ...]) -> int:
        numbers = self.kernels.shape[2] * math.prod(axis.size for axis in axes)
        # Complex numbers before and after the last axis, the real and the imaginary part, and what is kept.
        each, weights = 56, 32 * self.reduced[0].numel()
        places = 64 * sum(axis.size for axis in axes)
        return each * numbers + weights + places + TapwiseLayer.bytes_for(self.kernels[:1], axes)

    def _lanczos(self) -> str:
        """Raise the lower bound until it stands still: by a few groups with the largest bounds, then by others."""
        waiting, count = self._groups_by_size(), max(1, QUICK // self._sides[1])
        while waiting := [group for group in waiting if self._known[group] > self.lower]:
            self._lanczos_on(sorted(waiting[:count]))
            waiting, count = waiting[count:], 4 * count
        return ""

    def _lanczos_on(self, groups: list[int]) -> None:
        kernels = self.kernels if len(groups) == len(self.kernels) else self.kernels[groups]
        outputs, inputs = (len(groups) * side for side in self._sides)
        # Beside the basis, on the smaller side: the best input so far and a new one, the start and its noise; images
        # and projections.
        vector = 8 * min(inputs, outputs)
        fixed = TapwiseLayer.bytes_for(kernels, self.axes) + 8 * 5 * inputs + 4 * vector
        self.work.require_bytes(LANCZOS, fixed + LANCZOS_FEWEST * vector)
        steps = min(LANCZOS_STEPS, (self.work.available - fixed) // vector)
        exact = TapwiseLayer(kernels, self.axes)
        is_quick = inputs > QUICK and self.tol >= COARSE
        layer = TapwiseLayer(kernels.float(), self.axes) if is_quick else exact  # vectors are searched for with it
        for _ in range(LANCZOS_ROUNDS):
            before = self.lower
            self._use(exact, groups, self._stretched(layer, self._start(groups).to(layer.kernels.dtype), steps))
            if self.finished or self.lower <= before * (1 + self._settled):
                break

    def _stretched(self, layer: TapwiseLayer, start: Tensor, steps: int) -> Tensor:
        """A vector that is stretched most, from Lanczos iteration on the smaller side."""

        def there(vector: Tensor) -> Tensor:
            return layer.apply(vector.reshape(layer.input_shape)).flatten()

        def back(vector: Tensor) -> Tensor:
            self.work.tick(LANCZOS, 0.0)
            return layer.adjoint(vector.reshape(layer.output_shape)).flatten()

        # With a little more than what the upper bound needs for the tolerance all is done.
        goal = (self.upper * (1 - 0.98 * self.tol)) ** 2
        if math.prod(layer.input_shape) <= math.prod(layer.output_shape):
            found = top_vector(lambda vector: back(there(vector)), start, steps, self._settled, goal)[1]
        else:
            found = back(top_vector(lambda vector: there(back(vector)), there(start), steps, self._settled, goal)[1])
        return found.reshape(layer.input_shape).double()

    def _start(self, groups: list[int]) -> Tensor:
        """The best vector so far with a little of everything in these groups, so that no direction is out of reach."""
        generator = torch.Generator().manual_seed(len(self.work.steps))
        noise = torch.randn(len(groups) * self._sides[1], generator=generator, dtype=torch.float64)
        noise /= noise.norm()
        if self._best.keys().isdisjoint(groups):
            return noise
        nothing = torch.zeros_like(next(iter(self._best.values())))
        best = torch.stack([self._best.get(group, nothing) for group in groups]).flatten()
        return best.div_(best.norm().clamp_min(1e-300)).add_(noise, alpha=0.001)

    def _use(self, layer: TapwiseLayer, groups: list[int], vector: Tensor) -> None:
        """A vector of some groups, of which the layer consists."""
        value = layer.norm_below(vector)
        if value > self.lower:
            self.lower, self._best = value, dict(zip(groups, vector, strict=True))

    def _promising_embedding(self) -> str:
        gap = 1 - self.lower * self.repetition / self.upper
        if self.bound.square == 1:  # sup may not be known well
            gap = min(gap, self._distance_from_supremum)
        if gap > EMBEDDING_GAIN * self.tol:
            return "left out: it would not come near enough"
        return self._embedding()

    def _embedding(self) -> str:
        """The largest σ(E) on the grid of a circulant that has the layer as a part, shifted by half a step or not."""
        highest, evaluations = [0.0] * len(self.bound.grids), 0
        for group in self._groups_by_size():
            uppers = [self._known[group]] * len(highest)
            if self._known[group] > self.target:
                symbol = self._symbol(EMBEDDING, group)
                for number, grid in enumerate(self.bound.grids):
                    points = self._points(EMBEDDING, grid, symbol)
                    found = grid_maximum(symbol, points, self.tol / 4, self.work, self.lower / self.repetition)
                    evaluations += found.evaluations
                    uppers[number] = up(found.upper * root_up(self.bound.square))
            highest = [max(pair) for pair in zip(highest, uppers, strict=True)]
        self._tighten(min(highest), EMBEDDING)
        return f"{evaluations} symbols"

    def _embedded(self) -> str:
        """The circulant but for a few vectors, of each group that matters."""
        groups = [group for group in self._groups_by_size() if self._known[group] > self.target]
        highest = max((size for group, size in enumerate(self._known) if group not in groups), default=0.0)
        count = 0
        for group in groups:
            upper, vectors = self._embedded_group(group)
            highest, count = max(highest, upper), max(count, vectors)
            if highest > self.target:
                return f"not proved with {vectors} vectors"
        self._tighten(highest, EMBEDDED)
        return f"{count} vectors"

    def _embedded_group(self, group: int) -> tuple[float, int]:
        """An upper bound of one group's norm, or infinity, and how many vectors it took."""
        symbol, highest, count = self._symbol(EMBEDDED, group), 0.0, 0
        for part in embeddings(self.axes, self.work):
            layer = EmbeddedLayer(self.kernels[group], self.reduced[group], symbol, part, self.work)
            highest, count = max(highest, self._embedded_part(layer)), max(count, layer.count)
            if math.isinf(highest):
                break
        return highest, count

    def _embedded_part(self, layer: EmbeddedLayer) -> float:
        """The same of one part of it."""
        while True:
            before = self.lower
            try:
                upper = layer.bound(before, self.tol)
            except TooLowError:
                upper = math.inf
            if math.isfinite(upper):
                return upper
            self._settled = max(1e-3 * self._settled, 1e-16)  # two values may lie close together
            self._lanczos()
            if self.lower <= before * (1 + self.tol / 50):
                return math.inf

    def _proof(self) -> str:
        """Prove half the tolerance above the lower bound; where that fails, look for more below, then ask for less."""
        groups = [group for group in self._groups_by_size() if self._known[group] > self.target]
        left_out = max((size for group, size in enumerate(self._known) if group not in groups), default=0.0)
        grams, kept = self._grams(groups)
        self.work.held += kept
        try:
            tries = self._tries(grams, left_out)
        finally:
            self.work.held -= kept
        several = f", {len(grams)} groups" if len(grams) > 1 else ""
        return f"{tries} of {grams[0].description}{several}"

    def _tries(self, grams: list[DenseGram] | list[BandedGram], left_out: float) -> int:
        """Try one proof after the other, and say how many it were."""
        ask, hopeless, tries, excess = self.tol / 2, False, 0, max(1e-15 * self.upper**2, 1e-300)
        reason = ROUNDING
        while not self.finished:
            bound = largest_upper(self.lower, ask)
            level = down(bound * bound)
            if hopeless:  # in relative terms, as where weights cancel: prove whatever can be proved
                level, excess = level + excess, 16 * excess
                bound = root_up(level)
            if bound >= self.upper:
                break
            tries += 1
            if all(gram.proves_below(level, self.work) for gram in grams):
                self._tighten(max(bound, left_out), DENSE if self._is_dense else BANDED)
                break
            before = self.lower
            self._settled = max(1e-3 * self._settled, 1e-16)  # two values may lie close together
            try:
                self._lanczos()
            except OutOfBudgetError as error:  # beside the Gram matrices there may be no memory for it
                reason = str(error)
            if self.lower <= before * (1 + self.tol / 10):
                ask, hopeless = self.tol, ask == self.tol
        if not self.finished:
            self.reasons.append(reason)
        return tries

    def _grams(self, groups: list[int]) -> tuple[list[DenseGram] | list[BandedGram], int]:
        """The Gram matrices of some groups, and the bytes that stay with them."""
        self.work.require_seconds(BANDED, 0.0)
        if self._is_dense:
            dense = [DenseGram(self.kernels[group], self.axes) for group in groups]
            return dense, 8 * sum(gram.order**2 for gram in dense)
        most = max(axis.taps for axis in self.axes)
        if most > MOST_TAPS:
            raise OutOfBudgetError(f"{BANDED}: made for up to {MOST_TAPS} taps on an axis, got {most}")
        weights = 8 * self.kernels[0].numel() * len(groups)
        self.work.require_bytes(BANDED, weights + band_bytes(self.axes))
        grams = smaller_grams(self.kernels[groups], self.axes)
        kept = weights + band_bytes(self.axes) // 2 + grams[0].kept
        self.work.require_bytes(BANDED, kept + grams[0].window_bytes)
        self.work.require_operations(BANDED, len(grams) * grams[0].flops)
        return grams, kept

    def _groups_by_size(self) -> list[int]:
        return sorted(range(len(self.kernels)), key=lambda group: -self._known[group])

    def _symbol(self, name: str, group: int) -> GramSymbol:
        """Made anew by each method: a hundredth of its time, and to keep it would take memory from the others."""
        return GramSymbol.within(name, self.reduced[group], self.work)


def _neighbours(grid: FrequencyGrid, axes: list[int], frequency: Frequencies) -> Frequencies:
    """The points of a grid around a frequency, on some of its axes."""
    choices = []
    for axis, turn in zip(axes, (frequency.values()[0] / (2 * math.pi)).tolist(), strict=True):
        size, shift = grid.sizes[axis], grid.shifts[axis]
        first = math.floor(turn * size - shift)
        choices.append(torch.tensor([2 * (index % size) + round(2 * shift) for index in (first, first + 1)]))
    return Frequencies(all_combinations(choices), tuple(2 * grid.sizes[axis] for axis in axes))
