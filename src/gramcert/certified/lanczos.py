"""Lanczos iteration: a vector close to the top eigenvector. Nothing here is certified, and nothing needs to be.

In torch although NumPy's calls on small vectors are cheaper: NumPy's BLAS has threads of its own, which keep the cores
busy while torch's wait for them, and everything else becomes several times slower.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Orders up to which a dense eigendecomposition is faster, and Krylov steps above.
DENSE_ORDER, KRYLOV_STEPS = 96, 12

# Lengths below this times the largest value mean that the map has shown all of itself.
EXHAUSTED = {4: 1e-6, 8: 1e-14}  # by the bytes of a number

# Distances of eigenvalues below this, relative to the largest, are taken for none.
DEGENERATE = 1e-6

# What is added to a matrix before it is inverted, in units of its mean eigenvalue.
REGULAR = 1e-14

# Residuals of systems that are taken for solved, relative to their right side.
SOLVED = 1e-6

# Residuals below this times the root of the tolerance are taken for convergence.
SETTLED = 0.02


def top_eigenpair(
    matrix: Tensor, start: Tensor, enough: float, steps: int = KRYLOV_STEPS, *, dense: bool = False
) -> tuple[float, Tensor]:
    """About the largest eigenvalue of a Hermitian positive semidefinite matrix, and its vector."""
    if dense or len(matrix) <= DENSE_ORDER:
        values, vectors = torch.linalg.eigh(matrix)
        return float(values[-1]), vectors[:, -1]
    return top_vector(lambda x: matrix @ x, start, steps, enough)


def bottom_eigenpair(matrix: Tensor, start: Tensor, enough: float, steps: int = KRYLOV_STEPS) -> tuple[float, Tensor]:
    """About the smallest eigenvalue of a Hermitian positive semidefinite matrix, and its vector."""
    if len(matrix) <= DENSE_ORDER:
        values, vectors = torch.linalg.eigh(matrix)
        return float(values[0]), vectors[:, 0]
    mean = float(matrix.diagonal().real.mean())
    shifted, regular = matrix.clone(), REGULAR * mean
    shifted.diagonal().add_(regular)
    factor, info = torch.linalg.cholesky_ex(shifted)
    while int(info) and regular < mean:  # singular but for rounding
        regular *= 64
        shifted.diagonal().add_(regular)
        factor, info = torch.linalg.cholesky_ex(shifted)
    vector = top_vector(lambda x: torch.cholesky_solve(x[:, None], factor)[:, 0], start, steps, enough)[1]
    vector = vector / vector.norm()
    return float(torch.vdot(vector, matrix @ vector).real), vector


def solve_below(matrix: Tensor, top: float, right: Tensor, steps: int = KRYLOV_STEPS) -> Tensor:
    """About (top·I - matrix)⁻¹ times the columns of ``right``, from a few steps of conjugate gradients for each.

    ``top`` is the largest eigenvalue, and the columns are orthogonal to its vector.
    """
    solution, residual = torch.zeros_like(right), right.clone()
    direction, length = residual, residual.abs().square().sum(0)
    for _ in range(min(steps, len(right) - 1)):
        image = top * direction - matrix @ direction
        along = (direction.conj() * image).real.sum(0)
        # Below that nothing but rounding is left.
        is_known = along > DEGENERATE * top * direction.abs().square().sum(0)
        step = torch.where(is_known, length / torch.where(is_known, along, 1.0), 0.0)
        solution = solution + step * direction
        residual = residual - step * image
        before, length = length, residual.abs().square().sum(0)
        direction = residual + torch.where(before > 0, length / torch.where(before > 0, before, 1.0), 0.0) * direction
    return solution


def conjugate_gradients(apply: Callable[[Tensor], Tensor], right: Tensor, steps: int) -> Tensor:
    """About the solution of a positive semidefinite system, from at most ``steps`` products."""
    solution, residual = torch.zeros_like(right), right.clone()
    direction, length = residual, float(residual.square().sum())
    first = length
    for _ in range(steps):
        image = apply(direction)
        along = float((direction * image).sum())
        if not along > 0:
            break
        solution = solution + length / along * direction
        residual = residual - length / along * image
        before, length = length, float(residual.square().sum())
        if length <= SOLVED**2 * first:
            break
        direction = residual + length / before * direction
    return solution


def top_vector(
    apply: Callable[[Tensor], Tensor], start: Tensor, steps: int, enough: float = 0.0, goal: float = math.inf
) -> tuple[float, Tensor]:
    """Largest Ritz value and its vector, of a Hermitian positive semidefinite map, from at most ``steps`` products.

    Args:
        apply: the map on a flat vector, real or complex.
        start: where to begin.
        steps: most products to make.
        enough: stop when five further steps have raised the value by less than this, relatively, and the residual says
            that it is no mere plateau: near an eigenvalue the error is its square over the gap to the next.
        goal: stop as soon as the value is that large.
    """
    steps = min(steps, start.numel())
    basis = start.new_empty(steps, start.numel())
    diagonal: list[float] = []
    off: list[float] = []
    vector = start / start.norm()
    before, exhausted = 0.0, EXHAUSTED[start.itemsize // (2 if start.is_complex() else 1)]
    for step in range(steps):
        basis[step] = vector
        image = apply(vector)
        diagonal.append(float(torch.vdot(vector, image).real))
        for _ in range(2):  # once leaves too much where the map has a small rank
            image = image - basis[: step + 1].T @ (basis[: step + 1].conj() @ image)
        length = float(image.norm())
        if step + 1 == steps or length <= exhausted * max(diagonal):
            break
        if enough and step % 5 == 4:
            value, weights = _ritz(diagonal, off)
            if value >= goal:
                break
            residual = length * abs(float(weights[-1]))
            if value - before <= enough * value and residual <= SETTLED * math.sqrt(enough) * value:
                break
            before = value
        off.append(length)
        vector = image / length
    value, weights = _ritz(diagonal, off)
    return value, basis[: len(diagonal)].T @ weights.to(basis.dtype)


def _ritz(diagonal: list[float], off: list[float]) -> tuple[float, Tensor]:
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    side = torch.tensor(off[: len(diagonal) - 1], dtype=torch.float64)
    values, vectors = torch.linalg.eigh(matrix + torch.diag(side, 1) + torch.diag(side, -1))
    return float(values[-1]), vectors[:, -1]
