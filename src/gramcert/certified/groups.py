r"""Which of many groups can matter: an upper bound of σ(E) for all of them at once, rounding included.

A depthwise layer has hundreds of groups, and the search for the largest σ(E) of one after the other looks hundreds of
times for maxima that are far below the largest. Here all groups are evaluated on one grid of frequencies, and read by
‖E‖_F, which for one row or column is σ(E) itself, or for a few rows by the nearer ‖EE*‖_F^½. What is proved is

* on the grid of a circulant: that circulant's norm;
* on any grid of n_j > k_j - 1 points per axis, for all frequencies: the largest value times Π_j 1/cos(πd_j/n_j), d_j
  the degrees of the symbol (Ehlich and Zeller; see ``docs/theory.md``).
"""

import math

import torch
from torch import Tensor

from gramcert.certified.frequencies import Frequencies
from gramcert.certified.gram_symbol import crude_norm
from gramcert.certified.work import Work
from gramcert.geometry.symbol import FrequencyGrid
from gramcert.rounding import TWIDDLE_ERROR, complex_gamma, down, gamma, next_up, row_norms_up, underflow, up

# Points per tap and axis of the grid for all frequencies: what it misses is about (π/2/so many)²/2 per axis.
POINTS_PER_TAP = 12

# Rows up to which ‖EE*‖_F^½ is near σ(E).
MOST_ROWS = 32

# Bytes worked on at a time, and operations in all, about a tenth of a second.
WORKED_ON, MOST_OPERATIONS = 2**25, 4e9

# Bytes for each entry of a symbol: real and imaginary part, their squares, the symbol, its adjoint; of a Gram matrix,
# with squares; for each tap at a frequency: angles, sines, cosines, and those of the axes before. And operations that
# a sine or cosine is worth.
SYMBOL_BYTES, GRAM_BYTES, WAVE_BYTES, WAVE_OPERATIONS = 64, 48, 64, 64


def group_bounds(kernels: Tensor, work: Work, grids: tuple[FrequencyGrid, ...] = ()) -> list[float]:
    """Upper bounds of σ(E) of stride-1 kernels (groups, out, in, *taps), each with its own.

    Args:
        kernels: in float64.
        work: limits; where they leave no room the bounds are sums of absolute weights.
        grids: the bound may be that over the points of any of these grids, if there are some; else it is over all
            frequencies, as it is where that is less work.
    """
    crude = [crude_norm(kernel) for kernel in kernels]
    everywhere = FrequencyGrid.unshifted(tuple(POINTS_PER_TAP * taps if taps > 1 else 1 for taps in kernels.shape[3:]))
    chosen = [grid for grid in grids if len(grid) <= len(everywhere)]
    factor = 1.0 if chosen else _sampling_factor(kernels.shape[3:], everywhere.sizes)
    chosen = chosen or [everywhere]
    least, most = sorted(kernels.shape[1:3])
    taps, points = kernels[0, 0, 0].numel(), sum(map(len, chosen))
    each = len(kernels) * least * (SYMBOL_BYTES * most + GRAM_BYTES * least) + WAVE_BYTES * taps
    operations = points * (4 * kernels.numel() + 8 * len(kernels) * least**2 * most + WAVE_OPERATIONS * taps)
    # The kernels with their taps first, and the grids.
    fixed = 24 * kernels.numel() + 32 * (kernels.dim() - 3) * points
    batch = min(WORKED_ON, work.available - fixed) // each
    if len(kernels) == 1 or least > MOST_ROWS or operations > MOST_OPERATIONS or batch < 1:
        return crude
    found = [_largest_on(kernels, grid, batch, work) for grid in chosen]
    nearest = next_up(torch.stack(found).amin(0) * factor)
    return [min(pair) for pair in zip(crude, nearest.tolist(), strict=True)]


def _sampling_factor(taps: torch.Size, points: tuple[int, ...]) -> float:
    """Π_j 1/cos(πd_j/n_j), d_j = (k_j - 1)/2, rounded upward."""
    factor = 1.0
    for count, size in zip(taps, points, strict=True):
        if count > 1:
            angle = up(up(up(math.pi) * (count - 1)) / (2 * size))
            factor = up(factor * up(1 / down(down(math.cos(angle)))))
    return factor


def _largest_on(kernels: Tensor, grid: FrequencyGrid, batch: int, work: Work) -> Tensor:
    """Upper bounds of σ(E) on a grid, one for each group; infinite if the time is over."""
    groups, outputs, inputs = kernels.shape[:3]
    taps = kernels.flatten(3).permute(3, 0, 1, 2)
    if outputs > inputs:
        taps = taps.mT
    count, shape = len(taps), taps.shape[1:]
    rows = taps.flatten(1)
    places = [torch.arange(size) for size in kernels.shape[3:]]
    squares, fourth = torch.zeros(groups, dtype=torch.float64), torch.zeros(groups, dtype=torch.float64)
    for part in Frequencies.of_grid(grid, list(range(len(places)))).split(batch):
        if work.remaining <= 0:
            return squares.fill_(math.inf)
        cosines, sines = part.waves(places)
        real, imaginary = ((waves @ rows).reshape(-1, *shape) for waves in (cosines, sines))
        energy = (real.square() + imaginary.square()).sum((-2, -1))
        squares = torch.maximum(squares, energy.amax(0))
        if shape[1] > 1:
            symbols = torch.complex(real, imaginary)
            gram = torch.view_as_real(symbols @ symbols.mH)
            fourth = torch.maximum(fourth, gram.square().sum((-3, -2, -1)).amax(0))
    # Sums of squares, each rounded; then what the product of symbols lost, in norm at most √2·γ_2n·‖E‖_F².
    energies = _sum_up(squares, 2 * shape[1] * shape[2])
    if shape[1] > 1:
        lost = up(complex_gamma(shape[2] + 2)) * energies + underflow(8 * math.prod(shape[1:]))
        roots = next_up(next_up(_sum_up(fourth, 2 * shape[1] ** 2)).sqrt())
        energies = torch.minimum(energies, next_up(roots + next_up(lost)))
    # An entry of E is off by its sums over the taps and by its twiddles: that much of Σ_a |K_a|.
    amounts = row_norms_up(next_up(taps.abs().sum(0) * (1 + 2 * gamma(count + 2))).flatten(1))
    relative = up(2 * gamma(count + 2) + 2 * TWIDDLE_ERROR)
    error = next_up(next_up(relative * amounts) + underflow(8 * count * math.prod(shape[1:])))
    return next_up(next_up(energies.sqrt()) + error)


def _sum_up(sums: Tensor, terms: int) -> Tensor:
    """Upper bounds of sums of so many squares."""
    return next_up(next_up(sums * (1 + 2 * gamma(terms + 2))) + underflow(2 * terms))
