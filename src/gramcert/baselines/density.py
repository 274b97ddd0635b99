"""A Frobenius-like norm of the spectral density, sampled (Araujo et al. 2021)."""

import torch
from torch import Tensor

from gramcert.arguments import Sizes, axis_sizes
from gramcert.baselines.kernels import checked_finite_kernel
from gramcert.bounds.circular import unit_scale
from gramcert.bounds.transfer import sampling_factor
from gramcert.geometry.symbol import FrequencyGrid, symbols, taps_first

# Frequencies per tap interval where the caller does not say: the sampling factor is then 1.005 per axis.
SAMPLES_PER_INTERVAL = 16


def sampled_density(kernel: Tensor, samples: Sizes | None = None) -> Tensor:
    r"""**Upper bound** of the spectral norm at every input size, circular and zero padding, stride 1.

    The published quantity is (Σ_i sup_ω Σ_j |E_ij(ω)|²)^(1/2), or the same with rows and columns exchanged; here the
    smaller of the two. The suprema are taken over an equidistant grid of m frequencies per axis. A row r_i(ω) of E has
    ‖r_i(ω)‖ = max |r_i(ω)v| over unit vectors v, so a grid's maximum falls short of the supremum at most by
    :func:`gramcert.sampling_factor`, and multiplying by it makes the value a bound, which the sampled quantity alone is
    not. (As trigonometric polynomials of degree k-1 the sums of squares give a larger factor.)

    Args:
        kernel: real, shape (channels out, channels in, \*sizes) with one to three sizes.
        samples: frequencies per axis, at least as many as taps; by default 16 per interval between taps.

    Returns:
        Tensor with one element.

    Example:
        >>> import torch
        >>> from gramcert.baselines import sampled_density
        >>> round(sampled_density(torch.ones(1, 1, 3, 3), 32).item(), 3)
        9.087

    References:
        Araujo, Negrevergne, Chevaleyre, Atif, On Lipschitz Regularization of Convolutional Layers using Toeplitz Matrix
        Theory, AAAI 2021.
    """
    kernel, scale = unit_scale(checked_finite_kernel("sampled_density", kernel))
    taps = tuple(kernel.shape[2:])
    if samples is None:
        samples = tuple(max(1, SAMPLES_PER_INTERVAL * (k - 1)) for k in taps)
    sizes = axis_sizes("sampled_density", "samples", samples, len(taps))
    if any(m < k for m, k in zip(sizes, taps, strict=True)):
        raise ValueError(f"sampled_density(samples={sizes}): expected at least the kernel size {taps} on every axis")
    rows, columns = _largest_sums(kernel, FrequencyGrid.unshifted(sizes))
    return scale * torch.minimum(rows.sum(), columns.sum()).sqrt() * sampling_factor(taps, sizes)


def _largest_sums(kernel: Tensor, grid: FrequencyGrid) -> tuple[Tensor, Tensor]:
    """For each row and for each column of E the largest sum of squares on the grid."""
    matrices = taps_first(kernel, len(grid.sizes))
    tables = grid.tables([range(size) for size in kernel.shape[2:]], kernel)
    rows, columns = kernel.new_zeros(kernel.shape[0]), kernel.new_zeros(kernel.shape[1])
    for chunk in grid.chunks(matrices[0]):
        blocks = symbols(matrices, grid.twiddles(chunk, tables))
        squares = blocks.real.square() + blocks.imag.square()
        rows = torch.maximum(rows, squares.sum(2).amax(0))
        columns = torch.maximum(columns, squares.sum(1).amax(0))
    return rows, columns
