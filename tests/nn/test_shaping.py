"""Layers that move or shift values, whose tensors and batches are not what they were made for."""

import pytest
import torch
from torch import nn

import gramcert.nn as gnn
from gramcert import lipschitz_bound


def test_empty_batches():
    layer = gnn.BatchCentering(3)
    assert layer(torch.zeros(0, 3, 2, 2)).shape == (0, 3, 2, 2)
    assert torch.equal(layer.running_mean, torch.zeros(3))


def test_tensors_of_another_shape_are_refused():
    """Torch would repeat the input along them: more outputs than the constant is for."""
    reflection, shift, centering, mean = (
        gnn.Householder(2),
        gnn.Shift([0.0, 0.0]),
        gnn.LayerCentering(2),
        gnn.BatchCentering(2),
    )
    with torch.no_grad():
        reflection.normals = torch.ones(4, 2)
        shift.values, mean.running_mean = torch.zeros(2, 2), torch.zeros(2, 1)
        centering.bias = nn.Parameter(torch.zeros(3, 2))
    for layer, name in ((reflection, "normals"), (shift, "values"), (centering, "bias"), (mean.eval(), "running_mean")):
        with pytest.raises(ValueError, match=rf"lipschitz_bound\(\w+\.{name}\): expected shape \(.*\), got \(.*\)"):
            lipschitz_bound(layer)
