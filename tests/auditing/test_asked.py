"""One output, or a functional of one: the constant, its certificate, and what is refused."""

import json

import pytest
import torch
from torch import nn

import gramcert
from auditing_networks import Function


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double().eval()


def two_outputs(x):
    return {"double": 2 * x, "half": 0.5 * torch.tanh(x)}


@pytest.mark.parametrize("functional", [{0: 1, 2: -1}, [1.0, 0.0, -1.0], torch.tensor([1.0, 0.0, -1.0])])
def test_a_difference_of_logits_is_a_network_with_one_row(model, functional):
    last = nn.Linear(6, 1).double()
    with torch.no_grad():
        last.weight.copy_(model[2].weight[:1] - model[2].weight[2:])
    expected = gramcert.audit(nn.Sequential(model[0], model[1], last), (4,))
    found = gramcert.audit(model, (4,), functional=functional)
    assert found.product == pytest.approx(expected.product)
    assert found.upper == pytest.approx(expected.upper, rel=1e-6)
    assert list(found.outputs) == [f"functional of {name}" for name in gramcert.audit(model, (4,)).outputs]
    again = gramcert.verify(json.loads(json.dumps(found.certificate)), model)
    assert (again.holds, again.upper) == (True, found.upper)


def test_one_of_several_outputs():
    model = Function(two_outputs).eval()
    assert gramcert.audit(model, (3,), output="half").upper == 0.5
    assert gramcert.audit(model, (3,), output="double").upper == 2
    assert 6 <= gramcert.audit(model, (3,), output="double", functional={1: 3}).upper <= 6 * (1 + 1e-12)


def test_what_was_asked_is_part_of_the_certificate(model):
    content = gramcert.audit(model, (4,), functional={0: 1}).certificate
    other = content | {"asked": {"output": None, "functional": [[1, 1.0]]}}
    assert not gramcert.verify(other, model).holds
    assert not gramcert.verify(content | {"asked": {"output": None, "functional": None}}, model).holds


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"output": "missing"}, ValueError, r"audit\(output='missing'\): the model has no such output"),
        ({"output": 3}, TypeError, r"audit\(output\): expected the name"),
        ({"functional": {3: 1}}, ValueError, r"audit\(functional\): expected places below 3"),
        ({"functional": [0, 0, 1, 0]}, ValueError, r"audit\(functional\): expected places below 3"),
        ({"functional": {-1: 1}}, ValueError, r"expected places from 0 on, got -1"),
        ({"functional": {0: float("nan")}}, ValueError, r"expected finite weights, got nan"),
        ({"functional": "3=1"}, TypeError, r"audit\(functional\): expected weights"),
    ],
)
def test_what_is_refused(model, options, error, message):
    with pytest.raises(error, match=message):
        gramcert.audit(model, (4,), **options)


def test_several_outputs_need_a_name():
    with pytest.raises(ValueError, match=r"expected the name of one of 'double', 'half', got None"):
        gramcert.audit(Function(two_outputs).eval(), (3,), functional={0: 1})
