import dataclasses
import math

import pytest
import torch

from gramcert import Convolution
from gramcert.baselines import power_iteration, reference_norm

EPS = torch.finfo(torch.float64).eps


def layers(generator):
    def kernel(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [
        Convolution(kernel(3, 2, 4), padding="same"),
        Convolution(kernel(2, 3, 3, 2), stride=2, padding=1, padding_mode="circular"),
        Convolution(kernel(4, 2, 3, 3), dilation=2, padding=2, groups=2),
        Convolution(kernel(3, 2, 3, 3), stride=2, transposed=True, output_padding=1),
        Convolution(kernel(2, 2, 3, 1, 2), padding="same", padding_mode="replicate"),
    ]


def test_a_lower_bound_that_comes_close(generator):
    for layer in layers(generator):
        truth = reference_norm(layer, 5)
        few = power_iteration(layer, 5, 3, generator).item()
        many = power_iteration(layer, 5, 2000, generator).item()
        assert few <= truth * (1 + 64 * EPS)
        assert truth * (1 - math.sqrt(EPS)) <= many <= truth * (1 + 64 * EPS)


def test_start_is_not_orthogonal_to_the_answer(dtype, generator):
    layer = Convolution(torch.tensor([[[1.0], [-1.0]]], dtype=dtype))
    for _ in range(5):
        value = power_iteration(layer, 4, generator=generator).item()
        assert value == pytest.approx(math.sqrt(2), rel=16 * torch.finfo(dtype).eps)


def test_uses_the_padding_of_the_layer(generator):
    layer = Convolution(torch.ones(1, 1, 5, 5, dtype=torch.float64), padding=2)
    narrow = dataclasses.replace(layer, padding=1)
    value = power_iteration(layer, 8, 500, generator).item()
    assert value == pytest.approx(reference_norm(layer, 8), rel=64 * EPS)
    assert value > reference_norm(narrow, 8)


def test_zero_kernel(dtype):
    assert power_iteration(Convolution(torch.zeros(2, 2, 3, dtype=dtype)), 4) == 0


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_scale_does_not_matter(factor, generator):
    layer = Convolution(torch.full((1, 1, 1), factor))
    assert power_iteration(layer, 4, generator=generator).item() / factor == pytest.approx(
        1, rel=8 * torch.finfo(torch.float32).eps
    )


def test_zero_iterations_measure_the_start(generator):
    layer = Convolution(torch.full((1, 1, 1), 3.0, dtype=torch.float64))
    assert power_iteration(layer, 4, 0, generator).item() == pytest.approx(3, rel=8 * EPS)


def test_parametrised_layers_and_gradients_are_left_alone():
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(2, 2, 3))
    assert not power_iteration(layer, 4, 2).requires_grad
