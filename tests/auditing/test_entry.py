"""``audit`` from outside: its arguments, and weights at the ends of the range of numbers."""

import math

import pytest
import torch
from torch import nn

import gramcert
from auditing_networks import ROUNDING, TOL
from gramcert import Convolution
from reference import dense_norm, sigma

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporter


@pytest.mark.parametrize(
    ("shape", "options", "error", "message"),
    [
        ((3, 8), {}, ValueError, r"audit\(input_shape\): the model cannot take an input of shape \(3, 8\)"),
        ((0,), {}, ValueError, "expected sizes of at least 1"),
        ((2**20, 2**20), {}, ValueError, "expected at most"),
        (None, {}, ValueError, r"audit\(input_shape\): Linear does not say it; expected the shape of one example"),
        (torch.tensor(3.0), {}, ValueError, "expected an example with its batch, got a tensor without axes"),
        (4, {}, TypeError, r"audit\(input_shape\): expected a sequence of ints or an example, got 4"),
        ("4", {}, TypeError, "expected a sequence of ints or an example, got '4'"),
        ((4,), {"tol": 2.0}, ValueError, r"audit\(tol=2.0\): expected 0 < tol < 1"),
        ((4,), {"jobs": 0}, ValueError, r"audit\(jobs=0\)"),
        ((4,), {"architecture": "resnet20"}, ValueError, "for files of weights only"),
        ((4,), {"cache": 5}, TypeError, r"audit\(cache\): expected a folder or None, got 5"),
        ((4,), {"measure": "yes"}, TypeError, r"audit\(measure='yes'\): expected True or False"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(shape, options, error, message):
    with pytest.raises(error, match=message):
        gramcert.audit(nn.Linear(4, 4), shape, **options)


def test_bad_models_are_named():
    with pytest.raises(TypeError, match="sparse or meta"):
        gramcert.audit(nn.Linear(4, 4, device="meta"), (4,))
    with pytest.raises(
        ValueError,
        match=r"the model cannot take an input of shape \(1, 3, 5, 6\) \(without the batch it is \(3, 5, 6\)\)",
    ):
        gramcert.audit(nn.Conv2d(3, 2, 3).eval(), (1, 3, 5, 6))


def test_the_shape_may_be_left_to_the_model_or_come_as_an_example(tmp_path):
    model, example = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU()).eval(), torch.zeros(2, 3, 5, 6)
    exported = torch.export.export(model, (example[:1],))
    torch.export.save(exported, tmp_path / "model.pt2")
    truth = float(dense_norm(Convolution.of(model[0]), (5, 6)))
    for found in (
        gramcert.audit(model, (3, 5, 6)),
        gramcert.audit(model, example),
        gramcert.audit(exported),
        gramcert.audit(tmp_path / "model.pt2"),
        gramcert.audit(tmp_path / "model.pt2", example),
    ):
        assert found.input_shape == (3, 5, 6)
        assert truth <= found.upper * (1 + ROUNDING)
        assert found.upper <= truth * (1 + 1.1 * TOL)


@pytest.mark.parametrize("scale", [1e160, 1e-200, 1e200, 1e300, 0.0, 1e-315, 5e-324])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: [nn.Linear(1, 1)], (1,)),
        (lambda: [nn.Linear(3, 2)], (3,)),
        (lambda: [nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 1)], (2, 6, 6)),
        (lambda: [nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)], (3,)),
    ],
    ids=["number", "matrix", "convolutions", "network"],
)
def test_extreme_weights_have_a_true_bound_and_a_certificate(make, shape, scale):
    torch.manual_seed(0)
    model = nn.Sequential(*make()).double()
    norms = [float(sigma(part.weight.detach())) for part in model if isinstance(part, nn.Linear)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    found = gramcert.audit(model, shape)
    is_bounded = len(model) == 1 or scale < 1  # a product of two is beyond the largest float
    assert math.isfinite(found.upper) == is_bounded == (not found.reasons)
    if is_bounded and norms:
        truth = math.prod(norm * scale for norm in norms)
        smallest = 8 * 5e-324  # weights that are subnormal were rounded when they were scaled
        assert truth * (1 - ROUNDING) - smallest <= found.upper <= truth * (1 + 3 * TOL) + smallest
        assert found.rows[0].lower <= norms[0] * scale * (1 + ROUNDING) + smallest
    checked = gramcert.verify(found.certificate, model)
    assert checked.holds, checked.problems
