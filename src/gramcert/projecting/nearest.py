r"""The nearest kernel whose symbols have singular values up to 1 on a grid: dual ascent, in floats; nothing proved.

With A the map from kernels to their symbols, whose adjoint is its pseudoinverse for the mean over the grid (see
:mod:`gramcert.projecting.sampled`), the problem is: ½‖P - K‖² as small as possible with σ(AP) <= 1 at each frequency.
Its dual has a matrix Y at each frequency and asks for the largest

    D(Y) = <K, A*Y> - ½‖A*Y‖² - mean_j ‖Y_j‖_*,      ‖·‖_* the sum of the singular values.

For every P that is allowed and every Y, ½‖P - K‖² >= D(Y): so √(2D) is a lower bound of the distance, whatever the
grid, since a grid asks for less than all frequencies do. At the optimum P = K - A*Y.

The gradient of the smooth part, A(K - A*Y), has a Lipschitz constant of 1, because AA* is a projector. A step of length
1 from Z to X = Z + A(K - A*Z) is followed by the shrinking of all singular values by 1, to Y = X - clip(X): that is
Dykstra's algorithm between clipping and truncation to the taps (Boyle and Dykstra 1986), and Nesterov's extrapolation
Z = Y + β(Y - Y') makes it several times faster (Beck and Teboulle 2009), with β started again where it points downhill
(O'Donoghue and Candès 2015).

Only frequencies where Y or σ(AP) > 1 calls for it take part in a step, and among those AA* has a smaller norm L: the
largest eigenvalue of Σ_j w_j t_j t_j*, t_j the e^(iaω_j) at the taps and w_j the weight in the mean. For one frequency
out of N it is taps/N. Steps of length 1/L, and singular values shrunk by that, are as safe, and isolated peaks, whose Y
has to become large, are reached in a few of them. Where taps wrap around a grid smaller than the kernel L exceeds 1.

What is saved:

* only singular values above 1 matter. Their right vectors move little from step to step, so after one decomposition a
  step of subspace iteration follows them: X*X times a basis, orthonormalised, and the Rayleigh-Ritz values in it. A
  singular value missed by a little is shrunk by less than it should be, and by more in the next step.
* a frequency with Y = 0 has nothing to shrink while σ(AK) + √taps·‖A*Z‖ < 1, since ‖E_K‖ <= Σ_a ‖K_a‖ <= √taps·‖K‖.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.projecting.sampled import Sampling

# Frequencies that are worked on at a time, in bytes of their symbols.
PART_BYTES = 2**20

# The basis holds so many times the singular values above 1, and some more; beyond a part of all, all are decomposed.
SPARE, MORE, MOST = 1.25, 4, 0.6

# What the norm of AA* may grow by without its steps being too long.
ROUNDING = 1e-3

# Steps between two looks at how near the optimum is.
LOOK_EVERY = 5


@dataclass(frozen=True)
class Nearest:
    """What was found: matrices near those that were asked for, a lower bound of the distance, and the steps made."""

    matrices: Tensor
    lower: float
    steps: int


def nearest(matrices: Tensor, hold: Tensor, sampling: Sampling, tops: Tensor, steps: int, gap: float) -> Nearest:
    """Bring the singular values of all symbols on a grid to about 1 or less, by the least change of the weights.

    Args:
        matrices: the weights, (taps, groups, rows, columns) with rows >= columns.
        hold: which of their entries are weights; the others stay zero.
        sampling: the grid.
        tops: the largest singular values there, from :func:`top_values`.
        steps: most steps of the ascent.
        gap: stop when what was found, scaled to be allowed on the grid, is within this part of the least distance.
    """
    parts = _parts(matrices, sampling, tops)
    reach = math.sqrt(len(matrices))
    spread = _spread([part.spread(part.tops > 1) for part in parts])
    moved = ahead = torch.zeros_like(matrices)  # A*Y and A*Z
    best, momentum, pull = 0.0, 1.0, 0.0
    done = 0
    while done < steps and spread > 0:
        far = reach * float(ahead.norm())
        active = [part for part in parts if part.is_used or float(part.tops[0]) + far >= 1]
        following, nuclear, against, tables = torch.zeros_like(matrices), 0.0, 0.0, []
        for part in active:
            taken = part.step(matrices - ahead, pull, 1 / spread)
            following += taken.added
            nuclear, against = nuclear + taken.nuclear, against + taken.against
            tables.append(taken.table)
        following *= hold
        done += 1
        value = float((matrices * following).sum() - following.square().sum() / 2) - nuclear
        best = max(best, value) if math.isfinite(value) else best
        if against > 0 or _spread(tables) > spread * (1 + ROUNDING):  # too far, or too long for those that took part
            momentum, spread = 1.0, _spread(tables)
        next_momentum = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        pull = (momentum - 1) / next_momentum
        ahead = following + pull * (following - moved)
        moved, momentum = following, next_momentum
        if done == 1 or done % LOOK_EVERY == 0:
            found = matrices - moved
            largest = max(1.0, *(part.largest(found) for part in active))
            if float((matrices - found / largest).norm()) <= (1 + gap) * math.sqrt(2 * best):
                break
    return Nearest(matrices - moved, math.sqrt(2 * best), done)


def _spread(tables: list[Tensor]) -> float:
    """The norm of AA* among frequencies whose tables Σ w_j t_j t_j* are given in portions."""
    return float(torch.linalg.eigvalsh(torch.stack(tables).sum(0))[-1].clamp_min(0))


def excess(symbols: Tensor, level: float, basis: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """X - clip(X) for singular values up to a level, those that were looked at, and their right vectors.

    With a basis, of those singular values whose vectors it is near to; otherwise of all.
    """
    if symbols.shape[-1] == 1:  # one column is its own singular vector
        squares = symbols.abs().square().sum(-2)
        vectors = torch.ones_like(symbols[..., :1, :])
    elif basis is None:
        squares, vectors = torch.linalg.eigh(symbols.mH @ symbols)
    else:
        basis = _orthonormal(symbols.mH @ (symbols @ basis))
        images = symbols @ basis
        squares, turn = torch.linalg.eigh(images.mH @ images)
        vectors = basis @ turn
    values = squares.clamp_min(0).sqrt()
    shrunk = 1 - level / values.clamp_min(level)
    return ((symbols @ vectors) * shrunk[..., None, :]) @ vectors.mH, values, vectors


def _orthonormal(columns: Tensor) -> Tensor:
    """A basis of the same space, by Cholesky factors of the Gram matrix; by reflections where that fails."""
    factor, info = torch.linalg.cholesky_ex(columns.mH @ columns)
    if bool(info.any()):
        columns, _ = torch.linalg.qr(columns)
        return columns
    basis: Tensor = torch.linalg.solve_triangular(factor.mH, columns, upper=True, left=False)
    return basis


@dataclass(frozen=True)
class _Taken:
    """What a step at some frequencies adds to each sum.

    Attributes:
        added: to A*Y.
        nuclear: to the nuclear norms.
        against: to how far downhill the momentum went.
        table: to that of :func:`_spread`.
    """

    added: Tensor
    nuclear: float
    against: float
    table: Tensor


class _Part:
    """Some frequencies: their dual variables, how these changed last, and where their large singular values are."""

    def __init__(self, sampling: Sampling, tops: Tensor) -> None:
        self.sampling, self.tops = sampling, tops
        self._dual: Tensor | None = None
        self._change: Tensor | None = None
        self._basis: Tensor | None = None

    @property
    def is_used(self) -> bool:
        """Whether its Y may differ from 0."""
        return self._dual is not None

    def spread(self, chosen: Tensor) -> Tensor:
        """Σ w_j t_j t_j* of the chosen frequencies and their conjugates, which real kernels have too."""
        waves = self.sampling.twiddles * (self.sampling.weights * chosen).sqrt()[:, None]
        return waves.real.mT @ waves.real + waves.imag.mT @ waves.imag

    def step(self, matrices: Tensor, pull: float, length: float) -> _Taken:
        """One step of the ascent."""
        symbols = self.sampling.symbols(matrices) * length
        if self._dual is None or self._change is None:
            self._dual, self._change = torch.zeros_like(symbols), torch.zeros_like(symbols)
        ahead = torch.add(self._dual, self._change, alpha=pull)
        symbols += ahead
        following, values, vectors = excess(symbols, length, self._basis)
        self._keep(values > length, vectors, symbols.shape[-1])
        change = following - self._dual
        weights = self.sampling.weights
        each = torch.linalg.vecdot((ahead - following).flatten(1), change.flatten(1)).real
        nuclear = (values - length).clamp_min(0).flatten(1).sum(1)
        self._dual, self._change = following, change
        added = self.sampling.adjoint(following)
        return _Taken(added, float(nuclear @ weights), float(each @ weights), self.spread(nuclear > 0))

    def largest(self, matrices: Tensor) -> float:
        """The largest singular value of these symbols in the basis; of one that was not needed, by all vectors."""
        symbols = self.sampling.symbols(matrices)
        images = symbols if self._basis is None else symbols @ self._basis
        return float(_norms(images).amax())

    def _keep(self, large: Tensor, vectors: Tensor, columns: int) -> None:
        """The vectors that the next step follows: none where they are too many, or may not have been all."""
        count = int(large.sum(-1).amax())
        wanted = int(SPARE * count) + MORE
        if wanted > MOST * columns or (self._basis is not None and count == large.shape[-1]):
            self._basis = None
        elif self._basis is None:
            self._basis = vectors[..., -wanted:].contiguous()
        else:
            self._basis = vectors


def top_values(matrices: Tensor, sampling: Sampling) -> Tensor:
    """The largest singular value of all groups at each frequency."""
    tops = []
    for some in torch.arange(len(sampling), device=matrices.device).split(_portion(matrices)):
        symbols = sampling.chosen(some).symbols(matrices)
        tops.append(_norms(symbols).amax(1))
    return torch.cat(tops)


def _norms(matrices: Tensor) -> Tensor:
    """The largest singular value of each matrix."""
    if matrices.shape[-1] == 1:
        return matrices.abs().square().sum((-2, -1)).sqrt()
    squares: Tensor = torch.linalg.eigvalsh(matrices.mH @ matrices)
    return squares[..., -1].clamp_min(0).sqrt()


def _parts(matrices: Tensor, sampling: Sampling, tops: Tensor) -> list[_Part]:
    """The frequencies in portions, those with the largest singular values first."""
    values, order = tops.sort(descending=True)
    each = _portion(matrices)
    return [
        _Part(sampling.chosen(some), largest)
        for some, largest in zip(order.split(each), values.split(each), strict=True)
    ]


def _portion(matrices: Tensor) -> int:
    return max(1, PART_BYTES // (2 * matrices.element_size() * matrices[0].numel()))
