"""``gramcert norm``: the enclosure of one layer's norm, its kernel from a file."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from gramcert.certified.choose import enclose
from gramcert.certified.work import Work
from gramcert.cli.codes import NEGATIVE_ANSWER
from gramcert.cli.errors import one_line_errors
from gramcert.cli.geometry import (
    DILATION,
    GROUPS,
    OUTPUT_PADDING,
    PADDING,
    PADDING_MODE,
    STRIDE,
    TRANSPOSED,
    geometry_as_json,
    geometry_rows,
    parse_geometry,
)
from gramcert.cli.kernel_file import read_kernel
from gramcert.cli.options import parse_sizes
from gramcert.enclosure import Enclosure
from gramcert.geometry.convolution import Convolution
from gramcert.rounding import ASSUMPTIONS


def norm(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Kernel: .npy, .safetensors, .pt, .pth or .th.")],
    key: Annotated[str | None, typer.Option(help="Name of the tensor in a file with several.")] = None,
    stride: STRIDE = "1",
    padding: PADDING = "0",
    padding_mode: PADDING_MODE = "zeros",
    dilation: DILATION = "1",
    groups: GROUPS = 1,
    transposed: TRANSPOSED = False,
    output_padding: OUTPUT_PADDING = "0",
    input_size: Annotated[str | None, typer.Option(help="32, or 32,16; without it every size at once.")] = None,
    tol: Annotated[float, typer.Option(help="Relative width to reach.")] = 1e-3,
    max_seconds: Annotated[float | None, typer.Option(help="Stop after this time with what was found.")] = None,
    max_bytes: Annotated[int, typer.Option(help="Most memory to take beside the weights.")] = 2**31,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what was tried and what is assumed; JSON always does.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Enclose the spectral norm of a convolution layer whose kernel is in FILE, all rounding included.

    Exit code 1 if the tolerance was not reached; the enclosure holds all the same.
    """
    with one_line_errors():
        sizes = None if input_size is None else parse_sizes("--input-size", input_size)
        geometry = parse_geometry(stride, padding, padding_mode, dilation, groups, transposed, output_padding)
        stored = read_kernel(file, key)
        layer = geometry.layer(stored.kernel)
        with _progress() as progress:
            enclosure = enclose("norm", layer, sizes, tol, Work(max_bytes, max_seconds, progress, call="norm"))
    result = {
        "lower": enclosure.lower,
        "upper": enclosure.upper if math.isfinite(enclosure.upper) else None,
        "relative_width": enclosure.relative_width,
        "tol": tol,
        "tol_reached": enclosure.tol_reached,
        "method": enclosure.method,
        "notes": enclosure.notes,
        "steps": [_finite(dataclasses.asdict(step)) for step in enclosure.steps],
        "assumptions": ASSUMPTIONS,
        "kernel": stored.as_json(),
        "geometry": geometry_as_json(layer),
        "input_size": None if sizes is None else (sizes,) * layer.axes if isinstance(sizes, int) else sizes,
    }
    if as_json:
        typer.echo(json.dumps(result, allow_nan=False))
    else:
        Console().print(_table(enclosure, result, str(stored), layer))
        if explain:  # the table has the rest
            _, _, rest = enclosure.explain().partition("\nby ")
            print(f"\nby {rest}")
    if not enclosure.tol_reached:
        raise typer.Exit(NEGATIVE_ANSWER)


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A bar on the terminal's standard error, one task that takes the name of the method at work."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda name, share: bar.update(task, description=name, completed=share)


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {name: None if value == math.inf else value for name, value in fields.items()}


def _table(enclosure: Enclosure, result: dict[str, Any], kernel: str, layer: Convolution) -> Table:
    rows = {
        "upper bound": repr(enclosure.upper),
        "lower bound": repr(enclosure.lower),
        "method": enclosure.method,
        "kernel": kernel,
        **geometry_rows(layer, result["input_size"]),
    }
    table = Table.grid(padding=(0, 2))
    table.add_row(Text("norm", "bold"), Text(str(enclosure), "bold green" if enclosure.tol_reached else "bold yellow"))
    reached = "reached" if enclosure.tol_reached else "NOT reached"
    table.add_row("", Text(f"certified, rounding included; tolerance {result['tol']:g} {reached}", "dim"))
    for note in enclosure.notes:
        table.add_row("", Text(note, "yellow"))
    for name, value in rows.items():
        if value:
            table.add_row(name, Text(value))
    return table
