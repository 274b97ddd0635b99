"""Two floats with a number certainly between them, and arithmetic that keeps it so."""

import decimal
import math
import numbers
import re
import textwrap
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from gramcert.exact import Exact, exact, float_down, float_up
from gramcert.rounding import ASSUMPTIONS, root_down, root_up

# What arithmetic and comparisons take: numbers of any type, NumPy's scalars and tensors without axes too.
Number = Any

# Enclosures wider than this, relatively, are printed by their ends.
WIDE = 0.05

# Where a text stands, and how its numbers are written.
_FORMAT = re.compile(r"((?:.?[<>^])?\d*)([+ -]?#?[,_]?(?:\.\d+[eEfFgG%]?|[eEfFgG%]))?")

_DECIMALS = decimal.Context(prec=800)  # every float64 and every sum of two is exact


@dataclass(frozen=True)
class Step:
    """One thing that was tried: what it proved of which quantity, what it cost, why it was or was not enough."""

    name: str
    lower: float
    upper: float
    seconds: float
    note: str = ""
    quantity: str = "the norm"


@dataclass(frozen=True, eq=False)
class Enclosure:
    """A number known to lie between two floats, all rounding included.

    Arithmetic rounds outward. Comparisons are true only when they are certain, so ``a < b`` and ``a >= b`` can both be
    false; Python's own ``max`` and ``sorted`` then pick by chance, so use :meth:`max`. There is no silent conversion to
    a float: say ``.upper`` or ``.lower``.

    Attributes:
        lower: lower bound.
        upper: upper bound; may be infinite.
        method: what proved it.
        tol_reached: whether the relative width that was asked for was reached.
        steps: what was tried; :meth:`explain` prints it.
        notes: what else a reader should know, such as why the tolerance was missed.

    Example:
        >>> from gramcert import Enclosure
        >>> third = Enclosure(0.3333, 0.3334)
        >>> print(third + 1)
        1.33335 ± 5.1e-5
        >>> f"{2 / third:.3f}"
        '[5.998, 6.001]'
        >>> 1 / 3 in third, third < 0.4, third < 0.33335, third > 0.33335
        (True, True, False, False)
    """

    lower: float
    upper: float
    method: str = ""
    tol_reached: bool = True
    steps: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("lower", "upper"):
            value = getattr(self, name)
            object.__setattr__(self, name, _exact_float(f"Enclosure({name})", value))
        if not self.lower <= self.upper or self.lower == math.inf or self.upper == -math.inf:  # also refuses NaN
            raise ValueError(f"Enclosure({self.lower}, {self.upper}): expected numbers with lower <= upper")

    @property
    def relative_width(self) -> float:
        """(upper - lower)/upper; 0 when both are equal, 1 when upper is infinite."""
        if self.upper == self.lower:
            return 0.0
        if math.isinf(self.upper) or math.isinf(self.lower):
            return 1.0 if self.lower >= 0 else math.inf
        return (self.upper - self.lower) / abs(self.upper) if self.upper else math.inf

    # NumPy's arrays and scalars leave the operators to this class, instead of rounding what they meet.
    __array_ufunc__ = None

    def __contains__(self, value: "Number | Enclosure") -> bool:
        lower, upper = _ends(value)
        return self.lower <= lower and upper <= self.upper

    def __add__(self, other: "Number | Enclosure") -> "Enclosure":
        lower, upper = _operand(other)
        return self._with(other, float_down(_sum(self.lower, lower)), float_up(_sum(self.upper, upper)))

    __radd__ = __add__

    def __mul__(self, other: "Number | Enclosure") -> "Enclosure":
        products = [_product(a, b) for a in (self.lower, self.upper) for b in _operand(other)]
        return self._with(other, float_down(min(products)), float_up(max(products)))

    __rmul__ = __mul__

    def __neg__(self) -> "Enclosure":
        return self._with(self, 0.0 - self.upper, 0.0 - self.lower)

    def __sub__(self, other: "Number | Enclosure") -> "Enclosure":
        lower, upper = _operand(other)
        return self._with(other, float_down(_sum(self.lower, -upper)), float_up(_sum(self.upper, -lower)))

    def __rsub__(self, other: "Number") -> "Enclosure":
        return (-self).__add__(other)

    def __truediv__(self, other: "Number | Enclosure") -> "Enclosure":
        return self._with(other, *_quotient((self.lower, self.upper), _operand(other)))

    def __rtruediv__(self, other: "Number") -> "Enclosure":
        return self._with(other, *_quotient(_operand(other), (self.lower, self.upper)))

    def max(self, *others: "Number | Enclosure") -> "Enclosure":
        """The largest of this and other enclosed numbers."""
        result = self
        for other in others:
            lower, upper = _operand(other)
            result = result._with(other, float_down(max(result.lower, lower)), float_up(max(result.upper, upper)))
        return result

    def sqrt(self) -> "Enclosure":
        """The square root of an enclosed number that is not negative."""
        if self.lower < 0:
            raise ValueError(f"Enclosure.sqrt: expected a number that is not negative, got {self!r}")
        roots = [math.sqrt(value) for value in (self.lower, self.upper)]
        lower = roots[0] if _is_square(self.lower, roots[0]) else root_down(self.lower)
        upper = roots[1] if _is_square(self.upper, roots[1]) else root_up(self.upper)
        return self._with(self, lower, upper)

    def __lt__(self, other: "Number | Enclosure") -> bool:
        return bool(self.upper < _ends(other)[0])

    def __le__(self, other: "Number | Enclosure") -> bool:
        return bool(self.upper <= _ends(other)[0])

    def __gt__(self, other: "Number | Enclosure") -> bool:
        return bool(self.lower > _ends(other)[1])

    def __ge__(self, other: "Number | Enclosure") -> bool:
        return bool(self.lower >= _ends(other)[1])

    def __eq__(self, other: object) -> bool:
        """Certainly equal: both are the same exactly known number."""
        if not _is_numeric(other):
            return NotImplemented
        lower, upper = _ends(other)
        return bool(self.lower == self.upper == lower == upper)

    def __ne__(self, other: object) -> bool:
        """Certainly different: no number is in both."""
        if not _is_numeric(other):
            return NotImplemented
        lower, upper = _ends(other)
        return bool(self.upper < lower or self.lower > upper)

    def __hash__(self) -> int:
        return hash(self.lower) if self.lower == self.upper else hash((self.lower, self.upper))

    def __float__(self) -> float:
        raise TypeError("float(Enclosure): which end? use .upper for a guarantee from above, .lower from below")

    def __bool__(self) -> bool:
        raise TypeError("bool(Enclosure): compare it with a number instead")

    def __repr__(self) -> str:
        missed = "" if self.tol_reached else ", tol_reached=False"
        return f"Enclosure({self.lower!r}, {self.upper!r}{missed})"

    def __format__(self, spec: str) -> str:
        """Both ends as a float would be written, rounded outward; without a number's format, the text of ``str``."""
        parts = _FORMAT.fullmatch(spec)
        if parts is None:
            raise ValueError(f"format(Enclosure, {spec!r}): expected a format of floats, such as '.3f'")
        layout, number = parts.groups()
        if not number:
            return format(str(self), layout)
        number = number if "." in number else f"{number[:-1]}.6{number[-1]}"  # as floats do
        lower, upper = _written(self.lower, number, up=False), _written(self.upper, number, up=True)
        return format(lower if lower == upper else f"[{lower}, {upper}]", layout)

    def __str__(self) -> str:
        """Guaranteed digits only: the printed centre and radius contain both ends."""
        if math.isinf(self.upper) and not math.isinf(self.lower):
            return f"at least {self.lower!r}"
        if self.relative_width > WIDE:
            return f"between {_digits(self.lower, 4, up=False)} and {_digits(self.upper, 4, up=True)}"
        with decimal.localcontext(_DECIMALS):
            low, high = decimal.Decimal(self.lower), decimal.Decimal(self.upper)
            if low == high:
                centre = decimal.Decimal(repr(self.lower))
            else:
                half = (high - low) / 2
                centre = ((low + high) / 2).quantize(decimal.Decimal(1).scaleb(half.adjusted()))
            radius = max(high - centre, centre - low)
        # Without an exponent only where every digit that is then written is guaranteed.
        exponent = centre.as_tuple().exponent
        plain = centre.adjusted() >= -5 and isinstance(exponent, int) and exponent <= 0
        text = f"{centre:f}" if plain else f"{centre:e}"
        return text if radius == 0 else f"{text} ± {_two_digits_up(radius)}"

    def explain(self) -> str:
        """What was tried and what it cost, the outcome, and what the guarantee assumes."""
        lines = [f"{self}", f"  lower {self.lower!r}", f"  upper {self.upper!r}"]
        if not self.method:
            return "\n".join(lines)
        reached = "reached" if self.tol_reached else "NOT reached"
        lines.append(f"  relative width {_digits(self.relative_width, 2, up=True)}, tolerance {reached}")
        lines.append(f"by {self.method}")
        lines += [f"note: {note}" for note in self.notes]
        if self.steps:
            lines.append(f"tried, {sum(step.seconds for step in self.steps):.3g} s in all:")
        for step in self.steps:
            note = f"; {step.note}" if step.note else ""
            ends = f"{_digits(step.lower, 9, up=False)} to {_digits(step.upper, 9, up=True)}"
            lines.append(f"  {step.name}: {step.quantity} from {ends}, {step.seconds:.3g} s{note}")
        lines += ["assumed (docs/what-is-certified.md):", *(f"  {assumption}" for assumption in ASSUMPTIONS)]
        return "\n".join(textwrap.fill(line, 80, subsequent_indent="    ", break_long_words=False) for line in lines)

    def _with(self, other: "Number | Enclosure", lower: float, upper: float) -> "Enclosure":
        reached = not isinstance(other, Enclosure) or other.tol_reached
        return Enclosure(lower, upper, "", self.tol_reached and reached)


