import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import layers
from gramcert import Convolution
from gramcert.certified.banded import BandedGram, smaller_grams
from gramcert.certified.tapwise import dense_matrix
from gramcert.certified.work import OutOfBudgetError, Work
from gramcert.geometry.axis import layer_axes
from gramcert.geometry.reduction import grouped_kernels
from reference import dense_norm, sigma

EPS = torch.finfo(torch.float64).eps


def work():
    return Work(2**31, None)


@given(layers(), st.sampled_from(["input", "output"]))
def test_the_proof_succeeds_just_above_the_norm_and_fails_just_below(case, side):
    layer, size = case
    norm = dense_norm(layer, size).item()
    if norm <= 1e-6:
        return
    axes = layer_axes(layer, size)
    grams = [BandedGram(kernel, axes, side) for kernel in grouped_kernels(layer)]
    assert all(gram.proves_below(norm**2 * (1 + 1e-9), work()) for gram in grams)
    assert not all(gram.proves_below(norm**2 * (1 - 5e3 * EPS), work()) for gram in grams)


@given(layers())
def test_the_matrix_is_the_layers(case):
    layer, size = case
    axes = layer_axes(layer, size)
    for kernel in grouped_kernels(layer):
        norm = sigma(dense_matrix(kernel, axes)).item()
        for gram in (BandedGram(kernel, axes, "input"), BandedGram(kernel, axes, "output")):
            if norm > 1e-6:
                assert gram.proves_below(norm**2 * (1 + 1e-9), work())
                assert not gram.proves_below(norm**2 * (1 - 5e3 * EPS), work())


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_the_dense_gram_matrix_is_symmetric(mode):
    kernel = torch.randn(3, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layer = Convolution(kernel, padding=3, padding_mode=mode)
    matrix = BandedGram(kernel, layer_axes(layer, (5, 5)), "input").dense()
    assert torch.equal(matrix, matrix.T)
    torch.testing.assert_close(torch.linalg.eigvalsh(matrix)[-1].sqrt(), dense_norm(layer, (5, 5)))


def test_every_panel_is_factorised_where_positions_do_not_meet():
    """Nothing couples the outer positions, and only the last one is large."""
    kernel = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    layer = Convolution(kernel, stride=(4, 1))
    gram = BandedGram(kernel, layer_axes(layer, (400, 70)), "output")
    assert gram.bandwidth == 0
    assert gram.positions > gram.panel
    assert gram.proves_below(1 + 1e-9, work())
    assert not gram.proves_below(1 - 1e-9, work())


@pytest.mark.parametrize(
    ("arguments", "size", "bandwidth"),
    [
        ({"padding": 1}, 40, 2),
        ({"padding": 2, "dilation": 2}, 40, 2),  # residue classes do not meet
        ({"padding": 1, "padding_mode": "circular"}, 40, 4),  # folded
        ({"padding": 1, "padding_mode": "reflect"}, 40, 2),
        ({"padding": 1, "stride": 2}, 40, 2),
    ],
)
def test_bandwidths_are_small(arguments, size, bandwidth):
    layer = Convolution(torch.ones(1, 1, 3, dtype=torch.float64), **arguments)
    assert BandedGram(layer.kernel, layer_axes(layer, (size,)), "input").bandwidth <= bandwidth


def test_the_smaller_side_is_taken():
    kernel = torch.ones(1, 8, 3, 3, dtype=torch.float64)
    axes = layer_axes(Convolution(kernel, padding=1), (9, 9))
    assert smaller_grams(kernel[None], axes)[0].channels == 1
    assert smaller_grams(kernel.transpose(0, 1)[None], axes)[0].channels == 1


def test_long_axes_are_the_outer_ones():
    kernel = torch.ones(2, 2, 3, 3, dtype=torch.float64)
    axes = layer_axes(Convolution(kernel, padding=1), (4, 60))
    assert BandedGram(kernel, axes, "input").block == 8


def test_time_is_looked_at():
    kernel = torch.ones(2, 2, 3, 3, dtype=torch.float64)
    gram = BandedGram(kernel, layer_axes(Convolution(kernel, padding=1), (9, 9)), "input")
    with pytest.raises(OutOfBudgetError, match="max_seconds=0 is over"):
        gram.proves_below(1000.0, Work(2**31, 0))
