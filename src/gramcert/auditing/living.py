"""A module in memory as a graph: traced, and called twice to find out whether it is a function of its input alone."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gramcert.auditing.aten_layers import IN_TRAINING, WITHOUT_STATISTICS
from gramcert.auditing.fixing import Fix, Passed, in_words, noted
from gramcert.auditing.program import Program
from gramcert.auditing.returned import Unnamed, named_tensors, return_named
from gramcert.auditing.state import kept
from gramcert.auditing.traced import traced
from gramcert.auditing.whole import of_program, unbounded_graph
from gramcert.geometry.recognition import UnsteadyWeightError, random_state, require_no_hidden_weight
from gramcert.nn.baking import frozen_copy, plain_copy
from gramcert.operators.graph import MOST_ENTRIES, BadModel, Graph, Unbounded
from gramcert.operators.linear import Shape

# Layers that take indices, which an example of real numbers is not.
_OF_INDICES = (nn.Embedding, nn.EmbeddingBag)


def of_module(call: str, module: nn.Module, input_shape: Shape, fix: Fix, where: str) -> Graph:
    """The graph of a module for inputs of one shape without the batch, with its other inputs fixed.

    Args:
        call: the function that errors name.
        module: as it is.
        input_shape: of one example.
        fix: values of other inputs.
        where: the caller's argument that the shape is from.
    """
    name, shape = type(module).__name__, (1, *input_shape)
    for part in module.modules():
        require_no_hidden_weight(call, part)
    try:
        model = plain_copy(call, module)
    except UnsteadyWeightError as error:
        return unbounded_graph(name, shape, str(error).partition(": ")[2])
    tensors = [*model.parameters(), *model.buffers()]
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    if any(tensor.layout != torch.strided or tensor.is_meta for tensor in tensors):
        raise TypeError(f"{call}(model): expected dense tensors with values, got sparse or meta tensors")
    if math.prod(input_shape) > MOST_ENTRIES:
        raise ValueError(f"{where}: expected at most {MOST_ENTRIES} entries, got shape {input_shape}")
    # Not zeros: a model that adds what it was given before would be taken for one that adds a constant.
    example = torch.linspace(-1, 1, math.prod(input_shape)).reshape(1, *input_shape).to(device, dtype)
    on_device = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in fix.items()}
    passed = Passed.to(call, model, example, on_device)
    with torch.autocast(device.type, enabled=False):  # whatever is around, the model is taken as it is alone
        graph = _of_plain(call, module, model, passed, input_shape, where)
    return noted(graph, passed.fixed)


def _of_plain(call: str, module: nn.Module, model: nn.Module, passed: Passed, input_shape: Shape, where: str) -> Graph:
    """Of a copy that may be changed, without what this package adds to layers."""
    name, shape = type(module).__name__, (1, *input_shape)
    for path, part in model.named_modules():
        if isinstance(part, torch.nn.modules.batchnorm._NormBase) and part.training and (reason := _unsteady(part)):
            return unbounded_graph(path or name, shape, reason)
    called, drawn = plain_copy(call, model), random_state()  # a copy: a model may change when it is called
    args, kwargs = passed.arguments()
    with _explaining(call, where, model, passed, input_shape):
        frozen_copy(call, module)(*args, **kwargs)  # whose layers check what they are given
        result = called(*args, **kwargs)
    try:
        if not isinstance(result, Tensor):
            named_tensors(result)
            return_named(model)
            return_named(called)
        program = traced(model, passed)
        graph = of_program(passed.within(program), input_shape)
        if any(isinstance(node.operation, Unbounded) for node in graph.needed().nodes.values()):
            return graph
        reason = _change(called, passed, program, drawn)
    except (BadModel, Unnamed) as error:
        return unbounded_graph(name, shape, str(error))
    return unbounded_graph(name, shape, reason) if reason else graph


@contextmanager
def _explaining(call: str, where: str, model: nn.Module, passed: Passed, input_shape: Shape) -> Iterator[None]:
    """Whatever goes wrong in a model that is called, as an error that says what is wrong with the shape."""
    with torch.no_grad():
        try:
            yield
        except Exception as error:  # a model may contain any Python code
            first = (str(error).splitlines() or [type(error).__name__])[0]
            hint = _hint(plain_copy(call, model), passed)
            fixed = "".join(f", {name} = {in_words(value)}" for name, value in passed.fixed.items())
            beside = f" with{fixed[1:]}" if fixed else ""
            given = f"an input of shape {input_shape}{beside}{hint}"
            raise ValueError(f"{where}: the model cannot take {given}: {first}") from None


def _hint(model: nn.Module, passed: Passed) -> str:
    """Whether a shape was given with the batch, or of what are indices."""
    if any(isinstance(part, _OF_INDICES) for part in model.modules()):
        return " (an embedding takes indices, and a constant is about real numbers)"
    example = passed.values[passed.free]
    assert isinstance(example, Tensor)
    args, kwargs = passed.arguments(example[0])
    try:
        model(*args, **kwargs)
    except Exception:  # a model may contain any Python code
        return ""
    return f" (without the batch it is {tuple(example.shape[2:])})"


def _change(called: nn.Module, passed: Passed, program: Program, drawn: object) -> str:
    """What a model, called once before, does otherwise than its program says; empty if nothing is found."""
    held: list[object] = []
    before = kept(called, held)
    args, kwargs = passed.arguments()
    with torch.no_grad():
        try:
            called(*args, **kwargs)
        except Exception as error:  # a model may contain any Python code
            return f"it cannot be called twice ({type(error).__name__})"
    after = kept(called, held)
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    if changed:
        return f"it changes what it keeps when it is called: {', '.join(changed[:3])}"
    if random_state() != drawn:
        return "it draws random numbers when it is called"
    return "" if traced(called, passed).is_same(program) else "it does something else when it is called again"


def _unsteady(norm: torch.nn.modules.batchnorm._NormBase) -> str:
    """Why a normalisation in training mode is no function of one example, if it is none."""
    if isinstance(norm, torch.nn.modules.instancenorm._InstanceNorm):
        changes = "instance normalisation in training mode changes its running statistics; call .eval() first"
        return changes if norm.track_running_stats else ""
    return WITHOUT_STATISTICS if norm.running_mean is None else f"{IN_TRAINING}; call .eval() first"
