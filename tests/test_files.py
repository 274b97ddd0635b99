import os

import pytest

from gramcert.files import write_atomically


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_the_old_content_stays_until_the_new_is_complete(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    seen = []
    monkeypatch.setattr(os, "fsync", lambda _: seen.append(path.read_bytes()))
    write_atomically(path, b"new")
    assert seen == [b"old"]
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == {"file"}


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.replace"])
def test_a_write_that_fails_leaves_the_old_content(tmp_path, monkeypatch, step):
    def full(*_):
        raise OSError("No space left on device")

    path = tmp_path / "file"
    write_atomically(path, b"old")
    monkeypatch.setattr(step, full)
    with pytest.raises(OSError, match="No space left on device"):
        write_atomically(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == {"file"}
