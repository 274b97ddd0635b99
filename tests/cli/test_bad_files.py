"""Whatever file is given, one sentence says what is wrong with it, and the exit code is 2."""

import json
import os

import numpy as np
import pytest
import torch

import gramcert

PNG = b"\x89PNG\r\n\x1a\n" + bytes(200)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
LOOKS = ", which looks like a PNG image"


@pytest.fixture
def bad(tmp_path):
    """A file by its name: ``missing.onnx``, ``folder.npy``, ``junk.pt2``, ``half.pt``, ``png.onnx`` and so on."""

    def make(name):
        kind, ending = name.split(".")
        path = tmp_path / name
        if kind == "folder":
            path.mkdir()
        elif kind == "half":
            whole = tmp_path / f"whole.{ending}"
            if ending == "npy":
                np.save(whole, np.zeros((4, 4, 3, 3)))
            elif ending == "npz":
                np.savez(whole, images=np.zeros((3, 4)), labels=np.zeros(3, int))
            else:
                torch.save({"w": torch.zeros(4, 4, 3, 3)}, whole)
            path.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
        elif kind != "missing":
            path.write_bytes({"empty": b"", "junk": bytes(range(128, 256)) * 9, "png": PNG, "lfs": POINTER}[kind])
        return path

    return make


MODELS = {
    "missing.onnx": "no such file",
    "missing": "no such file",
    "folder.onnx": "folder",
    "empty.onnx": "the file is empty",
    "empty.pt2": "the file is empty",
    "junk.onnx": "expected an ONNX model, got a truncated or other file",
    "junk.pt2": "expected a zip archive, got a truncated or other file",
    "png.onnx": f"expected an ONNX model, got a truncated or other file{LOOKS}",
    "png.pt2": f"expected a zip archive, got a truncated or other file{LOOKS}",
    "half.pt2": "expected a zip archive, got a truncated or other file",
    "lfs.onnx": "which looks like a pointer of Git LFS: the file itself was not fetched",
    "png.png": "expected a file ending in .onnx, .pt2",
}
WEIGHTS = {
    "junk.safetensors": "cannot be read as safetensors",
    "png.safetensors": LOOKS,
    "junk.pt": "torch refused to load it as weights: it is damaged or not weights alone",
    "half.pt": "torch refused to load it as weights: it is damaged or not weights alone",
    "png.pt": LOOKS,
}
KERNELS = {
    "missing.npy": "no such file",
    "missing": "no such file",
    "folder.npy": "a folder, expected a file",
    "empty.npy": "the file is empty",
    "junk.npy": "expected an array of NumPy, got a truncated or other file",
    "png.npy": f"expected an array of NumPy, got a truncated or other file{LOOKS}",
    "half.npy": "cannot be read",
    "png.png": "expected a file ending in .npy",
    **WEIGHTS,
}


@pytest.fixture
def told(refused, bad, tmp_path):
    """The line that a command ends with; ``FILE`` stands for the bad one, and no line blames the shape of the input."""

    def tell(name, *words):
        path = tmp_path / name if name == "missing" else bad(name)
        line = refused(*(path if word == "FILE" else word for word in words))
        assert name in line
        assert "--input-shape" not in line
        return line

    return tell


@pytest.mark.parametrize("name", [*MODELS, *WEIGHTS])
def test_audit(told, name):
    assert (MODELS | WEIGHTS)[name] in told(name, "audit", "FILE", "--no-cache")


@pytest.mark.parametrize("name", [*MODELS, *WEIGHTS])
def test_verify(told, name, tmp_path):
    certificate = tmp_path / "certificate.json"
    certificate.write_text(json.dumps(gramcert.audit(torch.nn.Linear(3, 2), (3,), search_seconds=0).certificate))
    assert (MODELS | WEIGHTS)[name] in told(name, "verify", certificate, "FILE")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing.json", "no such file"),
        ("folder.json", "not a regular file"),
        ("empty.json", "cannot be read as JSON"),
        ("junk.json", "cannot be read as JSON (it is not text)"),
        ("missing.npz", "no such file"),
        ("junk.npz", "expected a certificate of radii, got a truncated or other file"),
        ("half.npz", "expected a certificate of radii, got a truncated or other file"),
        ("png.npz", LOOKS),
    ],
)
def test_certificates(told, exported, name, reason):
    assert reason in told(name, "verify", "FILE", exported[0])


@pytest.mark.parametrize("command", ["norm", "spectrum", "compare"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(told, command, name):
    assert KERNELS[name] in told(name, command, "FILE", "--input-size", 8)


@pytest.mark.parametrize("command", ["certify", "attack"])
@pytest.mark.parametrize("name", MODELS)
def test_classifiers(told, exported, command, name):
    """With inputs and without."""
    if command == "attack":
        pytest.importorskip("foolbox")
    assert MODELS[name] in told(name, command, "FILE", "--data", exported[1])


@pytest.mark.parametrize("name", ["missing.onnx", "empty.onnx", "junk.pt2", "png.png"])
def test_a_bad_model_is_blamed_before_inputs_are_asked_for(told, name):
    assert MODELS[name] in told(name, "certify", "FILE")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing.npz", "no such file"),
        ("folder.npz", "directory"),
        ("junk.npz", "cannot be read as .npz"),
        ("png.npz", LOOKS),
    ],
)
def test_inputs(told, exported, name, reason):
    assert reason in told(name, "certify", exported[0], "--data", "FILE")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing.json", "cannot be read (No such file or directory)"),
        ("empty.json", "Invalid JSON"),
        ("junk.json", "cannot be read as JSON (it is not text)"),
    ],
)
def test_configurations(told, name, reason, tmp_path):
    assert reason in told(name, "train", "FILE", "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing.tar", "or its archive, as a file or inside; there is nothing of that name"),
        ("junk.tar", "cannot be read as an archive ("),
        ("folder.tar", "expected the folder cifar-10-batches-py"),
    ],
)
def test_images(told, name, reason, tmp_path):
    assert reason in told(name, "train", "nano", "--data", "FILE", "--out", tmp_path / "out")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["junk.onnx", "junk.pt2", "junk.pt", "junk.safetensors"])
def test_a_file_that_may_not_be_read(refused, bad, name):
    (path := bad(name)).chmod(0)
    assert "ermission denied" in refused("audit", path, "--no-cache")


@pytest.mark.parametrize("name", ["junk.pt2", "junk.npy"])
def test_a_file_that_the_system_does_not_open(refused, bad, monkeypatch, name):
    """Also for root, who may read everything."""
    path = bad(name)

    def denied(self, *rest, **more):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.open", denied)
    line = refused("audit" if name.endswith("pt2") else "norm", path)
    assert name in line
    assert "Permission denied" in line
