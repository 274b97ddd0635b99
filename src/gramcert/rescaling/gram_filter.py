"""The filter of the Gram matrix G(ω) = E(ω)E(ω)* of a kernel: the correlation of its rows with each other."""

import torch
from torch import Tensor

from gramcert.geometry.symbol import FrequencyGrid
from gramcert.rescaling.hermitian import FilterTransform, evaluate, evaluation_table


def gram_filter(kernels: Tensor) -> Tensor:
    r"""Γ[x]_ij = Σ_{c,a} K_ic[a + x]·K_jc[a], a row per lag x modulo 2k-1 per axis: (lags, groups, rows, rows).

    Args:
        kernels: shape (groups, rows, columns, \*taps).

    Differentiable by torch's own rules: this grid is small.
    """
    groups, rows, columns, *taps = kernels.shape
    if all(size == 1 for size in taps):
        matrix = kernels.reshape(groups, rows, columns)
        return (matrix @ matrix.mT)[None]
    grid = FrequencyGrid.unshifted(tuple(2 * size - 1 for size in taps))
    table = evaluation_table(grid, [range(size) for size in taps], kernels)
    blocks = evaluate(table, kernels.flatten(3).movedim(-1, 0)).flatten(1, 2)
    # EE* = (XXᵀ + YYᵀ) + i(YXᵀ - XYᵀ) for E = X + iY.
    real, imaginary = blocks
    mixed = imaginary @ real.mT
    gram = torch.stack([real @ real.mT + imaginary @ imaginary.mT, mixed - mixed.mT])
    return FilterTransform(grid, kernels)(gram.reshape(2, len(grid), -1)).reshape(-1, groups, rows, rows)


def lags(taps: tuple[int, ...]) -> list[list[int]]:
    """The lag at each place of the filter, per axis: the transform leaves lag x at place x mod 2k-1."""
    return [[*range(size), *range(1 - size, 0)] for size in taps]
