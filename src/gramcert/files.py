"""Tensors from files of weights. Nothing in a file is ever executed."""

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Of lists and dictionaries in each other.
_DEEPEST = 16


class BadFile(ValueError):  # noqa: N818 - it names what the caller gave, not a failure of the program
    """A file that cannot be read, for the reason in the message."""


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by their names."""
    try:
        from safetensors.torch import load_file
    except ModuleNotFoundError:
        raise BadFile("reading it needs the extra: pip install 'gramcert[safetensors]'") from None
    tensors: dict[str, Tensor] = load_file(path)
    return tensors


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
