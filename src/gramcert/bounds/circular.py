r"""Circular padding (Algorithm 2): the largest Gram bound over a grid of frequencies.

A circular convolution is block diagonal in the Fourier basis with the symbols E(2πj/n) as blocks, so its norm is the
largest σ(E) on the grid, and Gram iteration bounds each block.
"""

import math
from typing import Any

import torch
from torch import Tensor

from gramcert.arguments import Sizes, axis_sizes, checked_iterations, checked_kernel, require_finite
from gramcert.bounds.autograd import full_precision, run, run_on_each
from gramcert.bounds.gram import gram_gradient, gram_norm, gram_values
from gramcert.bounds.gram_filter import gram_filter, lags, row_lengths, unit_rows
from gramcert.bounds.powers import Powers, positive, scale_by
from gramcert.bounds.summed import squared
from gramcert.geometry.symbol import FilterSymbol, FrequencyGrid, symbols, symbols_adjoint, taps_first


def norm2_circ(kernel: Tensor, input_size: Sizes, iterations: int = 6) -> Tensor:
    """Upper bound of the spectral norm of a circular convolution with stride 1 on inputs of one size.

    A bound in exact arithmetic; differentiable, with the gradient through the maximising frequency alone.

    Args:
        kernel: real, shape (channels out, channels in, *sizes) with one to three sizes; larger than the input it wraps.
        input_size: one int per axis, or one int for all axes.
        iterations: number of Gram products.

    Returns:
        Tensor with one element.

    Example:
        >>> import torch, gramcert
        >>> kernel = torch.ones(1, 1, 3, 3)
        >>> float(gramcert.norm2_circ(kernel, 2)), float(gramcert.norm2_circ(kernel, (8, 5)))
        (9.0, 9.0)
    """
    kernel = checked_kernel("norm2_circ", kernel)
    sizes = axis_sizes("norm2_circ", "input_size", input_size, kernel.dim() - 2)
    iterations = checked_iterations("norm2_circ", iterations)
    return grid_norm(kernel[None], FrequencyGrid.unshifted(sizes), iterations, call="norm2_circ")


def grid_norm(
    kernels: Tensor, grid: FrequencyGrid, iterations: int, *, power: float = math.inf, call: str = "grid_norm"
) -> Tensor:
    """ℓ^power norm over the whole grid of the Gram bounds of the symbols; ``inf`` is the largest one.

    Args:
        kernels: shape (groups, channels out, channels in, *sizes); each group has its own symbols.
        grid: the frequencies.
        iterations: number of Gram products.
        power: ``inf`` for the maximum over frequencies and groups, or a finite exponent.
        call: name of the public function, for errors.
    """
    return run(_GridNorm, kernels, grid, iterations, power, call)[0]


class _GridNorm(torch.autograd.Function):
    """Forward in chunks of frequencies. Backward through the maximiser alone, or for a finite power through all."""

    @staticmethod
    def forward(
        kernels: Tensor, grid: FrequencyGrid, iterations: int, power: float, call: str
    ) -> tuple[Tensor, Tensor]:
        require_finite(call, "kernel", kernels)
        scaled, scale = unit_scale(kernels)
        if _are_vectors(kernels):
            values = row_lengths(scaled.flatten(1)[:, None]).mT.expand(len(grid), -1)
        else:
            by_filter = iterations and _has_small_filter(kernels)
            values = (_filter_values if by_filter else _symbol_values)(scaled, grid, iterations)
        if power == math.inf:
            largest, index = values.flatten().max(0)
            return scale * largest, index
        largest = positive(values.amax())
        weights = grid.multiplicity(kernels.device).to(values.dtype)[:, None]
        return scale * (largest * (weights * (values / largest) ** power).sum() ** (1 / power)), values

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        kernels, ctx.grid, ctx.iterations, ctx.power, _ = inputs
        value, found = output
        ctx.mark_non_differentiable(found)
        ctx.save_for_backward(kernels, value, found)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        kernels, value, found = ctx.saved_tensors
        backward = _through_maximum if ctx.power == math.inf else _through_all
        with full_precision(kernels):
            # The value is homogeneous of degree 1, so the gradient is the same at the scaled kernels.
            scaled, scale = unit_scale(kernels)
            return grad * backward(scaled, value / positive(scale), found, ctx), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, tuple[int, ...]]:
        return run_on_each(_GridNorm, in_dims, *arguments)


