import decimal
import math
import operator
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gramcert import Enclosure
from gramcert.enclosure import Step

ends = st.floats(-1e300, 1e300)
sizes = st.floats(0, 1e300)


@st.composite
def enclosures(draw, of=ends):
    return Enclosure(*sorted([draw(of), draw(of)]))


@given(enclosures(), enclosures(), st.floats(0, 1), st.floats(0, 1))
def test_arithmetic_keeps_every_point(left, right, here, there):
    first, second = (
        Fraction(e.lower) + Fraction(t) * (Fraction(e.upper) - Fraction(e.lower))
        for e, t in ((left, here), (right, there))
    )
    results = [(left + right, first + second), (left * right, first * second), (left - right, first - second)]
    results.append((-left, -first))
    if not right.lower <= 0 <= right.upper:
        results.append((left / right, first / second))
    for result, exact in results:
        assert result.lower <= exact <= result.upper
    assert left.max(right).lower <= max(first, second) <= left.max(right).upper


@given(enclosures(), enclosures())
def test_arithmetic_rounds_by_one_unit_at_most(left, right):
    total = left + right
    exact = Fraction(left.upper) + Fraction(right.upper)
    assert math.nextafter(total.upper, -math.inf) < exact <= total.upper


@given(enclosures(sizes))
def test_square_roots(enclosure):
    root = enclosure.sqrt()
    assert Fraction(root.lower) ** 2 <= Fraction(enclosure.lower)
    assert Fraction(enclosure.upper) <= Fraction(root.upper) ** 2


@given(enclosures())
def test_printed_digits_contain_both_ends(enclosure):
    text = str(enclosure)
    with decimal.localcontext(decimal.Context(prec=1000)):
        if text.startswith("between"):
            low, high = (decimal.Decimal(end) for end in text.removeprefix("between ").split(" and "))
        else:
            centre, _, radius = text.partition(" ± ")
            low = decimal.Decimal(centre) - decimal.Decimal(radius or 0)
            high = decimal.Decimal(centre) + decimal.Decimal(radius or 0)
        assert low <= decimal.Decimal(enclosure.lower)
        assert decimal.Decimal(enclosure.upper) <= high


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ((3.0, 3.0), "3.0"),
        ((0.1, 0.1), "0.1 ± 5.6e-18"),
        ((2.345612, 2.3461), "2.3459 ± 2.9e-4"),
        ((7.28239e10, 7.2825e10), "7.28244e+10 ± 6.0e5"),
        ((1e-30, 1.001e-30), "1.0005e-30 ± 5.0e-34"),
        ((0.0, 0.0), "0.0"),
        ((1.0, math.inf), "at least 1.0"),
        ((1.23456, 2.34567), "between 1.234 and 2.346"),
        ((-math.inf, 1.0), "between -inf and 1"),
    ],
)
def test_printing(ends, text):
    assert str(Enclosure(*ends)) == text


def test_exact_arithmetic_stays_exact():
    assert Enclosure(0, 0) * Enclosure(1, math.inf) == 0
    assert Enclosure(1, 2) + 1 in Enclosure(2, 3)
    assert 2 * Enclosure(1, 1) == 2
    assert Enclosure(4, 9).sqrt() in Enclosure(2, 3)
    assert Enclosure(1.7e308, 1.7e308) + 1.7e308 > 1.79e308


def test_differences_and_quotients_of_known_numbers():
    assert Enclosure(1, 2) - Enclosure(0.5, 1) in Enclosure(0, 1.5)
    assert 3 - Enclosure(1, 2) in Enclosure(1, 2)
    assert Enclosure(1, 2) / 4 in Enclosure(0.25, 0.5)
    assert 1 / Enclosure(-4, -2) in Enclosure(-0.5, -0.25)
    assert Fraction(1, 3) in 1 / Enclosure(3, 3) != Enclosure(0, 0.25)
    assert (Enclosure(2, 2) / Enclosure(1, math.inf)).lower == 0
    assert Enclosure(0, math.inf) in Enclosure(1, math.inf) / Enclosure(1, math.inf)
    assert not (Enclosure(1, 2, tol_reached=False) - 1).tol_reached
    assert str(-Enclosure(0, 0)) == "0.0"


