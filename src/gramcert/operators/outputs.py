r"""Several results as one: those that are entries of one value, such as x.chunk(3), count as moves of it.

Results M₁x, M₂x, … have together the constant L(x)·√m, m being how often the most repeated entry of x occurs in all
of them, which is no more than √ΣL² and 1 instead of √n where they are n parts without common entries.
"""

from dataclasses import dataclass

import torch

from gramcert.operators.graph import Graph, Nonlinear
from gramcert.operators.joining import entries
from gramcert.rounding import length_up, product_up, root_up

SOFTMAXES = ("softmax", "log softmax")


@dataclass(frozen=True)
class Shared:
    """Values that are entries of another one.

    Attributes:
        origin: the other.
        values: their names, at least two.
        repetition: how often the most repeated entry occurs in all of them.
    """

    origin: str
    values: tuple[str, ...]
    repetition: int


def shared_origins(graph: Graph) -> list[Shared]:
    """The results of a graph that are entries of the same value."""
    if len(graph.outputs) < 2:
        return []
    groups = dict[str, list[tuple[str, torch.Tensor]]]()
    for value in graph.outputs.values():
        found = entries(graph, value)
        groups.setdefault(found.origin, []).append((value, found.index.flatten()))
    result = []
    for origin, parts in groups.items():
        if len(parts) > 1:
            counts = torch.bincount(torch.cat([index for _, index in parts]), minlength=2)
            result.append(Shared(origin, tuple(value for value, _ in parts), int(counts[1:].max())))
    return result


def together_up(graph: Graph, constants: dict[str, float]) -> float:
    """The constant of all results together, from those of their values and of what they are entries of."""
    groups = shared_origins(graph)
    parts = []
    for group in groups:
        apart = length_up([constants[value] for value in group.values])
        times = 1.0 if group.repetition <= 1 else root_up(group.repetition)
        parts.append(min(apart, product_up(constants[group.origin], times)))
    grouped = {value for group in groups for value in group.values}
    alone = [constants[value] for value in graph.outputs.values() if value not in grouped]
    return length_up([*parts, *alone])


def logits_of(call: str, graph: Graph) -> Graph:
    """A classifier with its logits as its output, a vector.

    Where that is a softmax of something, the largest entry of both is at the same place.
    """
    if len(graph.outputs) != 1 or graph.constant_outputs:
        names = [*graph.outputs, *graph.constant_outputs]
        raise ValueError(f"{call}(model): expected one output that depends on the input, got {', '.join(names)}")
    node = graph.nodes[next(iter(graph.outputs.values()))]
    if len(node.shape) != 2 or node.shape[0] != 1:
        raise ValueError(f"{call}(model): expected logits of shape (batch, classes), got {node.shape} of one input")
    if node.shape[1] < 2:
        raise ValueError(f"{call}(model): expected at least two logits, got {node.shape[1]}")
    # Along the rows there is but one entry, of which a softmax is constant.
    while isinstance(node.operation, Nonlinear) and node.operation.name in SOFTMAXES and node.operation.constant:
        node = graph.nodes[node.inputs[0]]
    return Graph(graph.nodes, {"logits": node.name}, [], graph.types)
