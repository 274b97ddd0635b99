"""``audit``: from a model to its certified constant."""

import hashlib
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from gramcert.auditing.asked import Asked, Functional
from gramcert.auditing.assumptions import assumptions
from gramcert.auditing.cache import Cache
from gramcert.auditing.certificate import (
    FORMAT,
    Claim,
    FormClaim,
    best,
    certificate,
    claimed_steps,
    node_facts,
    unverified,
    versions,
)
from gramcert.auditing.findings import FormBlock, Profile
from gramcert.auditing.fixing import Fix
from gramcert.auditing.reading import Source, shape_of_example
from gramcert.auditing.result import Audit, now
from gramcert.auditing.strict_json import canonical
from gramcert.auditing.workers import measure_all
from gramcert.networks.bound import Forms, bound_by_forms
from gramcert.networks.search import LAST_SHARPNESS, Budget, Proposal
from gramcert.operators.evaluation import NotEvaluatedError
from gramcert.operators.linear import Move
from gramcert.operators.measurement import Measured, Measurement
from gramcert.operators.pairs import lower_by_pairs
from gramcert.operators.propagation import Followed, Follower, Measure, Plan, known_norms
from gramcert.progress import Report, silent
from gramcert.rounding import checked_arithmetic

# Changes whenever a search could not go on from what an earlier version left in a cache.
SEARCH_FORMAT = "forms 2"

# What is said where the clock ended a search.
CUT = "the search for multipliers was cut off by search_seconds={:g}: a longer one may prove a smaller constant"

# Changes whenever the search for two inputs does.
PAIRS_FORMAT = "pairs 1"

# Seconds between two states of a search that are kept.
KEPT_EVERY = 2.0


