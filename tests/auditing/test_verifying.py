"""Certificates: what holds is proved again, and what was changed is refused by its name."""

import copy
import json
import math

import pytest
import torch
from torch import nn

import gramcert
from auditing_networks import Function, residual_network
from gramcert import nn as gnn
from gramcert.auditing.certificate import seal

EPS = torch.finfo(torch.float64).eps

SHAPE = (3, 8, 8)


@pytest.fixture(scope="module")
def model():
    return residual_network()


@pytest.fixture(scope="module")
def certificate(model):
    content = json.loads(json.dumps(gramcert.audit(model, SHAPE).certificate))
    assert math.isfinite(content["upper"])
    return content


def sealed(content):
    return content | {"seal": seal(content)}


def test_a_certificate_holds_for_its_model(model, certificate):
    found = gramcert.verify(certificate, model)
    assert found.holds
    assert found.upper == certificate["upper"]
    assert len(found.checks) - 1 == len(certificate["claims"]) == 3  # the last is about all of it, by forms


def test_a_certificate_of_residual_layers_holds():
    torch.manual_seed(0)
    model = nn.Sequential(gnn.SLLConv2d(3, 6, 3), nn.Flatten(), gnn.SLLLinear(48, 16), gnn.SRLinear(48, 10)).eval()
    audit = gramcert.audit(model, (3, 4, 4))
    found = gramcert.verify(audit.certificate, model)
    assert found.holds, found.problems
    assert 0.9 < found.upper == audit.upper <= 1 + 1e-5


def test_an_unbounded_model_has_a_certificate_too():
    model = nn.Sequential(nn.Linear(3, 3), nn.Hardshrink())
    audit = gramcert.audit(model, (3,))
    found = gramcert.verify(audit.certificate, model)
    assert found.holds
    assert found.upper == math.inf


@pytest.mark.parametrize("name", ["conv1.weight", "bn2.weight", "bn1.bias", "bn2.running_var", "linear.bias"])
def test_a_changed_weight_is_refused(model, certificate, name):
    other = copy.deepcopy(model)
    with torch.no_grad():
        tensor = other.state_dict()[name].flatten()
        tensor[0] = math.nextafter(float(tensor[0]), 9.0) + 1e-6
    found = gramcert.verify(certificate, other)
    assert not found.holds
    assert any(problem.startswith(name.split(".")[0]) for problem in found.problems), found.problems


@pytest.mark.parametrize("claim", range(3))
@pytest.mark.parametrize("factor", [1 - 1e-2, 0.5])
def test_a_lowered_claim_is_refused(model, certificate, claim, factor):
    content = copy.deepcopy(certificate)
    measured = content["claims"][claim]
    # Ten tolerances below the norm no proof can succeed.
    measured["upper"] *= factor
    measured["lower"] = measured["witness"] = None
    found = gramcert.verify(sealed(content), model)
    assert not found.holds
    assert any("was not proved" in problem for problem in found.problems)
    unsealed = gramcert.verify(content, model)
    assert any(problem.startswith("seal") for problem in unsealed.problems)


def test_a_lowered_total_is_refused(model, certificate):
    for change in ({"upper": certificate["upper"] * (1 - 1e-12)}, {"outputs": {"linear": 0.5}}):
        found = gramcert.verify(sealed(certificate | change), model)
        assert not found.holds
        assert any("follows from its claims" in problem for problem in found.problems)


def test_a_missing_layer_is_refused(model, certificate):
    content = copy.deepcopy(certificate)
    del content["claims"][1]
    found = gramcert.verify(sealed(content), model)
    assert found.problems == ("conv2 + bn2: the certificate has no claim about it",)
    content = copy.deepcopy(certificate)
    del content["graph"][2]
    assert not gramcert.verify(sealed(content), model).holds


def test_an_unknown_version_is_refused(model, certificate):
    found = gramcert.verify(sealed(certificate | {"format": "another certificate"}), model)
    assert found.problems == ("format: expected 'gramcert certificate 4', got 'another certificate'",)


def test_a_certificate_of_an_older_version_is_refused_with_what_to_do(model, certificate):
    found = gramcert.verify(sealed(certificate | {"format": "gramcert certificate 2"}), model)
    assert found.problems == (
        "format: expected 'gramcert certificate 4', got 'gramcert certificate 2'; audit the model again",
    )


