import io
import json
import math
import operator
import os
import pickle
import random
import zipfile

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gramcert.auditing.archive import LARGEST_JSON, read_archive
from gramcert.auditing.program import Call, Program, Ref
from gramcert.operators.graph import BadModel

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:No complete tensor found:UserWarning"),
]

MODEL, INPUTS = "models/model.json", "data/sample_inputs/model.pt"
WEIGHTS, CONSTANTS = "data/weights/model_weights_config.json", "data/constants/model_constants_config.json"


class Usual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding="same", bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.pool(self.stem(x)).flatten(1))


class Residual(nn.Module):
    """One convolution used twice, and two parameters in one storage, one of them transposed."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.alias = self.conv
        flat = torch.arange(20.0)
        self.shift, self.mix = nn.Parameter(flat[2:5]), nn.Parameter(flat[6:15].view(3, 3).t())

    def forward(self, x):
        y = x + self.alias(torch.relu(self.conv(x))) + self.shift.view(3, 1, 1)
        return torch.einsum("ij,bjhw->bihw", self.mix, y)


class Buffers(nn.Module):
    """Buffers of every sort and type, constants, results in lists and tuples, numbers that JSON does not have."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.bfloat16))
        self.register_buffer("mask", torch.tensor([True, False, True, True]), persistent=False)
        self.register_buffer("empty", torch.zeros(0, 3, dtype=torch.float16))
        self.plain = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)

    def forward(self, x, flag=True):
        self.steps.add_(1)
        x = torch.where(self.mask, x * self.scale, -math.inf).clamp(max=math.inf).to(torch.float64) + self.plain
        first, second = x.split(2, 1)
        values, _ = torch.max(torch.cat([second, first, self.empty.new_zeros(len(x), 1)], 1), 1)
        return values if flag else x, None, 3, x


class Windows(nn.Module):
    def forward(self, x):
        return F.max_pool2d(x.view(x.shape[0], 1, -1, 4), 2).flatten(1)


class NoGrad(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            y = x * 2
        return x + y


def images():
    return (torch.randn(4, 3, 6, 6),)


def exported(module, inputs, **options):
    return torch.export.export(module.eval(), inputs, **options)


def saved(program, folder, **options):
    path = folder / "model.pt2"
    torch.export.save(program, path, **options)
    return path


def expected_calls(program):
    """The same from the graph in memory, by other means."""
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        names = [argument.name for argument in node.target._schema.arguments]
        arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
        value = node.meta.get("val")
        if isinstance(value, tuple | list):
            items = {user.args[1]: user.name for user in node.users}
            outputs = tuple(items.get(i, f"{node.name}_unused_{i}") for i in range(len(value)))
        else:
            outputs = () if value is None else (node.name,)
        path = list(node.meta["nn_module_stack"].values())[-1][0]
        label = path if path and "hook" not in path else node.name
        yield Call(str(node.target), {key: plain(item) for key, item in arguments.items()}, outputs, label)


def plain(value):
    if isinstance(value, torch.fx.Node):
        return Ref(value.name)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return (
        str(value).removeprefix("torch.")
        if isinstance(value, torch.device | torch.layout | torch.memory_format)
        else value
    )


def require_same(read, program):
    assert read.calls == list(expected_calls(program))
    signature = program.graph_signature
    sources = signature.inputs_to_parameters | signature.inputs_to_buffers
    sources |= signature.inputs_to_lifted_tensor_constants
    assert read.tensors.keys() == sources.keys()
    for name, source in sources.items():
        expected = program.state_dict[source] if source in program.state_dict else program.constants[source]
        assert (read.tensors[name].dtype, read.tensors[name].stride()) == (expected.dtype, expected.stride())
        assert torch.equal(read.tensors[name], expected.detach())
    assert read.outputs == tuple(name for name in signature.user_outputs if isinstance(name, str))
    assert read.changed == tuple(signature.buffers_to_mutate.values())
    assert list(read.inputs) == [name for name in signature.user_inputs if isinstance(name, str) and name != "flag"]


@pytest.mark.parametrize(
    ("module", "inputs"),
    [(Usual, images()), (Residual, images()), (Buffers, (torch.randn(2, 4),))],
    ids=["usual", "residual", "buffers"],
)
@pytest.mark.parametrize("decomposed", [False, True], ids=["as exported", "decomposed"])
def test_reads_what_is_in_memory(module, inputs, decomposed, tmp_path):
    program = exported(module(), inputs, **({"strict": True} if module is Usual else {}))
    program = program.run_decompositions() if decomposed else program
    read = read_archive(saved(program, tmp_path, extra_files={"note.txt": "a note"}))
    require_same(read, program)
    assert all(read.inputs[name] == tuple(inputs[0].shape) for name in read.inputs)
    assert read.changed == (("steps",) if decomposed and module is Buffers else ())


def test_sizes_that_are_open_have_no_number(tmp_path):
    batch = torch.export.Dim("batch", min=2, max=64)
    program = exported(Windows(), (torch.randn(4, 4, 4),), dynamic_shapes={"x": {0: batch}})
    read = read_archive(saved(program, tmp_path))
    require_same(read, program)
    assert read.inputs == {"x": (None, 4, 4)}
    [view] = [call for call in read.calls if call.target == "aten.view.default"]
    assert isinstance(view.arguments["size"][0], Ref)


def test_shared_storages_stay_shared(tmp_path):
    read = read_archive(saved(exported(Residual(), images()), tmp_path))
    shift, mix = read.tensors["p_shift"], read.tensors["p_mix"]
    assert shift.untyped_storage().data_ptr() == mix.untyped_storage().data_ptr()
    assert (shift.storage_offset(), mix.storage_offset()) == (2, 6)


def test_graphs_inside_of_graphs_are_kept_as_calls_that_nobody_knows(tmp_path):
    read = read_archive(saved(exported(NoGrad(), images()), tmp_path))
    target, arguments = read.calls[0].target, read.calls[0].arguments
    assert target == "higher_order.wrap_with_set_grad_enabled"
    assert arguments == {"0": False, "1": "<as_graph>", "2": Ref("x")}


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """An archive that is read without complaint, to be spoilt."""
    folder = tmp_path_factory.mktemp("archive")
    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=2, max=64)
    path = saved(exported(Usual(), images(), dynamic_shapes={"x": {0: batch}}), folder)
    assert len(read_archive(path).calls) == 6
    return path


