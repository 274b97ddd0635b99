import os
import threading

import numpy as np
import pytest
import torch

from gramcert.files import BadFile, looks_like, read_npy, read_npz, read_torch, write_atomically


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


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes of a Unix system")
def test_what_is_no_regular_file_is_written_to_and_not_replaced(tmp_path):
    pipe, seen = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: seen.append(pipe.read_bytes()))
    reader.start()
    write_atomically(pipe, b"new")
    reader.join()
    assert seen == [b"new"]
    assert pipe.is_fifo()
    assert names(tmp_path) == {"pipe"}


def saved(tmp_path, name):
    """The first bytes of a file that a library wrote."""
    path = tmp_path / name
    if name.endswith(".npy"):
        np.save(path, np.zeros(3))
    elif name.endswith(".npz"):
        np.savez(path, a=np.zeros(3))
    elif name.endswith(".safetensors"):
        pytest.importorskip("safetensors.torch").save_file({"a": torch.zeros(3)}, path)
    elif name.endswith(".onnx"):
        helper = pytest.importorskip("onnx").helper
        model = helper.make_model(helper.make_graph([], "g", [], []), producer_name="somebody")
        path.write_bytes(model.SerializeToString())
    else:
        torch.save(torch.zeros(3), path)
    return path.read_bytes()[:64]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.npy", "an array of NumPy (.npy)"),
        ("a.npz", "a zip archive, as .pt2, .npz and torch.save have it"),
        ("a.pt", "a zip archive, as .pt2, .npz and torch.save have it"),
        ("a.safetensors", "safetensors"),
        ("a.onnx", "ONNX"),
    ],
)
def test_files_are_known_by_their_first_bytes(tmp_path, name, kind):
    assert looks_like(saved(tmp_path, name)) == f", which looks like {kind}"


@pytest.mark.parametrize(
    ("read", "start"),
    [
        (read_npy, "expected an array of NumPy, got a truncated or other file"),
        (read_npz, r"cannot be read as .npz \(File is not a zip file\)"),
        (read_torch, "torch refused to load it as weights: it is damaged or not weights alone"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path, read, start):
    path = tmp_path / "file"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    with pytest.raises(BadFile, match=f"^{start}, which looks like a PNG image$"):
        read(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(BadFile, match=f"^{start}, which looks like a pointer of Git LFS: the file itself was not"):
        read(path)
    path.write_bytes(b"?" * 100)
    with pytest.raises(BadFile, match=f"^{start}$"):
        read(path)
