"""An audit as a table in the terminal."""

import math
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from gramcert.auditing.assumptions import FIXED
from gramcert.auditing.readable import shown_down, shown_seconds, shown_share, shown_text, shown_up
from gramcert.auditing.result import Audit
from gramcert.operators.propagation import Row

# Narrower terminals do without the geometry.
WIDE = 110

# A reason or a note is a sentence, a name is not.
LONGEST_SENTENCE = 1000


def audit_table(audit: Audit) -> RenderableType:
    """The rows, what is to be said about them, and the verdict last, where the eye is when the command ends."""
    return _AuditTable(audit)


@dataclass(frozen=True)
class _AuditTable:
    """Knows its width only when it is printed."""

    audit: Audit

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.audit.rows:
            yield _rows(self.audit, options.max_width >= WIDE)
            yield Text()
        if self.audit.blocks:
            yield from (_blocks(self.audit), Text())
        if notes := _notes(self.audit):
            yield from (*notes, Text())
        yield from _verdict(self.audit)


def _rows(audit: Audit, wide: bool) -> Table:
    """Without the columns that would be empty."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("layer", overflow="fold")
    if wide:
        table.add_column("geometry", overflow="fold", style="dim")
    numbers = [_numbers(row, audit.tol) for row in audit.rows]
    used = [name for name in numbers[0] if any(cells[name] for cells in numbers)]
    for name in used:
        table.add_column(name, justify="right", no_wrap=True)
    for row, cells in zip(audit.rows, numbers, strict=True):
        # Padding by zeros is what everyone expects; the page says it.
        about = row.geometry if row.lower is not None else f"{row.kind} {row.geometry}"
        geometry = [Text(shown_text(about.replace(", zeros", "").strip()))] if wide else []
        layer = Text(shown_text(row.name))
        if not wide and row.kind != row.name:
            layer.append(f" {shown_text(row.kind)}", "dim")
        table.add_row(layer, *geometry, *(cells[heading] for heading in used))
    return table


def _numbers(row: Row, tol: float) -> dict[str, Text]:
    width, share = row.relative_width, row.share
    time = "cached" if row.cached else shown_seconds(row.seconds) if row.seconds else ""
    return {
        "lower": Text("" if row.lower is None else shown_down(row.lower)),
        "upper": Text(shown_up(row.upper), "" if math.isfinite(row.upper) else "bold red"),
        "width": Text(
            "" if width is None else shown_up(width, 2), "yellow" if width is not None and width > tol else ""
        ),
        "share": Text("" if share is None or not math.isfinite(share) else shown_share(share).replace("\u202f", " ")),
        "time": Text(time, "dim"),
    }


def _blocks(audit: Audit) -> Table:
    """Where forms of the whole network gained."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("by forms, from", overflow="fold")
    for heading in ("product of norms", "forms", "smaller by"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("proved on", overflow="fold", style="dim")
    for block in audit.blocks:
        product = "" if block.product is None else shown_up(block.product, 4)
        gain = "" if block.product is None else f"{block.product / block.factor:.2f}×"
        table.add_row(Text(shown_text(block.name)), product, shown_up(block.factor, 4), gain, block.lattice)
    if len(audit.blocks) > 1:
        gain = f"{audit.product / audit.upper:.4g}×"
        table.add_row("all of it", shown_up(audit.product, 4), shown_up(audit.upper, 4), gain, style="bold")
    return table


def _notes(audit: Audit) -> list[Text]:
    lines = [
        Text(f"{shown_text(row.name)}: {shown_text(note, LONGEST_SENTENCE)}", "yellow")
        for row in audit.rows
        for note in row.notes
    ]
    lines += [
        Text(f"{shown_text(text, LONGEST_SENTENCE)}.", "yellow") for text in audit.assumptions if text.startswith(FIXED)
    ]
    lines += [Text(f"Note: {shown_text(note, LONGEST_SENTENCE)}.", "yellow") for note in audit.notes]
    if audit.trivial:
        counts = ", ".join(f"{count} × {shown_text(kind)}" for kind, count in audit.trivial.items())
        lines.append(Text(f"Counted as exactly 1: {counts}.", "dim"))
    if audit.forms and math.isfinite(audit.upper) and audit.rows:
        lines.append(Text(f"By norms alone; forms of the whole network: {audit.forms}.", "dim"))
    if any(row.share is not None for row in audit.rows):
        lines.append(
            Text(
                "share: part in log L, by norms, on the path that dominates it; upper of a sum: what it adds to that "
                "path.",
                "dim",
            )
        )
    return lines


def _verdict(audit: Audit) -> list[RenderableType]:
    name = Text(shown_text(audit.model), "bold")
    measured = any(row.relative_width is not None for row in audit.rows)
    missed = sum((row.relative_width or 0.0) > audit.tol for row in audit.rows)
    norms = f"{missed} of the norms not to {audit.tol:g}" if missed else f"each norm to {audit.tol:g}"
    if audit.reasons and not measured:
        norms = "no norm was measured (--measure)"
    included = "the rounding of this proof included, that of running the model not"
    about = Text(f"l2 norm, {included}; {norms}; {shown_seconds(audit.seconds)}", "dim")
    details = Table.grid(padding=(0, 1))
    if not math.isfinite(audit.upper):
        claim = Text("unbounded: no finite Lipschitz constant was proved", "bold red")
        for reason in audit.reasons:
            details.add_row("-", Text(shown_text(reason, LONGEST_SENTENCE), "yellow", overflow="fold"))
        return [Text.assemble(name, " is ", claim), details, Text(), about]
    claim = Text(f"‖f(x) - f(y)‖ ≤ {shown_up(audit.upper)} ‖x - y‖", "bold green")
    shape = "×".join(map(str, audit.input_shape)) or "()"
    if len(audit.outputs) > 1:
        for output, constant in audit.outputs.items():
            details.add_row("-", Text(shown_text(output), overflow="fold"), Text(f"≤ {shown_up(constant)}"))
    gap = [Text()] if details.row_count else []  # without rows the grid itself is an empty line
    return [Text.assemble(name, ": ", claim, f" for all inputs of shape {shape}"), details, *gap, about]
