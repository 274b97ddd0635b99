"""A comparison as a plot: signed error against time."""

import math
from pathlib import Path
from typing import Any

from gramcert.baselines.comparison import Comparison, Row
from gramcert.baselines.methods import Kind
from gramcert.cli.labels import place_labels
from gramcert.cli.plots import INK, QUIET, quiet_frame, save_figure

# Colours of Okabe and Ito, told apart with every kind of colour vision; shapes say the same again.
STYLES: dict[Kind, tuple[str, str]] = {
    "enclosure": ("#000000", "s"),
    "upper bound": ("#0072B2", "^"),
    "exact": ("#009E73", "o"),
    "lower bound": ("#E69F00", "v"),
    "estimate": ("#CC79A7", "D"),
    "not a bound": ("#D55E00", "X"),
}
SHADE = "#F4F1EC"

# Errors below this many per cent are drawn on a linear scale around 0.
LINEAR_PERCENT = 0.01


def save_plot(comparison: Comparison, heading: str, path: Path) -> None:
    """Write the plot to a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    drawn = [row for row in comparison.rows if row.relative_error is not None and math.isfinite(row.relative_error)]
    points = [(row.seconds or 0.0, _percent(row, comparison.tolerance)) for row in drawn]
    _prepare(axes, points, comparison.truth)
    for kind, (colour, marker) in STYLES.items():
        chosen = [point for point, row in zip(points, drawn, strict=True) if row.kind == kind]
        if chosen:
            times, errors = zip(*chosen, strict=True)
            axes.scatter(
                times, errors, s=70, c=colour, marker=marker, edgecolors="white", linewidths=0.8, label=kind, zorder=3
            )
    for (seconds, error), row in zip(points, drawn, strict=True):
        if row.lower is not None and comparison.truth:  # from end to end
            below = 100 * (row.lower - comparison.truth) / comparison.truth
            axes.plot([seconds, seconds], [below, error], color=STYLES["enclosure"][0], linewidth=2, zorder=2)
    axes.set_title("Spectral norm of one convolution: error against time", loc="left", weight="bold", color=INK, pad=22)
    axes.text(0, 1.015, heading, transform=axes.transAxes, fontsize=9, color=QUIET)
    if drawn:
        figure.legend(loc="outside lower left", ncols=len(STYLES), frameon=False, fontsize=9, handletextpad=0.2)
    place_labels(axes, points, [row.name for row in drawn], INK, level=0.0)
    save_figure(figure, path)


def _percent(row: Row, tolerance: float) -> float:
    """The error, with what is mere rounding drawn as 0."""
    error = row.relative_error or 0.0
    return 0.0 if abs(error) <= tolerance else 100 * error


def _prepare(axes: Any, points: list[tuple[float, float]], truth: float) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    lowest = min([error for _, error in points], default=0.0)
    highest = max([error for _, error in points], default=0.0)
    bottom, top = -_decade_above(-lowest), _decade_above(highest)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=LINEAR_PERCENT, linscale=0.6)
    axes.set_ylim(bottom, top)
    times = [seconds for seconds, _ in points]
    if times:
        axes.set_xlim(min(times) / 2.5, max(times) * 4)
    decades = [LINEAR_PERCENT * 10**power for power in range(12)]
    ticks = [sign * decade for sign in (-1, 1) for decade in decades if bottom <= sign * decade <= top]
    axes.yaxis.set_major_locator(FixedLocator([0, *ticks]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g} %" if value else "truth"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _duration(value)))
    axes.axhspan(bottom, 0, color=SHADE, zorder=0)
    axes.axhline(0, color=INK, linewidth=1, zorder=1)
    inside = {"transform": axes.transAxes, "fontsize": 9, "color": QUIET, "style": "italic"}
    axes.text(0.99, 0.02, "below the truth: not an upper bound", ha="right", va="bottom", **inside)
    axes.text(0.99, 0.98, f"above the truth ({truth:.6g})", ha="right", va="top", **inside)
    axes.set_xlabel("time of one run", color=INK)
    axes.set_ylabel("relative error", color=INK)
    quiet_frame(axes)


def _decade_above(percent: float) -> float:
    """The next power of ten, with room for a label, at least 0.1 %."""
    return float(max(0.1, 10.0 ** math.ceil(math.log10(max(percent, LINEAR_PERCENT) * 1.5))))


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.999 * size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds / 1e-9:g} ns"
