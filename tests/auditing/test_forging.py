"""Forged certificates: whatever a forger changes, with a new seal, is refused unless it is still proved to be true."""

import copy
import json
import math
import random

import pytest
import torch
from torch import nn

import gramcert
from auditing_networks import Function, residual_network
from gramcert import nn as gnn
from gramcert.auditing.certificate import certificate, seal
from gramcert.auditing.reading import Source
from gramcert.auditing.strict_json import canonical
from gramcert.auditing.written import Written
from gramcert.nn.baking import plain_copy
from gramcert.operators.propagation import Plan

NAMES = ("dense", "convolutions", "theorem", "outputs", "unbounded", "overflow", "too large")

# Of a claim, numbers that may be changed as long as they are proved.
PROVED = ("upper", "lower", "witness", "norms")

ODD = [None, True, False, 0, 1, -1, 2**70, 0.0, -0.0, 1.0, 1e-9, 0.5, 1e308, "", "x", "1.5", "unbounded", [], {}, [0]]


def two_outputs(x, w):
    return torch.tanh(x @ w), 3 * torch.nn.functional.softplus(x), x.repeat(1, 2)


def models():
    """Each with the shape of its input."""
    torch.manual_seed(0)
    return {
        "dense": (nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 2)), (3,)),
        "convolutions": (residual_network(), (3, 8, 8)),
        "theorem": (nn.Sequential(gnn.SLLConv2d(2, 3, 3), nn.Flatten(), gnn.SLLLinear(18, 4)), (2, 3, 3)),
        "outputs": (Function(two_outputs, w=torch.randn(3, 3)), (3,)),
        "unbounded": (nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.Hardshrink()), (2, 5)),
        "overflow": (Function(lambda x, w: torch.relu(x @ w) * 1e308 * 10.0, w=torch.randn(2, 2).double()), (2,)),
        "too large": (
            Function(lambda x, w: torch.relu(x @ w) * 2.0, w=torch.full((2, 2), 1.7e308, dtype=torch.float64)),
            (2,),
        ),
    }


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    """A program that is read quickly, its certificate, the plan of its claims, and nearly the truth about them."""
    model, shape = models()[request.param]
    dtype = next((value.dtype for value in model.state_dict().values()), torch.float32)
    program = torch.export.export(plain_copy("test", model.eval()), (torch.zeros(1, *shape, dtype=dtype),))
    good = json.loads(json.dumps(gramcert.audit(program, shape, measure=True).certificate))
    fine = gramcert.audit(program, shape, tol=1e-8, measure=True).certificate
    assert gramcert.verify(good, program).holds
    assert good["claims"]
    plan = Plan.of(Source.of("test", program).graph("test", shape).needed())
    return program, good, plan, [claim["upper"] for claim in fine["claims"]]


