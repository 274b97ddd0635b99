"""Every input size at once: the largest σ(E) over all frequencies, times the norm of the padding map."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.certified.frequencies import Frequencies
from gramcert.certified.gram_symbol import GramSymbol, crude_norm
from gramcert.certified.groups import group_bounds
from gramcert.certified.lanczos import top_vector
from gramcert.certified.torus import Extremum, torus_maximum
from gramcert.certified.work import OutOfBudgetError, Work
from gramcert.rounding import frobenius_up, largest_upper

# What is enclosed here, and is not the norm at one size.
SUPREMUM = "the supremum over all frequencies"

SEARCH = "adaptive search of all frequencies"
# Products for a lower bound where symbols would take too much memory.
LOWER_STEPS = 30

MATRIX = "Cholesky proof of the matrix"  # kernels with one tap have one symbol
WITHOUT_PROOF = "sums of absolute or squared weights, and Lanczos iteration"


@dataclass(frozen=True)
class Supremum:
    """Bounds of the largest σ(E) over all frequencies and groups; the maximiser with its group, if one was found."""

    lower: float
    upper: float
    method: str
    missed: str
    best: tuple[int, Extremum] | None


def supremum(kernels: Tensor, tol: float, work: Work, exponent: int = 0) -> Supremum:
    """Enclose sup σ(E) of stride-1 kernels (groups, out, in, *taps) times 2^exponent over all frequencies and groups.

    Kernels with one tap may be of any type and anywhere, as they are stored; others are in float64.
    """
    lower, upper, missed, evaluations = 0.0, 0.0, "", 0
    method = SEARCH if max(kernels.shape[3:]) > 1 else MATRIX
    best = None
    bounds = [crude_norm(each, exponent) for each in kernels] if method == MATRIX else group_bounds(kernels, work)
    for group in sorted(range(len(kernels)), key=lambda index: -bounds[index]):
        kernel = kernels[group]
        if bounds[group] <= largest_upper(lower, tol):  # this group cannot matter
            upper = max(upper, bounds[group])
            continue
        try:
            symbol = GramSymbol.within(method, kernel, work, exponent=exponent)
        except OutOfBudgetError as error:
            most = min(bounds[group], frobenius_up(kernel, exponent)) if method == MATRIX else bounds[group]
            lower, upper, missed = max(lower, lower_norm(kernel, work, exponent)), max(upper, most), str(error)
            continue
        found = torus_maximum(symbol, tol, work, lower)
        evaluations += found.evaluations
        if best is None or found.lower > lower:
            best = group, found
        lower, upper, missed = max(lower, found.lower), max(upper, found.upper), missed or found.missed
    if missed and best is None:
        method = WITHOUT_PROOF
    work.record(method, lower, upper, missed or f"{evaluations} symbols", quantity=SUPREMUM)
    return Supremum(lower, upper, method, missed, best)


def lower_norm(kernel: Tensor, work: Work, exponent: int = 0) -> float:
    """A lower bound of sup σ(E) without symbols.

    The mean of ‖E(ω)x‖² over all frequencies is Σ_b ‖K_b x‖² = ‖Kx‖² for the taps stacked as rows of one matrix K, so
    its largest singular value is a lower bound; of a matrix it is the norm itself. 0 if that does not fit into the
    memory.
    """
    stacked, copied = kernel.flatten(1), 0
    if kernel[0, 0].numel() > 1:
        copied = 8 * kernel.numel()
        if copied > work.available:
            return 0.0
        stacked = kernel.flatten(2).permute(2, 0, 1).flatten(0, 1)
    symbol = GramSymbol(stacked[..., None], exponent=exponent)
    try:
        symbol.work_within("Lanczos iteration", copied + 8 * (LOWER_STEPS + 8) * symbol.order, work)
    except OutOfBudgetError:
        return 0.0
    start = torch.randn(symbol.order, generator=torch.Generator().manual_seed(0), dtype=kernel.dtype)
    vector = top_vector(symbol.apply, start, LOWER_STEPS)[1]
    return symbol.norm_below(Frequencies(torch.zeros(1, 0, dtype=torch.int64), ()), vector.double())
