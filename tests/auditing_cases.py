"""What every test of a rule asks: the true norm, a proof that holds, and the same constant from a file."""

import math
import warnings

import torch

import gramcert
from auditing_networks import Function
from reference import jacobian_norm

TOL = 1e-3
ROUNDING = 1e3 * torch.finfo(torch.float64).eps


def function(action, *constants):
    """A module of one function and buffers, in float64."""
    return Function(action, **{f"c{place}": value for place, value in enumerate(constants)}).double().eval()


def exported(model, shape, path):
    """The model as a file of torch.export."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(model, (torch.zeros(1, *shape, dtype=torch.float64),)), path)
    return path


def sampled(model, shape, points=12, scale=1.0):
    """The largest norm of the Jacobian at random points."""
    torch.manual_seed(5)
    return max(float(jacobian_norm(model, scale * torch.randn(1, *shape))) for _ in range(points))


def assert_exact(model, shape):
    """A linear model has a finite constant, its true norm, and its certificate holds."""
    found = gramcert.audit(model, shape, tol=TOL)
    truth = float(jacobian_norm(model, torch.zeros(1, *shape)))
    assert found.reasons == ()
    assert truth <= found.upper * (1 + ROUNDING)
    assert found.upper <= truth * (1 + 1.1 * TOL) + ROUNDING
    assert gramcert.verify(found.certificate, model).holds
    return found


def assert_same_from_file(model, shape, path):
    """The file has the finite constant of the module, and its certificate holds."""
    found = gramcert.audit(exported(model, shape, path), shape)
    assert found.upper == gramcert.audit(model, shape).upper < math.inf
    assert gramcert.verify(found.certificate, path).holds


def assert_constant(model, shape, constant, scale=1.0, reached=None):
    """A model has a finite constant, no sampled Jacobian is above it, and one reaches a part of it."""
    found = gramcert.audit(model, shape, tol=TOL)
    assert found.reasons == ()
    assert found.upper <= constant * (1 + 1.1 * TOL)
    steepest = sampled(model, shape, scale=scale)
    assert steepest <= found.upper * (1 + ROUNDING)
    if reached is not None:
        assert steepest >= reached * constant
    assert gramcert.verify(found.certificate, model).holds
    return found