@torch.inference_mode(mode=False)  # the search for two inputs follows gradients
def audit(
    model: nn.Module | torch.export.ExportedProgram | str | Path,
    input_shape: Sequence[int] | Tensor | None = None,
    *,
    tol: float = 1e-3,
    architecture: str | None = None,
    prefix: str | None = None,
    fix: Fix | None = None,
    output: str | None = None,
    functional: Functional | None = None,
    search_seconds: float = 60.0,
    lower_steps: int = 100,
    jobs: int = 1,
    cache: str | Path | None = None,
    max_seconds: float | None = None,
    measure: bool = False,
    report: Report = silent,
) -> Audit:
    """Certified l2 Lipschitz constant of a whole model, and where it comes from.

    Linear maps are measured by :func:`gramcert.spectral_norm` at their actual sizes, batch normalisation and other
    linear neighbours folded into them; everything else has a rule with its exact constant. A node without a rule makes
    the constant infinite and is named in ``reasons``: it never counts as 1. ``product`` is what these constants
    multiply to. Quadratic forms of the whole network (``docs/networks.md``) give ``upper``, where they prove less.

    Args:
        model: a module, a program of torch.export, or a file: ``.pt2``, ONNX, or weights of a named architecture.
            Nothing in a file is executed.
        input_shape: of one example without the batch, or an example with it; ``None`` where the model fixes it.
        tol: relative width to reach for each measured norm.
        architecture: of a file that holds weights alone; see :mod:`gramcert.auditing.architectures`.
        prefix: of the names of the weights to be used, where a file holds several networks.
        fix: a number or a tensor for each input but one, by their names; a module's are those of its ``forward``. The
            constant then holds for these values, as ``assumptions`` says. A number fills the shape that a file
            declares, and is passed to a module as it is.
        output: name of the output that the constant is about, for a model with several; ``None`` for all together.
        functional: weights of the entries of this output, or a dict from places to weights: ``{3: 1, 5: -1}`` is the
            difference of two logits. The constant is then that of this number.
        search_seconds: for the search of multipliers of the forms, which ends by itself if nothing is left to gain; 0
            takes those in closed form. Whatever it finds is proved; ``notes`` says if it was cut off, and then the
            result is not kept in a cache.
        lower_steps: of the search for two inputs whose outputs are far apart, which gives ``lower``: at most so many,
            fewer for large models, a few seconds in all; 0 leaves it out.
        jobs: processes to measure in; a script that asks for several needs ``if __name__ == "__main__":``, as always.
        cache: folder of measurements, which makes the next audit of the same weights instant, and in which an
            interrupted search goes on; ``None`` keeps nothing.
        max_seconds: per measurement; what was proved until then holds.
        measure: also where the constant is known to be unbounded, which is said at once otherwise.
        report: told what is measured now, how many measurements are made, and of how many.

    Example:
        >>> import torch, gramcert
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> result = gramcert.audit(model, (4,))
        >>> one, two = (torch.linalg.matrix_norm(model[i].weight.double(), 2) for i in (0, 2))
        >>> bool(one * two <= result.product <= 1.003 * one * two), result.upper < result.product
        (True, True)
        >>> gramcert.audit(torch.nn.Sequential(torch.nn.Hardshrink()), (4,)).reasons
        ('0: hardshrink: it jumps',)
    """
    start = time.perf_counter()
    call = "audit"
    if cache is not None and not isinstance(cache, (str, Path)):
        raise TypeError(f"{call}(cache): expected a folder or None, got {cache!r}")
    if isinstance(tol, bool) or not isinstance(tol, (int, float)) or not 0 < tol < 1:
        raise ValueError(f"{call}(tol={tol!r}): expected 0 < tol < 1")
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1:
        raise ValueError(f"{call}(jobs={jobs!r}): expected a positive int")
    if max_seconds is not None and not (type(max_seconds) in (int, float) and max_seconds >= 0):
        raise ValueError(f"{call}(max_seconds={max_seconds!r}): expected None or a number that is not negative")
    if isinstance(search_seconds, bool) or not isinstance(search_seconds, (int, float)) or not search_seconds >= 0:
        raise ValueError(f"{call}(search_seconds={search_seconds!r}): expected a number that is not negative")
    if isinstance(lower_steps, bool) or not isinstance(lower_steps, int) or lower_steps < 0:
        raise ValueError(f"{call}(lower_steps={lower_steps!r}): expected an int that is not negative")
    asked = Asked.of(call, output, functional)
    if not isinstance(measure, bool):
        raise TypeError(f"{call}(measure={measure!r}): expected True or False")
    source = Source.of(call, model, architecture, prefix, fix)
    shape = _shape(call, input_shape, source)
    kept = Cache(None if cache is None else Path(cache))
    # A file of weights is traced, which takes longer than all the rest of a second audit.
    key = (
        None
        if source.weights is None or source.fix
        else hashlib.sha256(
            repr((FORMAT, versions(), source.weights, shape, tol, measure, asked, search_seconds, lower_steps)).encode()
        )
    )
    if key is not None and max_seconds is None:
        known = _kept(kept, key.hexdigest(), start)
        if known is not None:
            return known
    plan = Plan.of(asked.of_graph(call, source.graph(call, shape)).needed())
    plan.is_measured = measure or not plan.is_unbounded
    measurements = [step.measurement for step in plan.steps]
    measured = measure_all(measurements, tol, kept, jobs=jobs, max_seconds=max_seconds, report=report)

    def look_up(measurement: Measurement) -> Measured:
        return measured[measurement.key(tol)]

    follower = Follower(plan, look_up)
    followed = follower.run()
    claims = [Claim.of(step.measurement, look_up(step.measurement)) for step in claimed_steps(plan)]
    profiles = tuple(
        Profile(follower.label(step.nodes), found.profile)
        for step in plan.steps
        if (found := look_up(step.measurement)).profile
    )
    forms = _forms(plan, followed, known_norms(plan, look_up), search_seconds, kept, report)
    is_cut = forms.is_cut and search_seconds > 0  # without a search nothing is cut off
    claim = FormClaim.of(forms)
    upper, outputs = best(followed, claim)
    lower = _lower(plan, look_up, lower_steps, kept, report) if upper < math.inf else None
    if lower is not None and lower > upper:
        raise RuntimeError(
            f"{call}: two inputs have outputs {lower!r} times as far apart, so that the constant {upper!r} is refuted; "
            f"this is a bug in gramcert, please report it with the model"
        )
    result = Audit(
        upper=upper,
        lower=lower,
        product=followed.upper,
        reasons=tuple(dict.fromkeys(followed.reasons)),
        rows=tuple(followed.rows),
        trivial=followed.trivial,
        outputs=outputs,
        model=source.name,
        input_shape=shape,
        tol=tol,
        assumptions=assumptions(plan.graph, shape),
        seconds=time.perf_counter() - start,
        blocks=_blocks(plan, followed, forms),
        forms=forms.reason,
        date=now(),
        version=versions()["gramcert"],
        sha256=source.sha256,
        profiles=profiles,
        certificate=certificate(shape, asked, plan, claims, claim, unverified(source.name, tol)),
        notes=(CUT.format(search_seconds),) if is_cut else (),
    )
    if key is not None and max_seconds is None and not is_cut:
        kept.write(key.hexdigest(), result.for_cache())
    return result


