"""Values, with their rounding, of the functions that :mod:`~gramcert.operators.patterns` recognises."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gramcert.operators import elementwise
from gramcert.operators.linear import LinearMap, Shift
from gramcert.operators.rounded import Compute, Rounded, flat, norms, rounding
from gramcert.rounding import down, next_up, root_up, underflow, up


def gate(gate: Callable[[Tensor], Tensor], stretch: float, gain: float = 1.0, moved: float = 0.0) -> Compute:
    """x·g(kx); for these g what rounding of k does to it is a few units of |x|."""
    return lambda x: elementwise.evaluated(x, x * gate(stretch * x), gain, moved)


def tanh_gate(linear: float, cubic: float) -> Compute:
    """x·½(1 + tanh(αx + βx³)): what a few roundings of its argument t do is at most |x|·γ·|t|(1 - tanh² t)."""
    return lambda x: elementwise.evaluated(x, x * (1 + torch.tanh(linear * x + cubic * x**3)) / 2, 2.0)


def centring(dims: tuple[int, ...]) -> Compute:
    """A value minus its mean over some axes of a batch."""

    def compute(x: Tensor) -> Rounded:
        """The mean of |x| is no longer than x."""
        y = x - x.mean(dims, keepdim=True)
        return y, rounding(math.prod(x.shape[axis] for axis in dims) + 3, next_up(2 * norms(x)), y)

    return compute


def divided(length: Compute, epsilon: float, index: Tensor) -> Compute:
    """Each entry divided by its length, which is at least √ε; the index says which of the lengths that is."""
    smallest = down(math.sqrt(epsilon))

    def compute(x: Tensor) -> Rounded:
        lengths, off = length(x)
        y = x / flat(lengths)[:, index.expand(x.shape[1:]) - 1]
        return y, next_up(next_up(norms(y) * next_up(off / smallest)) + rounding(2, norms(y), y))

    return compute


def clamped(shift: float, limits: Mapping[str, float], t: Tensor) -> Tensor:
    """A sum between limits."""
    return (t + shift).clamp(**limits)


def root_of(maps: list[LinearMap]) -> Compute | None:
    """√(A x²) for maps of numbers that are not negative: nothing cancels, so all rounding is relative to the result.

    But squares may vanish, and √(a + η) - √a <= √η.
    """
    if any(isinstance(part, Shift) and part.offset is None for part in maps):
        return None
    if any(part.error and part.kind not in ("mean", "average pool") for part in maps):
        return None  # the entries of these are within two roundings of the true ones, others only as a whole
    terms = 2 * sum(part.terms + 4 for part in maps) + 5

    def compute(x: Tensor) -> Rounded:
        y = x.square()
        for part in maps:
            y = part.run(y)[0]
        y = y.sqrt()
        largest = math.prod(max(1.0, part.size) for part in maps)
        lost = up(root_up(up(underflow(4 * terms) * largest)) * y[0].numel())
        return y, next_up(rounding(terms, norms(y), y) + lost)

    return compute
