"""Certificates of radii: inputs, up to which distance each keeps its class, and multipliers that prove it in one pass.

The file is an archive of arrays, ``.npz``, in which nothing is executed. Its text says what the model is and which
norms the proofs rest on. For each input there are the multipliers of its class against every other one, in their order.
"""

import hashlib
import io
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramcert.auditing.certificate import Claim, claimed, claimed_steps, node_facts, step_facts, versions
from gramcert.auditing.claims import Check, Verification, checked, graph_problems
from gramcert.auditing.reading import Source
from gramcert.auditing.strict_json import canonical, parse
from gramcert.auditing.written import BadCertificate
from gramcert.files import BadFile, read_npz, write_atomically
from gramcert.minorants.backward import Multipliers, Pairs
from gramcert.minorants.layout import Layout, widened
from gramcert.minorants.proof import prove
from gramcert.operators.network import Network
from gramcert.operators.outputs import logits_of
from gramcert.operators.propagation import Follower, Measure, Plan
from gramcert.progress import Report, silent
from gramcert.rounding import checked_arithmetic

FORMAT = "gramcert radii 1"
ENDING = ".npz"

# Of what was proved, this part is not claimed: another machine rounds otherwise and proves less.
MARGIN = 1e-9

# Arrays beside those of multipliers, whose names begin with ``proof/``.
_TEXT, _INPUTS, _CLASSES, _RADII, _PROOF = "text", "inputs", "classes", "radii", "proof/"
_TEXT_FIELDS = ("format", "input_shape", "graph", "claims", "unverified", "seal")

# Entries of all values of a network, times pairs, that are proved at once.
_PORTION = 2**22


@dataclass(frozen=True)
class CertifiedInputs:
    """Some inputs that keep their class, and the multipliers of all pairs of them and other classes."""

    inputs: Tensor
    classes: Tensor
    radii: Tensor
    multipliers: dict[str, Tensor]

    @classmethod
    def of(cls, x: Tensor, winners: Tensor, pairs: Pairs, radii: Tensor, multipliers: Multipliers) -> "CertifiedInputs":
        """Those inputs of a batch for which something was proved, from all their pairs in a row."""
        samples = pairs.samples.unique_consecutive()
        count = len(pairs) // max(1, len(samples))
        least = radii.reshape(-1, count).amin(1)
        kept = least > 0
        tensors = {
            name: value.reshape(-1, count, *value.shape[1:])[kept] for name, value in multipliers.tensors().items()
        }
        claimed_radii = (least[kept] * (1 - MARGIN)).clamp_max(torch.finfo(torch.float64).max)
        return cls(x[samples[kept]], winners[samples[kept]], claimed_radii, tensors)

    def arrays(self) -> dict[str, Tensor]:
        """By the names that they have in a file; inputs in the narrowest type that holds them."""
        narrow = self.inputs.float()
        inputs = narrow if torch.equal(narrow.double(), self.inputs) else self.inputs
        named = {_INPUTS: inputs, _CLASSES: self.classes, _RADII: self.radii}
        return named | {f"{_PROOF}{name}": value for name, value in self.multipliers.items()}


def write_radii(path: Path, network: Network, model: str, shape: tuple[int, ...], parts: list[CertifiedInputs]) -> None:
    """A certificate of all inputs together; ``network`` has the norms of its widened graph."""
    plan = network.plan
    steps = claimed_steps(plan)
    claims = [Claim(found.upper, norms=found.norms) for step in steps if (found := network.measure(step.measurement))]
    arrays = [part.arrays() for part in parts]
    together = {name: torch.cat([part[name] for part in arrays]) for name in arrays[0]}
    text = {
        "format": FORMAT,
        "input_shape": list(shape),
        "graph": [node_facts(node) for node in plan.graph.nodes.values()],
        "claims": [
            step_facts(step) | {"upper": claim.upper, "norms": None if claim.norms is None else list(claim.norms)}
            for step, claim in zip(steps, claims, strict=True)
        ],
        "unverified": {"model": model, "versions": versions()},
    }
    text["seal"] = _seal(text, together)
    written = np.frombuffer(canonical(text).encode(), dtype=np.uint8)
    content = io.BytesIO()
    np.savez(content, **{_TEXT: written, **{name: value.numpy() for name, value in together.items()}})  # type: ignore[arg-type]
    write_atomically(path, content.getvalue())


