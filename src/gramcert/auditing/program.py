"""What torch.export says about a model: calls of operators on named values, in memory or read from a file."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ref:
    """A value of the program, by its name."""

    name: str


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
        target: the operator with its overload, such as ``aten.conv2d.default`` or ``getitem``.
        arguments: by the names of the operator's schema; values of the program are :class:`Ref`, also inside of lists.
            Those that have their default may be missing.
        outputs: the names of its results, one unless the operator returns several.
        label: where it comes from, for people: ``layer1.0.conv1``.
        unpacked: whether an operator that returns a list has a name for each part, instead of one for the list.
    """

    target: str
    arguments: dict[str, Any]
    outputs: tuple[str, ...]
    label: str
    unpacked: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Program:
    """Calls in the order of their execution.

    Attributes:
        inputs: names and shapes of what the caller passes, a size that the program leaves open being ``None``.
        tensors: parameters, buffers and constants by the names that the calls use.
        calls: what is done.
        outputs: names of the results.
        changed: buffers that the program overwrites, as names for people.
        types: of the inputs, float32 where nothing is said.
        shapes: that the program gives of results; only for people, and to go on behind what is not known.
        output_names: of the results for people, where a module gives them names.
        is_live: whether it was traced from a module in memory, which can still be changed.
    """

    inputs: dict[str, tuple[int | None, ...]]
    tensors: dict[str, Tensor]
    calls: list[Call]
    outputs: tuple[str, ...]
    changed: tuple[str, ...] = field(default=())
    types: dict[str, torch.dtype] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    output_names: tuple[str, ...] = field(default=())
    is_live: bool = field(default=False)

    def is_same(self, other: "Program") -> bool:
        """Whether the same calls are made with the same numbers."""
        facts = [
            repr((one.inputs, one.calls, one.outputs, one.output_names, one.changed, one.types))
            for one in (self, other)
        ]
        if facts[0] != facts[1] or self.tensors.keys() != other.tensors.keys():
            return False
        return all(_same_numbers(value, other.tensors[name]) for name, value in self.tensors.items())


def _same_numbers(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors are equal, where NaN, which is found later, is equal to NaN."""
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return bool(((one == two) | ((one != one) & (two != two))).all())
