import math
import os
import subprocess
import sys
from fractions import Fraction

import pytest
import torch

import gramcert
from gramcert import rounding

EPS = torch.finfo(torch.float64).eps


@pytest.fixture
def subnormals_flushed():
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("value", [0.0, 5e-324, 1e-300, 1.0, 3.7, 1e308])
def test_directed_rounding(value):
    assert rounding.up(value) > value
    assert rounding.down(value) < value or value == 0 == rounding.down(value)
    lower, upper = rounding.root_down(value), rounding.root_up(value)
    assert Fraction(lower) ** 2 <= Fraction(value) <= Fraction(upper) ** 2
    assert upper <= math.sqrt(value) * (1 + 5 * EPS) + 5e-324


def test_what_is_no_number_bounds_nothing():
    assert rounding.up(math.nan) == math.inf
    assert rounding.down(math.nan) == -math.inf
    assert rounding.root_up(math.nan) == math.inf
    values = torch.tensor([math.nan, 1.0], dtype=torch.float64)
    assert rounding.next_up(values)[0] == math.inf
    assert rounding.next_down(values)[0] == -math.inf
    assert rounding.total_up(values) == math.inf
    for vector in (values, values * math.inf, torch.full((2,), 1e200, dtype=torch.float64)):
        assert rounding.norm_down(vector) == 0
        assert rounding.norm_up(vector) == math.inf


@pytest.mark.parametrize("piece", [1, 7, 50, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_absolute_sums_in_pieces(piece, dtype, monkeypatch):
    monkeypatch.setattr(rounding, "_PIECE", piece)
    kernel = torch.randn(5, 4, 3, 2, dtype=dtype, generator=torch.Generator().manual_seed(0))
    exact = [[[Fraction(entry) for entry in column] for column in row] for row in kernel.abs().flatten(2).tolist()]
    rows = max(sum(map(sum, row)) for row in exact)
    columns = max(sum(map(sum, column)) for column in zip(*exact, strict=True))
    for exponent in (0, -1060, 900):
        scale = Fraction(2) ** exponent
        for found, truth in zip(rounding.absolute_sums(kernel, exponent), (rows, columns), strict=True):
            assert truth * scale <= Fraction(found) <= truth * scale * Fraction(1 + 500 * EPS) + Fraction(2) ** -1010


@pytest.mark.parametrize("exponent", [-1100, -1074, -60, 0, 60, 1023, 1100])
def test_scaling_rounds_outward(exponent):
    value = 1.0 + 2.0**-52
    exact = Fraction(value) * Fraction(2) ** exponent
    lower, upper = rounding.scaled_down(value, exponent), rounding.scaled_up(value, exponent)
    assert Fraction(lower) <= exact
    assert upper == math.inf or exact <= Fraction(upper)
    if -1000 < exponent < 1000:
        assert lower == upper


def test_gamma_is_above_the_formula():
    for terms in (1, 2, 1000, 2**20):
        small = Fraction(terms, 2**53)
        assert small / (1 - small) <= Fraction(rounding.gamma(terms)) <= small / (1 - small) * (1 + Fraction(1, 2**50))
    assert rounding.gamma(2**24, torch.float32) == math.inf


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1.0, 1e150])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_square_norms_enclose(size, scale):
    vector = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(size)) * scale
    exact = sum(Fraction(entry) ** 2 for entry in vector.tolist())
    lower, upper = rounding.square_norm(vector)
    assert Fraction(lower) <= exact <= Fraction(upper)
    if scale >= 1:
        assert upper - lower <= 5e3 * EPS * upper
    assert Fraction(rounding.norm_down(vector)) ** 2 <= exact <= Fraction(rounding.norm_up(vector)) ** 2


@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e-30, 1.0, 1e30, 1e307])
def test_lifting_is_exact(scale):
    weights = torch.tensor([1.0, -3.0, 0.0], dtype=torch.float64) * scale
    scaled, lost, exponent = rounding.lift(weights)
    assert 0.5 <= scaled.abs().max() < 1
    assert lost == 0
    for before, after in zip(weights.tolist(), scaled.tolist(), strict=True):
        assert Fraction(after) * Fraction(2) ** exponent == Fraction(before)


def test_lifting_says_what_underflow_takes():
    scaled, lost, exponent = rounding.lift(torch.tensor([1e300, 5e-324], dtype=torch.float64))
    missing = abs(Fraction(float(scaled[1])) - Fraction(5e-324) / Fraction(2) ** exponent)
    assert 0 < missing <= Fraction(lost)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_complex", [False, True])
def test_a_factorisation_that_runs_to_its_end_proves_what_the_error_term_says(dtype, is_complex):
    """Matrices whose smallest eigenvalue is known and at the edge: none with λ_min < -error gets a factor."""
    generator = torch.Generator().manual_seed(0)
    for order in (2, 5, 20):
        shape = (200, order, order)
        kind = torch.complex128 if is_complex else torch.float64
        basis = torch.linalg.qr(torch.randn(shape, dtype=kind, generator=generator))[0]
        values = torch.rand(200, order, dtype=torch.float64, generator=generator)
        values[:, 0] = -torch.logspace(-18, -2, 200, dtype=torch.float64)
        matrices = (basis * values[:, None].to(kind)) @ basis.mH
        stored = matrices.to(
            torch.complex64 if is_complex and dtype == torch.float32 else dtype if not is_complex else kind
        )
        passed = torch.linalg.cholesky_ex(stored)[1] == 0
        traces = stored.diagonal(dim1=1, dim2=2).real.double().sum(1)
        smallest = torch.linalg.eigvalsh(stored.to(kind))[:, 0]
        for trace, value in zip(traces[passed].tolist(), smallest[passed].tolist(), strict=True):
            assert value >= -rounding.cholesky_error(order, trace, dtype, is_complex=is_complex) - 50 * EPS * trace


