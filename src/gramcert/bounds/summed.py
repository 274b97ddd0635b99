r"""Hermitian matrices in real arithmetic: G = A + iB as the real matrix M = A + B.

A is symmetric and B antisymmetric, so M holds both. G² = (A² - B²) + i(AB + BA) becomes M·A + Mᵀ·B: two real products,
where a complex one is worth four. ‖G‖_F = ‖M‖_F, and the diagonal is the same. On a grid this is the Hartley transform
in place of the Fourier transform.
"""

import math

import torch
from torch import Tensor


def squared(summed: Tensor) -> Tensor:
    """Of G², from that of G: ½M(M + Mᵀ) + MᵀB, with few passes over the memory, which cost as much as the products."""
    flat = summed.flatten(0, -3)
    twice_symmetric = flat + flat.mT
    antisymmetric = torch.sub(flat, twice_symmetric, alpha=0.5)
    result = torch.baddbmm(flat @ twice_symmetric, flat.mT, antisymmetric, beta=0.5)
    return result.reshape(summed.shape)


def moduli(summed: Tensor) -> Tensor:
    """|G| entry by entry. By the hypotenuse, as squares of small entries would vanish."""
    return torch.hypot(summed, summed.mT.contiguous()).mul_(math.sqrt(0.5))
