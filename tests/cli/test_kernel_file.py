"""What is read from files, what is refused, and that nothing in a file is executed."""

import os
import pickle
import sys

import numpy as np
import pytest
import safetensors.torch
import torch

from gramcert.cli.errors import BadInput
from gramcert.cli.kernel_file import embedded_kernel, read_kernel


class Payload:
    """Creates a file when it is unpickled with the ordinary unpickler."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def hostile_files(folder, marker):
    payload = Payload(marker)
    for protocol in (0, 2, 4):
        path = folder / f"plain{protocol}.pt"
        path.write_bytes(pickle.dumps(payload, protocol=protocol))
        yield path
    for legacy in (False, True):
        path = folder / f"saved{legacy}.pth"
        torch.save({"weight": torch.ones(1, 1, 3), "extra": payload}, path, _use_new_zipfile_serialization=not legacy)
        yield path
    path = folder / "object.npy"
    np.save(path, np.array([payload], dtype=object), allow_pickle=True)
    yield path
    path = folder / "pickled.npy"
    path.write_bytes(pickle.dumps(payload))
    yield path
    path = folder / "pickled.safetensors"
    path.write_bytes(pickle.dumps(payload))
    yield path


def test_hostile_files_are_refused_and_not_executed(refused, tmp_path):
    marker = tmp_path / "executed"
    for path in hostile_files(tmp_path, marker):
        assert path.name in refused("norm", path)
        assert path.name in refused("compare", path)
        assert not marker.exists(), path
    assert "it asks to run" in refused("norm", tmp_path / "savedFalse.pth")
    assert "weights_only" not in refused("norm", tmp_path / "savedFalse.pth")
    pickle.loads((tmp_path / "plain2.pt").read_bytes())
    assert marker.exists()  # the payload does work


def test_damaged_files_are_refused(refused, tmp_path):
    np.save(tmp_path / "whole.npy", np.ones((4, 4, 3, 3)))
    torch.save({"weight": torch.ones(4, 4, 3, 3)}, tmp_path / "whole.pt")
    safetensors.torch.save_file({"weight": torch.ones(4, 4, 3, 3)}, tmp_path / "whole.safetensors")
    for whole in sorted(tmp_path.glob("whole.*")):
        content = whole.read_bytes()
        for length in (0, 1, 7, 60, len(content) // 2, len(content) - 1):
            path = tmp_path / f"cut{length}{whole.suffix}"
            path.write_bytes(content[:length])
            assert path.name in refused("norm", path)
        noise = tmp_path / f"noise{whole.suffix}"
        noise.write_bytes(np.random.default_rng(0).bytes(500))
        assert noise.name in refused("norm", noise)


def test_a_header_that_promises_too_much_is_refused(refused, tmp_path):
    path = tmp_path / "large.npy"
    with path.open("wb") as file:
        header = {"descr": "<f8", "fortran_order": False, "shape": (2**20, 2**20, 3)}
        np.lib.format.write_array_header_1_0(file, header)
    assert "large.npy: cannot be read" in refused("norm", path)


def test_files_that_are_not_there(refused, tmp_path):
    assert "no such file" in refused("norm", tmp_path / "missing.npy")
    assert "no such file" in refused("norm", tmp_path / "kernel.txt")
    (tmp_path / "kernel.txt").write_text("1")
    assert "expected a file ending in .npy" in refused("norm", tmp_path / "kernel.txt")
    (tmp_path / "folder.npy").mkdir()
    assert "a folder, expected a file" in refused("norm", tmp_path / "folder.npy")


def test_one_kernel_in_a_state_dict_is_found(tmp_path):
    layer = torch.nn.Conv2d(2, 3, 3)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    safetensors.torch.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    torch.save({"epoch": 3, "model": {"state": layer.state_dict()}}, tmp_path / "nested.pth")
    torch.save(layer.weight, tmp_path / "tensor.th")
    expected = {"layer.pt": "weight", "layer.safetensors": "weight", "nested.pth": "model.state.weight"}
    for name, key in (expected | {"tensor.th": None}).items():
        stored = read_kernel(tmp_path / name)
        assert stored.key == key
        assert torch.equal(stored.kernel, layer.weight)
        assert not stored.kernel.requires_grad


def test_several_kernels_need_a_key(refused, tmp_path):
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 3, 3), torch.nn.Conv1d(3, 4, 5))
    path = tmp_path / "model.pt"
    torch.save(model.state_dict(), path)
    message = refused("norm", path)
    assert "choose one with --key: 0.weight (3, 2, 3), 1.weight (4, 3, 5)" in message
    assert "no tensor named '2.weight'; it holds 0.weight (3, 2, 3), 0.bias (3,)" in refused(
        "norm", path, "--key", "2.weight"
    )
    assert torch.equal(read_kernel(path, "1.weight").kernel, model[1].weight)
    assert "expected shape" in refused("norm", path, "--key", "0.bias")


def test_files_without_a_kernel(refused, tmp_path):
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "linear.pt")
    assert "no tensor with 3 to 5 dimensions; it holds weight (2, 2), bias (2,)" in refused(
        "norm", tmp_path / "linear.pt"
    )
    torch.save({"epoch": 3}, tmp_path / "epoch.pt")
    assert "expected a tensor or a state dict, got dict without tensors" in refused("norm", tmp_path / "epoch.pt")
    torch.save(torch.eye(3).to_sparse(), tmp_path / "sparse.pt")
    assert "expected a dense tensor" in refused("norm", tmp_path / "sparse.pt")


def test_a_long_list_of_names_is_cut(tmp_path):
    torch.save({f"w{i}": torch.ones(1, 1, 1) for i in range(30)}, tmp_path / "many.pt")
    with pytest.raises(BadInput, match=r"w11 \(1, 1, 1\), and 18 more$"):
        read_kernel(tmp_path / "many.pt")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_lifted_to_float32(tmp_path, dtype):
    kernel = torch.randn(2, 2, 3).to(dtype)
    torch.save(kernel, tmp_path / "half.pt")
    stored = read_kernel(tmp_path / "half.pt")
    assert stored.kernel.dtype == torch.float32
    assert torch.equal(stored.kernel, kernel.float())
    assert str(stored) == f"half.pt: 2×2×3, float32 (stored as {str(dtype).removeprefix('torch.')})"


@pytest.mark.parametrize(
    ("value", "stored_as", "dtype"),
    [
        (2**24, np.int32, torch.float32),
        (255, np.uint8, torch.float32),
        (-(2**24) - 1, np.int64, torch.float64),
        (2**53, np.uint64, torch.float64),
    ],
)
def test_integers_are_lifted_exactly(tmp_path, value, stored_as, dtype):
    np.save(tmp_path / "integers.npy", np.full((1, 1, 2), value, dtype=stored_as))
    kernel = read_kernel(tmp_path / "integers.npy").kernel
    assert kernel.dtype == dtype
    assert int(kernel[0, 0, 0]) == value


def test_types_that_are_no_weights(refused, tmp_path):
    arrays = {
        "large.npy": (np.full((1, 1, 2), 2**53 + 1), "have no exact floating-point value"),
        "complex.npy": (np.ones((1, 1, 2), dtype=complex), "got complex128"),
        "bool.npy": (np.ones((1, 1, 2), dtype=bool), "got bool"),
        "text.npy": (np.array(["kernel"]), "expected real numbers"),
    }
    for name, (array, message) in arrays.items():
        np.save(tmp_path / name, array)
        assert message in refused("norm", tmp_path / name)


def test_byte_order_and_memory_order_do_not_matter(tmp_path):
    array = np.arange(24, dtype=np.float64).reshape(2, 3, 4)
    np.save(tmp_path / "big.npy", array.astype(">f8"))
    np.save(tmp_path / "fortran.npy", np.asfortranarray(array))
    for name in ("big.npy", "fortran.npy"):
        assert torch.equal(read_kernel(tmp_path / name).kernel, torch.from_numpy(array))


def test_safetensors_is_an_extra(refused, tmp_path, monkeypatch):
    (tmp_path / "kernel.safetensors").write_bytes(b"any")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert "pip install 'gramcert[safetensors]'" in refused("norm", tmp_path / "kernel.safetensors")


def test_embedded_kernel():
    stored = embedded_kernel()
    assert stored.kernel.shape == (16, 16, 3, 3)
    assert stored.kernel.dtype == torch.float32
    assert bool(stored.kernel.isfinite().all())
