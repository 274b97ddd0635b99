"""What a module keeps between its calls: one that changes it is no function of its input alone.

torch.export follows one call, with Python's numbers as they are at that time. What a module keeps is therefore compared
after a first and a second call: attributes of all of its parts and of their classes, in containers and objects too, and
the variables outside that the functions of these classes name. What is the same both times may have been written.
"""

import hashlib
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from gramcert.operators.graph import fingerprint

# Every module has these: parts that are walked through, weights that torch.export watches, and tables of torch.
_OF_TORCH = {name for name in vars(nn.Module()) if name not in ("training", "_forward_hooks", "_forward_pre_hooks")}


def kept(model: nn.Module, held: list[object]) -> dict[str, object]:
    """By names for people, as values that are equal where they are to the last bit.

    What is compared by its address is held in a list, so that no other object gets it.
    """
    found: dict[str, object] = {}
    frozen = _Freezer(held)
    for path, part in model.named_modules():
        found[path] = type(part).__qualname__
        for name, value in vars(part).items():
            if name not in _OF_TORCH:
                found[f"{path}.{name}" if path else name] = frozen(value)
        for kind in type(part).__mro__:
            if not kind.__module__.startswith(("torch.", "builtins")):
                found |= {name: frozen(value) for name, value in _of_class(kind)}
    return found


def _of_class(kind: type) -> Iterator[tuple[str, object]]:
    for name, value in vars(kind).items():
        functions = list(_functions(value))
        for function in functions:
            yield from _around(function)
        if not functions and not name.startswith("__"):
            yield f"{kind.__qualname__}.{name}", value


def _functions(value: Any) -> Iterator[FunctionType]:
    """What is called by a method of any kind, a property or a decorated function."""
    for inner in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "func"))):
        while isinstance(inner, FunctionType):
            yield inner
            inner = getattr(inner, "__wrapped__", None)


def _around(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Variables outside of a function that it names, unless they are code themselves."""
    for what in ("__defaults__", "__kwdefaults__", "__dict__"):
        yield f"{what} of {function.__qualname__}", getattr(function, what)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"the variable {name} around {function.__qualname__}", cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    for name in sorted(_names(function.__code__) & function.__globals__.keys()):
        value = function.__globals__[name]
        if not isinstance(value, (FunctionType, type, ModuleType, nn.Module)):
            yield f"the variable {name} of {function.__module__}", value


def _names(code: CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


class _Freezer:
    """Makes values that can be compared and do not change any more, of objects however they hang together.

    Each object is looked into once, and is a number afterwards: ways through objects that share others are many more
    than the objects.
    """

    def __init__(self, held: list[object]) -> None:
        self._seen: dict[int, int] = {}
        self._held = held

    def __call__(self, value: Any) -> object:
        """The value itself, or its type and content; of what cannot be looked into, which one it is."""
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            return repr(value)
        if id(value) in self._seen:
            return self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        self._held.append(value)
        try:
            return type(value).__qualname__, self._content(value)
        except Exception:  # objects may refuse in any way
            return type(value).__qualname__, id(value)

    def _content(self, value: Any) -> object:
        if isinstance(value, torch.Tensor):
            return fingerprint(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return value.shape, value.dtype.str, hashlib.sha256(np.ascontiguousarray(value).data).hexdigest()
        if isinstance(value, (torch.device, torch.dtype, torch.layout, torch.memory_format)):
            return repr(value)
        if isinstance(value, (type, ModuleType, BuiltinFunctionType, CodeType)):
            return id(value)
        if isinstance(value, dict):
            return [(self(key), self(item)) for key, item in value.items()]
        if isinstance(value, (list, tuple)):
            return [self(item) for item in value]
        if isinstance(value, (set, frozenset)):
            return {repr(self(item)) for item in value}
        if isinstance(value, FunctionType):
            return id(value.__code__), [self(cell.cell_contents) for cell in value.__closure__ or ()]
        if isinstance(value, MethodType):
            return id(value.__func__), self(value.__self__)
        if isinstance(value, nn.Module):
            return [(name, self(item)) for name, item in vars(value).items() if name not in _OF_TORCH]
        if type(value).__module__.partition(".")[0] == "torch":  # such as the graph of a traced module
            return id(value)
        how = value.__reduce_ex__(2)  # what a copy would be made of
        return (
            how if isinstance(how, str) else [self(list(part) if isinstance(part, Iterator) else part) for part in how]
        )
