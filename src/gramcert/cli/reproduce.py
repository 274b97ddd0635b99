"""``gramcert reproduce``: the paper's figures and tables. Each writes CSV, JSON and a plot, and goes on if stopped."""

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gramcert.cli.errors import BadInput, one_line_errors
from gramcert.cli.options import DATA, parse_changes
from gramcert.cli.progress import counting_bars
from gramcert.experiments import channels as figure_two
from gramcert.experiments import factors as figure_one
from gramcert.experiments import tables
from gramcert.experiments.plots import plot_channels, plot_factors, plot_table
from gramcert.experiments.records import Records, Row
from gramcert.training.configuration import Configuration, named
from gramcert.training.images import load_images

app = typer.Typer(
    help="The paper's figures and tables: CSV, JSON and a plot each; a run that was stopped goes on.",
    no_args_is_help=True,
)

OUT = Annotated[Path, typer.Option(help="Folder for the results.")]
SEEDS = Annotated[str, typer.Option(help="Seeds of the repetitions, such as 0,1,2.")]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
CHANGES = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the configuration.")
]


@app.command("figure-1")
def figure_1(out: OUT = Path("results"), as_json: AS_JSON = False) -> None:
    """The factor of Theorem 5 for n = 224, k = 3: as printed, corrected, and our sampling factor."""
    with one_line_errors():
        _require_matplotlib()
        records = Records(out, "figure-1", {}, figure_one.COLUMNS, figure_one.KEY)
        if not records.rows:
            records.add(figure_one.factor_rows())
        plot_factors(records.rows, records.path(".png"))
    shown = [row for row in records.rows if row["n0"] in (16, 32, 64, 128, 224)]
    _show(records, records.rows, shown, figure_one.COLUMNS, as_json)


@app.command("figure-2")
def figure_2(
    out: OUT = Path("results"),
    channels: Annotated[str, typer.Option(help="Numbers of channels.")] = ",".join(map(str, figure_two.CHANNELS)),
    seeds: SEEDS = "0,1,2",
    as_json: AS_JSON = False,
) -> None:
    """Error and time against the number of channels, zero padding: every method, and the truth by a Cholesky proof."""
    with one_line_errors():
        _require_matplotlib()
        counts, numbers = _integers("--channels", channels, 1), _integers("--seeds", seeds, 0)
        settings = {
            "taps": figure_two.TAPS,
            "input size": figure_two.INPUT_SIZE,
            "iterations": figure_two.ITERATIONS,
        }
        records = Records(out, "figure-2", settings, figure_two.COLUMNS, figure_two.KEY)
        with counting_bars() as bars:
            figure_two.channel_rows(records, counts, numbers, bars)
        rows = [row for row in records.rows if row["channels"] in counts and row["seed"] in numbers]
        plot_channels(rows, records.path(".png"))
    shown = [row for row in rows if row["channels"] == max(counts) and row["value"] is not None]
    _show(records, rows, shown, ("channels", "seed", "method", "relative error", "seconds"), as_json)


@app.command("table-1")
def table_1(
    data: DATA = None,
    out: OUT = Path("results"),
    size: Annotated[str, typer.Option(help="nano, or the paper's own S or M.")] = "nano",
    seeds: SEEDS = "0,1,2",
    changes: CHANGES = None,
    keep_runs: Annotated[bool, typer.Option(help="Keep the folders of finished runs.")] = True,
    as_json: AS_JSON = False,
) -> None:
    """CIFAR-10: AOL, SR and frequency SR; mean and spread over the seeds, beside the paper's figures."""
    _table("table-1", "cifar10", data, out, size, seeds, changes, keep_runs, as_json)


@app.command("table-2")
def table_2(
    data: DATA = None,
    out: OUT = Path("results"),
    size: Annotated[str, typer.Option(help="nano, or the paper's own S or M.")] = "nano",
    seeds: SEEDS = "0,1,2",
    changes: CHANGES = None,
    keep_runs: Annotated[bool, typer.Option(help="Keep the folders of finished runs.")] = True,
    as_json: AS_JSON = False,
) -> None:
    """CIFAR-100: the same, when its archive is given."""
    _table("table-2", "cifar100", data, out, size, seeds, changes, keep_runs, as_json)


