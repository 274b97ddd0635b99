"""The certificate of an audit: everything somebody else needs to check it against the model."""

import hashlib
import json
import math
import platform
from importlib.metadata import version
from typing import Any

from gramcert.auditing.cache import pack
from gramcert.auditing.following import Followed, Plan, Step
from gramcert.auditing.graph import Graph, Input, Joint, Node, Nonlinear, Sum, Unbounded
from gramcert.auditing.linear import LinearMap
from gramcert.auditing.measuring import Measured, Norm
from gramcert.auditing.result import UNBOUNDED

FORMAT = "gramcert certificate 1"


def certificate(
    model: str,
    input_shape: tuple[int, ...],
    tol: float,
    plan: Plan,
    measured: dict[str, Measured],
    followed: Followed,
    assumptions: tuple[str, ...],
) -> dict[str, Any]:
    """As a JSON object: the graph, the claim about each measured map, and what follows from them."""
    content = {
        "format": FORMAT,
        "model": model,
        "input_shape": list(input_shape),
        "tol": tol,
        "versions": versions(),
        "weights": weights_digest(plan.graph),
        "graph": [node_facts(node) for node in plan.graph.nodes.values()],
        "claims": [
            claim_facts(step) | _claimed(measured[step.measurement.key(tol)])
            for step in plan.steps
            if not is_trivial(step)
        ],
        "outputs": {name: _number(value) for name, value in followed.outputs.items()},
        "upper": _number(followed.upper),
        "reasons": followed.reasons,
        "assumptions": list(assumptions),
    }
    return content | {"seal": seal(content)}


def versions() -> dict[str, str]:
    """Of what computed the claims."""
    packages = {name: version(name) for name in ("gramcert", "torch", "numpy", "scipy")}
    return packages | {"python": platform.python_version()}


def seal(content: dict[str, Any]) -> str:
    """A digest of everything else in a certificate: it shows damage, and is no signature."""
    rest = {name: value for name, value in content.items() if name != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def weights_digest(graph: Graph) -> str:
    """Of all constants of all nodes."""
    return hashlib.sha256("\n".join(node.digest for node in graph.nodes.values()).encode()).hexdigest()


def node_facts(node: Node) -> dict[str, Any]:
    """What a certificate says about a node."""
    return {
        "name": node.name,
        "label": node.label,
        "source": node.source,
        "does": _does(node),
        "inputs": list(node.inputs),
        "shape": list(node.shape),
        "digest": node.digest,
    }


def _does(node: Node) -> list[Any]:
    operation = node.operation
    if isinstance(operation, LinearMap):
        return ["linear", operation.kind, operation.digest()]
    if isinstance(operation, Nonlinear):
        return ["nonlinear", operation.name, operation.constant]
    if isinstance(operation, Sum):
        return ["sum", *operation.signs]
    if isinstance(operation, Joint):
        return ["joint", operation.name]
    if isinstance(operation, Unbounded):
        return ["unbounded", operation.reason]
    assert isinstance(operation, Input)
    return ["input"]


def is_trivial(step: Step) -> bool:
    """Whether there is nothing to claim: entries only change places, or are left out."""
    return isinstance(step.measurement, Norm) and step.measurement.map.is_part


def claim_facts(step: Step) -> dict[str, Any]:
    """What a claim is about."""
    return {
        "nodes": list(step.nodes),
        "kind": step.measurement.kind,
        "geometry": step.measurement.geometry,
        "digest": step.measurement.digest(),
    }


def _claimed(found: Measured) -> dict[str, Any]:
    witness = None if found.witness is None else {"vector": pack(found.witness), "lower": found.witnessed}
    return {
        "lower": found.lower,
        "upper": _number(found.upper),
        "norms": None if found.norms is None else list(found.norms),
        "method": found.method,
        "witness": witness,
    }


def _number(value: float) -> float | str:
    return value if value < math.inf else UNBOUNDED  # also what is not a number
