"""The figures, fit for a paper: one column wide, readable in grey, every line named."""

import math
import statistics
from pathlib import Path
from typing import Any

from gramcert.experiments.records import Row
from gramcert.experiments.tables import ACCURACIES, summary

# Colours of Okabe and Ito, told apart with every kind of colour vision.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#777777")
_MARKERS = "osD^vPX*"


def plot_factors(rows: list[Row], path: Path) -> None:
    """Figure 1: excess of each factor over 1 against the grid size, logarithmic."""
    figure, axes = _figure(5.4, 3.8)
    steps = list(dict.fromkeys(row["t"] for row in rows))
    for colour, step in zip(_COLOURS, steps, strict=False):
        chosen = [row for row in rows if row["t"] == step]
        for kind, style in (("as printed", ":"), ("corrected", "-")):
            points = [(row["n0"], row[kind] - 1) for row in chosen if row[kind] is not None and row[kind] > 1]
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, linewidth=1.4)
        axes.plot([], [], color=colour, label=f"t = {step}")
    ours = [(row["n0"], row["sampling factor"] - 1) for row in rows if row["t"] == steps[0]]
    axes.plot(*zip(*ours, strict=True), color="black", linewidth=2, label="sampling factor, every t")
    axes.plot([], [], color="0.4", linestyle=":", label="Theorem 5 as printed (false)")
    axes.plot([], [], color="0.4", linestyle="-", label="Theorem 5 corrected")
    axes.set(yscale="log", xlabel="grid size n0", ylabel="factor - 1", ylim=(1e-4, 2), xlim=(0, 226))
    axes.set_title("Factor from a grid to every size, k = 3, two axes", fontsize=10)
    axes.legend(frameon=False, fontsize=7.5, ncols=2)
    figure.savefig(path)


def plot_channels(rows: list[Row], path: Path) -> None:
    """Figure 2: relative error and time of each method against the number of channels; medians over the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 4.6), dpi=200, layout="constrained")
    left, right = figure.subplots(1, 2)
    methods = [name for name in dict.fromkeys(row["method"] for row in rows) if name in _SHOWN]
    for number, name in enumerate(methods):
        style = {"color": _COLOURS[number % 8], "marker": _MARKERS[number % 8], "markersize": 4.5, "linewidth": 1.3}
        style["linestyle"] = "-" if number < 8 else "--"
        errors, times = (_medians(rows, name, column) for column in ("relative error", "seconds"))
        left.plot(*_columns([(c, 100 * value) for c, value in errors]), **style, label=name)
        right.plot(*_columns(times), **style)
    left.axhline(0, color="0.6", linewidth=0.8)
    left.set(xscale="log", ylabel="(value - truth)/truth in %", xlabel="channels")
    left.set_yscale("symlog", linthresh=0.1)
    left.margins(y=0.1)
    right.set(xscale="log", yscale="log", ylabel="seconds", xlabel="channels")
    for axes in (left, right):
        ticks = sorted({row["channels"] for row in rows})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Zero padding, k = 3, n = 32, Gaussian kernels, 6 Gram products", fontsize=10)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=7.5)
    figure.savefig(path)


# What the paper compares, and the tightest of ours; the table has all.
_SHOWN = (
    "spectral_norm",
    "norm2 (this size)",
    "norm2 (every size)",
    "norm2_sampled",
    "norm2_circ",
    "norm2_toep (inf)",
    "power iteration",
    "reshaped kernel",
    "four reshapes",
    "sampled density",
    "tensor norm",
)


def plot_table(rows: list[Row], path: Path, title: str) -> None:
    """How much each rescaling gains over AOL, in points of accuracy; small marks are single seeds."""
    figure, axes = _figure(5.8, 3.6)
    means = {line["rescaling"]: line for line in summary(rows)}
    first = next(iter(means.values()))
    for number, (name, line) in enumerate(means.items()):
        offset = 0.16 * (number - (len(means) - 1) / 2)
        places = [place + offset for place in range(len(ACCURACIES))]
        colour, marker = _COLOURS[number % 8], _MARKERS[number % 8]
        for row in (row for row in rows if row["rescaling"] == name):
            values = [row[column] - _of_seed(rows, first["rescaling"], row["seed"], column) for column in ACCURACIES]
            axes.plot(places, values, marker, color=colour, markersize=2.8, alpha=0.55)
        gains = [line[column] - first[column] for column in ACCURACIES]
        axes.plot(places, gains, marker, color=colour, markersize=7, markeredgecolor="white", label=name)
    axes.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    labels = [f"{column}\n({first['rescaling']}: {first[column]:.1f} %)" for column in ACCURACIES]
    axes.set_xticks(range(len(ACCURACIES)), labels, fontsize=7.5)
    axes.set(ylabel=f"points above {first['rescaling']}, same seed")
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def _of_seed(rows: list[Row], name: str, seed: int, column: str) -> float:
    """The value of one rescaling with a seed; not a number if it was not run."""
    found = [row[column] for row in rows if row["rescaling"] == name and row["seed"] == seed]
    return float(found[0]) if found else math.nan


def _medians(rows: list[Row], method: str, column: str) -> list[tuple[int, float]]:
    result = []
    for channels in dict.fromkeys(row["channels"] for row in rows):
        values = [row[column] for row in rows if row["method"] == method and row["channels"] == channels]
        values = [value for value in values if value is not None]
        if values:
            result.append((channels, statistics.median(values)))
    return result


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=200, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
