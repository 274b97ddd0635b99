"""What all plots need: that they can be written, and a quiet frame."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gramcert.cli.errors import BadInput

FORMATS = (".png", ".svg", ".pdf")

INK, QUIET = "#222222", "#777777"


def require_plotting(path: Path) -> None:
    """Refuse before any work is done what could not be written after it."""
    if find_spec("matplotlib") is None:
        raise BadInput("--plot: needs the extra: pip install 'gramcert[plot]'")
    if path.suffix.lower() not in FORMATS:
        raise BadInput(f"--plot {path}: expected a file ending in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise BadInput(f"--plot {path}: no such directory")
    if path.is_dir():
        raise BadInput(f"--plot {path}: is a directory")


def quiet_frame(axes: Any) -> None:
    """A light grid behind what is drawn instead of a box around it."""
    axes.grid(color="#E3E3E3", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=QUIET, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure to the file of ``--plot``."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise BadInput(f"--plot {path}: cannot be written ({error.strerror})") from error