def test_flush_to_zero_is_noticed(subnormals_flushed):
    with pytest.raises(RuntimeError, match=r"somewhere: subnormal numbers are flushed to zero"), _checked():
        pass


@pytest.mark.parametrize(
    "setting",
    [
        "torch.set_float32_matmul_precision('medium')",
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    ],
)
def test_reduced_precision_is_switched_off_inside_and_restored(setting):
    """In a process of its own: torch does not let the settings of its two interfaces be undone together."""
    code = f"""
import torch
from gramcert import rounding
{setting}
before = torch.backends.mkldnn.matmul.fp32_precision
with rounding.checked_arithmetic("somewhere"):
    assert torch.backends.mkldnn.matmul.fp32_precision in ("ieee", "none")
assert torch.backends.mkldnn.matmul.fp32_precision == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_products_that_lose_bits_are_noticed(monkeypatch):
    monkeypatch.setattr(torch, "eye", lambda n: torch.ones(n, n))
    with pytest.raises(RuntimeError, match="float32 matrix products lose bits"), _checked():
        pass


def _checked():
    return rounding.checked_arithmetic("somewhere")


def test_row_norms_are_rounded_up():
    """Against exact rational arithmetic, and hardly above it."""
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-130, 1.0, 1e150):
        rows = scale * torch.randn(20, 7, generator=generator, dtype=torch.float64)
        for row, found in zip(rows, rounding.row_norms_up(rows), strict=True):
            exact = sum(Fraction(float(value)) ** 2 for value in row)
            assert exact <= Fraction(float(found)) ** 2 <= exact * Fraction(1 + 500 * EPS)


def test_proofs_are_made_on_the_cpu_whatever_the_default_device_is():
    layer = torch.nn.Conv2d(2, 2, 3)
    before = gramcert.spectral_norm(layer, 8)
    with torch.device("meta"):
        inside = gramcert.spectral_norm(layer, 8)
    assert (inside.lower, inside.upper) == (before.lower, before.upper)


def test_quotients_of_norms_count_the_error_on_both_sides():
    image, vector = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([2.0, 0.0], dtype=torch.float64)
    lower, upper = rounding.quotient_bounds(image, 1.0, vector)
    assert lower <= 2 <= 3 <= upper
    assert upper - lower <= 1 + 1e-12
    assert rounding.quotient_bounds(image, 6.0, vector)[0] == 0
    assert rounding.quotient_bounds(image, 1.0, torch.zeros(2, dtype=torch.float64)) == (0.0, math.inf)


def test_bounds_of_smallest_values():
    assert 0.9 <= rounding.least_lower(1.0, 0.1) <= 0.9 + 1e-15
    assert rounding.least_lower(0.0, 0.1) <= 5e-324
    assert rounding.reciprocal_up(1.0) == 1.0
    assert rounding.reciprocal_up(0.0) == math.inf
    assert Fraction(rounding.reciprocal_up(3.0)) > Fraction(1, 3)
    assert rounding.product_down(1.0, 0.3) == 0.3
    assert Fraction(rounding.product_down(0.1, 0.3)) < Fraction(0.1) * Fraction(0.3)


@pytest.mark.parametrize("piece", [1, 7, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_of_squares_in_pieces(piece, dtype, monkeypatch):
    monkeypatch.setattr(rounding, "_PIECE", piece)
    kernel = torch.randn(5, 4, 3, dtype=dtype, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    exact = sum(Fraction(entry) ** 2 for entry in kernel.flatten().tolist())
    for exponent in (0, -100, 300):
        square = exact * Fraction(4) ** exponent
        found = Fraction(rounding.frobenius_up(kernel, exponent)) ** 2
        assert square <= found <= square * Fraction(1 + 500 * EPS)


@pytest.mark.parametrize("piece", [1, 10**6])
@pytest.mark.parametrize("small", [5e-324, 2.0**-1022, 2.0**-500])
@pytest.mark.parametrize("exponent", [-1024, -600, -1, 0, 1, 1074])
def test_scaling_pieces_loses_what_scaling_all_does(exponent, small, piece, monkeypatch):
    monkeypatch.setattr(rounding, "_PIECE", piece)
    weights = torch.tensor([[small, 0.5], [3 * small, 0.0]], dtype=torch.float64) / 2.0 ** max(0, exponent // 2)
    before, lost = weights.clone(), rounding.lost_by_scaling(weights.T, exponent)
    scaled = rounding.lift_by(weights.T, exponent).T
    assert torch.equal(weights, before)
    differences = [
        abs(Fraction(after) - Fraction(entry) * Fraction(2) ** exponent)
        for after, entry in zip(scaled.flatten().tolist(), weights.flatten().tolist(), strict=True)
    ]
    assert max(differences) <= Fraction(lost)
    assert (lost > 0) == any(differences)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64, torch.complex128])
def test_norms_of_vectors_of_any_type(dtype):
    for seed in range(20):
        vector = torch.randn(50, dtype=dtype, generator=torch.Generator().manual_seed(seed))
        parts = torch.view_as_real(vector) if dtype.is_complex else vector
        exact = sum(Fraction(entry) ** 2 for entry in parts.flatten().tolist())
        lower, upper = rounding.square_norm(vector)
        assert Fraction(lower) <= exact <= Fraction(upper) <= exact * Fraction(1 + 500 * EPS)