def _table(
    name: str,
    dataset: str,
    data: Path | None,
    out: Path,
    size: str,
    seeds: str,
    changes: list[str] | None,
    keep_runs: bool,
    as_json: bool,
) -> None:
    with one_line_errors():
        _require_matplotlib()
        numbers = _integers("--seeds", seeds, 0)
        fields = parse_changes("--set", changes or [])
        taken = {"dataset", "seed", "rescaling", "form", "iterations"}
        if taken & fields.keys():
            raise BadInput(f"--set {min(taken & fields.keys())}: the table itself sets it")
        base = _base(dataset, size).with_fields(fields)
        settings = {key: value for key, value in dataclasses.asdict(base).items() if key not in taken}
        records = Records(out, name if size == "nano" else f"{name}-{size}", settings, tables.COLUMNS, tables.KEY)
        if not all(
            records.has(rescaling=rescaling.name, seed=seed) for seed in numbers for rescaling in tables.RESCALINGS
        ):
            images = load_images(dataset, data)
            with counting_bars() as bars:
                tables.table_rows(records, base, images, numbers, keep_runs=keep_runs, report=bars)
        rows = [row for row in records.rows if row["seed"] in numbers]
        lines = list(tables.summary(rows))
        plot_table(rows, records.path(".png"), f"{base.name}, {_count(base.epochs, 'epoch')}")
    paper = {size: tables.PAPER[dataset][size]} if size in tables.PAPER[dataset] else tables.PAPER[dataset]
    if as_json:
        typer.echo(json.dumps({"summary": lines, "paper": paper, "settings": records.settings}, allow_nan=False))
    else:
        console = Console()
        console.print(_accuracy_table(base, lines, paper))
        console.print(Text(_footnote(base, dataset), "dim"))
    _written(records)


def _footnote(base: Configuration, dataset: str) -> str:
    """What may be compared with what."""
    text = "Certified here: weights as stored, rounding included."
    if base.epochs != 1000 or base.name.startswith("nano"):
        text += (
            f" Our networks ({base.name}) train for {_count(base.epochs, 'epoch')}; the paper's have 41 and 79 million "
            f"parameters and train for 1000. Only differences between lines of one block mean something."
        )
    if dataset == "cifar100":
        text += " The paper prints 0.073 and 0.075 for S at 255/255, surely shares and not per cents."
    return text


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _base(dataset: str, size: str) -> Configuration:
    if size == "nano":
        return named("nano" if dataset == "cifar10" else "nano-cifar100")
    if size not in ("S", "M"):
        raise BadInput(f"--size {size!r}: expected nano, S or M")
    return named(f"{dataset}-{size}")


def _accuracy_table(base: Configuration, lines: list[dict[str, Any]], paper: dict[str, Any]) -> Table:
    table = Table(title=f"{escape(base.name)}: accuracy in %, mean ± deviation over the seeds", title_justify="left")
    table.add_column("rescaling", no_wrap=True)
    for column in tables.ACCURACIES:
        table.add_column(column, justify="right")
    for line in lines:
        cells = []
        for column in tables.ACCURACIES:
            spread = line[f"{column} deviation"]
            cells.append(f"{line[column]:.2f}" + ("" if spread is None else f"\n±{spread:.2f}"))
        table.add_row(f"{line['rescaling']} ({line['seeds']})", *cells)
    for size, methods in paper.items():
        table.add_section()
        for method, values in methods.items():
            table.add_row(f"paper {size}: {method}", *(f"{value:g}" for value in values), style="dim")
    return table


def _show(records: Records, rows: list[Row], shown: list[Row], columns: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        content = {"experiment": records.name, "settings": records.settings, "rows": rows}
        typer.echo(json.dumps(content, allow_nan=False))
    else:
        table = Table(title=records.name, title_justify="left")
        for column in columns:
            table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
        for row in shown:
            table.add_row(*(_cell(row[column]) for column in columns))
        Console().print(table)
    _written(records)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def _written(records: Records) -> None:
    files = ", ".join(str(records.path(suffix)) for suffix in (".csv", ".json", ".png"))
    typer.echo(f"written: {files}", err=True)


def _integers(option: str, text: str, least: int) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BadInput(f"{option} {text!r}: expected integers like 0,1,2") from None
    if min(values) < least or len(set(values)) < len(values):
        raise BadInput(f"{option} {text!r}: expected different integers of at least {least}")
    return values


def _require_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise BadInput("reproduce: needs the extra: pip install 'gramcert[train]'")
