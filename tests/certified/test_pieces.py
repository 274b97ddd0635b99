"""Matrices are lifted to float64 piece by piece: any type, scale, memory order, and pieces of any size."""

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

from gramcert import Convolution, spectral_norm
from gramcert.certified import gram_symbol
from gramcert.certified.every_size import lower_norm
from gramcert.certified.gram_symbol import GramSymbol
from gramcert.certified.lifted import LiftedLayer
from gramcert.certified.work import Work
from gramcert.rounding import gamma, largest_exponent

EPS = torch.finfo(torch.float64).eps

SCALES = {
    torch.float16: [1.0, 1e-4, 1e3],
    torch.bfloat16: [1.0, 1e-38, 1e30],
    torch.float32: [1.0, 1e-38, 1e-40, 1e30],
    torch.float64: [1.0, 1e-300, 1e300],
}


def gauss(*shape, dtype=torch.float64, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def in_tiny_pieces(monkeypatch, entries, *, large=False):
    """Pieces of that many entries, symmetric products by halves, and perhaps matrices that are factorised once."""
    monkeypatch.setattr(gram_symbol, "PIECE", entries)
    monkeypatch.setattr("gramcert.bounds.symmetric.LEAST_ORDER", 8)
    if large:
        monkeypatch.setattr(gram_symbol, "FACTORISED_ONCE", 4)


def norm_by_svd(matrix, scale=0):
    """That of a dense decomposition times 2^scale, scaled by a power of two so that its squares stay in range."""
    exponent = largest_exponent(matrix)
    half = exponent // 2
    moderate = matrix.double() * 2.0**-half * 2.0 ** (half - exponent)
    return math.ldexp(torch.linalg.matrix_norm(moderate, 2).item(), exponent + scale)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("entries", [1, 500, 10**6])
@pytest.mark.parametrize("dtype", list(SCALES), ids=str)
def test_any_type_scale_and_order_in_memory(dtype, entries, large, monkeypatch):
    in_tiny_pieces(monkeypatch, entries, large=large)
    for scale in SCALES[dtype]:
        matrix = gauss(40, 90, dtype=dtype, scale=scale)
        for view in (matrix, matrix.T, matrix.T.contiguous(), matrix[::2, ::3], matrix[:, ::3].T):
            norm, expected = spectral_norm(view, tol=1e-6), norm_by_svd(view)
            assert norm.tol_reached
            assert norm.lower <= expected * (1 + 100 * EPS)
            assert expected * (1 - 100 * EPS) <= norm.upper <= norm.lower * (1 + 2e-6)


@pytest.mark.parametrize("entries", [1, 100])
def test_groups_strides_and_taps_that_are_zero(entries, monkeypatch):
    in_tiny_pieces(monkeypatch, entries)
    kernel = gauss(12, 5, 1, 1)
    truth = max(torch.linalg.matrix_norm(part.flatten(1), 2).item() for part in kernel.split(3))
    centre = torch.nn.functional.pad(kernel, (1, 1, 2, 0))
    for layer in (
        Convolution(kernel, groups=4),
        Convolution(kernel, 2, groups=4),
        Convolution(kernel, groups=4, transposed=True),
        Convolution(centre, padding=1, groups=4),
    ):
        norm = spectral_norm(layer, tol=1e-9)
        assert norm.tol_reached
        assert norm.lower <= truth * (1 + 100 * EPS)
        assert truth * (1 - 100 * EPS) <= norm.upper
    assert LiftedLayer.of(Convolution(centre, padding=1, groups=4)).is_matrix


def test_weights_that_underflow_beside_others(monkeypatch):
    in_tiny_pieces(monkeypatch, 3)
    monkeypatch.setattr("gramcert.rounding._PIECE", 2)
    matrix = torch.tensor([[1e300, 5e-324, 0.0], [0.0, 3e-300, 2e-308]], dtype=torch.float64)
    assert LiftedLayer.of(Convolution(matrix[..., None])).lost > 0
    norm = spectral_norm(matrix, tol=1e-9)
    assert norm.lower <= 1e300 <= norm.upper
    assert norm.tol_reached


def smaller_than_half_a_unit(count):
    """A row of 1 and of numbers whose squares, added to 1 one after the other, are all lost."""
    row = torch.full((1, count + 1), 2.0**-26.5 * 0.9999, dtype=torch.float64)
    row[0, 0] = 1.0
    return row


def test_pieces_lose_what_the_error_says_and_no_more():
    """Nearly all that n additions may lose is lost here: with fewer roundings in the error it would be too small."""
    count = 3000
    row = smaller_than_half_a_unit(count)
    symbol = GramSymbol(row[..., None])
    symbol._columns = 1
    exact = sum(Fraction(entry) ** 2 for entry in row[0].tolist())
    lost = exact - Fraction(symbol.correlations.item())
    assert Fraction(0.99 * gamma(count)) <= lost <= Fraction(symbol.error(torch.float64))
    assert symbol.error(torch.float64) <= 1.1 * gamma(count)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("tol", [1e-3, 1e-15])
def test_norms_whose_products_are_lost(tol, large, monkeypatch):
    in_tiny_pieces(monkeypatch, 1)
    monkeypatch.setattr(gram_symbol, "FACTORISED_ONCE", 0 if large else 1024)
    row = smaller_than_half_a_unit(500)
    exact = sum(Fraction(entry) ** 2 for entry in row[0].tolist())
    for matrix in (row, row.T):
        norm = spectral_norm(matrix, tol=tol)
        assert Fraction(norm.lower) ** 2 <= exact <= Fraction(norm.upper) ** 2


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("scale", [2.0**-1074, 1e-300, 1e-30, 1.0, 1e30, 1e300])
def test_against_balls(scale, large, monkeypatch):
    pytest.importorskip("flint", reason="python-flint is not installed")
    from ball import ball_norm, holds, random_matrix

    in_tiny_pieces(monkeypatch, 3, large=large)
    monkeypatch.setattr(gram_symbol, "FACTORISED_ONCE", 0 if large else 1024)
    monkeypatch.setattr("gramcert.bounds.symmetric.LEAST_ORDER", 2)
    generator = torch.Generator().manual_seed(1)
    for number in range(24):
        shape = torch.randint(1, 6, (2,), generator=generator).tolist()
        kind = ["gauss", "integers", "rank one", "orthogonal", "all equal", "float32"][number % 6]
        matrix = random_matrix(generator, shape, kind)
        matrix = (matrix * 1024).round() * scale if scale < 1e-300 else matrix * scale
        if kind == "float32" and 1e-40 < scale < 1e38:
            matrix = matrix.float()
        for tol in (1e-2, 1e-13):
            assert holds(spectral_norm(matrix, tol=tol), ball_norm(matrix))


def test_a_proof_that_fails_is_tried_with_a_better_vector(monkeypatch):
    """Few Krylov steps do not come near enough to the norm of a large matrix; those that follow do."""
    in_tiny_pieces(monkeypatch, 10**4, large=True)
    monkeypatch.setattr("gramcert.certified.peaks.SINGLE_STEPS", 20)
    matrix = gauss(150, 160)
    norm = spectral_norm(matrix)
    truth = norm_by_svd(matrix)
    assert norm.tol_reached
    assert norm.lower <= truth * (1 + 100 * EPS)
    assert truth * (1 - 100 * EPS) <= norm.upper


def test_little_memory_is_enough_for_a_tall_matrix():
    layer = nn.Linear(6000, 512)
    norm = spectral_norm(layer, max_bytes=2**24)
    assert norm.tol_reached
    truth = norm_by_svd(layer.weight.detach())
    assert norm.lower <= truth * (1 + 1e-12)
    assert truth * (1 - 1e-12) <= norm.upper


def peaked(rows, columns):
    """A few large weights: their squares say more than sums of absolute values."""
    matrix = gauss(rows, columns) / 100
    matrix[3] *= 100
    return matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["dense", "peaked", "centred"])
