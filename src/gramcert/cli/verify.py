"""``gramcert verify``: a certificate checked against its model."""

import json
import math
import zipfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gramcert.auditing.claims import Verification
from gramcert.auditing.findings import UNBOUNDED
from gramcert.auditing.radii import is_about_radii
from gramcert.auditing.readable import shown_seconds, shown_text, shown_up
from gramcert.auditing.verifying import read_certificate
from gramcert.auditing.verifying import verify as run
from gramcert.cli.audit import ARCHITECTURE, EMBEDDED, FIX, MODEL, PREFIX, chosen, parse_fix
from gramcert.cli.audit_table import LONGEST_SENTENCE
from gramcert.cli.codes import NEGATIVE_ANSWER
from gramcert.cli.errors import BadInput, one_line_errors
from gramcert.cli.progress import counting_bar
from gramcert.files import looks_like

NOT_CHECKED = "not checked: the name, tolerance and versions that it lists as `unverified`"


def verify(
    certificate: Annotated[
        Path,
        typer.Argument(
            metavar="CERTIFICATE", help="What `gramcert audit --certificate` or `gramcert certify --certificate` wrote."
        ),
    ],
    model: MODEL = None,
    architecture: ARCHITECTURE = None,
    prefix: PREFIX = None,
    fix: FIX = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a certificate against a model: weights, graph, every claim by its own proof, and what follows from them.

    Exit code 1 if anything is wrong, with what it is.
    """
    with one_line_errors(), chosen(model) as path, counting_bar("verify") as bar:
        content = _archive(certificate) if is_about_radii(certificate) else read_certificate(certificate)
        said = content.get("unverified") if isinstance(content, dict) else None
        if model is None and not (isinstance(said, dict) and said.get("model") == EMBEDDED):
            raise BadInput(f"MODEL: expected the file that {certificate} is about")
        result = run(content, path, architecture=architecture, prefix=prefix, fix=parse_fix(fix), report=bar)
    if as_json:
        typer.echo(json.dumps(_as_json(result), allow_nan=False))
    else:
        console = Console()
        if result.checks:
            console.print(_table(result))
        console.print(_verdict(result))
    if not result.holds:
        raise typer.Exit(NEGATIVE_ANSWER)


def _archive(certificate: Path) -> Path:
    """A certificate of radii: a file that is no archive at all is none, and not one that does not hold."""
    if certificate.is_file() and not zipfile.is_zipfile(certificate):
        with certificate.open("rb") as file:
            looks = looks_like(file.read(64))
        raise BadInput(f"{certificate}: expected a certificate of radii, got a truncated or other file{looks}")
    return certificate


def _table(result: Verification) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading, justify in (("layer", "left"), ("at most", "right"), ("proved by", "left"), ("time", "right")):
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for check in result.checks:
        style = "red" if check.problem else ""
        method = "NOT PROVED" if check.problem else check.method
        seconds = shown_seconds(check.seconds)
        table.add_row(Text(shown_text(check.name)), Text(shown_up(check.upper)), Text(method), seconds, style=style)
    return table


def _verdict(result: Verification) -> Text:
    if result.holds:
        text = Text("\nthe certificate holds: ", "bold green")
        if result.inputs is not None:
            text.append(f"{result.inputs} inputs keep their class within their radii")
            text.append(f" for {shown_text(result.model)}", "not bold default")
        elif math.isinf(result.upper):
            text.append("it certifies no constant").append(f" for {_about(result)}", "not bold default")
            for reason in result.reasons:
                text.append(f"\n  {shown_text(reason, LONGEST_SENTENCE)}", "not bold yellow")
        else:
            text.append(f"L ≤ {shown_up(result.upper)}").append(f" for {_about(result)}", "not bold default")
        count = len(result.checks)
        radii = "" if result.inputs is None else " and all radii"
        claims = f"{count} claim{'s' * (count != 1)}{radii} proved anew in {shown_seconds(result.seconds)}"
        return text.append(f"\n{claims}; {NOT_CHECKED}", "not bold dim default")
    text = Text("\nthe certificate does NOT hold", "bold red")
    for problem in result.problems:
        text.append(f"\n  {shown_text(problem)}", "red")
    return text


def _about(result: Verification) -> str:
    return f"{shown_text(result.model)} and all inputs of shape {'×'.join(map(str, result.input_shape)) or '()'}"


def _as_json(result: Verification) -> dict[str, object]:
    return {
        "holds": result.holds,
        "upper": UNBOUNDED if math.isinf(result.upper) else result.upper,
        "inputs": result.inputs,
        "input_shape": list(result.input_shape),
        "model": result.model,
        "reasons": list(result.reasons),
        "problems": list(result.problems),
        "checks": [
            {
                "name": check.name,
                "upper": UNBOUNDED if math.isinf(check.upper) else check.upper,
                "method": check.method,
                "problem": check.problem,
                "seconds": check.seconds,
            }
            for check in result.checks
        ],
        "seconds": result.seconds,
    }
