"""The certificate of an audit: everything somebody else needs to check it against the model.

It is a function of the model, of the shape of its input, of the claims about what was measured, and of a section that
nobody can check and that says so. ``verify`` therefore proves the claims, writes the certificate anew and compares it
with the one that it was given, letter by letter.
"""

import hashlib
import math
import platform
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from gramcert.auditing.asked import Asked
from gramcert.auditing.assumptions import assumptions
from gramcert.auditing.cache import pack
from gramcert.auditing.findings import UNBOUNDED
from gramcert.auditing.strict_json import canonical
from gramcert.networks.bound import Forms, is_proved_by
from gramcert.operators.graph import Graph, Input, Joint, Node, Nonlinear, Sum, Unbounded
from gramcert.operators.linear import LinearMap
from gramcert.operators.measurement import Measured, Measurement, Norm
from gramcert.operators.propagation import Followed, Follower, Measure, Plan, Step
from gramcert.rounding import root_up

FORMAT = "gramcert certificate 4"

# Of what a vector proves from below, this part is not claimed: another machine rounds otherwise and proves less.
WITNESS_MARGIN = 1e-6


@dataclass(frozen=True)
class Claim:
    """What is said of one measured map; all of it can be proved.

    Attributes:
        upper: bound of its norm, or constant of a residual layer; ``inf`` if its numbers are too large for float64.
        lower: bound of its norm from below, in closed form or by the witness; ``None`` if nothing is said.
        witness: a packed vector that is stretched by at least ``lower``.
        norms: of the two maps of a residual layer, from which ``upper`` follows.
    """

    upper: float
    lower: float | None = None
    witness: str | None = None
    norms: tuple[float, float] | None = None

    @classmethod
    def of(cls, measurement: Measurement, found: Measured) -> "Claim":
        """What can be proved of a measurement; its own lower bound may need a search, which no claim can hold."""
        if not found.upper < math.inf:  # also what is not a number
            return cls(math.inf)
        if measurement.is_instant:
            return cls(found.upper, found.lower)
        lower = found.witnessed * (1 - WITNESS_MARGIN)
        if found.witness is None or not lower > 0:
            return cls(found.upper, norms=found.norms)
        return cls(found.upper, lower, pack(found.witness))

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "upper": _number(self.upper),
            "lower": self.lower,
            "witness": self.witness,
            "norms": None if self.norms is None else list(self.norms),
        }


@dataclass(frozen=True)
class FormClaim:
    """What proves a constant by forms, see :mod:`gramcert.networks.proof`.

    Attributes:
        multipliers: the first is the square of the constant.
        shifts: which of its frequencies each component goes by.
    """

    multipliers: tuple[tuple[float, ...], ...]
    shifts: tuple[bool, ...]

    @classmethod
    def of(cls, forms: Forms) -> "FormClaim | None":
        """Nothing where forms do not gain."""
        if math.isinf(forms.upper):
            return None
        return cls(tuple(tuple(part.tolist()) for part in forms.multipliers), forms.shifts)

    @property
    def upper(self) -> float:
        """The constant."""
        return root_up(self.multipliers[0][0])

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return {"multipliers": [list(part) for part in self.multipliers], "shifts": list(self.shifts)}

    def is_proved(self, graph: Graph, norms: dict[str, float]) -> bool:
        """By these multipliers, and by norms that are proved elsewhere."""
        multipliers = [torch.tensor(part, dtype=torch.float64) for part in self.multipliers]
        return is_proved_by(graph, multipliers, list(self.shifts), norms)


def best(followed: Followed, forms: FormClaim | None) -> tuple[float, dict[str, float]]:
    """The constant of all outputs together and of each of them, by norms or by forms."""
    upper = followed.upper if forms is None else min(followed.upper, forms.upper)
    return upper, {name: min(value, upper) for name, value in followed.outputs.items()}


def certificate(
    input_shape: tuple[int, ...],
    asked: Asked,
    plan: Plan,
    claims: list[Claim],
    forms: FormClaim | None,
    unverified: dict[str, Any],
) -> dict[str, Any]:
    """As a JSON object: the graph, the claim about each measured map, that of forms, and what follows from them."""
    steps = claimed_steps(plan)
    followed = follow(plan, claims)
    upper, outputs = best(followed, forms)
    content = {
        "format": FORMAT,
        "input_shape": list(input_shape),
        "asked": asked.facts(),
        "weights": weights_digest(plan.graph),
        "graph": [node_facts(node) for node in plan.graph.nodes.values()],
        "claims": [step_facts(step) | claim.facts() for step, claim in zip(steps, claims, strict=True)],
        "forms": None if forms is None else forms.facts(),
        "outputs": {name: _number(value) for name, value in outputs.items()},
        "product": _number(followed.upper),
        "upper": _number(upper),
        "reasons": list(dict.fromkeys(followed.reasons)),
        "assumptions": list(assumptions(plan.graph, input_shape)),
        "unverified": unverified,
    }
    return content | {"seal": seal(content)}


def unverified(model: str, tol: float) -> dict[str, Any]:
    """What the writer says and nobody can check: the name of the model, what was asked for, and what computed it."""
    return {"model": model, "tol": float(tol), "versions": versions()}


def versions() -> dict[str, str]:
    """Of what computed the claims."""
    packages = {name: version(name) for name in ("gramcert", "torch", "numpy", "scipy")}
    return packages | {"python": platform.python_version()}


def seal(content: dict[str, Any]) -> str:
    """A digest of everything else in a certificate: it shows damage, and is no signature."""
    rest = {name: value for name, value in content.items() if name != "seal"}
    return hashlib.sha256(canonical(rest).encode()).hexdigest()


def weights_digest(graph: Graph) -> str:
    """Of all constants of all nodes."""
    return hashlib.sha256("\n".join(node.digest for node in graph.nodes.values()).encode()).hexdigest()


def claimed_steps(plan: Plan) -> list[Step]:
    """Those that a claim is about; where entries only change places, or are left out, there is nothing to claim."""
    return [step for step in plan.steps if not (isinstance(step.measurement, Norm) and step.measurement.map.is_part)]


def claimed(plan: Plan, claims: list[Claim]) -> Measure:
    """Claims in place of measurements."""
    steps = claimed_steps(plan)
    uppers = {id(step.measurement): claim.upper for step, claim in zip(steps, claims, strict=True)}

    def look_up(measurement: Measurement) -> Measured:
        if id(measurement) in uppers:
            return Measured(None, uppers[id(measurement)], "claim")
        assert isinstance(measurement, Norm)
        return Measured(None, measurement.map.size, "entries that change places or are left out")

    return look_up


def follow(plan: Plan, claims: list[Claim]) -> Followed:
    """The constants that follow from claims."""
    return Follower(plan, claimed(plan, claims)).run()


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
        return ["linear", operation.kind, operation.digest]
    if isinstance(operation, Nonlinear):
        return ["nonlinear", operation.name, _number(operation.constant)]
    if isinstance(operation, Sum):
        return ["sum", *operation.signs]
    if isinstance(operation, Joint):
        return ["joint", operation.name]
    if isinstance(operation, Unbounded):
        return ["unbounded", operation.reason]
    assert isinstance(operation, Input)
    return ["input", *map(list, operation.fixed)]


def step_facts(step: Step) -> dict[str, Any]:
    """What a claim is about; the weights are in the digests of its nodes."""
    return {"nodes": list(step.nodes), "kind": step.measurement.kind, "geometry": step.measurement.geometry}


def _number(value: float) -> float | str:
    return float(value) if value < math.inf else UNBOUNDED  # also what is not a number
