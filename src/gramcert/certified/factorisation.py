r"""Batches of Hermitian matrices: which of them have a Cholesky factor, and how far it is from them.

LAPACK works on one matrix after the other. Here the factorisation goes block row by block row over the whole batch, so
that most of it is batched products, and its sums are shorter. For the blocks of R with R*R = A

    R_kk*R_kk = A_kk - Σ_(j<k) R_jk*R_jk,      R_kk*R_kl = A_kl - Σ_(j<k) R_jk*R_jl,

each j is subtracted on its own. So an entry of A is a sum of products r̄·r of which each meets the roundings of a sum
within one block, of the subtractions before it, and of the factorisation or the triangular system of its own block: as
many as in a conventional sum of (order of a block) + (number of blocks) products. With ρ of such a sum,
|R*R - A| <= ρ|R*||R|, as always.

The norm of |R*||R| is at most tr(A)/(1 - ρ), which is known beforehand, and at most the largest entry of |R*||R|·1,
which is known afterwards: where off-diagonal entries are small it is much smaller, and float32 is enough.
"""

import torch
from torch import Tensor

# Order of blocks, and rows updated at a time: whole blocks, whose triangles are both needed.
BLOCK, ROWS = 32, 128

# Orders from which it is faster than LAPACK.
SMALLEST = 96


def is_blocked(order: int) -> bool:
    """Whether matrices of that order go block by block."""
    return order >= SMALLEST


def terms(order: int) -> int:
    """At least as many products as the sums of :func:`factorise` count for, beside those of the pivots."""
    return BLOCK + -(-order // BLOCK) + 1 if is_blocked(order) else order


def factorise(matrices: Tensor, *, measure: bool) -> tuple[Tensor, Tensor | None]:
    """For each of the matrices, which are overwritten, whether its Cholesky factorisation ran to the end.

    Args:
        matrices: Hermitian.
        measure: of matrices that go block by block, whether to look at the size of their factors.

    Returns:
        That, and the largest entry of |R*||R|·1, rounded, in float64, if it was looked at. Moduli are replaced by sums
        of absolute parts there, which are not smaller.
    """
    assert ROWS % BLOCK == 0
    order = matrices.shape[-1]
    if not is_blocked(order):
        return torch.linalg.cholesky_ex(matrices)[1] == 0, None
    failed = torch.zeros(len(matrices), dtype=torch.bool, device=matrices.device)
    parts = 2 if matrices.is_complex() else 1  # of an entry, side by side
    sums = torch.zeros(len(matrices), order * parts, 1, dtype=torch.float64, device=matrices.device)
    for start in range(0, order, BLOCK):
        stop = min(start + BLOCK, order)
        factor, info = torch.linalg.cholesky_ex(matrices[:, start:stop, start:stop])
        failed |= info != 0
        if bool(failed.all()):
            break
        solved = torch.linalg.solve_triangular(factor, matrices[:, start:stop, stop:], upper=False)
        if measure:  # the rows of |R|: those of |L|ᵀ, the block on the diagonal, and of what was solved for
            here, beside = _absolute(factor).reshape(*factor.shape, parts).sum(-1), _absolute(solved)
            rows = here.sum(1)[..., None] + beside.sum(-1, keepdim=True)
            sums[:, start * parts : stop * parts : parts] += here @ rows
            sums[:, stop * parts :] += beside.mT @ rows
        adjoint = solved.mH.contiguous()
        for row in range(stop, order, ROWS):
            updated = slice(row - stop, row - stop + ROWS)
            # Not in one call with the product, in which the sum might begin with what it is subtracted from: then that
            # would be rounded once for each of the products.
            matrices[:, row : row + ROWS, row:].sub_(torch.bmm(adjoint[:, updated], solved[:, :, row - stop :]))
    if not measure:
        return ~failed, None
    return ~failed, sums.reshape(len(matrices), order, parts).sum(-1).amax(-1).nan_to_num_(torch.inf, torch.inf)


def _absolute(matrices: Tensor) -> Tensor:
    """Absolute values of real and imaginary parts, side by side."""
    return torch.view_as_real(matrices).abs().flatten(-2) if matrices.is_complex() else matrices.abs()
