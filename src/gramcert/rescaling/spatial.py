"""Absolute sums of the filters of Gram powers (the ``spatial`` form, Theorem 7 of the paper), with their gradient."""

from typing import Any

import torch
from torch import Tensor

from gramcert.bounds.autograd import full_precision, run, run_on_each
from gramcert.bounds.filter_powers import FilterPowers, filter_grid
from gramcert.bounds.powers import scale_by

# Powers kept for the backward, of each layer of a network; past it they are computed again.
KEPT_BYTES = 2**26

# More than this for one power is refused.
MOST_BYTES = 2**31


def filter_sums(gram: Tensor, taps: tuple[int, ...], iterations: int, call: str) -> tuple[Tensor, Tensor]:
    """The matrices A_ij = Σ_x |K_(t+1)[i,j,x]| of each group as A = exp(2^t·h)·Â.

    Args:
        gram: the filter of G, shape (lags, groups, rows, rows), of a kernel whose longest row has length 1.
        taps: of the kernel, per axis.
        iterations: t.
        call: name of the public function, for errors.

    Returns:
        Â of shape (groups, rows, rows), differentiable, and h of shape (groups,), constant.
    """
    groups, rows = gram.shape[1:3]
    if iterations == 1:
        return gram.abs().sum(0), gram.new_zeros(groups)
    grid = filter_grid(taps, iterations)
    needed = 2 * len(grid) * groups * rows**2 * gram.element_size()
    if needed > MOST_BYTES:
        raise ValueError(
            f"{call}(iterations={iterations}): the filter has {'×'.join(map(str, grid.sizes))} taps and takes "
            f"{needed / 2**30:.3g} GiB, more than {MOST_BYTES / 2**30:.0f}; use fewer iterations or form='frequency'"
        )
    hold = gram.requires_grad and torch.is_grad_enabled() and needed * (iterations - 1) <= KEPT_BYTES
    sums, logs, *_ = run(_FilterSums, gram, taps, iterations, hold)
    return sums, logs.amax(0)


class _FilterSums(torch.autograd.Function):
    """Keeps the signs of the filter, and the powers where they are small."""

    @staticmethod
    def forward(gram: Tensor, taps: tuple[int, ...], iterations: int, hold: bool) -> tuple[Tensor, ...]:
        powers = FilterPowers(gram, taps, iterations, hold=hold)
        return *powers.sums(), *powers.tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        gram, ctx.taps, ctx.iterations, _ = inputs
        _, *constants = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constants)
        ctx.save_for_backward(gram, *constants)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, None, None, None]:
        """The derivative of A_ij is sgn(K_(t+1)[i,j,x]), whose transform is the cotangent of G_t."""
        if grad is None:
            return None, None, None, None
        gram, logs, signs, *stored = ctx.saved_tensors
        with full_precision(gram):
            # A second derivative must see how the powers depend on the kernel: then they are computed again.
            stored = [] if torch.is_grad_enabled() else stored
            powers = FilterPowers(gram, ctx.taps, ctx.iterations, hold=False, stored=stored)
            cotangent = _cotangent(powers, signs, (grad + grad.mT) / 2)
            weights, gradient = powers.weights(logs), torch.zeros_like(gram)
            for chunk, each in powers.each():
                pulled = each.pull_back(scale_by(cotangent[chunk], weights[chunk]))
                gradient = gradient + powers.symbol.adjoint(chunk, pulled) * each.growth
            return gradient, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, tuple[int, ...]]:
        return run_on_each(_FilterSums, in_dims, *arguments)


def _cotangent(powers: FilterPowers, signs: Tensor, grad: Tensor) -> Tensor:
    """That of G_t, Hermitian, from the signs of K_(t+1) and a symmetric cotangent of A."""
    grads = [grad[:, first:last, first:] for first, last in powers.blocks]
    columns = zip(signs.split([part.numel() for part in grads], 1), grads, strict=True)
    spectra = [powers.inverse.adjoint(sign * part.flatten()) for sign, part in columns]
    result = spectra[0].new_empty(len(spectra[0]), *grad.shape)
    for (first, last), part, spectrum in zip(powers.blocks, grads, spectra, strict=True):
        block = spectrum.reshape(-1, *part.shape)
        result[..., first:last, first:] = block
        result[..., last:, first:last] = block[..., last - first :].mH
    return result
