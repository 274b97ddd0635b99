"""Thousands of damaged files: one clear error or an answer, nothing executed, bounded memory and work."""

import io
import json
import os
import random
import resource
import time
import warnings
import zipfile

import pytest
import torch
from torch import nn

import gramcert
from auditing_networks import residual_network
from gramcert.auditing.verifying import BadCertificate

SHAPE = (3, 8, 8)
MOST_BYTES, MOST_SECONDS = 2**31, 600.0

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporters


class Payload:
    """A pickle that would leave a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Good files of every kind, small."""
    folder = tmp_path_factory.mktemp("seeds")
    model, example = residual_network(), torch.zeros(1, *SHAPE)
    torch.export.save(torch.export.export(model, (example,)), folder / "model.pt2")
    program = torch.onnx.export(model, (example,), dynamo=True, verbose=False)
    program.save(folder / "model.onnx", external_data=False)
    program.save(folder / "external.onnx", external_data=True)
    layers = nn.Sequential(nn.Conv2d(3, 2, 4, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 4, 2, 1), nn.ReLU(), nn.Flatten())
    layers.extend([nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)])
    torch.save(layers.state_dict(), folder / "weights.pth")
    from safetensors.torch import save_file

    save_file(layers.state_dict(), folder / "weights.safetensors")
    return folder


