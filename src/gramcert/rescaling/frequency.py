r"""Row sums of Gram powers, the largest over a grid of frequencies (the ``frequency`` form).

s_i = max_ω Σ_j |G_t(ω)|_ij q_j/q_i. At each frequency of the grid G_t(ω) ⪯ diag(s): with Q = diag(q), the matrix
diag(s) - G_t has non-negative diagonal and, after the similarity Q^(-1)·Q, dominant rows. The root of order 2^(t-1) is
operator monotone, so G(ω) ⪯ diag(s)^(2^(1-t)).
"""

from typing import Any

import torch
from torch import Tensor

from gramcert.arguments import can_be_read
from gramcert.bounds.autograd import full_precision, run, run_on_each
from gramcert.geometry.symbol import FrequencyGrid
from gramcert.rescaling.gram_filter import lags
from gramcert.rescaling.hermitian import PIECE_BYTES, evaluate, evaluate_adjoint, evaluation_table, modulus
from gramcert.rescaling.powers import Powers


def largest_row_sums(
    gram: Tensor, q: Tensor, grid: FrequencyGrid, taps: tuple[int, ...], iterations: int
) -> tuple[Tensor, Tensor]:
    """The row sums s of each group as s = exp(2^t·h)·ŝ.

    Args:
        gram: the filter of G, shape (lags, groups, rows, rows), with entries of moderate size.
        q: positive weights, shape (groups, rows).
        grid: the frequencies.
        taps: of the kernel, per axis.
        iterations: t.

    Returns:
        ŝ of shape (groups, rows), differentiable, and h of shape (groups,), constant.
    """
    sums, log, _ = run(_LargestRowSums, gram, q, grid, taps, iterations)
    return sums, log


class _LargestRowSums(torch.autograd.Function):
    """Forward in chunks of frequencies. Backward through the frequencies at which some row is largest."""

    @staticmethod
    def forward(
        gram: Tensor, q: Tensor, grid: FrequencyGrid, taps: tuple[int, ...], iterations: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        table = evaluation_table(grid, lags(taps), gram)
        sums, logs = q.new_empty(len(grid), *q.shape), q.new_empty(len(grid), q.shape[0])
        for part in _chunks(len(grid), gram):
            powers = Powers.of(evaluate(table[:, part], gram), iterations)
            sums[part], logs[part] = _row_sums(powers.iterates[-1], q), powers.log
        log = logs.amax(0)
        if iterations > 2:  # before that nothing is scaled
            sums *= torch.exp(2.0**iterations * (logs - log))[..., None]
        largest, index = sums.max(0)
        return largest, log, index

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        gram, q, ctx.grid, ctx.taps, ctx.iterations = inputs
        largest, log, index = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(log, index)
        ctx.save_for_backward(gram, q, largest, log, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None, None
        gram, q, largest, log, index = ctx.saved_tensors
        table = evaluation_table(ctx.grid, lags(ctx.taps), gram)
        used = torch.arange(len(ctx.grid), device=index.device)
        if can_be_read(index):  # otherwise no shape may depend on values
            used = torch.unique(index)
            table = table[:, used]
        rows = (index == used[:, None, None]).to(grad.dtype)
        with full_precision(gram):
            if torch.is_grad_enabled():
                return *_differentiable(gram, q, log, table, rows, ctx.iterations, grad), None, None, None
            gradient, q_gradient = torch.zeros_like(gram), -grad * largest / q
            for part in _chunks(len(used), gram):
                powers = Powers.of(evaluate(table[:, part], gram), ctx.iterations)
                last, weights = powers.iterates[-1], rows[part] * grad / q
                if powers.scales:
                    weights *= powers.weights(ctx.iterations, log)[..., None]
                size = modulus(last)
                q_gradient += (size.mT @ weights[..., None])[..., 0].sum(0)
                # C_ij = ½(w_i q_j + w_j q_i)·sgn(P_ij), the Hermitian part of the derivative.
                outer = weights[..., None] * q[:, None, :]
                cotangent = last * torch.where(size == 0, 0, (outer + outer.mT) / (2 * size))
                powers.pull_back_(cotangent)
                gradient += evaluate_adjoint(table[:, part], cotangent)
        return gradient, q_gradient, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, tuple[int, ...]]:
        return run_on_each(_LargestRowSums, in_dims, *arguments)


def _row_sums(matrix: Tensor, q: Tensor) -> Tensor:
    return (modulus(matrix) @ q[..., None])[..., 0] / q


def _differentiable(
    gram: Tensor, q: Tensor, log: Tensor, table: Tensor, rows: Tensor, iterations: int, grad: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The same through torch's own rules, for second derivatives."""
    powers = Powers.of(evaluate(table, gram), iterations)
    weights = torch.exp(2.0**iterations * (powers.log - log))[..., None]
    value = (_row_sums(powers.iterates[-1], q) * weights * rows).sum(0)
    inputs = [tensor for tensor in (gram, q) if tensor.requires_grad]
    found = iter(torch.autograd.grad(value, inputs, grad, create_graph=True))
    return (next(found) if gram.requires_grad else None), (next(found) if q.requires_grad else None)


def _chunks(frequencies: int, gram: Tensor) -> list[slice]:
    each = max(1, 2 * PIECE_BYTES // (gram[0].numel() * gram.element_size()))
    return [slice(start, start + each) for start in range(0, frequencies, each)]