def rewritten(source, folder, changes, tamper=lambda archive: None, **options):
    """The archive with members replaced (or added, or left out: ``None``), and its directory tampered with."""
    with zipfile.ZipFile(source) as archive:
        members = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    target = folder / "spoilt.pt2"
    with zipfile.ZipFile(target, "w", **options) as archive:
        for name, content in (members | changes).items():
            if content is not None:
                archive.writestr(name if name.startswith(("..", "/")) else f"model/{name}", content)
        tamper(archive)
    return target


def with_json(source, folder, member, change):
    with zipfile.ZipFile(source) as archive:
        content = json.loads(archive.read(f"model/{member}"))
    change(content)
    return rewritten(source, folder, {member: json.dumps(content).encode()})


def graph_of(model):
    return model["graph_module"]["graph"]


def refused(path, reason):
    with pytest.raises(BadModel, match=reason) as caught:
        read_archive(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_rewriting_alone_changes_nothing(usual, tmp_path):
    read, again = read_archive(usual), read_archive(rewritten(usual, tmp_path, {}))
    assert (read.calls, read.inputs, read.outputs) == (again.calls, again.inputs, again.outputs)


class Payload:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def saved_bytes(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(("protocol", "named"), [(2, r"posix\.system"), (4, "something whose name it puts together")])
def test_sample_inputs_that_run_code_are_refused_and_not_run(usual, tmp_path, protocol, named):
    marker = tmp_path / "marker"
    content = saved_bytes((torch.ones(2), Payload(f"touch {marker}")), pickle_protocol=protocol)
    refused(rewritten(usual, tmp_path, {INPUTS: content}), f"it asks to run {named}, which was not done")
    assert not marker.exists()
    torch.load(io.BytesIO(content), weights_only=False)  # the payload is a real one
    assert marker.exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (pickle.dumps((1, 2)), "expected sample inputs that are tensors, got a damaged file"),
        (saved_bytes((torch.ones(2),))[:300], "expected sample inputs that are tensors, got a damaged file"),
        (saved_bytes((torch.ones(2), nn.ReLU())), r"it asks to run torch\.nn\.modules\.activation\.ReLU"),
    ],
    ids=["pickle", "truncated", "module"],
)
def test_sample_inputs_are_tensors(usual, tmp_path, content, reason):
    refused(rewritten(usual, tmp_path, {INPUTS: content}), reason)


