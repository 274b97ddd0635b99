r"""One input size: the frequencies of a circulant, or the layer itself.

A layer that is a circulant has the norm max σ(E) over the frequencies of that circulant. Any other one is bounded from
above by sup σ(E) over all frequencies and by the circulants that contain it, shifted or not, both times the norm of the
padding map; and by the banded proof, which alone comes arbitrarily near. From below it is bounded by what it does to a
vector.
"""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from gramcert.certified.banded import smaller_gram
from gramcert.certified.every_size import supremum
from gramcert.certified.frequencies import Frequencies
from gramcert.certified.gram_symbol import GramSymbol, crude_norm
from gramcert.certified.lanczos import top_vector
from gramcert.certified.lifted import LiftedLayer
from gramcert.certified.tapwise import TapwiseLayer, plane_waves
from gramcert.certified.torus import Maximum, grid_maximum, torus_maximum
from gramcert.certified.work import OutOfBudgetError, Work
from gramcert.geometry.axis import Axis
from gramcert.geometry.reduction import one_size_bound
from gramcert.geometry.symbol import FrequencyGrid
from gramcert.rounding import down, root_up, up

ALL_FREQUENCIES = "sup over all frequencies"
BANDED = "banded Cholesky proof"
CIRCULANT = "all frequencies of the circulant"
EMBEDDING = "circulants that contain the layer"
LANCZOS = "Lanczos iteration on the layer"

# Floating-point operations of a banded proof that costs no more than looking at the symbol first.
CHEAP = 3e8

# Rate for the guess whether a banded proof fits into the time that is left.
FLOPS_PER_SECOND = 2e10

# Grids up to this many frequencies are searched without looking at all frequencies first.
SMALL_GRID = 2048

# Steps of Lanczos iteration at a time, and how often it may go on.
LANCZOS_STEPS, LANCZOS_ROUNDS = 400, 6

# The circulants that contain the layer come several times nearer than sup; they are tried if that may be enough.
EMBEDDING_GAIN = 8.0


