"""Kernels from files. Nothing in a file is ever executed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramcert.cli.errors import BadInput
from gramcert.files import BadFile, read_npy, read_safetensors, read_torch

# Names listed in an error before the rest is only counted.
LISTED = 12

# Integers up to these sizes have an exact floating-point value.
EXACT_IN_FLOAT32, EXACT_IN_FLOAT64 = 2**24, 2**53

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)

# One tensor without a name, or several with names.
Content = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class StoredKernel:
    """A kernel as float32 or float64, the name and type it had in its file, and what to call it."""

    kernel: Tensor
    source: str
    key: str | None
    stored_dtype: str

    @property
    def dtype(self) -> str:
        """The type it has now."""
        return str(self.kernel.dtype).removeprefix("torch.")

    def as_json(self) -> dict[str, Any]:
        """What it is and where it came from."""
        return {
            "source": self.source,
            "key": self.key,
            "shape": list(self.kernel.shape),
            "dtype": self.dtype,
            "stored_dtype": self.stored_dtype,
        }

    def __str__(self) -> str:
        name = self.source + (f", {self.key}" if self.key else "")
        lifted = "" if self.dtype == self.stored_dtype else f" (stored as {self.stored_dtype})"
        return f"{name}: {'×'.join(map(str, self.kernel.shape))}, {self.dtype}{lifted}"


def read_kernel(path: Path, key: str | None = None) -> StoredKernel:
    """The kernel in a ``.npy``, ``.safetensors``, ``.pt``, ``.pth`` or ``.th`` file.

    Args:
        path: the file.
        key: name of the tensor, needed where a file holds several that could be a kernel.
    """
    (stored,) = _read(path, lambda content: [_choose(content, key)])
    return stored


def read_kernels(path: Path, keys: Sequence[str] = (), *, every: bool = False) -> list[StoredKernel]:
    """Several kernels of one file, which is read once.

    Args:
        path: the file.
        keys: names of tensors; without any, the only kernel in the file.
        every: instead, all tensors with 3 to 5 dimensions.
    """
    if every:
        return _read(path, _kernels)
    return _read(path, lambda content: [_choose(content, key) for key in keys or (None,)])


def _read(path: Path, choose: Callable[[Content], list[tuple[str | None, Tensor]]]) -> list[StoredKernel]:
    """What is chosen of the content of a file."""
    if not path.exists():
        raise BadInput(f"{path}: no such file")
    if not path.is_file():
        raise BadInput(f"{path}: {'a folder' if path.is_dir() else 'not a regular file'}, expected a file")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise BadInput(f"{path}: expected a file ending in {', '.join(_READERS)}, got {path.suffix or 'no ending'!r}")
    try:
        if path.stat().st_size == 0:
            raise BadInput("the file is empty")
        return [
            StoredKernel(_as_float(tensor), path.name, name, str(tensor.dtype).removeprefix("torch."))
            for name, tensor in choose(reader(path))
        ]
    except (BadInput, BadFile) as error:
        raise BadInput(f"{path}: {error}") from None
    except Exception as error:  # a damaged or hostile file can make a parser raise anything
        raise BadInput(f"{path}: cannot be read ({type(error).__name__}: {_first_line(error)})") from error


def embedded_kernel() -> StoredKernel:
    """The kernel that comes with the package."""
    with resources.as_file(resources.files("gramcert.data") / "kernel.npy") as path:
        return read_kernel(path)


_READERS: dict[str, Callable[[Path], Content]] = {
    ".npy": read_npy,
    ".safetensors": read_safetensors,
    ".pt": read_torch,
    ".pth": read_torch,
    ".th": read_torch,
}


def _choose(content: Content, key: str | None) -> tuple[str | None, Tensor]:
    if isinstance(content, Tensor):
        if key is not None:
            raise BadInput(f"it holds one tensor without a name, got --key {key!r}")
        return None, content
    if key is not None:
        if key not in content:
            raise BadInput(f"no tensor named {key!r}; it holds {_listing(content)}")
        return key, content[key]
    kernels = _kernels(content)
    if len(kernels) > 1:
        raise BadInput(f"several kernels, choose one with --key: {_listing(dict(kernels))}")
    return kernels[0]


def _kernels(content: Content) -> list[tuple[str | None, Tensor]]:
    named = content if isinstance(content, dict) else {None: content}
    kernels = [(name, tensor) for name, tensor in named.items() if 3 <= tensor.dim() <= 5]
    if not kernels:
        raise BadInput(f"no tensor with 3 to 5 dimensions; it holds {_listing(named)}")
    return kernels


def _listing(tensors: Mapping[Any, Tensor]) -> str:
    names = [f"{name or 'a tensor'} {tuple(tensor.shape)}" for name, tensor in tensors.items()]
    more = [f"and {len(names) - LISTED} more"] if len(names) > LISTED else []
    return ", ".join(names[:LISTED] + more) or "nothing"


def _as_float(tensor: Tensor) -> Tensor:
    """The tensor in float32 or float64, with the same values."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise BadInput("expected a dense tensor with its values, got a sparse, quantized or meta tensor")
    tensor = tensor.detach()
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    elif tensor.dtype in _INTEGERS:
        tensor = _exact_integers(tensor)
    elif tensor.dtype not in (torch.float32, torch.float64):
        raise BadInput(f"expected floating-point or integer weights, got {str(tensor.dtype).removeprefix('torch.')}")
    return tensor.contiguous().clone()


def _exact_integers(tensor: Tensor) -> Tensor:
    values = tensor.numpy()
    largest = max(abs(int(values.max())), abs(int(values.min()))) if values.size else 0
    if largest > EXACT_IN_FLOAT64:
        raise BadInput(f"integers up to {largest} have no exact floating-point value")
    return torch.from_numpy(values.astype(np.float32 if largest <= EXACT_IN_FLOAT32 else np.float64))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
