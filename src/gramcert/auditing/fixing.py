"""Inputs that are fixed: a model with several inputs has a constant about one of them, the others being constants."""

import dataclasses
import hashlib
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from gramcert.auditing.program import Program
from gramcert.auditing.readable import shown_text
from gramcert.operators.graph import MOST_ENTRIES, BadModel, Graph, Input, fingerprint
from gramcert.operators.rules import REAL

if TYPE_CHECKING:  # loaded where it is needed
    from gramcert.auditing.onnx_file import OnnxModel

Value = bool | int | float | Tensor
Fix = Mapping[str, Value]

HOW = 'fix={"name": value}, or --fix NAME=VALUE'

_Content = TypeVar("_Content", bound="Program | OnnxModel")


def checked_fix(call: str, fix: Fix | None) -> dict[str, Value]:
    """Names and values as the caller gave them; tensors become plain ones of their own."""
    if fix is None:
        return {}
    if not isinstance(fix, Mapping) or not all(isinstance(name, str) for name in fix):
        raise TypeError(f"{call}(fix): expected values by the names of inputs, got {fix!r}")
    return {name: _checked(f"{call}(fix[{name!r}])", value) for name, value in fix.items()}


def _checked(where: str, value: object) -> Value:
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_meta or value.is_complex() or value.is_quantized:
            raise TypeError(f"{where}: expected a dense tensor of real numbers or truth values")
        if value.is_floating_point() and value.dtype not in REAL:
            raise TypeError(f"{where}: expected numbers of 16 bits or more, got {_kind(value.dtype)}")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ValueError(f"{where}: expected finite numbers")
        return value.detach().cpu().clone()
    if not isinstance(value, (bool, int, float)):
        raise TypeError(f"{where}: expected a number or a tensor, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: expected a finite number, got {value!r}")
    return value


# Of files, which declare their inputs


def with_fixed(content: _Content, fix: Fix) -> tuple[_Content, dict[str, Tensor]]:
    """The model of a file whose fixed inputs are constants, and these; exactly one input remains.

    Raises:
        BadModel: a name or value that the model does not take, or not one input that remains; all are listed.
    """
    if not fix:
        return content, {}
    about = f"; it takes {listed(content)}"
    unknown = [name for name in fix if name not in content.inputs]
    if unknown:
        raise BadModel(f"fix: it has no input {shown_text(unknown[0])!r}{about}")
    rest = {name: shape for name, shape in content.inputs.items() if name not in fix}
    if len(rest) != 1:
        raise BadModel(f"fix: expected all inputs but one to be fixed, got {len(rest)} that are not{about}")
    values = {}
    for name, shape in content.inputs.items():
        if name in fix:
            try:
                values[name] = _fitted(fix[name], shape, content.types.get(name, torch.float32))
            except BadModel as error:
                raise BadModel(f"fix: {shown_text(name)}: {error}{about}") from None
    return dataclasses.replace(content, inputs=rest, tensors=content.tensors | values), values


def listed(content: "Program | OnnxModel") -> str:
    """The inputs of a model with their shapes and types, for people."""
    types = {name: content.types.get(name, torch.float32) for name in content.inputs}
    return ", ".join(
        f"{shown_text(name)} ({_kind(types[name])}, {_sizes(shape)})" for name, shape in content.inputs.items()
    )


def _fitted(value: Value, shape: tuple[int | None, ...], dtype: torch.dtype) -> Tensor:
    """A value as the tensor that an input takes, with nothing lost."""
    if isinstance(value, Tensor):
        fits = len(shape) == value.dim() and all(n in (None, m) for n, m in zip(shape, value.shape, strict=True))
        if not fits:
            raise BadModel(f"expected the shape {_sizes(shape)}, got {_sizes(tuple(value.shape))}")
        return _typed(value, dtype)
    sizes = [1 if place == 0 and size is None else size for place, size in enumerate(shape)]  # an open batch
    filled = [size for size in sizes if size is not None]
    if len(filled) < len(sizes):
        raise BadModel("a number cannot fill a shape that the model leaves open, expected a tensor")
    if math.prod(filled) > MOST_ENTRIES:
        raise BadModel(f"expected at most {MOST_ENTRIES} entries, got {math.prod(filled)}")
    return _number(value, dtype).expand(filled).clone()


def _number(value: bool | int | float, dtype: torch.dtype) -> Tensor:
    """In the type of an input: rounded to a floating-point type, otherwise the same."""
    if dtype in REAL:
        fits = type(value) is not bool and abs(value) <= torch.finfo(dtype).max
    elif dtype == torch.bool:
        fits = type(value) is not float and value in (0, 1)
    else:
        fits = type(value) is int and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max
    if not fits:
        raise BadModel(f"expected {_kind(dtype)}, got {value!r}")
    return torch.tensor(value, dtype=dtype)


