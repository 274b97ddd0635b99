"""The commands put together."""

from typing import Annotated

import typer

import gramcert
from gramcert.cli.attack import attack
from gramcert.cli.audit import audit
from gramcert.cli.certify import certify
from gramcert.cli.compare import compare
from gramcert.cli.norm import norm
from gramcert.cli.reproduce import app as reproduce
from gramcert.cli.spectrum import spectrum
from gramcert.cli.streams import safe_streams
from gramcert.cli.train import train
from gramcert.cli.verify import verify

app = typer.Typer(
    name="gramcert",
    help="Certified spectral norms of layers, certified constants of models, and certified networks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(norm)
app.command()(spectrum)
app.command()(compare)
app.command()(audit)
app.command()(verify)
app.command()(train)
app.command()(certify)
app.command()(attack)
app.add_typer(reproduce, name="reproduce")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gramcert {gramcert.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    with safe_streams():
        app(prog_name="gramcert")