@pytest.mark.parametrize("divisor", [0, 0.0, Enclosure(0, 1), Enclosure(-1, 0), Enclosure(-1, 1)])
def test_a_divisor_that_may_be_zero_is_refused(divisor):
    with pytest.raises(ZeroDivisionError, match="expected a divisor that is certainly not 0, got"):
        1 / Enclosure(1, 1) / divisor
    if isinstance(divisor, Enclosure):
        with pytest.raises(ZeroDivisionError, match="certainly not 0"):
            1 / divisor


@given(enclosures(), st.sampled_from([".3f", ".0e", ".4g", "+.2e", ",.1f", ".2%", "f", ".5"]))
def test_formats_round_outward(enclosure, spec):
    text = format(enclosure, spec)
    ends = text.removeprefix("[").removesuffix("]").split(", ")
    with decimal.localcontext(decimal.Context(prec=1000)):
        scale = 100 if spec.endswith("%") else 1
        low, high = (decimal.Decimal(end.replace(",", "").rstrip("%")) / scale for end in (ends[0], ends[-1]))
        assert low <= decimal.Decimal(enclosure.lower)
        assert decimal.Decimal(enclosure.upper) <= high


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (".3f", "[1.234, 1.235]"),
        ("+.1f", "[+1.2, +1.3]"),
        ("f", "[1.234567, 1.234600]"),
        (">18.3f", "    [1.234, 1.235]"),
        ("", "1.23458 ± 2.0e-5"),
        ("*^20", "**1.23458 ± 2.0e-5**"),
    ],
)
def test_formats(spec, text):
    assert format(Enclosure(1.2345678, 1.2346), spec) == text


def test_formats_of_special_enclosures():
    assert f"{Enclosure(2, 2):.2f}" == "2.00"
    assert f"{Enclosure(1, math.inf):.2f}" == "[1.00, inf]"
    assert f"{Enclosure(-math.inf, -1.239):.2f}" == "[-inf, -1.23]"
    assert f"{Enclosure(-math.inf, math.inf):.2f}" == "[-inf, inf]"
    with pytest.raises(ValueError, match=r"expected a format of floats, such as '\.3f'"):
        format(Enclosure(1, 2), "d")


def test_the_representation_is_short_and_can_be_evaluated():
    missed = Enclosure(0.1, 0.25, "proof", tol_reached=False, steps=(Step("proof", 0.1, 0.25, 0.0),))
    assert repr(missed) == "Enclosure(0.1, 0.25, tol_reached=False)"
    assert repr(Enclosure(1, 2)) == "Enclosure(1.0, 2.0)"


def test_comparisons_are_true_only_when_certain():
    narrow, wide = Enclosure(1, 2), Enclosure(1.5, 3)
    assert not narrow < wide
    assert not narrow > wide
    assert [narrow == other for other in (wide, Enclosure(1, 2))] == [False, False]
    assert [narrow != other for other in (wide, Enclosure(1, 2))] == [False, False]
    assert narrow < 2.1
    assert narrow <= 2
    assert narrow >= 1
    assert narrow > 0.9
    assert narrow != 3
    assert narrow != "1"
    assert Enclosure(1, 1) == 1.0
    assert hash(Enclosure(1, 1)) == hash(1.0)


def test_comparisons_with_any_number():
    """Also with those that no float holds, and with infinities and NaN."""
    narrow = Enclosure(1, 2)
    assert narrow < math.inf
    assert narrow > -math.inf
    assert narrow < 2**60 + 1
    assert narrow < 10**400
    assert narrow < Fraction(21, 10)
    assert not narrow < math.nan
    assert [narrow == other for other in (math.nan, math.inf, 2**60 + 1, None, "1")] == [False] * 5
    assert narrow * np.float32(2) in Enclosure(2, 4)


