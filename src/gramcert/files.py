"""Files: written whole or not at all, locked, and read as weights. Nothing in a file is ever executed."""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

# Of lists and dictionaries in each other.
_DEEPEST = 16

_UNFINISHED = ".unfinished"


class BadFile(ValueError):  # noqa: N818 - it names what the caller gave, not a failure of the program
    """A file that cannot be read, for the reason in the message."""


def write_atomically(path: Path, content: bytes) -> None:
    """Under another name first, then renamed: a reader sees the old content or the new, never a part."""
    beside = path.with_name(f".{path.name}.{os.getpid()}{_UNFINISHED}")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def remove_unfinished(folder: Path, *names: str) -> None:
    """What a killed process was writing; only for whoever has the lock."""
    for name in names:
        for path in folder.glob(f".{name}.*{_UNFINISHED}"):
            path.unlink(missing_ok=True)


def open_lock(path: Path) -> TextIO:
    """A file to lock, whose content, if it has some, is left alone; a link is not followed."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(path, flags, 0o644), "r+")


def locked(lock: TextIO) -> bool:
    """A lock that the system takes back when the process ends, however it ends; without one, on trust."""
    try:
        import fcntl
    except ImportError:  # not a Unix system
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def wait_for(lock: TextIO) -> None:
    """Until the lock is free; where there are no locks, on trust."""
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX)
    except (ImportError, OSError):
        pass


@contextmanager
def opened_safetensors(path: Path) -> Iterator[Any]:
    """A safetensors file, whose tensors and metadata can be read one by one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: cannot be read as safetensors ({error})") from None


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by their names."""
    try:
        from safetensors.torch import load_file
    except ModuleNotFoundError:
        raise BadFile("reading it needs the extra: pip install 'gramcert[safetensors]'") from None
    tensors: dict[str, Tensor] = load_file(path)
    return tensors


def read_npy(path: Path) -> Tensor:
    """The array in a ``.npy`` file.

    It is mapped, so that a header which promises more than the file holds is refused before memory is taken; the
    format's own reader refuses Python objects.
    """
    array = np.lib.format.open_memmap(path, mode="r")
    native = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(native)
    except TypeError:
        raise BadFile(f"expected real numbers, got an array of {array.dtype}") from None


def read_torch(path: Path) -> Tensor | dict[str, Tensor]:
    """The tensor in a file of ``torch.save``, or all tensors in its dictionaries and lists, names joined by dots."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about archives that are refused anyway
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch's own message advises to switch the protection off.
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it asks to run {wanted[1]}, which was not done" if wanted else "it is damaged or not weights alone"
        if "TorchScript" in str(error):
            reason = "it is TorchScript; save the state_dict of its module, or that module as .pt2 or ONNX"
        raise BadFile(f"torch refused to load it as weights: {reason}") from error
    if isinstance(content, Tensor):
        return content
    tensors = dict(_named_tensors(content, "", 0))
    if not tensors:
        raise BadFile(f"expected a tensor or a state dict, got {type(content).__name__} without tensors")
    return tensors


def _named_tensors(content: Any, prefix: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested dictionaries and lists."""
    if isinstance(content, Tensor):
        yield prefix, content
    elif isinstance(content, (dict, list, tuple)) and depth < _DEEPEST:
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for name, value in items:
            yield from _named_tensors(value, f"{prefix}.{name}" if prefix else str(name), depth + 1)