def test_matrices_beyond_the_memory(kind, dtype):
    """The Gram matrix does not fit: an enclosure from sums and from one careful product, and the reason."""
    matrix = {"dense": gauss(500, 700), "peaked": peaked(500, 700), "centred": gauss(500, 700)}[kind]
    if kind == "centred":
        matrix -= matrix.mean(1, keepdim=True)
    for view in (matrix.to(dtype), matrix.to(dtype).T):
        norm = spectral_norm(view, max_bytes=2**20)
        double, truth = view.double(), norm_by_svd(view)
        sums = [torch.linalg.matrix_norm(double, order).item() for order in (1, math.inf)]
        assert 0.95 * truth <= norm.lower <= truth * (1 + 100 * EPS)
        crude = min(math.sqrt(sums[0] * sums[1]), torch.linalg.matrix_norm(double).item())
        assert truth * (1 - 100 * EPS) <= norm.upper <= crude * (1 + 1e-10)
        assert not norm.tol_reached
        assert "max_bytes=1048576" in norm.explain()
        assert "squared weights" in norm.method


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lower_bounds_without_a_gram_matrix_hold_and_touch(dtype):
    """All Krylov steps that there are: nothing but rounding is between the bound and the norm."""
    scales = {torch.float32: [1.0, 1e-43, 1e-38, 8e37], torch.float64: [1.0, 1e-310, 4e307]}[dtype]
    for seed in range(40):
        matrix = gauss(25, 40, dtype=dtype, scale=scales[seed % len(scales)], seed=seed)
        exponent = largest_exponent(matrix)
        lower = lower_norm(matrix[..., None], Work(2**30, None), -exponent)
        truth = norm_by_svd(matrix, -exponent)
        assert truth * (1 - 1e-9) <= lower <= truth * (1 + 100 * EPS)


def test_not_even_memory_for_vectors():
    norm = spectral_norm(gauss(50, 70), max_bytes=1000)
    assert norm.lower == 0 < norm.upper <= 70
    assert "max_bytes=1000" in norm.explain()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64], ids=str)
def test_weights_that_are_copied_count(dtype):
    matrix = torch.ones(64, 4000, dtype=dtype)
    enough = 48 * 128**2 + 2**21
    assert spectral_norm(matrix.real.float().contiguous(), max_bytes=enough).tol_reached
    assert not spectral_norm(matrix, max_bytes=64 * 4000 * 4).tol_reached
