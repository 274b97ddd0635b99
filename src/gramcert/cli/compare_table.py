"""A comparison as a table in the terminal."""

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gramcert.baselines.comparison import Comparison, Row
from gramcert.enclosure import Enclosure

# Narrower terminals do without the column that says where a method comes from.
WIDE = 110

OURS = ("gramcert", "Algorithm", "Theorem")


def comparison_table(comparison: Comparison, width: int) -> Table:
    """The truth on top, then the methods of this package and the paper, then the others."""
    wide = width >= WIDE
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    if wide:
        table.add_column("from", no_wrap=True, style="dim")
    for name in ("value", "error", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("", no_wrap=True)
    truth = ("truth, float64", "SVD or Lanczos", f"{comparison.truth:.6g}", "", _time(comparison.truth_seconds))
    table.add_row(*_without_source([*truth, "exact", ""], wide), style="bold", end_section=True)
    ours = [row for row in comparison.rows if row.source.startswith(OURS)]
    others = [row for row in comparison.rows if row not in ours]
    for group in (ours, others):
        for row in group:
            cells: list[str | Text] = [
                row.name,
                row.source,
                _value(row),
                _error(row, comparison.tolerance),
                "" if row.seconds is None else _time(row.seconds),
                row.kind,
                verdict(row, comparison.tolerance),
            ]
            table.add_row(
                *_without_source(cells, wide), style="dim" if row.value is None else "", end_section=row is group[-1]
            )
    return table


def comparison_notes(comparison: Comparison) -> Group:
    """What the marks mean, and why methods were left out."""
    lines = [
        Text(),
        Text("✓ keeps what its kind promises, up to rounding · ! promises nothing · ✗ on the wrong side", "dim"),
    ]
    lines += [Text(f"{row.name} {row.note}", "dim") for row in comparison.rows if row.value is None]
    return Group(*lines)


def verdict(row: Row, tolerance: float) -> Text:
    """A mark: the value keeps what its kind promises, breaks it, or nothing was promised."""
    if row.value is None or row.relative_error is None:
        return Text("–", "dim")
    if row.respected:
        return Text("✓", "green")
    if row.respected is False:
        return Text("✗ WRONG", "bold red")
    return Text("✗ too low", "bold red") if row.relative_error < -tolerance else Text("!", "yellow")


def _value(row: Row) -> str:
    if row.value is None:
        return "–"
    return f"{row.value:.6g}" if row.lower is None else str(Enclosure(row.lower, row.value))


def _error(row: Row, tolerance: float) -> str:
    if row.relative_error is None:
        return ""
    if abs(row.relative_error) <= tolerance:
        return "0 %"
    percent = 100 * row.relative_error
    if abs(percent) >= 1000:
        return f"{percent:+.0f} %"
    return f"{percent:+.{3 if abs(percent) >= 0.1 else 2 if abs(percent) >= 0.01 else 1}g} %"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _without_source(cells: list[str | Text], wide: bool) -> list[str | Text]:
    return cells if wide else [cells[0], *cells[2:]]
