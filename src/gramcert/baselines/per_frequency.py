"""Singular values frequency by frequency (Sedghi, Gupta, Long 2019)."""

import torch
from torch import Tensor

from gramcert.arguments import Sizes, axis_sizes
from gramcert.baselines.kernels import checked_finite_kernel
from gramcert.bounds.circular import unit_scale
from gramcert.geometry.symbol import FrequencyGrid, symbols, taps_first


def frequency_svd(kernel: Tensor, input_size: Sizes) -> Tensor:
    """**Exact** spectral norm of a circular convolution with stride 1, by one SVD per frequency.

    max σ(E(2πj/n)) over the n frequencies per axis. For zero padding at the same input size it is an estimate, neither
    an upper nor a lower bound.

    Args:
        kernel: real, shape (channels out, channels in, *sizes) with one to three sizes; larger than the input it wraps.
        input_size: one int per axis, or one int for all axes.

    Returns:
        Tensor with one element.

    Example:
        >>> import torch
        >>> from gramcert.baselines import frequency_svd
        >>> round(frequency_svd(torch.tensor([[[2.0, -1.0, 2.0]]]) / 3, 8).item(), 4)
        1.6667

    References:
        Sedghi, Gupta, Long, The Singular Values of Convolutional Layers, ICLR 2019.
    """
    kernel, scale = unit_scale(checked_finite_kernel("frequency_svd", kernel))
    sizes = axis_sizes("frequency_svd", "input_size", input_size, kernel.dim() - 2)
    grid = FrequencyGrid.unshifted(sizes)
    taps = taps_first(kernel, len(sizes))
    tables = grid.tables([range(size) for size in kernel.shape[2:]], kernel)
    largest = [
        torch.linalg.svdvals(symbols(taps, grid.twiddles(chunk, tables)))[:, 0].amax() for chunk in grid.chunks(taps[0])
    ]
    return scale * torch.stack(largest).amax()
