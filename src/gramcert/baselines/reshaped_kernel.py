"""The norm of the kernel as a matrix (Miyato 2018), which torch's spectral_norm divides by."""

import torch
from torch import Tensor

from gramcert.baselines.kernels import checked_finite_kernel
from gramcert.bounds.circular import unit_scale


def reshaped_kernel_norm(kernel: Tensor) -> Tensor:
    """**Estimate** of a convolution's spectral norm: σ of the kernel as a matrix (channels out, everything else).

    What ``torch.nn.utils.parametrizations.spectral_norm`` approaches by power iteration, here exact. It is never an
    upper bound: σ(T) reaches up to √(k1···kD) times it. Where one window of the layer lies inside the input without
    wrapping (n >= k on every axis, stride 1, same padding) the matrix is a part of T and so it is a lower bound;
    for smaller inputs it is neither.

    Args:
        kernel: real, shape (channels out, channels in, *sizes) with one to three sizes.

    Returns:
        Tensor with one element.

    Example:
        >>> import torch
        >>> from gramcert.baselines import reshaped_kernel_norm
        >>> round(reshaped_kernel_norm(torch.ones(1, 1, 3, 3)).item(), 4)  # the convolution's norm tends to 9
        3.0

    References:
        Miyato et al., Spectral Normalization for Generative Adversarial Networks, ICLR 2018.
    """
    kernel, scale = unit_scale(checked_finite_kernel("reshaped_kernel_norm", kernel))
    norm: Tensor = torch.linalg.matrix_norm(kernel.flatten(1), ord=2)
    return scale * norm
