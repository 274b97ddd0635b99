"""``gramcert train``: train a network by a named configuration, or go on with a run that was stopped."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gramcert.cli.data import images_of
from gramcert.cli.errors import BadInput, one_line_errors
from gramcert.cli.options import DATA, parse_changes
from gramcert.cli.progress import counting_bar
from gramcert.training.configuration import CONFIGURATIONS, from_file, named
from gramcert.training.loop import train as run


def train(
    configuration: Annotated[
        str, typer.Argument(metavar="CONFIG", help=f"{', '.join(CONFIGURATIONS)}, or a JSON file.")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder of the run; one that was stopped goes on.")] = None,
    data: DATA = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field; may be repeated.")
    ] = None,
    checkpoint_seconds: Annotated[float, typer.Option(help="Least time between two states on disk.")] = 30.0,
    show: Annotated[bool, typer.Option("--show", help="Print the configuration as JSON and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Train a 1-Lipschitz network. A run that was killed goes on from its last state, to the same result.

    OUT gets the configuration, metrics.jsonl, curves for TensorBoard, the state to go on from and, in the end,
    model.safetensors. Several processes share each batch: torchrun --nproc-per-node 4 -m gramcert train ...
    """
    with one_line_errors():
        is_name = configuration in CONFIGURATIONS or not configuration.endswith(".json")
        base = named(configuration) if is_name else from_file(Path(configuration))
        chosen = base.with_fields(parse_changes("--set", changes or []))
    if show:
        typer.echo(chosen.to_json())
        return
    with one_line_errors():
        if not checkpoint_seconds >= 0:
            raise BadInput(f"--checkpoint-seconds {checkpoint_seconds}: expected a number of at least 0")
        if out is None:
            raise BadInput("train: the folder of the run is needed (--out)")
        images = images_of(chosen.dataset, data)
        is_first = os.environ.get("RANK", "0") == "0"
        with counting_bar("train") as bar:  # which takes what is printed, but not typer's echo, to lines above itself
            begun = False

            def report(what: str, done: int, total: int | None) -> None:
                nonlocal begun
                if done and not begun:
                    what_happens = "finished already" if done == total else f"goes on from step {done}"
                    print(f"the run in {out} {what_happens}", file=sys.stderr)
                begun = True
                bar(what, done, total)

            def on_epoch(record: dict[str, Any]) -> None:
                shares = (f"{name} {100 * value:4.1f}" for name, value in _shares(record).items())
                epoch = f"epoch {record['epoch']:{len(str(chosen.epochs))}}/{chosen.epochs}"
                print("  ".join((epoch, f"loss {record['loss']:.4f}", *shares)), file=sys.stderr)

            records = run(chosen, images, out, report=report, on_epoch=on_epoch, checkpoint_seconds=checkpoint_seconds)
        if is_first and not records:
            raise BadInput(f"{out}: the run is finished, but its records are gone")
    if not is_first:
        return
    last = records[-1]
    if as_json:
        typer.echo(json.dumps({"out": str(out), "configuration": chosen.name} | last))
    else:
        table = Table.grid(padding=(0, 2))
        for name, value in _shares(last).items():
            table.add_row(name, f"{100 * value:.1f} %")
        Console().print(table)
        typer.echo(f"The network is in {out}. The shares at radii are estimates; to certify: gramcert certify {out}")


def _shares(record: dict[str, float]) -> dict[str, float]:
    """Clean accuracy and estimates, as they are named in tables."""
    names = {name: name.replace("estimated_", "") + "/255" for name in record if name.startswith("estimated_")}
    return {shown: record[name] for name, shown in ({"clean": "clean"} | names).items() if name in record}
