"""Which values of a program may share memory, and which of them were overwritten through another one.

Operators of torch.export may write into what they are given (``relu_``, ``copy_`` into a slice). The graph has values
and no memory, so a value that may have been overwritten behind its name must not be read again.
"""

from collections.abc import Iterable

import torch


class Memory:
    """Names that may share memory, in groups; a name alone is its own group."""

    def __init__(self) -> None:
        self._groups: dict[str, set[str]] = {}
        self.lost: set[str] = set()

    def share(self, names: Iterable[str]) -> None:
        """All of these, and what they share memory with, may be one piece of memory."""
        merged = set().union(*(self._group(name) for name in names))
        for member in merged:
            self._groups[member] = merged

    def overwrite(self, name: str, keep: set[str]) -> None:
        """The memory behind a name has new content, which only the names to keep are known to have."""
        self.lost |= self._group(name) - keep
        self.lost -= keep

    def _group(self, name: str) -> set[str]:
        return self._groups.setdefault(name, {name})


def written_arguments(target: str, names: Iterable[str]) -> list[str]:
    """Which arguments an operator overwrites; of an operator that torch does not have, all."""
    schema = _schema(target)
    if schema is None:
        return list(names)
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    return [name for name in names if name in written]


def may_share(target: str) -> bool:
    """Whether results may share memory with arguments: by its schema, or because it is made of other operators."""
    schema = _schema(target)
    if schema is None or any(result.alias_info is not None for result in schema.returns):
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
