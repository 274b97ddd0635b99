import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from cases import kernels
from gramcert import Convolution, norm2_circ, norm2_sampled, sampling_factor
from gramcert.bounds.transfer import theorem_5_as_printed, theorem_5_corrected
from reference import circulant_norm, dense_norm, supremum

EPS = torch.finfo(torch.float64).eps


@given(kernels(), st.integers(0, 6), st.integers(0, 4))
def test_one_grid_bounds_every_size_and_both_paddings(drawn, extra, iterations):
    kernel, sizes = drawn
    taps = kernel.shape[2:]
    grid = tuple(k + extra for k in taps)
    bound = norm2_sampled(kernel, grid, iterations) * (1 + 100 * EPS)
    assert circulant_norm(kernel, sizes) <= bound
    assert dense_norm(Convolution(kernel, padding=tuple((k - 1, k - 1) for k in taps)), sizes) <= bound
    assert supremum(kernel, 64 if len(taps) < 3 else 24) <= bound


@given(kernels(), st.integers(0, 3), st.integers(1, 9))
def test_corrected_theorem_holds(drawn, iterations, extra):
    kernel, sizes = drawn
    taps = kernel.shape[2:]
    grid = tuple(2 ** (iterations + 1) * (k - 1) + extra for k in taps)
    corrected = theorem_5_corrected(kernel, grid, iterations) * (1 + 100 * EPS)
    assert circulant_norm(kernel, sizes) <= corrected
    assert supremum(kernel, 64 if len(taps) < 3 else 24) <= corrected


def test_fine_grids_close():
    kernel = torch.randn(3, 3, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sup = float(norm2_circ(kernel, 256, 12))
    assert sup <= float(norm2_sampled(kernel, 64, 12)) <= 1.003 * sup


@pytest.mark.parametrize(
    ("kernel_size", "grid_size", "factor"),
    [
        (3, 32, 1 / math.cos(math.pi / 32)),
        ((3, 3), (32, 32), 1.0097005565),
        (
            (3, 5),
            (4, 5),
            math.sqrt(2) * math.sqrt(5),
        ),  # at n0 = 2k-2 the constants are equal, below it the root is less
        (2, 3, 1 / math.cos(math.pi / 6)),
        ((1, 1, 1), (1, 1, 1), 1.0),
    ],
)
def test_factor(kernel_size, grid_size, factor):
    assert sampling_factor(kernel_size, grid_size) == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("taps", [2, 3, 5])
def test_cosine_factor_is_sharp(taps):
    """cos(d(ω - π/n)) with 2d dividing n is as far between the samples as the factor allows."""
    degree = (taps - 1) / 2
    grid = 4 * (taps - 1)
    phase = math.pi * degree / grid
    fine = max(abs(math.cos(degree * x * 1e-3 - phase)) for x in range(7000))
    samples = max(abs(math.cos(degree * 2 * math.pi * j / grid - phase)) for j in range(2 * grid))
    assert fine / samples == pytest.approx(sampling_factor(taps, grid), rel=1e-5)


def test_printed_theorem_fails_where_the_errata_say():
    """Pitfalls: [-1,1,-1]⊗[-1,1,-1] at t = 1, n0 = 5; e⊗e with e = (2,-1,2)/3 at n0 = 3."""
    row = torch.tensor([-1.0, 1.0, -1.0], dtype=torch.float64)
    kernel = torch.outer(row, row)[None, None]
    assert float(circulant_norm(kernel, (2, 2))) == pytest.approx(9)
    assert float(theorem_5_as_printed(kernel, 5, 0)) == pytest.approx(8.85, abs=5e-3)
    assert float(theorem_5_corrected(kernel, 5, 0)) >= 9
    assert float(norm2_sampled(kernel, 5, 0)) >= 9
    row = torch.tensor([2.0, -1.0, 2.0], dtype=torch.float64) / 3
    kernel = torch.outer(row, row)[None, None]
    assert float(theorem_5_as_printed(kernel, 3, 0)) == pytest.approx(1.732, abs=5e-4)
    assert float(norm2_sampled(kernel, 3, 0)) >= 25 / 9


def test_gradient():
    kernel = torch.randn(2, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda k: norm2_sampled(k, (4, 6), 3), kernel)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sampling_factor(3, 2), ValueError, r"expected at least 3 frequencies for 3 taps, got 2"),
        (lambda: sampling_factor((3, 3), 8), ValueError, r"an int is one axis, kernel_size=\(3, 3\) has 2"),
        (lambda: sampling_factor((3, 3), (8,)), ValueError, "needs 2 sizes, got 1"),
        (
            lambda: sampling_factor(0, 4),
            ValueError,
            r"sampling_factor\(kernel_size=\(0,\)\): expected sizes of at least 1",
        ),
        (lambda: sampling_factor(3, 4.0), TypeError, r"sampling_factor\(grid_size\): expected an int"),
        (lambda: norm2_sampled(torch.ones(1, 1, 3, 3), 2), ValueError, r"expected at least the kernel size \(3, 3\)"),
        (lambda: norm2_sampled(torch.ones(1, 1, 3), 4, -1), ValueError, r"norm2_sampled\(iterations=-1\)"),
        (
            lambda: norm2_sampled(torch.full((1, 1, 3), math.nan), 4),
            ValueError,
            r"norm2_sampled\(kernel\): expected finite",
        ),
        (lambda: theorem_5_as_printed(torch.ones(1, 1, 3, 3), 32, 6), ValueError, "the theorem needs at least 129"),
        (
            lambda: theorem_5_corrected(torch.ones(1, 1, 3, 3), 8, 1),
            ValueError,
            "expected more than 8 frequencies, got 8",
        ),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
