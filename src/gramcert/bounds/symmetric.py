"""Batched products of real matrices; those that are symmetric, and their gradients, without the half that is known."""

from typing import Any

import torch
from torch import Tensor

from gramcert.bounds.autograd import full_precision, run, run_on_each

# From this order on the lower triangle is computed in blocks of so many rows: fewer make products slow.
LEAST_ORDER, BLOCK = 512, 256


def product(left: Tensor, right: Tensor) -> Tensor:
    """left·right of batches. One alone is no batch: as such torch shares it badly among threads."""
    return (left[0] @ right[0])[None] if len(left) == 1 else left @ right


def symmetric_product(left: Tensor, right: Tensor) -> Tensor:
    """left·right, where that is symmetric, from about half of the work: blocks of rows up to the diagonal."""
    order = left.shape[-2]
    if order < LEAST_ORDER or torch.is_grad_enabled():  # what is differentiated further is left to torch
        return product(left, right)
    result = left.new_empty(*left.shape[:-1], order)
    for first in range(0, order, BLOCK):
        last = min(first + BLOCK, order)
        block = product(left[..., first:last, :], right[..., :last])
        result[..., first:last, :last] = block
        result[..., :first, first:last] = block[..., :first].mT
    return result


def symmetric_square(matrix: Tensor) -> Tensor:
    """G² of symmetric matrices (groups, order, order), differentiable."""
    return run(_SymmetricSquare, matrix)[0]


class _SymmetricSquare(torch.autograd.Function):
    """With a symmetric cotangent C the gradient is CG + GC = X + Xᵀ, X = CG: one product where torch makes two."""

    @staticmethod
    def forward(matrix: Tensor) -> tuple[Tensor]:
        return (symmetric_product(matrix, matrix),)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (matrix,) = ctx.saved_tensors
        with full_precision(matrix):
            half = product((grad + grad.mT) / 2, matrix)
            return half + half.mT

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, tuple[int, ...]]:
        return run_on_each(_SymmetricSquare, in_dims, *arguments)
