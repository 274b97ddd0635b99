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

from gramcert.certification.accuracy import METHODS, MINORANT, CertifiedAccuracy
from gramcert.certification.accuracy import STEPS as DEFAULT_STEPS
from gramcert.certification.accuracy import certify as run
from gramcert.cli.audit import ARCHITECTURE, PREFIX
from gramcert.cli.errors import one_line_errors
from gramcert.cli.options import DATA, JOBS, RADII, RESUME, STEPS, parse_radii
from gramcert.cli.plots import require_plotting
from gramcert.cli.progress import counting_bars
from gramcert.cli.radius_plot import save_radius_plot
from gramcert.cli.subject import SUBJECT, Subject

# A table of a hundred classes is for --json.
MOST_ROWS = 20


def certify(
    model: SUBJECT,
    data: DATA = None,
    radii: RADII = "36/255,72/255,108/255,255/255",
    images: Annotated[int | None, typer.Option(help="Only the first so many test images.")] = None,
    largest: Annotated[
        bool, typer.Option(help="Look for the largest radius of each image, beyond those asked.")
    ] = False,
    steps: STEPS = DEFAULT_STEPS,
    jobs: JOBS = 1,
    resume: RESUME = None,
    certificate: Annotated[
        Path | None, typer.Option(help="Where to write what `gramcert verify` checks each radius with, a .npz file.")
    ] = None,
    architecture: ARCHITECTURE = None,
    prefix: PREFIX = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Where the curve goes; certified.png beside the model if matplotlib is installed."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Clean and certified accuracy, per class, who certified what, and the curve over all radii; rounding included."""
    with one_line_errors():
        wanted = parse_radii(radii)
        if plot is not None:
            require_plotting(plot)
        subject = Subject.of(model, data, images)
        with counting_bars() as bars:
            result = run(
                subject.model,
                subject.loader(),
                list(wanted.values()),
                largest=largest,
                search_steps=steps,
                jobs=jobs,
                resume=resume,
                certificate=certificate,
                architecture=architecture,
                prefix=prefix,
                report=lambda what, done, total: bars(what, done, total or len(subject.labels)),
            )
    if as_json:
        typer.echo(json.dumps(_as_json(subject, result, wanted), allow_nan=False))
    else:
        Console().print(_table(subject, result, wanted))
        Console().print(_notes(subject, result, largest=largest))
    if certificate is not None and certificate.exists():
        typer.echo(f"certificate written to {certificate}; gramcert verify checks it", err=True)
    with one_line_errors():  # after the result, which must not be lost with the plot
        save_radius_plot(
            plot or subject.beside / "certified.png", {"certified": result.radii}, result.clean, subject.name
        )


def _as_json(subject: Subject, result: CertifiedAccuracy, radii: dict[str, float]) -> dict[str, Any]:
    classes = {
        name: {"images": int((result.labels == label).sum()), "clean": result.clean_of(label)}
        | {"certified": {text: result.at(radius, label) for text, radius in radii.items()}}
        for label, name in enumerate(subject.classes)
        if bool((result.labels == label).any())
    }
    return {
        "clean": result.clean,
        "certified": {text: result.certified[radius] for text, radius in radii.items()},
        "lipschitz": result.lipschitz,
        "lipschitz_of": result.lipschitz_of,
        "images": len(result.labels),
        "feature_error": result.error,
        "classes": classes,
        "radii": [radius if math.isfinite(radius) else None for radius in result.radii.tolist()],
        "by": list(result.by),
        "notes": list(result.notes),
        **subject.facts,
        "assumptions": result.assumptions,
    }


def _table(subject: Subject, result: CertifiedAccuracy, radii: dict[str, float]) -> Table:
    table = Table(title=f"{escape(subject.name)}: certified accuracy in %", title_justify="left")
    table.add_column("class")
    for heading in ("images", "clean", *(f"at {text}" for text in radii)):
        table.add_column(heading, justify="right", min_width=5)

    def row(name: str, count: int, clean: float, shares: list[float], style: str = "") -> None:
        table.add_row(Text(name), str(count), f"{100 * clean:.1f}", *map(percent, shares), style=style)

    for label, name in enumerate(subject.classes):
        count = int((result.labels == label).sum())
        if count and len(subject.classes) <= MOST_ROWS:
            row(name, count, result.clean_of(label), [result.at(radius, label) for radius in radii.values()])
    table.add_section()
    shares = [result.certified[radius] for radius in radii.values()]
    row("all", len(result.labels), result.clean, shares, "bold")
    return table


def _notes(subject: Subject, result: CertifiedAccuracy, *, largest: bool) -> Text:
    constant, error = _rounded_up(result.lipschitz, 10), _rounded_up(result.error, 2)
    count = len(result.labels)
    shape = "×".join(map(str, subject.inputs.shape[1:]))
    by = ", ".join(f"{name} {number}" for name in METHODS if (number := result.by.count(name)))
    return Text(
        f"{count} inputs of shape {shape}; radii by {by or 'nothing'}. Constant {result.lipschitz_of}: "
        f"{constant}, by every layer's weights as stored. Features are computed to within {error}, which is taken "
        f"off the radii. With {count} images an accuracy of 50 % is known to about "
        f"±{100 * (0.25 / count) ** 0.5 * 2:.1f} points. Certified shares are rounded down."
        + (
            ""
            if largest or MINORANT not in result.by
            else " Beyond the largest radius only constants count; see --largest."
        )
        + "".join(f" Note: {note}." for note in result.notes)
        + ("" if len(subject.classes) <= MOST_ROWS else " --json has every class."),
        "dim",
    )


def percent(share: float) -> str:
    """Rounded down: what is printed is never more than what was certified."""
    return f"{math.floor(1000 * share + 1e-9) / 10:.1f}"  # the product may be just below a whole number


def _rounded_up(value: float, digits: int) -> str:
    """With so many significant digits."""
    with decimal.localcontext(prec=digits, rounding=decimal.ROUND_CEILING):
        return f"{+decimal.Decimal(value):g}"
