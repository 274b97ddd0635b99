"""Two ways of doing the same work, timed in one run and measured for memory, each in a process of its own."""

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

Work = Callable[[], object]


@dataclass(frozen=True)
class Question:
    """One row of a table: `ours` against `theirs`, and the ratios that were asked for."""

    name: str
    against: str
    theirs: Callable[[], Work]
    ours: Callable[[], Work]
    asked: str
    rounds: int = 9
    calls: int = 5


def median_times(question: Question) -> tuple[float, float]:
    """Medians of both sides in seconds; rounds alternate, and the first call of each round only warms up."""
    sides = (question.theirs(), question.ours())
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(question.rounds):
        for work, record in zip(sides, times, strict=True):
            for call in range(question.calls):
                start = time.perf_counter()
                work()
                if call or question.calls == 1:
                    record.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def peak_mebibytes(script: str, number: int, side: str) -> float:
    """How much the resident memory of a fresh process grows by one piece of work, at its peak."""
    printed = subprocess.run(
        [sys.executable, script, "--peak", str(number), side], check=True, capture_output=True, text=True
    ).stdout
    grown: float = json.loads(printed)
    return grown


def high_water_mark() -> int:
    """Largest resident memory of this process so far, in bytes (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def main(script: str, questions: list[Question]) -> None:
    """Print the table, or, in the child process, the peak of one piece of work."""
    if "--peak" in sys.argv:
        number, side = sys.argv[sys.argv.index("--peak") + 1 :][:2]
        work = getattr(questions[int(number)], side)()
        before = high_water_mark()
        work()
        print(json.dumps((high_water_mark() - before) / 2**20))
        return
    table = Table(title=f"torch {torch.__version__}, {torch.get_num_threads()} threads; medians; peak beyond the start")
    for heading in ("work", "against", "theirs", "ours", "faster", "their peak", "our peak", "asked"):
        table.add_column(heading, justify="left" if heading in ("work", "against", "asked") else "right")
    for number, question in enumerate(questions):
        theirs, ours = median_times(question)
        peaks = [peak_mebibytes(script, number, side) for side in ("theirs", "ours")]
        table.add_row(
            question.name,
            question.against,
            f"{theirs * 1e3:.1f} ms",
            f"{ours * 1e3:.1f} ms",
            f"{theirs / ours:.1f}×",
            *(f"{peak:.0f} MiB" for peak in peaks),
            question.asked,
        )
    Console(width=160).print(table)
