"""One output of a model, or a linear functional of one, in place of all outputs together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramcert.operators.graph import MOST_ENTRIES, Graph, Node, fingerprint
from gramcert.operators.linear import Move
from gramcert.operators.matrices import AxisMatrix

Functional = Mapping[int, float] | Sequence[float] | Tensor


@dataclass(frozen=True)
class Asked:
    """What the constant is about.

    Attributes:
        output: name of an output; ``None`` for all of them, or the only one.
        functional: weights of its entries by their places in the flattened output, without the batch; ``None`` for
            the output itself.
    """

    output: str | None = None
    functional: tuple[tuple[int, float], ...] | None = None

    @classmethod
    def of(cls, call: str, output: str | None, functional: Functional | None) -> "Asked":
        """Checked as far as it can be without the model."""
        if output is not None and not isinstance(output, str):
            raise TypeError(f"{call}(output): expected the name of an output or None, got {output!r}")
        if functional is None:
            return cls(output)
        if isinstance(functional, Tensor):
            functional = functional.detach().cpu().double().flatten().tolist()
        if isinstance(functional, str) or not isinstance(functional, (Mapping, Sequence)):
            raise TypeError(
                f"{call}(functional): expected weights, or a dict from places to weights, got {functional!r}"
            )
        items = functional.items() if isinstance(functional, Mapping) else enumerate(functional)
        weights = []
        for place, weight in items:
            if isinstance(place, bool) or not isinstance(place, int) or place < 0:
                raise ValueError(f"{call}(functional): expected places from 0 on, got {place!r}")
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
                raise ValueError(f"{call}(functional): expected finite weights, got {weight!r}")
            if float(weight) != weight:
                raise ValueError(f"{call}(functional): expected weights that float64 holds, got {weight!r}")
            if weight:
                weights.append((place, float(weight)))
        if not isinstance(functional, Mapping) and weights and len(functional) - 1 > weights[-1][0]:
            weights.append((len(functional) - 1, 0.0))  # the last place has to exist, whatever its weight
        return cls(output, tuple(sorted(weights)))

    @property
    def is_everything(self) -> bool:
        """Whether nothing was asked for."""
        return self.output is None and self.functional is None

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        weights = None if self.functional is None else [[place, weight] for place, weight in self.functional]
        return {"output": self.output, "functional": weights}

    def of_graph(self, call: str, graph: Graph) -> Graph:
        """The graph whose only output is what was asked for."""
        if self.is_everything:
            return graph
        names = [*graph.outputs, *graph.constant_outputs]
        output = self.output
        if output is None:
            if len(names) != 1:
                raise ValueError(f"{call}(output): expected the name of one of {', '.join(map(repr, names))}, got None")
            output = names[0]
        if output not in names:
            known = ", ".join(map(repr, names))
            raise ValueError(f"{call}(output={output!r}): the model has no such output, but {known}")
        if output in graph.constant_outputs:
            return Graph(graph.nodes, {}, [output], graph.types)
        value = graph.outputs[output]
        if self.functional is None:
            return Graph(graph.nodes, {output: value}, [], graph.types)
        return self._applied(call, graph, output, value)

    def _applied(self, call: str, graph: Graph, output: str, value: str) -> Graph:
        assert self.functional is not None
        shape = graph.nodes[value].shape
        count = math.prod(shape)
        beyond = [place for place, _ in self.functional if place >= count]
        if beyond or count > MOST_ENTRIES:
            raise ValueError(
                f"{call}(functional): expected places below {count}, the entries of {output!r}, got {beyond}"
            )
        row = torch.zeros(1, count, dtype=torch.float64)
        for place, weight in self.functional:
            row[0, place] = weight
        flat = Move(shape, torch.arange(1, count + 1))
        digest = fingerprint(row).hex()[-64:]
        nodes = graph.nodes | {
            "flattened": Node("flattened", "functional", "functional", flat, (value,), (count,), digest),
            "functional": Node(
                "functional", "functional", "functional", AxisMatrix((count,), row, 0), ("flattened",), (1,), digest
            ),
        }
        return Graph(nodes, {f"functional of {output}": "functional"}, [], graph.types)
