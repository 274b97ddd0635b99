"""Labels beside the points of a plot, placed so that they cover neither points nor each other."""

import math
from collections.abc import Iterator
from typing import Any

Pair = tuple[float, float]

# Half the side of the square around a point that labels keep clear of, and the gap between labels, in points.
CLEARANCE, GAP = 6.0, 1.5

# A label may move this far from its point before overlap is accepted.
FARTHEST = 90.0


def place_labels(axes: Any, points: list[Pair], names: list[str], colour: str, level: float) -> None:
    """Annotate each point with its name, at the nearest free place; distant labels get a thin line.

    Labels also keep clear of the horizontal line at ``level``. The most crowded points choose first,
    since they have the fewest places.
    """
    from matplotlib.transforms import Bbox

    figure = axes.figure
    figure.draw_without_rendering()  # settles the layout, and with it where points are on the page
    unit = figure.dpi / 72
    centres = [tuple(axes.transData.transform(point)) for point in points]
    taken = [_square(x, y, CLEARANCE * unit) for x, y in centres]
    taken += [text.get_window_extent() for text in axes.texts]
    height = axes.transData.transform((points[0][0], level))[1] if points else 0.0
    taken.append(Bbox.from_extents(axes.bbox.x0, height - unit, axes.bbox.x1, height + unit))
    crowding = [sum(math.dist(centre, other) < FARTHEST * unit for other in centres) for centre in centres]
    for index in sorted(range(len(points)), key=lambda i: -crowding[i]):
        label = axes.annotate(
            names[index], points[index], xytext=(0, 0), textcoords="offset points", fontsize=9, color=colour, zorder=4
        )
        extent = label.get_window_extent()
        width, height = extent.width / unit, extent.height / unit
        x, y = centres[index]
        for dx, dy in _offsets(width, height):
            corner = (x + dx * unit, y + dy * unit)
            box = Bbox.from_bounds(*corner, extent.width, extent.height).padded(GAP * unit)
            inside = axes.bbox.containsx(box.x0) and axes.bbox.containsx(box.x1)
            inside = inside and axes.bbox.containsy(box.y0) and axes.bbox.containsy(box.y1)
            if inside and not any(box.overlaps(other) for other in taken):
                break
        else:
            dx, dy = next(_offsets(width, height))
            box = Bbox.from_bounds(x + dx * unit, y + dy * unit, extent.width, extent.height)
        taken.append(box)
        label.set_position((dx, dy))
        label.set_verticalalignment("bottom")
        _connect(axes, points[index], (dx, dy), (width, height), colour)


def _offsets(width: float, height: float) -> Iterator[Pair]:
    """Lower left corners of a label relative to its point, nearest first: right, left, above, below, then farther."""
    near = CLEARANCE + 2 * GAP  # one gap around the label, one to spare
    yield near, -height / 2
    yield -near - width, -height / 2
    yield -width / 2, near
    yield -width / 2, -near - height
    distance = near
    while distance < FARTHEST:
        for turn in (1, -1, 7, -7, 3, -3, 5, -5, 0, 8, 4, -4):
            angle = turn * math.pi / 8
            x, y = distance * math.cos(angle), distance * math.sin(angle)
            yield (x if math.cos(angle) > -0.1 else x - width), y - height / 2
        distance += 4


def _connect(axes: Any, point: Pair, offset: Pair, size: Pair, colour: str) -> None:
    """A thin line from a point to the nearest place of its label, if that is not right beside it."""
    nearest = tuple(min(max(low, 0.0), low + length) for low, length in zip(offset, size, strict=True))
    if math.hypot(*nearest) > 2 * CLEARANCE:
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6, "shrinkA": 0, "shrinkB": 4}
        axes.annotate("", point, xytext=nearest, textcoords="offset points", arrowprops=line)


def _square(x: float, y: float, half: float) -> Any:
    from matplotlib.transforms import Bbox

    return Bbox.from_extents(x - half, y - half, x + half, y + half)
