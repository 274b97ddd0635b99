"""Weights of any size as exact float64 numbers of moderate size."""

import pytest
import torch

from gramcert import Convolution, singular_values, spectral_norm

EPS = torch.finfo(torch.float64).eps


@pytest.mark.parametrize("places", [30, 100, 200])
def test_weights_far_below_one_that_is_never_read(places):
    """The large tap reads padding only; scaling by it would flush all the others to zero."""
    kernel = torch.full((1, 1, places + 1), 2.0**-74 * 0.99, dtype=torch.float64)
    kernel[0, 0, 0] = 2.0**1000
    layer = Convolution(kernel, padding=((1, 0),))
    truth = places**0.5 * 0.99 * 2.0**-74
    norm = spectral_norm(layer, places, tol=1e-9)
    assert norm.lower <= truth * (1 + 4 * EPS)
    assert truth * (1 - 4 * EPS) <= norm.upper
    assert norm.tol_reached
    spectrum = singular_values(layer, places)
    assert abs(spectrum.values[0] - truth) <= spectrum.error <= 1e-9 * truth


@pytest.mark.parametrize("small", [1e-155, 1e-200, 1e-300])
def test_only_tiny_weights_are_read(small):
    layer = Convolution(torch.tensor([[[1.0, 1.0, small]]], dtype=torch.float64), padding=((2, 0),))
    norm = spectral_norm(layer, 1, tol=1e-6)
    assert norm.tol_reached
    assert norm.lower <= small <= norm.upper