def _is_numeric(value: object) -> bool:
    """Whether something means numbers, so that what is not one real number has to be refused."""
    return isinstance(value, (Enclosure, numbers.Number, decimal.Decimal, np.generic, np.ndarray, torch.Tensor))


def _ends(value: Any) -> tuple[Exact, Exact]:
    """Both ends of an enclosure, or a number twice. Python compares floats and fractions exactly."""
    if isinstance(value, Enclosure):
        return value.lower, value.upper
    number = exact("Enclosure", value)
    return number, number


def _operand(value: Any) -> tuple[Exact, Exact]:
    """The same for arithmetic, where NaN is no number."""
    ends = _ends(value)
    if ends[0] != ends[0]:
        raise ValueError(f"Enclosure: expected a number, got {value!r}")
    return ends


def _exact_float(name: str, value: Any) -> float:
    number = exact(name, value)
    converted = float_up(number)
    if converted != number and not math.isnan(converted):  # NaN is refused as an end
        raise ValueError(f"{name}: expected a number that a float holds exactly, got {value!r}")
    return converted


def _sum(a: Exact, b: Exact) -> Exact:
    return _infinite(a) + _infinite(b) or Fraction(a) + Fraction(b)


def _infinite(value: Exact) -> float:
    """An infinity, or 0 for every finite number, however large."""
    return value if isinstance(value, float) and math.isinf(value) else 0.0


