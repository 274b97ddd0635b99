r"""From a grid of frequencies to all of them: one small grid bounds every input size (Theorems 5 and 6, corrected).

For unit vectors u, v the function u*E(ω)v is, up to a phase, a trigonometric polynomial of degree d = (k-1)/2 per axis
(half-integers included: a function of exponential type d). From n > 2d equidistant samples per axis its maximum over
all frequencies is at most c times the largest sample on each axis, with the smaller of

* 1/cos(πd/n) (Ehlich-Zeller): near a real maximum M such a function is at least M·cos(d·distance), and the nearest
  sample is at distance π/n at most;
* (1-2d/n)^(-1/2) (Pfister-Bresler): the kernel D_n·D_(n-k+1)/(n-k+1), a product of Dirichlet kernels, reproduces the
  polynomial from its samples, and by Cauchy-Schwarz the sum of its absolute values is at most √(n/(n-k+1)).

Axis by axis the constants multiply. They hold for the norms σ(E) themselves, whatever the number of Gram iterations.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from gramcert.arguments import Sizes, axis_sizes, checked_iterations, checked_kernel
from gramcert.bounds.circular import grid_norm
from gramcert.geometry.symbol import FrequencyGrid


def sampling_factor(kernel_size: Sizes, grid_size: Sizes) -> float:
    """How much sup σ(E) over all frequencies can exceed the largest σ(E) on a grid.

    Args:
        kernel_size: taps per axis; an int is one axis.
        grid_size: frequencies per axis, at least as many as taps; an int is one axis.

    Example:
        >>> import gramcert
        >>> round(gramcert.sampling_factor((3, 3), (32, 32)), 4)
        1.0097
        >>> gramcert.sampling_factor(1, 5)
        1.0
    """
    axes = len(kernel_size) if isinstance(kernel_size, Sequence) else 1
    if not axes:
        raise ValueError("sampling_factor(kernel_size=()): expected at least one axis")
    taps = axis_sizes("sampling_factor", "kernel_size", kernel_size, axes)
    if not isinstance(grid_size, Sequence) and axes > 1:
        raise ValueError(f"sampling_factor(grid_size={grid_size}): an int is one axis, kernel_size={taps} has {axes}")
    frequencies = axis_sizes("sampling_factor", "grid_size", grid_size, axes)
    factor = 1.0
    for k, n in zip(taps, frequencies, strict=True):
        if n < k:
            raise ValueError(
                f"sampling_factor(kernel_size={taps}, grid_size={frequencies}): expected at least {k} frequencies for "
                f"{k} taps, got {n}"
            )
        factor *= min(1 / math.cos(math.pi * (k - 1) / (2 * n)), ((n - k + 1) / n) ** -0.5)
    return factor


def every_size_grid(taps: tuple[int, ...], oversampling: int, *, shifted: bool) -> tuple[FrequencyGrid, float]:
    """A grid with so many frequencies per tap interval, and its :func:`sampling_factor`.

    Shifted by half a step along the last axis every frequency is one of a pair, so that exactly half of them do.
    """
    sizes = tuple(max(1, oversampling * (size - 1)) for size in taps)
    shift = 0.5 if shifted and sizes[-1] > 1 else 0.0
    return FrequencyGrid(sizes, (*(0.0,) * (len(sizes) - 1), shift)), sampling_factor(taps, sizes)


def norm2_sampled(kernel: Tensor, grid_size: Sizes, iterations: int = 6) -> Tensor:
    """Upper bound of the spectral norm at every input size, for circular and zero padding with stride 1, from one grid.

    A bound in exact arithmetic, differentiable: the largest Gram bound on the grid times :func:`sampling_factor`.

    Args:
        kernel: real, shape (channels out, channels in, *sizes) with one to three sizes.
        grid_size: frequencies per axis, at least as many as taps, or one int for all axes.
        iterations: number of Gram products.

    Returns:
        Tensor with one element.

    Example:
        >>> import torch, gramcert
        >>> round(float(gramcert.norm2_sampled(torch.ones(1, 1, 3, 3), 32)), 3)
        9.087
    """
    kernel = checked_kernel("norm2_sampled", kernel)
    iterations = checked_iterations("norm2_sampled", iterations)
    taps = tuple(kernel.shape[2:])
    sizes = axis_sizes("norm2_sampled", "grid_size", grid_size, len(taps))
    if any(n < k for n, k in zip(sizes, taps, strict=True)):
        raise ValueError(f"norm2_sampled(grid_size={sizes}): expected at least the kernel size {taps} on every axis")
    return grid_norm(kernel[None], FrequencyGrid.unshifted(sizes), iterations, call="norm2_sampled") * sampling_factor(
        taps, sizes
    )


def theorem_5_as_printed(kernel: Tensor, grid_size: Sizes, iterations: int) -> Tensor:
    """The paper's Theorems 5 and 6 exactly as printed. **Not a bound**: kept only to show how it fails.

    With t = iterations + 1, α = 2^t⌊k/2⌋/n0 and the factor (1-α)^(-2^-t), printed for square kernels in two dimensions.
    ``docs/errata.md`` has the counterexamples; :func:`theorem_5_corrected` is what holds.
    """
    kernel, sizes, step = _theorem_5_arguments("theorem_5_as_printed", kernel, grid_size, iterations)
    factor = factor_as_printed(max(kernel.shape[2:]), min(sizes), step)
    return factor * grid_norm(kernel[None], FrequencyGrid.unshifted(sizes), iterations)


def theorem_5_corrected(kernel: Tensor, grid_size: Sizes, iterations: int) -> Tensor:
    """Upper bound at every input size in the form of Theorems 5 and 6 with the degree and the dimension put right.

    ‖E^(t)‖²_F, t = iterations + 1, is a trigonometric polynomial of degree d = 2^(t-1)(k-1) per axis, so with n0 > 2d
    its maximum is at most Π(1-2d/n0)^(-1/2) times the largest sample. :func:`norm2_sampled` is sharper at every t.
    """
    kernel, sizes, step = _theorem_5_arguments("theorem_5_corrected", kernel, grid_size, iterations)
    factor = math.prod(factor_corrected(k, n, step) for k, n in zip(kernel.shape[2:], sizes, strict=True))
    return factor * grid_norm(kernel[None], FrequencyGrid.unshifted(sizes), iterations)


def factor_as_printed(taps: int, grid_size: int, step: int) -> float:
    """(1-α)^(-2^-t) with α = 2^t⌊k/2⌋/n0 at t = ``step``, whatever the number of axes. **Not** what holds."""
    reach = 2**step * (taps // 2)
    if reach >= grid_size:
        raise ValueError(
            f"theorem_5_as_printed(grid_size={grid_size}): the theorem needs at least {reach + 1} frequencies"
        )
    return math.pow(1 - reach / grid_size, -(2.0**-step))


def factor_corrected(taps: int, grid_size: int, step: int) -> float:
    """The factor of one axis that holds: (1-2d/n0)^(-1/2), to the power of 2^-t, with d = 2^(t-1)(k-1)."""
    degree = 2 ** (step - 1) * (taps - 1)
    if grid_size <= 2 * degree:
        raise ValueError(
            f"theorem_5_corrected(grid_size={grid_size}): expected more than {2 * degree} frequencies, got {grid_size}"
        )
    return math.pow(1 - 2 * degree / grid_size, -0.5 * 2.0**-step)


def _theorem_5_arguments(
    call: str, kernel: Tensor, grid_size: Sizes, iterations: int
) -> tuple[Tensor, tuple[int, ...], int]:
    kernel = checked_kernel(call, kernel)
    return kernel, axis_sizes(call, "grid_size", grid_size, kernel.dim() - 2), checked_iterations(call, iterations) + 1
