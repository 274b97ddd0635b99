"""A model in memory as a :class:`Program`, by torch.export."""

import dataclasses
import logging
import operator
import warnings
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from gramcert.auditing.fixing import Passed
from gramcert.auditing.program import Call, Program, Ref
from gramcert.operators.graph import BadModel


def traced(model: nn.Module, passed: Passed) -> Program:
    """The calls that a model makes when it is called so; what torch cannot trace is a :class:`BadModel`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # torch logs pages about what it cannot follow
        try:
            exported = torch.export.export(model, *passed.arguments())
        except Exception as error:  # a model may contain any Python code
            if type(error).__name__ == "GuardOnDataDependentSymNode":
                raise BadModel(
                    "its code branches on values that depend on the input, in a way that torch.export cannot follow"
                ) from error
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise BadModel(f"its code depends on data in a way that torch.export cannot follow: {first}") from error
        finally:
            logging.disable(before)
    return dataclasses.replace(of_exported(exported), output_names=_names(exported), is_live=True)


def _names(exported: torch.export.ExportedProgram) -> tuple[str, ...]:
    """Of results that a module returns by their names; those that are no tensors are left out."""
    results = [spec.arg for spec in exported.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    found = pytree.tree_unflatten(results, exported.call_spec.out_spec)
    if not isinstance(found, dict):
        return ()
    return tuple(name for name, result in found.items() if not isinstance(result, ConstantArgument))


def of_exported(exported: torch.export.ExportedProgram) -> Program:
    """A program of torch.export in our words."""
    signature = exported.graph_signature
    tensors: dict[str, torch.Tensor] = {}
    for spec in signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT and spec.target is not None:
            found = exported.state_dict.get(spec.target, exported.constants.get(spec.target))
            if not isinstance(found, torch.Tensor):
                raise BadModel(f"{spec.target}: expected a tensor, got {type(found).__name__}")
            tensors[spec.arg.name] = found.detach()
    constants = {spec.arg.name for spec in signature.input_specs if isinstance(spec.arg, ConstantArgument)}
    inputs: dict[str, tuple[int | None, ...]] = {}
    calls, outputs, types, shapes = [], (), dict[str, torch.dtype](), dict[str, tuple[int, ...]]()
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape):
            shapes[node.name] = tuple(value.shape)
        if node.op == "placeholder":
            if node.name not in tensors and node.name not in constants:
                if not isinstance(value, torch.Tensor):
                    raise BadModel(f"{node.name}: expected a tensor as input, got {type(value).__name__}")
                inputs[node.name] = tuple(n if isinstance(n, int) else None for n in value.shape)
                types[node.name] = value.dtype
        elif node.op == "output":
            wanted = [
                spec.arg.name
                for spec in signature.output_specs
                if spec.kind is OutputKind.USER_OUTPUT and not isinstance(spec.arg, ConstantArgument)
            ]
            outputs = tuple(wanted)
        elif node.op == "call_function":
            calls.append(_call(node))
        else:
            calls.append(Call(f"{node.op}.{node.target}", {}, (node.name,), node.name))
    changed = tuple(signature.buffers_to_mutate.values())
    return Program(inputs, tensors, calls, outputs, changed, types, shapes)


def _call(node: torch.fx.Node) -> Call:
    if node.target is operator.getitem:
        arguments: dict[str, Any] = {"a": node.args[0], "b": node.args[1]}
        target = "getitem"
    elif isinstance(node.target, torch._ops.OpOverload):
        names = [argument.name for argument in node.target._schema.arguments]
        arguments = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        target = str(node.target)
    else:
        arguments = {str(index): value for index, value in enumerate(node.args)} | dict(node.kwargs)
        target = str(getattr(node.target, "__name__", node.target))
    return Call(target, {name: _plain(value) for name, value in arguments.items()}, (node.name,), _label(node))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.fx.Node):
        return Ref(value.name)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _label(node: torch.fx.Node) -> str:
    """The path of the innermost module that the call is in, or the name of the call."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if path]
    return paths[-1].removeprefix("L['self'].") if paths else node.name
