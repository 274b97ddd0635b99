"""Images read at constant places, against torch's own operator; a finite constant is expected unless said."""

import math

import pytest
import torch
import torch.nn.functional as F

import gramcert
from auditing_cases import assert_exact, exported, function

RANDOM = torch.Generator().manual_seed(1)
GRID = 2.6 * torch.rand(1, 3, 4, 2, dtype=torch.float64, generator=RANDOM) - 1.3
SPACE = 2.2 * torch.rand(1, 2, 2, 3, 3, dtype=torch.float64, generator=RANDOM) - 1.1


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align", [True, False])
def test_a_sampled_image_has_its_true_norm(mode, padding, align):
    model = function(lambda x, g: F.grid_sample(x, g, mode, padding, align), GRID)
    assert_exact(model, (2, 4, 5))


def test_three_axes():
    assert_exact(function(lambda x, g: F.grid_sample(x, g, "bilinear", "zeros", False), SPACE), (2, 3, 2, 4))


def test_a_file_has_the_constant_of_the_module(tmp_path):
    model = function(lambda x, g: F.grid_sample(x, g, align_corners=False), GRID)
    path = exported(model, (2, 4, 5), tmp_path / "model.pt2")
    assert gramcert.audit(path, (2, 4, 5)).upper == gramcert.audit(model, (2, 4, 5)).upper < math.inf


UNBOUNDED = {
    "a grid of the input": (lambda x, g: F.grid_sample(x, x[..., :2], align_corners=False), "grid depends"),
    "cubic": (lambda x, g: F.grid_sample(x, g, "bicubic", align_corners=False), "cubic"),
    "between two pixels": (lambda x, g: F.grid_sample(x, 0 * g, "nearest", align_corners=False), "nearest place"),
    "far outside": (lambda x, g: F.grid_sample(x, 1e6 * g, align_corners=False), "far outside"),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_other_samples_are_unbounded(name):
    action, reason = UNBOUNDED[name]
    found = gramcert.audit(function(action, GRID), (2, 4, 4))
    assert found.upper == math.inf
    assert reason in " ".join(found.reasons)
