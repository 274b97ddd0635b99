"""Rows of an experiment on disk: written after each unit of work, so that a run goes on where it stopped."""

import csv
import io
import json
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import gramcert
from gramcert.files import open_lock, remove_unfinished, wait_for, write_atomically

Row = dict[str, Any]


class Records:
    """The rows of one experiment in ``FOLDER/NAME.json``, and the same as ``NAME.csv``.

    Args:
        folder: is made if it does not exist.
        name: of the experiment.
        settings: what the rows depend on; a folder with rows of other settings is an error.
        columns: what every row has.
        key: the columns that tell rows apart; of two with the same there, the first stays.
    """

    def __init__(self, folder: Path, name: str, settings: Row, columns: tuple[str, ...], key: tuple[str, ...]) -> None:
        self.folder, self.name, self.settings, self.columns, self.key = folder, name, settings, columns, key
        self.rows: list[Row] = []
        self.data: str | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._read()
                if self.rows:
                    self._write_table()  # which a process killed between the two files has left behind
        except OSError as error:
            raise ValueError(f"reproduce(out={folder}): not a folder that can be written ({error.strerror})") from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open_lock(self.folder / f".{self.name}.lock") as lock:
            wait_for(lock)
            remove_unfinished(self.folder, f"{self.name}.json", f"{self.name}.csv")
            yield

    def _read(self) -> None:
        """What is on disk, if anything, in place of what is here."""
        path = self.path(".json")
        if not path.exists():
            return
        try:
            stored = json.loads(path.read_text())
            settings, rows, data = dict(stored["settings"]), list(stored["rows"]), stored.get("data")
            fine = all(isinstance(row, dict) and row.keys() == set(self.columns) for row in rows)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            fine = False
        if not fine:
            raise ValueError(f"{path}: expected the rows of {self.name}; move the file away to begin anew")
        ours = json.loads(json.dumps(self.settings))
        changed = {name: value for name, value in settings.items() if ours.get(name) != value}
        if changed or settings.keys() != ours.keys():
            what = ", ".join(f"{name}={value}" for name, value in changed.items())
            raise ValueError(f"{path}: holds rows of other settings, {what}; choose another folder")
        if self.data not in (None, data):
            raise ValueError(f"{path}: holds rows of other images; choose another folder")
        self.rows, self.data = rows, data

    def require_data(self, digest: str) -> None:
        """Refuse to put rows of these images beside rows of others."""
        if self.rows and self.data != digest:
            raise ValueError(f"{self.path('.json')}: holds rows of other images; choose another folder")
        self.data = digest

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
        with self._locked():
            self._read()
            self.rows += [row for row in rows if not self.has(**{name: row[name] for name in self.key})]
            self._write({} if summary is None else {"summary": list(summary(self.rows))})

    def _write(self, more: Row) -> None:
        versions = {"gramcert": gramcert.__version__, "torch": torch.__version__, "python": platform.python_version()}
        content = {"experiment": self.name, "settings": self.settings, "versions": versions, "rows": self.rows} | more
        if self.data is not None:
            content["data"] = self.data
        write_atomically(self.path(".json"), (json.dumps(content, indent=1) + "\n").encode())
        self._write_table()

    def _write_table(self) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomically(self.path(".csv"), text.getvalue().encode())
