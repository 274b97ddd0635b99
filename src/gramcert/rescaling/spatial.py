r"""Absolute sums of the filters of Gram powers (the ``spatial`` form, Theorem 7 of the paper).

The symbol of the filter K_(t+1) is G_t = G^(2^(t-1)). A_ij = Σ_x |K_(t+1)[i,j,x]| is never below |G_t(ω)|_ij, whatever
ω, so the row sums of A serve every frequency at once. As in :mod:`gramcert.bounds.toeplitz` the filter, of 2^t(k-1)+1
taps per axis, is computed on a grid of that many frequencies, where its powers are small matrix products.
"""

from typing import Any

import torch
from torch import Tensor

from gramcert.bounds.autograd import full_precision, run, run_on_each
from gramcert.geometry.symbol import FrequencyGrid
from gramcert.rescaling.gram_filter import lags
from gramcert.rescaling.hermitian import (
    PIECE_BYTES,
    FilterTransform,
    evaluate,
    evaluate_adjoint,
    evaluation_table,
)
from gramcert.rescaling.powers import Powers

# Iterates kept for the backward; past it they are computed again.
KEPT_BYTES = 2**26

# More than this for one iterate is refused.
MOST_BYTES = 2**31


def filter_sums(gram: Tensor, taps: tuple[int, ...], iterations: int, call: str) -> tuple[Tensor, Tensor]:
    """The matrices A of each group as A = exp(2^t·h)·Â.

    Args:
        gram: the filter of G, shape (lags, groups, rows, rows), with entries of moderate size.
        taps: of the kernel, per axis.
        iterations: t.
        call: name of the public function, for errors.

    Returns:
        Â of shape (groups, rows, rows), differentiable, and h of shape (groups,), constant.
    """
    if iterations == 1:
        return gram.abs().sum(0), gram.new_zeros(gram.shape[1])
    grid = FrequencyGrid.unshifted(tuple(2**iterations * (size - 1) + 1 for size in taps))
    needed = 2 * len(grid) * gram[0].numel() * gram.element_size()
    if needed > MOST_BYTES:
        raise ValueError(
            f"{call}(iterations={iterations}): the filter has {'×'.join(map(str, grid.sizes))} taps and takes "
            f"{needed / 2**30:.3g} GiB, more than {MOST_BYTES / 2**30:.0f}; use fewer iterations or form='frequency'"
        )
    keep = gram.requires_grad and torch.is_grad_enabled() and needed * (iterations - 1) <= KEPT_BYTES
    sums, log, *_ = run(_FilterSums, gram, grid, taps, iterations, keep)
    return sums, log


class _FilterSums(torch.autograd.Function):
    """Keeps the signs of the filter, and the iterates where they are small."""

    @staticmethod
    def forward(
        gram: Tensor, grid: FrequencyGrid, taps: tuple[int, ...], iterations: int, keep: bool
    ) -> tuple[Tensor, ...]:
        powers = Powers.of(evaluate(evaluation_table(grid, lags(taps), gram), gram), iterations)
        transform, spectrum = FilterTransform(grid, gram), powers.iterates[-1]
        log = powers.log.amax(0)
        if powers.scales:
            spectrum *= powers.weights(iterations, log)[..., None, None]
        columns = spectrum.flatten(2)
        signs = torch.empty(transform.places, columns.shape[2], dtype=torch.int8, device=gram.device)
        sums = gram.new_empty(columns.shape[2])
        # A is symmetric, but columns of half of it would have to be gathered, which costs what it saves.
        for part in _panels(grid, gram, columns.shape[2]):
            values = transform(columns[:, :, part])
            signs[:, part] = torch.sign(values)
            sums[part] = values.abs_().sum(0)
        kept = [*powers.iterates[:-1], *powers.scales] if keep else []
        return sums.reshape(gram.shape[1:]), log, signs, powers.log, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        gram, ctx.grid, ctx.taps, ctx.iterations, _ = inputs
        _, *constants = output
        ctx.mark_non_differentiable(*constants)
        ctx.save_for_backward(gram, *constants)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None, None, None, None]:
        """The derivative of A_ij is sgn(K_(t+1)[i,j,x]), whose transform is the cotangent of G_t."""
        gram, log, signs, logs, *kept = ctx.saved_tensors
        grid, iterations = ctx.grid, ctx.iterations
        table, transform = evaluation_table(grid, lags(ctx.taps), gram), FilterTransform(grid, gram)
        with full_precision(gram):
            if torch.is_grad_enabled():  # for second derivatives, through torch's own rules
                powers = Powers.of(evaluate(table, gram), iterations)
                weighted = powers.iterates[-1] * powers.weights(iterations, log)[..., None, None]
                value = (transform(weighted.flatten(2)) * signs).sum(0).reshape(grad.shape)
                (gradient,) = torch.autograd.grad(value, gram, grad, create_graph=True)
                return gradient, None, None, None, None
            if kept:
                powers = Powers([*kept[: iterations - 1], kept[0]], kept[iterations - 1 :], logs)
            else:
                powers = Powers.of(evaluate(table, gram), iterations)
            symmetric = ((grad + grad.mT) / 2).flatten()
            cotangent = gram.new_empty(2, len(grid), *gram.shape[1:])
            columns = cotangent.flatten(2)
            for part in _panels(grid, gram, columns.shape[2]):
                columns[:, :, part] = transform.adjoint(signs[:, part] * symmetric[part])
            if powers.scales:
                cotangent *= powers.weights(iterations, log)[..., None, None]
            powers.pull_back_(cotangent)
            return evaluate_adjoint(table, cotangent), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, tuple[int, ...]]:
        return run_on_each(_FilterSums, in_dims, *arguments)


def _panels(grid: FrequencyGrid, like: Tensor, columns: int) -> list[slice]:
    each = max(1, PIECE_BYTES // (len(grid) * like.element_size()))
    return [slice(start, start + each) for start in range(0, columns, each)]
