"""One input size: every method on its own, and which of them are tried on large inputs."""

import math

import pytest
import torch
from torch import nn

from gramcert import Convolution, spectral_norm
from gramcert.certified import one_size
from gramcert.certified.dense import DenseGram
from gramcert.certified.lifted import LiftedLayer
from gramcert.certified.tapwise import dense_matrix
from gramcert.certified.work import Work
from gramcert.geometry.axis import layer_axes
from reference import dense_norm, sigma, supremum

EPS = torch.finfo(torch.float64).eps


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
            truth = dense_norm(layer, (7, 6)).item()
            norm = spectral_norm(layer, (7, 6), tol=1e-6)
            assert norm.lower <= truth * (1 + 50 * EPS)
            assert truth * (1 - 50 * EPS) <= norm.upper <= 10 * truth


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
def test_large_inputs_are_bounded_by_every_size(layer, size):
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
    assert norm.lower < norm.upper <= 4 * float(supremum(layer.weight.detach()))


def test_what_the_embedding_gives_is_not_left_out_when_the_band_is_too_large():
    layer = Convolution(torch.randn(8, 8, 3, 3, generator=torch.Generator().manual_seed(0)), padding=1)
    coarse = spectral_norm(layer, 40, tol=1e-3, max_bytes=2**23)
    fine = spectral_norm(layer, 40, tol=1e-7, max_bytes=2**23)
    assert "max_bytes" in fine.explain()
    assert fine.upper <= coarse.upper < math.inf


def test_as_many_taps_as_places_make_no_band():
    """The matrix itself is factorised, beyond the order up to which that is done at once."""
    layer = Convolution(torch.randn(2, 2, 29, 29, generator=torch.Generator().manual_seed(0)), padding=14)
    lifted = LiftedLayer.of(layer, layer_axes(layer, (29, 29)))
    search = one_size.OneSize(lifted, 1e-3, Work(2**31, None))
    assert search._is_dense
    assert not search._is_small
    search._lanczos()
    search._proof()
    assert search.method == one_size.DENSE
    truth = sigma(dense_matrix(lifted.kernels[0], lifted.axes)).item()
    assert search.lower <= truth * (1 + 1e-13)
    assert truth * (1 - 1e-13) <= search.upper <= search.lower / (1 - 1e-3)


@pytest.mark.parametrize("taps", [3, 7])
def test_few_taps_make_a_band(taps):
    layer = Convolution(torch.randn(4, 4, taps, taps), padding=taps // 2)
    search = one_size.OneSize(LiftedLayer.of(layer, layer_axes(layer, (32, 32))), 1e-3, Work(2**31, None))
    assert not search._is_dense
