"""Resized axes: the size of the result and the nearest place, where every runtime comes to the same.

A model says from which sizes and scales these follow, not in which arithmetic, and runtimes differ: most compute in
float32. Interpolation is continuous in its coordinates, so that their rounding moves its weights by as little. A size
and the nearest place jump instead, and have no meaning where the arithmetic decides.
"""

import math
from collections.abc import Iterable
from fractions import Fraction

import torch

from gramcert.operators.rules import Unknown

FLOATS = (torch.float32, torch.float64)


def agreed(choices: Iterable[int], what: str) -> int:
    """The one value that all arithmetics come to."""
    found = sorted(set(choices))
    if len(found) > 1:
        raise Unknown(f"{what} depends on how a runtime computes it: {' or '.join(map(str, found))}")
    return found[0]


def agreed_size(size: int, scale: Fraction) -> int:
    """⌊size·scale⌋."""
    rounded = [torch.tensor(float(size), dtype=dtype) * torch.tensor(float(scale), dtype=dtype) for dtype in FLOATS]
    return agreed([math.floor(size * scale), *(math.floor(value.item()) for value in rounded)], "the new size")


def require_change(size: int, out: int, scale: float | Fraction | None) -> None:
    """Refuse a scale other than 1 that leaves a size as it was: some runtimes then leave the entries too."""
    if out == size and scale is not None and scale != 1:
        raise Unknown(f"a scale of {float(scale)} that leaves {size} places depends on how a runtime computes it")
