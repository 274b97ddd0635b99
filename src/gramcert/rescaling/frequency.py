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
from gramcert.bounds.summed import moduli, squared
from gramcert.geometry.symbol import FilterSymbol, FrequencyGrid

# Up to so many rows the backward pass at this t is made without symbols.
MOST_ROWS = {1: 2**31, 2: 256}

# Up to so many entries there is a matrix for each row in the backward pass, whatever the frequencies are.
MOST_ENTRIES = 2**20


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
    """Forward in chunks of frequencies, in real arithmetic. Backward through those where some row is largest."""

    @staticmethod
    def forward(
        gram: Tensor, q: Tensor, grid: FrequencyGrid, taps: tuple[int, ...], iterations: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        symbol = FilterSymbol(gram, grid, lags(taps))
        sums, logs = q.new_empty(len(grid), *q.shape), q.new_empty(len(grid), q.shape[0])
        for chunk in symbol.real_chunks:
            powers = Powers.of(symbol.summed(chunk), iterations, keep=False, square=squared)
            sums[chunk], logs[chunk] = (moduli(powers.last()) @ q[..., None])[..., 0], powers.log
        sums /= q
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
            # Shapes may depend on values only where these can be read, and what is twice differentiable is simpler.
            by_rows = can_be_read(index) and not torch.is_grad_enabled()
            if q.shape[1] <= MOST_ROWS.get(ctx.iterations, 0):
                through = _through_filter
            else:
                through = _through_each if _is_small(q) else _through_rows if by_rows else _through_all
            return *through(symbol, q, log, index, grad, ctx.iterations), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, tuple[int, ...]]:
        return run_on_each(_LargestRowSums, in_dims, *arguments)


def _is_small(q: Tensor) -> bool:
    return q.numel() * q.shape[1] ** 2 <= MOST_ENTRIES


def _signs(values: Tensor, size: Tensor) -> Tensor:
    """Values over their sizes; what is subnormal counts as 0, whose inverse with a slope would be out of range."""
    counts = size >= torch.finfo(size.dtype).tiny
    return values * torch.where(counts, 1 / torch.where(counts, size, 1.0), 0.0)


def _through_filter(
    symbol: FilterSymbol, q: Tensor, log: Tensor, index: Tensor, grad: Tensor, iterations: int
) -> tuple[Tensor, Tensor]:
    """The gradients with respect to the filter and q at t <= 2, where nothing is scaled, without symbols.

    Row i has its own frequency, G_i = Σ_a w_ai·C_a, and vectors v_i are columns of one matrix: G_i·v_i for all rows
    are the products C_a·V, in real arithmetic, and a sum over the lags.
    """
    rows, filters = q.shape[1], symbol.filters
    waves = symbol.twiddles(index.flatten()).reshape(*q.shape, -1).permute(2, 0, 1)[:, :, None]

    def times(vectors: Tensor) -> Tensor:
        return (torch.complex(*(filters @ _parts(vectors)).split(rows, -1)) * waves).sum(0)

    first = (filters * waves).sum(0)  # G_i·e_i
    last = first if iterations == 1 else times(first)  # the column of G_t, conjugate of the row
    size, slopes = last.abs(), grad / q
    q_gradient = (size @ slopes[..., None])[..., 0] - slopes * (q[:, None] @ size)[:, 0] / q
    # C_i = e_i c_i* + c_i e_i* with c_ij = ½ w_i q_j·sgn(P_ji) is the cotangent of G_t; twice the Hermitian part of
    # e_i c_i*, or of e_i (G_i c_i)* + G_i e_i c_i*, that of G_i.
    right = _signs(last, size) * (q[..., None] * slopes[:, None] / 2)
    if iterations == 1:
        return 2 * torch.real(right * waves).mT, q_gradient
    gradient = torch.real(times(right) * waves).mT + _parts(first * waves.conj()) @ _parts(right).mT
    return 2 * gradient, q_gradient


def _parts(matrix: Tensor) -> Tensor:
    """The real part and the imaginary part side by side."""
    return torch.cat([torch.real(matrix), torch.imag(matrix)], -1)