def test_sample_inputs_of_every_type_are_accepted(usual, tmp_path):
    types = [torch.uint8, torch.int16, torch.uint16, torch.bool, torch.float16, torch.bfloat16, torch.float64]
    values = (*(torch.ones(2).to(dtype) for dtype in types), nn.Parameter(torch.ones(1)), {"flag": True}, None, 1.5)
    for content in (saved_bytes(values), b""):
        assert isinstance(read_archive(rewritten(usual, tmp_path, {INPUTS: content})), Program)


def test_nothing_is_unpickled_and_no_symbol_is_evaluated(usual, tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    code = f"__import__('os').system('touch {marker}')"

    def change(model):
        for record in [*graph_of(model)["tensor_values"].values()]:
            for size in [*record["sizes"], *record["strides"]]:
                if "as_expr" in size:
                    size["as_expr"]["expr_str"] = code
        for value in graph_of(model)["sym_int_values"].values():
            value["as_expr"]["expr_str"] = code
        model["guards_code"] = [code]

    def forbidden(*_, **__):
        raise AssertionError("an unpickler was called")

    path = with_json(usual, tmp_path, MODEL, change)
    assert code[:12].encode() in path.read_bytes()
    for module, name in [(torch, "load"), (torch.export, "load"), (pickle, "load"), (pickle, "loads")]:
        monkeypatch.setattr(module, name, forbidden)
    assert read_archive(path).inputs == {"x": (None, 3, 6, 6)}
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    [
        "data/aotinductor/model/wrapper.so",
        "data/constants/custom_obj_0",
        "data/constants/opaque_obj_0",
        "models/other.json",
        "extra/run.so",
        "data/weights/../../etc",
        "../outside.txt",
        "/etc/passwd",
        "notes\n.txt",
    ],
)
def test_members_that_no_plain_model_has_are_refused_by_name(usual, tmp_path, name):
    shown = ascii(name)[1:-1].replace("\\", r"\\").replace(".", r"\.")
    refused(rewritten(usual, tmp_path, {name: b"x"}), f"expected only members that torch writes .*{shown}")


def test_weights_of_older_versions_are_refused_with_advice(usual, tmp_path):
    refused(rewritten(usual, tmp_path, {"data/weights/model.pt": b"x"}), "save it again with a newer one")
    older = tmp_path / "older.pt2"
    with zipfile.ZipFile(older, "w") as archive:
        for name in ("serialized_exported_program.json", "serialized_state_dict.pt", "version"):
            archive.writestr(name, b"{}")
    refused(older, "its weights are pickles, as older versions of torch wrote them; save it again with a newer one")


def encrypt(archive):
    archive.filelist[0].flag_bits |= 1


def repeat(archive):
    archive.filelist[1].filename = archive.filelist[0].filename


def overlap(archive):
    archive.filelist[1].header_offset = archive.filelist[0].header_offset


def inflate(archive):
    archive.filelist[-1].file_size = archive.filelist[-1].compress_size = 2**40


def another_folder(archive):
    archive.filelist[1].filename = archive.filelist[1].filename.replace("model/", "other/", 1)


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (encrypt, "got 'model/data/weights/weight_0' encrypted"),
        (repeat, "got 'model/data/weights/weight_0' twice"),
        (overlap, "expected members beside each other, got 'model/data/weights/weight_1' at byte 0"),
        (inflate, "expected members inside of the file, got one that ends at byte 1099511"),
        (another_folder, "expected only members that torch writes .*'other/data/weights/weight_1'"),
    ],
)
def test_directories_that_lie_are_refused(usual, tmp_path, tamper, reason):
    refused(rewritten(usual, tmp_path, {}, tamper), reason)


def test_zip_bombs_are_refused(usual, tmp_path):
    bomb = rewritten(usual, tmp_path, {MODEL: b" " * 2**24}, compression=zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 2**18
    refused(bomb, "expected members that are stored as they are, got 'model/data/weights/weight_0' compressed")
    inside = io.BytesIO()
    with zipfile.ZipFile(inside, "w", compression=zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"0" * 2**24)
    refused(rewritten(usual, tmp_path, {INPUTS: inside.getvalue()}), "'archive/data.pkl' compressed")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 200_000 + b"]" * 200_000, "models/model.json is nested too deeply"),
        (b" " * (LARGEST_JSON + 1), "expected at most 67108864 bytes in models/model.json, got 67108865"),
        (b"{", "models/model.json is not JSON"),
        (b'{"schema_version": NaN}', "expected finite numbers in JSON, got NaN"),
        (b"\xff\xfe", "models/model.json is not JSON"),
        (b"[]", r"expected dict as record, got \[\]"),
        (b"{}", "expected dict as 'schema_version', got None"),
        (b'{"schema_version": {"major": 1' + b"0" * 5000 + b"}}", "models/model.json is not JSON"),
        (None, "expected the member 'models/model.json', which is not in it"),
    ],
    ids=["deep", "huge", "cut", "nan", "no text", "list", "empty", "digits", "missing"],
)
def test_json_that_is_not_a_model_is_refused(usual, tmp_path, content, reason):
    refused(rewritten(usual, tmp_path, {MODEL: content}), reason)


