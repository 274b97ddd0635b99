"""SR layers: resetting, and values that are not there, not finite, or made in inference mode."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gramcert.nn as gnn
from gramcert import lipschitz_bound


@pytest.mark.parametrize("make", [lambda: gnn.SRLinear(4, 4), lambda: gnn.SRConv2d(4, 8, 3, groups=2)])
def test_resetting_parameters(make):
    layer = make()
    original = layer.parametrizations.weight.original
    nn.init.ones_(original)
    layer.reset_parameters()
    assert lipschitz_bound(layer) == pytest.approx(1, abs=100 * torch.finfo(torch.float32).eps)
    assert not (original == 1).all()


def test_layers_without_values():
    """On the meta device, by skip_init, and as fake tensors: shapes are known, values are not read."""
    with torch.device("meta"):
        layers = [
            gnn.SRLinear(3, 4),
            gnn.SRConv2d(3, 8, 3),
            gnn.SLLConv2d(3, 4, 3),
            gnn.SLLLinear(3, 4, rescaling="sn"),
        ]
    for layer, shape in zip(layers, [(2, 3), (2, 3, 5, 5), (2, 3, 5, 5), (2, 3)], strict=True):
        assert layer(torch.empty(shape, device="meta")).is_meta
    for kind, arguments in ((gnn.SRConv2d, (3, 8, 3)), (gnn.SRLinear, (3, 4)), (gnn.SLLConv2d, (3, 4, 3))):
        assert nn.utils.skip_init(kind, *arguments).bias is not None
    with pytest.raises(TypeError, match="expected a dense tensor with values, got a meta tensor"):
        lipschitz_bound(layers[1])
    with FakeTensorMode():
        assert gnn.SRConv2d(3, 8, 3)(torch.empty(1, 3, 5, 5)).shape == (1, 8, 3, 3)


def test_tables_made_in_inference_mode_serve_training():
    layer = gnn.SRConv2d(2, 3, 5, iterations=2)
    with torch.inference_mode():
        layer(torch.zeros(1, 2, 7, 7))
    layer(torch.ones(1, 2, 7, 7)).sum().backward()
    assert layer.parametrizations.weight.original.grad is not None


def test_weights_that_are_not_finite_are_refused():
    layer = gnn.SRLinear(3, 3)
    with torch.no_grad():
        layer.parametrizations.weight.original[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"SRLinear\(layer\): expected finite values, got 1 NaN"):
        layer(torch.ones(1, 3))
