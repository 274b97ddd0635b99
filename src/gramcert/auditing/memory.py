"""Which values of a program may share memory, and which of them were overwritten through another one.

Operators of torch.export may write into what they are given (``relu_``, ``copy_`` into a slice). The graph has values
and no memory, so a value that may have been overwritten behind its name must not be read again.
"""

from collections.abc import Iterable
from typing import Any

import torch

# Operators that share memory although their schema denies it.
_UNSAFE = {"_unsafe_view", "lift", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"}


class Memory:
    """Names that may share memory, in groups; a name alone is its own group."""

    def __init__(self) -> None:
        self._groups: dict[str, set[str]] = {}
        self.lost: set[str] = set()
        self.overlapping: set[str] = set()  # names whose entries may share memory with each other

    def share(self, names: Iterable[str]) -> None:
        """All of these, and what they share memory with, may be one piece of memory."""
        merged = set().union(*(self.group(name) for name in names))
        for member in merged:
            self._groups[member] = merged

    def overwrite(self, name: str, keep: set[str]) -> None:
        """The memory behind a name has new content, which only the names to keep are known to have."""
        self.lost |= self.group(name) - keep
        self.lost -= keep

    def group(self, name: str) -> set[str]:
        """All names that may share memory with one."""
        return self._groups.setdefault(name, {name})


def written_arguments(target: str, arguments: dict[str, Any]) -> list[str]:
    """Which arguments an operator overwrites; of an operator that torch does not have, all."""
    schema = _schema(target)
    if schema is None:
        return list(arguments)
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    if schema.name.endswith(("batch_norm", "instance_norm", "batch_norm_legit")):
        flags = [arguments.get(name) for name in ("training", "train", "use_input_stats") if name in arguments]
        if flags != [False]:  # it updates its statistics, which its schema does not say
            written |= {"running_mean", "running_var"}
    return [name for name in arguments if name in written]


def argument_names(target: str) -> list[str] | None:
    """The arguments of an operator in their order; ``None`` if torch does not have it."""
    schema = _schema(target)
    return None if schema is None else [argument.name for argument in schema.arguments]


def may_share(target: str) -> bool:
    """Whether results may share memory with arguments: by its schema, or because it is made of other operators."""
    schema = _schema(target)
    if (
        schema is None
        or schema.name.removeprefix("aten::") in _UNSAFE
        or any(result.alias_info is not None for result in schema.returns)
    ):
        return True
    name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


def _schema(target: str) -> torch.FunctionSchema | None:
    namespace, _, rest = target.partition(".")
    op, _, overload = rest.partition(".")
    if namespace != "aten" or not op.isidentifier() or not overload.isidentifier():
        return None
    schema: torch.FunctionSchema | None = getattr(
        getattr(getattr(torch.ops.aten, op, None), overload, None), "_schema", None
    )
    return schema
