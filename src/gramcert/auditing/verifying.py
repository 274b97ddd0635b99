"""``verify``: a certificate checked against a model, claim by claim, by proofs that do not repeat the audit."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gramcert.auditing.cache import unpack
from gramcert.auditing.certificate import (
    Claim,
    FormClaim,
    best,
    claimed,
    claimed_steps,
    follow,
    node_facts,
    seal,
    step_facts,
)
from gramcert.auditing.certificate import certificate as anew
from gramcert.auditing.findings import UNBOUNDED
from gramcert.auditing.fixing import Fix
from gramcert.auditing.proofs import Proof, layer_below, proves_above, proves_below
from gramcert.auditing.reading import Source
from gramcert.auditing.strict_json import canonical, parse
from gramcert.auditing.written import BadCertificate, Written
from gramcert.certified.deployed import ResidualParts
from gramcert.operators.graph import Graph
from gramcert.operators.measurement import Measured, Measurement, Norm, ResidualLayer
from gramcert.operators.propagation import Follower, Plan, Step, known_norms
from gramcert.progress import Report, silent
from gramcert.rounding import checked_arithmetic

# Differences between two graphs that are listed one by one.
MOST_PROBLEMS = 3

# A certificate longer than this is not one.
MOST_BYTES = 2**28

# A norm that is proved to be below this has a bound in float64; nearer to its end, rounding may leave none.
TOO_LARGE = 2.0**1000

# What nodes of two models with other weights may differ in.
CONTENTS = {"digest": "", "does": ""}

CHANGED = "seal: the certificate was changed after it was written"


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
    """

    upper: float
    input_shape: tuple[int, ...]
    model: str
    reasons: tuple[str, ...]
    problems: tuple[str, ...]
    checks: tuple[Check, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether everything was proved."""
        return not self.problems


def read_certificate(path: Path) -> dict[str, Any]:
    """A certificate from its file, as JSON; whether it is one is for :func:`verify` to say."""
    try:
        if not path.is_file():
            raise BadCertificate(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
        if path.stat().st_size > MOST_BYTES:
            raise BadCertificate(f"{path}: too long for a certificate")
        content = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, BadCertificate):
            raise
        reason = "it is not text" if isinstance(error, UnicodeDecodeError) else str(error).splitlines()[0][:200]
        raise BadCertificate(f"{path}: cannot be read as JSON ({reason})") from None
    if not isinstance(content, dict):
        raise BadCertificate(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def verify(
    certificate: dict[str, Any] | str | Path,
    model: nn.Module | torch.export.ExportedProgram | str | Path,
    *,
    architecture: str | None = None,
    prefix: str | None = None,
    fix: Fix | None = None,
    report: Report = silent,
) -> Verification:
    """Check a certificate against a model: its weights, its graph, each claim, and what follows from them.

    Each claimed norm is proved anew by :mod:`~gramcert.auditing.proofs`, each lower bound by its witness. Then the
    certificate is written anew from the model and the claims, and has to be the same to the letter: only what its
    section ``unverified`` says is not checked. A cache is never read.

    Args:
        certificate: its JSON, or its file.
        model: the model, or its file, that it is about.
        architecture: as for :func:`~gramcert.auditing.entry.audit`.
        prefix: as for :func:`~gramcert.auditing.entry.audit`.
        fix: what the audit fixed.
        report: told which claim is next, how many are checked, and of how many.

    Example:
        >>> import torch
        >>> from gramcert.auditing.entry import audit
        >>> from gramcert.auditing.verifying import verify
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> certificate = audit(model, (4,)).certificate
        >>> verify(certificate, model).holds
        True
        >>> _ = torch.nn.init.ones_(model[2].weight)
        >>> verify(certificate, model).problems
        ('2: its weights are not those of the certificate',)
    """
    start = time.perf_counter()
    content = certificate if isinstance(certificate, dict) else read_certificate(Path(certificate))
    try:
        content = parse(canonical(content))  # nothing but JSON from here on
        written = Written.of(content)
    except (ValueError, TypeError, RecursionError) as error:
        return _refused(str(error), (), start)
    source = Source.of("verify", model, architecture, prefix, fix)
    try:
        graph = written.asked.of_graph("verify", source.graph("verify", written.input_shape)).needed()
    except ValueError as error:  # it cannot be read, or takes inputs of another shape
        return _refused(f"model: {error}", written.input_shape, start)
    plan = Plan.of(graph)
    plan.is_measured = not (plan.is_unbounded and not written.claims)
    steps = claimed_steps(plan)
    labels = [Follower(plan, _nothing).label(step.nodes) for step in steps]
    problems = _graph_problems(content, graph) or _claim_problems(content["claims"], steps, labels)
    checks: list[Check] = []
    upper, reasons = math.inf, tuple[str, ...]()
    if not problems:
        for number, (claim, step, label) in enumerate(zip(written.claims, steps, labels, strict=True)):
            report(label, number, len(steps))
            checks.append(_checked(claim, step.measurement, label))
        if written.forms is not None:
            report("forms", len(steps), len(steps))
            checks.append(_checked_forms(written.forms, plan, written.claims))
        problems = [f"{check.name}: {check.problem}" for check in checks if check.problem]
        followed = follow(plan, written.claims)
        upper, reasons = best(followed, written.forms)[0], tuple(dict.fromkeys(followed.reasons))
        again = anew(written.input_shape, written.asked, plan, written.claims, written.forms, written.unverified)
        problems += _differences(content, again)
    elif content["seal"] != seal(content):
        problems.append(CHANGED)
    if problems:
        upper, reasons = math.inf, ()
    return Verification(
        upper, written.input_shape, source.name, reasons, tuple(problems), tuple(checks), time.perf_counter() - start
    )


def _refused(problem: str, shape: tuple[int, ...], start: float) -> Verification:
    return Verification(math.inf, shape, "", (), (problem[:300],), (), time.perf_counter() - start)


def _graph_problems(content: dict[str, Any], graph: Graph) -> list[str]:
    """Where the model is not the one that the certificate describes."""
    written, found = content["graph"], [node_facts(node) for node in graph.nodes.values()]
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


def _claim_problems(claims: list[dict[str, Any]], steps: list[Step], labels: list[str]) -> list[str]:
    """Claims that are missing, left over, or about something else."""
    written = {canonical(claim["nodes"]): claim for claim in claims}
    problems = []
    for step, label in zip(steps, labels, strict=True):
        facts = step_facts(step)
        claim = written.pop(canonical(facts["nodes"]), None)
        if claim is None:
            problems.append(f"{label}: the certificate has no claim about it")
        elif canonical(claim | facts) != canonical(claim):
            problems.append(f"{label}: the claim is about another map")
    problems += [f"{canonical(claim['geometry'])[:80]}: the model has no such step" for claim in written.values()]
    in_order = [claim["nodes"] for claim in claims] == [list(step.nodes) for step in steps]
    if not problems and not in_order:
        problems.append("claims: they are not one for each step of the model, in its order")
    return problems


def _checked(claim: Claim, measurement: Measurement, name: str) -> Check:
    start = time.perf_counter()
    try:
        prove = _proved_residual if isinstance(measurement, ResidualLayer) else _proved_norm
        found = prove(measurement, claim)  # type: ignore[arg-type]
    except Exception as error:  # numbers at the ends of float64 may make any step of a proof fail
        found = Proof(False, f"the claim cannot be used ({type(error).__name__}: {str(error)[:120]})")
    problem = "" if found.proved else f"its claim, at most {claim.upper!r}, was not proved: {found.method}"
    return Check(name, claim.upper, found.method, problem, time.perf_counter() - start)


def _checked_forms(forms: FormClaim, plan: Plan, claims: list[Claim]) -> Check:
    """The multipliers are not trusted, and no search is repeated."""
    start = time.perf_counter()
    try:
        with checked_arithmetic("verify"):
            norms = known_norms(plan, claimed(plan, claims))
            proved, method = forms.is_proved(plan.graph, norms), "factorisations of the forms"
    except Exception as error:  # as for claims
        proved, method = False, f"the claim cannot be used ({type(error).__name__}: {str(error)[:120]})"
    problem = "" if proved else f"its multipliers do not prove that it is at most {forms.upper!r}"
    return Check("whole network", forms.upper, method, problem, time.perf_counter() - start)


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


def _differences(content: dict[str, Any], again: dict[str, Any]) -> list[str]:
    """What the certificate says otherwise than the one written anew from the model and the claims."""
    problems = []
    for name in ("outputs", "product", "upper", "reasons"):
        if canonical(content[name]) != canonical(again[name]):
            says, follows = (canonical(value)[:120] for value in (content[name], again[name]))
            problems.append(f"{name}: the certificate says {says}, but {follows} follows from its claims")
    others = sorted(content.keys() - {"outputs", "product", "upper", "reasons", "seal"})
    problems += [
        f"{name}: the certificate says something else than the model and its claims"
        for name in others
        if canonical(content[name]) != canonical(again[name])
    ]
    return problems + [CHANGED] * (content["seal"] != seal(content))


def _nothing(measurement: Measurement) -> Measured:
    raise AssertionError(measurement)
