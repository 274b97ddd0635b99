"""Nearest neighbours as torch takes them: each of its kernels the same, or no constant."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

import gramcert
from auditing_networks import Function, expect
from gramcert.operators.resizing import agreed_size
from gramcert.operators.rules import Unknown

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.export


def test_sizes_are_rounded_down_in_every_arithmetic():
    assert agreed_size(10, Fraction(float(torch.tensor(1.7)))) == 17  # a little above
    with pytest.raises(Unknown, match="the new size depends on how a runtime computes it: 39 or 40"):
        agreed_size(24, Fraction(float(torch.tensor(1.6666666))))


@pytest.mark.parametrize(
    ("size", "options", "reason"),
    [
        ((24,), {"scale_factor": 5 / 3}, "2 or 3"),
        ((12,), {"scale_factor": 1.1}, "9 or 10"),
        ((4,), {"scale_factor": 2.1}, "0 or 1"),  # twice as many: some kernels take the scale for 2
        ((3, 4), {"scale_factor": (1.2, 2.0)}, "leaves 3 places"),
        ((3, 4), {"scale_factor": (1.2, 2.0), "mode": "bilinear"}, "leaves 3 places"),
    ],
    ids=str,
)
def test_torch_s_resizing_has_no_constant_where_the_arithmetic_decides(size, options, reason, tmp_path):
    model = Function(lambda x: F.interpolate(x, **options))
    torch.export.save(torch.export.export(model, (torch.zeros(1, 1, *size),)), tmp_path / "model.pt2")
    for source in (model, tmp_path / "model.pt2"):
        expect(gramcert.audit(source, (1, *size)), reason)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize(
    "options",
    [
        {"scale_factor": 2},
        {"scale_factor": 1.5},
        {"scale_factor": 7},
        {"scale_factor": 0.7},  # seven of ten in float64, as torch counts
        {"scale_factor": 5 / 3, "recompute_scale_factor": True},
        {"size": 13},
    ],
    ids=str,
)
def test_torch_s_nearest_places_are_those_that_are_certified(mode, options):
    def resized(x):
        return F.interpolate(x, mode=mode, **options)

    found = gramcert.audit(Function(resized), (1, 10))
    taken = resized(torch.arange(10.0).reshape(1, 1, 10)).long().flatten()
    assert found.upper == pytest.approx(float(torch.bincount(taken).max()) ** 0.5, rel=1e-9)
