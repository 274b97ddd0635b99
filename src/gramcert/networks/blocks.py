"""Blocks of Hermitian matrices, one for each frequency: matrices (frequencies, n, m), or diagonals (frequencies, n).

Much of what couples the values of a network is diagonal: shortcuts, filters of each channel alone, everything that is
only scaled. Kept so, a variable whose block is diagonal costs as much to eliminate as what it is coupled to. A first
axis of one entry stands for all frequencies.
"""

import torch
from torch import Tensor


def is_diagonal(block: Tensor) -> bool:
    """Whether only its diagonal is kept."""
    return block.dim() == 2


def dense(block: Tensor) -> Tensor:
    """As matrices."""
    return torch.diag_embed(block) if is_diagonal(block) else block


def total(one: Tensor, two: Tensor) -> Tensor:
    """The sum."""
    return one + two if one.dim() == two.dim() else dense(one) + dense(two)


def with_rows(weights: Tensor, block: Tensor) -> Tensor:
    """Each row times its weight."""
    return weights * block if is_diagonal(block) else weights[:, None] * block


def product(left: Tensor, right: Tensor) -> Tensor:
    """left*·right."""
    if is_diagonal(left):
        return left.conj() * right if is_diagonal(right) else left.conj()[..., None] * right
    return left.mH * right[:, None, :] if is_diagonal(right) else left.mH @ right


def factorised(block: Tensor) -> tuple[Tensor, Tensor]:
    """The lower Cholesky factors, and which of them there are not, the matrices not being positive definite."""
    if is_diagonal(block):
        real = block.real if block.is_complex() else block
        return real.sqrt(), ~(real > 0).all(-1)
    factor, failed = torch.linalg.cholesky_ex(block)
    return factor, failed != 0


def solved(factor: Tensor, block: Tensor) -> Tensor:
    """The inverse of a factor times a block."""
    if is_diagonal(factor):
        divisor = factor if is_diagonal(block) else factor[..., None]
        if not block.is_complex():
            return block / divisor
        # Part by part: the quotient of two complex numbers would be rounded more often.
        return torch.view_as_complex(torch.view_as_real(block.resolve_conj()) / divisor[..., None])
    found: Tensor = torch.linalg.solve_triangular(factor, dense(block), upper=False)
    return found
