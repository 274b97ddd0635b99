"""``verify``: a certificate checked against a model, claim by claim, by proofs that do not repeat the audit."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gramcert.auditing.cache import unpack
from gramcert.auditing.certificate import FORMAT, claim_facts, is_trivial, node_facts, seal, weights_digest
from gramcert.auditing.checking import Proof, layer_below, proves_below
from gramcert.auditing.following import Follower, Plan, Step
from gramcert.auditing.graph import MOST_ENTRIES, Graph
from gramcert.auditing.measuring import Measured, Measurement, Norm, ResidualLayer, witnessed_lower
from gramcert.auditing.reading import Source
from gramcert.auditing.result import UNBOUNDED
from gramcert.certified.deployed import ResidualParts

# Differences between two graphs that are listed one by one.
MOST_PROBLEMS = 3

# A certificate longer than this is not one.
MOST_BYTES = 2**28

Report = Callable[[int, int, str], None]


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
        upper: the constant that it certifies; ``inf`` if it is refused, or of an unbounded model.
        input_shape: of the inputs that it is about.
        problems: why it is refused; empty if it holds.
        checks: every claim.
        seconds: in all.
    """

    upper: float
    input_shape: tuple[int, ...]
    problems: tuple[str, ...]
    checks: tuple[Check, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether everything was proved."""
        return not self.problems


class BadCertificate(ValueError):  # noqa: N818 - it names what the caller gave, not a failure of the program
    """A file that is not a certificate, for the reason in the message."""


def read_certificate(path: Path) -> dict[str, Any]:
    """A certificate from its file, as JSON; whether it is one is for :func:`verify` to say."""
    try:
        if not path.is_file():
            raise BadCertificate(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
        if path.stat().st_size > MOST_BYTES:
            raise BadCertificate(f"{path}: too long for a certificate")
        content = json.loads(path.read_text(encoding="utf-8"))
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
    report: Report | None = None,
) -> Verification:
    """Check a certificate against a model: its weights, its graph, each claim, and what follows from them.

    Each claimed norm is proved anew by :mod:`~gramcert.auditing.checking`, each lower bound by its witness; then the
    constant is put together from the claims. A cache is never read.

    Args:
        certificate: its JSON, or its file.
        model: the model, or its file, that it is about.
        architecture: as for :func:`~gramcert.auditing.entry.audit`.
        prefix: as for :func:`~gramcert.auditing.entry.audit`.
        report: told how many claims are checked, of how many, and which one is next.

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
        shape, claims = _facts(content)
    except BadCertificate as error:
        return Verification(math.inf, (), (str(error),), (), time.perf_counter() - start)
    source = Source.of("verify", model, architecture, prefix)
    try:
        graph = source.graph("verify", shape).needed()
    except ValueError as error:  # it cannot be read, or takes inputs of another shape
        return Verification(math.inf, shape, (f"model: {error}",), (), time.perf_counter() - start)
    plan = Plan.of(graph)
    steps = [step for step in plan.steps if not is_trivial(step)]
    labels = [Follower(plan, _nothing).label(step.nodes) for step in steps]
    problems = _graph_problems(content, graph) or _claim_problems(claims, steps, labels)
    checks: list[Check] = []
    upper = math.inf
    if not problems:
        for number, (claim, step, label) in enumerate(zip(claims, steps, labels, strict=True)):
            if report is not None:
                report(number, len(steps), label)
            checks.append(_checked(claim, step, label))
        problems = [f"{check.name}: {check.problem}" for check in checks if check.problem]
        upper, wrong = _total(content, plan, claims, steps)
        problems += wrong
    if content.get("seal") != seal(content):
        problems.append("seal: the certificate was changed after it was written")
    if problems:
        upper = math.inf
    return Verification(upper, shape, tuple(problems), tuple(checks), time.perf_counter() - start)


def _facts(content: dict[str, Any]) -> tuple[tuple[int, ...], list[dict[str, Any]]]:
    """The parts of a certificate, if it is one of a known version that is whole."""
    if content.get("format") != FORMAT:
        raise BadCertificate(f"format: expected {FORMAT!r}, got {str(content.get('format'))[:80]!r}")
    try:
        shape = tuple(content["input_shape"])
        whole = all(type(size) is int and size > 0 for size in shape) and math.prod(shape) <= MOST_ENTRIES
        claims, graph = content["claims"], content["graph"]
        named = isinstance(graph, list) and all(isinstance(name, str) for claim in claims for name in claim["nodes"])
        numbers = [claim["upper"] for claim in claims] + [content["upper"], *content["outputs"].values()]
        fine = all(value == UNBOUNDED or 0 <= float(value) < math.inf for value in numbers)
        tol = float(content["tol"])
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise BadCertificate(f"it is not whole ({type(error).__name__}: {str(error)[:80]})") from None
    if not (fine and named and whole and shape and 0 < tol < 1):
        raise BadCertificate("it has numbers that no audit gives")
    return shape, claims


def _graph_problems(content: dict[str, Any], graph: Graph) -> list[str]:
    """Where the model is not the one that the certificate describes."""
    written, found = content["graph"], [node_facts(node) for node in graph.nodes.values()]
    if not isinstance(written, list):
        return ["graph: expected a list of nodes"]
    if written == found and content.get("weights") == weights_digest(graph):
        return []
    problems = []
    for one, two in zip(written, found, strict=False):
        if one == two:
            continue
        name = str(two["label"] or two["name"])
        if not isinstance(one, dict) or {**one, "digest": 0, "does": 0} != {**two, "digest": 0, "does": 0}:
            problems.append(f"{name}: the model has {two['source']} here, the certificate something else")
        elif one.get("digest") != two["digest"]:
            problems.append(f"{name}: its weights are not those of the certificate")
        else:
            problems.append(f"{name}: the certificate says that it does something else")
    others = [problem for problem in problems if "the certificate something else" in problem]
    if len(others) > MOST_PROBLEMS or len(written) != len(found):
        first = f", first at {others[0].partition(':')[0]}" if others else ""
        return [f"graph: the model is another one, or was exported in another way{first}"]
    return list(dict.fromkeys(problems)) or ["weights: their digest is not that of the certificate"]


def _claim_problems(claims: list[dict[str, Any]], steps: list[Step], labels: list[str]) -> list[str]:
    """Claims that are missing, left over, or about something else."""
    written = {tuple(claim.get("nodes", ())): claim for claim in claims}
    problems = []
    for step, label in zip(steps, labels, strict=True):
        claim = written.pop(step.nodes, None)
        if claim is None:
            problems.append(f"{label}: the certificate has no claim about it")
        elif any(claim.get(name) != value for name, value in claim_facts(step).items()):
            problems.append(f"{label}: the claim is about another map")
    problems += [f"{claim.get('geometry', 'a claim')}: the model has no such step" for claim in written.values()]
    if not problems and [tuple(claim["nodes"]) for claim in claims] != [step.nodes for step in steps]:
        problems.append("claims: they are in another order than the steps of the model")
    return problems


def _checked(claim: dict[str, Any], step: Step, name: str) -> Check:
    start = time.perf_counter()
    upper = math.inf if claim["upper"] == UNBOUNDED else float(claim["upper"])
    measurement = step.measurement
    try:
        if isinstance(measurement, ResidualLayer):
            found = _residual_below(measurement, claim, upper)
        else:
            assert isinstance(measurement, Norm)
            found = proves_below(measurement.map, upper)
            found = _with_witness(measurement, claim, found)
    except Exception as error:  # a claim may contain anything
        found = Proof(False, f"the claim cannot be used ({type(error).__name__}: {str(error)[:120]})")
    problem = "" if found.proved else f"its bound {upper!r} was not proved: {found.method}"
    return Check(name, upper, found.method, problem, time.perf_counter() - start)


def _with_witness(measurement: Norm, claim: dict[str, Any], found: Proof) -> Proof:
    """The lower bound of the claim has to be below the upper one, and what its witness is said to prove be true."""
    lower, upper = claim.get("lower"), claim["upper"]
    if lower is not None and upper != UNBOUNDED and not 0 <= float(lower) <= float(upper):
        return Proof(False, "its lower bound is above its upper bound")
    witness = claim.get("witness")
    if witness is None or not found.proved:
        return found
    proved = witnessed_lower(measurement.map, unpack(witness["vector"]))
    if not proved >= float(witness["lower"]) * (1 - 1e-9):
        return Proof(False, f"its witness proves {proved!r} from below, not {witness['lower']!r}")
    return found


def _residual_below(layer: ResidualLayer, claim: dict[str, Any], upper: float) -> Proof:
    """Both norms of the theorem, and the constant that follows."""
    parts = ResidualParts.of(layer.inner, layer.outer, layer.factors())
    scaled, spread = (float(norm) for norm in claim["norms"])
    if not (0 <= scaled < math.inf and 0 <= spread < math.inf):
        return Proof(False, "norms are not negative")
    if not parts.constant(scaled, spread) <= upper:
        return Proof(False, "it does not follow from its two norms")
    methods = []
    for norm, level in ((parts.scaled, scaled), (parts.spread, spread)):
        found = layer_below(norm, layer.input_size, level)
        if not found.proved:
            return found
        methods.append(found.method)
    return Proof(True, " and ".join(dict.fromkeys(methods)))


def _total(
    content: dict[str, Any], plan: Plan, claims: list[dict[str, Any]], steps: list[Step]
) -> tuple[float, list[str]]:
    """The constant that follows from the claims, and whether the certificate says the same."""
    uppers = {
        id(step.measurement): math.inf if claim["upper"] == UNBOUNDED else float(claim["upper"])
        for claim, step in zip(claims, steps, strict=True)
    }
    followed = Follower(plan, lambda measurement: Measured(None, uppers.get(id(measurement), 1.0), "claim")).run()
    problems = []
    for name, upper in [("upper", followed.upper), *followed.outputs.items()]:
        written = content["upper"] if name == "upper" else content["outputs"].get(name)
        if written is None or (math.inf if written == UNBOUNDED else float(written)) < upper:
            problems.append(f"{name}: the certificate says {written!r}, but {upper!r} follows from its claims")
    return followed.upper, problems


def _nothing(measurement: Measurement) -> Measured:
    raise AssertionError(measurement)
