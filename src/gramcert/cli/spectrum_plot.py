"""Spectra as a plot: the histogram of all values, and the values in descending order."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gramcert.auditing.readable import shown_up
from gramcert.cli.geometry import geometry_line
from gramcert.cli.plots import INK, QUIET, quiet_frame, save_figure
from gramcert.cli.spectrum_table import Measured

# Colours of Okabe and Ito, told apart with every kind of colour vision; dashes say the same again.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", "-.", ":")

# More spectra than colours are drawn in the order of a scale, which cividis keeps for every kind of colour vision.
SCALE = "cividis"

# Values that differ relatively by less are drawn as one: an axis that magnified them would show digits, not a spectrum.
ONE = 1e-4

# From this ratio on the profile has a logarithmic scale.
WIDE = 100.0

# Points of a line, markers, lines of a legend's column, and letters of a name: what can be told apart.
MOST_POINTS, MOST_MARKERS, LEGEND_ROWS, LONGEST = 3000, 40, 30, 40

# The largest value of a spectrum that is drawn, and one over the smallest.
FARTHEST = 1e290

# A band of errors is visible if it is this share of the height.
VISIBLE = 0.004


def save_spectrum_plot(several: Sequence[Measured], path: Path) -> None:
    """Write the plot to a file."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08, wspace=0.03, rect=(0, 0.05, 1, 0.95))
    figure = Figure(figsize=(10 if len(several) == 1 else 12, 4.6), dpi=150, layout=layout)
    figure.suptitle(_heading(several), x=0.012, ha="left", weight="bold", fontsize=12, color=INK, parse_math=False)
    figure.text(0.012, 0.012, _geometry(several), fontsize=8.5, color=QUIET, va="bottom", parse_math=False)
    left, right = figure.subplots(1, 2)
    styles = _styles(len(several))
    drawn = [(one, style) for one, style in zip(several, styles, strict=True) if _can_be_drawn(one)]
    for axes, title in ((left, "Histogram"), (right, "Profile")):
        quiet_frame(axes)
        axes.set_title(title, loc="left", fontsize=10, color=INK)
        if not drawn:
            axes.text(0.5, 0.5, "beyond what can be drawn", ha="center", color=QUIET, transform=axes.transAxes)
    if drawn:
        _histogram(left, drawn)
        _profile(right, drawn)
    if len(several) > 1:
        _legend(figure, several, styles)
    save_figure(figure, path)


def _can_be_drawn(one: Measured) -> bool:
    """Not where floats end: matplotlib needs room around what it draws."""
    largest = float(one.spectrum.values[0])
    return math.isfinite(one.spectrum.error) and (not largest or 1 / FARTHEST < largest < FARTHEST)


def _histogram(axes: Any, drawn: Sequence[tuple[Measured, dict[str, Any]]]) -> None:
    values = [one.spectrum.values for one, _ in drawn]
    low, high, is_one = _range(values)
    alone = len(drawn) == 1
    bins = 41 if is_one else max(10, min(60, math.ceil(2 * max(map(len, values)) ** (1 / 3))))
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
    for found, (_, style) in zip(values, drawn, strict=True):
        counts = torch.histogram(found.clamp(low, high), edges).hist
        heights = counts if alone else 100 * counts / len(found)
        if alone:
            axes.stairs(heights.tolist(), edges.tolist(), fill=True, color=style["color"])
        else:
            thin = {} if len(drawn) <= len(COLOURS) else {"linewidth": 0.9, "linestyle": "-"}
            axes.stairs(heights.tolist(), edges.tolist(), **({"linewidth": 1.4} | style | thin))
    axes.set_xlabel("singular value", color=INK)
    axes.set_ylabel("number of values" if alone else "values in each bin, in %", color=INK)
    axes.set_xlim(low, high)
    axes.set_ylim(bottom=0)
    _plain_ticks(axes.xaxis)
    _plain_ticks(axes.yaxis, whole=alone)
    if is_one:
        _note(axes, _between(values))


