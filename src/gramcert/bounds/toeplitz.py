r"""Zero padding, every input size at once (Algorithm 3, Theorem 4 with its Frobenius factor corrected).

Let K_1 = K and K_(s+1) be the correlation of K_s with itself, summed over one channel index: the symbol of K_(t+1) is
G_t = G^(2^(t-1)) with G = EE*. Its spatial size is N = 2^t(k-1)+1 per axis, so on a grid of N frequencies per axis the
t correlations are small matrix products without aliasing, and one inverse transform gives the filter K_(t+1).

For every ω, and so for every size of zero-padded input,

* σ(E(ω))^(2^t) = ‖G_t(ω)‖ <= max_i Σ_{j,x} |K_(t+1)[i,j,x]|, the ``inf`` reading, because a row sum of |G_t(ω)| is at
  most the row sum over all taps;
* ‖G_t(ω)‖_F <= (ΠN Σ |K_(t+1)|²)^(1/2) by Cauchy-Schwarz over the ΠN taps, the ``fro`` reading. By Parseval it is
  (Σ_grid ‖G_t(ω)‖_F²)^(1/2): the ℓ^p norm over the grid, p = 2^(t+1), of the Gram bounds of Algorithm 2.

Both decrease to the supremum of σ(E) over all frequencies, not to the norm at one input size.
"""

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gramcert.arguments import checked_iterations, checked_kernel, require_finite
from gramcert.bounds.autograd import full_precision, run, run_on_each
from gramcert.bounds.circular import grid_norm, unit_scale
from gramcert.bounds.filter_powers import FilterPowers, filter_grid
from gramcert.bounds.gram import gram_norm
from gramcert.bounds.gram_filter import absolute_sums, gram_filter, unit_rows
from gramcert.geometry.symbol import COMPLEX

ToeplitzNorm = Literal["inf", "fro"]

# Powers held for the backward; past it they are computed again.
KEPT_BYTES = 3 * 2**27

# More than these are refused: iterations, and bytes of one row of the last iterate.
MOST_ITERATIONS = 60
ROW_BYTES = 2**30


def norm2_toep(kernel: Tensor, iterations: int = 6, *, norm: ToeplitzNorm = "inf") -> Tensor:
    """Upper bound of the spectral norm of a zero-padded convolution with stride 1, for every input size at once.

    A bound in exact arithmetic, differentiable. It tends to the supremum of σ over all frequencies as ``iterations``
    grows; the norm at input size n lies below that by O(1/n²).

    Args:
        kernel: real, shape (channels out, channels in, *sizes) with one to three sizes.
        iterations: number t of Gram products, at least 1 for ``"inf"``. Time and memory grow as 2^t per axis.
        norm: how the last iterate is read, ``"inf"`` (Algorithm 3) or ``"fro"``.

    Returns:
        Tensor with one element.

    Example:
        >>> import torch, gramcert
        >>> kernel = torch.tensor([[[1.0, 0.0, -1.0]]])
        >>> [round(float(gramcert.norm2_toep(kernel, t)), 4) for t in (1, 3, 6)]
        [2.0, 2.0, 2.0]
        >>> round(float(gramcert.norm2_toep(kernel, 6, norm="fro")), 4)
        2.0348
    """
    kernel = checked_kernel("norm2_toep", kernel)
    if norm not in get_args(ToeplitzNorm):
        raise ValueError(f"norm2_toep(norm={norm!r}): expected one of {', '.join(get_args(ToeplitzNorm))}")
    iterations = checked_iterations("norm2_toep", iterations)
    if iterations > MOST_ITERATIONS:
        raise ValueError(
            f"norm2_toep(iterations={iterations}): expected at most {MOST_ITERATIONS}, the grid doubles at each"
        )
    grid = filter_grid(kernel.shape[2:], iterations)
    needed = len(grid) * min(kernel.shape[:2]) * COMPLEX[kernel.dtype].itemsize
    if needed > ROW_BYTES:
        raise ValueError(
            f"norm2_toep(iterations={iterations}): one row of the iterate has {'×'.join(map(str, grid.sizes))} taps "
            f"per channel and takes {needed / 2**30:.3g} GiB, more than {ROW_BYTES / 2**30:.0f}; use fewer iterations"
        )
    if norm == "fro":
        return grid_norm(kernel[None], grid, iterations, power=2.0 ** (iterations + 1), call="norm2_toep")
    reason = " for norm='inf', which bounds the spectral norm only after a Gram product"
    checked_iterations("norm2_toep", iterations, at_least=1, reason=reason)
    require_finite("norm2_toep", "kernel", kernel)
    # The smaller Gram side, the output side when equal: exchanging the channels transposes every symbol.
    oriented = kernel if kernel.shape[0] <= kernel.shape[1] else kernel.transpose(0, 1)
    if math.prod(kernel.shape[2:]) == 1:
        return gram_norm(oriented.flatten(1), iterations, norm="inf")
    with full_precision(kernel):
        entries, entry = unit_scale(oriented[None])
        scaled, lengths = unit_rows(entries)
        scale = entry * lengths.amax()
        if iterations == 1:
            largest = absolute_sums(scaled)[0].sum(-1).amax()
        else:
            # Held for a backward that may come; where torch does not say so they are computed again.
            gram, taps = gram_filter(scaled), tuple(kernel.shape[2:])
            hold = kernel.requires_grad and torch.is_grad_enabled() and _fits(gram, taps, iterations)
            largest, logs, *_ = run(_LargestRowSum, gram, taps, iterations, hold)
            scale = scale * torch.exp(logs.amax())
        # Of a kernel of zeros: neither a value nor a slope.
        return scale * largest.clamp_min(torch.finfo(kernel.dtype).tiny) ** (2.0**-iterations)


