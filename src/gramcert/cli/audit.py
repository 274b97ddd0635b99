"""``gramcert audit``: the certified Lipschitz constant of a model in a file."""

import json
import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gramcert.auditing.architectures import ARCHITECTURES
from gramcert.auditing.cache import VARIABLE, default_folder
from gramcert.auditing.entry import audit as run
from gramcert.auditing.fixing import Value
from gramcert.cli.audit_table import audit_table
from gramcert.cli.codes import ABOVE_LIMIT, NEGATIVE_ANSWER
from gramcert.cli.errors import BadInput, one_line_errors
from gramcert.cli.options import parse_sizes
from gramcert.cli.progress import counting_bar
from gramcert.files import read_npy, write_atomically

EMBEDDED = "network.safetensors"

# What shells report of a command that was interrupted.
INTERRUPTED = 130

MODEL = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL",
        help="ONNX, .pt2, a folder of `gramcert train`, or a file of weights; without it a small network that comes "
        "with gramcert.",
        show_default=False,
    ),
]
ARCHITECTURE = Annotated[
    str | None, typer.Option(help=f"Of a file of weights alone: {', '.join(ARCHITECTURES)}.", show_default=False)
]
PREFIX = Annotated[str | None, typer.Option(help="Use the weights whose names begin so.", show_default=False)]
FIX = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Fix an input to a number or a .npy file, all but one of several; once for each.",
        show_default=False,
    ),
]


