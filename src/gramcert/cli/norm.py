"""``gramcert norm``: an upper bound of one layer's norm, its kernel from a file."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gramcert.bounds.layer import norm2
from gramcert.cli.errors import BadInput, one_line_errors
from gramcert.cli.kernel_file import read_kernel
from gramcert.cli.options import parse_padding, parse_sizes
from gramcert.geometry.convolution import Convolution

KIND = "upper bound in exact arithmetic (rounding not included)"


def norm(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Kernel: .npy, .safetensors, .pt, .pth or .th.")],
    key: Annotated[str | None, typer.Option(help="Name of the tensor in a file with several.")] = None,
    stride: Annotated[str, typer.Option(help="2 for every axis, or 2,1.")] = "1",
    padding: Annotated[
        str, typer.Option(help="1 for every side, 1,2 per axis, 1:2,0:1 before:after per axis, same or valid.")
    ] = "0",
    padding_mode: Annotated[str, typer.Option(help="zeros, circular, reflect or replicate.")] = "zeros",
    dilation: Annotated[str, typer.Option(help="2 for every axis, or 2,1.")] = "1",
    groups: Annotated[int, typer.Option(help="Number of channel groups.")] = 1,
    transposed: Annotated[bool, typer.Option("--transposed", help="A transposed convolution.")] = False,
    output_padding: Annotated[str, typer.Option(help="Of a transposed convolution.")] = "0",
    input_size: Annotated[str | None, typer.Option(help="32, or 32,16; without it every size at once.")] = None,
    iterations: Annotated[int, typer.Option(help="Number of Gram products.")] = 6,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Upper bound of the spectral norm of a convolution layer whose kernel is in FILE."""
    with one_line_errors():
        sizes = None if input_size is None else parse_sizes("--input-size", input_size)
        strides, dilations = parse_sizes("--stride", stride), parse_sizes("--dilation", dilation)
        extra, sides = parse_sizes("--output-padding", output_padding), parse_padding(padding)
        stored = read_kernel(file, key)
        layer = Convolution(
            stored.kernel,
            strides,
            sides,
            padding_mode,  # type: ignore[arg-type]
            dilations,
            groups,
            transposed,
            extra,
        )
        bound = norm2(layer, sizes, iterations).item()
        if not math.isfinite(bound):
            raise BadInput(f"{file}: the bound overflows {stored.dtype}")
    result = {
        "bound": bound,
        "kind": KIND,
        "kernel": stored.as_json(),
        "geometry": {
            "stride": layer.stride,
            "padding": layer.padding,
            "padding_mode": layer.padding_mode,
            "dilation": layer.dilation,
            "groups": layer.groups,
            "transposed": layer.transposed,
            "output_padding": layer.output_padding,
        },
        "input_size": None if sizes is None else (sizes,) * layer.axes if isinstance(sizes, int) else sizes,
        "iterations": iterations,
    }
    if as_json:
        typer.echo(json.dumps(result))
    else:
        Console().print(_table(result, str(stored)))


def _table(result: dict[str, Any], kernel: str) -> Table:
    geometry = result["geometry"]
    size = result["input_size"]
    rows = {
        "kernel": kernel,
        "layer": "transposed convolution" if geometry["transposed"] else "convolution",
        "stride": _per_axis(geometry["stride"]),
        "padding": f"{_sides(geometry['padding'])}, {geometry['padding_mode']}",
        "dilation": _per_axis(geometry["dilation"]),
        "groups": str(geometry["groups"]),
        "output padding": _per_axis(geometry["output_padding"]) if geometry["transposed"] else "",
        "input size": "every size at once" if size is None else "×".join(map(str, size)),
        "iterations": str(result["iterations"]),
    }
    table = Table.grid(padding=(0, 2))
    table.add_row(Text("bound", "bold"), Text(f"{result['bound']:.7g}", "bold green"))
    table.add_row("", Text(result["kind"], "dim"))
    for name, value in rows.items():
        if value:
            table.add_row(name, Text(value))
    return table


def _per_axis(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(set(values)) == 1 else ", ".join(map(str, values))


def _sides(pairs: tuple[tuple[int, int], ...]) -> str:
    if len({side for pair in pairs for side in pair}) == 1:
        return str(pairs[0][0])
    return ", ".join(f"{before}:{after}" for before, after in pairs) + " (before:after)"