def scalars(value):
    """One exact number in every type that holds it."""
    yield value
    if value.denominator == 1 and abs(value) < 2**63:
        yield from (int(value), np.array(int(value)), torch.tensor(int(value)), np.int64(int(value)))
    ratio = decimal.Decimal(value.numerator) / decimal.Decimal(value.denominator)
    if Fraction(ratio) == value:
        yield ratio
    for kind in (np.float16, np.float32, np.float64, np.longdouble):
        with np.errstate(all="ignore"):
            scalar = kind(int(value) if kind is np.longdouble and value.denominator == 1 else float(value))
        if np.isfinite(scalar) and Fraction(*scalar.as_integer_ratio()) == value:
            yield from (scalar, np.array(scalar))
    for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensor = torch.tensor(float(value), dtype=torch.float64).to(kind)
        if tensor.isfinite() and Fraction(tensor.item()) == value:
            yield tensor


numbers = st.one_of(
    st.integers(-(2**62), 2**62).map(Fraction),
    st.floats(width=16, allow_nan=False, allow_infinity=False).map(Fraction),
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(Fraction),
    st.floats(allow_nan=False, allow_infinity=False).map(Fraction),
)


@given(numbers, numbers, st.sampled_from([-1, 0, 1]))
def test_numbers_of_every_type_are_taken_exactly(value, base, step):
    """Comparisons, membership and arithmetic from both sides, also one unit next to the number."""
    end = float(value if step else base)
    end = math.nextafter(end, step * math.inf) if step and math.isfinite(math.nextafter(end, step * math.inf)) else end
    enclosure = Enclosure(end, end)
    for scalar in scalars(value):
        assert (enclosure <= scalar) == (scalar >= enclosure) == (Fraction(end) <= value), type(scalar)
        assert (enclosure >= scalar) == (scalar <= enclosure) == (Fraction(end) >= value), type(scalar)
        assert (enclosure < scalar) == (scalar > enclosure) == (Fraction(end) < value), type(scalar)
        assert (enclosure == scalar) == (scalar == enclosure) == (Fraction(end) == value), type(scalar)
        assert (enclosure != scalar) == (scalar != enclosure) == (Fraction(end) != value), type(scalar)
        assert (scalar in enclosure) == (Fraction(end) == value), type(scalar)
        for total in (enclosure + scalar, scalar + enclosure):
            assert total.lower <= Fraction(end) + value <= total.upper, type(scalar)
        for product in (enclosure * scalar, scalar * enclosure):
            assert product.lower <= Fraction(end) * value <= product.upper, type(scalar)


def test_what_is_not_one_real_number_is_refused():
    enclosure = Enclosure(1, 2)
    for value in (1j, np.complex64(1), torch.tensor(1j), True, np.True_, torch.tensor(True), np.ones(1), torch.ones(1),
                  np.timedelta64(1), [1], None):  # fmt: skip
        for use in (enclosure.__add__, enclosure.__mul__, enclosure.__lt__, enclosure.__contains__, enclosure.max):
            with pytest.raises(TypeError, match="expected a number"):
                use(value)
        with pytest.raises(TypeError, match="expected a number"):
            Enclosure(value, 3)
        if value is not None and not isinstance(value, list):
            for compare in (operator.eq, operator.ne):
                with pytest.raises(TypeError, match="expected a number"):
                    compare(enclosure, value)
    for value in (math.nan, np.float32("nan"), decimal.Decimal("sNaN"), torch.tensor(math.nan)):
        assert [enclosure < value, enclosure > value, enclosure == value, value in enclosure] == [False] * 4
        for use in (enclosure.__add__, enclosure.__mul__, enclosure.max):
            with pytest.raises(ValueError, match="expected a number"):
                use(value)
    assert enclosure < decimal.Decimal("Infinity")
    for huge in (10**400, decimal.Decimal("1e400"), Fraction(10**400)):
        for found in (enclosure + huge, enclosure * huge, enclosure.max(huge)):
            assert (found.lower, found.upper) == (sys.float_info.max, math.inf)
    assert enclosure.max(Fraction(7, 3)).lower < Fraction(7, 3) < enclosure.max(Fraction(7, 3)).upper


