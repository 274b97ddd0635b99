import re

import hypothesis
import pytest
import torch
from hypothesis import given
from torch import nn

from cases import layers
from gramcert import Convolution, norm2, polar_step, spectral_norm
from gramcert.projecting.polar import polar

few = hypothesis.settings(max_examples=max(25, hypothesis.settings().max_examples // 4))


@few
@given(layers())
def test_of_any_layer_the_norm_is_bounded_and_the_step_a_descent(drawn):
    layer, sizes = drawn
    gradient = layer.kernel
    step = polar_step(layer, gradient, norm=0.3)
    assert step.shape == gradient.shape
    if not float(gradient.norm()):
        assert not float(step.norm())
        return
    assert float((gradient * step).sum()) > 0
    # bounds of float64 in exact arithmetic
    assert spectral_norm(layer.with_kernel(step), tol=1e-6).lower <= 0.3 * (1 + 1e-9)
    one_size = polar_step(layer, gradient, norm=0.3, input_size=sizes)
    assert spectral_norm(layer.with_kernel(one_size), sizes, tol=1e-6).lower <= 0.3 * (1 + 1e-9)


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"groups": 2}, {"dilation": 2}], ids=str)
def test_the_norm_is_nearly_what_was_asked_for(options):
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 16, 3, padding=1, **options)
    gradient = torch.randn_like(layer.weight)
    step = polar_step(layer, gradient, iterations=8)
    description = Convolution.of(layer).with_kernel(step)
    assert float(norm2(description, iterations=8)) == pytest.approx(1, rel=1e-5)
    assert spectral_norm(description).lower > 0.95
    quick = polar_step(layer, gradient)
    assert 0.9 < spectral_norm(description.with_kernel(quick)).lower < 1


def test_groups_are_steps_of_their_own():
    torch.manual_seed(0)
    gradient = torch.randn(4, 2, 3)
    together = polar_step(Convolution(gradient, groups=2), gradient)
    apart = torch.cat([polar_step(part, part) for part in gradient.chunk(2)])
    alignment = torch.nn.functional.cosine_similarity(together.reshape(2, -1), apart.reshape(2, -1))
    assert alignment.min() > 0.99999


def test_of_a_matrix_it_is_the_polar_factor():
    torch.manual_seed(0)
    for shape in ((5, 3), (3, 5)):
        matrix = torch.randn(shape, dtype=torch.float64)
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        assert float(values.min() / values.norm()) > 0.03
        found = polar_step(matrix, matrix, norm=2, iterations=20)
        torch.testing.assert_close(found, 2 * left @ right, rtol=0, atol=0.01)
        torch.testing.assert_close(polar_step(nn.Linear(*shape[::-1]), matrix, norm=2, iterations=20), found)


def test_the_gain_is_larger_than_that_of_the_flattened_factor():
    torch.manual_seed(0)
    gradient = torch.randn(16, 16, 3, 3)
    flattened = polar(gradient.flatten(1).T, 5).T.reshape(gradient.shape)
    gains = []
    for step in (polar_step(gradient, gradient), flattened):
        norm = spectral_norm(Convolution(step))
        gains.append(float((gradient * step).sum()) / norm.upper)
    assert norm > 1.6
    assert gains[0] > 1.1 * gains[1]


def test_the_quintic_settles():
    torch.manual_seed(0)
    matrices = torch.randn(4, 6, 6, dtype=torch.complex128)
    left, _, right = torch.linalg.svd(matrices)
    torch.testing.assert_close(polar(matrices, 12), left @ right, rtol=0, atol=1e-2)
    assert not polar(torch.zeros(2, 3, 3), 5).any()


@pytest.mark.parametrize("size", [2.0**-100, 2.0**100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_direction_of_the_gradient_counts(size, dtype):
    torch.manual_seed(0)
    gradient = torch.randn(4, 4, 3).to(dtype)
    step, other = polar_step(gradient, gradient), polar_step(gradient, gradient * size)
    assert other.dtype == dtype
    torch.testing.assert_close(other, step, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


KERNEL = torch.ones(2, 2, 3)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((KERNEL, None), {}, "polar_step(gradient): expected a torch.Tensor, got NoneType"),
        ((KERNEL, KERNEL[0]), {}, "polar_step(gradient): expected the weights' shape (2, 2, 3), got (2, 3)"),
        ((KERNEL, KERNEL.long()), {}, "polar_step(gradient): expected a real floating-point tensor, got torch.int64"),
        ((KERNEL, KERNEL / 0), {}, "polar_step(gradient): expected finite values, got 12 NaN or infinite of 12"),
        ((KERNEL, KERNEL), {"norm": 0}, "polar_step(norm=0): expected a positive finite number"),
        ((KERNEL, KERNEL), {"steps": 0}, "polar_step(steps=0): expected at least 1"),
        ((KERNEL, KERNEL), {"iterations": -1}, "polar_step(iterations=-1): expected at least 0"),
        ((KERNEL, KERNEL), {"input_size": (3, 3)}, "polar_step(input_size=(3, 3)): the kernel needs 1 sizes, got 2"),
        ((torch.eye(2), torch.eye(2)), {"input_size": 3}, "polar_step(input_size=3): Tensor has no spatial size"),
        ((nn.ReLU(), KERNEL), {}, "polar_step(layer): cannot step along ReLU"),
    ],
    ids=str,
)
def test_what_is_refused(arguments, options, message):
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
        polar_step(*arguments, **options)
