r"""Absolute sums of the filters of Gram powers (the ``spatial`` form, Theorem 7 of the paper).

The symbol of the filter K_(t+1) is G_t = G^(2^(t-1)). A_ij = Σ_x |K_(t+1)[i,j,x]| is never below |G_t(ω)|_ij, whatever
ω, so the row sums of A serve every frequency at once. As in :mod:`gramcert.bounds.toeplitz` the filter, of 2^t(k-1)+1
taps per axis, is computed on a grid of that many frequencies, where its powers are small matrix products.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramcert.bounds.autograd import full_precision, run, run_on_each
from gramcert.geometry.symbol import FrequencyGrid
from gramcert.rescaling.gram_filter import absolute_sums, gram_filter, lags
from gramcert.rescaling.hermitian import (
    PIECE_BYTES,
    FilterTransform,
    evaluate,
    evaluate_adjoint,
    evaluation_table,
    square_adjoint_,
    square_rows,
)
from gramcert.rescaling.powers import Powers

# Iterates kept for the backward; past it they are computed again.
KEPT_BYTES = 2**26

_SMALLEST_WEIGHT = {torch.float32: 2.0**-100, torch.float64: 2.0**-900}

# Fewer rows at a time make products slow.
LEAST_ROWS = 12

# More than this for one iterate is refused.
MOST_BYTES = 2**31


def filter_sums(kernels: Tensor, iterations: int, call: str) -> tuple[Tensor, Tensor]:
    """The matrices A of each group as A = exp(2^t·h)·Â.

    Args:
        kernels: shape (groups, rows, columns, *taps), with rows of moderate size.
        iterations: t.
        call: name of the public function, for errors.

    Returns:
        Â of shape (groups, rows, rows), differentiable, and h of shape (groups,), constant.
    """
    groups, rows, _, *taps = kernels.shape
    if iterations == 1:
        return absolute_sums(kernels), kernels.new_zeros(groups)
    grid = FrequencyGrid.unshifted(tuple(2**iterations * (size - 1) + 1 for size in taps))
    needed = 2 * len(grid) * groups * rows**2 * kernels.element_size()
    if needed > MOST_BYTES:
        raise ValueError(
            f"{call}(iterations={iterations}): the filter has {'×'.join(map(str, grid.sizes))} taps and takes "
            f"{needed / 2**30:.3g} GiB, more than {MOST_BYTES / 2**30:.0f}; use fewer iterations or form='frequency'"
        )
    keep = kernels.requires_grad and torch.is_grad_enabled() and needed * (iterations - 1) <= KEPT_BYTES
    sums, log, *_ = run(_FilterSums, gram_filter(kernels), grid, tuple(taps), iterations, keep)
    return sums, log


class _FilterSums(torch.autograd.Function):
    """Keeps the signs of the filter, and the iterates where they are small.

    K_(t+1)[j,i,x] = K_(t+1)[i,j,-x], so a block of rows needs only the columns from its first row on. The last product
    is made block by block and transformed at once, which spares memory: fresh memory costs as much as the products.
    """

    @staticmethod
    def forward(
        gram: Tensor, grid: FrequencyGrid, taps: tuple[int, ...], iterations: int, keep: bool
    ) -> tuple[Tensor, ...]:
        powers = Powers.of(evaluate(evaluation_table(grid, lags(taps), gram), gram), iterations - 1)
        transform, log = FilterTransform.of(grid, gram), powers.log.amax(0)
        groups, order = gram.shape[1:3]
        sums, blocks = gram.new_empty(groups, order, order), _blocks(grid, gram)
        signs = torch.empty(transform.places, blocks[-1].signs.stop, dtype=torch.int8, device=gram.device)
        weights = _weights(powers, iterations, log)
        for block in blocks:
            rows = square_rows(powers.iterates[-1], block.first, block.last)
            if powers.scales:
                rows *= weights[..., None, None]
            values = transform(rows.flatten(2))
            signs[:, block.signs] = torch.sign(values)
            part = values.abs_().sum(0).reshape(groups, -1, order - block.first)
            sums[:, block.first : block.last, block.first :] = part
            sums[:, block.first :, block.first : block.last] = part.mT
        # What the frequencies without weight could have added, see _weights.
        sums += _SMALLEST_WEIGHT[gram.dtype] * transform.places * order**3 if powers.scales else 0.0
        kept = [*powers.iterates, *powers.scales] if keep else []
        return sums, log, signs, powers.log, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        gram, ctx.grid, ctx.taps, ctx.iterations, _ = inputs
        _, *constants = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constants)
        ctx.save_for_backward(gram, *constants)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, None, None, None, None]:
        """The derivative of A_ij is sgn(K_(t+1)[i,j,x]), whose transform is the cotangent of G_t."""
        if grad is None:
            return None, None, None, None, None
        gram, log, signs, logs, *kept = ctx.saved_tensors
        grid, iterations = ctx.grid, ctx.iterations
        table, transform = evaluation_table(grid, lags(ctx.taps), gram), FilterTransform.of(grid, gram)
        with full_precision(gram):
            if torch.is_grad_enabled():  # for second derivatives, through torch's own rules
                powers = Powers.of(evaluate(table, gram), iterations)
                weighted = powers.iterates[-1] * _weights(powers, iterations, log)[..., None, None]
                value = transform(weighted.flatten(2)).abs().sum(0).reshape(grad.shape)
                (gradient,) = torch.autograd.grad(value, gram, grad, create_graph=True)
                return gradient, None, None, None, None
            if kept:
                powers = Powers(kept[: iterations - 1], kept[iterations - 1 :], logs)
            else:
                powers = Powers.of(evaluate(table, gram), iterations - 1)
            symmetric = (grad + grad.mT) / 2
            cotangent = gram.new_empty(2, len(grid), *gram.shape[1:])
            for block in _blocks(grid, gram):
                here, rest = slice(block.first, block.last), slice(block.first, None)
                spectra = transform.adjoint(signs[:, block.signs] * symmetric[:, here, rest].flatten())
                spectra = spectra.reshape(*cotangent[..., here, rest].shape)
                cotangent[..., here, rest] = spectra
                cotangent[0, ..., rest, here] = spectra[0].mT
                cotangent[1, ..., rest, here] = -spectra[1].mT
            if powers.scales:
                cotangent *= _weights(powers, iterations, log)[..., None, None]
            square_adjoint_(cotangent, powers.iterates[-1])
            powers.pull_back_(cotangent)
            return evaluate_adjoint(table, cotangent), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, tuple[int, ...]]:
        return run_on_each(_FilterSums, in_dims, *arguments)


def _weights(powers: Powers, iterations: int, log: Tensor) -> Tensor:
    """The weights of the frequencies; the smallest are 0, as subnormal numbers are slow to compute with.

    The last iterate but two has entries up to 1, its square up to r and the square of that up to r³, so each of them
    could add at most the smallest weight times r³ to |K_(t+1)[i,j,x]|.
    """
    weights = powers.weights(iterations, log)
    return weights.masked_fill(weights < _SMALLEST_WEIGHT[weights.dtype], 0)


@dataclass(frozen=True)
class _Block:
    """Rows ``first`` to ``last`` of A, and where the signs of its columns from ``first`` on are kept."""

    first: int
    last: int
    signs: slice


def _blocks(grid: FrequencyGrid, gram: Tensor) -> list[_Block]:
    groups, order = gram.shape[1:3]
    each = max(LEAST_ROWS, PIECE_BYTES // (4 * len(grid) * groups * order * gram.element_size()))
    blocks, done = [], 0
    for first in range(0, order, each):
        last = min(first + each, order)
        width = groups * (last - first) * (order - first)
        blocks.append(_Block(first, last, slice(done, done + width)))
        done += width
    return blocks
