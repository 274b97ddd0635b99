"""CIFAR-10 and CIFAR-100 from the standard python archives, without trusting their pickles.

The archives are pickles, which can run any code when loaded. The unpickler here knows only what NumPy's byte arrays are
made of, builds them itself from the raw bytes, and refuses every other name in the file.
"""

import io
import pickle
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Part = tuple[Tensor, Tensor]

# Bytes of the largest file in either archive, with room to spare.
LARGEST_FILE = 2**28

_SIDE, _CHANNELS = 32, 3


@dataclass(frozen=True)
class _Layout:
    folder: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels: bytes
    names: bytes
    classes: int


_LAYOUTS = {
    "cifar10": _Layout(
        "cifar-10-batches-py",
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        "test_batch",
        "batches.meta",
        b"labels",
        b"label_names",
        10,
    ),
    "cifar100": _Layout("cifar-100-python", ("train",), "test", "meta", b"fine_labels", b"fine_label_names", 100),
}


def read_cifar(path: Path, dataset: str) -> tuple[Part, Part, tuple[str, ...]]:
    """Training part, test part (images as bytes, labels) and class names.

    Args:
        path: the archive (``.tar.gz`` or ``.tar``), its unpacked folder, or the folder that holds either.
        dataset: ``cifar10`` or ``cifar100``.
    """
    layout = _LAYOUTS[dataset]
    read = _reader(path, layout)
    parts = [_batch(name, read(name), layout) for name in (*layout.train, layout.test)]
    train = torch.cat([images for images, _ in parts[:-1]]), torch.cat([labels for _, labels in parts[:-1]])
    names = _field(layout.meta, _unpickled(layout.meta, read(layout.meta)), layout.names)
    if not isinstance(names, list) or len(names) != layout.classes:
        raise ValueError(f"{layout.meta}: expected {layout.classes} class names")
    return train, parts[-1], tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)


def _reader(path: Path, layout: _Layout) -> Callable[[str], bytes]:
    """How a member of the set is read."""
    for folder in (path, path / layout.folder):
        if (folder / layout.test).is_file():
            return lambda name: _limited(folder / name, (folder / name).open("rb"))
    candidates = [path] if path.is_file() else sorted(path.glob(f"{layout.folder.removesuffix('-batches-py')}*.tar*"))
    if not candidates:
        raise ValueError(f"{path}: expected the folder {layout.folder}, or its archive, as a file or inside")
    archive = candidates[0]

    def member(name: str) -> bytes:
        try:
            with tarfile.open(archive) as tar:
                stream = tar.extractfile(f"{layout.folder}/{name}")  # into memory: no path of the archive is used
                if stream is None:
                    raise ValueError(f"{archive}: {layout.folder}/{name} is not a file")
                return _limited(archive, stream)
        except KeyError:
            raise ValueError(f"{archive}: {layout.folder}/{name} is not in it") from None
        except (tarfile.TarError, EOFError, OSError) as error:
            raise ValueError(f"{archive}: cannot be read as an archive ({error})") from None

    return member


def _limited(path: Path, stream: Any) -> bytes:
    try:
        with stream:
            content: bytes = stream.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    if len(content) > LARGEST_FILE:
        raise ValueError(f"{path}: expected at most {LARGEST_FILE} bytes")
    return content


def _batch(name: str, content: bytes, layout: _Layout) -> Part:
    fields = _unpickled(name, content)
    data, labels = _field(name, fields, b"data"), _field(name, fields, layout.labels)
    data = data.array(name) if isinstance(data, _Array) else None
    pixels = _CHANNELS * _SIDE * _SIDE
    if data is None or data.ndim != 2 or data.shape[1] != pixels:
        raise ValueError(f"{name}: expected rows of {pixels} bytes, got {getattr(data, 'shape', 'no array of bytes')}")
    if not isinstance(labels, list) or len(labels) != len(data):
        raise ValueError(f"{name}: expected a list of {len(data)} labels")
    if not all(type(label) is int and 0 <= label < layout.classes for label in labels):
        raise ValueError(f"{name}: expected labels from 0 to {layout.classes - 1}")
    images = torch.from_numpy(data.copy()).reshape(-1, _CHANNELS, _SIDE, _SIDE)
    return images, torch.tensor(labels)


def _field(name: str, fields: Any, key: bytes) -> Any:
    if not isinstance(fields, dict) or key not in fields:
        raise ValueError(f"{name}: expected a dictionary with {key.decode()!r}")
    return fields[key]


class _Array:
    """An array of bytes as the pickle describes it: only its shape and content are kept."""

    def __init__(self, *_: Any) -> None:
        self.shape: Any = None
        self.content: Any = None

    def __setstate__(self, state: Any) -> None:
        # NumPy's own state: version, shape, type, whether columns come first, bytes.
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], _Bytes):
            raise pickle.UnpicklingError("an array in a form that is not known")
        if state[3]:
            raise pickle.UnpicklingError("an array stored by columns")
        self.shape, self.content = state[1], state[4]

    def array(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        content = self.content.encode("latin-1") if isinstance(self.content, str) else self.content
        if not isinstance(content, bytes) or not isinstance(self.shape, tuple):
            raise ValueError(f"{name}: expected an array of bytes")
        flat = np.frombuffer(content, dtype=np.uint8)
        if not all(type(size) is int and size >= 0 for size in self.shape) or int(np.prod(self.shape)) != flat.size:
            raise ValueError(f"{name}: an array of shape {self.shape} with {flat.size} bytes")
        return flat.reshape(self.shape)


class _Bytes:
    """The only type of array that is accepted."""

    def __init__(self, code: Any = None, *_: Any) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"an array of type {code!r}, expected bytes (u1)")

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and alignment, which bytes have no use for


def _encoded(text: Any, encoding: Any) -> bytes:
    """``_codecs.encode``, by which pickles of Python 2 hold bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"text in the encoding {encoding!r}")
    return text.encode("latin-1")


def _no_bytes() -> bytes:
    """``bytes()``, by which such pickles hold the empty string; not ``bytes(n)``, which would take any memory."""
    return b""


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Bytes,
    ("_codecs", "encode"): _encoded,
    ("__builtin__", "bytes"): _no_bytes,
} | {(module, "_reconstruct"): _Array for module in ("numpy.core.multiarray", "numpy._core.multiarray")}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Only what arrays of bytes are made of."""
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no image archive needs") from None

    def persistent_load(self, pid: Any) -> Any:
        """Nothing is outside of the file."""
        raise pickle.UnpicklingError("it refers to something outside of the file")


def _unpickled(name: str, content: bytes) -> Any:
    try:
        return _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a corrupt pickle can raise anything
        raise ValueError(f"{name}: refused, not a batch of images ({error or type(error).__name__})") from None