def test_a_lower_bound_needs_its_witness(model, certificate):
    fine = gramcert.audit(model, SHAPE, tol=1e-6)
    for number, row in ((0, fine.rows[0]), (1, fine.rows[1])):
        good = certificate["claims"][number]
        assert 0.98 * row.lower <= good["lower"] <= row.upper
        for change in (
            {"lower": good["upper"]},
            {"lower": good["lower"] * (1 + 1e-4)},
            {"witness": None},
            {"lower": None},
            {"witness": certificate["claims"][1 - number]["witness"]},
            {"witness": good["witness"] + "AAAA"},
        ):
            content = copy.deepcopy(certificate)
            content["claims"][number] |= change
            found = gramcert.verify(sealed(content), model)
            assert not found.holds, change
    less = copy.deepcopy(certificate)
    less["claims"][0] |= {"lower": None, "witness": None}
    less["claims"][1]["lower"] /= 2
    assert gramcert.verify(sealed(less), model).holds


def test_lower_bounds_in_closed_form_need_no_witness():
    weights = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 1.0]])  # rows that share no place
    model = nn.Sequential(Function(lambda x: x * 3), nn.ReLU(), Function(lambda x, w: x @ w.T, w=weights), nn.ReLU())
    model.append(Function(lambda x: x.repeat(1, 5)))
    content = json.loads(json.dumps(gramcert.audit(model, (3,)).certificate))
    for claim, norm in zip(content["claims"], (3, 5, math.sqrt(5)), strict=True):
        assert norm * (1 - 5e3 * EPS) <= claim["lower"] <= norm * (1 + 5 * EPS)
        assert claim["witness"] is None
    assert gramcert.verify(content, model).holds
    for number in range(3):
        other = copy.deepcopy(content)
        other["claims"][number]["lower"] *= 1 + 1e-9
        assert not gramcert.verify(sealed(other), model).holds


def test_everything_else_is_compared_to_the_letter(model, certificate):
    outputs, versions = certificate["outputs"], certificate["unverified"]["versions"]
    for change in (
        {"assumptions": []},
        {"assumptions": [*certificate["assumptions"], "the weights are positive"]},
        {"outputs": outputs | {"extra": 1e-9}},
        {"outputs": {name: 2 * value for name, value in outputs.items()}},
        {"upper": 2 * certificate["upper"]},
        {"upper": repr(certificate["upper"])},
        {"upper": "unbounded"},
        {"reasons": ["conv1: it jumps"]},
        {"weights": "0" * 64},
        {"extra": 1},
        {"input_shape": [3.0, 8, 8]},
        {"input_shape": [3, 8, 8, 1]},
        {"graph": [certificate["graph"][0] | {"extra": 1}, *certificate["graph"][1:]]},
        {"graph": [certificate["graph"][0] | {"shape": [True, 3, 8, 8]}, *certificate["graph"][1:]]},
        {"claims": [certificate["claims"][0] | {"method": "by hand"}, *certificate["claims"][1:]]},
        {"claims": [*certificate["claims"], certificate["claims"][0]]},
        {"unverified": certificate["unverified"] | {"extra": 1}},
        {"unverified": certificate["unverified"] | {"tol": 1}},
        {"unverified": certificate["unverified"] | {"tol": 2.0}},
        {"unverified": certificate["unverified"] | {"model": None}},
        {"unverified": certificate["unverified"] | {"versions": versions | {"python": 3}}},
        {"unverified": certificate["unverified"] | {"versions": versions | {"extra": "1"}}},
    ):
        assert not gramcert.verify(sealed(certificate | change), model).holds, change


def test_what_is_not_checked_is_in_a_section_that_says_so(model, certificate):
    said = {"model": "another", "tol": 0.5, "versions": dict.fromkeys(certificate["unverified"]["versions"], "0")}
    found = gramcert.verify(sealed(certificate | {"unverified": said}), model)
    assert found.holds
    assert found.model == "Residual"


def test_a_larger_bound_holds_with_what_follows_from_it(model, certificate):
    content = copy.deepcopy(certificate)
    content["claims"][2]["upper"] *= 2
    assert not gramcert.verify(sealed(content), model).holds
    content["product"] *= 2  # exact, as are the roundings
    found = gramcert.verify(sealed(content), model)
    assert found.holds, found.problems
    assert found.upper == certificate["upper"]  # by forms


