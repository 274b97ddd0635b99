"""The number all methods are compared with."""

import dataclasses
import math

import torch
from torch import nn

from gramcert.arguments import Sizes, axis_sizes
from gramcert.baselines.kernels import checked_finite_kernel
from gramcert.baselines.per_frequency import frequency_svd
from gramcert.bounds.circular import unit_scale
from gramcert.geometry.convolution import Convolution

# Up to this many rows and columns a dense SVD takes about a second.
DENSE_SIDE = 1500

# Lanczos vectors between restarts: the largest singular values of a convolution lie close together.
LANCZOS_VECTORS = 48


def reference_norm(layer: nn.Module | Convolution, input_size: Sizes) -> float:
    """The spectral norm of a layer at one input size in float64, **exact** up to convergence and rounding.

    Circular layers with stride 1, dilation 1 and an output of the input's size go through :func:`frequency_svd`, group
    by group. Others get an SVD of their matrix where it has at most 1500 rows and columns, and Lanczos iteration on the
    layer and its adjoint otherwise, which converges from below.

    Args:
        layer: a torch convolution layer or a :class:`gramcert.Convolution`.
        input_size: one int per axis, or one int for all axes.

    Example:
        >>> import torch, gramcert
        >>> from gramcert.baselines import reference_norm
        >>> layer = gramcert.Convolution(torch.ones(1, 1, 3, 3), padding="same")
        >>> round(reference_norm(layer, 32), 3)
        8.946
    """
    description = Convolution.of(layer, call="reference_norm")
    kernel, scale = unit_scale(checked_finite_kernel("reference_norm", description.kernel).cpu().double())
    sizes = axis_sizes("reference_norm", "input_size", input_size, description.axes)
    scaled = dataclasses.replace(description, kernel=kernel)
    outputs = scaled.output_size(sizes)
    if not kernel.any():
        return 0.0
    if scaled.padding_mode == "circular" and outputs == sizes and {*scaled.stride, *scaled.dilation} == {1}:
        norm = max(frequency_svd(group, sizes).item() for group in kernel.chunk(scaled.groups))
    elif max(scaled.in_channels * math.prod(sizes), scaled.out_channels * math.prod(outputs)) <= DENSE_SIDE:
        norm = torch.linalg.matrix_norm(scaled.to_dense(sizes), ord=2).item()
    else:
        norm = _lanczos(scaled, sizes, outputs)
    return scale.item() * norm


def _lanczos(layer: Convolution, input_size: tuple[int, ...], output_size: tuple[int, ...]) -> float:
    # scipy's sparse solvers are slow to import and needed nowhere else.
    import numpy as np
    from scipy.sparse.linalg import LinearOperator, svds

    inputs, outputs = (layer.in_channels, *input_size), (layer.out_channels, *output_size)
    shape = (math.prod(outputs), math.prod(inputs))

    def apply(x: np.ndarray) -> np.ndarray:
        return layer.apply(torch.from_numpy(x).reshape(inputs)).numpy().ravel()

    def adjoint(y: np.ndarray) -> np.ndarray:
        return layer.adjoint(torch.from_numpy(y).reshape(outputs), input_size).numpy().ravel()

    operator = LinearOperator(shape, matvec=apply, rmatvec=adjoint, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(min(shape))
    # Tolerance 0 is machine precision.
    values = svds(
        operator,
        k=1,
        ncv=min(LANCZOS_VECTORS, min(shape)),
        tol=0,
        v0=start,
        maxiter=1000,
        return_singular_vectors=False,
    )
    return float(values[0])
