"""A differentiable upper bound for any convolution or linear layer."""

import math

import torch
from torch import Tensor, nn

from gramcert.arguments import Sizes, axis_sizes, checked_iterations
from gramcert.bounds.circular import grid_norm
from gramcert.bounds.gram import gram_norm
from gramcert.bounds.transfer import every_size_grid
from gramcert.geometry.axis import layer_axes
from gramcert.geometry.convolution import Convolution, as_convolution
from gramcert.geometry.reduction import every_size_square, grouped_kernels, one_size_bound, reduced_kernels
from gramcert.geometry.symbol import FrequencyGrid

# Grid frequencies per tap interval for every size at once: the sampling factor is then 1.005 per axis.
OVERSAMPLING = 16

# The same of the quick bound, 1.0196 per axis, and its iterations up to an order of the Gram matrices; one less above.
QUICK_OVERSAMPLING, QUICK_ITERATIONS, SMALL_ORDER = 8, 5, 128


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
        grid, factor = every_size_grid(tuple(kernels.shape[3:]), OVERSAMPLING, shifted=False)
        return _every_size(description, kernels, grid, factor, iterations)
    return _one_size(description, kernels, input_size, iterations, what=type(layer).__name__)


def quick_norm(layer: Convolution, input_size: Sizes | None) -> Tensor:
    """The bound of :func:`norm2` at a fraction of its cost, for weights that are normalised at every step.

    A quarter of the frequencies for every size, which is 3 % more, and fewer iterations for large Gram matrices: of
    order 256 with Gaussian weights another 4 %, with the steeper spectra of trained ones less.
    """
    kernels = reduced_kernels(grouped_kernels(layer), layer.stride, layer.dilation)
    iterations = QUICK_ITERATIONS if min(kernels.shape[1:3]) <= SMALL_ORDER else QUICK_ITERATIONS - 1
    if input_size is not None:
        return _one_size(layer, kernels, input_size, iterations)
    grid, factor = every_size_grid(tuple(kernels.shape[3:]), QUICK_OVERSAMPLING, shifted=True)
    return _every_size(layer, kernels, grid, factor, iterations)


def _every_size(layer: Convolution, kernels: Tensor, grid: FrequencyGrid, factor: float, iterations: int) -> Tensor:
    return grid_norm(kernels, grid, iterations, call="norm2") * (factor * math.sqrt(every_size_square(layer)))


def _one_size(layer: Convolution, kernels: Tensor, input_size: Sizes, iterations: int, *, what: str = "") -> Tensor:
    sizes = axis_sizes("norm2", "input_size", input_size, layer.axes, what=what)
    bound = one_size_bound(layer_axes(layer, sizes))
    values = [grid_norm(kernels, grid, iterations, call="norm2") for grid in bound.grids]
    return torch.stack(values).amin() * bound.factor