def paths(value, path=()):
    """Of everything in a certificate."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from paths(item, (*path, name))


def at(content, path):
    for name in path:
        content = content[name]
    return content


def changed(value, rng, everything):
    """Something else in its place."""
    choices = [lambda: rng.choice(ODD), lambda: copy.deepcopy(at(everything, rng.choice(list(paths(everything)))))]
    if isinstance(value, bool) or value is None:
        pass
    elif isinstance(value, float):
        factor = rng.choice([0.5, 1 - 1e-3, 1 - 1e-7, 1 - 1e-12, 1 + 1e-12, 1 + 1e-7, 1 + 1e-3, 2.0])
        choices += 3 * [
            lambda: min(value * factor, 1.7e308),
            lambda: math.nextafter(value, rng.choice([0.0, math.inf])),
        ]
        choices += [lambda: -value, lambda: repr(value), lambda: int(value), lambda: [value]]
    elif isinstance(value, int):
        choices += [lambda: value + 1, lambda: -value, lambda: float(value), lambda: str(value)]
    elif isinstance(value, str):
        cut = rng.randrange(len(value) + 1)
        choices += 2 * [lambda: value + " ", lambda: value[:cut] + rng.choice("A0é\x00") + value[cut + 1 :]]
        choices += [lambda: value.upper(), lambda: value[:cut], lambda: [value]]
    elif isinstance(value, list):
        cut = rng.randrange(len(value) + 1)
        choices += 2 * [lambda: value[:cut] + value[cut + 1 :], lambda: value[:cut] + value[cut - 1 :]]
        choices += [
            lambda: value[::-1],
            lambda: [*value, rng.choice(ODD)],
            lambda: {str(number): item for number, item in enumerate(value)},
        ]
    else:
        kept = rng.choice([*value, ""])
        less = {name: item for name, item in value.items() if name != kept}
        choices += 2 * [lambda: less, lambda: value | {rng.choice(["extra", "", "Upper"]): rng.choice([1e-9, *ODD])}]
        choices += [lambda: less | {kept + " ": value.get(kept)}, lambda: list(value)]
    return rng.choice(choices)()


def forged(good, plan, rng):
    """One or two changes, what follows from the claims made to fit them or not, and a new seal."""
    content = copy.deepcopy(good)
    everywhere = [path for path in paths(good) if path and path[0] not in ("graph", "seal")]
    in_claims = [path for path in everywhere if path[0] == "claims" and path[-1] in (*PROVED, 0, 1)]
    touched = []
    for _ in range(rng.choice([1, 1, 2])):
        place = rng.choice(rng.choice([everywhere, everywhere, in_claims, list(paths(good))[1:]]) or everywhere)
        try:
            parent = at(content, place[:-1])
            parent[place[-1]] = changed(parent[place[-1]], rng, good)
        except (KeyError, IndexError, TypeError):  # the first change has removed it
            continue
        touched.append(place)
    if rng.random() < 0.5:
        try:
            parts = Written.of(content)
            content |= certificate(parts.input_shape, parts.asked, plan, parts.claims, parts.forms, parts.unverified)
        except (ValueError, TypeError):  # not one that could be made to fit
            pass
    return touched, content | {"seal": seal(content)}


def is_true(content, good, truth):
    """Whether a changed certificate says no more than what is known by other means, within its own tolerance."""
    claims = content["claims"]
    if not claims and good["upper"] == "unbounded":  # which is known without a measurement
        claims = good["claims"]
    for claim, before, norm in zip(claims, good["claims"], truth, strict=True):
        assert {name: claim[name] for name in claim if name not in PROVED} == {
            name: before[name] for name in before if name not in PROVED
        }
        if norm == "unbounded":
            assert claim == before
            continue
        assert type(claim["upper"]) is float
        assert claim["upper"] >= norm * (1 - 1e-7)
        assert claim["lower"] is None or (type(claim["lower"]) is float and claim["lower"] <= norm)
        assert (claim["norms"] is None) == (before["norms"] is None)
    assert content["input_shape"] in (good["input_shape"], [1, *good["input_shape"]])  # the program has a batch of 1
    assert (
        content["upper"] == good["upper"] or content["upper"] >= good["product"] * (1 - 1e-6) or _larger(content, good)
    )
    same = ("format", "weights", "graph", "assumptions")
    assert canonical([content[name] for name in same]) == canonical([good[name] for name in same])
    assert content["outputs"].keys() == good["outputs"].keys()
    return True


def _larger(content, good):
    """Other multipliers may prove something too, but hardly less than those that were searched for."""
    return type(content["upper"]) is float and content["upper"] >= 0.99 * good["upper"]


def attack(case, count, seed):
    program, good, plan, truth = case
    rng, held = random.Random(seed), 0
    for number in range(count):
        touched, content = forged(good, plan, rng)
        if canonical(content) == canonical(good):
            continue
        found = gramcert.verify(content, program)
        if found.holds:
            held += 1
            assert is_true(content, good, truth), (number, touched)
            assert (content["upper"] if found.upper < math.inf else math.inf) == found.upper
            if canonical(content["claims"]) == canonical(good["claims"]):
                # Only what is not checked was changed.
                free = ("unverified", "seal", "input_shape", "forms", "outputs", "upper")
                rest = content | {name: good[name] for name in free}
                assert canonical(rest) == canonical(good), (number, touched)
    return held


def test_forged_certificates_are_refused_unless_they_are_true(case):
    attack(case, 60, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_forged_certificates_are_refused_unless_they_are_true(case, seed):
    assert attack(case, 1500, seed) > 0
