r"""Batches of Hermitian matrices: which of them have a Cholesky factor, and how far it is from them.

LAPACK works on one matrix after the other. Here the factorisation goes over the whole batch, so that most of it is
batched products, and its sums are shorter. A panel of rows of R with R*R = A is found by halves, the second half after
what the first contributes to it was subtracted, down to blocks; then what the panel contributes to the rest is:

    R_kk*R_kk = A_kk - Σ_(j<k) R_jk*R_jk,      R_kk*R_kl = A_kl - Σ_(j<k) R_jk*R_jl.

So an entry of A is a sum of products r̄·r of which each meets the roundings of a sum over a panel at most, of the
subtractions before it, and in its own block of the factorisation or the triangular system: not more than in a
conventional sum of (rows of a panel) + (number of panels) + (halvings of a panel) products. With ρ of such a sum,
|R*R - A| <= ρ|R*||R|, as always.

The norm of |R*||R| is at most tr(A)/(1 - ρ), which is known beforehand, and at most the largest entry of |R*||R|·1,
which is known afterwards: where off-diagonal entries are small it is much smaller, and float32 is enough.
"""

import torch
from torch import Tensor

# Order of blocks, rows of a panel, rows updated at a time. Wide panels read and write the rest of the matrix less
# often; narrow ones have shorter sums.
BLOCK, PANEL, ROWS = 32, 128, 64

# Orders from which it is faster than LAPACK.
SMALLEST = 96


def is_blocked(order: int) -> bool:
    """Whether matrices of that order go block by block."""
    return order >= SMALLEST


def terms(order: int) -> int:
    """At least as many products as the sums of :func:`factorise` count for, beside those of the pivots."""
    if not is_blocked(order):
        return order
    halvings = (-(-PANEL // BLOCK) - 1).bit_length()
    return min(order, PANEL) + -(-order // PANEL) + halvings + 1


def factorise(matrices: Tensor, *, measure: bool) -> tuple[Tensor, Tensor | None]:
    """For each of the matrices, which are overwritten, whether its Cholesky factorisation ran to the end.

    Args:
        matrices: Hermitian.
        measure: of matrices that go block by block, whether to look at the size of their factors.

    Returns:
        That, and the largest entry of |R*||R|·1, rounded, in float64, if it was looked at. Moduli are replaced by sums
        of absolute parts there, which are not smaller.
    """
    order = matrices.shape[-1]
    if not is_blocked(order):
        return torch.linalg.cholesky_ex(matrices)[1] == 0, None
    failed = torch.zeros(len(matrices), dtype=torch.bool, device=matrices.device)
    for start in range(0, order, PANEL):
        stop = min(start + PANEL, order)
        _eliminate(matrices, start, stop, failed)
        if bool(failed.all()):
            break
        _subtract(matrices, start, stop, order)
    return ~failed, _sizes(matrices) if measure else None


def _eliminate(matrices: Tensor, start: int, stop: int, failed: Tensor) -> None:
    """Replace these rows, from the diagonal on, by those of R; the rows above have been subtracted."""
    if stop - start > BLOCK:
        middle = start + BLOCK * (1 << ((-(-(stop - start) // BLOCK) - 1).bit_length() - 1))
        _eliminate(matrices, start, middle, failed)
        _subtract(matrices, start, middle, stop)
        _eliminate(matrices, middle, stop, failed)
        return
    rows = matrices[:, start:stop]
    factor, info = torch.linalg.cholesky_ex(rows[:, :, start:stop])
    failed |= info != 0
    rows[:, :, start:stop] = factor.mH
    if stop < matrices.shape[-1]:
        # Transposed, as rows that lie one after the other are columns for LAPACK: nothing has to be rearranged.
        right = rows[:, :, stop:].mT
        rows[:, :, stop:] = torch.linalg.solve_triangular(factor.mT, right, upper=True, left=False).mT


def _subtract(matrices: Tensor, start: int, middle: int, stop: int) -> None:
    """What the rows of R from ``start`` to ``middle`` contribute to those from there to ``stop``."""
    for row in range(middle, stop, ROWS):
        end = min(row + ROWS, stop)
        # Not in one call with the product, in which the sum might begin with what it is subtracted from: then that
        # would be rounded once for each of the products.
        product = torch.bmm(matrices[:, start:middle, row:end].mH, matrices[:, start:middle, row:])
        matrices[:, row:end, row:].sub_(product)


def _sizes(matrices: Tensor) -> Tensor:
    """The largest entry of |R*||R|·1 of each, from the upper triangles; overwritten, as new memory takes longer."""
    moduli = matrices.triu_()
    if matrices.is_complex():  # both parts of an entry side by side
        moduli = torch.view_as_real(moduli).flatten(-2)
    moduli = moduli.abs_()
    sums = (moduli.sum(-1)[:, None] @ moduli).double().reshape(*matrices.shape[:2], -1)
    return sums.sum(-1).amax(-1).nan_to_num_(torch.inf, torch.inf)
