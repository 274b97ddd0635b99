import pytest
import torch

from gramcert import Convolution
from gramcert.baselines import frequency_svd


@pytest.mark.parametrize("size", [1, 2, 3, 4])  # kernels larger than the input wrap
def test_exact_for_circular_padding(kernel, size, rounding):
    layer = Convolution(kernel.double(), padding="same", padding_mode="circular")
    truth = torch.linalg.matrix_norm(layer.to_dense(size), ord=2).item()
    value = frequency_svd(kernel, size)
    assert value.dtype == kernel.dtype
    assert value.item() == pytest.approx(truth, rel=rounding)


def test_lies_on_either_side_of_the_zero_padded_norm():
    alternating = torch.tensor([[[-1.0, 1.0, -1.0]]])
    constant = torch.ones(1, 1, 3)
    for kernel, below in ((alternating, True), (constant, False)):
        truth = torch.linalg.matrix_norm(Convolution(kernel, padding="same").to_dense(5), ord=2)
        assert (frequency_svd(kernel, 5) < truth) == below


def test_zero_kernel(dtype):
    assert frequency_svd(torch.zeros(2, 3, 3, dtype=dtype), 4) == 0


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_scale_does_not_matter(factor):
    kernel = torch.tensor([[[1.0, 2.0, 3.0]]])
    expected = pytest.approx(6, rel=8 * torch.finfo(torch.float32).eps)
    assert frequency_svd(kernel * factor, 4).item() / factor == expected
