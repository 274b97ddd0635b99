"""Progress bars on standard error, only where it is a terminal; results go to standard output."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from gramcert.progress import Report


@contextmanager
def counting_bars() -> Iterator[Report]:
    """One for each thing that is reported, like ``layers ━━━━ 3/9 0:01:20``, with the time left."""
    with _bars("{task.description}", "") as bars:
        tasks: dict[str, int] = {}

        def update(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)  # type: ignore[arg-type]

        yield update


@contextmanager
def counting_bar(name: str) -> Iterator[Report]:
    """One for all that is reported, like ``audit ━━━━ 3/9 0:01:20 conv1``, with what is being done at its end."""
    with _bars(name, "{task.description}") as bars:
        task = bars.add_task("", total=None)
        yield lambda what, done, total: bars.update(task, completed=done, total=total, description=what)


def _bars(before: str, after: str) -> Progress:
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn(before, markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn(after, markup=False),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
