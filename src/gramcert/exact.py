"""Numbers of any type as exact ones: NumPy and torch round one side of a comparison to the type of the other."""

import math
import numbers
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch

Exact = Fraction | float  # a float only where it is infinite or not a number


def exact(name: str, value: Any) -> Exact:
    """The number that ``value`` is, whatever its type; what is not one real number is an error that begins with a name.

    Bools are refused, and so are arrays and tensors with axes, even with one entry.
    """
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not (value.is_complex() or value.is_quantized):
        value = (value.double() if value.is_floating_point() else value).item()  # float64 holds every narrower type
    elif isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, np.integer) and not isinstance(value, np.timedelta64):
        value = int(value)
    # The methods of the base classes: a subclass may say something else than what it holds.
    if isinstance(value, int) and not isinstance(value, bool):
        return Fraction(int.__int__(value))
    if isinstance(value, float):
        value = float.__float__(value)
        return Fraction(value) if math.isfinite(value) else value
    if isinstance(value, Decimal):
        return Fraction(value) if value.is_finite() else math.nan if value.is_nan() else float(value)
    if isinstance(value, np.floating):  # also wider ones than float64
        return Fraction(*value.as_integer_ratio()) if np.isfinite(value) else float(value)
    if isinstance(value, numbers.Rational) and not isinstance(value, (int, np.generic)):
        return Fraction(int(value.numerator), int(value.denominator))
    raise TypeError(f"{name}: expected a number, got {value!r}")


def float_up(number: Exact) -> float:
    """The smallest float that is not below."""
    nearest = _nearest(number)
    return nearest if nearest >= number else math.nextafter(nearest, math.inf)


def float_down(number: Exact) -> float:
    """The largest finite float that is not above."""
    nearest = min(_nearest(number), math.nextafter(math.inf, 0.0))
    return nearest if nearest <= number else math.nextafter(nearest, -math.inf)


def _nearest(number: Exact) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
