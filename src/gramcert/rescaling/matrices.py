"""Row sums of Gram powers of real matrices, without frequencies; differentiable by torch's own rules."""

import torch
from torch import Tensor

from gramcert.bounds.powers import Powers, divided, positive
from gramcert.bounds.symmetric import symmetric_square


def wide_row_sums(gram: Tensor, q: Tensor | None, iterations: int) -> tuple[Tensor, Tensor]:
    r"""Σ_j |G_t|_ij q_j/q_i as exp(2^t·h)·ŝ, of G of shape (groups, rows, rows).

    Args:
        gram: with entries of moderate size.
        q: positive weights, shape (groups, rows); 1 if ``None``.
        iterations: t.

    Returns:
        ŝ of shape (groups, rows), differentiable, and h of shape (groups,), constant.
    """
    powers = Powers.of(gram, iterations, keep=False, square=symmetric_square)
    return _row_sums(powers.last(), q), powers.log


def tall_row_sums(matrices: Tensor, q: Tensor | None, iterations: int) -> tuple[Tensor, Tensor]:
    r"""The same of G = WWᵀ for W of shape (groups, rows, columns) with fewer columns than rows.

    From the smaller Gram matrix: G_t = W·H^(2^(t-1)-1)·Wᵀ with H = WᵀW.

    The power is the product of the squarings H_1·H_2···H_(t-1), each of them divided by its largest diagonal entry.
    """
    product, factor = matrices, matrices.mT @ matrices
    log = exponent = torch.zeros_like(
        matrices[:, 0, 0].detach()
    )  # H_s = exp(log)·factor, the product lacks exp(exponent)
    for step in range(1, iterations):
        if step > 1:
            factor, largest = divided(factor @ factor)
            log = 2 * log + torch.log(largest)
        product = product @ factor
        largest = positive(product.detach().abs().amax((-2, -1)))
        product, exponent = product / largest[:, None, None], exponent + log + torch.log(largest)
    return _row_sums(product @ matrices.mT, q), 2.0**-iterations * exponent


def _row_sums(matrices: Tensor, q: Tensor | None) -> Tensor:
    sizes = matrices.abs()
    return sizes.sum(-1) if q is None else (sizes @ q[..., None])[..., 0] / q
