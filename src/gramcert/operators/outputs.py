r"""Several results as one: those that are entries of one value, such as x.chunk(3), count as moves of it.

Results M₁x, M₂x, … have together the constant L(x)·√m, m being how often the most repeated entry of x occurs in all
of them, which is no more than √ΣL² and 1 instead of √n where they are n parts without common entries.
"""

from dataclasses import dataclass

import torch

from gramcert.operators.graph import Graph
from gramcert.operators.joining import entries
from gramcert.rounding import length_up, product_up, root_up


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