def _product(a: Exact, b: Exact) -> Exact:
    if not a or not b:
        return Fraction(0)  # also 0·∞: the number is finite, only its bound is not
    if _infinite(a) or _infinite(b):
        return math.copysign(math.inf, 1 if (a > 0) == (b > 0) else -1)
    return Fraction(a) * Fraction(b)


def _quotient(over: tuple[Exact, Exact], under: tuple[Exact, Exact]) -> tuple[float, float]:
    """The ends of all quotients."""
    if under[0] <= 0 <= under[1]:
        raise ZeroDivisionError(f"Enclosure: expected a divisor that is certainly not 0, got {under[0]} to {under[1]}")
    # Over an infinite end there are quotients as near to 0 as one likes, also of an infinite one.
    inverses = [Fraction(0) if _infinite(end) else 1 / Fraction(end) for end in under]
    quotients = [_product(end, inverse) for end in over for inverse in inverses]
    return float_down(min(quotients)), float_up(max(quotients))


def _is_square(value: float, root: float) -> bool:
    """Whether the root is exact: its square, as an exact fraction."""
    if math.isinf(value):
        return True
    top, bottom = root.as_integer_ratio()
    return (top * top, bottom * bottom) == value.as_integer_ratio()


def _two_digits_up(radius: decimal.Decimal) -> str:
    with decimal.localcontext(decimal.Context(prec=2, rounding=decimal.ROUND_CEILING)):
        rounded = +radius
    digits, exponent = f"{rounded:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def _written(value: float, spec: str, *, up: bool) -> str:
    """A bound in the format of floats, rounded outward: decimal numbers are exact, and know directions."""
    if math.isinf(value):
        return f"{value}"
    with decimal.localcontext(_DECIMALS) as context:
        context.rounding = decimal.ROUND_CEILING if up else decimal.ROUND_FLOOR
        return format(decimal.Decimal(value), spec)


def _digits(value: float, count: int, *, up: bool) -> str:
    """So many digits of a bound, rounded outward."""
    rounding = decimal.ROUND_CEILING if up else decimal.ROUND_FLOOR
    with decimal.localcontext(decimal.Context(prec=count, rounding=rounding)):
        return f"{+decimal.Decimal(value):g}" if math.isfinite(value) else repr(value)