def test_the_largest_of_several():
    """Python's max picks by chance where nothing is certain; this one encloses."""
    largest = Enclosure(1.5, 1.6).max(Enclosure(1, 2), 1.2)
    assert (largest.lower, largest.upper) == (1.5, 2.0)


def test_membership():
    assert 1.5 in Enclosure(1, 2)
    assert 2.5 not in Enclosure(1, 2)
    assert Enclosure(1.2, 1.4) in Enclosure(1, 2)
    assert Enclosure(1.2, 2.4) not in Enclosure(1, 2)


@pytest.mark.parametrize(
    ("ends", "width"),
    [((0.0, 0.0), 0.0), ((2.0, 2.0), 0.0), ((1.0, 2.0), 0.5), ((0.0, 5e-324), 1.0), ((1.0, math.inf), 1.0)],
)
def test_relative_width(ends, width):
    assert Enclosure(*ends).relative_width == width


def test_a_missed_tolerance_is_inherited():
    missed = Enclosure(1, 2, tol_reached=False)
    assert not (missed + 1).tol_reached
    assert not (Enclosure(1, 1) * missed).tol_reached
    assert (Enclosure(1, 1) + 1).tol_reached


def test_no_silent_conversions():
    with pytest.raises(TypeError, match=r"which end\? use .upper"):
        float(Enclosure(1, 2))
    with pytest.raises(TypeError, match="compare it with a number"):
        bool(Enclosure(1, 2))


@pytest.mark.parametrize(
    ("ends", "error", "message"),
    [
        ((2, 1), ValueError, r"Enclosure\(2.0, 1.0\): expected numbers with lower <= upper"),
        ((math.nan, 1), ValueError, "expected numbers with lower <= upper"),
        ((math.inf, math.inf), ValueError, "expected numbers with lower <= upper"),
        (("1", 2), TypeError, r"Enclosure\(lower\): expected a number, got '1'"),
        ((True, 2), TypeError, "expected a number, got True"),
        ((0, 10**400), ValueError, "expected a number that a float holds exactly"),
        ((0, 2**60 + 1), ValueError, "expected a number that a float holds exactly"),
    ],
)
def test_bad_ends(ends, error, message):
    with pytest.raises(error, match=message):
        Enclosure(*ends)


def test_bad_operands():
    with pytest.raises(TypeError, match=r"expected a number, got '1'"):
        Enclosure(1, 2) + "1"
    with pytest.raises(TypeError, match="expected a number, got '1'"):
        assert Enclosure(1, 2) < "1"
    with pytest.raises(ValueError, match="expected a number that is not negative"):
        Enclosure(-1, 2).sqrt()


def test_explanations_name_what_a_step_bounds_and_round_it_outward():
    steps = (Step("search", 1 / 3, 2 / 3, 0.0, quantity="the supremum"), Step("proof", 0.1, math.inf, 0.0))
    text = Enclosure(0.25, 1, "proof", steps=steps).explain()
    assert "search: the supremum from 0.333333333 to 0.666666667," in text
    assert "proof: the norm from 0.100000000 to inf," in text
    assert "relative width 0.75," in text
    close = Enclosure(1, 1, "proof", steps=(Step("proof", 0.9999999999, 1.0000000001, 0.0),)).explain()
    assert "proof: the norm from 0.999999999 to 1.00000001," in close


def test_explanation_lists_what_was_tried_and_assumed():
    steps = (Step("first", 1.0, 3.0, 0.25, "too wide"), Step("second", 1.0, 2.0, 0.5))
    text = Enclosure(1, 2, "second", False, steps, ("no time left",)).explain()
    for part in (
        "NOT reached",
        "by second",
        "note: no time left",
        "0.75 s in all",
        "first: the norm from 1 to 3",
        "too wide",
        "IEEE 754",
    ):
        assert part in text
