"""Accuracy against radius, as a plot fit for a paper."""

from pathlib import Path

import torch
import typer
from torch import Tensor

from gramcert.cli.errors import BadInput

_COLOURS = {"certified": "#1b6ca8", "attacked": "#c1440e"}

# Radii where published tables are read.
_MARKS = (36, 72, 108, 255)


def save_radius_plot(path: Path, radii: dict[str, Tensor], clean: float, name: str) -> None:
    """Share of images with a larger radius, for each set of radii; says where it is, or that matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        typer.echo("no plot: that needs the extra, pip install 'gramcert[plot]'", err=True)
        return
    title = f"{name}, {len(next(iter(radii.values())))} test images"
    figure = Figure(figsize=(5.2, 3.4), dpi=200, layout="constrained")
    axes = figure.add_subplot()
    finite = torch.cat([values[torch.isfinite(values)] for values in radii.values()])
    end = max(1.05, float(finite.max()) * 1.02 if len(finite) else 0.0)
    axes.axhline(100 * clean, color="0.45", linewidth=1, linestyle="--", label="clean")
    for name, values in radii.items():
        ordered = values.sort().values
        ordered = ordered[(ordered > 0) & torch.isfinite(ordered)]
        left = int(torch.isinf(values).sum())
        shares = torch.arange(len(ordered), -1, -1) + left
        places = torch.cat([torch.zeros(1, dtype=ordered.dtype), ordered, ordered.new_tensor([end])])
        heights = 100 * torch.cat([shares, shares[-1:]]).double() / len(values)
        axes.step(places.tolist(), heights.tolist(), where="post", color=_COLOURS[name], label=name, linewidth=1.6)
    for mark in _MARKS:
        axes.axvline(mark / 255, color="0.85", linewidth=0.8, zorder=0)
        axes.text(mark / 255, 101.5, f"{mark}/255", ha="center", va="bottom", rotation=90, fontsize=6.5, color="0.4")
    axes.set(xlim=(0, end), ylim=(0, 100), xlabel="l2 radius", ylabel="accuracy in %")
    axes.set_title(title, fontsize=10, pad=38)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: the plot cannot be written ({error})") from None
    typer.echo(f"plot written to {path}", err=True)
