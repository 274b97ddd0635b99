"""Cases in which an earlier version was wrong, slow or silent."""

import pytest
import torch
from torch import nn

from gramcert import (
    Convolution,
    gram_norm,
    norm2_circ,
    norm2_sampled,
    norm2_toep,
    singular_values,
    spectral_norm,
)
from gramcert.certified import one_size
from gramcert.certified.banded import BandedGram
from gramcert.certified.dense import DenseGram
from gramcert.geometry.axis import layer_axes
from gramcert.rescaling import rescaling_vector

EPS = 100 * torch.finfo(torch.float64).eps


@pytest.mark.parametrize("places", [30, 100, 200])
def test_weights_far_below_one_that_is_never_read(places):
    """The large tap reads padding only; scaling by it would flush all the others to zero."""
    kernel = torch.full((1, 1, places + 1), 2.0**-74 * 0.99, dtype=torch.float64)
    kernel[0, 0, 0] = 2.0**1000
    layer = Convolution(kernel, padding=((1, 0),))
    truth = places**0.5 * 0.99 * 2.0**-74
    norm = spectral_norm(layer, places, tol=1e-9)
    assert norm.lower <= truth * (1 + 1e-15)
    assert truth * (1 - 1e-15) <= norm.upper
    assert norm.tol_reached
    spectrum = singular_values(layer, places)
    assert abs(spectrum.values[0] - truth) <= spectrum.error <= 1e-9 * truth


@pytest.mark.parametrize("small", [1e-155, 1e-200, 1e-300])
def test_only_tiny_weights_are_read(small):
    layer = Convolution(torch.tensor([[[1.0, 1.0, small]]], dtype=torch.float64), padding=((2, 0),))
    norm = spectral_norm(layer, 1, tol=1e-6)
    assert norm.tol_reached
    assert norm.lower <= small <= norm.upper


def test_singular_values_that_overflow_have_no_finite_error():
    layer = Convolution(torch.full((1, 1, 2), 1.7e308, dtype=torch.float64), padding=1)
    assert singular_values(layer, 4).error == torch.inf


@pytest.mark.parametrize("mode", ["zeros", "circular", "replicate"])
def test_zero_layers_of_every_mode(mode):
    spectrum = singular_values(Convolution(torch.zeros(1, 2, 3, 3), padding=1, padding_mode=mode), 4)
    assert spectrum.values.tolist() == [0.0] * 16
    assert spectrum.error == 0
    dilated = Convolution(torch.zeros(1, 1, 2), dilation=3)
    assert singular_values(dilated, 4).values.tolist() == [0.0]


@pytest.mark.parametrize("k", [None, 2])
def test_complex_matrices_have_each_singular_value_once(k):
    matrix = torch.randn(5, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    spectrum = singular_values(matrix, k=k)
    truth = torch.linalg.svdvals(matrix)[:k]
    assert spectrum.values.shape == truth.shape
    assert (spectrum.values - truth).abs().max() <= spectrum.error + 1e-14


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_the_dense_gram_matrix_is_symmetric(mode):
    kernel = torch.randn(3, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layer = Convolution(kernel, padding=3, padding_mode=mode)
    matrix = BandedGram(kernel, layer_axes(layer, (5, 5)), "input").dense()
    assert torch.equal(matrix, matrix.T)
    torch.testing.assert_close(
        torch.linalg.eigvalsh(matrix)[-1].sqrt(), torch.linalg.matrix_norm(layer.to_dense((5, 5)), 2)
    )


@pytest.mark.parametrize("method", ["_embedding", "_all_frequencies", "_proof", "band"])
def test_each_method_alone(method, monkeypatch):
    """Small layers are proved by the band, so the other methods would rarely be reached."""

    def run(self):
        self._attempt("lanczos", self._lanczos)
        self._attempt(method, getattr(self, "_proof" if method == "band" else method))

    if method == "band":
        monkeypatch.setattr(one_size, "SMALL_ORDER", 0)

    monkeypatch.setattr(one_size.OneSize, "run", run)
    generator = torch.Generator().manual_seed(4)
    for mode in ("zeros", "circular", "reflect", "replicate"):
        for stride, dilation in ((1, 1), (2, 1), (1, 2), (2, 2), (3, 2)):
            kernel = torch.randn(2, 2, 3, 2, dtype=torch.float64, generator=generator)
            layer = Convolution(kernel, stride, 2, mode, dilation)
            truth = torch.linalg.matrix_norm(layer.to_dense((7, 6)), 2).item()
            norm = spectral_norm(layer, (7, 6), tol=1e-6)
            assert norm.lower <= truth * (1 + 1e-14)
            assert truth * (1 - 1e-14) <= norm.upper <= 10 * truth


def test_a_contradiction_is_never_returned(monkeypatch):
    monkeypatch.setattr(DenseGram, "proves_below", lambda *_: True)
    monkeypatch.setattr(one_size, "largest_upper", lambda lower, tol: 0.5 * lower)
    with pytest.raises(ArithmeticError, match="please report this"):
        spectral_norm(Convolution(torch.ones(1, 1, 3), padding=1), 8)


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv1d(1, 8, 9, padding=4), 160_000),
        (nn.Conv2d(2, 3, 3, padding=1), 10**6),
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), 10**6),
        (nn.Conv2d(1, 2, 3, stride=2, padding=1), 4096),
    ],
)
def test_large_inputs_take_no_longer_than_every_size(layer, size):
    """The supremum is within the tolerance; a plane wave on a part of the input shows it."""
    norm = spectral_norm(layer, size, tol=1e-3)
    assert norm.tol_reached, norm.explain()
    assert norm.lower <= spectral_norm(layer, tol=1e-3).upper


