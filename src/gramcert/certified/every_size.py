"""Every input size at once: the largest σ(E) over all frequencies, times the norm of the padding map."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.certified.gram_symbol import GramSymbol, crude_norm
from gramcert.certified.torus import Maximum, torus_maximum
from gramcert.certified.work import OutOfBudgetError, Work
from gramcert.rounding import down, norm_down

SEARCH = "adaptive search of all frequencies"
MATRIX = "Cholesky proof of the matrix"  # kernels with one tap have one symbol


@dataclass(frozen=True)
class Supremum:
    """Bounds of the largest σ(E) over all frequencies and groups; the maximiser with its group, if one was found."""

    lower: float
    upper: float
    method: str
    missed: str
    best: tuple[int, GramSymbol, Maximum] | None


def supremum(kernels: Tensor, tol: float, work: Work) -> Supremum:
    """Enclose sup σ(E) of stride-1 kernels (groups, out, in, *taps) over all frequencies and groups."""
    lower, upper, missed, evaluations = 0.0, 0.0, "", 0
    method = SEARCH if max(kernels.shape[3:]) > 1 else MATRIX
    best = None
    crude = [crude_norm(kernel) for kernel in kernels]
    for group in sorted(range(len(kernels)), key=lambda index: -crude[index]):
        kernel = kernels[group]
        if crude[group] <= down(lower / (1 - tol)):  # this group cannot matter
            upper = max(upper, crude[group])
            continue
        try:
            work.require_bytes(method, GramSymbol.bytes_for(kernel))
            symbol = GramSymbol(kernel)
        except OutOfBudgetError as error:
            lower, upper, missed = max(lower, column_norm(kernel)), max(upper, crude[group]), str(error)
            continue
        found = torus_maximum(symbol, tol, work, lower)
        evaluations += found.evaluations
        if best is None or found.lower > lower:
            best = group, symbol, found
        lower, upper, missed = max(lower, found.lower), max(upper, found.upper), missed or found.missed
    work.record(method, lower, upper, missed or f"{evaluations} symbols")
    return Supremum(lower, upper, method, missed, best)


def column_norm(kernel: Tensor) -> float:
    """Below sup σ(E): the mean of ‖E(ω)e_i‖² over all frequencies is the sum of squares of input channel i."""
    return max(norm_down(column) for column in torch.unbind(kernel, 1))
