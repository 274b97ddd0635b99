"""CIFAR-10 and CIFAR-100 from the standard python archives, without trusting their pickles.

The archives are pickles, which can run any code when loaded. The unpickler here knows only what NumPy's byte arrays are
made of, builds them itself from the raw bytes, and refuses every other name in the file.
"""

import io
import math
import pickle
import pickletools
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

Part = tuple[Tensor, Tensor]

# Bytes of the largest file in either archive, with room to spare.
LARGEST_FILE = 2**28

# Of a pickle: instructions, one byte of which can make an object of 200; places of its memo, for which the unpickler
# takes memory before they are used; and tuples, whose hashes overflow the stack when a million of them are nested. The
# archives have 3·10⁵, 10⁵ and 10.
MOST_INSTRUCTIONS, MOST_PLACES, MOST_TUPLES = 2**20, 2**20, 1000

# Of a tar archive: files, and bytes of a header that goes before one. The archives have 10 and none.
MOST_MEMBERS, LARGEST_HEADER = 1000, 2**16
_HEADERS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)

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
    contents = _contents(path, layout)
    parts = [_batch(name, contents.pop(name), layout) for name in (*layout.train, layout.test)]
    train = torch.cat([images for images, _ in parts[:-1]]), torch.cat([labels for _, labels in parts[:-1]])
    return train, parts[-1], _names(layout.meta, contents.pop(layout.meta), layout)


def _contents(path: Path, layout: _Layout) -> dict[str, bytes]:
    """The bytes of each file of the set, by name."""
    names = (*layout.train, layout.test, layout.meta)
    for folder in (path, path / layout.folder):
        if (folder / layout.test).is_file():
            return {name: _file(folder / name) for name in names}
    candidates = [path] if path.is_file() else sorted(path.glob(f"{layout.folder.removesuffix('-batches-py')}*.tar*"))
    if not candidates:
        nothing = "" if path.exists() else "; there is nothing of that name"
        raise ValueError(f"{path}: expected the folder {layout.folder}, or its archive, as a file or inside{nothing}")
    members = _members(candidates[0], {f"{layout.folder}/{name}" for name in names})
    return {name: members[f"{layout.folder}/{name}"] for name in names}


def _file(path: Path) -> bytes:
    if not path.is_file():  # also not a pipe, which might never end
        raise ValueError(f"{path}: expected a file")
    try:
        with path.open("rb") as stream:
            return _limited(path, stream)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None


def _members(archive: Path, names: set[str]) -> dict[str, bytes]:
    """Into memory, in one pass: no path of the archive is used, no link followed, nothing unpacked twice."""
    found = dict[str, bytes]()
    try:
        with tarfile.open(archive, tarinfo=_Member) as tar:
            for number, member in enumerate(tar):
                if number >= MOST_MEMBERS:
                    raise ValueError(f"expected at most {MOST_MEMBERS} files")
                if member.name in names:
                    stream = tar.extractfile(member) if member.isfile() else None
                    if stream is None:
                        raise ValueError(f"{member.name} is not a file")
                    found[member.name] = _limited(Path(member.name), stream)
    except Exception as error:  # the decoders of four compressions raise what they like
        raise ValueError(f"{archive}: cannot be read as an archive ({error})") from None
    if names - found.keys():
        raise ValueError(f"{archive}: {min(names - found.keys())} is not in it")
    return found


class _Member(tarfile.TarInfo):
    """Refuses long names, attributes and maps of gaps, which tarfile reads into memory whatever their length."""

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        if self.type == tarfile.GNUTYPE_SPARSE or (self.type in _HEADERS and self.size > LARGEST_HEADER):
            raise tarfile.ReadError(f"a header of type {self.type!r} with {self.size} bytes")
        return super()._proc_member(tar)  # type: ignore[misc]

    def _proc_gnusparse_10(self, *_: Any) -> None:
        raise tarfile.ReadError("a file with gaps")


def _limited(path: Path, stream: IO[bytes]) -> bytes:
    content = stream.read(LARGEST_FILE + 1)
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
    if not labels:
        raise ValueError(f"{name}: expected at least one image")
    images = torch.from_numpy(data.copy()).reshape(-1, _CHANNELS, _SIDE, _SIDE)
    return images, torch.tensor(labels)


def _names(name: str, content: bytes, layout: _Layout) -> tuple[str, ...]:
    names = _field(name, _unpickled(name, content), layout.names)
    if not isinstance(names, list) or len(names) != layout.classes:
        raise ValueError(f"{name}: expected {layout.classes} class names")
    if not all(isinstance(text, (bytes, str)) for text in names):
        raise ValueError(f"{name}: expected class names as text")
    return tuple(text.decode(errors="replace") if isinstance(text, bytes) else text for text in names)


def _field(name: str, fields: Any, key: bytes) -> Any:
    """By a key that is text of Python 2, or of Python 3 in archives that were written anew."""
    for known in (key, key.decode()):
        if isinstance(fields, dict) and known in fields:
            return fields[known]
    raise ValueError(f"{name}: expected a dictionary with {key.decode()!r}")


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
        if not isinstance(self.content, bytes) or not isinstance(self.shape, tuple):
            raise ValueError(f"{name}: expected an array of bytes")
        flat = np.frombuffer(self.content, dtype=np.uint8)
        if not all(type(size) is int and size >= 0 for size in self.shape) or math.prod(self.shape) != flat.size:
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


def _require_modest(content: bytes) -> None:
    tuples = 0
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if number >= MOST_INSTRUCTIONS:
            raise pickle.UnpicklingError(f"expected at most {MOST_INSTRUCTIONS} instructions")
        if opcode.name.endswith("PUT") and isinstance(argument, int) and argument >= MOST_PLACES:
            raise pickle.UnpicklingError(f"place {argument} of its memo, expected less than {MOST_PLACES}")
        tuples += opcode.name.startswith("TUPLE")
    if tuples > MOST_TUPLES:
        raise pickle.UnpicklingError(f"{tuples} tuples, expected at most {MOST_TUPLES}")


def _unpickled(name: str, content: bytes) -> Any:
    try:
        _require_modest(content)
        return _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a corrupt pickle can raise anything
        raise ValueError(f"{name}: refused, not a batch of images ({error or type(error).__name__})") from None
