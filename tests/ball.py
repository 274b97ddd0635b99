"""The truth for tiny layers in exact and ball arithmetic (python-flint)."""

from fractions import Fraction

import flint
import torch


def as_balls(matrix):
    """A float matrix as exact rationals."""
    rows = [[flint.fmpq(*Fraction(entry).as_integer_ratio()) for entry in row] for row in matrix.double().tolist()]
    return flint.fmpq_mat(rows)


def ball_norm(matrix, digits=60):
    """The largest singular value of the stored matrix, as a ball: roots of the exact characteristic polynomial."""
    exact = as_balls(matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T)
    polynomial = (exact.transpose() * exact).charpoly()
    integral = flint.fmpz_poly([int(c * polynomial.denom()) for c in polynomial.coeffs()])
    flint.ctx.dps = digits
    try:
        largest = max((root.real for root, _ in integral.complex_roots()), key=lambda ball: ball.mid())
        return largest.sqrt() if largest > 0 else flint.arb(0)
    finally:
        flint.ctx.dps = 15


def smallest_ball(matrix, digits=60):
    """The smallest of min(rows, columns) singular values of the stored matrix, as a ball."""
    exact = as_balls(matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T)
    polynomial = (exact.transpose() * exact).charpoly()
    if polynomial[0] == 0:
        return flint.arb(0)
    integral = flint.fmpz_poly([int(c * polynomial.denom()) for c in polynomial.coeffs()])
    flint.ctx.dps = digits
    try:
        return min((root.real for root, _ in integral.complex_roots()), key=lambda ball: ball.mid()).sqrt()
    finally:
        flint.ctx.dps = 15


def holds(enclosure, truth):
    """Whether the true number, known as a ball, is certainly between the ends."""
    lower, upper = (
        flint.arb(flint.fmpq(*Fraction(end).as_integer_ratio())) for end in (enclosure.lower, enclosure.upper)
    )
    return bool(lower <= truth) and bool(truth <= upper)


def random_matrix(generator, shape, kind):
    """Matrices of the kinds that break careless bounds."""
    gauss = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "integers":
        return torch.randint(-3, 4, shape, generator=generator).double()
    if kind == "rank one":
        return gauss[:, :1] @ gauss[:1]
    if kind == "orthogonal":
        return torch.linalg.qr(gauss)[0]
    if kind == "all equal":
        return torch.full(shape, float(gauss[0, 0]), dtype=torch.float64)
    if kind == "float32":
        return gauss.float().double()
    return gauss
