"""The norm of one map with its witness, and the constant of one residual layer."""

import pytest
import torch
from torch import nn

import gramcert
from auditing_networks import TOL, Function, sampled
from gramcert import Convolution
from gramcert import nn as gnn
from gramcert.operators.matrices import Convolve
from gramcert.operators.measurement import Norm
from reference import dense_norm


@pytest.mark.parametrize("slopes", ["relu", "tanh"])
def test_the_residual_layer_has_the_constant_of_its_theorem(slopes):
    torch.manual_seed(0)
    activation = nn.ReLU() if slopes == "relu" else nn.Tanh()
    model = nn.Sequential(gnn.SLLConv2d(3, 5, 3, activation), nn.Flatten(), gnn.SLLLinear(75, 20)).eval()
    found = gramcert.audit(model, (3, 5, 5))
    assert 1 <= found.upper <= 1 + 1e-5
    assert [row.kind for row in found.rows] == ["residual layer", "residual layer"]


def test_a_residual_layer_with_another_activation_has_no_theorem():
    torch.manual_seed(0)
    layer = gnn.SLLLinear(6, 6).eval()
    layer.activation = nn.LeakyReLU(-1.0)  # the absolute value
    found = gramcert.audit(layer, (6,))
    assert found.reasons == ()
    assert 2.9 < sampled(layer.double(), (6,), 200) <= found.upper <= 3 * (1 + TOL)


def test_the_sign_of_a_residual_branch_counts():
    torch.manual_seed(0)
    plain = gramcert.nn.export(gnn.SLLLinear(6, 6))
    weights = dict(plain.named_parameters())
    inner, outer = (weights[name].detach().double() for name in ("inner.weight", "outer.weight"))
    model = Function(lambda x: x + torch.relu(x.double() @ inner.T) @ outer.T)
    found = gramcert.audit(model, (6,))
    assert found.reasons == ()
    assert 2.9 < sampled(model, (6,), 200) <= found.upper <= 3 * (1 + TOL)  # of x + 2WR²φ(Wᵀx)


def test_witnesses_prove_nearly_the_lower_bound():
    layer = Convolution(torch.randn(4, 4, 3, 3, dtype=torch.float64), padding=1)
    found = Norm(Convolve((1, 4, 12, 12), layer)).run(1e-3)
    truth = float(dense_norm(layer, (12, 12)))
    assert found.lower <= truth <= found.upper <= truth * (1 + 1.1 * TOL)
    assert 0.98 * found.lower <= found.witnessed <= truth


def test_limits_are_notes_not_errors():
    layer = Convolution(torch.randn(16, 16, 3, 3, dtype=torch.float64), padding=1)
    found = Norm(Convolve((1, 16, 24, 24), layer)).run(1e-9, 0.0)
    assert found.lower <= found.upper
    assert found.notes
