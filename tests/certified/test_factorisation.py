"""Cholesky factorisations block by block, against LAPACK's and against exact numbers."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocks import in_blocks
from cases import kernels
from gramcert.certified import factorisation, gram_symbol
from gramcert.certified import staircase as staircase_module
from gramcert.certified.factorisation import factorise, terms
from gramcert.certified.frequencies import Frequencies
from gramcert.certified.gram_symbol import GramSymbol
from gramcert.certified.staircase import SMALLEST, diagonals, is_blocked, packed, packed_size, staircase, times, whole
from gramcert.certified.torus import torus_maximum
from gramcert.certified.work import Work
from gramcert.rounding import factor_error, sums_up

TYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]


def matrices(order, dtype, count=4, seed=0):
    """Positive ones, not too close to being singular."""
    generator = torch.Generator().manual_seed(seed)
    roots = torch.randn(count, order, order, dtype=dtype, generator=generator)
    return roots @ roots.mH / order + 0.1 * torch.eye(order, dtype=dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("order", [SMALLEST - 1, SMALLEST, 131])
def test_positive_matrices_have_factors_and_others_have_not(order, dtype):
    positive = matrices(order, dtype)
    sizes = factorise(staircase(positive.clone()), measure=True)[1]
    assert (sizes is not None) == is_blocked(order)
    assert factorise(staircase(positive.clone()), measure=False)[0].all()
    smallest = torch.linalg.eigvalsh(positive)[:, 0]
    indefinite = positive - 1.01 * smallest[:, None, None] * torch.eye(order, dtype=dtype)
    indefinite[0] = positive[0]
    assert factorise(staircase(indefinite), measure=True)[0].tolist() == [True, False, False, False]


@pytest.mark.parametrize("dtype", TYPES)
def test_the_size_of_factors(dtype):
    positive = matrices(131, dtype)
    moduli = torch.linalg.cholesky(positive).mH.abs().double()
    sums = (moduli.mT @ moduli.sum(-1, keepdim=True))[..., 0].amax(-1)
    found = sums_up(factorise(staircase(positive.clone()), measure=True)[1], 131, torch.float32)
    assert (sums * (1 - 1e-4) <= found).all()
    assert (found <= (2.1 if dtype.is_complex else 1.01) * sums).all()
    assert (torch.linalg.matrix_norm(moduli, 2) ** 2 <= found * (1 + 1e-4)).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_every_row_of_the_last_panel_counts(dtype):
    """A panel, a chunk of the next one, and some rows more: their subtractions and their sizes."""
    indefinite = torch.eye(200, dtype=dtype)
    indefinite[0, 199] = indefinite[199, 0] = 2
    assert not factorise(staircase(indefinite[None].clone()), measure=False)[0]
    large_at_the_end = torch.eye(200, dtype=dtype)
    large_at_the_end[-8:, -8:] += 100
    passed, sizes = factorise(staircase(large_at_the_end[None].clone()), measure=True)
    assert passed
    assert sizes > 800


@pytest.mark.parametrize(("place", "proved"), [(22, False), (150, True)])
def test_lifted_vectors_belong_to_their_rows(place, proved):
    """All but one eigenvalue are at most 8 where the vector is that of the 9 in the second panel."""
    kernel = torch.zeros(160, 160, 2, dtype=torch.float64)
    kernel[:, :, 0] = torch.eye(160)
    kernel[150, 150, 0] = 3
    lifted = torch.zeros(160, 1, dtype=torch.float64)
    lifted[place] = 10
    frequency = Frequencies(torch.tensor([[0]]), (7,))
    assert GramSymbol(kernel, 4).all_below(frequency, 8.0, torch.float64, lifted=lifted).tolist() == [proved]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_diagonal_is_that_of_all_panels(dtype, monkeypatch):
    """What is stored and factorised is off in proportion to its largest entries, wherever they are."""
    symbol_of = {}
    for large in (0, 159):
        kernel = torch.zeros(160, 160, 2, dtype=torch.float64)
        kernel[:, :, 0] = torch.eye(160)
        kernel[large, large, 0] = 2.0**10
        sizes = []
        monkeypatch.setattr(gram_symbol, "diagonal_error", lambda size, _, sizes=sizes: sizes.append(size) or 0.0)
        GramSymbol(kernel, 4).all_below(Frequencies(torch.tensor([[0]]), (7,)), 2.0**21, dtype)
        symbol_of[large] = sizes
    assert symbol_of[0] == symbol_of[159]
    assert max(symbol_of[0]) >= 2.0**20 + 2.0**21


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("order", [1, 5, 8, 9, 24, 27])
def test_upper_rows(order, dtype):
    """Views of whole matrices and rows that lie one after the other hold the same matrix."""
    matrix = matrices(order, dtype, count=3)
    vectors = torch.randn(3, order, dtype=dtype, generator=torch.Generator().manual_seed(1))
    with in_blocks():
        rows = torch.empty(3, packed_size(order), dtype=dtype)
        for stored, panel in zip(packed(rows, order), staircase(matrix), strict=True):
            stored.copy_(panel)
        for panels in (packed(rows, order), staircase(matrix)):
            assert len(panels) == -(-order // 8)
            assert torch.equal(whole(panels).triu(), matrix.triu())
            assert torch.equal(whole(panels).tril(-9), matrix.triu(9).mH)
            assert torch.equal(torch.cat(diagonals(panels), 1), matrix.diagonal(dim1=1, dim2=2))
            exact = (matrix.to(torch.complex128) @ vectors.to(torch.complex128)[..., None])[..., 0]
            distance = (times(panels, vectors) - exact).abs().max()
            assert distance <= 10 * order * torch.finfo(dtype).eps * vectors.abs().max() * matrix.abs().sum(-1).max()


def test_packed_factors_are_those_of_views():
    matrix = matrices(27, torch.complex64)
    matrix[1] -= 2 * torch.eye(27)
    with in_blocks():
        rows = torch.empty(4, packed_size(27), dtype=torch.complex64)
        for stored, panel in zip(packed(rows, 27), staircase(matrix), strict=True):
            stored.copy_(panel)
        passed, sizes = factorise(packed(rows, 27), measure=True)
        others = factorise(staircase(matrix), measure=True)
    assert passed.tolist() == others[0].tolist() == [True, False, True, True]
    torch.testing.assert_close(sizes[passed], others[1][passed])


def test_sums_are_short():
    assert 128 + 512 // 128 + 2 <= terms(512) < 140  # a sum over a panel, a subtraction for each, and within one
    assert terms(SMALLEST - 1) == SMALLEST - 1


def test_what_is_no_number_has_no_factor():
    broken = matrices(128, torch.complex64)
    broken[1, 100, 100] = torch.nan
    broken[2, 3, 100] = torch.inf
    passed, sizes = factorise(staircase(broken), measure=True)
    assert passed[[0, 3]].all()
    assert not passed[1]
    assert not passed[2] or sizes[2] == torch.inf


@given(st.integers(0, 2**31), st.sampled_from([torch.float32, torch.float64]))
def test_matrices_with_factors_are_positive_up_to_the_error(seed, dtype):
    """Singular matrices of integers, moved by about their error: determinants in rational numbers decide."""
    generator = torch.Generator().manual_seed(seed)
    roots = torch.randint(-3, 4, (5, 4), generator=generator).to(dtype)
    exact = roots @ roots.T  # of rank 4 and order 5: λ_min = 0
    unit = float(torch.finfo(dtype).eps)
    shift = float(torch.randint(-40, 41, (), generator=generator)) * unit * float(exact.abs().max()) / 8
    stored = exact + shift * torch.eye(5, dtype=dtype)
    with in_blocks():
        passed, sizes = factorise(staircase(stored[None].clone()), measure=True)
        if not bool(passed):
            return
        size = float(sums_up(sizes, 5, dtype))
        error = factor_error(5, size, dtype, is_complex=False, terms=terms(5))
    lifted = [[Fraction(float(value)) for value in row] for row in stored]
    for index in range(5):
        lifted[index][index] += Fraction(error)
    assert all(pivot >= 0 for pivot in pivots(lifted))


def pivots(matrix):
    """Of LDLᵀ in rational numbers; a matrix is positive if they all are."""
    rest = [row[:] for row in matrix]
    for k in range(len(rest)):
        yield rest[k][k]
        if rest[k][k] == 0:
            return
        for i in range(k + 1, len(rest)):
            factor = rest[i][k] / rest[k][k]
            for j in range(k, len(rest)):
                rest[i][j] -= factor * rest[k][j]


@given(kernels(), st.sampled_from([1e-1, 1e-2, 1e-3]))
def test_suprema_by_blocks(case, tol):
    kernel = case[0] / case[0].abs().max().clamp_min(1e-300)
    if not kernel.any():
        return
    usual = torus_maximum(GramSymbol(kernel), tol, Work(2**31, None))
    with in_blocks():
        found = torus_maximum(GramSymbol(kernel), tol, Work(2**31, None))
    assert found.lower <= usual.upper
    assert usual.lower <= found.upper
    assert found.upper - found.lower <= tol * found.upper


def test_factors_larger_than_expected_are_looked_at_again(monkeypatch):
    """A proof that takes off too little is none; it is made again with what is certain."""
    kernel = torch.randn(100, 100, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    symbol = GramSymbol(kernel / kernel.abs().max())
    search = torus_maximum(symbol, 1e-2, Work(2**31, None))
    frequency, level = search.frequency, search.upper**2 * 1.01
    assert bool(symbol.all_below(frequency, level, torch.float32))
    symbol._sizes[torch.float32] = 1e-3
    errors = []
    factor_error_ = symbol._factor_error
    monkeypatch.setattr(symbol, "_factor_error", lambda *given: errors.append(factor_error_(*given)) or errors[-1])
    assert bool(symbol.all_below(frequency, level, torch.float32))
    assert errors[1] > errors[0]
    assert symbol._sizes[torch.float32] > 1


@pytest.mark.parametrize("dtype", TYPES)
def test_tiny_blocks_decide_as_eigenvalues_do(dtype):
    generator = torch.Generator().manual_seed(3)
    for order in range(2, 20):
        roots = torch.randn(20, order, order, dtype=dtype, generator=generator)
        shifts = torch.randn(20, generator=generator).to(dtype)[:, None, None]
        tried = roots @ roots.mH / order + shifts * torch.eye(order, dtype=dtype)
        smallest = torch.linalg.eigvalsh(tried)[:, 0]
        with in_blocks():
            passed = factorise(staircase(tried.clone()), measure=False)[0]
        certain = smallest.abs() > 1e-3
        assert torch.equal(passed[certain], (smallest > 0)[certain])


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float32])
def test_a_proof_that_took_off_too_little_is_none(default):
    """Close above the eigenvalue: the factor exists, but is not known to be near enough."""
    kernel = torch.randn(100, 100, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    symbol = GramSymbol(kernel / kernel.abs().max())
    frequency = torus_maximum(symbol, 1e-3, Work(2**31, None)).frequency
    largest = float(torch.linalg.eigvalsh(symbol.evaluate(frequency, torch.float64))[0, -1])
    torch.set_default_dtype(default)
    try:
        for dtype, gap in ((torch.float32, 1e-4), (torch.float64, 1e-13)):
            level = largest * (1 + gap)
            assert not bool(symbol.all_below(frequency, level, dtype, hopeful=False))
            symbol._sizes[dtype] = 1e-6
            assert not bool(symbol.all_below(frequency, level, dtype))
    finally:
        torch.set_default_dtype(torch.float32)


@given(st.integers(0, 2**31), st.integers(-6, 6))
def test_proofs_within_a_few_units_of_the_eigenvalue(seed, units):
    """Whatever is proved holds in rational numbers, at levels where nothing but the error terms decides."""
    kernel = torch.randn(3, 3, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    symbol = GramSymbol(kernel)
    frequency = Frequencies(torch.zeros(1, 0, dtype=torch.int64), ())
    rows = [[Fraction(value) for value in row] for row in kernel[:, :, 0].tolist()]
    gram = [[sum(a * b for a, b in zip(one, two, strict=True)) for two in rows] for one in rows]
    largest = float(torch.linalg.eigvalsh(symbol.evaluate(frequency, torch.float64))[0, -1])
    for dtype in (torch.float32, torch.float64):
        level = largest * (1 + units * torch.finfo(dtype).eps)
        if bool(symbol.all_below(frequency, level, dtype)):
            shifted = [[(Fraction(level) if i == j else 0) - gram[i][j] for j in range(3)] for i in range(3)]
            assert all(pivot >= 0 for pivot in pivots(shifted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_cancels_in_a_symbol_is_not_proved_away(dtype):
    """At ω = 0 the symbol of (a, b) with a + b near 0 is tiny, and its rounding is that of a² and b²."""
    generator = torch.Generator().manual_seed(0)
    unit, zero = torch.finfo(dtype).eps, Frequencies(torch.zeros(1, 1, dtype=torch.int64), (1,))
    proved = 0
    for _ in range(200):
        first, gap = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        kernel = torch.tensor(
            [[[0.5 + first / 2, -(0.5 + first / 2) * (1 + 100 * unit**0.5 * gap)]]], dtype=torch.float64
        )
        exact = sum(Fraction(value) for value in kernel.flatten().tolist()) ** 2
        for steps in (-3, -1, -0.3, -0.1, 1000):
            level = max(0.0, float(exact) + steps * unit)
            found = bool(GramSymbol(kernel).all_below(zero, level, dtype))
            assert Fraction(level) >= exact or not found
            proved += found
    assert proved >= 190  # not by refusing all


def test_blocks_are_whole():
    assert factorisation.ROWS % factorisation.BLOCK == 0 == staircase_module.PANEL % factorisation.BLOCK