def _symbol_values(kernels: Tensor, grid: FrequencyGrid, iterations: int) -> Tensor:
    """The bound at each frequency and for each group, from E(ω)."""
    taps, tables = taps_first(kernels, len(grid.sizes)), _tables(grid, kernels)
    # Filled in place: small results kept between large temporaries would fragment the memory without bound.
    values = kernels.new_empty(len(grid), kernels.shape[0])
    for chunk in grid.chunks(taps):
        values[chunk] = gram_values(symbols(taps, grid.twiddles(chunk, tables)), iterations)
    return values


def _filter_values(kernels: Tensor, grid: FrequencyGrid, iterations: int) -> Tensor:
    """The same from the filter of the smaller Gram matrix, in real arithmetic: no E, half the work to square."""
    wide = kernels if kernels.shape[1] <= kernels.shape[2] else kernels.transpose(1, 2)
    scaled, lengths = unit_rows(wide)
    symbol = FilterSymbol(gram_filter(scaled), grid, lags(kernels.shape[3:]))
    values = kernels.new_empty(len(grid), kernels.shape[0])
    for chunk in symbol.real_chunks:
        powers = Powers.of(symbol.summed(chunk), iterations, keep=False, square=None if symbol.is_constant else squared)
        reading = torch.linalg.vector_norm(powers.last(), dim=(-2, -1))
        values[chunk] = torch.exp(powers.log + 2.0**-iterations * torch.log(reading))
    return values * lengths.amax(1)


def _are_vectors(kernels: Tensor) -> bool:
    """Whether the norm of each group is a length, as that of the last layer of a critic."""
    return min(kernels.shape[1:3]) == math.prod(kernels.shape[3:]) == 1


def _has_small_filter(kernels: Tensor) -> bool:
    """Whether the lags of the Gram matrix are fewer than what its products with E would take."""
    return math.prod([2 * size - 1 for size in kernels.shape[3:]]) <= 4 * max(kernels.shape[1:3])


def unit_scale(kernel: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel divided by its largest absolute entry, and that entry: squares neither overflow nor vanish."""
    scale = kernel.detach().abs().amax()
    return kernel / positive(scale), scale


def _through_maximum(kernels: Tensor, value: Tensor, index: Tensor, ctx: Any) -> Tensor:
    groups = kernels.shape[0]
    # A mask instead of indexing, so that it also works on the batched tensors of vmap.
    chosen = (torch.arange(groups, device=kernels.device) == index % groups).to(kernels.dtype)
    if _are_vectors(kernels):
        return chosen.reshape(-1, *(1,) * (kernels.dim() - 1)) * (kernels / positive(value))
    twiddles = ctx.grid.twiddles((index // groups)[None], _tables(ctx.grid, kernels))
    kernel = torch.tensordot(chosen, kernels, 1)
    block = symbols(taps_first(kernel, len(ctx.grid.sizes)), twiddles)
    gradient = symbols_adjoint(gram_gradient(block, value[None], ctx.iterations), twiddles, kernel.shape)
    return chosen.reshape(-1, *(1,) * kernel.dim()) * gradient


def _through_all(kernels: Tensor, value: Tensor, values: Tensor, ctx: Any) -> Tensor:
    """d(Σ m f^p)^(1/p) = Σ m (f/value)^(p-1) df."""
    taps, tables = taps_first(kernels, len(ctx.grid.sizes)), _tables(ctx.grid, kernels)
    weights = ctx.grid.multiplicity(kernels.device).to(values.dtype)[:, None]
    gradient = torch.zeros_like(kernels)
    for chunk in ctx.grid.chunks(taps):
        twiddles = ctx.grid.twiddles(chunk, tables)
        blocks = symbols(taps, twiddles)
        # A second derivative must see how the bounds depend on the kernel.
        bounds = gram_norm(blocks, ctx.iterations) if torch.is_grad_enabled() else values[chunk]
        blocks = gram_gradient(blocks, bounds, ctx.iterations)
        blocks = scale_by(blocks, weights[chunk] * (bounds / positive(value)) ** (ctx.power - 1))
        gradient = gradient + symbols_adjoint(blocks, twiddles, kernels.shape)
    return gradient


def _tables(grid: FrequencyGrid, kernels: Tensor) -> list[Tensor]:
    return grid.tables([range(size) for size in kernels.shape[3:]], kernels)
