r"""Hermitian matrices in real arithmetic: G = A + iB as the real matrix M = A + B.

A is symmetric and B antisymmetric, so M holds both. G² = (A² - B²) + i(AB + BA) becomes M·A + Mᵀ·B: two real products,
where a complex one is worth four. ‖G‖_F = ‖M‖_F, and the diagonal is the same. This is the Hartley transform in place of
the Fourier transform.
"""

import math

import torch
from torch import Tensor

from gramcert.bounds.powers import Powers


def squared(summed: Tensor) -> Tensor:
    """Of G², from that of G."""
    transposed = summed.mT
    result = summed @ (summed + transposed)
    result += transposed @ (summed - transposed)
    return result.mul_(0.5)


def moduli(summed: Tensor) -> Tensor:
    """|G| entry by entry. By the hypotenuse, as squares of small entries would vanish."""
    return torch.hypot(summed, summed.mT.contiguous()).mul_(math.sqrt(0.5))


def in_complex(powers: Powers) -> Powers:
    """Powers of complex matrices from those of M."""
    return Powers(powers.iterations, [_in_complex(each) for each in powers.iterates], powers.scales, powers.log)


def _in_complex(summed: Tensor) -> Tensor:
    return torch.complex(summed + summed.mT, summed - summed.mT).mul_(0.5)
