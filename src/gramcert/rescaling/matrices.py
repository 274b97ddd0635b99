"""Row sums of Gram powers of real matrices, without frequencies: gradients by torch's own rules, and of one's own making
where a product or its gradient is symmetric.
"""

import torch
from torch import Tensor

from gramcert.bounds.gram_filter import gram_filter
from gramcert.bounds.powers import Powers, divided, positive
from gramcert.bounds.symmetric import symmetric_square


def matrix_row_sums(matrices: Tensor, q: Tensor | None, iterations: int) -> tuple[Tensor, Tensor]:
    r"""Σ_j |G_t|_ij q_j/q_i of G = WWᵀ for W of shape (groups, rows, columns), as exp(2^t·h)·ŝ.

    Args:
        matrices: with entries of moderate size.
        q: positive weights, shape (groups, rows); 1 if ``None``.
        iterations: t.

    Returns:
        ŝ of shape (groups, rows), differentiable, and h of shape (groups,), constant.
    """
    rows, columns = matrices.shape[1:]
    sizes, log = (_tall_powers if rows > columns else _wide_powers)(matrices, iterations)
    sizes = sizes.abs()
    return sizes.sum(-1) if q is None else (sizes @ q[..., None])[..., 0] / q, log


def _wide_powers(matrices: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    powers = Powers.of(gram_filter(matrices[..., None])[0], iterations, keep=False, square=symmetric_square)
    return powers.last(), powers.log


def _tall_powers(matrices: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """From the smaller Gram matrix: G_t = W·H^(2^(t-1)-1)·Wᵀ with H = WᵀW.

    The power is the product of the squarings H_1·H_2···H_(t-1), each of them divided by its largest diagonal entry.
    """
    product, factor = matrices, matrices.mT @ matrices
    log = exponent = torch.zeros_like(matrices[:, 0, 0].detach())  # H_s = exp(log)·factor, the product lacks exp(exponent)
    for step in range(1, iterations):
        if step > 1:
            factor, largest = divided(factor @ factor)
            log = 2 * log + torch.log(largest)
        product = product @ factor
        largest = positive(product.detach().abs().amax((-2, -1)))
        product, exponent = product / largest[:, None, None], exponent + log + torch.log(largest)
    return product @ matrices.mT, 2.0**-iterations * exponent