@pytest.mark.parametrize(
    ("member", "content", "reason"),
    [
        ("byteorder", b"big", "expected little as byteorder, got b'big'"),
        ("archive_format", b"pt3", "expected pt2 as archive_format, got b'pt3'"),
        ("archive_version", b"1", "expected 0 as archive_version, got b'1'"),
        ("data/weights/weight_0", None, "tensor 'stem.0.weight': expected the member 'data/weights/weight_0'"),
        ("data/weights/weight_0", b"x" * 7, "tensor 'stem.0.weight': expected numbers of 4 bytes, got 7 bytes"),
        ("data/weights/weight_0", b"", "tensor 'stem.0.weight': expected a view of the 0 stored numbers"),
        (WEIGHTS, None, "expected the member 'data/weights/model_weights_config.json'"),
    ],
)
def test_members_must_be_as_torch_writes_them(usual, tmp_path, member, content, reason):
    refused(rewritten(usual, tmp_path, {member: content}), reason)


def sizes(*lengths):
    return [{"as_int": length} for length in lengths]


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ({"sizes": sizes(4, 3, 3, 2**40)}, "expected a view of the 108 stored numbers"),
        ({"sizes": sizes(2**62, 2**62, 2**62, 2**62)}, "expected a view of the 108 stored numbers"),
        ({"strides": sizes(27, 9, 3, 2)}, "expected a view of the 108 stored numbers"),
        ({"sizes": sizes(200, 1, 1, 1), "strides": sizes(0, 0, 0, 0)}, "expected a view of the 108 stored numbers"),
        ({"storage_offset": {"as_int": 1}}, "strides .* and offset 1"),
        ({"storage_offset": {"as_int": -1}}, "expected a length, got -1"),
        ({"storage_offset": {"as_int": True}}, "expected int as 'as_int', got True"),
        ({"strides": sizes(27, 9, 3, -1)}, "expected a length, got -1"),
        ({"strides": sizes(27, 9, 3)}, "expected as many strides as sizes, got 3 and 4"),
        ({"sizes": sizes(*[1] * 65)}, "expected at most 64 sizes"),
        ({"sizes": [{"as_expr": {"expr_str": "4"}}]}, "expected int as 'as_int', got None"),
        ({"dtype": 10}, "expected dense real numbers, got type 10 with layout 7"),
        ({"layout": 1}, "expected dense real numbers, got type 7 with layout 1"),
        ({"dtype": 12}, "expected truth values, got bytes other than 0 and 1"),
    ],
)
def test_tensors_must_lie_in_their_bytes(usual, tmp_path, meta, reason):
    def change(weights):
        weights["config"]["stem.0.weight"]["tensor_meta"].update(meta)

    refused(with_json(usual, tmp_path, WEIGHTS, change), f"tensor 'stem.0.weight': .*{reason}")


def test_a_storage_has_one_type(usual, tmp_path):
    def change(weights):
        weights["config"]["stem.1.weight"] |= {
            "path_name": weights["config"]["stem.1.num_batches_tracked"]["path_name"]
        }
        weights["config"] = dict(sorted(weights["config"].items()))

    refused(
        with_json(usual, tmp_path, WEIGHTS, change), r"tensor 'stem\.1\.weight': expected torch\.int64, as the other"
    )


@pytest.mark.parametrize("name", ["stem.0.weight", "of nobody"])
def test_pickled_weights_are_refused_whether_used_or_not(usual, tmp_path, name):
    def change(weights):
        weights["config"][name] = weights["config"]["stem.0.weight"] | {"use_pickle": True}

    refused(with_json(usual, tmp_path, WEIGHTS, change), f"tensor '{name}': it is stored as a pickle, which could run")


def test_pickled_constants_are_refused(usual, tmp_path):
    def change(constants):
        constants["config"]["object"] = {"path_name": "tensor_0", "is_param": False, "use_pickle": True}

    refused(with_json(usual, tmp_path, CONSTANTS, change), "tensor 'object': it is stored as a pickle")


