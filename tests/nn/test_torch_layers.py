"""Torch's own layers without a matrix at every input size: never below what a size needs, and reached by one."""

import math

import pytest
import torch
from torch import nn

import gramcert
from gramcert import lipschitz_bound
from gramcert.nn.torch_layers import _RULES
from reference import jacobian_norm

EPS = torch.finfo(torch.float64).eps


def statistics(layer):
    """Weights and running variances that are not all the same."""
    for tensor in (*layer.parameters(), *layer.buffers()):
        if tensor.is_floating_point():
            with torch.no_grad():
                tensor.copy_(torch.linspace(0.25, 1.75, tensor.numel()).reshape(tensor.shape))
    return layer.double().eval()


# Layers, and a shape at which the constant of every size is reached; ``None`` where no size reaches it.
CASES = [
    (nn.Flatten(), (2, 3)),
    (nn.Unflatten(1, (2, 1)), (2, 3)),
    (nn.PixelShuffle(2), (4, 2, 2)),
    (nn.PixelUnshuffle(2), (1, 2, 4)),
    (nn.ChannelShuffle(2), (4, 2, 2)),
    (nn.Dropout().eval(), (3,)),
    (nn.Dropout1d().eval(), (3, 2)),
    (nn.Dropout2d().eval(), (3, 2, 2)),
    (nn.Dropout3d().eval(), (3, 2, 2, 2)),
    (nn.AlphaDropout().eval(), (3,)),
    (nn.FeatureAlphaDropout().eval(), (3, 2)),
    (nn.ZeroPad1d(1), (1, 3)),
    (nn.ZeroPad2d((1, -1, 0, 2)), (1, 3, 3)),
    (nn.ZeroPad3d(1), (1, 2, 2, 2)),
    (nn.ConstantPad1d(1, 0.5), (1, 3)),
    (nn.ConstantPad2d(1, 0.5), (1, 3, 3)),
    (nn.ConstantPad3d(1, 0.5), (1, 2, 2, 2)),
    (nn.ReflectionPad1d((2, 1)), (1, 3)),
    (nn.ReflectionPad2d(1), (1, 3, 3)),
    (nn.ReflectionPad3d(1), (1, 3, 3, 3)),
    (nn.ReplicationPad1d((2, 1)), (1, 1)),
    (nn.ReplicationPad2d(1), (1, 1, 1)),
    (nn.ReplicationPad3d(1), (1, 1, 1, 1)),
    (nn.CircularPad1d(1), (1, 1)),
    (nn.CircularPad2d((1, 0, 1, 1)), (1, 1, 1)),
    (nn.CircularPad3d(1), (1, 1, 1, 1)),
    (nn.MaxPool1d(3, stride=1), (1, 7)),
    (nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True), (1, 7, 7)),
    (nn.MaxPool3d(2), (1, 4, 4, 4)),
    (nn.AvgPool1d(4), (1, 8)),
    (nn.AvgPool2d(2), (1, 4, 4)),
    (nn.AvgPool2d(2, divisor_override=3), (1, 4, 4)),
    (nn.AvgPool2d(3, stride=1), None),
    (nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False), None),
    (nn.AvgPool3d(2), (1, 4, 4, 4)),
    (nn.AdaptiveAvgPool1d(3), (1, 1)),
    (nn.AdaptiveAvgPool2d((2, None)), (1, 1, 4)),
    (nn.AdaptiveAvgPool2d(1), (1, 1, 1)),
    (nn.AdaptiveAvgPool3d(2), (1, 1, 1, 1)),
    (nn.AdaptiveMaxPool1d(3), (1, 1)),
    (nn.AdaptiveMaxPool2d(2), (1, 1, 1)),
    (nn.AdaptiveMaxPool3d(2), (1, 1, 1, 1)),
    (statistics(nn.BatchNorm1d(3)), (3, 2)),
    (statistics(nn.BatchNorm2d(3)), (3, 2, 2)),
    (statistics(nn.BatchNorm3d(2, affine=False)), (2, 1, 1, 2)),
    (statistics(nn.SyncBatchNorm(3)), (3, 2)),
    (statistics(nn.InstanceNorm1d(3, affine=True)), (3, 4)),
    (statistics(nn.InstanceNorm2d(3, track_running_stats=True)), (3, 2, 2)),
    (nn.InstanceNorm3d(2).eval(), (2, 2, 1, 1)),
    (statistics(nn.LayerNorm((2, 3))), (2, 3)),
    (nn.LayerNorm(1, elementwise_affine=False), (2, 1)),
    (statistics(nn.GroupNorm(2, 4)), (4, 2)),
    (statistics(nn.RMSNorm(4)), (4,)),
    (nn.Softmax(1), (4,)),
    (nn.Softmin(1), (4,)),
    (nn.Softmax2d(), (3, 2, 2)),
]


@pytest.mark.parametrize(("layer", "shape"), CASES, ids=lambda value: str(value).partition("(")[0] or str(value))
def test_every_size_is_covered_and_one_reaches_it(layer, shape):
    every = lipschitz_bound(layer)
    assert math.isfinite(every)
    at = gramcert.audit(layer, shape or (1, 5, 5)).upper
    assert at <= every * (1 + 1e-7)
    assert lipschitz_bound(layer, input_shape=shape or (1, 5, 5)) == at
    if shape is not None:
        assert every <= at * (1 + 1e-7)


def test_the_cases_are_complete():
    assert {type(layer) for layer, _ in CASES} == set(_RULES)


def test_one_element_tuples_of_pooling():
    assert 3 <= lipschitz_bound(nn.MaxPool2d((3,), stride=1)) <= 3 * (1 + 4 * EPS)
    pool = nn.AvgPool2d((1, 4), stride=(1,))
    assert jacobian_norm(pool, torch.zeros(1, 1, 1, 40)) <= lipschitz_bound(pool) <= 1 + 4 * EPS
