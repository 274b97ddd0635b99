"""``gramcert spectrum``: the singular values of layers, their kernels from files."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gramcert.arguments import axis_sizes
from gramcert.certified.spectrum import Spectrum, TooLargeError, spectrum_of
from gramcert.cli.errors import BadInput, one_line_errors
from gramcert.cli.geometry import (
    DILATION,
    GROUPS,
    OUTPUT_PADDING,
    PADDING,
    PADDING_MODE,
    STRIDE,
    TRANSPOSED,
    Geometry,
    geometry_as_json,
    parse_geometry,
)
from gramcert.cli.kernel_file import StoredKernel, read_kernels
from gramcert.cli.options import parse_sizes
from gramcert.cli.plots import require_plotting
from gramcert.cli.progress import counting_bar
from gramcert.cli.spectrum_plot import save_spectrum_plot
from gramcert.cli.spectrum_table import Measured, spectra_table, spectrum_table
from gramcert.enclosure import Enclosure
from gramcert.progress import Report
from gramcert.rounding import ASSUMPTIONS


@dataclass(frozen=True)
class _Asked:
    """What every layer of one call is asked."""

    geometry: Geometry
    sizes: int | tuple[int, ...] | None
    count: int | None


def spectrum(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Kernels or matrices: .npy, .safetensors, .pt, .pth or .th.")
    ],
    key: Annotated[
        list[str] | None, typer.Option(help="Name of a tensor in files with several; may be given again.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every tensor with 3 to 5 dimensions.")] = False,
    stride: STRIDE = "1",
    padding: PADDING = "0",
    padding_mode: PADDING_MODE = "zeros",
    dilation: DILATION = "1",
    groups: GROUPS = 1,
    transposed: TRANSPOSED = False,
    output_padding: OUTPUT_PADDING = "0",
    input_size: Annotated[str | None, typer.Option(help="32, or 32,16; a matrix has none.")] = None,
    k: Annotated[int | None, typer.Option("--k", help="Only so many of the largest.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a histogram and the profile to this file.")] = None,
) -> None:
    """The singular values of convolution layers at one input size, with an error that holds for each of them.

    The kernels are in files, or matrices are. All have the same geometry; several are drawn over each other.
    """
    with one_line_errors():
        if plot is not None:
            require_plotting(plot)
        if every and key:
            raise BadInput(f"--all: expected either all tensors or --key, got both (--key {key[0]!r})")
        if k is not None and k < 1:
            raise BadInput(f"--k {k}: expected at least 1")
        sizes = None if input_size is None else parse_sizes("--input-size", input_size)
        geometry = parse_geometry(stride, padding, padding_mode, dilation, groups, transposed, output_padding)
        stored = [(path, kernel) for path in files for kernel in read_kernels(path, key or (), every=every)]
        if all(kernel.kernel.dim() == 2 for _, kernel in stored):
            _refuse_geometry(geometry, input_size)
        asked = _Asked(geometry, sizes, k)
        measured = []
        with counting_bar("spectrum") as bar:
            for name, (_, kernel) in zip(_names(stored), stored, strict=True):
                measured.append(_measure(name, kernel, asked, bar))
    if as_json:
        content = {"spectra": [_as_json(one) for one in measured], "k": k, "assumptions": ASSUMPTIONS}
        typer.echo(json.dumps(content, allow_nan=False))
    else:
        console = Console()
        console.print(spectrum_table(measured[0]) if len(measured) == 1 else spectra_table(measured, console.width))
    if plot is not None:
        with one_line_errors():
            save_spectrum_plot(measured, plot)
        typer.echo(f"plot written to {plot}", err=True)


def _refuse_geometry(geometry: Geometry, input_size: str | None) -> None:
    """No option is ignored."""
    given = geometry.options + ([] if input_size is None else ["--input-size"])
    if given:
        raise BadInput(f"{given[0]}: a matrix has no geometry, expected a kernel with 3 to 5 dimensions")


def _measure(name: str, stored: StoredKernel, asked: _Asked, bar: Report) -> Measured:
    matrix = stored.kernel if stored.kernel.dim() == 2 else None
    layer, sizes = None, None
    if matrix is None:
        layer = asked.geometry.layer(stored.kernel)
        if asked.sizes is None:
            raise BadInput(f"--input-size: the singular values of a convolution depend on it ({stored})")
        sizes = axis_sizes("spectrum", "--input-size", asked.sizes, layer.axes)

    def report(what: str, done: int, total: int | None) -> None:
        bar(f"{name}: {what}", done, total)

    try:
        found = spectrum_of("spectrum", layer or stored.kernel, sizes, asked.count, report)
    except TooLargeError as error:
        few = "; try --k 10" if error.few_possible else ""
        raise BadInput(f"{error} (gramcert norm){few}") from None
    return Measured(name, stored, layer, sizes, found)


def _names(stored: Sequence[tuple[Path, StoredKernel]]) -> list[str]:
    """What tells the tensors apart: their keys, their files, or both; whole paths where files have the same name."""
    paths = dict.fromkeys(path for path, _ in stored)
    if len(paths) == 1:
        return [kernel.key or kernel.source for _, kernel in stored]
    same = len({path.name for path in paths}) < len(paths)
    keys = len({kernel.key for _, kernel in stored}) > 1
    return [
        (str(path) if same else path.name) + (f", {kernel.key}" if keys and kernel.key else "")
        for path, kernel in stored
    ]


def _as_json(one: Measured) -> dict[str, Any]:
    found = one.spectrum
    whole = not found.omitted
    above = found.above(1)
    return {
        "name": one.name,
        "kernel": one.stored.as_json(),
        "geometry": None if one.layer is None else geometry_as_json(one.layer),
        "input_size": one.sizes,
        "error": _number(found.error),
        "omitted": found.omitted,
        "largest": _ends(found.largest),
        "smallest": _ends(found.smallest) if whole else None,
        "condition": _ends(found.condition) if whole else None,
        "nuclear": _ends(found.nuclear) if whole else None,
        "frobenius": _ends(found.frobenius) if whole else None,
        "ky_fan": _ends(found.ky_fan(len(found.values))),
        "above_one": {"at_least": above[0], "at_most": above[1]},
        "values": _numbers(found),
    }


def _numbers(found: Spectrum) -> list[float | None]:
    values: list[float | None] = found.values.tolist()
    return values if math.isfinite(found.error) else [_number(value) for value in values]


def _ends(enclosure: Enclosure) -> dict[str, float | None]:
    return {"lower": enclosure.lower, "upper": _number(enclosure.upper)}


def _number(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
