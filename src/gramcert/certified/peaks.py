"""Where λ_max(±G) is large: a few Krylov steps rank frequencies, Newton steps climb from the best. Nothing certified.

The largest eigenvalue of -G, minus the smallest of G, is out of reach of Krylov steps with G where it is small: they
are made with the inverse then.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gramcert.certified.frequencies import Frequencies
from gramcert.certified.gram_symbol import GramSymbol
from gramcert.certified.lanczos import KRYLOV_STEPS, bottom_eigenpair, solve_below, top_eigenpair
from gramcert.certified.staircase import diagonals, staircase, times, whole

# Krylov steps that rank frequencies: so many, and one more for so many rows of a matrix.
RANKING_STEPS, ROWS_FOR_A_STEP = 10, 96

# Krylov steps at most for a symbol that is one matrix, which is looked at once.
SINGLE_STEPS = 400

# Newton steps that follow a maximum.
FOLLOWING_STEPS = 12

# A climb is given up where so many times what its next step promises would not lead above what is known.
PROMISES = 3.0

# What is added to G before it is inverted, in units of the mean eigenvalue; and what -G is shifted by where eigenvalues
# are near to their mean.
REGULAR, ABOVE_ALL = 1e-5, 2.5

# Tolerances from which single precision is enough to climb.
COARSE = 1e-4


class Peaks:
    """The search on one symbol.

    Args:
        symbol: G.
        tol: relative tolerance of σ that the climb is for.
        moving: whether frequencies may be moved, or stay on a grid.
        sign: whether to climb on G or on -G.
    """

    def __init__(self, symbol: GramSymbol, tol: float, *, moving: bool, sign: int = 1) -> None:
        self._symbol, self._tol, self._moving, self._sign = symbol, tol, moving, sign
        self._generator = torch.Generator().manual_seed(0)

    def random(self, count: int, dtype: torch.dtype) -> Tensor:
        """Gaussian vectors for G, a row each."""
        parts = torch.randn(count, self._symbol.order, 2, generator=self._generator, dtype=dtype)
        return torch.view_as_complex(parts) if self._symbol.is_complex else parts[..., 0]

    def rank(
        self,
        frequencies: Frequencies,
        wanted: int,
        tick: Callable[[float], None],
        sign: int = 1,
        *,
        is_flat: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The frequencies with the largest λ_max(sign·G): their indices and vectors; and estimates for all of them.

        Of a flat symbol, all of whose eigenvalues are near to their mean, the smallest are as easily found as the
        largest ones, without inverses.
        """
        dtype = torch.float32
        if not self._symbol.is_complex:  # nothing to choose from: the climb is all
            value = self._symbol.crude if sign > 0 else 0.0
            return torch.zeros(1, dtype=torch.int64), self.random(1, dtype), torch.tensor([value])
        estimates: list[Tensor] = []
        rows: list[Tensor] = []
        for part in frequencies.split(self._symbol.batch(dtype)):
            tick(sum(len(few) for few in estimates) / len(frequencies))
            start = self.random(len(part), dtype)
            if sign > 0:
                values, vectors = _krylov(self._symbol.lend(part, dtype), start)
            elif is_flat:
                values, vectors = _krylov(self._shifted(part, dtype, -1, ABOVE_ALL), start)
                values -= ABOVE_ALL * self._symbol.mean
            else:
                inverses = torch.linalg.inv_ex(whole(self._shifted(part, dtype, 1, REGULAR)))[0]
                values, vectors = _krylov(staircase(inverses.nan_to_num_(0.0, 0.0, 0.0)), start)
                values = REGULAR * self._symbol.mean - 1 / values.clamp_min(1e-30)
            estimates.append(values)
            rows.append(vectors)
        together = torch.cat(estimates)
        best = together.topk(min(wanted, len(together))).indices
        return best, torch.cat(rows)[best], together

    def _shifted(self, frequencies: Frequencies, dtype: torch.dtype, sign: int, amount: float) -> list[Tensor]:
        """sign·G and so many times the mean eigenvalue, in memory that the next call uses again."""
        panels = self._symbol.lend(frequencies, dtype, sign)
        for diagonal in diagonals(panels):
            diagonal.add_(amount * self._symbol.mean)
        return panels

    def follow(
        self, start: Frequencies, vector: Tensor, known: float = -math.inf, *, dense: bool
    ) -> tuple[Frequencies, Tensor]:
        """A local maximum of λ_max from one frequency on, and its vector; given up if not promising more than known."""
        moving = self._moving and self._symbol.is_complex
        frequency, value, enough = start, -math.inf, self._tol / 20
        is_coarse = self._tol >= COARSE and not dense and self._sign > 0
        dtype = torch.float32 if is_coarse else torch.float64
        best = start, vector.to(torch.complex128 if self._symbol.is_complex else torch.float64)
        step = torch.zeros(len(self._symbol.axes), dtype=torch.float64)
        for _ in range(FOLLOWING_STEPS if moving else 1):
            matrix = self._symbol.evaluate(frequency, dtype)[0]
            steps = KRYLOV_STEPS if self._symbol.is_complex else SINGLE_STEPS
            if self._sign > 0:
                new, vector = top_eigenpair(matrix, best[1].to(matrix.dtype), enough, steps, dense=dense)
            else:
                least, vector = bottom_eigenpair(matrix, best[1], enough, steps)
                new = -least
            promised = math.inf
            if new > value:
                value, best = new, (frequency, vector.to(best[1].dtype))
                if moving:
                    step, promised = self._newton_step(*best, matrix, value)
            else:  # too far
                step /= 2
            if promised <= enough * abs(value) or value + PROMISES * promised <= known:
                break
            frequency = Frequencies.nearest(best[0].values()[0] + step)
        return best

    def _newton_step(
        self, frequency: Frequencies, vector: Tensor, matrix: Tensor, value: float
    ) -> tuple[Tensor, float]:
        """The Newton step for λ_max(H) = ``value`` with its vector u, and what it should gain; H = ±G, G = ``matrix``.

        λ_max is touched from below by the trigonometric polynomial u*H(ω)u. As u turns with ω it rises by more than
        that: by δ·B*(λ - H)⁻¹B·δ, where B has the columns (∂H/∂ω_j)u, without their parts along u.
        """
        lags, correlations = self._symbol.lags.double(), self._symbol.correlations
        unit = vector / vector.norm()
        parts = torch.view_as_real(unit)
        images = torch.view_as_complex(correlations @ parts)
        adjoint = torch.view_as_complex(correlations.mT @ parts)
        waves = torch.exp(-1j * (lags @ frequency.values()[0]))
        terms = (images @ unit.conj()) * waves
        gradient = self._sign * 2 * terms.imag @ lags
        hessian = self._sign * -2 * lags.T @ (terms.real[:, None] * lags)
        changes = ((lags.T * waves) @ images - (lags.T * waves.conj()) @ adjoint).T
        changes = (changes - unit[:, None] * (unit.conj() @ changes)).to(matrix.dtype)
        if self._sign > 0:
            solved = solve_below(matrix, value, changes)
        else:  # G - λ, positive but for u, which is lifted: a few steps would not do where it is nearly singular
            lifted = matrix + self._symbol.mean * torch.outer(unit, unit.conj())
            lifted.diagonal().add_(value)
            solved = torch.linalg.solve_ex(lifted, changes)[0]
        turning = 2 * (changes.mH @ solved).real
        hessian += turning.nan_to_num(0.0, 0.0, 0.0)
        curvatures, directions = torch.linalg.eigh(hessian)
        step: Tensor = directions @ ((directions.T @ gradient) / curvatures.abs().clamp_min(1e-300))
        limit = 0.5 / max(self._symbol.degrees)
        step *= min(1.0, limit / max(float(step.abs().max()), 1e-300))
        return step, float(gradient @ step) / 2


