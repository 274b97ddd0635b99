"""Every input size at once: the largest σ(E) over all frequencies, times the norm of the padding map."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.certified.gram_symbol import GramSymbol, crude_norm
from gramcert.certified.lanczos import top_vector
from gramcert.certified.tapwise import TapwiseLayer
from gramcert.certified.torus import Extremum, torus_maximum
from gramcert.certified.work import OutOfBudgetError, Work
from gramcert.geometry.axis import Axis
from gramcert.rounding import largest_upper

# What is enclosed here, and is not the norm at one size.
SUPREMUM = "the supremum over all frequencies"

SEARCH = "adaptive search of all frequencies"
# Products for a lower bound where symbols would take too much memory.
LOWER_STEPS = 30

MATRIX = "Cholesky proof of the matrix"  # kernels with one tap have one symbol


@dataclass(frozen=True)
class Supremum:
    """Bounds of the largest σ(E) over all frequencies and groups; the maximiser with its group, if one was found."""

    lower: float
    upper: float
    method: str
    missed: str
    best: tuple[int, Extremum] | None


def supremum(kernels: Tensor, tol: float, work: Work) -> Supremum:
    """Enclose sup σ(E) of stride-1 kernels (groups, out, in, *taps) over all frequencies and groups."""
    lower, upper, missed, evaluations = 0.0, 0.0, "", 0
    method = SEARCH if max(kernels.shape[3:]) > 1 else MATRIX
    best = None
    crude = [crude_norm(kernel) for kernel in kernels]
    for group in sorted(range(len(kernels)), key=lambda index: -crude[index]):
        kernel = kernels[group]
        if crude[group] <= largest_upper(lower, tol):  # this group cannot matter
            upper = max(upper, crude[group])
            continue
        try:
            symbol = GramSymbol.within(method, kernel, work, crude[group])
        except OutOfBudgetError as error:
            lower, upper, missed = max(lower, lower_norm(kernel, work)), max(upper, crude[group]), str(error)
            continue
        found = torus_maximum(symbol, tol, work, lower)
        evaluations += found.evaluations
        if best is None or found.lower > lower:
            best = group, found
        lower, upper, missed = max(lower, found.lower), max(upper, found.upper), missed or found.missed
    work.record(method, lower, upper, missed or f"{evaluations} symbols", quantity=SUPREMUM)
    return Supremum(lower, upper, method, missed, best)


def lower_norm(kernel: Tensor, work: Work) -> float:
    """A lower bound of sup σ(E) without symbols.

    The mean of ‖E(ω)x‖² over all frequencies is Σ_b ‖K_b x‖² = ‖Kx‖² for the taps stacked as rows of one matrix K, so
    its largest singular value is a lower bound; of a matrix it is the norm itself. 0 if K does not fit into the memory.
    """
    rows, columns = kernel.numel() // kernel.shape[1], kernel.shape[1]
    if 8 * (kernel.numel() + 8 * rows + (LOWER_STEPS + 8) * columns) > work.available:
        return 0.0
    stacked = kernel.flatten(2).permute(2, 0, 1).reshape(-1, kernel.shape[1])
    layer = TapwiseLayer(stacked[None, :, :, None], (Axis(1, 1, 0, 1, 1, 1, "zeros"),))
    start = torch.ones(kernel.shape[1], dtype=torch.float64)
    vector = top_vector(lambda x: stacked.T @ (stacked @ x), start, LOWER_STEPS)[1]
    return layer.norm_below(vector[None, :, None])
