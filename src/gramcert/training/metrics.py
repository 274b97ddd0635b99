"""What a run measured: JSON lines, and TensorBoard where it is installed."""

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from gramcert.files import write_atomically
from gramcert.training.checkpoints import METRICS


class Metrics:
    """One record per epoch in ``metrics.jsonl``, and the same as curves for TensorBoard.

    A run that was killed goes on from its last state: records from after that state are dropped, and come again.

    Args:
        folder: of the run.
        step: that the run goes on from.
        steps: of the whole run; if none is left, nothing is written.
    """

    def __init__(self, folder: Path, step: int, steps: int) -> None:
        self.path = folder / METRICS
        self.records = [record for record in _records(self.path) if record["step"] <= step]
        self._curves: Callable[[str, float, int], None] = _nowhere
        if step < steps:
            self._write()
            self._curves = _tensorboard(folder / "tensorboard", step)

    def add(self, record: dict[str, Any]) -> None:
        """A record with its ``step`` and numbers."""
        self.records.append(record)
        self._write()
        for name, value in record.items():
            if isinstance(value, float):
                self._curves(name, value, record["step"])

    def _write(self) -> None:
        # Whole, each time: there is one line per epoch, and a line that is half written would be one too many.
        write_atomically(self.path, "".join(json.dumps(record) + "\n" for record in self.records).encode())

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close = getattr(self._curves, "close", None)
        if close is not None:
            close()


class _Curves:
    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def __call__(self, name: str, value: float, step: int) -> None:
        self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def _nowhere(name: str, value: float, step: int) -> None:
    pass


def _tensorboard(folder: Path, step: int) -> Callable[[str, float, int], None]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return _nowhere
    # Curves from after the state that the run goes on from are hidden; a record at that very step is kept.
    return _Curves(SummaryWriter(str(folder), purge_step=step + 1))


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
    except (ValueError, RecursionError):
        records = [None]
    if not all(isinstance(record, dict) and type(record.get("step")) is int for record in records):
        raise ValueError(f"{path}: expected the records of a run")
    return sorted(records, key=lambda record: int(record["step"]))