def _typed(value: Tensor, dtype: torch.dtype) -> Tensor:
    """In another type of the same kind, where that has the same values."""
    if value.dtype == dtype:
        return value
    kinds = [(one == torch.bool, one.is_floating_point) for one in (value.dtype, dtype)]
    result = value.to(dtype)
    if kinds[0] != kinds[1] or result.tolist() != value.tolist():
        raise BadModel(f"expected {_kind(dtype)}, got numbers of {_kind(value.dtype)} that it does not have")
    return result


# Of modules, whose forward has names


@dataclass(frozen=True)
class Passed:
    """What a module is called with: an example as the input that the constant is about, and what is fixed.

    Attributes:
        values: by the names of the parameters of its forward, in their order.
        free: the name of the input that the constant is about.
        signature: of its forward; ``None`` if the example is its only argument.
    """

    values: dict[str, Value]
    free: str
    signature: inspect.Signature | None

    @classmethod
    def to(cls, call: str, module: nn.Module, example: Tensor, fix: Fix) -> "Passed":
        """The only parameter that is neither fixed nor has a default is the example, otherwise the first."""
        parameters = _parameters(module)
        takes = f"; its forward takes {', '.join(parameters) or 'nothing that has a name'}"
        unknown = [name for name in fix if name not in parameters]
        if unknown:
            raise ValueError(f"{call}(fix): {type(module).__name__} has no input {unknown[0]!r}{takes}")
        open_ones = [name for name in parameters if name not in fix]
        needed = [name for name in open_ones if parameters[name].default is inspect.Parameter.empty]
        if len(needed) > 1 or (fix and not open_ones):
            left = f"got {', '.join(needed or ['none'])} that {'are' if needed else 'is'} not"
            where = f"{call}({'fix' if fix else 'model'})"  # of the callers only audit and verify can fix inputs
            raise ValueError(f"{where}: expected all inputs but one to be fixed (by audit: {HOW}), {left}{takes}")
        if not fix:
            return cls({"input": example}, "input", None)
        free = (needed or open_ones)[0]
        values = {name: example if name == free else fix[name] for name in parameters if name == free or name in fix}
        return cls(values, free, inspect.signature(module.forward))

    def arguments(self, example: Tensor | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """By place and by name; copies, because a model may overwrite what it is given."""
        given = self.values if example is None else self.values | {self.free: example}
        values = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
        if self.signature is None:
            return tuple(values.values()), {}
        bound = self.signature.bind(**values)
        return bound.args, bound.kwargs

    def within(self, program: Program) -> Program:
        """The program that was traced with these arguments, in which all but the free input are constants."""
        names = [name for name, value in self.values.items() if isinstance(value, Tensor)]
        if len(names) != len(program.inputs):
            raise BadModel("it takes other tensors than those that it was given")
        named = dict(zip(names, program.inputs, strict=True))
        free = named.pop(self.free)
        constants = {inner: self.values[name] for name, inner in named.items()}
        return dataclasses.replace(
            program,
            inputs={free: program.inputs[free]},
            tensors=program.tensors | constants,  # type: ignore[arg-type]
        )

    @property
    def fixed(self) -> dict[str, Value]:
        """What is not the example."""
        return {name: value for name, value in self.values.items() if name != self.free}


def _parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    """What may be passed to a forward by its name."""
    try:
        found = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: parameter for name, parameter in found.items() if parameter.kind in named}


# What is said about them


def noted(graph: Graph, fixed: Mapping[str, Value]) -> Graph:
    """The graph, whose input says what the others were fixed to, to the last bit."""
    facts = tuple((shown_text(name), in_words(value)) for name, value in fixed.items())
    for name, node in graph.nodes.items():
        if facts and isinstance(node.operation, Input):
            graph.nodes[name] = dataclasses.replace(node, operation=Input(facts))
    return graph


def in_words(value: Value) -> str:
    """A number; of a tensor its type, shape and entries, or their digest where they differ."""
    if not isinstance(value, Tensor):
        return repr(value)
    flat = value.flatten()
    about = f"{_kind(value.dtype)}, {_sizes(tuple(value.shape))}"
    if flat.numel() and fingerprint(flat) == fingerprint(flat[:1].expand(flat.shape)):
        return f"{flat[0].item()!r} ({about})"
    return f"a tensor ({about}, sha256 {hashlib.sha256(fingerprint(value)).hexdigest()})"


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes(shape: tuple[int | None, ...]) -> str:
    return "×".join("?" if size is None else str(size) for size in shape) or "a scalar"
