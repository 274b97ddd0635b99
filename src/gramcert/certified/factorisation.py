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

from gramcert.certified.staircase import is_blocked, panel_starts

# Order of blocks, and rows updated at a time. These and the rows of a panel are multiples of a block, so that no block
# on the diagonal is updated in part. Wide panels read and write the rest of the matrix less often; narrow ones have
# shorter sums.
BLOCK, ROWS = 32, 64


def terms(order: int) -> int:
    """At least as many products as the sums of :func:`factorise` count for, beside those of the pivots."""
    if not is_blocked(order):
        return order
    starts = panel_starts(order)
    rows = starts[1] if len(starts) > 1 else order
    return rows + len(starts) + _halvings(rows) + 1


def _halvings(rows: int) -> int:
    """How often so many rows are halved before they are blocks."""
    return (-(-rows // BLOCK) - 1).bit_length()


def factorise(panels: list[Tensor], *, measure: bool) -> tuple[Tensor, Tensor | None]:
    """For each of the matrices, which are overwritten, whether its Cholesky factorisation ran to the end.

    Args:
        panels: upper rows of Hermitian matrices, see :mod:`~gramcert.certified.staircase`.
        measure: of matrices that go block by block, whether to look at the size of their factors.

    Returns:
        That, and the largest entry of |R*||R|·1, rounded, in float64, if it was looked at. Moduli are replaced by sums
        of absolute parts there, which are not smaller.
    """
    count, _, order = panels[0].shape
    if not is_blocked(order):
        return torch.linalg.cholesky_ex(panels[0])[1] == 0, None
    failed = torch.zeros(count, dtype=torch.bool, device=panels[0].device)
    for number, panel in enumerate(panels):
        _eliminate(panel, 0, panel.shape[1], failed)
        if bool(failed.all()):
            break
        for rest in panels[number + 1 :]:
            _subtract(panel[:, :, -rest.shape[-1] :], rest)
    return ~failed, _sizes(panels) if measure else None


def _eliminate(panel: Tensor, start: int, stop: int, failed: Tensor) -> None:
    """Replace these rows, from the diagonal on, by those of R; the rows above have been subtracted."""
    if stop - start > BLOCK:
        middle = start + (BLOCK << (_halvings(stop - start) - 1))
        _eliminate(panel, start, middle, failed)
        _subtract(panel[:, start:middle, middle:], panel[:, middle:stop, middle:])
        _eliminate(panel, middle, stop, failed)
        return
    rows = panel[:, start:stop]
    factor, info = torch.linalg.cholesky_ex(rows[:, :, start:stop])
    failed |= info != 0
    rows[:, :, :start], rows[:, :, start:stop] = 0, factor.mH
    if stop < panel.shape[-1]:
        # Transposed, as rows that lie one after the other are columns for LAPACK: nothing has to be rearranged.
        right = rows[:, :, stop:].mT
        rows[:, :, stop:] = torch.linalg.solve_triangular(factor.mT, right, upper=True, left=False).mT


def _subtract(known: Tensor, rest: Tensor) -> None:
    """What some rows of R contribute to later rows; both begin with the same column, that of the first later row."""
    for row in range(0, rest.shape[1], ROWS):
        end = min(row + ROWS, rest.shape[1])
        # Not in one call with the product, in which the sum might begin with what it is subtracted from: then that
        # would be rounded once for each of the products.
        product = torch.bmm(known[:, :, row:end].mH, known[:, :, row:])
        rest[:, row:end, row:].sub_(product)


def _sizes(panels: list[Tensor]) -> Tensor:
    """The largest entry of |R*||R|·1 of each; the panels are overwritten, as new memory takes longer."""
    count, _, order = panels[0].shape
    sums = torch.zeros(count, order, dtype=torch.float64, device=panels[0].device)
    for panel in panels:
        moduli = panel
        if panel.is_complex():  # both parts of an entry side by side
            moduli = torch.view_as_real(panel).flatten(-2)
        moduli.abs_()
        here = (moduli.sum(-1)[:, None] @ moduli).double().reshape(count, panel.shape[-1], -1)
        sums[:, -panel.shape[-1] :] += here.sum(-1)
    return sums.amax(-1).nan_to_num_(torch.inf, torch.inf)
