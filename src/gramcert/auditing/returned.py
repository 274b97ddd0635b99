"""What a module returns, tensor by tensor with a name for each, however it is packed."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# Of lists, mappings and objects in each other.
_DEEPEST = 32

# What does not depend on the input, because torch.export would have made symbols of it otherwise.
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Unnamed(TypeError):  # noqa: N818 - it names what the model returned, not a failure of the program
    """A result that cannot be looked into, for the reason in the message."""


def return_named(model: nn.Module) -> None:
    """Let a module return its tensors by their names, which torch.export can follow."""
    model.register_forward_hook(lambda _, given, result: named_tensors(result))


def named_tensors(result: object) -> dict[str, Any]:
    """The tensors in a result, and numbers that depend on data, by names such as ``logits`` or ``states.0``."""
    found: dict[str, Any] = {}
    for path, leaf in _leaves(result, ()):
        name = ".".join(path) or "output"
        again = sum(known.partition(" #")[0] == name for known in found)
        found[f"{name} #{again + 1}" if again else name] = leaf
    return found


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, (Tensor, *_SYMBOLS)):
        yield path, value
    elif not isinstance(value, _CONSTANTS):
        if len(path) >= _DEEPEST:
            raise Unnamed(f"it returns more than {_DEEPEST} lists or objects in each other")
        for name, part in _parts(value, path):
            yield from _leaves(part, (*path, name))


def _parts(value: Any, path: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Fields of dataclasses, also of those that are mappings too, entries of mappings, lists and tuples."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    parts = {field.name: getattr(value, field.name, None) for field in fields}
    if isinstance(value, Mapping):
        parts |= {str(key): item for key, item in value.items() if str(key) not in parts}
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts |= dict(zip(value._fields, value, strict=True))
    elif isinstance(value, (list, tuple)):
        parts |= {str(place): item for place, item in enumerate(value)}
    elif not fields:
        leaves = pytree.tree_leaves(value)  # of a class that its owner told torch about
        if len(leaves) == 1 and leaves[0] is value:
            where = f" as {'.'.join(path)}" if path else ""
            raise Unnamed(f"it returns an object of the class {type(value).__name__}{where}, which is not looked into")
        parts = {str(place): leaf for place, leaf in enumerate(leaves)}
    return list(parts.items())