def _krylov(panels: list[Tensor], start: Tensor) -> tuple[Tensor, Tensor]:
    """The largest Ritz values of positive Hermitian matrices and their vectors, from a few Lanczos steps for each."""
    steps = min(RANKING_STEPS + start.shape[1] // ROWS_FOR_A_STEP, start.shape[1])
    vector, before, length = start, torch.zeros_like(start), start.norm(dim=1)
    scale = torch.zeros_like(length)
    basis, diagonal, off = [], [], []
    for _ in range(steps):
        known = length > 1e-6 * scale  # what has become nothing but rounding stays zero
        vector = torch.where(known[:, None], vector / length.clamp_min(1e-30)[:, None], 0.0)
        off.append(torch.where(known, length, 0.0))
        basis.append(vector)
        image = times(panels, vector)
        diagonal.append((vector.conj() * image).sum(1).real)
        scale = torch.maximum(scale, diagonal[-1])
        image = image - diagonal[-1][:, None] * vector - off[-1][:, None] * before
        vector, before, length = image, vector, image.norm(dim=1)
    tridiagonal = torch.diag_embed(torch.stack(diagonal, 1))
    side = torch.stack(off[1:], 1) if steps > 1 else start.new_zeros(len(start), 0).real
    tridiagonal = tridiagonal + torch.diag_embed(side, 1) + torch.diag_embed(side, -1)
    values, weights = torch.linalg.eigh(tridiagonal)
    vectors = torch.einsum("kbn,bk->bn", torch.stack(basis), weights[:, :, -1].to(start.dtype))
    return values[:, -1], vectors
