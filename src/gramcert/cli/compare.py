"""``gramcert compare``: all methods on one kernel, side by side with the truth."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from gramcert.arguments import axis_sizes
from gramcert.baselines.comparison import Comparison, Row, compare_methods
from gramcert.cli.codes import NEGATIVE_ANSWER
from gramcert.cli.compare_plot import save_plot
from gramcert.cli.compare_table import comparison_notes, comparison_table
from gramcert.cli.errors import BadInput, one_line_errors
from gramcert.cli.kernel_file import StoredKernel, embedded_kernel, read_kernel
from gramcert.cli.options import parse_sizes
from gramcert.cli.plots import require_plotting
from gramcert.cli.progress import counting_bar
from gramcert.geometry.convolution import Convolution


def compare(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Kernel file, as for norm; without it one that comes with the package."),
    ] = None,
    random: Annotated[
        str | None, typer.Option(help="Shape of a Gaussian kernel instead of a file, such as 16,16,3,3.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random kernel and the random starts.")] = 0,
    key: Annotated[str | None, typer.Option(help="Name of the tensor in a file with several.")] = None,
    padding_mode: Annotated[str, typer.Option(help="zeros or circular; always as much as keeps the size.")] = "zeros",
    input_size: Annotated[str, typer.Option(help="32 for every axis, or 32,16.")] = "32",
    iterations: Annotated[int, typer.Option(help="Number of Gram products.")] = 6,
    tol: Annotated[float, typer.Option(help="Relative width of the enclosures.")] = 1e-3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a plot of error against time to this file.")] = None,
) -> None:
    """Value, error, time and kind of every method for one stride-1 layer that keeps the input's size.

    Exit code 1 if a value lies on the wrong side of the truth for what its method promises.
    """
    with one_line_errors():
        if plot is not None:
            require_plotting(plot)
        if not 0 <= seed < 2**63:
            raise BadInput(f"--seed {seed}: expected a number from 0 to 2^63 - 1")
        sizes = parse_sizes("--input-size", input_size)
        stored = _kernel(file, key, random, seed)
        layer = Convolution(
            stored.kernel,
            padding="same",
            padding_mode=padding_mode,  # type: ignore[arg-type]
        )
        per_axis = axis_sizes("compare", "--input-size", sizes, layer.axes)
        with counting_bar("compare") as bar:
            comparison = compare_methods(layer, per_axis, iterations, tol=tol, seed=seed, report=bar)
    heading = (
        f"{stored} · {'zero' if padding_mode == 'zeros' else padding_mode} padding · "
        f"input {'×'.join(map(str, per_axis))} · {iterations} iterations"
    )
    if as_json:
        setting = {
            "kernel": stored.as_json(),
            "padding_mode": padding_mode,
            "input_size": per_axis,
            "iterations": iterations,
            "tol": tol,
            "seed": seed,
        }
        typer.echo(json.dumps(setting | _as_json(comparison), allow_nan=False))
    else:
        console = Console()
        console.print(Text(heading, "bold"))
        console.print(comparison_table(comparison, console.width))
        console.print(comparison_notes(comparison))
    if plot is not None:
        with one_line_errors():
            save_plot(comparison, heading, plot)
        typer.echo(f"plot written to {plot}", err=True)
    if not comparison.all_respected:
        raise typer.Exit(NEGATIVE_ANSWER)


def _kernel(file: Path | None, key: str | None, random: str | None, seed: int) -> StoredKernel:
    if file is not None:
        if random is not None:
            raise BadInput("--random: expected either a file or a random kernel, got both")
        return read_kernel(file, key)
    if key is not None:
        raise BadInput(f"--key {key!r}: needs a file")
    if random is None:
        return embedded_kernel()
    shape = parse_sizes("--random", random)
    if isinstance(shape, int) or not 3 <= len(shape) <= 5 or min(shape) < 1:
        raise BadInput(f"--random {random!r}: expected channels out, channels in and 1 to 3 sizes, like 16,16,3,3")
    kernel = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return StoredKernel(kernel, f"random (seed {seed})", None, "float32")


def _as_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "truth": comparison.truth,
        "truth_seconds": comparison.truth_seconds,
        "tolerance": comparison.tolerance,
        "all_respected": comparison.all_respected,
        "rows": [_row_as_json(row) for row in comparison.rows],
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    """JSON has no infinity: an overflowed value, or a relative error against a truth of 0, is null."""
    fields = dataclasses.asdict(row)
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields.items()
    }
