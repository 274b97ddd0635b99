"""Batched products of real matrices; those that are symmetric, and their gradients, without the half that is known."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gramcert.bounds.autograd import full_precision, run, run_on_each

# From this order on halves are told apart: smaller ones make products slow.
LEAST_ORDER = 512


def product(left: Tensor, right: Tensor) -> Tensor:
    """left·right of batches. One alone is no batch: as such torch shares it badly among threads."""
    return (left[0] @ right[0])[None] if len(left) == 1 else left @ right


def symmetric_product(left: Tensor, right: Tensor) -> Tensor:
    """left·right, where that is symmetric, from about half of the work."""
    order = left.shape[-2]
    if order < LEAST_ORDER or torch.is_grad_enabled():  # what is differentiated further is left to torch
        return product(left, right)
    result = left.new_empty(*left.shape[:-1], order)
    _fill(result, left, right)
    return result


def _fill(result: Tensor, left: Tensor, right: Tensor) -> None:
    """By halves, of which the products with one another are made once."""
    half = left.shape[-2] // 2
    if 2 * half < LEAST_ORDER:
        _set_product(result, left, right)
        return
    _set_product(result[..., half:, :half], left[..., half:, :], right[..., :half])
    result[..., :half, half:] = result[..., half:, :half].mT
    _fill(result[..., :half, :half], left[..., :half, :], right[..., :half])
    _fill(result[..., half:, half:], left[..., half:, :], right[..., half:])


def _set_product(result: Tensor, left: Tensor, right: Tensor) -> None:
    # In place, as new memory takes time too; torch.compile has no such products into a part of a tensor.
    if len(left) == 1 and not torch.compiler.is_compiling():
        torch.mm(left[0], right[0], out=result[0])
    else:
        result.copy_(product(left, right))


def symmetric_sum(parts: Iterable[Tensor], order: int) -> Tensor:
    """Σ XXᵀ over matrices X with that many rows, in float64 and from about half of the work.

    An entry is one sum of all of its products, in some order: what was summed before is one term of what comes next.
    """
    result = torch.zeros(order, order, dtype=torch.float64)
    for part in parts:
        _add_below(result, part, part.T)
    _mirror(result)
    return result


def _add_below(result: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left·right, which is symmetric, but for the parts above the diagonal that :func:`_mirror` fills in."""
    half = len(left) // 2
    if 2 * half < LEAST_ORDER:
        result.addmm_(left, right)
        return
    result[half:, :half].addmm_(left[half:], right[:, :half])
    _add_below(result[:half, :half], left[:half], right[:, :half])
    _add_below(result[half:, half:], left[half:], right[:, half:])


def _mirror(result: Tensor) -> None:
    half = len(result) // 2
    if 2 * half < LEAST_ORDER:
        return
    result[:half, half:] = result[half:, :half].T
    _mirror(result[:half, :half])
    _mirror(result[half:, half:])


def symmetric_square(matrix: Tensor) -> Tensor:
    """G² of symmetric matrices (groups, order, order), differentiable as a function of such."""
    return run(_SymmetricSquare, matrix)[0]


class _SymmetricSquare(torch.autograd.Function):
    """With a symmetric cotangent C the gradient is CG + GC = X + Xᵀ, X = CG: one product where torch makes two.

    As G is symmetric, only the symmetric part of its gradient counts, which 2X has too: no transposing, which takes as
    long as a third of the product.
    """

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
            return product(grad + grad.mT, matrix)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, tuple[int, ...]]:
        return run_on_each(_SymmetricSquare, in_dims, *arguments)
