"""Rules of torch's layers with weights, sums and products, against their dense matrices."""

import math

import pytest
import torch
from torch import nn

from auditing_networks import Function, check_function, check_linear, random_batch_norm

IMAGE = (4, 6, 6)
LINEAR = {
    "convolution": (lambda: nn.Conv2d(4, 5, 3, padding=1), IMAGE),
    "stride": (lambda: nn.Conv2d(4, 5, 3, stride=2, padding=1), IMAGE),
    "dilation": (lambda: nn.Conv2d(4, 5, 3, dilation=2, padding=1), IMAGE),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), IMAGE),
    "same": (lambda: nn.Conv2d(4, 3, 3, padding="same"), IMAGE),
    "circular": (lambda: nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"), IMAGE),
    "reflect": (lambda: nn.Conv2d(4, 3, 3, padding=2, padding_mode="reflect"), IMAGE),
    "replicate": (lambda: nn.Conv2d(4, 3, 3, padding=1, padding_mode="replicate"), IMAGE),
    "zero padding before": (lambda: nn.Sequential(nn.ZeroPad2d((0, 1, 2, 0)), nn.Conv2d(4, 3, 3)), IMAGE),
    "transposed": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1), IMAGE),
    "1-D": (lambda: nn.Conv1d(4, 3, 5, padding=2), (4, 12)),
    "3-D": (lambda: nn.Conv3d(2, 2, 2, padding=1), (2, 3, 3, 3)),
    "linear": (lambda: nn.Linear(7, 5), (7,)),
    "linear on the last axis": (lambda: nn.Linear(7, 5), (3, 7)),
    "batch norm": (lambda: random_batch_norm(4), IMAGE),
    "batch norm after": (lambda: nn.Sequential(nn.Conv2d(4, 5, 3, padding=1), random_batch_norm(5)), IMAGE),
    "batch norm before": (lambda: nn.Sequential(random_batch_norm(4), nn.Conv2d(4, 5, 3, padding=1)), IMAGE),
    "batch norm after transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), random_batch_norm(6)),
        IMAGE,
    ),
    "batch norm around": (
        lambda: nn.Sequential(random_batch_norm(4), nn.Conv2d(4, 6, 3, groups=2), random_batch_norm(6)),
        IMAGE,
    ),
    "two linear": (lambda: nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 6)), (7,)),
    "two convolutions": (lambda: nn.Sequential(nn.Conv2d(4, 5, 3, stride=2, padding=1), nn.Conv2d(5, 3, 2)), IMAGE),
    "pointwise after": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4, padding=1), nn.Conv2d(4, 6, 1)), IMAGE),
    "pointwise before": (lambda: nn.Sequential(nn.Conv2d(4, 6, 1), nn.Conv2d(6, 6, 3, groups=6, padding=1)), IMAGE),
    "pointwise and transposed": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, 1), nn.ConvTranspose2d(6, 3, 3, 2), nn.Conv2d(3, 4, 1)),
        IMAGE,
    ),
    "convolution and linear": (
        lambda: nn.Sequential(nn.Conv2d(4, 3, 3, padding=1), nn.Flatten(), nn.Linear(108, 5)),
        IMAGE,
    ),
    "mean": (lambda: Function(lambda x: x.mean((2, 3))), IMAGE),
    "sum": (lambda: Function(lambda x: x.sum(1, keepdim=True)), IMAGE),
    "times constants": (lambda: Function(lambda x, c: 3 * x * c / 2 - 1, c=torch.randn(4, 1, 1)), IMAGE),
    "scaled places": (lambda: Function(lambda x, c: x * c, c=torch.randn(6, 6)), IMAGE),
    "channel-wise difference": (lambda: Function(lambda x: 1 - x), IMAGE),
    "parts of one value side by side": (lambda: Function(lambda x: torch.cat([x[:, 2:], x[:, :2]], 1)), IMAGE),
    "masked": (lambda: Function(lambda x, m: torch.where(m, x, 0.0), m=torch.rand(6, 6) > 0.5), IMAGE),
    "matrix from the left": (lambda: Function(lambda x, w: w @ x, w=torch.randn(3, 6)), IMAGE),
    "stack": (lambda: Function(lambda x: torch.stack([x, x[:, [1, 0, 2, 3]]], 1)), IMAGE),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_maps_are_measured_as_a_whole(name):
    check_linear(*LINEAR[name])


# Of one value and a function of it, with their constants.
NONLINEAR = {
    "residual": (Function(lambda x: x + torch.tanh(x)), 2.0),
    "concatenation": (Function(lambda x: torch.cat([x, torch.relu(x)], 1)), math.sqrt(2)),
}


@pytest.mark.parametrize("name", NONLINEAR)
def test_other_functions_have_their_constant(name):
    check_function(*NONLINEAR[name], IMAGE)
