"""Claims of certificates, proved by other means than those that found them, and what became of a certificate."""

import math
import time
from dataclasses import dataclass
from typing import Any

from gramcert.auditing.cache import unpack
from gramcert.auditing.certificate import Claim, node_facts
from gramcert.auditing.findings import UNBOUNDED
from gramcert.auditing.proofs import Proof, layer_below, proves_above, proves_below
from gramcert.auditing.strict_json import canonical
from gramcert.certified.deployed import ResidualParts
from gramcert.operators.graph import Graph
from gramcert.operators.measurement import Measurement, Norm, ResidualLayer

# Differences between two graphs that are listed one by one.
MOST_PROBLEMS = 3

# A norm that is proved to be below this has a bound in float64; nearer to its end, rounding may leave none.
TOO_LARGE = 2.0**1000

# What nodes of two models with other weights may differ in.
CONTENTS = {"digest": "", "does": ""}


@dataclass(frozen=True)
class Check:
    """One claim, and how it was proved; or what is wrong with it."""

    name: str
    upper: float
    method: str
    problem: str
    seconds: float


@dataclass(frozen=True)
class Verification:
    """What became of a certificate.

    Attributes:
        upper: the constant that it certifies; ``inf`` if it is refused, or certifies none.
        input_shape: of the inputs that it is about.
        model: what it was checked against, for people.
        reasons: why it certifies no constant, although it holds.
        problems: why it is refused; empty if it holds.
        checks: every claim.
        seconds: in all.
        inputs: how many inputs have a radius that it certifies, where it is about inputs.
    """

    upper: float
    input_shape: tuple[int, ...]
    model: str
    reasons: tuple[str, ...]
    problems: tuple[str, ...]
    checks: tuple[Check, ...]
    seconds: float
    inputs: int | None = None

    @property
    def holds(self) -> bool:
        """Whether everything was proved."""
        return not self.problems


def checked(claim: Claim, measurement: Measurement, name: str) -> Check:
    """One claim, proved or not."""
    start = time.perf_counter()
    try:
        prove = _proved_residual if isinstance(measurement, ResidualLayer) else _proved_norm
        found = prove(measurement, claim)  # type: ignore[arg-type]
    except Exception as error:  # numbers at the ends of float64 may make any step of a proof fail
        found = Proof(False, f"the claim cannot be used ({type(error).__name__}: {str(error)[:120]})")
    problem = "" if found.proved else f"its claim, at most {claim.upper!r}, was not proved: {found.method}"
    return Check(name, claim.upper, found.method, problem, time.perf_counter() - start)


def _proved_norm(measurement: Norm, claim: Claim) -> Proof:
    """The upper bound by a test; the lower one by its witness, or in closed form."""
    if claim.norms is not None:
        return Proof(False, "two norms are for residual layers only")
    if claim.upper == math.inf:
        return _too_large(claim, proves_below(measurement.map, TOO_LARGE).proved)
    if claim.lower is None:
        if claim.witness is not None:
            return Proof(False, "its witness is said to prove nothing")
    elif not proves_above(measurement.map, claim.lower, None if claim.witness is None else unpack(claim.witness)):
        return Proof(False, f"its lower bound {claim.lower!r} does not follow from its witness")
    return proves_below(measurement.map, claim.upper)


def _proved_residual(layer: ResidualLayer, claim: Claim) -> Proof:
    """Both norms of the theorem, and the constant that follows."""
    if claim.lower is not None or claim.witness is not None:
        return Proof(False, "nothing is known of a residual layer from below")
    parts = ResidualParts.of(layer.inner, layer.outer, layer.factors())
    if claim.upper == math.inf:
        level = math.sqrt(TOO_LARGE) / 2
        small = all(layer_below(part, layer.input_size, level).proved for part in (parts.scaled, parts.spread))
        return _too_large(claim, small and parts.constant(level, level) < math.inf)
    if claim.norms is None:
        return Proof(False, "it has no norms that it follows from")
    if not parts.constant(*claim.norms) <= claim.upper:
        return Proof(False, "it does not follow from its two norms")
    methods = []
    for part, level in zip((parts.scaled, parts.spread), claim.norms, strict=True):
        found = layer_below(part, layer.input_size, level)
        if not found.proved:
            return found
        methods.append(found.method)
    return Proof(True, " and ".join(dict.fromkeys(methods)))


def _too_large(claim: Claim, is_bounded: bool) -> Proof:
    """Of a map without a bound: nothing else is claimed, and it is not one that has a bound."""
    if claim != Claim(math.inf):
        return Proof(False, f"nothing else can be known of what is {UNBOUNDED}")
    if is_bounded:
        return Proof(False, "its numbers are not too large for float64")
    return Proof(True, "numbers too large for float64")


def graph_problems(written: list[Any], graph: Graph) -> list[str]:
    """Where the model is not the one that the certificate describes."""
    found = [node_facts(node) for node in graph.nodes.values()]
    if canonical(written) == canonical(found):
        return []
    fixed = [_fixed(facts) for facts in (written, found)]
    if fixed[0] != fixed[1]:
        says, given = (", ".join(values) or "nothing" for values in fixed)
        return [f"fix: the certificate is about the model with {says} fixed, here it is {given}"]
    problems = []
    for one, two in zip(written, found, strict=False):
        if canonical(one) == canonical(two):
            continue
        name = str(two["label"] or two["name"])
        if not isinstance(one, dict) or canonical(one | CONTENTS) != canonical(two | CONTENTS):
            problems.append(f"{name}: the model has {two['source']} here, the certificate something else")
        elif one.get("digest") != two["digest"]:
            problems.append(f"{name}: its weights are not those of the certificate")
        else:
            problems.append(f"{name}: the certificate says that it does something else")
    others = [problem for problem in problems if "the certificate something else" in problem]
    if len(others) > MOST_PROBLEMS or len(written) != len(found):
        first = f", first at {others[0].partition(':')[0]}" if others else ""
        return [f"graph: the model is another one, or was exported in another way{first}"]
    return list(dict.fromkeys(problems))


def _fixed(graph: list[Any]) -> list[str]:
    """What the inputs in the facts of a graph say about others, as far as they say it in the known form."""
    does = [node.get("does") for node in graph if isinstance(node, dict) and node.get("source") == "input"]
    pairs = [pair for one in does if isinstance(one, list) for pair in one[1:]]
    return [" = ".join(map(str, pair)) for pair in pairs if isinstance(pair, list)]
