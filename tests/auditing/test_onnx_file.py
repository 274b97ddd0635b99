import math
import os
import random
import sys

import pytest
import torch

from gramcert.auditing import onnx_file
from gramcert.auditing.onnx_file import NEWEST_OPSET, read_onnx
from gramcert.operators.graph import BadModel

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402


def proto(nodes=None, tensors=(), inputs=(("x", [1, "n", 3]),), outputs=("y",), opset=21):
    nodes = [helper.make_node("Relu", ["x"], ["y"], name="act")] if nodes is None else nodes
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "g", given, results, list(tensors))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def weight(dims=(2,), data_type=TensorProto.FLOAT, raw=None, name="w", **fields):
    made = TensorProto(name=name, data_type=data_type, dims=dims, **fields)
    if raw is not None:
        made.raw_data = raw
    return made


def external(dims=(2,), **entries):
    made = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        made.external_data.add(key=key, value=str(value))
    return made


@pytest.fixture
def read(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()

    def read(content):
        path = folder / "m.onnx"
        path.write_bytes(content if isinstance(content, bytes) else content.SerializeToString())
        return read_onnx(path)

    read.folder = folder
    return read


def test_a_model_is_read_as_it_is(read):
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="c", pads=[1, 2], auto_pad="NOTSET", domain="ai.onnx")
    node.attribute.append(helper.make_attribute("scale", 0.1))
    value = numpy_helper.from_array(torch.arange(3).numpy())
    other = helper.make_node("Constant", [], ["z"], value=value)
    kernel = weight((2,), raw=torch.tensor([1.5, -2]).numpy().tobytes())
    model = read(proto([node, other], [kernel], [("x", [1, "n", 3]), ("w", [2])], ("y", "z")))
    assert model.inputs == {"x": (1, None, 3)}
    assert model.types == {"x": torch.float32}
    assert (model.outputs, model.opset) == (("y", "z"), 21)
    assert torch.equal(model.tensors["w"], torch.tensor([1.5, -2]))
    first, second = model.nodes
    assert (first.name, first.op_type, first.domain, first.inputs, first.outputs) == (
        "c",
        "Conv",
        "",
        ("x", "w"),
        ("y",),
    )
    assert first.attributes == {"pads": [1, 2], "auto_pad": "NOTSET", "scale": float(torch.tensor(0.1))}
    assert torch.equal(second.attributes["value"], torch.arange(3))
    assert not first.has_subgraph


NUMBERS = {
    torch.float16: (TensorProto.FLOAT16, [1.5, -2.0]),
    torch.bfloat16: (TensorProto.BFLOAT16, [1.5, -2.0]),
    torch.float32: (TensorProto.FLOAT, [1.5, math.inf]),
    torch.float64: (TensorProto.DOUBLE, [0.1, -2.0]),
    torch.int8: (TensorProto.INT8, [-128, 127]),
    torch.int16: (TensorProto.INT16, [-(2**15), 1]),
    torch.int32: (TensorProto.INT32, [-(2**31), 1]),
    torch.int64: (TensorProto.INT64, [-(2**63), 1]),
    torch.uint8: (TensorProto.UINT8, [0, 255]),
    torch.uint16: (TensorProto.UINT16, [0, 2**16 - 1]),
    torch.uint32: (TensorProto.UINT32, [0, 2**32 - 1]),
    torch.uint64: (TensorProto.UINT64, [0, 2**64 - 1]),
    torch.bool: (TensorProto.BOOL, [False, True]),
}


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_numbers_of_all_types_listed_and_raw(dtype, read):
    code, values = NUMBERS[dtype]
    expected = torch.tensor(values, dtype=dtype)
    for raw in (False, True):
        content = expected.view(torch.uint8).numpy().tobytes() if raw else values
        found = read(proto(tensors=[helper.make_tensor("w", code, [2, 1], content, raw=raw)])).tensors["w"]
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), expected.reshape(2, 1).view(torch.uint8))


def test_numbers_in_another_file_inside_of_the_folder(read):
    (read.folder / "data").mkdir()
    (read.folder / "data" / "w.bin").write_bytes(b"head" + torch.tensor([1.0, 2.0]).numpy().tobytes() + b"tail")
    os.symlink("data/w.bin", read.folder / "link.bin")
    for location in ("data/w.bin", "./data/w.bin", "link.bin"):
        found = read(proto(tensors=[external(location=location, offset=4, length=8)])).tensors["w"]
        assert found.tolist() == [1, 2]
    assert read(proto(tensors=[external(location="data/w.bin", offset=4)])).tensors["w"].tolist() == [1, 2]