def test_large_inputs_heed_the_limits(clock):
    layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect")
    norm = spectral_norm(layer, 3000, max_seconds=5, max_bytes=2**27)
    assert "max_seconds=5" in norm.explain()
    assert clock.looks < 20  # when it is over, what else there is to try is not begun
    assert not norm.tol_reached
    assert norm.lower < norm.upper


def test_what_the_embedding_gives_is_not_left_out_when_the_band_is_too_large():
    layer = Convolution(torch.randn(8, 8, 3, 3, generator=torch.Generator().manual_seed(0)), padding=1)
    coarse = spectral_norm(layer, 40, tol=1e-3, max_bytes=2**23)
    fine = spectral_norm(layer, 40, tol=1e-7, max_bytes=2**23)
    assert "max_bytes" in fine.explain()
    assert fine.upper <= coarse.upper


def test_large_square_matrices_fit_into_the_default_memory():
    assert spectral_norm(nn.Linear(3600, 3600, bias=False), tol=1e-2).tol_reached


def test_matrices_beyond_the_memory_still_get_a_good_lower_bound():
    matrix = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    norm = spectral_norm(matrix, max_bytes=5 * 8 * matrix.numel())
    assert not norm.tol_reached
    truth = torch.linalg.matrix_norm(matrix.double(), 2).item()
    assert 0.99 * truth <= norm.lower <= truth <= norm.upper


def test_hopeless_tolerances_are_given_up_early(clock):
    layer = Convolution(torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(0)))
    norm = spectral_norm(layer, tol=1e-17, max_seconds=1e9)
    assert clock.looks < 200  # one or two for each batch of frequencies
    assert not norm.tol_reached
    assert "rounding" in norm.explain()


def test_sizes_beyond_reason_are_refused():
    with pytest.raises(ValueError, match=r"spectral_norm\(input_size=.*expected sizes up to 2147483647"):
        spectral_norm(nn.Conv2d(1, 1, 3), 10**30)


HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


@HALF
def test_half_precision_is_taken_exactly(dtype):
    """Layers, kernels and matrices alike: widened without rounding, then enclosed like any other (finite)."""
    for layer, given in ((nn.Conv2d(2, 3, 3), Convolution), (nn.Linear(5, 7), lambda weight: weight)):
        weight = layer.to(dtype).weight.detach()
        norms = [spectral_norm(thing) for thing in (layer, given(weight), given(weight.float()))]
        assert len({(norm.lower, norm.upper) for norm in norms}) == 1
    truth = torch.linalg.svdvals(weight.double())
    assert norms[0].lower <= float(truth[0]) * (1 + EPS) <= norms[0].upper * (1 + 2 * EPS) <= 1.002 * float(truth[0])
    found = singular_values(weight)
    assert bool(((found.values - truth).abs() <= found.error + EPS * truth[0]).all())
    assert found.error < 1e-9


@HALF
def test_bounds_of_half_precision_are_not_computed_in_it(dtype):
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    truth = float(torch.linalg.matrix_norm(weight.double(), 2))
    rounding = float(torch.finfo(torch.float32).eps) * 100
    kernel = weight[:, :, None]
    bounds = [gram_norm(weight), norm2_circ(kernel, 3), norm2_toep(kernel), norm2_sampled(kernel, 3)]
    for bound in bounds:
        assert bound.dtype == torch.float32
        assert truth * (1 - rounding) <= float(bound) <= 1.05 * truth
    factors = rescaling_vector(weight)
    assert factors.dtype == torch.float32
    assert 0.5 < float(torch.linalg.matrix_norm(weight.float() * factors, 2)) <= 1 + rounding
