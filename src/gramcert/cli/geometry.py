"""The geometry of a layer: its options, the layer that they make of a kernel, and how it is shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from torch import Tensor

from gramcert.cli.options import parse_padding, parse_sizes
from gramcert.geometry.convolution import Convolution, Padding

STRIDE = Annotated[str, typer.Option(help="2 for every axis, or 2,1.")]
PADDING = Annotated[
    str, typer.Option(help="1 for every side, 1,2 per axis, 1:2,0:1 before:after per axis, same or valid.")
]
PADDING_MODE = Annotated[str, typer.Option(help="zeros, circular, reflect or replicate.")]
DILATION = Annotated[str, typer.Option(help="2 for every axis, or 2,1.")]
GROUPS = Annotated[int, typer.Option(help="Number of channel groups.")]
TRANSPOSED = Annotated[bool, typer.Option("--transposed", help="A transposed convolution.")]
OUTPUT_PADDING = Annotated[str, typer.Option(help="Of a transposed convolution.")]


@dataclass(frozen=True)
class Geometry:
    """What the options say, without a kernel; the defaults are those of the commands."""

    stride: int | tuple[int, ...] = 1
    padding: Padding = 0
    padding_mode: str = "zeros"
    dilation: int | tuple[int, ...] = 1
    groups: int = 1
    transposed: bool = False
    output_padding: int | tuple[int, ...] = 0

    def layer(self, kernel: Tensor) -> Convolution:
        """The layer with this kernel."""
        return Convolution(
            kernel,
            self.stride,
            self.padding,
            self.padding_mode,  # type: ignore[arg-type]
            self.dilation,
            self.groups,
            self.transposed,
            self.output_padding,
        )

    @property
    def options(self) -> list[str]:
        """The options that say something else than their default."""
        usual = Geometry()
        names = [name for name in self.__dataclass_fields__ if getattr(self, name) != getattr(usual, name)]
        return ["--" + name.replace("_", "-") for name in names]


def parse_geometry(
    stride: str, padding: str, padding_mode: str, dilation: str, groups: int, transposed: bool, output_padding: str
) -> Geometry:
    """The geometry that the words of the options mean."""
    return Geometry(
        parse_sizes("--stride", stride),
        parse_padding(padding),
        padding_mode,
        parse_sizes("--dilation", dilation),
        groups,
        transposed,
        parse_sizes("--output-padding", output_padding),
    )


def geometry_as_json(layer: Convolution) -> dict[str, Any]:
    """The geometry of a layer, every axis and side written out."""
    return {
        "stride": layer.stride,
        "padding": layer.padding,
        "padding_mode": layer.padding_mode,
        "dilation": layer.dilation,
        "groups": layer.groups,
        "transposed": layer.transposed,
        "output_padding": layer.output_padding,
    }


def geometry_rows(layer: Convolution, sizes: Sequence[int] | None) -> dict[str, str]:
    """The same for people, by the name of each row; rows that do not apply are empty."""
    return {
        "layer": "transposed convolution" if layer.transposed else "convolution",
        "stride": _per_axis(layer.stride),
        "padding": f"{_sides(layer.padding)}, {layer.padding_mode}",
        "dilation": _per_axis(layer.dilation),
        "groups": str(layer.groups),
        "output padding": _per_axis(layer.output_padding) if layer.transposed else "",
        "input size": "every size at once" if sizes is None else "×".join(map(str, sizes)),
    }


def geometry_line(layer: Convolution, sizes: Sequence[int]) -> str:
    """The same in one line that leaves out what is usual, for the heading of a plot."""
    rows = geometry_rows(layer, sizes)
    usual = {"stride": "1", "dilation": "1", "groups": "1", "output padding": "0"}
    parts = [rows["layer"]] if layer.transposed else []
    parts += [f"{name} {rows[name]}" for name, value in usual.items() if rows[name] not in ("", value)]
    sides = _sides(layer.padding)
    mode = "zero" if layer.padding_mode == "zeros" else layer.padding_mode
    parts.append("no padding" if sides == "0" else f"{mode} padding {sides}")
    return " · ".join([*parts, f"input {rows['input size']}"])


def _per_axis(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else ", ".join(map(str, values))


def _sides(pairs: Sequence[tuple[int, int]]) -> str:
    if len({side for pair in pairs for side in pair}) == 1:
        return str(pairs[0][0])
    return ", ".join(f"{before}:{after}" for before, after in pairs) + " (before:after)"
