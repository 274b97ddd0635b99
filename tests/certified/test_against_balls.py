"""Enclosures against exact and ball arithmetic: not one unit in the last place on the wrong side."""

import itertools
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import gramcert
from cases import layers
from gramcert import Convolution, singular_values, smallest_singular_value, spectral_norm
from gramcert.certified.frequencies import Frequencies
from gramcert.rounding import TWIDDLE_ERROR

flint = pytest.importorskip("flint", reason="python-flint is not installed")
from ball import ball_norm, holds, random_matrix, smallest_ball  # noqa: E402

EPS = torch.finfo(torch.float64).eps

KINDS = ["gauss", "integers", "rank one", "orthogonal", "all equal", "float32"]

# Entries of the matrices that exact characteristic polynomials are quick for.
SMALL = 12


def draw(count, seed=0):
    """Small matrices of every kind."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        shape = torch.randint(1, 6, (2,), generator=generator).tolist()
        yield random_matrix(generator, shape, KINDS[number % len(KINDS)])


@pytest.mark.parametrize("scale", [2.0**-1074, 1e-310, 1e-30, 1.0, 1e30, 1e300])
@pytest.mark.parametrize("tol", [1e-2, 1e-13])
def test_matrices(scale, tol):
    for matrix in draw(30):
        scaled = (matrix * 1024).round() * scale if scale < 1e-300 else matrix * scale
        enclosure = spectral_norm(scaled, tol=tol)
        assert holds(enclosure, ball_norm(scaled))
        assert holds(smallest_singular_value(scaled, tol=tol), smallest_ball(scaled))
        if scale > 1e-300 and scaled.any():
            assert enclosure.relative_width <= max(tol, 5e3 * EPS)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("huge", [1e20, 1e200, 1e308])
def test_one_huge_entry(huge):
    for matrix in draw(12):
        matrix[0, 0] = huge
        assert holds(spectral_norm(matrix, tol=1e-12), ball_norm(matrix))
        assert holds(smallest_singular_value(matrix, tol=1e-12), smallest_ball(matrix))


@settings(max_examples=settings.default.max_examples // 2)
@given(layers(), st.sampled_from([1e-2, 1e-6, 1e-12]))
def test_layers_at_one_size(case, tol):
    layer, size = case
    matrix = layer.to_dense(size)
    assume(min(matrix.shape) <= SMALL)
    assert holds(spectral_norm(layer, size, tol=tol), ball_norm(matrix))
    assert holds(smallest_singular_value(layer, size, tol=tol), smallest_ball(matrix))


@given(st.lists(st.integers(-8, 8), min_size=1, max_size=5), st.sampled_from([1e-2, 1e-6, 1e-11]))
def test_every_size_of_a_one_dimensional_filter(taps, tol):
    """|E(ω)|² is a polynomial in cos ω; its extremes are at ±1 or where the derivative vanishes, all known as balls."""
    layer = Convolution(torch.tensor([[taps]], dtype=torch.float64) / 8, padding=len(taps) - 1)
    enclosure, least = spectral_norm(layer, tol=tol), smallest_singular_value(layer, tol=tol)
    correlation = [sum(a * b for a, b in zip(taps, taps[lag:], strict=False)) for lag in range(len(taps))]
    polynomial = flint.fmpz_poly([correlation[0]])
    chebyshev = [flint.fmpz_poly([1]), flint.fmpz_poly([0, 1])]
    for value in correlation[1:]:
        polynomial += 2 * value * chebyshev[1]
        chebyshev = [chebyshev[1], flint.fmpz_poly([0, 2]) * chebyshev[1] - chebyshev[0]]
    flint.ctx.dps = 60
    try:
        places = [flint.arb(1), flint.arb(-1)]
        if polynomial.degree() > 1:
            roots = [root for root, _ in polynomial.derivative().complex_roots() if root.imag == 0 or 0 in root.imag]
            places += [root.real for root in roots if abs(root.real) <= 1]
        values = sorted((_evaluate(polynomial, place) for place in places), key=lambda ball: ball.mid())
        smallest, truth = (value.sqrt() / 8 if value > 0 else flint.arb(0) for value in (values[0], values[-1]))
        assert holds(enclosure, truth)
        assert holds(least, smallest)
    finally:
        flint.ctx.dps = 15


def _evaluate(polynomial, place):
    value = flint.arb(0)
    for coefficient in reversed(polynomial.coeffs()):
        value = value * place + coefficient
    return value


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2**34)), min_size=1, max_size=3))
def test_waves_are_within_their_error(axes):
    """Products of one sine or cosine for each axis, against those of the whole angle."""
    denominators = tuple(2**31 - 1 if number % 2 else 2**30 * 3 for number, _ in axes)
    numerators = [start % size for (_, start), size in zip(axes, denominators, strict=True)]
    places = [torch.tensor([-number, 0, number]) for number, _ in axes]
    waves = Frequencies(torch.tensor([numerators]), denominators).waves(places)
    flint.ctx.dps = 60
    try:
        for index, steps in enumerate(itertools.product(*(place.tolist() for place in places))):
            turn = sum(Fraction(a * x, m) for a, x, m in zip(steps, numerators, denominators, strict=True))
            angle = 2 * flint.arb.pi() * flint.arb(flint.fmpq(*turn.as_integer_ratio()))
            for found, truth in zip(waves, (angle.cos(), angle.sin()), strict=True):
                exact = flint.arb(flint.fmpq(*found[0, index].item().as_integer_ratio()))
                assert abs(exact - truth) <= TWIDDLE_ERROR
    finally:
        flint.ctx.dps = 15


def test_singular_values():
    for matrix in draw(30):
        spectrum = singular_values(matrix, None)
        truth = ball_norm(matrix)
        difference = abs(truth - flint.arb(flint.fmpq(*Fraction(spectrum.values[0].item()).as_integer_ratio())))
        assert difference <= flint.arb(flint.fmpq(*Fraction(spectrum.error).as_integer_ratio()))


def test_without_its_rounding_terms_the_enclosure_is_wrong(monkeypatch):
    """The mutation check: the cases above notice if error terms and directed rounding are taken out."""
    matrices = list(draw(120, seed=1))
    assert all(holds(spectral_norm(matrix, tol=1e-12), ball_norm(matrix)) for matrix in matrices)
    _take_out_rounding(monkeypatch)
    wrong = [matrix for matrix in matrices if noticed(matrix, None, ball_norm(matrix))]
    assert len(wrong) >= 5


def test_without_its_rounding_terms_the_banded_proof_is_wrong(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    kernels = [torch.randn(1, 1, 3, dtype=torch.float64, generator=generator) for _ in range(40)]
    cases = [(Convolution(kernel, padding=1), 7) for kernel in kernels]
    truths = [ball_norm(layer.to_dense(size)) for layer, size in cases]
    assert all(holds(spectral_norm(*case, tol=1e-11), truth) for case, truth in zip(cases, truths, strict=True))
    _take_out_rounding(monkeypatch)
    wrong = [case for case, truth in zip(cases, truths, strict=True) if noticed(*case, truth)]
    assert len(wrong) >= 2


def noticed(layer, size, truth):
    """Whether the answer is wrong, or contradicts itself."""
    try:
        return not holds(spectral_norm(layer, size, tol=1e-15), truth)
    except ArithmeticError:
        return True


def _take_out_rounding(monkeypatch):
    replacements = {
        "up": lambda value: value,
        "down": lambda value: value,
        "gamma": lambda *_: 0.0,
        "complex_gamma": lambda *_: 0.0,
        "underflow": lambda *_: 0.0,
        "diagonal_error": lambda *_: 0.0,
        "cholesky_error": lambda *_, **__: 0.0,
        "banded_cholesky_error": lambda *_: 0.0,
        "TWIDDLE_ERROR": 0.0,
    }
    assert gramcert.__name__ in sys.modules
    for name, module in list(sys.modules.items()):
        if name.startswith("gramcert."):
            for attribute, replacement in replacements.items():
                if hasattr(module, attribute):
                    monkeypatch.setattr(module, attribute, replacement)