def test_a_weight_that_the_graph_names_must_be_there(usual, tmp_path):
    path = with_json(usual, tmp_path, WEIGHTS, lambda weights: weights["config"].pop("head.weight"))
    refused(path, r"expected a tensor 'head\.weight', which is not in it")


def node(model, place):
    return graph_of(model)["nodes"][place]


def cycle(model):
    graph_of(model)["nodes"].reverse()


def undefined(model):
    node(model, 0)["inputs"][0]["arg"]["as_tensor"]["name"] = "nobody"


def twice(model):
    node(model, 1)["outputs"] = node(model, 0)["outputs"]


def twice_in_one_call(model):
    node(model, 1)["outputs"] = [{"as_tensors": [{"name": "a"}, {"name": "a"}]}]


def overwritten_input(model):
    node(model, 0)["outputs"] = [{"as_tensor": {"name": "x"}}]


def odd_name(model):
    node(model, 0)["outputs"] = [{"as_tensor": {"name": "../a\x1b[2J"}}]


def number_as_result(model):
    node(model, 0)["outputs"] = [{"as_int": 3}]


def missing_result_used(model):
    node(model, 0)["outputs"] = [{"as_none": True}]
    node(model, 1)["inputs"][0]["arg"] = {"as_tensor": {"name": "<none 0>"}}


def argument_twice(model):
    node(model, 0)["inputs"].append(node(model, 0)["inputs"][0])


def odd_target(model):
    node(model, 0)["target"] = "os.system('true')"


def unknown_result(model):
    graph_of(model)["outputs"] = [{"as_tensor": {"name": "nobody"}}]


def symbol_as_result(model):
    graph_of(model)["outputs"] = [{"as_sym_int": {"as_int": 3}}]


def gradient_as_result(model):
    model["graph_module"]["signature"]["output_specs"] = [{"loss_output": {"arg": {"name": "linear"}}}]


def results_missing(model):
    model["graph_module"]["signature"]["output_specs"] = []


def custom_object(model):
    model["graph_module"]["signature"]["input_specs"][-1] = {"custom_obj": {"arg": {"name": "x", "class_fqn": "C"}}}


def token(model):
    model["graph_module"]["signature"]["input_specs"][-1] = {"token": {"arg": {"name": "x"}}}


def symbol_as_input(model):
    argument = {"as_sym_int": {"as_name": "n"}}
    graph_of(model)["inputs"][-1] = argument
    model["graph_module"]["signature"]["input_specs"][-1] = {"user_input": {"arg": argument}}


def inputs_swapped(model):
    graph_of(model)["inputs"].reverse()


def inputs_missing(model):
    graph_of(model)["inputs"].pop()


def constant_used(model):
    model["graph_module"]["signature"]["input_specs"][-1] = {"constant_input": {"name": "x", "value": {"as_int": 1}}}


def newer(model):
    model["schema_version"] = {"major": 9, "minor": 0}


