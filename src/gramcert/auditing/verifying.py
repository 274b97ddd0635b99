"""``verify``: a certificate checked against a model, claim by claim, by proofs that do not repeat the audit."""

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gramcert.auditing.certificate import (
    Claim,
    FormClaim,
    best,
    claimed,
    claimed_steps,
    follow,
    seal,
    step_facts,
)
from gramcert.auditing.certificate import certificate as anew
from gramcert.auditing.claims import Check, Verification, checked, graph_problems
from gramcert.auditing.fixing import Fix
from gramcert.auditing.radii import is_about_radii, verify_radii
from gramcert.auditing.reading import Source
from gramcert.auditing.strict_json import canonical, parse
from gramcert.auditing.written import BadCertificate, Written
from gramcert.operators.measurement import Measured, Measurement
from gramcert.operators.propagation import Follower, Plan, Step, known_norms
from gramcert.progress import Report, silent
from gramcert.rounding import checked_arithmetic

# A certificate longer than this is not one.
MOST_BYTES = 2**28

CHANGED = "seal: the certificate was changed after it was written"


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

    A certificate of radii of inputs has multipliers in place of searches: each radius is proved anew by one pass.

    Args:
        certificate: its JSON, or its file; that of :func:`gramcert.certify` is a file ending in ``.npz``.
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
    if not isinstance(certificate, dict) and is_about_radii(certificate):
        source = Source.of("verify", model, architecture, prefix, fix)
        source.read()
        return verify_radii(Path(certificate), source, report)
    content = certificate if isinstance(certificate, dict) else read_certificate(Path(certificate))
    try:
        content = parse(canonical(content))  # nothing but JSON from here on
        written = Written.of(content)
    except (ValueError, TypeError, RecursionError) as error:
        return _refused(str(error), (), start)
    source = Source.of("verify", model, architecture, prefix, fix)
    source.read()
    try:
        graph = written.asked.of_graph("verify", source.graph("verify", written.input_shape)).needed()
    except ValueError as error:  # it takes inputs of another shape, or several
        return _refused(f"model: {error}", written.input_shape, start)
    plan = Plan.of(graph)
    plan.is_measured = not (plan.is_unbounded and not written.claims)
    steps = claimed_steps(plan)
    labels = [Follower(plan, _nothing).label(step.nodes) for step in steps]
    problems = graph_problems(content["graph"], graph) or _claim_problems(content["claims"], steps, labels)
    checks: list[Check] = []
    upper, reasons = math.inf, tuple[str, ...]()
    if not problems:
        for number, (claim, step, label) in enumerate(zip(written.claims, steps, labels, strict=True)):
            report(label, number, len(steps))
            checks.append(checked(claim, step.measurement, label))
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