def _profile(axes: Any, drawn: Sequence[tuple[Measured, dict[str, Any]]]) -> None:
    values = [one.spectrum.values for one, _ in drawn]
    floor = _logarithmic_floor([one for one, _ in drawn])
    shares = len({len(one.spectrum.values) + one.spectrum.omitted for one, _ in drawn}) > 1
    for one, style in drawn:
        found = one.spectrum
        number, lowest = len(found.values), floor or 0.0
        places = _places(number)
        ranks = (places + 1).double()
        if shares:
            ranks = 100 * ranks / (number + found.omitted)
        shown = found.values[places]
        marker = {"marker": "o", "markersize": 4} if number <= MOST_MARKERS else {}
        ends = [end.clamp(min=lowest).tolist() for end in (shown - found.error, shown + found.error)]
        axes.fill_between(ranks.tolist(), *ends, color=style["color"], alpha=0.25, linewidth=0)
        # Not cut off at the frame, where markers of zeros lie.
        line = axes.plot(ranks.tolist(), shown.clamp(min=lowest).tolist(), linewidth=1.6, clip_on=False, **style)
        line[0].set(**marker)
    axes.set_xlabel("place, in % of all values" if shares else "place in descending order", color=INK)
    axes.set_ylabel("singular value", color=INK)
    _plain_ticks(axes.xaxis, whole=not shares)
    low, high, is_one = _range(values)
    if floor is None:
        room = 0.0 if is_one else max(0.03 * (high - low), min(high, max(one.spectrum.error for one, _ in drawn)))
        axes.set_ylim(max(0.0, low - room), high + room)
        _plain_ticks(axes.yaxis)
    else:
        _logarithmic_ticks(axes, floor, 1.3 * high)
    if text := _doubt([one for one, _ in drawn], floor, low, high):
        _note(axes, text)
    bottom, top = axes.get_ylim()
    if bottom < 1 < top and not is_one:  # what a layer of norm 1 keeps below
        axes.axhline(1, color=QUIET, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)


def _logarithmic_floor(several: Sequence[Measured]) -> float | None:
    """Where a logarithmic scale begins, if it is worth while: below all values that are certainly not 0."""
    known = [one.spectrum.values[one.spectrum.values > one.spectrum.error] for one in several]
    ends = [(float(found[0]), float(found[-1])) for found in known if len(found)]
    if not ends or max(most / least for most, least in ends) < WIDE:
        return None
    return min(least for _, least in ends) / 2


def _logarithmic_ticks(axes: Any, low: float, high: float) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_yscale("log")
    axes.set_ylim(low, high)
    if low >= 1e-5 and high <= 1e5:  # otherwise powers of ten are easier to read
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _doubt(several: Sequence[Measured], floor: float | None, low: float, high: float) -> str:
    """What a reader has to know about the error, if it can be seen."""
    spectra = [one.spectrum for one in several]
    error = max(found.error for found in spectra)
    lost = sum(int((found.values <= found.error).sum()) for found in spectra)
    if lost and high > low:
        where = "at the lower edge: " if floor is not None else ""
        return f"{where}{lost} {'value' if lost == 1 else 'values'} that may be 0" if error else ""
    if floor is not None:
        least = min(float(found.values[-1]) for found in spectra)
        visible = math.log(1 + error / least) > VISIBLE * math.log(high / floor)
    else:
        visible = error > VISIBLE * (high - low)
    return f"band: certified error, at most {shown_up(error, 2)}" if visible else ""


def _range(values: Sequence[Tensor]) -> tuple[float, float, bool]:
    """What both axes show, and whether all values are drawn as one."""
    least, most = min(float(found[-1]) for found in values), max(float(found[0]) for found in values)
    if most == 0:
        return 0.0, 1.0, True
    if most - least <= ONE * most:
        return 0.95 * most, 1.05 * most, True
    if least < 0.5 * most:  # from 0, where that costs little
        least = 0.0
    return least, most, False


