"""An audit as a table in the terminal."""

import math
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from gramcert.auditing.assumptions import FIXED
from gramcert.auditing.meaning import from_below, meaning, tone
from gramcert.auditing.readable import shown_down, shown_seconds, shown_share, shown_text, shown_up
from gramcert.auditing.result import Audit
from gramcert.operators.propagation import Row

# Narrower terminals do without the geometry, and without the frequencies of a proof.
WIDE, TOLD = 110, 72

# Letters of a layer's name that are left on one line, and the columns that make room for them, the first one first.
NAME, DISPENSABLE = 24, ("time", "width", "lower", "share", "product of norms", "smaller by")

# Between two columns.
GAP = 2

# A reason or a note is a sentence, a name is not.
LONGEST_SENTENCE = 1000


def audit_table(audit: Audit, *, verify: str = "", limit: float | None = None) -> RenderableType:
    """The rows, what is to be said about them, and the verdict last, where the eye is when the command ends.

    Args:
        audit: what was found.
        verify: the command that checks its certificate, if there is one.
        limit: that the constant shall not be above.
    """
    return _AuditTable(audit, verify, limit)


@dataclass(frozen=True)
class _AuditTable:
    """Knows its width only when it is printed."""

    audit: Audit
    verify: str
    limit: float | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.audit.rows:
            yield _rows(self.audit, options.max_width)
            yield Text()
        if self.audit.blocks:
            yield from (_blocks(self.audit, options.max_width), Text())
        if notes := _notes(self.audit):
            yield from (*notes, Text())
        yield from _verdict(self.audit, self.limit)
        yield from _origin(self.audit)
        if self.verify:
            yield Text.assemble(("To check the certificate: ", "dim"), self.verify, overflow="fold")


def _fitting(columns: dict[str, list[Text]], room: int) -> list[str]:
    """The names of columns that fit beside a layer's name, without those that would be empty."""
    used = [name for name, cells in columns.items() if any(cells)]
    for name in DISPENSABLE:
        widths = [max(len(name), *(cell.cell_len for cell in columns[name])) + GAP for name in used]
        if sum(widths) <= room:
            break
        used = [other for other in used if other != name]
    return used


def _rows(audit: Audit, width: int) -> Table:
    """Without the columns that would be empty, or leave no room for names."""
    wide = width >= WIDE
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("layer", overflow="fold")
    if wide:
        table.add_column("geometry", overflow="fold", style="dim")
    numbers = [_numbers(row, audit.tol) for row in audit.rows]
    columns = {name: [cells[name] for cells in numbers] for name in numbers[0]}
    longest = max(len(shown_text(row.name)) for row in audit.rows)
    used = _fitting(columns, width - min(longest, NAME))
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


def _blocks(audit: Audit, width: int) -> Table:
    """Where forms of the whole network gained."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    lines = [(shown_text(block.name), block.product, block.factor, block.lattice, "") for block in audit.blocks]
    if len(audit.blocks) > 1:
        lines.append(("all of it", audit.product, audit.upper, "", "bold"))
    columns = {
        "product of norms": [Text("" if product is None else shown_up(product, 4)) for _, product, *_ in lines],
        "forms": [Text(shown_up(factor, 4)) for _, _, factor, *_ in lines],
        "smaller by": [Text("" if of is None else f"{of / factor:.4g}×") for _, of, factor, *_ in lines],
    }
    heading = "by forms, from"
    used = _fitting(columns, width - max(len(heading), min(max(len(line[0]) for line in lines), NAME)))
    table.add_column(heading, overflow="fold")
    for name in used:
        table.add_column(name, justify="right", no_wrap=True)
    told = width >= TOLD
    if told:
        table.add_column("proved on", overflow="fold", style="dim")
    for index, (name, _, _, lattice, style) in enumerate(lines):
        cells = [columns[column][index] for column in used]
        table.add_row(Text(name), *cells, *([Text(lattice)] if told else []), style=style)
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
                "share: of all stretching and shrinking on the path that dominates L, by norms, in logarithms; upper "
                "of a sum: what it adds to that path.",
                "dim",
            )
        )
    return lines


def _origin(audit: Audit) -> list[Text]:
    """What was audited, when and by what."""
    date = audit.date.replace("T", " ").replace("Z", " UTC")
    weights = audit.certificate.get("weights")
    digest = f"SHA-256 {audit.sha256}" if audit.sha256 else f"no file; weights {weights}" if weights else "no file"
    return [Text(f"gramcert {audit.version}, {date}", "dim"), Text(digest, "dim", overflow="fold")]


_STYLES = {"good": "bold green", "moderate": "bold", "large": "bold yellow", "unbounded": "bold red"}


def _limit(audit: Audit, limit: float | None) -> list[Text]:
    if limit is None:
        return []
    if audit.upper <= limit:
        return [Text(f"within the limit of {limit:g}", "green")]
    return [Text(f"NOT within the limit of {limit:g}", "bold red")]


def _verdict(audit: Audit, limit: float | None) -> list[RenderableType]:
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
        return [Text.assemble(name, " is ", claim), details, *_limit(audit, limit), Text(), about]
    claim = Text(f"‖f(x) - f(y)‖ ≤ {shown_up(audit.upper)} ‖x - y‖", _STYLES[tone(audit.upper)])
    shape = "×".join(map(str, audit.input_shape)) or "()"
    if len(audit.outputs) > 1:
        for output, constant in audit.outputs.items():
            details.add_row("-", Text(shown_text(output), overflow="fold"), Text(f"≤ {shown_up(constant)}"))
    said = [Text(meaning(audit.upper)), *([] if audit.lower is None else [Text(from_below(audit.lower, audit.upper))])]
    heading = Text.assemble(name, ": ", claim, f" for all inputs of shape {shape}")
    listed = [details] if details.row_count else []  # without rows the grid is an empty line
    return [heading, *listed, *said, *_limit(audit, limit), Text(), about]
