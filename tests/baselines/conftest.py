import math

import pytest
import torch

SHAPES = [(3, 2, 4), (2, 3, 3, 2), (1, 4, 2, 5), (2, 2, 3, 1, 2)]


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=SHAPES, ids=str)
def kernel(request, dtype, generator):
    return torch.randn(request.param, generator=generator, dtype=dtype)


@pytest.fixture
def rounding(kernel):
    """Relative error that sums over an output's weights may have."""
    return 8 * math.sqrt(kernel.numel()) * torch.finfo(kernel.dtype).eps
