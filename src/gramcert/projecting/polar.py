r"""``polar_step``: steps of a given norm along which a loss falls fast, for convolutions.

Spectral optimisers such as Muon (Jordan 2024) step along the polar factor UV* of a gradient USV*: of all matrices of
norm 1 it has the largest inner product with the gradient. For a convolution the norm of the operator is the largest
over all frequencies, and among all symbols with σ <= 1 the inner product mean_j Re tr(E_G(ω_j)* S_j) is largest for the
polar factor at each frequency. Truncated to the taps it is a kernel again, and keeps its inner product with the
gradient, since that has no other taps: <G, truncated> = <AG, S> = mean_j ‖E_G(ω_j)‖_* >= 0. What truncation changes is
the norm, and that is what the step is then scaled by.

The polar factor comes from a quintic iteration X ← aX + bX(X*X) + cX(X*X)² on X/‖X‖_F, with products only.
"""

import torch
from torch import Tensor, nn

from gramcert.arguments import (
    Sizes,
    axis_sizes,
    checked_iterations,
    checked_kernel,
    checked_norm,
    require_dense,
    require_finite,
    widened,
)
from gramcert.bounds.layer import norm2, quick_norm
from gramcert.geometry.axis import layer_axes
from gramcert.geometry.convolution import Convolution, as_convolution
from gramcert.projecting.project import checked_steps
from gramcert.projecting.sampled import Places, Sampling, sampling_grid

# The steep quintic that brings small singular values up quickly, to between 0.7 and 1.2 (Jordan 2024).
STEEP = (3.4445, -4.7750, 2.0315)

# Steps of the quintic with p(1) = 1, p'(1) = p''(1) = 0 that follow: (15x - 10x³ + 3x⁵)/8 brings these to 1.
SETTLING, SETTLED = 2, (15 / 8, -10 / 8, 3 / 8)

# Grid frequencies per tap interval. A finer grid changes the truncated factor little.
OVERSAMPLING = 4


def polar_step(
    layer: nn.Module | Convolution | Tensor,
    gradient: Tensor,
    *,
    norm: float = 1.0,
    input_size: Sizes | None = None,
    steps: int = 5,
    iterations: int | None = None,
) -> Tensor:
    """The orthogonalised gradient of a convolution: a step of a given norm, for spectral optimisers.

    At each frequency the polar factor of the gradient, truncated to the taps and scaled by a bound of its norm as an
    operator. Its inner product with the gradient is not negative, so ``weight - lr * polar_step(layer, gradient)`` is a
    descent for small ``lr``.

    Args:
        layer: ``nn.Linear``, ``nn.Conv1d/2d/3d``, ``nn.ConvTranspose1d/2d/3d`` or a :class:`Convolution`, of which only
            the geometry matters; or a kernel (out, in, sizes...) of stride 1 or a matrix, of which only the shape does.
        gradient: a tensor of the shape of the weights.
        norm: the norm of the step.
        input_size: the one size that the layer is used at, or ``None`` for every size.
        steps: steep steps of the quintic iteration; singular values below about 3^-steps of the Frobenius norm at a
            frequency are not brought to 1.
        iterations: Gram products of the bound, which is then :func:`gramcert.norm2`; ``None`` for the quick one that
            training uses. Both are upper bounds in exact arithmetic: the norm of the step is a few per cent less.

    Returns:
        A tensor of the shape, the type and on the device of the gradient; zero if the gradient is zero.

    Example:
        >>> import torch, gramcert
        >>> _ = torch.manual_seed(0)
        >>> layer = torch.nn.Conv2d(8, 8, 3, padding=1)
        >>> step = gramcert.polar_step(layer, torch.randn(8, 8, 3, 3), norm=0.1)
        >>> 0.09 < gramcert.spectral_norm(gramcert.Convolution(step, padding=1)) < 0.1
        True

    References:
        Jordan, Muon: an optimizer for hidden layers in neural networks, 2024.
    """
    call = "polar_step"
    norm, steps = checked_norm(call, norm), checked_steps(call, steps)
    if iterations is not None:
        iterations = checked_iterations(call, iterations)
    description = _geometry(call, layer, input_size)
    if input_size is not None:
        layer_axes(description, axis_sizes(call, "input_size", input_size, description.axes), call)
    values = _checked_gradient(call, gradient, layer, description)
    with torch.no_grad():
        largest = values.abs().amax()
        if not float(largest):
            return torch.zeros_like(gradient)
        # Only the direction counts, and of moderate size nothing under- or overflows.
        kernel = (values / largest).reshape(description.kernel.shape)
        step = description.with_kernel(_truncated_polar(description.with_kernel(kernel), steps))
        bound = quick_norm(step, input_size) if iterations is None else norm2(step, input_size, iterations)
        return (step.kernel * (norm / bound)).reshape(gradient.shape).to(gradient.dtype)


def polar(matrices: Tensor, steps: int) -> Tensor:
    """About UV* of each matrix USV*, real or complex, with rows >= columns; zero of zero."""
    size = matrices.abs().square().sum((-2, -1), keepdim=True).sqrt()
    x = matrices / size.clamp_min(torch.finfo(size.dtype).tiny)
    for a, b, c in (STEEP,) * steps + (SETTLED,) * SETTLING:
        gram = x.mH @ x
        x = a * x + x @ (b * gram + c * (gram @ gram))
    return x


def _truncated_polar(layer: Convolution, steps: int) -> Tensor:
    places = Places(layer)
    matrices = places.gather(layer.kernel)
    sampling = Sampling.on(sampling_grid(places.taps, matrices[0].numel(), OVERSAMPLING), places.taps, matrices)
    found = torch.zeros_like(matrices)
    for some in torch.arange(len(sampling), device=matrices.device).split(max(1, 2**17 // matrices[0].numel())):
        portion = sampling.chosen(some)
        found += portion.adjoint(polar(portion.symbols(matrices), steps))
    return places.scatter(found, layer.kernel)


def _geometry(call: str, layer: nn.Module | Convolution | Tensor, input_size: Sizes | None) -> Convolution:
    """What a step has to know of a layer; kernels have stride 1."""
    if isinstance(layer, Tensor) and layer.dim() > 2:
        return Convolution(checked_kernel(call, layer, with_values=False).detach())
    description = as_convolution(call, layer, verb="step along")
    if input_size is not None and isinstance(layer, (nn.Linear, Tensor)):
        raise ValueError(f"{call}(input_size={input_size}): {type(layer).__name__} has no spatial size, expected None")
    return description.with_kernel(description.kernel.detach())


def _checked_gradient(call: str, gradient: Tensor, layer: object, description: Convolution) -> Tensor:
    """The finite values of a real gradient of the right shape, in float32 or float64."""
    if not isinstance(gradient, Tensor):
        raise TypeError(f"{call}(gradient): expected a torch.Tensor, got {type(gradient).__name__}")
    shape = tuple(description.kernel.shape)
    is_matrix = isinstance(layer, nn.Linear) or (isinstance(layer, Tensor) and layer.dim() == 2)
    expected = shape[:2] if is_matrix else shape
    if tuple(gradient.shape) != expected:
        raise ValueError(f"{call}(gradient): expected the weights' shape {expected}, got {tuple(gradient.shape)}")
    if not gradient.is_floating_point():
        raise TypeError(f"{call}(gradient): expected a real floating-point tensor, got {gradient.dtype}")
    require_dense(call, "gradient", gradient)
    values = widened(gradient.detach())
    require_finite(call, "gradient", values)
    return values