def _forms(
    plan: Plan, followed: Followed, norms: dict[str, float], seconds: float, cache: Cache, report: Report
) -> Forms:
    """The constant by forms, where it is below the product; the search goes on from what the cache has."""
    if not 0 < followed.upper < math.inf:
        return Forms(reason="unbounded" if followed.upper else "it does not depend on its input")
    facts = canonical([node_facts(node) for node in plan.graph.nodes.values()])
    key = hashlib.sha256(f"{SEARCH_FORMAT} {facts} {list(plan.graph.outputs.values())}".encode()).hexdigest()
    last = time.monotonic()

    def start() -> Proposal | None:
        content = cache.read(key)
        try:
            parts = [torch.tensor(part, dtype=torch.float64).flatten() for part in content["parameters"]]
            shifts = tuple(map(bool, content["shifts"]))
            return Proposal(parts, math.inf, float(content["sharpness"]), None, shifts)
        except (TypeError, KeyError, ValueError, OverflowError):
            return None

    def keep(proposal: Proposal) -> None:
        nonlocal last
        if time.monotonic() - last < KEPT_EVERY and proposal.sharpness <= LAST_SHARPNESS:
            return
        last = time.monotonic()
        parameters = [part.tolist() for part in proposal.parameters]
        cache.write(key, {"parameters": parameters, "sharpness": proposal.sharpness, "shifts": list(proposal.shifts)})

    budget = Budget(seconds, report=report)
    with checked_arithmetic("audit"):
        return bound_by_forms(plan.graph, budget, below=followed.upper, norms=norms, start=start, keep=keep)


def _lower(plan: Plan, measure: Measure, steps: int, cache: Cache, report: Report) -> float | None:
    """By two inputs, kept like a measurement; nothing where the graph cannot be evaluated."""
    if not steps:
        return None
    facts = canonical([node_facts(node) for node in plan.graph.nodes.values()])
    about = f"{PAIRS_FORMAT} {steps} {facts} {list(plan.graph.outputs.values())}"
    key = hashlib.sha256(about.encode()).hexdigest()
    content = cache.read(key)
    if isinstance(content, dict) and isinstance(content.get("lower"), float):
        return float(content["lower"])
    report("two inputs", 0, None)
    try:
        lower = lower_by_pairs(plan, measure, steps)
    except NotEvaluatedError:
        return None
    cache.write(key, {"lower": lower})
    return lower


def _blocks(plan: Plan, followed: Followed, forms: Forms) -> tuple[FormBlock, ...]:
    """With what norms say of each, from one beginning to the next."""
    constants = [_constant(plan, followed, block.node) for block in forms.blocks]
    found = []
    for block, before, after in zip(forms.blocks, constants, [*constants, followed.upper][1:], strict=True):
        product = after / before if before and after is not None else None
        node = plan.graph.nodes[block.node]
        found.append(FormBlock(node.label or node.name, product, block.factor, block.lattice))
    return tuple(found)


def _constant(plan: Plan, followed: Followed, name: str) -> float | None:
    """From the input to a value, by norms; looked for before moves, which change nothing."""
    while name not in followed.constants and isinstance(plan.graph.nodes[name].operation, Move):
        name = plan.graph.nodes[name].inputs[0]
    return followed.constants.get(name)


def _shape(call: str, given: Sequence[int] | Tensor | None, source: Source) -> tuple[int, ...]:
    """Of one example, without the batch."""
    if given is None:
        declared = source.declared_shape()
        if declared is None:
            expected = "expected the shape of one example without the batch: (3, 32, 32), or --input-shape 3,32,32"
            raise ValueError(f"{call}(input_shape): {source.name} does not say it; {expected}")
        return declared
    return shape_of_example(call, given)


def _kept(cache: Cache, key: str, start: float) -> Audit | None:
    content = cache.read(key)
    try:
        return None if content is None else Audit.from_cache(content, time.perf_counter() - start)
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
