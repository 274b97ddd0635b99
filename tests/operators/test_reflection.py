"""Reflections written out: the real ones, and what only looks like them."""

import pytest
import torch

import gramcert
from auditing_networks import Function, expect
from gramcert import nn as gnn
from reference import jacobian_norm

A = torch.tensor([0.6, 0.8, 0.0, 0.0])


def depth(x):
    return torch.relu((A * x).sum(2, keepdim=True))


def test_a_householder_activation_is_one():
    layer = gnn.Householder(8).eval()
    layer.normals = torch.randn(4, 2)
    expect(gramcert.audit(layer, (8, 3, 3)), 1.0)
    expect(gramcert.audit(Function(lambda x: x - 2 * A * depth(x)), (5, 4)), 1.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - 2 * A * torch.relu((A * x.flip(2)).sum(2, keepdim=True)),
        lambda x: x - 2 * A * depth(x.roll(1, 1)),
        lambda x: x - 2 * A * depth(x).flip(1),
        lambda x: x - 2 * A * depth(x).cumsum(1),
        lambda x: x - 2 * A * torch.einsum("bik,ij->bjk", depth(x), torch.ones(5, 5, dtype=x.dtype)),
        lambda x: x - 3 * A * depth(x),
        lambda x: x - 2 * A.flip(0) * depth(x),
        lambda x: x + 2 * A * depth(x),
    ],
    ids=["flipped", "other lines", "lines flipped", "sums of lines", "mixed lines", "longer", "another way", "sum"],
)
def test_what_only_looks_like_one_has_a_larger_constant(function):
    """Finite, and above every Jacobian, of which one is above 1."""
    found = gramcert.audit(Function(function), (5, 4)).upper
    torch.manual_seed(0)
    points = [torch.ones(1, 5, 4), *torch.randn(8, 1, 5, 4)]
    largest = max(float(jacobian_norm(Function(function).double(), x.double())) for x in points)
    assert 1.2 < largest <= found < 20
