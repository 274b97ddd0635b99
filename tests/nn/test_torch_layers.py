"""Torch's own layers without weights."""

import pytest
import torch
from torch import nn

from gramcert import lipschitz_bound
from gramcert.nn.guarantee import constant_and_size
from reference import jacobian_norm


def test_one_element_tuples_of_pooling():
    rounding = 4 * torch.finfo(torch.float64).eps
    assert 3 <= lipschitz_bound(nn.MaxPool2d((3,), stride=1)) <= 3 * (1 + rounding)
    pool = nn.AvgPool2d((1, 4), stride=(1,))
    assert jacobian_norm(pool, torch.zeros(1, 1, 1, 40)) <= lipschitz_bound(pool) <= 1 + rounding


@pytest.mark.parametrize("sizes", [(4,), (5,), (7,)])
@pytest.mark.parametrize("taps", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_sizes_after_pooling_are_those_of_torch(sizes, taps, stride):
    for padding, ceil_mode in ((0, False), (0, True), (taps // 2, False), (taps // 2, True)):
        pool = nn.MaxPool1d(taps, stride, padding, ceil_mode=ceil_mode)
        assert constant_and_size("test", pool, sizes)[1] == tuple(pool(torch.zeros(1, 1, *sizes)).shape[2:])