OUTSIDE = "outside of the model's folder"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"location": "../secret.bin"}, OUTSIDE),
        ({"location": "data/../../secret.bin"}, OUTSIDE),
        ({"location": "/etc/passwd"}, OUTSIDE),
        ({"location": "C:\\secret.bin"}, OUTSIDE),
        ({"location": "away/secret.bin"}, OUTSIDE),
        ({"location": "secret.link"}, OUTSIDE),
        ({"location": "loop.link"}, "not there|cannot be read"),
        ({"location": "a\0b"}, OUTSIDE),
        ({"location": "none.bin"}, "not there"),
        ({"location": "pipe"}, "regular file"),
        ({"location": "folder"}, "regular file|cannot be opened"),
        ({"location": ""}, "does not say where"),
        ({}, "does not say where"),
        ({"location": "w.bin", "length": 4}, "needs 8 bytes for its shape, got 4"),
        ({"location": "w.bin", "length": -8}, "the length"),
        ({"location": "w.bin", "offset": -8}, "the offset"),
        ({"location": "w.bin", "offset": "1e3"}, "the offset"),
        ({"location": "w.bin", "offset": 9}, "which has 16"),
        ({"location": "w.bin", "offset": 2**62}, "which has 16"),
    ],
)
def test_other_files_are_only_read_inside_of_the_folder(entries, message, read):
    (read.folder.parent / "secret.bin").write_bytes(bytes(8))
    (read.folder / "w.bin").write_bytes(bytes(16))
    (read.folder / "folder").mkdir()
    os.symlink(read.folder.parent, read.folder / "away")
    os.symlink("../secret.bin", read.folder / "secret.link")
    os.symlink("loop.link", read.folder / "loop.link")
    os.mkfifo(read.folder / "pipe")
    with pytest.raises(BadModel, match=message):
        read(proto(tensors=[external(**entries)]))


def test_a_location_twice_is_refused(read):
    (read.folder / "w.bin").write_bytes(bytes(16))
    tensor = external(location="w.bin")
    tensor.external_data.add(key="location", value="../secret.bin")
    with pytest.raises(BadModel, match="does not say where"):
        read(proto(tensors=[tensor]))


def test_the_bytes_of_other_files_are_limited_together(read, monkeypatch):
    monkeypatch.setattr(onnx_file, "MOST_EXTERNAL", 15)
    (read.folder / "w.bin").write_bytes(bytes(16))
    second = external(location="w.bin")
    second.name = "v"
    with pytest.raises(BadModel, match="at most 15 bytes in other files"):
        read(proto(tensors=[external(location="w.bin"), second]))


HUGE = 2**60


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (weight((HUGE,), raw=bytes(4)), "needs .* bytes for its shape, got 4"),
        (weight((2**40, 2**40), raw=bytes(4)), "needs .* bytes for its shape, got 4"),
        (weight((HUGE,), float_data=[1.0]), "needs .* numbers for its shape, got 1"),
        (weight((HUGE,)), "needs .* bytes for its shape, got 0"),
        (external((HUGE,), location="m.onnx"), "at most"),
        (weight((-1,), raw=bytes(4)), "has the shape"),
        (weight((1,) * 65, raw=bytes(4)), "has the shape"),
        (weight((0, 2**62, 2**62)), "has the shape"),
        (weight((2,), raw=bytes(7)), "needs 8 bytes for its shape, got 7"),
        (weight((1,), raw=bytes(4), float_data=[1.0]), "more than one place"),
        (weight((1,), int32_data=[1]), "in the wrong one"),
        (weight((1,), TensorProto.INT8, int32_data=[200]), "do not fit its type"),
        (weight((1,), TensorProto.FLOAT16, int32_data=[-1]), "do not fit its type"),
        (weight((1,), TensorProto.BOOL, raw=b"\x02"), "do not fit its type"),
        (weight((1,), TensorProto.STRING, string_data=[b"a"]), "type 8"),
        (weight((2,), TensorProto.INT4, raw=b"a"), "type 22"),
        (weight((1,), TensorProto.FLOAT8E5M2, raw=b"a"), "type 19"),
        (weight((1,), 999, raw=b"a"), "type 999"),
        (weight((1,), raw=bytes(4), segment=TensorProto.Segment(begin=0, end=1)), "segment"),
        (weight((1,), raw=bytes(4), name=""), "without a name"),
    ],
)
def test_tensors_that_are_not_what_they_say(tensor, message, read):
    with pytest.raises(BadModel, match=message):
        read(proto(tensors=[tensor]))


def node(inputs, outputs, op="Add", **attributes):
    return helper.make_node(op, inputs, outputs, name=f"make {' '.join(outputs)}", **attributes)


def changed(change, **arguments):
    made = proto(**arguments)
    change(made)
    return made


