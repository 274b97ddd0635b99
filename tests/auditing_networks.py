"""Small networks that several tests audit, and what is expected of an audit."""

import math
import re

import pytest
import torch
from torch import nn

import gramcert
from reference import jacobian_norm

TOL = 1e-3  # of audits
ROUNDING = 1e3 * torch.finfo(torch.float64).eps  # of dense Jacobians with a few hundred entries


class Function(nn.Module):
    """A module of one function, with tensors that it may use as buffers."""

    def __init__(self, function, **tensors):
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, x):
        return self.function(x, *self.buffers())


class Residual(nn.Module):
    """Convolutions with batch normalisation, a shortcut, pooling and a linear layer: a small ResNet."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, 5)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(x + self.bn2(self.conv2(x)))
        return self.linear(x.mean((2, 3)))


def residual_network(seed=0):
    """With statistics of a network that was trained."""
    torch.manual_seed(seed)
    model = Residual()
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.weight.uniform_(0.5, 2)
                part.bias.normal_()
                part.running_mean.normal_()
                part.running_var.uniform_(0.2, 2)
    return model.eval()


def random_batch_norm(channels):
    """With statistics and factors of every size and sign."""
    layer = nn.BatchNorm2d(channels)
    with torch.no_grad():
        layer.weight.normal_()
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.1, 3)
    return layer


def audited(model, shape):
    """The model in float64 and its audit."""
    torch.manual_seed(3)
    model = model.double().eval()
    return model, gramcert.audit(model, shape, tol=TOL)


def sampled(model, shape, points=12, scale=1.0):
    """The largest norm of the Jacobian at random points."""
    torch.manual_seed(5)
    return max(float(jacobian_norm(model, scale * torch.randn(1, *shape))) for _ in range(points))


def expect(found, expected, rel=1e-6):
    """A number is the constant; a text is (the regular expression of) the reason why there is none."""
    if isinstance(expected, str):
        assert found.upper == math.inf
        assert re.search(expected, "; ".join(found.reasons)), found.reasons
    else:
        assert found.reasons == ()
        assert found.product == pytest.approx(expected, rel=rel)
        assert found.upper <= found.product


def check_function(module, constant, shape):
    """The constant is as expected, and no sampled Jacobian is above it: near zero, where norms turn, and elsewhere."""
    model, found = audited(module, shape)
    expect(found, constant, 1e-5)
    assert max(sampled(model, shape, 4, scale) for scale in (1e-6, 1.0)) <= found.upper * (1 + ROUNDING)


def check_linear(build, shape):
    """A linear model is measured as a whole: its constant is the norm of its matrix, within the tolerance."""
    torch.manual_seed(0)
    model, found = audited(build(), shape)
    truth = float(jacobian_norm(model, torch.zeros(1, *shape)))
    assert found.reasons == ()
    assert truth <= found.upper * (1 + ROUNDING)
    assert found.upper <= truth * (1 + 1.1 * TOL) + ROUNDING
