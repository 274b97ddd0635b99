"""Checks of what a caller passed: one clear sentence naming the call, what was expected and what came."""

from collections.abc import Sequence

import torch
from torch import Tensor

Sizes = int | Sequence[int]

REAL_TYPES = (torch.float32, torch.float64)
COMPLEX_TYPES = (torch.complex64, torch.complex128)


def checked_iterations(call: str, iterations: int, *, at_least: int = 0, reason: str = "") -> int:
    """The number of Gram products, an integer not below ``at_least``."""
    if isinstance(iterations, bool) or not isinstance(iterations, int):
        raise TypeError(f"{call}(iterations): expected an int, got {type(iterations).__name__}")
    if iterations < at_least:
        raise ValueError(f"{call}(iterations={iterations}): expected at least {at_least}{reason}, got {iterations}")
    return iterations


def checked_kernel(call: str, kernel: Tensor) -> Tensor:
    """A real floating-point kernel of shape (channels, channels, size, ...) with one to three sizes."""
    if not isinstance(kernel, Tensor):
        raise TypeError(f"{call}(kernel): expected a torch.Tensor, got {type(kernel).__name__}")
    if kernel.dtype not in REAL_TYPES:
        raise TypeError(f"{call}(kernel): expected a real float32 or float64 kernel, got {kernel.dtype}")
    if not 3 <= kernel.dim() <= 5:
        raise ValueError(
            f"{call}(kernel): expected shape (channels out, channels in, size, ...) with 1 to 3 sizes, "
            f"got shape {tuple(kernel.shape)}"
        )
    if 0 in kernel.shape:
        raise ValueError(f"{call}(kernel): expected no empty dimension, got shape {tuple(kernel.shape)}")
    return kernel


def require_finite(call: str, name: str, tensor: Tensor) -> None:
    """Refuse NaN and infinity.

    A compiled graph cannot branch on values, so under ``torch.compile`` the check is left out and a NaN shows up
    as a NaN result instead.
    """
    if torch.compiler.is_compiling():
        return
    if not bool(torch.isfinite(tensor.abs().amax())):  # amax passes NaN on
        count = int((~torch.isfinite(tensor)).sum())
        raise ValueError(f"{call}({name}): expected finite values, got {count} NaN or infinite of {tensor.numel()}")


def axis_sizes(call: str, name: str, sizes: Sizes, axes: int, *, at_least: int = 1, what: str = "") -> tuple[int, ...]:
    """One integer per axis; a lone int stands for the same size on every axis."""
    if isinstance(sizes, int) and not isinstance(sizes, bool):
        sizes = (sizes,) * axes
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence):
        raise TypeError(f"{call}({name}): expected an int or a sequence of ints, got {sizes!r}")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{call}({name}): expected ints, got {size!r}")
    result = tuple(sizes)
    if len(result) != axes:
        raise ValueError(f"{call}({name}={result}): {what or 'the kernel'} needs {axes} sizes, got {len(result)}")
    if any(size < at_least for size in result):
        raise ValueError(f"{call}({name}={result}): expected sizes of at least {at_least}, got {min(result)}")
    return result
