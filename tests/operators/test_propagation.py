"""Constants along a graph, and what is said where there is none."""

import json
import math

import pytest
import torch
from torch import nn

import gramcert
from auditing_networks import Function


def attention(x):
    return torch.softmax(x @ x.mT, -1) @ x


def with_two_reasons():
    """Layers before, between and after two functions without a constant."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), Function(attention), nn.Linear(4, 4), Function(lambda x: x**3), nn.Linear(4, 2)
    ).eval()


@pytest.fixture(params=["module", "pt2"])
def model(request, tmp_path):
    found = with_two_reasons()
    if request.param == "module":
        return found
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(found, (torch.randn(1, 3, 4),)), path)
    return path


def test_an_unbounded_model_says_every_reason_and_measures_nothing(model):
    told = []
    found = gramcert.audit(model, (3, 4), report=lambda *facts: told.append(facts))
    assert found.upper == math.inf
    assert [reason.partition(":")[0] for reason in found.reasons] == ["1", "3"]
    assert "a product of two values" in found.reasons[0]
    assert "powers have unbounded slopes" in found.reasons[1]
    assert {row.kind for row in found.rows} == {"unbounded"}
    assert not [facts for facts in told if facts[2]]
    assert set(found.outputs.values()) == {math.inf}


def test_measuring_an_unbounded_model_is_an_option(model):
    said, measured = gramcert.audit(model, (3, 4)), gramcert.audit(model, (3, 4), measure=True)
    assert measured.reasons == said.reasons
    assert {row.name for row in measured.rows if row.kind == "matrix"} == {"0", "2", "4"}


@pytest.mark.parametrize("measure", [False, True])
def test_certificates_of_unbounded_models_are_verified(model, measure):
    found = gramcert.audit(model, (3, 4), measure=measure)
    checked = gramcert.verify(json.loads(json.dumps(found.certificate)), model)
    assert checked.problems == ()
    assert checked.reasons == found.reasons
    assert len(checked.checks) == 3 * measure


def test_a_value_that_others_come_by_is_measured_and_claimed_once():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x)
            return torch.relu(y) + y.flip(1)

    model = Both().eval()
    found = gramcert.audit(model, (4,))
    norm = float(torch.linalg.matrix_norm(model.linear.weight.detach().double(), 2))
    assert 2 * norm <= found.product <= 2.003 * norm
    assert len(found.certificate["claims"]) == 1
    assert gramcert.verify(json.loads(json.dumps(found.certificate)), model).upper == found.upper


def test_a_bounded_model_cannot_leave_out_its_claims():
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    forged = dict(gramcert.audit(model, (4,)).certificate, claims=[])
    assert gramcert.verify(forged, model).problems


def test_outputs_that_are_bounded_are_not_called_unbounded():
    model = Function(lambda x: (2 * x, x**3)).eval()
    assert gramcert.audit(model, (4,)).outputs == {"1": math.inf}
    assert gramcert.audit(model, (4,), measure=True).outputs == {"0": 2.0, "1": math.inf}


def test_what_is_multiplied_by_zero_does_not_count():
    """As branches that begin at 0 do."""
    branch = nn.Linear(4, 4)
    nn.init.zeros_(branch.weight)
    model = nn.Sequential(nn.Hardshrink(), branch).eval()
    found = gramcert.audit(model, (4,))
    assert (found.upper, found.reasons) == (0.0, ())
    assert gramcert.verify(json.loads(json.dumps(found.certificate)), model).upper == 0


def test_shares_add_up_and_rows_multiply():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 3)).eval()
    found = gramcert.audit(model, (8,))
    assert sum(abs(row.share) for row in found.rows) == pytest.approx(1)
    assert math.prod(row.upper for row in found.rows) == pytest.approx(found.product)
    assert found.rows[-1].constant == found.product


def test_shares_have_the_sign_of_what_they_do():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.copy_(2 * torch.eye(4))
        model[2].weight.copy_(0.1 * torch.eye(4))
    grows, shrinks = (row.share for row in gramcert.audit(model, (4,)).rows)
    assert grows > 0 > shrinks
    assert (grows, shrinks) == pytest.approx((math.log(2) / math.log(20), -math.log(10) / math.log(20)))


@pytest.mark.parametrize("product", [1.0, 1 + 1e-9, 0.999])
def test_shares_are_readable_where_the_constant_is_near_1(product):
    """Parts of log L would be infinite, or thousands of per cent."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).double()
    with torch.no_grad():
        model[0].weight.copy_(8 * torch.eye(4))
        model[2].weight.copy_(product / 8 * torch.eye(4))
    shares = [row.share for row in gramcert.audit(model, torch.zeros(1, 4, dtype=torch.float64)).rows]
    assert shares == pytest.approx([0.5, -0.5], abs=1e-3)


def test_steps_that_are_1_but_for_rounding_have_no_shares():
    model = nn.Sequential(nn.Linear(4, 4, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_((1 + 1e-9) * torch.eye(4))
    (row,) = gramcert.audit(model, torch.zeros(1, 4, dtype=torch.float64)).rows
    assert row.share is None


def test_outputs_that_do_not_depend_on_the_input_have_the_constant_0():
    found = gramcert.audit(Function(lambda x, c: c + 1, c=torch.ones(3)), (4,))
    assert found.upper == 0
    assert gramcert.verify(found.certificate, Function(lambda x, c: c + 1, c=torch.ones(3))).holds