def two_kinds(model):
    node(model, 0)["inputs"][0]["arg"]["as_int"] = 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (cycle, r"expected values that were computed before, got 'flatten' for aten\.linear\.default"),
        (undefined, r"expected values that were computed before, got 'nobody' for aten\.conv2d\.padding"),
        (twice, "expected each value to be computed once, got conv2d twice"),
        (twice_in_one_call, "expected each value to be computed once, got a twice"),
        (overwritten_input, "expected each value to be computed once, got x twice"),
        (odd_name, r"expected a name of letters and digits, got '\.\./a\\x1b\[2J'"),
        (number_as_result, r"expected names of the results of aten\.conv2d\.padding, got {'as_int': 3}"),
        (missing_result_used, "expected values that were computed before, got '<none 0>'"),
        (argument_twice, r"expected each argument of aten\.conv2d\.padding once, got 'input' twice"),
        (odd_target, "expected the name of an operator, got"),
        (unknown_result, "expected values that were computed before, got 'nobody' for the result"),
        (symbol_as_result, "expected only tensors as results, got {'as_sym_int'"),
        (gradient_as_result, "expected only tensors as results, got .* as loss_output"),
        (results_missing, "expected 1 results in the signature, got 0"),
        (custom_object, "expected only tensors as inputs, got a 'custom_obj'"),
        (token, "expected only tensors as inputs, got a 'token'"),
        (symbol_as_input, "expected only tensors as inputs, got {'as_sym_int'"),
        (inputs_swapped, "as in the signature, got the input"),
        (inputs_missing, "expected 8 inputs in the signature, got 9"),
        (constant_used, "expected values that were computed before, got 'x'"),
        (newer, "expected version 8 of the schema, got 9"),
        (two_kinds, "expected a record with one field"),
    ],
)
def test_graphs_that_make_no_sense_are_refused(usual, tmp_path, change, reason):
    refused(with_json(usual, tmp_path, MODEL, change), reason)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ({"as_none": True}, None),
        ({"as_float": "-Infinity"}, -math.inf),
        ({"as_floats": [1.5, "Infinity"]}, [1.5, math.inf]),
        ({"as_scalar_type": 13}, torch.bfloat16),
        ({"as_scalar_type": 10}, "<as_scalar_type>"),
        ({"as_memory_format": 2}, "channels_last"),
        ({"as_layout": 7}, "strided"),
        ({"as_device": {"type": "cuda", "index": 1}}, "cuda:1"),
        ({"as_sym_int": {"as_int": 3}}, 3),
        ({"as_sym_bools": [{"as_bool": True}, {"as_name": "x"}]}, [True, Ref("x")]),
        ({"as_optional_tensors": [{"as_tensor": {"name": "x"}}, {"as_none": True}]}, [Ref("x"), None]),
        ({"as_nested_tensors": [[{"name": "x"}], []]}, [[Ref("x")], []]),
        ({"as_string_to_argument": {"a": {"as_tensor": {"name": "x"}}}}, [Ref("x")]),
        ({"as_complex": {"real": 1.0, "imag": 2.0}}, "<as_complex>"),
        ({"as_whatever_comes": [1]}, "<as_whatever_comes>"),
    ],
)
def test_arguments_of_every_kind(usual, tmp_path, argument, value):
    def change(model):
        node(model, 0)["inputs"].append({"name": "more", "arg": argument, "kind": 2})

    assert read_archive(with_json(usual, tmp_path, MODEL, change)).calls[0].arguments["more"] == value


def test_a_missing_result_keeps_its_place(usual, tmp_path):
    def change(model):
        node(model, 0)["outputs"].insert(0, {"as_none": True})

    assert read_archive(with_json(usual, tmp_path, MODEL, change)).calls[0].outputs == ("<none 0>", "conv2d")


@pytest.mark.parametrize(
    ("stack", "label"),
    [
        ("L__self__,,Net;L__self__layer1,L__self__layer1.0.conv1,Conv2d", "layer1.0.conv1"),
        ("k,L['self'].layer1,Conv2d", "layer1"),
        ("k,/home/me/model.py,Conv2d", "conv2d"),
        ("nonsense", "conv2d"),
        (3, "conv2d"),
    ],
)
def test_labels_are_modules_and_never_files(usual, tmp_path, stack, label):
    path = with_json(usual, tmp_path, MODEL, lambda model: node(model, 0)["metadata"].update(nn_module_stack=stack))
    assert read_archive(path).calls[0].label == label


def test_what_is_no_archive_is_refused(usual, tmp_path):
    refused(tmp_path / "absent.pt2", "expected a file, got nothing of that name")
    refused(tmp_path, "expected a file, got something else")
    for name, content in {"empty": b"", "text": b"hello", "pickle": pickle.dumps(1)}.items():
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, "expected a zip archive, got a truncated or other file")
    for part in (0.1, 0.5, 0.99):
        path, content = tmp_path / "truncated.pt2", usual.read_bytes()
        path.write_bytes(content[: int(part * len(content))])
        refused(path, "expected a zip archive, got a truncated or other file")
    path.write_bytes(b"#!/bin/sh\n" + usual.read_bytes())
    refused(path, "expected members beside each other, got 'model/data/weights/weight_0' at byte 10")
    path.write_bytes(usual.read_bytes() + b"#")
    refused(path, "expected a zip archive, got a truncated or other file")


def test_damage_anywhere_is_refused_or_harmless(usual, tmp_path):
    content, path, draw = usual.read_bytes(), tmp_path / "damaged.pt2", random.Random(0)
    expected, refusals = read_archive(usual), 0
    for _ in range(200):
        damaged = bytearray(content)
        for _ in range(draw.choice((1, 1, 4))):
            damaged[draw.choice((draw.randrange(len(content)), -draw.randrange(1, 2500)))] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            read = read_archive(path)
        except BadModel:
            refusals += 1
        else:
            assert read.calls == expected.calls
            assert all(torch.equal(read.tensors[name], tensor) for name, tensor in expected.tensors.items())
    assert 50 < refusals < 200
