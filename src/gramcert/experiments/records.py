"""Rows of an experiment on disk: written after each unit of work, so that a run goes on where it stopped."""

import csv
import io
import json
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import gramcert
from gramcert.training.checkpoints import wait_for, write_atomically

Row = dict[str, Any]


class Records:
    """The rows of one experiment in ``FOLDER/NAME.json``, and the same as ``NAME.csv``.

    Args:
        folder: is made if it does not exist.
        name: of the experiment.
        settings: what the rows depend on; a folder with rows of other settings is an error.
    """

    def __init__(self, folder: Path, name: str, settings: Row) -> None:
        self.folder, self.name, self.settings = folder, name, settings
        self.rows: list[Row] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"reproduce(out={folder}): not a folder that can be written ({error.strerror})") from None
        path = self.path(".json")
        if path.exists():
            self.rows = self._read(path)

    def _read(self, path: Path) -> list[Row]:
        try:
            stored = json.loads(path.read_text())
            settings, rows = stored["settings"], stored["rows"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}: expected the rows of {self.name}; move the file away to begin anew") from None
        ours = json.loads(json.dumps(self.settings))
        changed = {name: value for name, value in settings.items() if ours.get(name) != value}
        if changed or settings.keys() != ours.keys():
            what = ", ".join(f"{name}={value}" for name, value in changed.items())
            raise ValueError(f"{path}: holds rows of other settings, {what}; choose another folder")
        return list(rows)

    def path(self, suffix: str) -> Path:
        """A file of this experiment."""
        return self.folder / f"{self.name}{suffix}"

    def has(self, **key: Any) -> bool:
        """Whether a row with these values is there."""
        return any(all(row[name] == value for name, value in key.items()) for row in self.rows)

    def add(self, rows: list[Row], summary: Callable[[list[Row]], Iterable[Row]] | None = None) -> None:
        """Keep rows, and beside them what ``summary`` makes of all.

        Other processes may be adding to the same file: theirs are kept too.
        """
        with (self.folder / f".{self.name}.lock").open("w") as lock:
            wait_for(lock)
            path = self.path(".json")
            self.rows = (self._read(path) if path.exists() else []) + rows
            self._write({} if summary is None else {"summary": list(summary(self.rows))})

    def _write(self, more: Row) -> None:
        versions = {"gramcert": gramcert.__version__, "torch": torch.__version__, "python": platform.python_version()}
        content = {"experiment": self.name, "settings": self.settings, "versions": versions, "rows": self.rows} | more
        write_atomically(self.path(".json"), (json.dumps(content, indent=1) + "\n").encode())
        if self.rows:
            text = io.StringIO()
            writer = csv.DictWriter(text, list(self.rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
            write_atomically(self.path(".csv"), text.getvalue().encode())