class _LargestRowSum(torch.autograd.Function):
    """The largest row sum of Â; its backward pulls back the single row that attains it."""

    @staticmethod
    def forward(gram: Tensor, taps: tuple[int, ...], iterations: int, hold: bool) -> tuple[Tensor, ...]:
        powers = FilterPowers(gram, taps, iterations, hold=hold)
        sums, logs, _ = powers.sums(with_signs=False)
        largest, row = sums[0].sum(-1).max(0)
        return largest, logs, row, *powers.tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        gram, ctx.taps, ctx.iterations, _ = inputs
        _, *constants = output
        ctx.mark_non_differentiable(*constants)
        ctx.save_for_backward(gram, *constants)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        gram, logs, row, *stored = ctx.saved_tensors
        with full_precision(gram):
            # A second derivative must see how the powers depend on the kernel: then they are computed again.
            again = torch.is_grad_enabled()
            hold = _fits(gram, ctx.taps, ctx.iterations)
            powers = FilterPowers(gram, ctx.taps, ctx.iterations, hold=hold, stored=() if again else stored)
            return grad * _row_gradient(powers, logs, row), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, tuple[int, ...]]:
        return run_on_each(_LargestRowSum, in_dims, *arguments)


def _fits(gram: Tensor, taps: tuple[int, ...], iterations: int) -> bool:
    """Whether all powers fit into ``KEPT_BYTES``."""
    each = len(filter_grid(taps, iterations)) * gram[0].numel() * COMPLEX[gram.dtype].itemsize
    return each * (iterations - 1) <= KEPT_BYTES


def _row_gradient(powers: FilterPowers, logs: Tensor, row: Tensor) -> Tensor:
    """The gradient of row sum ``row`` of Â with respect to the filter of G.

    The derivative of the row sum is sgn(K_(t+1)[i,j,x]); in the Fourier domain C(ω) = e_i c(ω)ᵀ with c the transform of
    the signs, or its Hermitian part.
    """
    weights, order, dtype = powers.weights(logs), len(powers.gram[0, 0]), COMPLEX[powers.gram.dtype]
    unit = (torch.arange(order, device=row.device) == row).to(dtype)[:, None]
    rows = unit.new_empty(0, order)
    for _, each in powers.each():
        # One growing tensor, not many: small results kept between large temporaries would fragment the memory.
        rows = torch.cat([rows, each.times(unit)[:, 0, :, 0].detach().conj()])
    spectrum = powers.inverse.adjoint(torch.sgn(powers.inverse(rows * weights))) * weights
    gradient = torch.zeros_like(powers.gram)
    for chunk, each in powers.each():
        right = spectrum[chunk, None, :, None].conj() / 2
        cotangent = each.pull_back_pair(unit.expand_as(right), right)
        gradient = gradient + powers.symbol.adjoint(chunk, cotangent) * each.growth
    return gradient
