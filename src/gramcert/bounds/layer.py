"""A differentiable upper bound for any convolution or linear layer."""

import math

import torch
from torch import Tensor, nn

from gramcert.arguments import Sizes, axis_sizes, checked_iterations
from gramcert.bounds.circular import grid_norm
from gramcert.bounds.gram import gram_norm
from gramcert.bounds.transfer import sampling_factor
from gramcert.geometry.axis import layer_axes
from gramcert.geometry.convolution import Convolution, as_convolution
from gramcert.geometry.reduction import every_size_square, grouped_kernels, one_size_bound, reduced_kernels
from gramcert.geometry.symbol import FrequencyGrid

# Grid frequencies per tap interval for every size at once: the sampling factor is then 1.005 per axis.
OVERSAMPLING = 16


def norm2(layer: nn.Module | Convolution, input_size: Sizes | None = None, iterations: int = 6) -> Tensor:
    """Upper bound of the spectral norm of a layer, from its own stride, padding, padding mode, dilation and groups.

    A bound in exact arithmetic, differentiable, for losses and regularisers.

    Args:
        layer: ``nn.Conv1d/2d/3d``, ``nn.ConvTranspose1d/2d/3d``, ``nn.Linear`` or a :class:`Convolution`.
        input_size: spatial size of the input, one int per axis or one for all; ``None`` bounds every size at once.
        iterations: number of Gram products.

    Returns:
        Tensor with one element.

    Example:
        >>> import torch, gramcert
        >>> layer = torch.nn.Conv2d(1, 1, 3, padding=1, bias=False)
        >>> _ = torch.nn.init.ones_(layer.weight)
        >>> round(gramcert.norm2(layer, 16).item(), 4), round(gramcert.norm2(layer).item(), 4)
        (8.7968, 9.0873)

    How: groups are separate layers, strides and dilations reduce to stride-1 kernels on phases of the input. With
    circular padding at a size that the stride divides, the grid of that size. Otherwise, at one size, the smallest
    circulant that contains the layer, shifted or not, whichever gives less; for every size, a grid of
    ``16(k-1)`` frequencies with its :func:`sampling_factor`. Where padding repeats pixels (reflect, replicate, strided
    circular) the norm of the padding map is a factor.
    """
    iterations = checked_iterations("norm2", iterations)
    if isinstance(layer, nn.Linear) and input_size is not None:
        raise ValueError(f"norm2(input_size={input_size}): Linear has no spatial size, expected None")
    description = as_convolution("norm2", layer, matrices=False)
    if isinstance(layer, nn.Linear):
        return gram_norm(description.kernel[:, :, 0], iterations)
    kernels = reduced_kernels(grouped_kernels(description), description.stride, description.dilation)
    if input_size is None:
        taps = tuple(kernels.shape[3:])
        sizes = tuple(max(1, OVERSAMPLING * (k - 1)) for k in taps)
        factor = sampling_factor(taps, sizes) * math.sqrt(every_size_square(description))
        return grid_norm(kernels, FrequencyGrid.unshifted(sizes), iterations, call="norm2") * factor
    sizes = axis_sizes("norm2", "input_size", input_size, description.axes, what=type(layer).__name__)
    bound = one_size_bound(layer_axes(description, sizes))
    values = [grid_norm(kernels, grid, iterations, call="norm2") for grid in bound.grids]
    return torch.stack(values).amin() * bound.factor
