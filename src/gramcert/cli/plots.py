"""What all plots need: that they can be written."""

from importlib.util import find_spec
from pathlib import Path

from gramcert.cli.errors import BadInput

FORMATS = (".png", ".svg", ".pdf")


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
