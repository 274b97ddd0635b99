"""A classifier evaluated with a bound of its rounding, and the radii that its margins certify."""

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gramcert.auditing.asked import Asked
from gramcert.auditing.assumptions import assumptions_of_values
from gramcert.certified.margins import radii_of_pairs
from gramcert.networks.bound import bound_by_forms, proof_operations
from gramcert.networks.search import FIRST_SHARPNESS, Budget, Proposal
from gramcert.operators.evaluation import Evaluation, NotEvaluatedError
from gramcert.operators.graph import Graph, Node
from gramcert.operators.linear import Scale, Shift
from gramcert.operators.matrices import AxisMatrix
from gramcert.operators.network import Network
from gramcert.operators.outputs import logits_of
from gramcert.operators.rounded import Rounded, exactly
from gramcert.progress import Report, silent
from gramcert.rounding import next_up, row_norms_up, up

# Passes of the search for multipliers, and operations of proofs up to which each pair of classes has its own.
PASSES, WORTH_PAIRS = 40, 3e11

# Up to which all pairs of classes together take seconds.
QUICK_PAIRS = 2e8

# Operations of a proof up to which forms are tried at all by calls that show no progress: seconds.
QUICK_PROOF = 2e10

# What a constant is about; a softmax at the end is left out in both.
BEFORE_LAST = "from the input to what the last linear layer is given"
OF_LOGITS = "from the input to the logits"

# In place of a constant of 0, that of a network which ignores its input.
_SMALLEST = 2.0**-500


class CertifiedNetwork:
    """Everything before the last linear map by its constant, the map itself by the differences of its rows.

    Where the logits are no linear map of something else, they are one of themselves.

    Attributes:
        lipschitz: certified constant of what comes before.
        lipschitz_of: what that is, in words.
        classes: how many logits there are.
        assumptions: what the radii rest on.
    """

    def __init__(self, call: str, graph: Graph, report: Report = silent) -> None:
        Network(call, graph, is_measured=False).require_bounded(f"{call}(model)")
        graph = self.graph = logits_of(call, graph)
        logits = graph.nodes[graph.outputs["logits"]]
        (self.classes,) = logits.shape[1:]
        self._head, self._features = _head(graph, logits)
        self.lipschitz_of = BEFORE_LAST if self._head else OF_LOGITS
        before = Graph(graph.nodes, {"features": self._features}, [], graph.types)
        network = self.network = Network(call, before, report)
        self.lipschitz = constant_of(network, network.follow().upper)
        try:
            self._evaluation = Evaluation(network.plan, network.measure)
        except NotEvaluatedError as error:
            raise TypeError(f"{call}(model): {error}") from None
        self.assumptions = assumptions_of_values(network.plan.graph)
        maps = [node.operation for node in self._head if isinstance(node.operation, AxisMatrix)]
        self._weight = maps[0].matrix if maps else torch.eye(self.classes, dtype=torch.float64)
        self._call, self._report = call, report

    def features(self, x: Tensor) -> Rounded:
        """What comes before the last layer, for inputs (samples, *shape), and its distance from the exact values."""
        return self._evaluation(x[:, None], self._features)

    def __call__(self, x: Tensor) -> "Margins":
        """For inputs (samples, *shape)."""
        values, distance = self.features(x)
        rounding = exactly(values)[1]
        for node in self._head:
            assert isinstance(node.operation, (AxisMatrix, Scale))
            values, local = node.operation.run(values)
            rounding = next_up(rounding + local)
        logits = values[:, 0]
        known = self._weight, logits, max(self.lipschitz, _SMALLEST), rounding, distance
        return Margins(logits, rounding, distance, radii_of_pairs(*known))

    def by_forms(self, margins: "Margins") -> Tensor:
        """The same radii with the constant of each difference of two logits, where that is smaller."""
        if self._differences is None:
            return margins.by_constant
        known = self._weight, margins.logits, max(self.lipschitz, _SMALLEST), margins.rounding, margins.error
        return radii_of_pairs(*known, self._differences)

    @functools.cached_property
    def is_quick(self) -> bool:
        """Whether forms of all pairs of classes take seconds."""
        return _operations(self.graph, self.classes) <= QUICK_PAIRS

    @functools.cached_property
    def _differences(self) -> Tensor | None:
        """Found when they are asked for, which takes minutes where there are many classes."""
        return _differences(self._call, self.graph, self._weight, self.lipschitz, self._report)


@dataclass(frozen=True)
class Margins:
    """Of some inputs.

    Attributes:
        logits: (samples, classes).
        rounding: of each logit in the last layer.
        error: distance of the features from the exact ones.
        by_constant: up to which distance the largest logit stays above each other one, by the constant of the features.
    """

    logits: Tensor
    rounding: Tensor
    error: Tensor
    by_constant: Tensor


def constant_of(network: Network, product: float) -> float:
    """The smaller of the product of norms and of what forms prove in a short search, which depends on no clock."""
    budget, graph = Budget(passes=PASSES), network.plan.graph
    forms = bound_by_forms(graph, budget, below=product, norms=network.norms, most_operations=QUICK_PROOF)
    return min(product, forms.upper)


def _operations(graph: Graph, classes: int) -> float:
    """Of the proofs of all pairs of classes."""
    return proof_operations(graph.needed()) * (classes * (classes - 1) // 2)


def _differences(call: str, graph: Graph, weight: Tensor, lipschitz: float, report: Report) -> Tensor | None:
    """Constants of the differences of two logits by forms of the whole network, where these are below L·‖w_y - w_i‖.

    The multipliers of one pair are where the search for the next begins. Where nothing is gained for the first pair,
    nothing is tried for the others.
    """
    classes = len(weight)
    pairs = [(y, i) for y in range(classes) for i in range(y)]
    if _operations(graph, classes) > WORTH_PAIRS:
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
