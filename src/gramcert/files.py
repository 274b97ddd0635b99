"""Files: written whole or not at all, locked, and read as weights. Nothing in a file is ever executed."""

import io
import math
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

import numpy as np
import torch
from torch import Tensor

# Of lists and dictionaries in each other.
_DEEPEST = 16

_UNFINISHED = ".unfinished"

# No header of a .npy file of plain numbers is longer.
_NPY_HEADER = 2**16


class BadFile(ValueError):  # noqa: N818 - it names what the caller gave, not a failure of the program
    """A file that cannot be read, for the reason in the message."""


# How files begin that people give in place of others: a download that failed, a picture, another format of weights.
_BEGINNINGS = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"\x93NUMPY": "an array of NumPy (.npy)",
    b"\x89HDF": "HDF5",
    b"%PDF": "a PDF",
    b"\x1f\x8b": "a gzip archive",
    b"PK": "a zip archive, as .pt2, .npz and torch.save have it",
    b"\x80": "a pickle",
    b"version https://git-lfs": "a pointer of Git LFS: the file itself was not fetched",
    b"<": "a web page",
}


def looks_like(start: bytes) -> str:
    r"""What a file seems to be by its first bytes, for the end of a sentence; empty where that cannot be said.

    Example:
        >>> looks_like(b"\x89PNG..."), looks_like(b"<!doctype html>"), looks_like(b"?")
        (', which looks like a PNG image', ', which looks like a web page', '')
    """
    known = next((kind for begin, kind in _BEGINNINGS.items() if start.startswith(begin)), "")
    if start[8:10] in (b'{"', b"{}"):  # after the length of a header in JSON
        known = "safetensors"
    elif start[:1] == b"\x08" and start[2:3] in (b"\x12", b"\x1a", b":"):  # the version, then who made it or the graph
        known = "ONNX"
    return f", which looks like {known}" if known else ""


def _start_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(64)


def write_atomically(path: Path, content: bytes) -> None:
    """Under another name first, then renamed: a reader sees the old content or the new, never a part.

    What is no regular file, such as a pipe or a device, is written to, not replaced.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            file.write(content)
        return
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
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ModuleNotFoundError:
        raise BadFile("reading it needs the extra: pip install 'gramcert[safetensors]'") from None
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise BadFile(f"cannot be read as safetensors ({reason}){looks_like(_start_of(path))}") from None
    return tensors


def read_npy(path: Path) -> Tensor:
    """The array in a ``.npy`` file.

    It is mapped, so that a header which promises more than the file holds is refused before memory is taken; the
    format's own reader refuses Python objects.
    """
    start = _start_of(path)
    if not start.startswith(np.lib.format.MAGIC_PREFIX):
        raise BadFile(f"expected an array of NumPy, got a truncated or other file{looks_like(start)}")
    array = np.lib.format.open_memmap(path, mode="r")
    native = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(native)
    except TypeError:
        raise BadFile(f"expected real numbers, got an array of {array.dtype}") from None


def read_npz(path: Path, most_bytes: int = 2**32) -> dict[str, Tensor]:
    """The arrays of a ``.npz`` file by their names.

    What an array says of its size has to be what the archive says of it, and all together not too much, before memory
    is taken; Python objects are refused.
    """
    found: dict[str, Tensor] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(part.file_size for part in archive.infolist()) > most_bytes:
                raise BadFile(f"expected arrays of at most {most_bytes} bytes in all")
            for part in archive.infolist():
                if part.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise BadFile("expected arrays as NumPy compresses them, or plain")
                with archive.open(part) as file:
                    found[part.filename.removesuffix(".npy")] = _npy_of_archive(file, part.file_size)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise BadFile(f"cannot be read as .npz ({error}){looks_like(_start_of(path))}") from None
    return found


def _npy_of_archive(file: IO[bytes], size: int) -> Tensor:
    start = file.read(_NPY_HEADER)
    head = io.BytesIO(start)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # about headers of Python 2
            version = np.lib.format.read_magic(head)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(head)
    except Exception as error:  # NumPy parses it as Python, which can raise anything
        reason = (str(error).splitlines() or [""])[0][:100]
        raise BadFile(f"cannot be read as an array ({type(error).__name__}: {reason})") from None
    if any(type(length) is not int or length < 0 for length in shape):
        raise BadFile(f"expected an array, got the shape {shape}")
    if dtype.kind not in "fiub" or math.prod(shape) * dtype.itemsize + head.tell() != size:
        raise BadFile(f"expected real numbers in the size of their array, got {dtype} of shape {shape}")
    raw = start[head.tell() :] + file.read()
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise BadFile("an array is shorter than it says")
    array = np.frombuffer(raw, dtype).reshape(shape, order="F" if is_fortran else "C")
    native = np.array(array, dtype=dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(native)
    except TypeError:
        raise BadFile(f"expected real numbers, got an array of {dtype}") from None


def read_torch(path: Path) -> Tensor | dict[str, Tensor]:
    """The tensor in a file of ``torch.save``, or all tensors in its dictionaries and lists, names joined by dots."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about archives that are refused anyway
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch's own message advises to switch the protection off.
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        damaged = f"it is damaged or not weights alone{looks_like(_start_of(path))}"
        reason = f"it asks to run {wanted[1]}, which was not done" if wanted else damaged
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
