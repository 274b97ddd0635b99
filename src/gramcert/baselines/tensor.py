"""The spectral norm of the kernel as a tensor (Grishina et al. 2024)."""

import math
import string

import torch
from torch import Tensor

from gramcert.arguments import axis_sizes, checked_iterations
from gramcert.baselines.kernels import checked_finite_kernel
from gramcert.bounds.circular import unit_scale
from gramcert.bounds.powers import positive


def tensor_norm(
    kernel: Tensor, iterations: int = 50, starts: int = 4, generator: torch.Generator | None = None
) -> Tensor:
    r"""**Estimate of an upper bound** of the spectral norm at every input size, circular and zero padding, stride 1.

    √(k1···kD)·max |Σ K[o,i,a,…] u_o v_i w_a ···| over complex unit vectors, one for each axis of the kernel. The exact
    maximum would give an upper bound, because unit vectors u, v with the phases e^(-ia·ω)/√k as the others are one
    choice; complex vectors are needed for that. The alternating maximisation used here (each vector in turn is set to
    its best value for fixed others) approaches it from below and may stop at a local maximum: the result is no bound.

    Args:
        kernel: real, shape (channels out, channels in, \*sizes) with one to three sizes.
        iterations: rounds of the alternating maximisation, at least 1.
        starts: number of random starts, of which the best is taken.
        generator: source of the random starts.

    Returns:
        Tensor with one element.

    Example:
        >>> import torch
        >>> from gramcert.baselines import tensor_norm
        >>> round(tensor_norm(torch.ones(1, 1, 3, 3)).item(), 4)
        9.0

    References:
        Grishina, Gorbunov, Rakhuba, Tight and Efficient Upper Bound on Spectral Norm of Convolutional Layers,
        ECCV 2024.
    """
    kernel, scale = unit_scale(checked_finite_kernel("tensor_norm", kernel))
    checked_iterations("tensor_norm", iterations, at_least=1)
    axis_sizes("tensor_norm", "starts", starts, 1)
    tensor = kernel.to(kernel.dtype.to_complex())
    vectors = [
        _unit(torch.randn(starts, size, generator=generator, dtype=tensor.dtype).to(kernel.device))
        for size in kernel.shape
    ]
    values = kernel.new_zeros(starts)
    for _ in range(iterations):
        for axis in range(kernel.dim()):
            best = _contracted_except(axis, tensor, vectors).conj()
            values = torch.linalg.vector_norm(best, dim=1)
            vectors[axis] = _unit(best)
    return scale * math.sqrt(math.prod(kernel.shape[2:])) * values.amax()


def _contracted_except(axis: int, tensor: Tensor, vectors: list[Tensor]) -> Tensor:
    """Σ K·Π of all vectors but one, for each start: the linear form in the vector left out."""
    letters = string.ascii_lowercase[: tensor.dim()]
    others = [place for place in range(tensor.dim()) if place != axis]
    equation = ",".join([letters, *(f"z{letters[place]}" for place in others)])
    form: Tensor = torch.einsum(f"{equation}->z{letters[axis]}", tensor, *(vectors[place] for place in others))
    return form


def _unit(vectors: Tensor) -> Tensor:
    return vectors / positive(torch.linalg.vector_norm(vectors, dim=1, keepdim=True))
