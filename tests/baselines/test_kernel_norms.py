"""Methods that look at the kernel alone: valid for every size and both paddings, or honestly not."""

import math

import pytest
import torch

from gramcert import Convolution, sampling_factor
from gramcert.baselines import (
    four_reshapes,
    frequency_svd,
    reference_norm,
    reshaped_kernel_norm,
    sampled_density,
    tensor_norm,
)

EPS = torch.finfo(torch.float64).eps
MODES = ["zeros", "circular"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [2, 5, 8])
def test_upper_bounds_hold_and_are_not_far_off(kernel, mode, size, rounding):
    truth = reference_norm(Convolution(kernel, padding="same", padding_mode=mode), size)
    reshaped = reshaped_kernel_norm(kernel).item()
    taps = math.sqrt(math.prod(kernel.shape[2:]))
    assert truth * (1 - rounding) <= four_reshapes(kernel).item() <= taps * reshaped * (1 + rounding)
    frobenius = torch.linalg.vector_norm(kernel).item()
    factor = sampling_factor(tuple(kernel.shape[2:]), tuple(max(1, 16 * (k - 1)) for k in kernel.shape[2:]))
    assert truth * (1 - rounding) <= sampled_density(kernel).item() <= factor * taps * frobenius * (1 + rounding)


@pytest.mark.parametrize("mode", MODES)
def test_reshaped_kernel_is_a_lower_bound_where_a_window_fits(kernel, mode, rounding):
    size = tuple(kernel.shape[2:])
    truth = reference_norm(Convolution(kernel, padding="same", padding_mode=mode), size)
    assert reshaped_kernel_norm(kernel).item() <= truth * (1 + rounding)


def test_reshaped_kernel_is_no_bound_for_small_inputs():
    kernel = torch.tensor([[[1.0, 0.0, -1.0]]])
    assert reference_norm(Convolution(kernel, padding="same", padding_mode="circular"), 2) == 0
    assert reshaped_kernel_norm(kernel).item() == pytest.approx(math.sqrt(2), rel=4 * torch.finfo(torch.float32).eps)


def test_reshaped_kernel_is_what_torch_divides_by(generator):
    layer = torch.nn.Conv2d(3, 4, 3, dtype=torch.float64)
    weight = layer.weight.detach().clone()
    torch.nn.utils.parametrizations.spectral_norm(layer, n_power_iterations=500)
    ratio = (weight / layer.weight.detach()).mean().item()
    assert reshaped_kernel_norm(weight).item() == pytest.approx(ratio, rel=math.sqrt(EPS))


def test_reshaped_kernel_misses_the_norm_of_ones():
    kernel = torch.ones(1, 1, 3, 3)
    truth = reference_norm(Convolution(kernel, padding="same"), 16)
    assert round(truth / reshaped_kernel_norm(kernel).item(), 2) == 2.93


def test_four_reshapes_takes_the_best_of_them():
    # The identity between output channels and taps: of norm 1 as that matrix, of norm √3 as one long column.
    rows = torch.eye(3, dtype=torch.float64).reshape(3, 1, 3)
    assert reshaped_kernel_norm(rows).item() == pytest.approx(1, rel=8 * EPS)
    assert four_reshapes(rows).item() == pytest.approx(math.sqrt(3), rel=8 * EPS)
    columns = rows.transpose(0, 1)
    assert reshaped_kernel_norm(columns).item() == pytest.approx(math.sqrt(3), rel=8 * EPS)
    assert four_reshapes(columns).item() == pytest.approx(math.sqrt(3), rel=8 * EPS)


def test_sampled_density_of_one_channel_is_the_grid_without_its_end_point(generator):
    kernel = torch.randn(1, 1, 3, 3, generator=generator, dtype=torch.float64)
    expected = frequency_svd(kernel, (7, 5)).item() * sampling_factor((3, 3), (7, 5))
    assert sampled_density(kernel, (7, 5)).item() == pytest.approx(expected, rel=64 * EPS)


def test_sampled_density_of_the_coarsest_grid_is_a_bound():
    e = torch.tensor([2.0, -1.0, 2.0], dtype=torch.float64) / 3
    kernel = torch.outer(e, e)[None, None]
    assert sampled_density(kernel, 3).item() >= 25 / 9


def test_sampled_density_takes_the_smaller_side(generator):
    kernel = torch.randn(1, 5, 3, generator=generator, dtype=torch.float64)
    one, other = sampled_density(kernel).item(), sampled_density(kernel.transpose(0, 1)).item()
    assert one == pytest.approx(other, rel=64 * EPS)


def test_tensor_norm_of_a_rank_one_kernel(generator, dtype):
    vectors = [torch.randn(size, generator=generator, dtype=dtype) for size in (3, 2, 4, 3)]
    kernel = torch.einsum("o,i,a,b->oiab", *vectors)
    expected = math.sqrt(12) * math.prod(vector.norm().item() for vector in vectors)
    value = tensor_norm(kernel, generator=generator).item()
    assert value == pytest.approx(expected, rel=64 * torch.finfo(dtype).eps)


def test_tensor_norm_needs_complex_vectors(generator):
    reflections = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [-1.0, 0.0]]], dtype=torch.float64)
    # Every real combination cos·K0 + sin·K1 of the two taps is orthogonal; K0 - iK1 has norm 2, at frequency π/2.
    assert frequency_svd(reflections, 4).item() == pytest.approx(2, rel=64 * EPS)
    value = tensor_norm(reflections, 200, 8, generator).item()
    assert value == pytest.approx(2, rel=math.sqrt(EPS))


def test_tensor_norm_comes_near_an_upper_bound(kernel, generator):
    grid = [32 * (k > 1) + (k == 1) for k in kernel.shape[2:]]
    value = tensor_norm(kernel, 300, 16, generator).item()
    slack = 1 + math.sqrt(torch.finfo(kernel.dtype).eps)
    assert frequency_svd(kernel, grid).item() <= value * slack
    assert value <= four_reshapes(kernel).item() * slack


def test_tensor_norm_grows_with_its_iterations(generator):
    kernel = torch.randn(4, 4, 3, 3, generator=generator, dtype=torch.float64)
    values = [tensor_norm(kernel, t, generator=torch.Generator().manual_seed(1)).item() for t in (1, 4, 16)]
    assert values == sorted(values)


@pytest.mark.parametrize("method", [reshaped_kernel_norm, four_reshapes, sampled_density, tensor_norm])
@pytest.mark.parametrize("shape", [(2, 3, 3), (2, 3, 1, 4), (1, 2, 3, 2, 2)])
def test_zero_kernel(method, shape, dtype):
    value = method(torch.zeros(shape, dtype=dtype))
    assert value == 0
    assert value.dtype == dtype


@pytest.mark.parametrize("method", [reshaped_kernel_norm, four_reshapes, sampled_density, tensor_norm])
@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_scale_does_not_matter(method, factor):
    value = method(torch.full((1, 1, 1, 1), factor)).item() / factor
    assert value == pytest.approx(1, rel=8 * torch.finfo(torch.float32).eps)