def twice(made):
    made.graph.node[0].attribute.extend([helper.make_attribute("a", 1), helper.make_attribute("a", 2)])


def function(made):
    made.functions.add(name="Relu", domain="")


def reference(made):
    made.graph.node[0].attribute.add(name="a", ref_attr_name="b", type=1)


def sequence(made):
    made.graph.input[0].type.sequence_type.elem_type.tensor_type.elem_type = 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (proto([node(["x", "z"], ["y"]), node(["y", "x"], ["z"])]), "“make y” uses “z”, which is not made before it"),
        (proto([node(["x", "y"], ["y"])]), "which is not made before it"),
        (proto([node(["x", "x"], ["y"]), node(["x", "x"], ["y"])]), "“y” made again"),
        (proto([node(["x", "x"], ["x"])]), "“x” made again"),
        (proto(tensors=[weight((0,)), weight((0,))]), "“w” twice"),
        (proto(inputs=[("x", [1]), ("x", [1])]), "names that differ"),
        (proto(outputs=["z"]), "“z” is never made"),
        (proto(outputs=["y", "y"]), "names that differ"),
        (proto(outputs=[]), "names that differ"),
        (proto(opset=6), "version 7 to"),
        (proto(opset=NEWEST_OPSET + 1), "version 7 to"),
        (changed(lambda made: made.opset_import.pop()), "got none"),
        (changed(lambda made: made.opset_import.add(domain="ai.onnx", version=9)), r"\[9, 21\]"),
        (changed(lambda made: made.ClearField("graph")), "without a graph"),
        (changed(lambda made: made.graph.sparse_initializer.add()), "sparse"),
        (changed(lambda made: made.graph.quantization_annotation.add(tensor_name="x")), "quantised"),
        (changed(twice), "twice"),
        (changed(function), "meaning of its own"),
        (changed(reference), "refers to that of a function"),
        (changed(sequence), "expected a tensor as the input “x”, got sequence_type"),
        (changed(lambda made: made.graph.input[0].type.tensor_type.ClearField("shape")), "expected a shape"),
        (changed(lambda made: setattr(made.graph.input[0].type.tensor_type, "elem_type", 8)), "unknown type 8"),
        (changed(lambda made: made.graph.node[0].attribute.add(name="a", type=11)), "unknown kind 11"),
        (b"", "without a graph"),
        (b"\x80\x04}q\x00.", "truncated or other file|without a graph"),
    ],
)
def test_models_that_are_refused(model, message, read):
    with pytest.raises(BadModel, match=message) as error:
        read(model)
    assert "m.onnx: " in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_node_with_a_subgraph_says_so(read):
    branch = helper.make_graph([], "b", [], [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)])
    choose = helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)
    assert read(proto([choose])).nodes[0].has_subgraph


def test_overloads_are_operators_of_others(read):
    assert read(changed(lambda made: setattr(made.graph.node[0], "overload", "mine"))).nodes[0].domain == "mine"


def test_names_that_move_the_cursor_are_not_repeated(read):
    with pytest.raises(BadModel, match="uses") as error:
        read(proto([node(["\x1b[31m\n" + "a" * 999], ["y"])]))
    assert "\x1b" not in str(error.value)
    assert len(str(error.value)) < 1000


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("pipe", "regular file"),
        ("none", "cannot be opened"),
        (".", "regular file|cannot be opened"),
    ):
        with pytest.raises(BadModel, match=message):
            read_onnx(tmp_path / name)


def test_files_that_are_too_large(tmp_path):
    path = tmp_path / "large.onnx"
    with path.open("wb") as stream:
        stream.truncate(onnx_file.LARGEST_FILE + 1)  # no bytes on the disk
    with pytest.raises(BadModel, match="expected at most"):
        read_onnx(path)


def test_without_the_package(read, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(BadModel, match=r"reading ONNX needs the extra: pip install 'gramcert\[onnx\]'"):
        read(proto())


def test_damaged_files_end_in_one_sentence(read):
    """Cut at every byte, and with bytes changed: either a model, or a BadModel."""
    conv = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1], kernel_shape=[3])
    good = proto([conv], [weight((1, 3, 3), raw=bytes(36))]).SerializeToString()
    generator = random.Random(0)
    damaged = [good[:end] for end in range(len(good))]
    for _ in range(500):
        content = bytearray(good)
        for _ in range(generator.randint(1, 3)):
            content[generator.randrange(len(content))] = generator.randrange(256)
        damaged.append(bytes(content))
    assert sum(_is_refused(read, content) for content in damaged) > len(good) // 2


def _is_refused(read, content):
    try:
        read(content)
    except BadModel as error:
        return len(str(error).splitlines()) == 1
    return False
