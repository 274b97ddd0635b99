"""Convolutions of batches: the same sums of products as tap by tap, whatever the geometry and the portions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import layers
from gramcert import Convolution
from gramcert.certified.tapwise import TapwiseLayer
from gramcert.geometry.axis import layer_axes
from gramcert.geometry.reduction import grouped_kernels
from gramcert.operators import batches
from gramcert.operators.batches import BatchedConvolution
from gramcert.operators.matrices import Convolve


def whole_numbers(*shape):
    return torch.randint(-9, 10, shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


@given(layers(), st.integers(1, 4), st.sampled_from([1, 200, 2**19]))
def test_whole_numbers_have_exactly_the_sums_of_each_tap(case, samples, portion):
    layer, size = case
    axes = layer_axes(layer, size)
    kernels = whole_numbers(*grouped_kernels(layer).shape)
    tapwise, batched = TapwiseLayer(kernels, axes), BatchedConvolution(kernels, axes)
    x, y = whole_numbers(samples, *tapwise.input_shape), whole_numbers(samples, *tapwise.output_shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "PORTION", portion)
        assert torch.equal(batched(x), tapwise.apply(x))
        if batched.can_be_turned:
            assert torch.equal(batched.adjoint(y), tapwise.adjoint(y))


@pytest.mark.parametrize("before", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("dilation", [1, 2])
def test_the_adjoint_of_any_padding_by_zeros(before, dilation):
    kernel = whole_numbers(3, 2, 3, 2)
    layer = Convolution(kernel, padding=before, dilation=dilation)
    axes = layer_axes(layer, (6, 5))
    batched = BatchedConvolution(kernel[None], axes)
    x, y = whole_numbers(2, 1, 2, 6, 5), whole_numbers(2, 1, 3, *(axis.outputs for axis in axes))
    assert batched.can_be_turned
    assert (batched(x) * y).sum() == (x * batched.adjoint(y)).sum()


def test_gradients_flow():
    """For attacks on graphs."""
    layer = Convolution(whole_numbers(3, 2, 3, 3), padding=1)
    x = whole_numbers(2, 2, 5, 5).requires_grad_()
    (found,) = torch.autograd.grad(Convolve((2, 5, 5), layer).apply(x).square().sum() / 2, x)
    assert torch.equal(found, layer.adjoint(layer.apply(x.detach()), (5, 5)))


def test_what_is_not_finite_stays_so_and_other_samples_are_their_own():
    layer = Convolve((1, 4, 4), Convolution(torch.ones(1, 1, 3, 3, dtype=torch.float64), padding=1))
    x = torch.ones(3, 1, 4, 4, dtype=torch.float64)
    x[1, 0, 0, 0] = float("inf")
    y, error = layer.run(x)
    assert y[1].isinf().any()
    assert error[1] == float("inf")
    assert y[[0, 2]].isfinite().all()
    assert error[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("size", "padding", "stride"), [(1, 5, 20), (2, 7, 30), (3, 3, 9), (1, 1, 2)])
def test_layers_that_read_nothing_or_little(size, padding, stride):
    kernel = whole_numbers(2, 1, 1)
    axes = layer_axes(Convolution(kernel, stride, padding), (size,))
    x = whole_numbers(3, 1, 1, size)
    assert torch.equal(BatchedConvolution(kernel[None], axes)(x), TapwiseLayer(kernel[None], axes).apply(x))