def flipped(data, rng):
    data = bytearray(data)
    for _ in range(rng.choice([1, 2, 8, 64])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def truncated(data, rng):
    return data[: rng.randrange(1, len(data))]


def overwritten(data, rng):
    start, length = rng.randrange(len(data)), rng.choice([1, 4, 8, 100])
    value = rng.choice([b"\x00", b"\xff", b"\x7f", bytes([rng.randrange(256)])])
    return data[:start] + value * min(length, len(data) - start) + data[start + length :]


def spliced(data, rng):
    first, second = sorted((rng.randrange(len(data)), rng.randrange(len(data))))
    at = rng.randrange(len(data))
    return data[:at] + data[first : min(second, first + 5000)] + data[at:]


def changed_numbers(data, rng):
    """In the JSON of an archive, numbers and texts that no exporter writes."""
    archive, result = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    names = [name for name in archive.namelist() if name.endswith(".json")]
    chosen = rng.choice(names)
    with zipfile.ZipFile(result, "w", zipfile.ZIP_STORED) as written:
        for info in archive.infolist():
            content = archive.read(info)
            if info.filename == chosen:
                text = content.decode()
                for _ in range(rng.choice([1, 3])):
                    digits = [i for i, character in enumerate(text) if character.isdigit()]
                    if digits:
                        at = rng.choice(digits)
                        bad = rng.choice(["-1", "999999999999", "1e400", "null", '"x"', "[]", "{}", "0", "NaN", "2.5"])
                        text = text[:at] + bad + text[at + 1 :]
                content = text.encode()
            written.writestr(info.filename, content)
    return result.getvalue()


def changed_graph(data, rng):
    """Nodes and tensors of an ONNX model with other names, shapes, attributes, or a place in the order."""
    import onnx

    model = onnx.load_from_string(data)
    graph = model.graph
    for _ in range(rng.choice([1, 2, 4])):
        kind = rng.randrange(7)
        node = rng.choice(graph.node)
        if kind == 0 and graph.initializer:
            rng.choice(graph.initializer).dims[:] = [
                rng.choice([-1, 0, 3, 2**31, 2**62]) for _ in range(rng.randrange(5))
            ]
        elif kind == 1 and node.input:
            node.input[rng.randrange(len(node.input))] = rng.choice(rng.choice(graph.node).output)
        elif kind == 2:
            node.op_type = rng.choice(
                ["Conv", "Reshape", "Expand", "Tile", "Loop", "Pad", "Resize", "Gather", "Nonsense"]
            )
        elif kind == 3 and node.attribute:
            attribute = rng.choice(node.attribute)
            attribute.i = rng.choice([-1, 0, 2**40])
            attribute.ints[:] = [rng.choice([-(2**40), 0, 1, 2**31]) for _ in range(rng.randrange(6))]
        elif kind == 4:
            del graph.node[rng.randrange(len(graph.node))]
        elif kind == 5 and graph.initializer:
            tensor = rng.choice(graph.initializer)
            tensor.raw_data = rng.choice([b"", b"\xff" * 7, tensor.raw_data * 3, b"\x00\x00\x80\x7f"])
        elif kind == 6 and graph.initializer:
            tensor = rng.choice(graph.initializer)
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.external_data.add(
                key="location", value=rng.choice(["../../etc/passwd", "/dev/zero", "x", "\0", "."])
            )
            tensor.external_data.add(key="length", value=rng.choice(["-1", "99999999999999", "abc", "4"]))
        if not graph.node:
            break
    return model.SerializeToString()


def mutations(name):
    general = [flipped, truncated, overwritten, spliced]
    if name.endswith(".pt2"):
        return [*general, changed_numbers, changed_numbers]
    return [*general, changed_graph, changed_graph] if name.endswith(".onnx") else general


OPTIONS = {"weights.pth": {"architecture": "kw-small"}, "weights.safetensors": {"architecture": "kw-small"}}


def survive(folder, name, count, seed):
    """Audit that many damaged copies; returns how many were refused."""
    rng = random.Random(seed)
    original = (folder / name).read_bytes()
    target = folder / f"damaged-{name}"
    refused = 0
    for number in range(count):
        target.write_bytes(rng.choice(mutations(name))(original, rng))
        start = time.process_time()  # what other processes do is not counted
        try:
            gramcert.audit(target, SHAPE, tol=0.5, max_seconds=5, **OPTIONS.get(name, {}))
        except ValueError as error:
            refused += bool(str(error).strip())
        except BaseException as error:
            raise AssertionError(f"{name}, seed {seed}, number {number}: {error!r}") from error
        assert time.process_time() - start < MOST_SECONDS, (name, seed, number)
    return refused


NAMES = ["model.pt2", "model.onnx", "external.onnx", "weights.pth", "weights.safetensors"]


@pytest.mark.parametrize("name", NAMES)
def test_damaged_files_end_in_one_error_or_an_answer(seeds, name):
    assert survive(seeds, name, 15, 1) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_thousands_of_damaged_files_end_in_one_error_or_an_answer(seeds, name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert survive(seeds, name, 500, int(time.time())) > 100  # five kinds of files: 2,500 in all
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < MOST_BYTES


def test_names_that_are_no_text_are_refused(seeds):
    data = (seeds / "model.onnx").read_bytes()
    assert data.count(b"Conv") > 0
    (seeds / "bytes.onnx").write_bytes(data.replace(b"\x22\x04Conv", b"\x22\x04\xffonv"))
    with pytest.raises(ValueError, match=r"bytes\.onnx"):
        gramcert.audit(seeds / "bytes.onnx", SHAPE)


@pytest.mark.parametrize("name", ["model.pt2", "model.onnx", "model.pth", "model.safetensors"])
def test_pickles_are_never_run(tmp_path, name):
    mark = tmp_path / "mark"
    for payload in (Payload(mark), {"weight": Payload(mark)}, [Payload(mark)]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save(payload, tmp_path / name)
        with pytest.raises(ValueError, match=name):
            gramcert.audit(tmp_path / name, (3,), **({"architecture": "2c2f"} if name.endswith("th") else {}))
        assert not mark.exists()


def test_a_certificate_may_be_damaged_too(seeds):
    model = residual_network()
    text = json.dumps(gramcert.audit(model, SHAPE).certificate).encode()
    rng = random.Random(3)
    for number in range(40):
        path = seeds / "damaged.json"
        path.write_bytes(rng.choice([flipped, truncated, overwritten, spliced])(text, rng))
        try:
            found = gramcert.verify(path, model)
        except BadCertificate:  # no JSON any more
            continue
        assert not found.holds, number
