"""Checks of what a caller passed: one clear sentence naming the call, what was expected and what came."""

import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Sizes = int | Sequence[int]

# Larger sizes are mistakes: no layer has them.
LARGEST_SIZE = 2**31 - 1

REAL_TYPES = (torch.float32, torch.float64)
COMPLEX_TYPES = (torch.complex64, torch.complex128)
HALF_TYPES = (torch.float16, torch.bfloat16)


def checked_iterations(call: str, iterations: int, *, at_least: int = 0, reason: str = "") -> int:
    """The number of Gram products, an integer not below ``at_least``."""
    iterations = _integer(iterations, f"{call}(iterations): expected an int, got {type(iterations).__name__}")
    if iterations < at_least:
        raise ValueError(f"{call}(iterations={iterations}): expected at least {at_least}{reason}, got {iterations}")
    return iterations


def checked_norm(call: str, norm: float) -> float:
    """A positive finite number."""
    if isinstance(norm, bool) or not isinstance(norm, (int, float)):
        raise TypeError(f"{call}(norm): expected a number, got {norm!r}")
    if not 0 < norm <= sys.float_info.max:
        raise ValueError(f"{call}(norm={norm!r}): expected a positive finite number")
    return float(norm)


def checked_kernel(call: str, kernel: Tensor, *, with_values: bool = True) -> Tensor:
    """A real floating-point kernel of shape (channels, channels, size, ...) with one to three sizes.

    One of half precision comes in float32, which holds it exactly.
    """
    if not isinstance(kernel, Tensor):
        raise TypeError(f"{call}(kernel): expected a torch.Tensor, got {type(kernel).__name__}")
    kernel = widened(kernel)
    if kernel.dtype not in REAL_TYPES:
        raise TypeError(f"{call}(kernel): expected a real float32 or float64 kernel, got {kernel.dtype}")
    if with_values or not kernel.is_meta:
        require_dense(call, "kernel", kernel)
    if not 3 <= kernel.dim() <= 5:
        raise ValueError(
            f"{call}(kernel): expected shape (channels out, channels in, size, ...) with 1 to 3 sizes, "
            f"got shape {tuple(kernel.shape)}"
        )
    if 0 in kernel.shape:
        raise ValueError(f"{call}(kernel): expected no empty dimension, got shape {tuple(kernel.shape)}")
    return kernel


def checked_matrix(call: str, matrix: Tensor) -> Tensor:
    """A matrix in place of a layer, real or complex, with rows and columns; in float32 if it is of half precision."""
    matrix = widened(matrix)
    if matrix.dtype not in (*REAL_TYPES, *COMPLEX_TYPES):
        raise TypeError(f"{call}(layer): expected a floating-point or complex matrix, got {matrix.dtype}")
    if matrix.dim() != 2 or not matrix.numel():
        what = f"expected a matrix with rows and columns, got shape {tuple(matrix.shape)}"
        raise ValueError(f"{call}(layer): {what}{kernel_hint(matrix)}")
    return matrix


def kernel_hint(value: Any) -> str:
    """What to do with the kernel of a convolution that was given in place of a layer."""
    if not isinstance(value, Tensor) or not 3 <= value.dim() <= 5:
        return ""
    return "; the norm of a convolution depends on its geometry: give the layer, or gramcert.Convolution(weight, ...)"


def widened(tensor: Tensor) -> Tensor:
    """Half precision in float32, exactly; others as they are."""
    return tensor.float() if tensor.dtype in HALF_TYPES else tensor


def require_dense(call: str, name: str, tensor: Tensor) -> None:
    """Refuse tensors without values of their own."""
    if tensor.is_meta or tensor.layout != torch.strided:
        kind = "a meta tensor" if tensor.is_meta else f"layout {tensor.layout}"
        raise TypeError(f"{call}({name}): expected a dense tensor with values, got {kind}")


def require_finite(call: str, name: str, tensor: Tensor) -> None:
    """Refuse NaN and infinity.

    In a compiled graph the check is left out, and a NaN shows up as a NaN result instead.
    """
    tensor = values_to_check(tensor)
    if not tensor.numel() or not can_be_read(tensor):
        return
    # Without a copy of what may be large; aminmax passes NaN on.
    ends = torch.aminmax(torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else in_memory_order(tensor))
    if not all(bool(torch.isfinite(end)) for end in ends):
        count = int((~torch.isfinite(tensor)).sum())
        raise ValueError(f"{call}({name}): expected finite values, got {count} NaN or infinite of {tensor.numel()}")


def in_memory_order(tensor: Tensor) -> Tensor:
    """The same entries with the axes in the order of their strides: reductions copy what is transposed."""
    return tensor.permute(memory_order(tensor))


def memory_order(tensor: Tensor) -> list[int]:
    """The axes, those with the largest strides first."""
    return sorted(range(tensor.dim()), key=lambda axis: -tensor.stride()[axis])


def values_to_check(tensor: Tensor) -> Tensor:
    """What ``torch.func`` wraps, inside ``vmap`` the whole batch: for checks of each value, not to compute with."""
    if torch.compiler.is_compiling():
        return tensor
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def can_be_read(tensor: Tensor) -> bool:
    """Whether code may branch on values: not in a compiled graph, nor inside ``torch.func``, nor without values."""
    if torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def require_values(call: str, name: str, tensor: Tensor) -> Tensor:
    """The finite values of a tensor, which code may branch on; inside ``torch.func.grad`` those that it wraps."""
    require_dense(call, name, tensor)
    require_finite(call, name, tensor)
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            raise TypeError(f"{call}({name}): expected one tensor with values, got a batch of them inside vmap")
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if not can_be_read(tensor):
        raise TypeError(f"{call}({name}): expected a tensor with values, got one without them")
    return tensor


def axis_sizes(call: str, name: str, sizes: Sizes, axes: int, *, at_least: int = 1, what: str = "") -> tuple[int, ...]:
    """One integer per axis; a lone int stands for the same size on every axis."""
    if isinstance(sizes, Sequence) and not isinstance(sizes, (str, bytes)):
        result = tuple(_integer(size, f"{call}({name}): expected ints, got {size!r}") for size in sizes)
    else:
        size = _integer(sizes, f"{call}({name}): expected an int or a sequence of ints, got {sizes!r}")
        result = (size,) * axes
    if len(result) != axes:
        raise ValueError(f"{call}({name}={result}): {what or 'the kernel'} needs {axes} sizes, got {len(result)}")
    if any(size > LARGEST_SIZE for size in result):
        raise ValueError(f"{call}({name}={result}): expected sizes up to {LARGEST_SIZE}, got {max(result)}")
    if any(size < at_least for size in result):
        raise ValueError(f"{call}({name}={result}): expected sizes of at least {at_least}, got {min(result)}")
    return result


def checked_radii(call: str, radii: Iterable[float]) -> list[float]:
    """Radii, each a number of at least 0."""
    if not isinstance(radii, Iterable):
        raise TypeError(f"{call}: expected a sequence of numbers, got {radii!r}")
    found = list(radii)
    for radius in found:
        is_number = isinstance(radius, (int, float)) and not isinstance(radius, bool)
        if not is_number or not 0 <= radius <= sys.float_info.max:
            raise ValueError(f"{call}: expected finite numbers of at least 0, got {radius!r}")
    return found


def _integer(value: Any, message: str) -> int:
    """Python's and NumPy's integers, but no bool."""
    if isinstance(value, bool):
        raise TypeError(message)
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(message) from None
