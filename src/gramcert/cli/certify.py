"""``gramcert certify``: clean and certified accuracy of a trained network."""

import decimal
import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gramcert.certification.accuracy import CertifiedAccuracy
from gramcert.certification.accuracy import certify as run
from gramcert.cli.data import images_of
from gramcert.cli.errors import BadInput, one_line_errors
from gramcert.cli.options import DATA, RADII, parse_radii
from gramcert.cli.plots import require_plotting
from gramcert.cli.progress import counting_bars
from gramcert.cli.radius_plot import save_radius_plot
from gramcert.training.checkpoints import Trained
from gramcert.training.images import Labelled

# A table of a hundred classes is for --json.
MOST_ROWS = 20


def certify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `gramcert train` wrote.")],
    data: DATA = None,
    radii: RADII = "36/255,72/255,108/255,255/255",
    images: Annotated[int | None, typer.Option(help="Only the first so many test images.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Where the curve goes; DIR/certified.png if matplotlib is installed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Clean and certified accuracy on the test images, per class, and the curve over all radii; rounding included."""
    with one_line_errors():
        wanted = parse_radii(radii)
        if plot is not None:
            require_plotting(plot)
        trained = Trained(folder)
        test = images_to_test(trained, data, images)
        with counting_bars() as bars:
            result = run(
                trained.model,
                test.loader(),
                list(wanted.values()),
                report=lambda what, done, total: bars(what, done, total or len(test)),
            )
    if as_json:
        typer.echo(json.dumps(_as_json(trained, result, wanted), allow_nan=False))
    else:
        Console().print(_table(trained, result, wanted))
        Console().print(_notes(trained, result, len(test)))
    target = plot or (folder if folder.is_dir() else folder.parent) / "certified.png"
    with one_line_errors():  # after the result, which must not be lost with the plot
        save_radius_plot(target, {"certified": result.radii}, result.clean, trained.configuration.name)


def images_to_test(trained: Trained, data: Path | None, count: int | None) -> Labelled:
    """The test images of a network's own set, which must be the ones that it was made for."""
    configuration = trained.configuration
    found = images_of(configuration.dataset, data)
    found = found.limited(configuration.images, configuration.holdout)
    if found.shape != trained.shape or found.classes != trained.classes:
        expected = f"{len(trained.classes)} classes of images of shape {trained.shape}"
        raise BadInput(f"--data: the network was made for {expected}, got {len(found.classes)} of {found.shape}")
    if count is not None and not 0 < count <= len(found.test):
        raise BadInput(f"--images {count}: expected 1 to {len(found.test)}")
    return found.test if count is None else found.test[slice(0, count)]


def _as_json(trained: Trained, result: CertifiedAccuracy, radii: dict[str, float]) -> dict[str, Any]:
    classes = {
        name: {"images": int((result.labels == label).sum()), "clean": result.clean_of(label)}
        | {"certified": {text: result.at(radius, label) for text, radius in radii.items()}}
        for label, name in enumerate(trained.classes)
        if bool((result.labels == label).any())
    }
    return {
        "clean": result.clean,
        "certified": {text: result.certified[radius] for text, radius in radii.items()},
        "lipschitz": result.lipschitz,
        "images": len(result.labels),
        "feature_error": result.error,
        "classes": classes,
        "configuration": json.loads(trained.configuration.to_json()),
        "assumptions": result.assumptions,
    }


def _table(trained: Trained, result: CertifiedAccuracy, radii: dict[str, float]) -> Table:
    table = Table(title=f"{escape(trained.configuration.name)}: certified accuracy in %", title_justify="left")
    table.add_column("class")
    for heading in ("images", "clean", *(f"at {text}" for text in radii)):
        table.add_column(heading, justify="right", min_width=5)

    def row(name: str, count: int, clean: float, shares: list[float], style: str = "") -> None:
        table.add_row(Text(name), str(count), f"{100 * clean:.1f}", *map(percent, shares), style=style)

    for label, name in enumerate(trained.classes):
        count = int((result.labels == label).sum())
        if count and len(trained.classes) <= MOST_ROWS:
            row(name, count, result.clean_of(label), [result.at(radius, label) for radius in radii.values()])
    table.add_section()
    shares = [result.certified[radius] for radius in radii.values()]
    row("all", len(result.labels), result.clean, shares, "bold")
    return table


def _notes(trained: Trained, result: CertifiedAccuracy, count: int) -> Text:
    constant, error = _rounded_up(result.lipschitz, 10), _rounded_up(result.error, 2)
    return Text(
        f"{trained.shape[1]}×{trained.shape[2]} images; constant of the network before its last layer {constant}, from "
        f"every layer's weights as stored. Features are computed to within {error}, which is taken off the radii. With "
        f"{count} images an accuracy of 50 % is known to about ±{100 * (0.25 / count) ** 0.5 * 2:.1f} points. "
        f"Certified shares are rounded down."
        + ("" if len(trained.classes) <= MOST_ROWS else " --json has every class."),
        "dim",
    )


def percent(share: float) -> str:
    """Rounded down: what is printed is never more than what was certified."""
    return f"{math.floor(1000 * share + 1e-9) / 10:.1f}"  # the product may be just below a whole number


def _rounded_up(value: float, digits: int) -> str:
    """With so many significant digits."""
    with decimal.localcontext(prec=digits, rounding=decimal.ROUND_CEILING):
        return f"{+decimal.Decimal(value):g}"