def is_about_radii(certificate: str | Path) -> bool:
    """Whether a file is such a certificate, by its name."""
    return Path(certificate).suffix.lower() == ENDING


class _WrongError(ValueError):
    """A certificate that does not hold, for the reason in the message."""


def verify_radii(path: Path, source: Source, report: Report = silent) -> Verification:
    """Check all norms by other proofs than those that found them, and each radius by one pass with its multipliers."""
    start = time.perf_counter()
    shape: tuple[int, ...] = ()
    checks: list[Check] = []
    problems: list[str] = []
    count = 0
    try:
        text, arrays = _read(path)
        shape = tuple(text["input_shape"])
        try:
            graph = widened(logits_of("verify", source.graph("verify", shape)))
        except (ValueError, TypeError) as error:
            raise _WrongError(f"model: {error}") from None
        plan = Plan.of(graph)
        if plan.is_unbounded:
            raise _WrongError("model: it has no constant")
        problems = graph_problems(text["graph"], plan.graph)
        if not problems:
            claims = _claims(text["claims"], plan)
            labels = [Follower(plan, _unmeasured).label(step.nodes) for step in claimed_steps(plan)]
            for number, (step, claim) in enumerate(zip(claimed_steps(plan), claims, strict=True)):
                report(labels[number], number, len(claims))
                checks.append(checked(claim, step.measurement, labels[number]))
            problems = [f"{check.name}: {check.problem}" for check in checks if check.problem]
            if text["seal"] != _seal({name: value for name, value in text.items() if name != "seal"}, arrays):
                problems.append("seal: the certificate was changed after it was written")
            if not problems:
                with checked_arithmetic("verify"):
                    problems = _radius_problems(plan, claimed(plan, claims), arrays, report)
                count = len(arrays[_RADII])
    except _WrongError as error:
        problems = [str(error)[:300]]
    seconds = time.perf_counter() - start
    inputs = 0 if problems else count
    return Verification(math.inf, shape, source.name, (), tuple(problems), tuple(checks), seconds, inputs)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The text and the arrays, of the right names and shapes; what they say is not checked."""
    if not path.is_file():
        raise BadCertificate(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
    try:
        arrays = read_npz(path)
        text = parse(bytes(arrays.pop(_TEXT).numpy().tobytes()).decode())
    except KeyError:
        raise _WrongError(f"{path}: expected a certificate of radii, got other arrays") from None
    except (BadFile, OSError, ValueError, RecursionError) as error:
        raise _WrongError(f"{path}: expected a certificate of radii ({str(error)[:120]})") from None
    if not isinstance(text, dict) or text.get("format") != FORMAT:
        raise _WrongError(f"{path}: expected the format {FORMAT!r}")
    sizes = text.get("input_shape")
    if set(text) != set(_TEXT_FIELDS) or not isinstance(sizes, list) or not isinstance(text["graph"], list):
        raise _WrongError(f"{path}: expected the fields {', '.join(_TEXT_FIELDS)}")
    if any(type(size) is not int or size < 1 for size in sizes):
        raise _WrongError("input_shape: expected positive integers")
    for name in (_INPUTS, _CLASSES, _RADII):
        if name not in arrays:
            raise _WrongError(f"{name}: missing")
    count = len(arrays[_RADII]) if arrays[_RADII].dim() == 1 else -1
    if arrays[_INPUTS].shape != (count, *sizes) or arrays[_CLASSES].shape != (count,) or count < 1:
        raise _WrongError("inputs: expected as many as there are classes and radii, each of the input shape")
    for name, dtype in ((_INPUTS, None), (_CLASSES, torch.int64), (_RADII, torch.float64)):
        if arrays[name].dtype != dtype if dtype else not arrays[name].is_floating_point():
            raise _WrongError(f"{name}: expected numbers of another type than {arrays[name].dtype}")
    if not bool(torch.isfinite(arrays[_INPUTS]).all()) or not bool((arrays[_RADII] >= 0).all()):
        raise _WrongError("inputs, radii: expected finite numbers, and radii that are not negative")
    return text, arrays


def _claims(written: Any, plan: Plan) -> list[Claim]:
    """One for each step, in their order."""
    steps = claimed_steps(plan)
    if not isinstance(written, list) or len(written) != len(steps):
        raise _WrongError("claims: expected one for each step of the model")
    found = []
    for claim, step in zip(written, steps, strict=True):
        facts = step_facts(step)
        is_about_it = isinstance(claim, dict) and set(claim) == {*facts, "upper", "norms"}
        if not is_about_it or canonical({name: claim[name] for name in facts}) != canonical(facts):
            raise _WrongError("claims: one is about another map")
        norms = [] if claim["norms"] is None else claim["norms"]
        is_known = isinstance(norms, list) and len(norms) in (0, 2)
        numbers = [claim["upper"], *norms] if is_known else [None]
        if any(type(number) is not float or not 0 <= number < math.inf for number in numbers):
            raise _WrongError("claims: expected numbers that are not negative")
        found.append(Claim(claim["upper"], norms=None if claim["norms"] is None else (norms[0], norms[1])))
    return found


def _radius_problems(plan: Plan, measure: Measure, arrays: dict[str, Tensor], report: Report) -> list[str]:
    """Inputs whose radius does not follow from their multipliers."""
    output, *_ = plan.graph.outputs.values()
    layout = Layout.of(plan, measure, output)
    (classes,) = plan.graph.nodes[output].shape[1:]
    inputs, winners, radii = arrays[_INPUTS].double(), arrays[_CLASSES], arrays[_RADII]
    if not bool(((winners >= 0) & (winners < classes)).all()):
        return [f"classes: expected numbers from 0 to {classes - 1}"]
    named = {name.removeprefix(_PROOF): value for name, value in arrays.items() if name.startswith(_PROOF)}
    if any(value.shape[:2] != (len(radii), classes - 1) for value in named.values()):
        return [f"proof: expected multipliers of each input and its {classes - 1} other classes"]
    try:
        multipliers = Multipliers.of_tensors({name: value.flatten(0, 1) for name, value in named.items()})
    except KeyError as error:
        return [f"proof: multipliers {error} are missing or unknown"]
    if not multipliers.fits(layout, len(radii) * (classes - 1)):
        return ["proof: the multipliers are not those of this model"]
    others = torch.arange(classes).expand(len(radii), -1)
    others = others[others != winners[:, None]].reshape(len(radii), -1)
    size = max(1, _PORTION // (layout.entries * (classes - 1)))
    problems = []
    for part in torch.arange(len(radii)).split(size):
        report("inputs", int(part[0]), len(radii))
        places = (part[:, None] * (classes - 1) + torch.arange(classes - 1)).flatten()
        samples = torch.arange(len(part)).repeat_interleave(classes - 1)
        pairs = Pairs(samples, winners[part][samples], others[part].flatten())
        proved = prove(layout, layout.centre(inputs[part][:, None]), pairs, multipliers[places])
        is_proved = proved.reshape(len(part), -1).amin(1) >= radii[part]
        problems += [f"input {number}: its radius was not proved" for number in part[~is_proved].tolist()]
    report("inputs", len(radii), len(radii))
    return problems[:3] + ([f"and {len(problems) - 3} more"] if len(problems) > 3 else [])


def _unmeasured(measurement: object) -> Any:
    raise AssertionError(measurement)


def _seal(text: dict[str, Any], arrays: dict[str, Tensor]) -> str:
    """A digest of everything: it shows damage, and is no signature."""
    sha = hashlib.sha256(canonical(text).encode())
    for name in sorted(arrays):
        value = arrays[name].contiguous()
        sha.update(repr((name, str(value.dtype), tuple(value.shape))).encode())
        sha.update(value.numpy().tobytes())
    return sha.hexdigest()
