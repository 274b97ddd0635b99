"""A classifier evaluated with a bound of its rounding, and the radii that its margins certify."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from gramcert.auditing.asked import Asked
from gramcert.auditing.assumptions import assumptions_of_values
from gramcert.certified.margins import radii
from gramcert.networks.bound import bound_by_forms, proof_operations
from gramcert.networks.search import FIRST_SHARPNESS, Budget, Proposal
from gramcert.operators.evaluation import Evaluation, NotEvaluatedError
from gramcert.operators.graph import Graph, Node
from gramcert.operators.linear import Scale, Shift
from gramcert.operators.matrices import AxisMatrix
from gramcert.operators.network import Network
from gramcert.operators.rounded import Rounded, exactly
from gramcert.progress import Report, silent
from gramcert.rounding import next_up, row_norms_up, up

# Passes of the search for multipliers, and operations of proofs up to which each pair of classes has its own.
PASSES, WORTH_PAIRS = 40, 3e11

# Operations of a proof up to which forms are tried at all by calls that show no progress: seconds.
QUICK_PROOF = 2e10

# In place of a constant of 0, that of a network which ignores its input.
_SMALLEST = 2.0**-500


class CertifiedNetwork:
    """Everything before the last linear map by its constant, the map itself by the differences of its rows.

    Where the logits are no linear map of something else, they are one of themselves.

    Attributes:
        lipschitz: certified constant of what comes before.
        classes: how many logits there are.
        assumptions: what the radii rest on.
    """

    def __init__(self, call: str, graph: Graph, report: Report = silent) -> None:
        Network(call, graph, is_measured=False).require_bounded(f"{call}(model)")
        logits = _logits(call, graph)
        (self.classes,) = logits.shape[1:]
        self._head, self._features = _head(graph, logits)
        before = Graph(graph.nodes, {"features": self._features}, [], graph.types)
        network = Network(call, before, report)
        self.lipschitz = constant_of(network, network.follow().upper)
        try:
            self._evaluation = Evaluation(network.plan, network.measure)
        except NotEvaluatedError as error:
            raise TypeError(f"{call}(model): {error}") from None
        self.assumptions = assumptions_of_values(network.plan.graph)
        maps = [node.operation for node in self._head if isinstance(node.operation, AxisMatrix)]
        self._weight = maps[0].matrix if maps else torch.eye(self.classes, dtype=torch.float64)
        self._differences = _differences(call, graph, self._weight, self.lipschitz, report)

    def features(self, x: Tensor) -> Rounded:
        """What comes before the last layer, for inputs (samples, *shape), and its distance from the exact values."""
        return self._evaluation(x[:, None], self._features)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, certified radii of the largest ones, and the distance of the features from the exact ones."""
        values, distance = self.features(x)
        rounding = exactly(values)[1]
        for node in self._head:
            assert isinstance(node.operation, (AxisMatrix, Scale))
            values, local = node.operation.run(values)
            rounding = next_up(rounding + local)
        logits = values[:, 0]
        lipschitz = max(self.lipschitz, _SMALLEST)
        return logits, radii(self._weight, logits, lipschitz, rounding, distance, self._differences), distance


def constant_of(network: Network, product: float) -> float:
    """The smaller of the product of norms and of what forms prove in a short search, which depends on no clock."""
    budget, graph = Budget(passes=PASSES), network.plan.graph
    forms = bound_by_forms(graph, budget, below=product, norms=network.norms, most_operations=QUICK_PROOF)
    return min(product, forms.upper)


def _differences(call: str, graph: Graph, weight: Tensor, lipschitz: float, report: Report) -> Tensor | None:
    """Constants of the differences of two logits by forms of the whole network, where these are below L·‖w_y - w_i‖.

    The multipliers of one pair are where the search for the next begins. Where nothing is gained for the first pair,
    nothing is tried for the others.
    """
    classes = len(weight)
    pairs = [(y, i) for y in range(classes) for i in range(y)]
    if proof_operations(graph.needed()) * len(pairs) > WORTH_PAIRS:
        return None
    found = torch.full((classes, classes), math.inf, dtype=torch.float64)
    last: list[Proposal] = []

    def keep(proposal: Proposal) -> None:
        last[:] = [replace(proposal, sharpness=FIRST_SHARPNESS)]

    for done, (y, i) in enumerate(pairs):
        report("pairs of classes", done, len(pairs))
        distance = float(row_norms_up(next_up((weight[y] - weight[i]).abs())))
        asked = Asked(None, ((i, -1.0), (y, 1.0))).of_graph(call, graph).needed()
        forms = bound_by_forms(
            asked,
            Budget(passes=PASSES),
            below=up(distance * lipschitz),
            start=lambda: last[0] if last else None,
            keep=keep,
        )
        if math.isinf(forms.upper) and not done:
            return None
        found[y, i] = found[i, y] = max(forms.upper, _SMALLEST)
    report("pairs of classes", len(pairs), len(pairs))
    return found


def _logits(call: str, graph: Graph) -> Node:
    """The only output, a vector."""
    if len(graph.outputs) != 1 or graph.constant_outputs:
        names = [*graph.outputs, *graph.constant_outputs]
        raise ValueError(f"{call}(model): expected one output that depends on the input, got {', '.join(names)}")
    node = graph.nodes[next(iter(graph.outputs.values()))]
    if len(node.shape) != 2 or node.shape[0] != 1:
        raise ValueError(f"{call}(model): expected logits of shape (batch, classes), got {node.shape} of one input")
    if node.shape[1] < 2:
        raise ValueError(f"{call}(model): expected at least two logits, got {node.shape[1]}")
    return node


def _head(graph: Graph, logits: Node) -> tuple[list[Node], str]:
    """The last linear map with the constants around it, and the value that it acts on."""
    found, node = [logits], logits
    while isinstance(node.operation, Scale) and not node.operation.error and bool((node.operation.factors == 1).all()):
        node = graph.nodes[node.inputs[0]]
        found.append(node)
    is_kept = not any(isinstance(part.operation, Shift) and part.operation.offset is None for part in found)
    if not isinstance(node.operation, AxisMatrix) or node.operation.axis != 1 or node.operation.error or not is_kept:
        return [], logits.name
    return found[::-1], node.inputs[0]
