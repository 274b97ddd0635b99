r"""Frequencies as exact fractions of a turn, and cells that cover all of them.

A frequency is ω_j = 2π·x_j/m_j with integers x_j, m_j, so that the angles of a place a, 2π·a_j x_j/m_j on each axis,
are reduced to one turn in integers and no rounding builds up, however fine the frequencies are.

**Cells.** Everything that is said about a cell depends on its radius: the largest Σ_j d_j|ω_j - c_j| from its centre c,
d_j being the degree of the symbol on axis j. In this weighted 1-norm the ball in two dimensions is a diamond, and
diamonds around the points with x_1 + x_2 even tile the plane: half as many as squares of the same radius. A diamond
splits into four of half the radius around c ± half a step on each axis. A third axis is cut into intervals.

Kernels are real, so G(-ω) is the conjugate of G(ω) and half of the torus is enough.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.geometry.symbol import FrequencyGrid
from gramcert.rounding import up


@dataclass(frozen=True)
class Frequencies:
    """ω_j = 2π·numerators_j/denominators_j, a row per frequency."""

    numerators: Tensor
    denominators: tuple[int, ...]

    @classmethod
    def of_grid(cls, grid: FrequencyGrid, axes: list[int]) -> "Frequencies":
        """The half of a grid that represents it, on some of its axes."""
        steps = [
            2 * torch.arange(grid.shape[axis] if axis == len(grid.sizes) - 1 else grid.sizes[axis])
            + round(2 * grid.shifts[axis])
            for axis in axes
        ]
        return cls(all_combinations(steps), tuple(2 * grid.sizes[axis] for axis in axes))

    @classmethod
    def nearest(cls, frequency: Tensor) -> "Frequencies":
        """One frequency, rounded to 2⁻⁴⁰ of a turn."""
        turns = (frequency / (2 * math.pi) * 2**40).round().long() % 2**40
        return cls(turns[None], (2**40,) * len(frequency))

    def __len__(self) -> int:
        return len(self.numerators)

    def __getitem__(self, index: Tensor | slice) -> "Frequencies":
        return Frequencies(self.numerators[index], self.denominators)

    def split(self, size: int) -> list["Frequencies"]:
        """Consecutive pieces of at most this size."""
        return [Frequencies(piece, self.denominators) for piece in self.numerators.split(size)]

    def waves(self, places: list[Tensor]) -> tuple[Tensor, Tensor]:
        """cos(a·ω) and sin(a·ω), a row per frequency, a column per combination a of places on each axis, in order.

        Sines and cosines are taken on each axis alone and put together by the addition theorems, which for many places
        is much cheaper. Each is within ``TWIDDLE_ERROR``.
        """
        shape = (len(self), 1)
        cosines, sines = torch.ones(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        for axis, (size, steps) in enumerate(zip(self.denominators, places, strict=True)):
            if int(steps.abs().max()) * size >= 2**63:
                raise ArithmeticError(f"frequencies: places up to {int(steps.abs().max())} are beyond 64-bit integers")
            angles = (self.numerators[:, axis, None] * steps % size).double().div_(size).mul_(2 * math.pi)
            cosine, sine = angles.cos()[:, None], angles.sin_()[:, None]
            if not axis:
                cosines, sines = cosine[:, 0], sine[:, 0]
                continue
            cosines, sines = cosines[:, :, None], sines[:, :, None]
            cosines, sines = (
                (cosines * cosine).addcmul_(sines, sine, value=-1).flatten(1),
                (sines * cosine).addcmul_(cosines, sine).flatten(1),
            )
        return cosines, sines

    def values(self) -> Tensor:
        """ω in float64, rounded."""
        return self.numerators.double() * (2 * math.pi / torch.tensor(self.denominators, dtype=torch.float64))


@dataclass(frozen=True)
class Cells:
    """Cells of one radius around their centres, which reach one unit of the numerators to either side on each axis.

    The first two axes share diamonds, a single or third axis is cut into intervals.
    """

    centres: Frequencies
    radius: float

    @classmethod
    def cover(cls, degrees: list[float], radius: float) -> "Cells":
        """Cells of at most this radius that cover half of the torus, on axes with positive degrees."""
        diamonds, intervals = _parts(degrees)
        counts = _counts(degrees, radius)
        total, units, points = 0.0, [], []
        if diamonds:
            total = max(
                up(up(up(2 * math.pi) * degree) / count) for degree, count in zip(diamonds, counts, strict=False)
            )
            units += counts[:2]
            points += [torch.arange(count) for count in counts[:2]]
        for degree, count in zip(intervals, counts[len(diamonds) :], strict=True):  # of two units each
            total = up(total + up(up(up(math.pi) * degree) / count))
            units.append(2 * count)
            points.append(2 * torch.arange(count))
        if units:  # the last axis from 0 to π, both included
            points[-1] = points[-1][points[-1] <= units[-1] // 2]
        centres = all_combinations(points)
        if diamonds:
            centres = centres[(centres[:, 0] + centres[:, 1]) % 2 == 0]
            # Where the last axis is its own mirror image, half of the one before is enough.
            mirrored = (2 * centres[:, -1] % units[-1] == 0) & (2 * centres[:, -2] > units[-2])
            centres = centres[~mirrored]
        return cls(Frequencies(centres, tuple(units)), total)

    @staticmethod
    def most(degrees: list[float], radius: float) -> int:
        """At least as many cells as such a cover has; so many are made, and those of them that it needs are kept."""
        return math.prod(_counts(degrees, radius))

    def choose(self, index: Tensor) -> "Cells":
        """Some of the cells."""
        return Cells(self.centres[index], self.radius)

    def split(self) -> "Cells":
        """Every cell cut into halves on every axis: half the radius."""
        axes = len(self.centres.denominators)
        steps = torch.eye(axes, dtype=torch.int64)
        points = 2 * self.centres.numerators
        if axes > 1:
            points = (points[:, None] + torch.cat([steps[:2], -steps[:2]])).flatten(0, 1)
        if axes != 2:
            points = (points[:, None] + torch.stack([steps[-1], -steps[-1]])).flatten(0, 1)
        return Cells(Frequencies(points, tuple(2 * size for size in self.centres.denominators)), up(self.radius / 2))

    def __len__(self) -> int:
        return len(self.centres)


def all_combinations(ranges: list[Tensor]) -> Tensor:
    """All combinations in lexicographic order, a row each; without ranges the empty one."""
    if not ranges:
        return torch.zeros(1, 0, dtype=torch.int64)
    return torch.cartesian_prod(*ranges).reshape(-1, len(ranges))


def _parts(degrees: list[float]) -> tuple[list[float], list[float]]:
    """The axes that share diamonds, and those that are cut into intervals."""
    return (degrees[:2], degrees[2:]) if len(degrees) > 1 else ([], degrees)


def _counts(degrees: list[float], radius: float) -> list[int]:
    """How many cells of at most this radius go around each axis."""
    diamonds, intervals = _parts(degrees)
    share = 1 / (1 + len(intervals) / 2) if diamonds else 0.0  # makes the product of the sides largest
    # An even number of units closes the torus.
    return [2 * math.ceil(math.pi * degree / (share * radius)) for degree in diamonds] + [
        2 * math.ceil(math.pi * degree / (2 * (1 - share) * radius)) for degree in intervals
    ]
