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
from gramcert.bounds.gram_filter import lags
from gramcert.bounds.powers import Powers, positive
from gramcert.geometry.symbol import FilterSymbol, FrequencyGrid


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
        symbol = FilterSymbol(gram, grid, lags(taps))
        sums, logs = q.new_empty(len(grid), *q.shape), q.new_empty(len(grid), q.shape[0])
        for chunk in symbol.chunks:
            powers = Powers.of(symbol(chunk), iterations, keep=False)
            sums[chunk], logs[chunk] = _row_sums(powers.last(), q), powers.log
        log = logs.amax(0)
        if iterations > 2:  # before that nothing is scaled
            sums *= torch.exp(2.0**iterations * (logs - log))[..., None]
        largest, index = sums.max(0)
        return largest, log, index

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        gram, q, ctx.grid, ctx.taps, ctx.iterations = inputs
        _, log, index = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(log, index)
        ctx.save_for_backward(gram, q, log, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None, None
        gram, q, log, index = ctx.saved_tensors
        with full_precision(gram):
            symbol = FilterSymbol(gram, ctx.grid, lags(ctx.taps))
            used = symbol.indices
            if can_be_read(index):  # otherwise no shape may depend on values
                used = torch.unique(index)
            gradient, q_gradient = torch.zeros_like(gram), torch.zeros_like(q)
            for chunk in used.split(symbol.chunks[0].stop):
                powers = Powers.of(symbol(chunk), ctx.iterations)
                last = powers.last()
                size = _modulus(last)
                chosen = (index == chunk[:, None, None]).to(grad.dtype) * powers.weights(log)[..., None]
                slopes = chosen * grad / q  # of s with respect to Σ_j |G_t|_ij q_j
                sums = (size @ q[..., None])[..., 0]
                q_gradient = q_gradient + ((size.mT @ slopes[..., None])[..., 0] - slopes * sums / q).sum(0)
                # C_ij = ½(w_i q_j + w_j q_i)·sgn(P_ij), the Hermitian part of the derivative.
                outer = slopes[..., None] * q[:, None, :]
                cotangent = powers.pull_back(last * ((outer + outer.mT) / (2 * positive(size))))
                gradient = gradient + symbol.adjoint(chunk, cotangent) * powers.growth
        return gradient, q_gradient, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, tuple[int, ...]]:
        return run_on_each(_LargestRowSums, in_dims, *arguments)


def _row_sums(matrix: Tensor, q: Tensor) -> Tensor:
    return (_modulus(matrix) @ q[..., None])[..., 0] / q


def _modulus(matrix: Tensor) -> Tensor:
    """|G| entry by entry. The hypotenuse of contiguous parts is faster, but has no slope at 0."""
    if torch.is_grad_enabled() or not matrix.is_complex():
        return matrix.abs()
    return torch.hypot(matrix.real.contiguous(), matrix.imag.contiguous())
