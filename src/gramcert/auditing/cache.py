"""Measurements kept on disk, one small file each, so that an interrupted audit goes on and a second one is instant.

The name of a file is a digest of the map, of the tolerance and of the format; nothing in it is executed. The folder
belongs to the user: whoever can write there can make an audit lie, but not ``gramcert verify``, which never reads it.
"""

import base64
import hashlib
import json
import os
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gramcert.files import write_atomically
from gramcert.operators.measurement import MOST_WITNESS, Measured

VARIABLE = "GRAMCERT_CACHE"


def default_folder() -> Path:
    """``$GRAMCERT_CACHE``, or a folder among the user's caches."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gramcert"


class Cache:
    """A folder of measurements, or nothing if ``folder`` is ``None``."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def get(self, key: str) -> Measured | None:
        """What was measured before; damaged files count as missing."""
        found = self.read(key)
        try:
            return None if found is None else replace(of_json(found), cached=True)
        except (TypeError, KeyError, ValueError, OverflowError, IndexError, zlib.error):
            return None

    def put(self, key: str, measured: Measured) -> None:
        """Keep a measurement; a folder that cannot be written is no reason to stop."""
        self.write(key, to_json(measured))

    def read(self, key: str) -> Any:
        """The JSON under a key, if its digest is right."""
        if self.folder is None:
            return None
        try:
            digest, _, text = self._path(key).read_text().partition("\n")
            return json.loads(text) if digest == _digest(key, text) else None
        except (OSError, ValueError, RecursionError):
            return None

    def write(self, key: str, content: Any) -> None:
        """Keep some JSON under a key."""
        if self.folder is None:
            return
        text = json.dumps(content)
        try:
            path = self._path(key)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, f"{_digest(key, text)}\n{text}".encode())
        except OSError:
            return

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / key[:2] / f"{key}.json"


def _digest(key: str, text: str) -> str:
    return hashlib.sha256(f"{key}\n{text}".encode()).hexdigest()


def to_json(measured: Measured) -> dict[str, Any]:
    """A measurement in JSON; floats are written so that they are read back exactly."""
    return {
        "lower": measured.lower,
        "upper": measured.upper,
        "method": measured.method,
        "notes": list(measured.notes),
        "seconds": measured.seconds,
        "profile": list(measured.profile),
        "witness": None if measured.witness is None else pack(measured.witness),
        "witnessed": measured.witnessed,
        "norms": measured.norms,
    }


def of_json(content: dict[str, Any]) -> Measured:
    """The measurement that was written."""
    upper, lower = float(content["upper"]), content["lower"]
    if not upper >= 0 or (lower is not None and not 0 <= float(lower) <= upper):
        raise ValueError("not a measurement")
    witness, norms = content["witness"], content["norms"]
    return Measured(
        None if lower is None else float(lower),
        upper,
        str(content["method"]),
        tuple(map(str, content["notes"])),
        float(content["seconds"]),
        tuple(map(float, content["profile"])),
        None if witness is None else unpack(witness),
        float(content["witnessed"]),
        None if norms is None else (float(norms[0]), float(norms[1])),
    )


def pack(witness: torch.Tensor) -> str:
    """Small integers as text."""
    return base64.b64encode(zlib.compress(witness.numpy().tobytes(), 9)).decode()


def unpack(text: str) -> torch.Tensor:
    """The integers again, not more of them than are ever packed."""
    stream = zlib.decompressobj()
    raw = stream.decompress(base64.b64decode(text, validate=True), MOST_WITNESS + 1)
    if len(raw) > MOST_WITNESS:
        raise ValueError("expected a shorter witness")
    if not stream.eof or stream.unused_data:
        raise ValueError("expected a witness and nothing else")
    return torch.frombuffer(bytearray(raw), dtype=torch.int8) if raw else torch.zeros(0, dtype=torch.int8)
