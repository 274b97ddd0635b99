"""Rules of padding, pooling and resizing, against their dense matrices and Jacobians."""

import pytest
import torch
from torch import nn

import gramcert
from auditing_networks import TOL, Function, audited, check_function, check_linear, expect
from gramcert import nn as gnn
from reference import jacobian_norm

IMAGE = (4, 6, 6)
LINEAR = {
    "pooling and linear": (lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), IMAGE),
    "average pool": (lambda: nn.AvgPool2d(3, 2, 1), IMAGE),
    "average pool, not counting padding": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), IMAGE),
    "average pool, rounded up": (lambda: nn.AvgPool2d((2, 3), (3, 2), (1, 1), ceil_mode=True), (2, 7, 8)),
    "average pool, divisor": (lambda: nn.AvgPool2d(2, divisor_override=3), IMAGE),
    "adaptive pool": (lambda: nn.AdaptiveAvgPool2d((4, 5)), IMAGE),
    "nearest": (lambda: nn.Upsample(scale_factor=2), IMAGE),
    "bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "bilinear, corners": (lambda: nn.Upsample(size=(9, 7), mode="bilinear", align_corners=True), IMAGE),
    "bicubic": (lambda: nn.Upsample(size=(9, 7), mode="bicubic"), IMAGE),
    "linear upsampling": (lambda: nn.Upsample(scale_factor=3, mode="linear"), (4, 6)),
    "reflection pad": (lambda: nn.ReflectionPad2d((1, 2, 0, 3)), IMAGE),
    "replication pad": (lambda: nn.ReplicationPad2d(2), IMAGE),
    "circular pad": (lambda: nn.CircularPad2d(2), IMAGE),
    "constant pad": (lambda: nn.ConstantPad2d((1, -2, 0, 1), 3.0), IMAGE),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_maps_are_measured_as_a_whole(name):
    check_linear(*LINEAR[name])


# Functions of windows, and their constants.
NONLINEAR = {
    "max pool": (nn.MaxPool2d(2), 1.0),
    "overlapping max pool": (nn.MaxPool2d(3, stride=2), 2.0),
    "max pool with padding": (nn.MaxPool2d(3, 2, 1), 2.0),
    "max pool rounded up": (nn.MaxPool2d(3, 2, ceil_mode=True), 2.0),
    "adaptive max pool": (nn.AdaptiveMaxPool2d(4), 2.0),
    "lp pool": (nn.LPPool2d(2, 2), 1.0),
    "l2 pool": (gnn.ScaledL2NormPool(2), 1.0),
    "overlapping l2 pool": (gnn.ScaledL2NormPool(3, 2), 1.0),
}


@pytest.mark.parametrize("name", NONLINEAR)
def test_other_functions_have_their_constant(name):
    check_function(*NONLINEAR[name], IMAGE)


def test_overlapping_windows_reach_their_constant():
    """One entry is the maximum of four windows."""
    model, found = audited(nn.MaxPool2d(3, stride=2), (1, 5, 5))
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, 2, 2] = 1.0
    assert float(jacobian_norm(model, x)) == pytest.approx(2.0) == found.upper


@pytest.mark.parametrize("size", [(1, 12), (3, 8), (8, 8), (16, 4)])
@pytest.mark.parametrize("factor", [2, 4])
def test_upsampling_verifies_its_own_certificate(size, factor):
    """A constant image keeps its values at factor² places: no other grows by more."""
    model = nn.Upsample(scale_factor=factor, mode="bilinear")
    found = gramcert.audit(model, (size[0], size[1], size[1]))
    expect(found, float(factor), TOL)
    assert found.upper >= factor
    assert gramcert.verify(found.certificate, model).holds


def test_indices_of_pooling_have_no_constant():
    model = nn.MaxPool1d(2, return_indices=True)
    expect(gramcert.audit(Function(lambda x: model(x)[1] * 1.0), (1, 8)), "its further results are not followed")
