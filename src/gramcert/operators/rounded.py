"""Values in float64 with a bound of the rounding in them, sample by sample.

Sums of products are matrix products on the CPU, so that no convolution routine has to be trusted; a sum of n products,
in any order, is off by at most γ_n·Σ|products|, and Σ|products| over all entries is at most ‖|A|‖·‖x‖ in norm. Weights
are widened to float64, which loses nothing.
"""

import math
from collections.abc import Callable

from torch import Tensor

from gramcert.rounding import gamma, next_up, row_norms_up, underflow, up

# Values of a batch, and for each sample a bound of what rounding did to them.
Rounded = tuple[Tensor, Tensor]

# What an operation does to a batch (samples, *shape) in float64.
Compute = Callable[[Tensor], Rounded]


def norms(x: Tensor) -> Tensor:
    """Upper bounds of the norms of the samples."""
    return row_norms_up(flat(x))


def flat(x: Tensor) -> Tensor:
    """Each sample as a row, one of a single number too."""
    return x.reshape(len(x), math.prod(x.shape[1:]))


def exactly(y: Tensor) -> Rounded:
    """Values that were moved, selected or negated, and so not rounded."""
    return y, y.new_zeros(len(y))


def rounding(terms: int, amount: Tensor, y: Tensor) -> Tensor:
    """γ·amount, and what the operations of that many terms per entry of y may lose to underflow."""
    lost = up(underflow(2 * terms) * float(max(1, y[0].numel())))
    return next_up(next_up(amount * gamma(terms)) + lost)


def selecting(function: Callable[[Tensor], Tensor]) -> Compute:
    """A function that rounds nothing."""
    return lambda x: exactly(function(x))
