"""The smallest of the kernel's reshaped norms (Singla & Feizi 2021)."""

import itertools
import math

import torch
from torch import Tensor

from gramcert.baselines.kernels import checked_finite_kernel
from gramcert.bounds.circular import unit_scale


def four_reshapes(kernel: Tensor) -> Tensor:
    r"""**Upper bound** of the spectral norm at every input size, circular and zero padding, stride 1.

    √(k1···kD)·min σ(M_S) over the subsets S of spatial axes, where M_S is the kernel as a matrix with the output
    channels and the axes in S as rows, the input channels and the other axes as columns. In 2-D there are four.

    Why: with w_S the vector of phases e^(-ia·ω) over the taps of the axes in S, E(ω) = (I⊗w_S)ᵀ·M_S·(I⊗w_rest), and
    ‖w_S‖‖w_rest‖ = √(k1···kD).

    Args:
        kernel: real, shape (channels out, channels in, \*sizes) with one to three sizes.

    Returns:
        Tensor with one element.

    Example:
        >>> import torch
        >>> from gramcert.baselines import four_reshapes
        >>> round(four_reshapes(torch.ones(1, 1, 3, 3)).item(), 4)
        9.0

    References:
        Singla and Feizi, Fantastic Four: Differentiable Bounds on Singular Values of Convolution Layers, ICLR 2021.
    """
    kernel, scale = unit_scale(checked_finite_kernel("four_reshapes", kernel))
    spatial = range(2, kernel.dim())
    norms = []
    for count in range(len(spatial) + 1):
        for rows in itertools.combinations(spatial, count):
            columns = [axis for axis in spatial if axis not in rows]
            height = kernel.shape[0] * math.prod(kernel.shape[axis] for axis in rows)
            matrix = kernel.permute(0, *rows, 1, *columns).reshape(height, -1)
            norms.append(torch.linalg.matrix_norm(matrix, ord=2))
    return scale * math.sqrt(math.prod(kernel.shape[2:])) * torch.stack(norms).amin()
