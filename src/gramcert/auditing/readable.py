"""What people read: bounds rounded to the safe side, and text that strangers wrote made harmless."""

import decimal
import math

# Layers that are made to have norm 1 are shown as 1 plus or minus what they differ by.
NEAR_ONE = decimal.Decimal("1e-4")

_OPPOSITE = {decimal.ROUND_CEILING: decimal.ROUND_FLOOR, decimal.ROUND_FLOOR: decimal.ROUND_CEILING}
_SUPERSCRIPTS = str.maketrans("+-0123456789", "⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def shown_up(value: float, digits: int = 6) -> str:
    """An upper bound with so many significant digits: what is shown is never less than ``value``.

    Example:
        >>> shown_up(2 / 3), shown_up(1.0), shown_up(1e9 / 7), shown_up(float("inf"))
        ('0.666667', '1', '1.42858e+8', '∞')
        >>> shown_up(1 + 6.54e-8), shown_up(1 - 6.54e-8)
        ('1 + 6.6e-8', '1 − 6.5e-8')
    """
    return _shown(value, digits, decimal.ROUND_CEILING)


def shown_down(value: float, digits: int = 6) -> str:
    """A lower bound with so many significant digits: what is shown is never more than ``value``.

    Example:
        >>> shown_down(2 / 3), shown_down(1e-9 / 7)
        ('0.666666', '1.42857e-10')
    """
    return _shown(value, digits, decimal.ROUND_FLOOR)


def powers_of_ten(number: str) -> str:
    """A number in scientific notation as mathematicians write it.

    Example:
        >>> powers_of_ten("1.5e-10"), powers_of_ten("1e+9"), powers_of_ten("12")
        ('1.5×10⁻¹⁰', '10⁹', '12')
    """
    mantissa, e, exponent = number.partition("e")
    power = f"10{str(int(exponent)).translate(_SUPERSCRIPTS)}" if e else mantissa
    return power if not e or mantissa == "1" else f"{mantissa}×{power}"


def shown_share(share: float) -> str:
    r"""A share, not a bound: to the nearest tenth of a percent.

    Example:
        >>> shown_share(0.0347), shown_share(-3.2), shown_share(1e6 / 7)
        ('3.5\u202f%', '−320\u202f%', '1.4×10⁷\u202f%')
    """
    percent = 100 * share
    shown = f"{percent:.1f}" if abs(percent) < 100 else f"{percent:.0f}" if abs(percent) < 1e5 else f"{percent:.1e}"
    return f"{powers_of_ten(shown)}\u202f%".replace("-", "−")


def shown_seconds(seconds: float) -> str:
    """A time in the unit that suits it.

    Example:
        >>> [shown_seconds(time) for time in (0.0, 0.00234, 0.75, 12.34, 200.0, 7500.0)]
        ['0 s', '2.3 ms', '750 ms', '12.3 s', '3 min 20 s', '2 h 5 min']
    """
    if seconds < 0.9995:
        return f"{1000 * seconds:.{1 if seconds < 0.00995 else 0}f} ms" if seconds else "0 s"
    if seconds < 59.95:
        return f"{seconds:.{2 if seconds < 9.995 else 1}f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def shown_text(text: str, most: int = 160) -> str:
    r"""A name from a model: long ones without their middle, nothing in it that moves the cursor or turns the text.

    Example:
        >>> shown_text("layer1.0.conv1"), shown_text("a\x1b[31m"), shown_text("a" * 1000, 10)
        ('layer1.0.conv1', 'a�[31m', 'aaaaaa…aaa')
    """
    if len(text) > most:
        tail = most // 3
        text = f"{text[: most - tail - 1]}…{text[len(text) - tail :]}"
    return "".join(c if c.isprintable() else " " if c.isspace() else "�" for c in text)


def _shown(value: float, digits: int, rounding: str) -> str:
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    exact = decimal.Decimal(value or 0.0)  # no negative zero
    excess = decimal.Context(1000).subtract(exact, 1)
    if 0 < abs(excess) < NEAR_ONE:
        away = rounding if excess > 0 else _OPPOSITE[rounding]
        return f"1 {'+' if excess > 0 else '−'} {decimal.Context(2, away).plus(abs(excess)):.1e}"
    rounded = decimal.Context(digits, rounding).plus(exact)
    if rounded == exact:  # its zeros at the end say nothing; those of a rounded number say how far it was rounded
        rounded = rounded.normalize()
    return f"{rounded:f}" if not rounded or -4 <= rounded.adjusted() < digits else f"{rounded:e}"
