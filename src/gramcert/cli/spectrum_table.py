"""Spectra for the terminal: one with all that is known of it, several side by side."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from gramcert.auditing.readable import shown_down, shown_up
from gramcert.certified.spectrum import Spectrum
from gramcert.cli.geometry import geometry_rows
from gramcert.cli.kernel_file import StoredKernel
from gramcert.enclosure import Enclosure
from gramcert.geometry.convolution import Convolution

# Below this width a table of several spectra leaves out what can be had from the others.
WIDE = 100


@dataclass(frozen=True)
class Measured:
    """A tensor, what to call it, the layer that it is (none if it is a matrix), and its spectrum."""

    name: str
    stored: StoredKernel
    layer: Convolution | None
    sizes: tuple[int, ...] | None
    spectrum: Spectrum


def spectrum_table(one: Measured) -> Table:
    """One spectrum: a row for each thing that is known."""
    found = one.spectrum
    table = Table.grid(padding=(0, 2))
    table.add_row(Text("largest", "bold"), Text(str(found.largest), "bold green"))
    table.add_row("", Text("certified, rounding included", "dim"))
    rows = {} if found.omitted else _of_all(found)
    known = len(found.values)
    if found.omitted:
        rows[f"{known} largest"] = f"down to {float(found.values[-1])!r}, sum {found.ky_fan(known)}"
        rows["not computed"] = "smallest, condition number, nuclear and Frobenius norm: they need all, without --k"
    rows["number"] = f"the {known} largest of {known + found.omitted}" if found.omitted else str(known)
    rows["above 1"] = _above(found)
    rows["error"] = f"{shown_up(found.error, 2)} at most, of each value"
    rows["kernel" if one.layer else "matrix"] = str(one.stored)
    if one.layer is not None:
        rows |= geometry_rows(one.layer, one.sizes)
    for name, value in rows.items():
        if value:
            table.add_row(name, Text(value))
    return table


def spectra_table(several: Sequence[Measured], width: int) -> Table:
    """Several spectra: a row for each, with five digits."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, caption="five digits; --json has certified ends of all")
    table.caption_justify = "left"
    table.add_column("kernel", overflow="fold")
    wide = width >= WIDE
    names = ["values", "largest", "smallest", "condition", "nuclear", *(["Frobenius", "error"] if wide else [])]
    for name in [*names, "above 1"]:
        table.add_column(name, justify="right", no_wrap=True)
    for one in several:
        found = one.spectrum
        ends = [found.largest, *([None] * 4 if found.omitted else _ends_of_all(found))]
        shown = [_short(end) for end in (ends if wide else ends[:4])]
        error = [shown_up(found.error, 2)] if wide else []
        table.add_row(Text(one.name), str(len(found.values)), *shown, *error, _above(found, short=True))
    return table


def _of_all(found: Spectrum) -> dict[str, str]:
    smallest, condition, nuclear, frobenius = _ends_of_all(found)
    return {
        "smallest": str(smallest) if smallest.lower > 0 or not smallest.upper else f"{smallest}: may be 0",
        "condition number": _condition(condition, smallest),
        "nuclear norm": str(nuclear),
        "Frobenius norm": str(frobenius),
    }


def _ends_of_all(found: Spectrum) -> list[Enclosure]:
    return [found.smallest, found.condition, found.nuclear, found.frobenius]


def _condition(condition: Enclosure, smallest: Enclosure) -> str:
    if smallest.lower > 0:
        return str(condition)
    return f"at least {shown_down(condition.lower, 3)}, may be infinite" if smallest.upper else "infinite"


def _above(found: Spectrum, *, short: bool = False) -> str:
    least, most = found.above(1)
    if least == most:
        return str(least)
    if short:
        return f"{least} to {most}"
    reason = "the others are not known" if most > len(found.values) else "some may be exactly 1"
    return f"between {least} and {most}: {reason}"


def _short(enclosure: Enclosure | None) -> str:
    """About the number itself; of a number that is not bounded, or may be 0, the end that is known."""
    if enclosure is None:
        return "–"
    if enclosure.upper == float("inf"):
        return f"≥ {shown_down(enclosure.lower, 3)}"
    if not enclosure.lower and enclosure.upper:
        return f"≤ {shown_up(enclosure.upper, 3)}"
    return f"{(enclosure.lower + enclosure.upper) / 2:.5g}"