def _through_each(
    symbol: FilterSymbol, q: Tensor, log: Tensor, index: Tensor, grad: Tensor, iterations: int
) -> tuple[Tensor, Tensor]:
    """The gradients with respect to the filter and q, with a matrix for each row, that of its own frequency."""
    groups, rows = q.shape
    waves = symbol.twiddles(index.flatten()).reshape(groups, rows, -1)
    filters = symbol.filters.flatten(2).transpose(0, 1)
    blocks = torch.complex(waves.real @ filters, waves.imag @ filters).reshape(groups, rows, rows, rows)
    powers = Powers.of(blocks, iterations)
    unit = torch.eye(rows, dtype=blocks.dtype, device=blocks.device).expand(groups, -1, -1)[..., None]
    last = powers.times(unit)  # the column of Ĝ_t, conjugate of the row
    size = last[..., 0].abs()
    slopes = grad / q * powers.weights(log[:, None])
    sums = (size @ q[..., None])[..., 0]
    q_gradient = (slopes[:, None, :] @ size)[:, 0] - slopes * sums / q
    # C = ½ w_i (e_i c_i* + c_i e_i*) with c_j = q_j·sgn(P_ji).
    right = _signs(last, size[..., None]) * (q[:, None, :] * slopes[..., None] / 2)[..., None]
    pulled = powers.pull_back_pair(unit, right).flatten(2)
    gradient = torch.real(waves.mH @ pulled) * powers.growth
    return gradient.transpose(0, 1).reshape(symbol.filters.shape), q_gradient


def _through_all(
    symbol: FilterSymbol, q: Tensor, log: Tensor, index: Tensor, grad: Tensor, iterations: int
) -> tuple[Tensor, Tensor]:
    """The same through all frequencies, where the gradients of most rows are 0."""
    gradient, q_gradient = torch.zeros_like(symbol.filters), torch.zeros_like(q)
    for chunk in symbol.indices.split(symbol.chunks[0].stop):
        powers = Powers.of(symbol(chunk), iterations)
        last = powers.last()
        size = last.abs()
        chosen = (index == chunk[:, None, None]).to(grad.dtype) * powers.weights(log)[..., None]
        slopes = chosen * grad / q  # of s with respect to Σ_j |G_t|_ij q_j
        sums = (size @ q[..., None])[..., 0]
        q_gradient = q_gradient + ((size.mT @ slopes[..., None])[..., 0] - slopes * sums / q).sum(0)
        # C_ij = ½(w_i q_j + w_j q_i)·sgn(P_ij), the Hermitian part of the derivative.
        outer = slopes[..., None] * q[:, None, :]
        cotangent = powers.pull_back(_signs(last, size) * ((outer + outer.mT) / 2))
        gradient = gradient + symbol.adjoint(chunk, cotangent) * powers.growth
    return gradient, q_gradient


def _through_rows(
    symbol: FilterSymbol, q: Tensor, log: Tensor, index: Tensor, grad: Tensor, iterations: int
) -> tuple[Tensor, Tensor]:
    """The same through the rows themselves: at each frequency few are largest, so the cotangents have few columns."""
    groups, rows = q.shape
    gradient, q_gradient = torch.zeros_like(symbol.filters), torch.zeros_like(q)
    used, which, counts = torch.unique(index, return_inverse=True, return_counts=True)
    # Frequencies with many rows first: those of a chunk get as many columns as the first one needs.
    rank = counts.argsort(descending=True)
    used, which = used[rank], rank.argsort()[which]
    # The rows of each group by frequency, each with its place among those of the same one.
    which, order = which.sort(dim=1, stable=True)
    place = torch.arange(rows, device=q.device) - torch.searchsorted(which, which)
    group = torch.arange(groups, device=q.device)[:, None].expand_as(which)
    weights, slopes_of_rows = q[:, None, :], (grad / q)[:, None, :]
    for chunk in symbol.indices[: len(used)].split(symbol.real_chunks[0].stop):
        first = int(chunk[0])
        inside = (which >= first) & (which < first + len(chunk))
        columns = int(place[inside].max()) + 1
        unit = q.new_zeros(len(chunk), groups, rows, columns)
        unit[which[inside] - first, group[inside], order[inside], place[inside]] = 1
        powers = Powers.of(symbol(used[chunk]), iterations)
        left = unit.to(powers.iterates[0].dtype)
        last = powers.times(left)  # the columns of Ĝ_t, conjugates of its rows
        size = last.abs()
        slopes = (slopes_of_rows @ unit) * powers.weights(log)[..., None, None]  # (..., 1, columns)
        shares = (weights @ size) / positive(weights @ unit)
        q_gradient += ((size - unit * shares) @ slopes.mT)[..., 0].sum(0)
        # C = Σ ½ w_i (e_i c_i* + c_i e_i*) with c_j = q_j·sgn(P_ji).
        right = _signs(last, size) * (weights.mT * slopes / 2)
        gradient += symbol.adjoint(used[chunk], powers.pull_back_pair(left, right)) * powers.growth
    return gradient, q_gradient
