"""What a constant rests on, said for people: in every audit and its certificate."""

import torch

from gramcert.operators.elementwise import ELEMENTARY, TABLE
from gramcert.operators.graph import Graph, Input, Node, Nonlinear
from gramcert.rounding import ASSUMPTIONS

ABOUT = (
    "the constant is that of the model as a function of real numbers with the weights as stored; the rounding of its "
    "evaluation in floating point is not in it",
    "it bounds ‖f(x) - f(y)‖ by L·‖x - y‖ in the l2 norm for all x and y of this shape, not only for images",
)

# How what is said about fixed inputs begins, and nothing else.
FIXED = "the input "


def assumptions(graph: Graph, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Of an audit of this graph, for inputs of this shape without the batch."""
    about = (*ABOUT, _about_batch(graph, shape), *_about_fixed(graph))
    return (*about, *ASSUMPTIONS, *_about_functions(graph), *_about_types(graph))


def assumptions_of_values(graph: Graph) -> tuple[str, ...]:
    """Of values that were computed by this graph, with a bound of their rounding."""
    elementary = [name for name in _functions(graph) if name not in TABLE or not TABLE[name].is_exact]
    return (*ASSUMPTIONS, *[ELEMENTARY] * bool(elementary), *_about_functions(graph))


def _about_functions(graph: Graph) -> list[str]:
    """What slopes rest on, each once."""
    assumed = [TABLE[name].assumed for name in _functions(graph) if name in TABLE]
    return list(dict.fromkeys(text for text in assumed if text))


def _functions(graph: Graph) -> list[str]:
    """Names of functions of each entry, and of those that take logarithms or exponentials of several."""
    names = [node.operation.name for node in graph.nodes.values() if isinstance(node.operation, Nonlinear)]
    return [name for name in names if name in TABLE or name in ("softmax", "log softmax", "log sum exp")]


def _about_batch(graph: Graph, shape: tuple[int, ...]) -> str:
    """What the model was taken to be given at a time."""
    given = _input(graph).shape
    count = 1 if len(given) == len(shape) else given[0]
    if count > 1:
        return f"the model takes {count} examples at a time, and the constant is about all of them as one input"
    return "the model is given one example at a time; what it does across the examples of a larger batch is not in it"


def _about_fixed(graph: Graph) -> list[str]:
    """What the other inputs of the model are, about which the constant says nothing."""
    operation = _input(graph).operation
    assert isinstance(operation, Input)
    if not operation.fixed:
        return []
    return [
        *(f"{FIXED}{name} is fixed to {value}" for name, value in operation.fixed),
        "the constant is about the remaining input, with those that are fixed at these values alone; what the model "
        "computes from them without it is taken as torch computes it on a CPU",
    ]


def _input(graph: Graph) -> Node:
    return next(node for node in graph.nodes.values() if isinstance(node.operation, Input))


def _about_types(graph: Graph) -> list[str]:
    """Types narrower than float32, or than that of the input."""
    usual = max(32, _bits(graph.types.get(_input(graph).name)))
    narrow = {
        graph.types[node.name]: node.label
        for node in reversed(graph.nodes.values())  # the first one of each type remains
        if 0 < _bits(graph.types.get(node.name)) < usual
    }
    return [
        f"values are rounded to {str(dtype).removeprefix('torch.')}, first in {label}: a jump however close two inputs "
        "are, which counts as rounding and is not in the constant"
        for dtype, label in narrow.items()
    ]


def _bits(dtype: torch.dtype | None) -> int:
    return torch.finfo(dtype).bits if dtype is not None and dtype.is_floating_point else 0
