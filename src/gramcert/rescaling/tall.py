"""Row sums of Gram powers of real matrices with more rows than columns, from the smaller Gram matrix."""

import torch
from torch import Tensor

from gramcert.bounds.powers import divided, positive


def tall_row_sums(matrices: Tensor, q: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    r"""Σ_j |G_t|_ij q_j/q_i of G = WWᵀ for W of shape (groups, rows, columns), as exp(2^t·h)·ŝ.

    G_t = W·H^(2^(t-1)-1)·Wᵀ with H = WᵀW, and the power is the product of the squarings H_1·H_2···H_(t-1), each of them
    divided by its largest diagonal entry. Differentiable by torch's own rules.
    """
    product, factor = matrices, matrices.mT @ matrices
    log = exponent = torch.zeros_like(q[:, 0].detach())  # H_s = exp(log)·factor, the product lacks exp(exponent)
    for step in range(1, iterations):
        if step > 1:
            factor, largest = divided(factor @ factor)
            log = 2 * log + torch.log(largest)
        product = product @ factor
        largest = positive(product.detach().abs().amax((-2, -1)))
        product, exponent = product / largest[:, None, None], exponent + log + torch.log(largest)
    sizes = (product @ matrices.mT).abs()
    return (sizes @ q[..., None])[..., 0] / q, 2.0**-iterations * exponent
