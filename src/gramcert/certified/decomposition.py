r"""Singular values by decompositions that prove themselves.

A computed decomposition A ≈ USV* proves its own values, whoever computed it: |σ_i(A) - σ_i(USV*)| <= ‖A - USV*‖, and
σ_i(USV*) lies between s_i·√((1-α)(1-β)) and s_i·√((1+α)(1+β)) with α = ‖U*U - I‖, β = ‖V*V - I‖ (Weyl, Ostrowski).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gramcert.certified.frequencies import Frequencies
from gramcert.certified.gram_symbol import BATCH_BYTES, crude_norm
from gramcert.certified.lifted import LiftedLayer
from gramcert.certified.tapwise import dense_matrix
from gramcert.geometry.axis import Axis
from gramcert.geometry.reduction import one_size_bound
from gramcert.progress import Report, silent
from gramcert.rounding import TWIDDLE_ERROR, complex_gamma, gamma, root_up, total_up, underflow, up


def number_of_values(lifted: LiftedLayer) -> int:
    """How many singular values the symbols of a circulant have in all."""
    groups, outputs, inputs = lifted.reduced.shape[:3]
    return int(groups * min(outputs, inputs) * math.prod(axis.outputs for axis in lifted.axes or ()))


def circulant_values(lifted: LiftedLayer, report: Report = silent) -> tuple[Tensor, float]:
    """The singular values of the symbols on the grid of a circulant, each as often as it occurs, and their error."""
    axes = lifted.axes or ()
    grid = one_size_bound(axes).grids[0]
    copies = math.prod(axis.outputs for axis in axes) // math.prod(grid.sizes)
    repeats = grid.multiplicity(torch.device("cpu")).long() * copies
    frequencies = Frequencies.of_grid(grid, list(range(len(axes))))
    values, errors = [], [0.0]
    done, total = 0, len(lifted.reduced) * len(repeats)
    report("frequencies", done, total)
    for kernel in lifted.reduced:
        flat = kernel.flatten(2)
        places = [torch.arange(size) for size in kernel.shape[2:]]
        count = flat.shape[2]
        taps = flat.permute(2, 0, 1).reshape(count, -1).to(torch.complex128)
        relative = up(complex_gamma(count + 2) + TWIDDLE_ERROR)
        storing = up(up(relative * crude_norm(kernel)) + underflow(4 * kernel.numel()))
        batch = max(1, BATCH_BYTES // (16 * max(flat[..., 0].numel(), count)))
        for part, times in zip(frequencies.split(batch), repeats.split(batch), strict=True):
            cosines, sines = part.waves(places)
            found, error = verified_values(torch.complex(cosines, -sines) @ taps, flat.shape[:2])
            values.append(found.repeat_interleave(times, 0).flatten())
            errors.append(up(error + storing))
            done += len(times)
            report("frequencies", done, total)
    return torch.cat(values), max(errors)


def written_out(kernel: Tensor, axes: tuple[Axis, ...]) -> tuple[Tensor, float]:
    """The matrix of one group's kernel at one size, and how far the stored one is from it in norm.

    Only where padding repeats pixels are entries sums of weights, and rounded.
    """
    copies = math.prod(axis.repetition for axis in axes)
    doubt = up(gamma(kernel[0, 0].numel()) * up(crude_norm(kernel) * root_up(copies))) if copies > 1 else 0.0
    return dense_matrix(kernel, axes), doubt


def verified_values(matrices: Tensor, shape: Sequence[int]) -> tuple[Tensor, float]:
    """Singular values of a batch of matrices, and a bound of the error of each."""
    matrices = matrices.reshape(-1, *shape)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    order = values.shape[-1]
    largest = float(values.max())
    # The Frobenius norms of U and V are √order up to their defects, here bounded generously.
    product = up(2 * complex_gamma(max(shape) + 2) * up(1.1 * order))
    residual = up(_frobenius(((left * values[:, None]) @ right).sub_(matrices)) + up(2 * product * largest))
    identity = torch.eye(order, dtype=matrices.dtype)
    defects = [up(_frobenius(square - identity) + product) for square in (left.mH @ left, right @ right.mH)]
    if not max(defects) < 0.1:
        raise ArithmeticError("torch.linalg.svd returned vectors that are not orthonormal; please report this")
    return values, up(residual + up(largest * up(defects[0] + defects[1])))


def _frobenius(matrices: Tensor) -> float:
    """Upper bound of the largest Frobenius norm in a batch."""
    parts = torch.view_as_real(matrices) if matrices.is_complex() else matrices
    return root_up(up(total_up(parts.square().flatten(1)) * (1 + 8 * gamma(4))))
