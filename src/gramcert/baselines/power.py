"""Power iteration on the layer itself (Ryu 2019, Farnia 2019)."""

import dataclasses

import torch
from torch import Tensor, nn

from gramcert.arguments import Sizes, axis_sizes, checked_iterations
from gramcert.baselines.kernels import checked_finite_kernel
from gramcert.bounds.circular import unit_scale
from gramcert.bounds.powers import positive
from gramcert.geometry.convolution import Convolution


def power_iteration(
    layer: nn.Module | Convolution,
    input_size: Sizes,
    iterations: int = 100,
    generator: torch.Generator | None = None,
) -> Tensor:
    """**Lower bound** of the spectral norm of a layer at one input size.

    x ← TᵀTx/‖TᵀTx‖ with the layer T and its adjoint, from a Gaussian start; the value is ‖Tx‖/‖x‖. In exact arithmetic
    it never exceeds the norm and grows towards it. A start that does not depend on the kernel's signs, such as all
    ones, can be orthogonal to the answer and give 0.

    Args:
        layer: a torch convolution layer or a :class:`gramcert.Convolution`.
        input_size: one int per axis, or one int for all axes.
        iterations: number of times TᵀT is applied.
        generator: source of the random start.

    Returns:
        Tensor with one element.

    Example:
        >>> import torch, gramcert
        >>> from gramcert.baselines import power_iteration
        >>> layer = gramcert.Convolution(torch.tensor([[[1.0], [-1.0]]]))
        >>> round(power_iteration(layer, 4).item(), 5)
        1.41421

    References:
        Ryu et al., Plug-and-Play Methods Provably Converge with Properly Trained Denoisers, ICML 2019;
        Farnia, Zhang, Tse, Generalizable Adversarial Training via Spectral Normalization, ICLR 2019.
    """
    description = Convolution.of(layer, call="power_iteration")
    kernel, scale = unit_scale(checked_finite_kernel("power_iteration", description.kernel))
    sizes = axis_sizes("power_iteration", "input_size", input_size, description.axes)
    checked_iterations("power_iteration", iterations)
    scaled = dataclasses.replace(description, kernel=kernel)
    shape = (description.in_channels, *sizes)
    x = _unit(torch.randn(shape, generator=generator, dtype=kernel.dtype).to(kernel.device))
    with torch.no_grad():
        for _ in range(iterations):
            x = _unit(scaled.adjoint(_unit(scaled.apply(x)), sizes))
        gain: Tensor = torch.linalg.vector_norm(scaled.apply(x)) / positive(torch.linalg.vector_norm(x))
    return scale * gain


def _unit(x: Tensor) -> Tensor:
    return x / positive(torch.linalg.vector_norm(x))