class OneSize:
    """The search for one layer at one input size; ``lower`` and ``upper`` hold at any time."""

    def __init__(self, lifted: LiftedLayer, axes: tuple[Axis, ...], tol: float, work: Work) -> None:
        self.tol, self.work = tol, work
        self.kernels, self.axes = lifted.at(axes)
        self.lower, self.upper, self.method = 0.0, 0.0, "no output reads a place of the input"
        self.reasons: list[str] = []
        if not self.kernels.numel():
            return
        self.reduced = lifted.reduced(self.kernels)
        self.bound = one_size_bound(self.axes)
        self.repetition = root_up(math.prod(axis.repetition for axis in self.axes))
        self._crude = [up(crude_norm(kernel) * self.repetition) for kernel in self.kernels]
        self.upper, self.method = max(self._crude), "sums of absolute weights"
        self._layer = TapwiseLayer(self.kernels, self.axes)
        self._vector: Tensor | None = None
        self._settled = tol / 50  # what Lanczos iteration takes for standing still

    @property
    def target(self) -> float:
        """The largest upper bound that satisfies the tolerance."""
        return down(down(self.lower / up(1 - self.tol)))

    @property
    def finished(self) -> bool:
        """Whether the tolerance is reached."""
        return self.upper <= self.target or self.upper == self.lower

    def run(self) -> None:
        """Try the methods in the order of their cost."""
        if self.finished:
            return
        if all(axis.is_whole_circulant for axis in self.axes):
            self._attempt(CIRCULANT, self._circulant)
            return
        band = smaller_gram(self.kernels[0], self.axes)
        cheap = band.flops * len(self.kernels) <= CHEAP
        methods = [(LANCZOS, self._lanczos), (BANDED, self._banded)] if cheap else []
        methods += [(ALL_FREQUENCIES, self._all_frequencies), (LANCZOS, self._lanczos)]
        methods += [(EMBEDDING, self._embedding)] + ([] if cheap else [(BANDED, self._banded)])
        for name, method in methods:
            self._attempt(name, method)
            if self.finished:
                return

    def _attempt(self, name: str, method: Callable[[], str]) -> None:
        try:
            note = method()
        except OutOfBudgetError as error:
            note = str(error)
            self.reasons.append(note)
        self.work.record(name, self.lower, self.upper, note)

    def _lower_upper(self, value: float, method: str) -> None:
        if value < self.upper:
            self.upper, self.method = max(value, self.lower), method

    def _circulant(self) -> str:
        """Exact: the largest σ(E) on the grid; large grids by way of all frequencies, which are fewer to look at."""
        highest, evaluations = 0.0, 0
        for group in self._groups_by_size():
            if self._crude[group] <= self.target:
                highest = max(highest, self._crude[group])
                continue
            symbol = self._symbol(group)
            grid = Frequencies.of_grid(self.bound.grids[0], symbol.axes)
            found = self._circulant_group(symbol, grid)
            evaluations += found.evaluations
            self.lower, highest = max(self.lower, found.lower), max(highest, found.upper)
            if found.missed:
                self.reasons.append(found.missed)
        self._lower_upper(highest, CIRCULANT)
        return f"{evaluations} symbols"

    def _circulant_group(self, symbol: GramSymbol, grid: Frequencies) -> Maximum:
        if len(grid) > SMALL_GRID:
            everywhere = torus_maximum(symbol, self.tol / 2, self.work, self.lower)
            near = _neighbours(self.bound.grids[0], symbol.axes, everywhere.frequency)
            there = grid_maximum(symbol, near, self.tol / 4, self.work)
            lower = max(there.lower, self.lower)
            if everywhere.upper <= down(lower / up(1 - self.tol)):
                evaluations = everywhere.evaluations + there.evaluations
                return Maximum(there.lower, everywhere.upper, there.frequency, there.vector, evaluations)
        return grid_maximum(symbol, grid, self.tol, self.work, self.lower)

    def _all_frequencies(self) -> str:
        """Sup σ(E) bounds the layer up to the norm of the padding map; a plane wave at the maximiser comes near it."""
        # Where pixels repeat, sup alone cannot close, and need not be known well.
        tol = self.tol / 2 if self.bound.square == 1 else max(self.tol / 2, 1e-2)
        found = supremum(self.reduced, tol, self.work)
        self._lower_upper(up(found.upper * root_up(self.bound.square)), ALL_FREQUENCIES)
        if found.best is not None and self._vector is None:
            group, symbol, best = found.best
            waves = plane_waves(symbol, best.frequency, best.vector, self.axes, self.kernels.shape[2])
            vector = torch.zeros(self._layer.input_shape, dtype=torch.float64)
            vector[group] = max(waves, key=lambda wave: float(wave.norm()))
            self._use(vector)
        return found.missed

    def _lanczos(self) -> str:
        """Raise the lower bound until it stands still."""
        size = math.prod(self._layer.input_shape)
        steps = min(LANCZOS_STEPS, self.work.max_bytes // (32 * size))
        if steps < 2:
            raise OutOfBudgetError(f"{LANCZOS}: two vectors of {size} numbers need more than max_bytes")
        for _ in range(LANCZOS_ROUNDS):
            before = self.lower
            self._use(top_vector(self._gram, self._start(), steps, self._settled)[1].reshape(self._layer.input_shape))
            if self.lower <= before * (1 + self._settled):
                break
        return ""

    def _gram(self, vector: Tensor) -> Tensor:
        self.work.tick(LANCZOS, 0.0)
        return self._layer.adjoint(self._layer.apply(vector.reshape(self._layer.input_shape))).flatten()

    def _start(self) -> Tensor:
        """The best vector so far with a little of everything, so that no direction is out of reach."""
        generator = torch.Generator().manual_seed(len(self.work.steps))
        noise = torch.randn(math.prod(self._layer.input_shape), generator=generator, dtype=torch.float64)
        noise /= noise.norm()
        return noise if self._vector is None else self._vector.flatten() / self._vector.norm() + 0.001 * noise

    def _use(self, vector: Tensor) -> None:
        value = self._layer.norm_below(vector)
        if value > self.lower:
            self.lower, self._vector = value, vector

    def _embedding(self) -> str:
        """The largest σ(E) on the grid of a circulant that has the layer as a part, shifted by half a step or not."""
        gap = self.upper / self.repetition - self.lower
        if gap > EMBEDDING_GAIN * self.tol * self.upper:
            return "left out: it would not come near enough"
        best, evaluations = math.inf, 0
        for grid in self.bound.grids:
            highest = 0.0
            for group in self._groups_by_size():
                if self._crude[group] <= self.target:
                    highest = max(highest, self._crude[group])
                    continue
                symbol = self._symbol(group)
                points = Frequencies.of_grid(grid, symbol.axes)
                found = grid_maximum(symbol, points, self.tol / 4, self.work, self.lower)
                evaluations += found.evaluations
                highest = max(highest, up(found.upper * root_up(self.bound.square)))
            best = min(best, highest)
        self._lower_upper(best, EMBEDDING)
        return f"{evaluations} symbols"

    def _banded(self) -> str:
        """Prove half the tolerance above the lower bound; where that fails, look for more below, then ask for less."""
        groups = [group for group in self._groups_by_size() if self._crude[group] > self.target]
        left_out = max((size for group, size in enumerate(self._crude) if group not in groups), default=0.0)
        bands = [smaller_gram(self.kernels[group], self.axes) for group in groups]
        for band in bands:
            self.work.require_bytes(BANDED, band.bytes)
        guess = sum(band.flops for band in bands) / FLOPS_PER_SECOND
        if guess > self.work.remaining:
            raise OutOfBudgetError(
                f"{BANDED}: about {guess:.0f} s, more than max_seconds={self.work.max_seconds} leaves"
            )
        ask, hopeless, tries, excess = self.tol / 2, False, 0, 1e-15 * self.upper**2
        while not self.finished:
            bound = down(down(self.lower / up(1 - ask)))
            level = down(bound * bound)
            if hopeless:  # in relative terms, as where weights cancel: prove whatever can be proved
                level, excess = level + excess, 16 * excess
                bound = root_up(level)
            if bound >= self.upper:
                break
            tries += 1
            if all(band.proves_below(level, self.work) for band in bands):
                self._lower_upper(max(bound, left_out), BANDED)
                break
            before = self.lower
            self._settled = max(1e-3 * self._settled, 1e-16)  # two values may lie close together
            self._lanczos()
            if self.lower <= before * (1 + self.tol / 10):
                ask, hopeless = self.tol, ask == self.tol
        if not self.finished:
            self.reasons.append(f"{BANDED}: rounding in float64 leaves no room for this tolerance")
        order, half_bandwidth = bands[0].order, bands[0].half_bandwidth
        return f"{tries} of order {order} and half-bandwidth {half_bandwidth}" + (
            f", {len(bands)} groups" * (len(bands) > 1)
        )

    def _groups_by_size(self) -> list[int]:
        return sorted(range(len(self.kernels)), key=lambda group: -self._crude[group])

    def _symbol(self, group: int) -> GramSymbol:
        self.work.require_bytes(CIRCULANT, GramSymbol.bytes_for(self.reduced[group]))
        return GramSymbol(self.reduced[group])


def _neighbours(grid: FrequencyGrid, axes: list[int], frequency: Frequencies) -> Frequencies:
    """The points of a grid around a frequency, on some of its axes."""
    choices = []
    for axis, turn in zip(axes, (frequency.values()[0] / (2 * math.pi)).tolist(), strict=True):
        size, shift = grid.sizes[axis], grid.shifts[axis]
        first = math.floor(turn * size - shift)
        choices.append([2 * (index % size) + round(2 * shift) for index in (first, first + 1)])
    points = torch.tensor(list(itertools.product(*choices)), dtype=torch.int64)
    return Frequencies(points.reshape(-1, len(axes)), tuple(2 * grid.sizes[axis] for axis in axes))
