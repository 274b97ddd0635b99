"""The graph of a whole model, which has exactly one input that is not fixed."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gramcert.auditing.aten import Translator
from gramcert.auditing.fixing import HOW, listed
from gramcert.auditing.program import Program
from gramcert.operators.graph import BadModel, Builder, Graph
from gramcert.operators.linear import Shape

if TYPE_CHECKING:  # loaded where it is needed
    from gramcert.auditing.onnx_file import OnnxModel


def of_program(program: Program, input_shape: Shape) -> Graph:
    """That of what torch.export says."""
    if program.changed:
        reason = f"it changes its own buffers when it is called: {', '.join(program.changed[:3])}"
        return unbounded_graph("model", (1, *input_shape), reason)
    return guarded(Translator(program).run, program, input_shape)


def guarded(translate: Callable[[dict[str, Shape]], Graph], model: "Program | OnnxModel", input_shape: Shape) -> Graph:
    """What is translated for the only input of a model; several have no constant."""
    if len(model.inputs) != 1:
        return unbounded_graph("model", (1, *input_shape), several(model))
    ((name, declared),) = model.inputs.items()
    graph = translate({name: matched(name, declared, input_shape)})
    if not graph.outputs and not graph.constant_outputs:
        raise BadModel("it has no outputs")
    return graph


def several(model: "Program | OnnxModel") -> str:
    """That a model has not one input, and what can be done about it."""
    if not model.inputs:
        return "it takes no inputs, and a constant is about one"
    return f"it takes {len(model.inputs)} inputs, {listed(model)}, and a constant is about one: fix the others ({HOW})"


def matched(name: str, declared: Sequence[int | None], input_shape: Shape) -> Shape:
    """The declared shape with its open sizes filled in: the batch is what the file says, or 1."""
    if len(declared) == len(input_shape) + 1:
        shape = (1 if declared[0] is None else declared[0], *input_shape)
    elif len(declared) == len(input_shape):
        shape = input_shape
    else:
        raise BadModel(f"its input {name} has the shape {_open(declared)}, got {_open(input_shape)}")
    if any(size not in (None, given) for size, given in zip(declared, shape, strict=True)):
        raise BadModel(f"its input {name} has the shape {_open(declared)}, got {_open(input_shape)}")
    return shape


def _open(shape: Sequence[int | None]) -> str:
    return ",".join("?" if size is None else str(size) for size in shape)


def unbounded_graph(name: str, shape: Shape, reason: str) -> Graph:
    """A model of which nothing is known but why."""
    builder = Builder()
    x = builder.input("input", shape)
    builder.at(name, "model", [])
    builder.output("output", builder.unbounded((x,), (), reason))
    return builder.graph