def test_a_bounded_map_is_not_said_to_be_too_large():
    for model, shape in (
        (nn.Linear(3, 3), (3,)),
        (nn.Conv1d(2, 2, 3), (2, 5)),
        (gnn.SLLLinear(3, 3), (3,)),
        (gnn.SLLConv2d(1, 1, 3), (1, 4, 4)),
    ):
        content = copy.deepcopy(gramcert.audit(model.eval(), shape).certificate)
        reason = "its numbers are too large for float64"
        content["claims"][0] |= dict.fromkeys(("lower", "witness", "norms")) | {"upper": "unbounded"}
        content |= {"upper": "unbounded", "outputs": dict.fromkeys(content["outputs"], "unbounded")}
        found = gramcert.verify(sealed(content), model)
        assert any("its numbers are not too large" in problem for problem in found.problems)
        with torch.no_grad():
            model = copy.deepcopy(model).double()
            for parameter in model.parameters():
                parameter.fill_(1e308)
        large = gramcert.audit(model, shape)
        assert all(claim["upper"] == "unbounded" for claim in large.certificate["claims"])
        assert any(reason in one for one in large.reasons)
        found = gramcert.verify(large.certificate, model)
        assert found.holds, found.problems
        assert found.reasons == large.reasons


@pytest.mark.parametrize(
    "change",
    [
        {"claims": None},
        {"claims": [1]},
        {"claims": []},
        {"graph": {}},
        {"graph": [None]},
        {"input_shape": "abc"},
        {"input_shape": [3, -8, 8]},
        {"unverified": "x"},
        {"upper": -1},
        {"upper": "NaN"},
        {"outputs": []},
        {"weights": 3},
    ],
)
def test_nonsense_is_refused_without_a_traceback(model, certificate, change):
    found = gramcert.verify(sealed(certificate | change), model)
    assert not found.holds


@pytest.mark.parametrize("field", ["nodes", "kind", "geometry", "upper", "lower", "witness", "norms"])
@pytest.mark.parametrize("value", [0, [], {}, "x", -1, [[]], [1.0, 1.0]])
def test_nonsense_in_a_claim_is_refused(model, certificate, field, value):
    content = copy.deepcopy(certificate)
    content["claims"][0][field] = value
    found = gramcert.verify(sealed(content), model)
    assert not found.holds


@pytest.mark.parametrize("layer", [gramcert.nn.SLLLinear(6, 6), gramcert.nn.SLLConv2d(2, 3, 3)])
def test_negative_norms_in_a_claim_prove_nothing(layer):
    shape = (6,) if isinstance(layer, gramcert.nn.SLLLinear) else (2, 5, 5)
    content = copy.deepcopy(gramcert.audit(layer.eval(), shape).certificate)
    for norms in ([-1.0, 0.0], [0.5, -1e6], [0.0, 1.0], ["unbounded", 1.0], [-0.0, 0.0]):
        content["claims"][0]["norms"] = norms
        content["claims"][0]["upper"] = content["upper"] = 1e-3
        content["outputs"] = dict.fromkeys(content["outputs"], 1e-3)
        assert not gramcert.verify(content | {"seal": seal(content)}, layer).holds


def test_certificates_with_extreme_numbers_are_refused():
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2)).eval()
    good = gramcert.audit(model, (2, 6, 6)).certificate
    changes = [
        ("upper", 1e308),
        ("lower", 10**400),
        ("witness", "AAAA"),
        ("lower", 1e308),
    ]
    for field, value in changes:
        content = copy.deepcopy(good)
        content["claims"][0][field] = value
        found = gramcert.verify(content | {"seal": seal(content)}, model)
        assert not found.holds
    for shape in ([2, 2**19, 2**19], [2, 10**30, 6], "266", [2.5, 6.5, 6.5], []):
        content = copy.deepcopy(good) | {"input_shape": shape}
        assert not gramcert.verify(content | {"seal": seal(content)}, model).holds
    without = {name: value for name, value in good.items() if name != "graph"}
    assert not gramcert.verify(without | {"seal": seal(without)}, model).holds
