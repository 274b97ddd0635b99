"""``gramcert attack``: strong l2 attacks on a trained network, set beside what is certified."""

import json
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gramcert.certification.accuracy import METHODS, certify
from gramcert.certification.accuracy import STEPS as DEFAULT_STEPS
from gramcert.certification.attacks import ATTACKS, require_foolbox
from gramcert.certification.attacks import attack as run
from gramcert.cli.audit import ARCHITECTURE, PREFIX
from gramcert.cli.certify import percent
from gramcert.cli.codes import NEGATIVE_ANSWER
from gramcert.cli.errors import BadInput, one_line_errors
from gramcert.cli.options import DATA, JOBS, RADII, RESUME, STEPS, parse_radii
from gramcert.cli.progress import counting_bars
from gramcert.cli.radius_plot import save_radius_plot
from gramcert.cli.subject import SUBJECT, Subject
from gramcert.training.checkpoints import save_inputs

REFUTED = "refuted.safetensors"


def attack(
    model: SUBJECT,
    data: DATA = None,
    radii: RADII = "36/255,72/255,108/255,255/255",
    images: Annotated[int | None, typer.Option(help="Only the first so many test images.")] = None,
    steps: Annotated[int, typer.Option(help="Gradient steps of each attack at each trial.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the random starts.")] = 0,
    search_steps: STEPS = DEFAULT_STEPS,
    jobs: JOBS = 1,
    resume: RESUME = None,
    architecture: ARCHITECTURE = None,
    prefix: PREFIX = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Certified, attacked and clean accuracy: DDN, Carlini-Wagner and projected gradient, the best for each image.

    Exit code 1 if an attack ever succeeds inside a certified radius, which would refute the certificate.
    """
    with one_line_errors():
        wanted = parse_radii(radii)
        if steps < 1:
            raise BadInput(f"--steps {steps}: expected a positive number")
        require_foolbox()
        subject = Subject.of(model, data, images)
        count = len(subject.labels)
        with counting_bars() as bars:
            certified = certify(
                subject.model,
                subject.loader(),
                list(wanted.values()),
                search_steps=search_steps,
                jobs=jobs,
                resume=resume,
                architecture=architecture,
                prefix=prefix,
                report=lambda what, done, total: bars(what, done, total or count),
            )
            attacked = run(
                subject.model,
                subject.loader(),
                list(wanted.values()),
                steps=steps,
                bounds=_bounds(subject.inputs),
                seed=seed,
                architecture=architecture,
                prefix=prefix,
                report=lambda what, done, total: bars(what, done, total or count),
            )
    refuted = (attacked.distances < certified.radii).nonzero().flatten().tolist()
    shares = {
        text: {
            "certified": certified.certified[radius],
            "attacked": attacked.attacked[radius],
            "clean": certified.clean,
        }
        for text, radius in wanted.items()
    }
    best = {name: attacked.by.count(name) for name in ATTACKS}
    by = {name: certified.by.count(name) for name in METHODS}
    if as_json:
        constant = {"lipschitz": certified.lipschitz, "lipschitz_of": certified.lipschitz_of}
        facts = {"images": count, "steps": steps, "inside_certified_radius": refuted, "best": best, "by": by}
        typer.echo(json.dumps({"radii": shares, **constant} | facts, allow_nan=False))
    else:
        table = Table(title=f"{escape(subject.name)}: accuracy in %", title_justify="left")
        for name in ("radius", "certified", "attacked", "clean"):
            table.add_column(name, justify="right")
        for text, row in shares.items():
            table.add_row(
                text, percent(row["certified"]), *(f"{100 * row[name]:.1f}" for name in ("attacked", "clean"))
            )
        Console().print(table)
        winners = ", ".join(f"{name} {count}" for name, count in best.items())
        proofs = ", ".join(f"{name} {number}" for name, number in by.items() if number) or "nothing"
        text = f"{count} images, {steps} steps. Radii by: {proofs}. Smallest change found by: {winners}."
        Console().print(Text(text, "dim"))
    beside = subject.beside
    if refuted:
        typer.echo(
            f"REFUTED: an attack succeeded inside the certified radius of {len(refuted)} images, the first of them "
            f"{refuted[0]}. This is a bug in gramcert; please report it with the folder of the network, in which "
            f"{REFUTED} has the changed images.",
            err=True,
        )
    else:
        typer.echo(f"No attack succeeded inside a certified radius ({count} images).", err=True)
    curves = {"certified": certified.radii, "attacked": attacked.distances}
    try:  # after the result, which must not be lost with a file
        with one_line_errors():
            if refuted:
                evidence = {"index": torch.tensor(refuted), "changed": attacked.changed[refuted]}
                save_inputs(beside / REFUTED, evidence)
            save_radius_plot(beside / "attacked.png", curves, certified.clean, subject.name)
    finally:
        if refuted:
            raise typer.Exit(NEGATIVE_ANSWER)


def _bounds(inputs: torch.Tensor) -> tuple[float, float]:
    """What pixels may be: from 0 to 1, or, where inputs are scaled in another way, between those that occur."""
    least, most = float(inputs.min()), float(inputs.max())
    return (0.0, 1.0) if least >= 0 and most <= 1 else (least, most)