def _between(values: Sequence[Tensor]) -> str:
    least, most = min(float(found[-1]) for found in values), max(float(found[0]) for found in values)
    if least == most:
        return f"{'all values are' if sum(map(len, values)) > 1 else 'one value,'} {least:.9g}"
    return f"all from {_near_one(least)} to {_near_one(most)}"


def _near_one(value: float) -> str:
    """Next to 1 the distance from it is what matters."""
    return (
        f"1 {'+' if value > 1 else '−'} {shown_up(abs(value - 1), 2)}" if 0 < abs(value - 1) < ONE else f"{value:.9g}"
    )


def _places(count: int) -> Tensor:
    """Places that are drawn: all, or as many as a line shows, the first and the last among them."""
    if count <= MOST_POINTS:
        return torch.arange(count)
    step = (count - 1) / (MOST_POINTS - 1)
    return (torch.arange(MOST_POINTS, dtype=torch.float64) * step).round().long()


def _plain_ticks(axis: Any, *, whole: bool = False) -> None:
    """Numbers as they are, without an offset to add in one's head; few enough to be read."""
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    formatter = ScalarFormatter(useOffset=False, useMathText=True)
    formatter.set_powerlimits((-4, 6))
    axis.set_major_locator(MaxNLocator(nbins=6, integer=whole, min_n_ticks=1, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(formatter)


def _note(axes: Any, text: str) -> None:
    axes.text(1.0, 1.01, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=8.5, color=QUIET)


def _styles(count: int) -> list[dict[str, Any]]:
    if count <= len(COLOURS):
        return [{"color": COLOURS[place], "linestyle": DASHES[place % len(DASHES)]} for place in range(count)]
    from matplotlib import colormaps

    scale = colormaps[SCALE]
    return [
        {"color": scale(0.95 * place / (count - 1)), "linestyle": DASHES[place % len(DASHES)]} for place in range(count)
    ]


def _legend(figure: Any, several: Sequence[Measured], styles: Sequence[dict[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linewidth=1.8, **style) for style in styles]
    same = len({one.stored.kernel.shape for one in several}) == 1
    names = [_cut(one.name) + ("" if same else f"  {_shape(one)}") for one in several]
    columns = math.ceil(len(several) / LEGEND_ROWS)
    options = {"ncols": columns, "frameon": False, "fontsize": 8, "handlelength": 2.6}
    legend = figure.legend(handles, ["x"] * len(names), loc="outside right upper", **options)
    # Set afterwards: a legend leaves out names that begin with an underscore, and reads formulas between dollars.
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set(text=name, parse_math=False, color=INK)


def _heading(several: Sequence[Measured]) -> str:
    if len(several) == 1:
        return f"Singular values of {_cut(several[0].name)}, {_shape(several[0])}"
    return f"Singular values of {len(several)} layers"


def _geometry(several: Sequence[Measured]) -> str:
    """What all have in common, and how many values there are if that is one number."""
    lines = dict.fromkeys(geometry_line(one.layer, one.sizes or ()) if one.layer else "matrix" for one in several)
    parts = [" / ".join(lines)] if len(lines) <= 2 else []
    if len(several) == 1:
        found = several[0].spectrum
        number = len(found.values)
        every = "1 value" if number == 1 else f"{number} values"
        parts.append(f"the {number} largest of {number + found.omitted} values" if found.omitted else every)
    error = max(one.spectrum.error for one in several)
    return " · ".join([*parts, f"certified to within {shown_up(error, 2)}" if math.isfinite(error) else "not finite"])


def _shape(one: Measured) -> str:
    return "×".join(map(str, one.stored.kernel.shape))


def _cut(name: str) -> str:
    """The end of a long name, which tells tensors apart."""
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
    return shown if len(shown) <= LONGEST else f"…{shown[-LONGEST + 1 :]}"
