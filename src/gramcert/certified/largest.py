r"""The k largest singular values of a layer whose matrix is too large for a decomposition.

With the Gram matrix G of the smaller side, k orthonormal vectors V and numbers Θ from block Krylov iteration:

* the residual ρ = ‖GV - VΘ‖ says that G differs by at most 2ρ from a matrix with the eigenvalues Θ on the span of V and
  those of B, the compression of G to the complement, there;
* a Cholesky factor of s·I - G + θ₁VVᵀ proves ‖B‖ <= s, as the last term vanishes on the complement.

So θ_i - 2ρ <= λ_i(G) <= max(θ_i, s) + 2ρ for i <= k. That V is only nearly orthonormal, by α = ‖VᵀV - I‖, adds at most
(‖G‖ + θ₁)α to the residual.
"""

import math

import torch
from torch import Tensor

from gramcert.certified.banded import BandedGram
from gramcert.rounding import (
    cholesky_error,
    diagonal_error,
    down,
    gamma,
    norm_up,
    root_down,
    root_up,
    total_up,
    underflow,
    up,
)

# Vectors beside the wanted ones in each block, and the dimension at which the Krylov space is restarted.
SPARE, DIMENSION = 6, 240

# Restarts, and the relative residual at which they end.
RESTARTS, ENOUGH = 40, 1e-13


def largest_values(gram: BandedGram, count: int) -> tuple[Tensor, float]:
    """The ``count`` largest singular values and a bound of the error of each."""
    matrix, storing = gram.dense(), gram.storing_error
    vectors, values = _krylov(matrix, count)
    order = gram.order
    rows = total_up(matrix.abs())  # ‖|G|‖_∞, above ‖G‖
    lengths = up(1.1 * math.sqrt(count))  # above ‖V‖_F
    product = up(gamma(order + 2) * up(rows * lengths))
    residual = up(norm_up(matrix @ vectors - vectors * values) + up(4 * product))
    defect = up(
        norm_up(vectors.T @ vectors - torch.eye(count, dtype=torch.float64))
        + up(up(2 * gamma(order)) * up(lengths * lengths))
    )
    if not defect < 0.1:
        raise ArithmeticError("singular_values: the Krylov vectors are not orthonormal")
    doubt = up(2 * up(residual + up(up(rows + up(float(values[0]))) * defect)) + storing)
    ceiling = _ceiling(matrix, vectors, values, doubt)
    lower = [down(float(value) - doubt) for value in values]
    upper = [up(max(float(value), ceiling) + doubt) for value in values]
    found = [math.sqrt(max(0.0, float(value))) for value in values]
    errors = [
        max(up(root_up(high) - middle), up(middle - root_down(low)))
        for low, middle, high in zip(lower, found, upper, strict=True)
    ]
    return torch.tensor(found, dtype=torch.float64), max(errors)


def _krylov(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """About the top eigenvectors and eigenvalues, by block Krylov iteration restarted with the best vectors."""
    order = len(matrix)
    width = min(order, count + SPARE)
    generator = torch.Generator().manual_seed(0)
    block = torch.linalg.qr(torch.randn(order, width, generator=generator, dtype=torch.float64))[0]
    for _ in range(RESTARTS):
        basis = [block]
        for _ in range(max(1, min(order, DIMENSION) // width - 1)):
            basis.append(torch.linalg.qr(matrix @ basis[-1])[0])
        space = torch.linalg.qr(torch.cat(basis, 1)[:, :order])[0]
        values, weights = torch.linalg.eigh(space.T @ (matrix @ space))
        block = space @ weights[:, -width:].flip(1)
        top = values[-width:].flip(0)
        wanted = block[:, :count]
        if float((matrix @ wanted - wanted * top[:count]).norm()) <= ENOUGH * float(top[0]) * math.sqrt(order):
            break
    return torch.linalg.qr(wanted)[0], top[:count]


def _ceiling(matrix: Tensor, vectors: Tensor, values: Tensor, doubt: float) -> float:
    """A proved bound of G on the complement of the vectors, as little above the last value as a few tries find."""
    order, count = vectors.shape
    largest, last = float(values[0]), float(values[-1])
    lifted = vectors @ vectors.T * largest
    # The product with its factor: γ·θ₁‖|V||V|ᵀ‖, and adding the three terms.
    lifting = up(gamma(count + 3) * up(largest * up(1.3 * count)))
    adding = up(lifting + up(4 * gamma(3) * up(total_up(matrix.abs()) + largest)))
    lifted -= matrix
    excess = doubt + cholesky_error(order, order * (last + largest), torch.float64, is_complex=False)
    while last + excess < 2 * largest:
        level = last + excess
        trial = lifted.clone()
        diagonal = trial.diagonal()
        size = float(diagonal.abs().max()) + level
        # Terms of the trace may cancel: the sum is off by γ times their sizes.
        doubt = up(up(gamma(order + 2) * size) + diagonal_error(2 * size, torch.float64))
        trace = up(max(0.0, up(float(diagonal.sum()) + order * level)) + up(2 * order * doubt))
        error = up(cholesky_error(order, trace, torch.float64, is_complex=False) + adding)
        error = up(up(error + diagonal_error(size, torch.float64)) + underflow(order * order))
        diagonal.add_(down(level) - error)
        if not int(torch.linalg.cholesky_ex(trial)[1]):
            return level
        excess *= 4
    return up(total_up(matrix.abs()))
