import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import layers
from gramcert import Convolution
from gramcert.certified import banded
from gramcert.certified.banded import BandedGram, smaller_grams
from gramcert.certified.tapwise import dense_matrix
from gramcert.certified.work import OutOfBudgetError, Work
from gramcert.geometry.axis import layer_axes
from gramcert.geometry.reduction import grouped_kernels
from reference import dense_norm, sigma

EPS = torch.finfo(torch.float64).eps


def work():
    return Work(2**31, None)


@pytest.mark.parametrize(("panel", "rows"), [(banded.SMALLEST_PANEL, banded.ROWS), (1, 3), (7, 2)])
@given(layers(), st.sampled_from(["input", "output"]))
def test_the_proof_succeeds_just_above_the_norm_and_fails_just_below(panel, rows, case, side):
    layer, size = case
    norm = dense_norm(layer, size).item()
    if norm <= 1e-6:
        return
    axes = layer_axes(layer, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(banded, "SMALLEST_PANEL", panel)
        patch.setattr(banded, "ROWS", rows)
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


@given(layers())
def test_no_level_above_the_smallest_eigenvalue_is_proved(case):
    layer, size = case
    axes = layer_axes(layer, size)
    for side in ("input", "output"):
        for kernel in grouped_kernels(layer):
            gram = BandedGram(kernel, axes, side)
            dense = gram.dense()
            largest = float(dense.diagonal().max())
            assert largest <= gram._largest_square
            least = float(torch.linalg.eigvalsh(dense)[0])
            doubt = 1e-14 * largest * len(dense) + 1e-300
            assert not any(gram.proves_above(factor * max(least, 0.0) + doubt, work()) for factor in (1, 1.1, 4))
            if least > 1e-6 * largest:
                assert gram.proves_above(0.99 * least, work())


def test_repeated_pixels_are_in_the_bound_of_the_diagonal():
    layer = Convolution(torch.ones(1, 1, 3, dtype=torch.float64), padding=2, padding_mode="replicate")
    gram = BandedGram(layer.kernel, layer_axes(layer, (1,)), "input")
    assert float(gram.dense()[0, 0]) == 27 <= gram._largest_square


def test_the_rounding_of_singular_matrices_is_counted():
    """Two rows that are multiples of each other: without the error a factor of TTᵀ - 1e-18 exists now and then."""
    generator, lucky = torch.Generator().manual_seed(0), 0
    axes = layer_axes(Convolution(torch.ones(1, 1, 2)), (4,))
    for _ in range(300):
        kernel = torch.randn(2, 2, 2, generator=generator, dtype=torch.float64)
        kernel[1] = 0.37 * kernel[0]
        gram = BandedGram(kernel / kernel.abs().max(), axes, "output")
        assert not gram.proves_above(1e-18, work())
        lucky += gram._factorise(-1, 1e-18, work()) is not None
    assert lucky


@pytest.mark.parametrize("side", ["input", "output"])
def test_the_inverse_is_one(side):
    generator = torch.Generator().manual_seed(0)
    channels, mode = ((2, 3), "zeros") if side == "input" else ((3, 2), "reflect")
    kernel = torch.randn(*channels[::-1], 3, 2, generator=generator, dtype=torch.float64)
    layer = Convolution(kernel, padding=1, padding_mode=mode)
    matrix = layer.to_dense((5, 6))
    whole = matrix.T @ matrix if side == "input" else matrix @ matrix.T
    shape = (layer.in_channels, 5, 6) if side == "input" else (layer.out_channels, *layer.output_size((5, 6)))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    solve = BandedGram(kernel, layer_axes(layer, (5, 6)), side).inverse(work())
    assert torch.linalg.eigvalsh(whole)[0] > 1e-4
    assert torch.allclose(solve((whole @ x.flatten()).reshape(shape)), x, atol=1e-8)
