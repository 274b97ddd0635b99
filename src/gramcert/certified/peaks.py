"""Where λ_max(G) is large: a few Krylov steps rank frequencies, Newton steps climb from the best. Nothing certified."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gramcert.certified.frequencies import Frequencies
from gramcert.certified.gram_symbol import GramSymbol
from gramcert.certified.lanczos import KRYLOV_STEPS, solve_below, top_eigenpair

# Krylov steps that rank frequencies: so many, and one more for so many rows of a matrix.
RANKING_STEPS, ROWS_FOR_A_STEP = 10, 96

# Krylov steps at most for a symbol that is one matrix, which is looked at once.
SINGLE_STEPS = 400

# Newton steps that follow a maximum.
FOLLOWING_STEPS = 12

# A climb is given up where so many times what its next step promises would not lead above what is known.
PROMISES = 3.0

# Tolerances from which single precision is enough to climb.
COARSE = 1e-4


class Peaks:
    """The search on one symbol.

    Args:
        symbol: G.
        tol: relative tolerance of σ that the climb is for.
        moving: whether frequencies may be moved, or stay on a grid.
    """

    def __init__(self, symbol: GramSymbol, tol: float, *, moving: bool) -> None:
        self._symbol, self._tol, self._moving = symbol, tol, moving
        self._generator = torch.Generator().manual_seed(0)

    def random(self, count: int, dtype: torch.dtype) -> Tensor:
        """Gaussian vectors for G, a row each."""
        parts = torch.randn(count, self._symbol.order, 2, generator=self._generator, dtype=dtype)
        return torch.view_as_complex(parts) if self._symbol.is_complex else parts[..., 0]

    def rank(
        self, frequencies: Frequencies, wanted: int, tick: Callable[[float], None], sign: int = 1, shift: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The frequencies with the largest λ_max(sign·G): their indices and vectors; and estimates for all of them.

        ``shift`` is added to sign·G while it is looked at, which makes it positive.
        """
        dtype = torch.float32
        if sign > 0 and not self._symbol.is_complex:  # nothing to choose from: the climb is all
            return torch.zeros(1, dtype=torch.int64), self.random(1, dtype), torch.tensor([self._symbol.crude])
        estimates: list[Tensor] = []
        rows: list[Tensor] = []
        for part in frequencies.split(self._symbol.batch(dtype)):
            tick(sum(len(few) for few in estimates) / len(frequencies))
            matrices = self._symbol.lend(part, dtype, sign)
            if shift:
                matrices.diagonal(dim1=-2, dim2=-1).add_(shift)
            values, vectors = _krylov(matrices, self.random(len(part), dtype))
            estimates.append(values - shift)
            rows.append(vectors)
        together = torch.cat(estimates)
        best = together.topk(min(wanted, len(together))).indices
        return best, torch.cat(rows)[best], together

    def follow(
        self, start: Frequencies, vector: Tensor, known: float = 0.0, *, dense: bool
    ) -> tuple[Frequencies, Tensor]:
        """A local maximum of λ_max from one frequency on, and its vector; given up if not promising more than known."""
        moving = self._moving and self._symbol.is_complex
        frequency, value, enough = start, -math.inf, self._tol / 20
        dtype = torch.float32 if self._tol >= COARSE and not dense else torch.float64
        best = start, vector.to(torch.complex128 if self._symbol.is_complex else torch.float64)
        step = torch.zeros(len(self._symbol.axes), dtype=torch.float64)
        for _ in range(FOLLOWING_STEPS if moving else 1):
            matrix = self._symbol.evaluate(frequency, dtype)[0]
            steps = KRYLOV_STEPS if self._symbol.is_complex else SINGLE_STEPS
            new, vector = top_eigenpair(matrix, best[1].to(matrix.dtype), enough, steps, dense=dense)
            promised = math.inf
            if new > value:
                value, best = new, (frequency, vector.to(best[1].dtype))
                if moving:
                    step, promised = self._newton_step(*best, matrix, value)
            else:  # too far
                step /= 2
            if promised <= enough * value or value + PROMISES * promised <= known:
                break
            frequency = Frequencies.nearest(best[0].values()[0] + step)
        return best

    def _newton_step(
        self, frequency: Frequencies, vector: Tensor, matrix: Tensor, value: float
    ) -> tuple[Tensor, float]:
        """The Newton step for λ_max = ``value`` of G = ``matrix`` with its vector u, and what it should gain.

        λ_max is touched from below by the trigonometric polynomial u*G(ω)u. As u turns with ω it rises by more than
        that: by δ·B*(λ - G)⁻¹B·δ, where B has the columns (∂G/∂ω_j)u, without their parts along u.
        """
        lags, correlations = self._symbol.lags.double(), self._symbol.correlations
        unit = vector / vector.norm()
        parts = torch.view_as_real(unit)
        images = torch.view_as_complex(correlations @ parts)
        adjoint = torch.view_as_complex(correlations.mT @ parts)
        waves = torch.exp(-1j * (lags @ frequency.values()[0]))
        terms = (images @ unit.conj()) * waves
        gradient = 2 * terms.imag @ lags
        hessian = -2 * lags.T @ (terms.real[:, None] * lags)
        changes = ((lags.T * waves) @ images - (lags.T * waves.conj()) @ adjoint).T
        changes = (changes - unit[:, None] * (unit.conj() @ changes)).to(matrix.dtype)
        turning = 2 * (changes.mH @ solve_below(matrix, value, changes)).real
        hessian += turning.nan_to_num(0.0, 0.0, 0.0)
        curvatures, directions = torch.linalg.eigh(hessian)
        step: Tensor = directions @ ((directions.T @ gradient) / curvatures.abs().clamp_min(1e-300))
        limit = 0.5 / max(self._symbol.degrees)
        step *= min(1.0, limit / max(float(step.abs().max()), 1e-300))
        return step, float(gradient @ step) / 2


def _krylov(matrices: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """The largest Ritz values of positive matrices and their vectors, from a few Lanczos steps for each."""
    steps = min(RANKING_STEPS + start.shape[1] // ROWS_FOR_A_STEP, start.shape[1])
    vector, before, length = start, torch.zeros_like(start), start.norm(dim=1)
    scale = torch.zeros_like(length)
    basis, diagonal, off = [], [], []
    for _ in range(steps):
        known = length > 1e-6 * scale  # what has become nothing but rounding stays zero
        vector = torch.where(known[:, None], vector / length.clamp_min(1e-30)[:, None], 0.0)
        off.append(torch.where(known, length, 0.0))
        basis.append(vector)
        image = (matrices @ vector[..., None])[..., 0]
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