def audit(
    model: MODEL = None,
    input_shape: Annotated[
        str | None,
        typer.Option(help="Of one example without the batch: 3,32,32; only where the model does not fix it."),
    ] = None,
    tol: Annotated[float, typer.Option(help="Relative width to reach for each measured norm.")] = 1e-3,
    architecture: ARCHITECTURE = None,
    prefix: PREFIX = None,
    fix: FIX = None,
    output: Annotated[
        str | None, typer.Option(help="Of a model with several outputs, the one to be audited.", show_default=False)
    ] = None,
    functional: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE=WEIGHT,...",
            help="Audit a weighted sum of entries of the output: 3=1,5=-1 is the difference of two logits.",
            show_default=False,
        ),
    ] = None,
    search_seconds: Annotated[
        float, typer.Option(help="For the search of multipliers of the whole network; 0: closed form.")
    ] = 60.0,
    lower_steps: Annotated[
        int, typer.Option(help="Of the search for two inputs that bound the constant from below; 0: none.")
    ] = 100,
    fail_above: Annotated[
        float | None,
        typer.Option(
            metavar="L",
            help="Exit code 3 if the proved constant is above this, or unbounded: for CI.",
            show_default=False,
        ),
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="Write what `gramcert verify` checks.", show_default=False)
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page for people.", show_default=False)] = None,
    jobs: Annotated[int, typer.Option(help="Processes to measure in.")] = 1,
    max_seconds: Annotated[float | None, typer.Option(help="Per measurement; what was proved then holds.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the layers also where the constant is unbounded.")
    ] = False,
    cache: Annotated[
        Path | None, typer.Option(help="Folder of measurements.", envvar=VARIABLE, show_default="the user's cache")
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Measure everything anew and keep nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """The certified l2 Lipschitz constant of a whole model, rounding included, and where it comes from.

    Exit code 1 if the constant is unbounded, 3 if it is above --fail-above. Measurements are kept, so that an
    interrupted audit goes on where it was.
    """
    with one_line_errors(), resumable(), chosen(model) as path:
        shape = None if input_shape is None else parse_shape(input_shape)
        if fail_above is not None and not 0 <= fail_above < math.inf:
            raise BadInput(f"--fail-above {fail_above}: expected a finite number that is not negative")
        for option, target, other in (("--certificate", certificate, html), ("--html", html, None)):
            require_writable(option, target, path, other)
        folder = None if no_cache else cache or default_folder()
        if folder is not None and folder.exists() and not folder.is_dir():
            raise BadInput(f"--cache {folder}: not a folder")
        with counting_bar("audit") as bar:
            result = run(
                path,
                shape,
                tol=tol,
                architecture=architecture,
                prefix=prefix,
                fix=parse_fix(fix),
                output=output,
                functional=None if functional is None else parse_functional(functional),
                search_seconds=search_seconds,
                lower_steps=lower_steps,
                jobs=jobs,
                cache=folder,
                max_seconds=max_seconds,
                measure=measure,
                report=bar,
            )
    problems, command = [], ""
    if certificate is not None:
        problems += _written("--certificate", certificate, json.dumps(result.certificate, indent=1) + "\n")
        if not problems and certificate.is_file():
            command = _verify_command(certificate, model, architecture, prefix, fix or [])
    if html is not None:
        problems += _written("--html", html, result.to_html(command))
    if as_json:
        typer.echo(result.to_json())
    else:
        Console().print(audit_table(result, verify=command, limit=fail_above))
    with one_line_errors():  # after the result, which must not be lost with a file
        if problems:
            raise BadInput("; ".join(problems))
    if fail_above is not None and not result.upper <= fail_above:
        raise typer.Exit(ABOVE_LIMIT)
    if math.isinf(result.upper):
        raise typer.Exit(NEGATIVE_ANSWER)


def _written(option: str, path: Path, content: str) -> list[str]:
    """Write a file; a link is followed, as ``/dev/stdout`` is one. What went wrong, if anything did."""
    target = path if path.exists() and not path.is_file() else path.resolve()  # a pipe has no other name
    try:
        write_atomically(target, content.encode())
    except OSError as error:
        return [f"{option} {path}: cannot be written ({error.strerror})"]
    return []


def _verify_command(
    certificate: Path, model: Path | None, architecture: str | None, prefix: str | None, fix: list[str]
) -> str:
    """What checks the certificate, as it can be typed in this folder; empty if a name cannot be shown as it is."""
    words = ["gramcert", "verify", str(certificate), *([] if model is None else [str(model)])]
    named = [("--architecture", architecture), ("--prefix", prefix), *(("--fix", text) for text in fix)]
    words += [word for option, value in named if value is not None for word in (option, value)]
    command = shlex.join(words)
    return command if command.isprintable() else ""


@contextmanager
def resumable() -> Iterator[None]:
    """Say that an interrupted audit is not lost."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted; what was measured is in the cache, the same command goes on from there", err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def chosen(model: Path | None) -> Iterator[Path]:
    """The file that was named, or the network that comes with the package."""
    if model is not None:
        yield model
        return
    with resources.as_file(resources.files("gramcert.data") / EMBEDDED) as path:
        yield path


def parse_shape(text: str) -> tuple[int, ...]:
    """``3,32,32``."""
    sizes = parse_sizes("--input-shape", text)
    return (sizes,) if isinstance(sizes, int) else sizes


def parse_fix(texts: list[str] | None) -> dict[str, Value]:
    """``mask=1``, ``scale=0.5``, ``flag=true`` and ``state=state.npy``, each name once."""
    values: dict[str, Value] = {}
    for text in texts or []:
        name, equals, written = text.partition("=")
        if not equals or not name or not written:
            raise BadInput(f"--fix {text!r}: expected NAME=VALUE")
        if name in values:
            raise BadInput(f"--fix {text!r}: {name} is fixed twice")
        values[name] = _value(text, written)
    return values


def parse_functional(text: str) -> dict[int, float]:
    """``3=1,5=-1``, each place once."""
    weights: dict[int, float] = {}
    for part in text.split(","):
        place, equals, weight = part.partition("=")
        try:
            at, value = int(place), float(weight if equals else "")
        except ValueError:
            raise BadInput(f"--functional {text!r}: expected PLACE=WEIGHT, got {part!r}") from None
        if at in weights:
            raise BadInput(f"--functional {text!r}: place {at} occurs twice")
        weights[at] = value
    return weights


def _value(text: str, written: str) -> Value:
    if written in ("true", "false"):
        return written == "true"
    if written.lower().endswith(".npy"):
        try:
            return read_npy(Path(written))
        except Exception as error:  # a damaged or hostile file can make a parser raise anything
            raise BadInput(f"--fix {text!r}: cannot be read ({(str(error).splitlines() or [''])[0]})") from None
    for kind in (int, float):
        try:
            return kind(written)
        except ValueError:
            continue
    raise BadInput(f"--fix {text!r}: expected a number, true, false or a file ending in .npy")


def require_writable(option: str, path: Path | None, *others: Path | None) -> None:
    """Refuse before any work is done what could not be written after it, or would overwrite the model."""
    if path is None:
        return
    if any(other is not None and path.resolve() == other.resolve() for other in others):
        raise BadInput(f"{option} {path}: expected another file than the model and the other results")
    if not path.parent.is_dir():
        raise BadInput(f"{option} {path}: no such directory")
    if path.is_dir():
        raise BadInput(f"{option} {path}: is a directory")
