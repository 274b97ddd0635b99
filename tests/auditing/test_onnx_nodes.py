"""Nodes of ONNX as a graph: what has no constant for which reason, and models as torch and others write them."""

import math

import pytest
import torch
from torch import nn

from gramcert.auditing.onnx_file import OnnxModel, OnnxNode, read_onnx
from gramcert.auditing.onnx_nodes import graph_of
from gramcert.operators.graph import BadModel, Unbounded
from real_layers import MODELS
from tiny_onnx import TensorProto, Tiny, half, number, one, random, tensor

WITHOUT = {
    "exp": ([one("Exp")], "e^x"),
    "log": ([one("Log")], "near 0"),
    "sqrt": ([one("Sqrt")], "near 0"),
    "reciprocal": ([one("Reciprocal")], "near 0"),
    "sign": ([one("Sign")], "jumps"),
    "floor": ([one("Floor")], "jumps"),
    "threshold": ([one("ThresholdedRelu")], "jumps"),
    "shrink": ([one("Shrink")], "jumps"),
    "square": ([one("Mul", "x")], "its slope 2x is unbounded"),
    "cube": ([one("Pow", number(3.0))], "powers"),
    "product": ([one("Relu"), ("Mul", ("x", "v0"), {})], "both depend"),
    "quotient": ([one("Relu"), ("Div", ("v0", "x"), {})], "both depend"),
    "divided by zero": ([one("Div", number(0.0))], "division by zero"),
    "power of a constant": ([("Pow", (number(2.0), "x"), {})], "depends on the input"),
    "matmul": ([one("MatMul", "x")], "both depend"),
    "gemm": ([one("Gemm", "x")], "both depend"),
    "comparison": ([one("Greater", number(1.0)), ("Cast", ("v0",), {"to": 11})], "comparison jumps"),
    "choice": ([one("Greater", number(1.0)), ("Where", ("v0", "x", number(2.0)), {})], "choice"),
    "zero test": ([one("Equal", number(0.0)), ("Where", ("v0", number(1.0), number(0.0)), {})], "choice"),
    "cast": ([one("Cast", to=7), ("Cast", ("v0",), {"to": 11})], "rounding to integers"),
    "gather": ([one("Cast", to=7), ("Gather", (random(3), "v0"), {})], "rounding to integers"),
    "hardmax": ([one("Hardmax")], "jumps"),
    "arg max": ([one("ArgMax")], "an index jumps"),
    "training": ([one("BatchNormalization", *[random(3)] * 4, training_mode=1)], "training mode"),
    "dropout": ([one("Dropout", half(), tensor(True)[0])], "random"),
    "infinite": ([one("Mul", number(math.inf))], "not finite"),
    "divided by almost nothing": ([one("Div", number(5e-324))], "not finite"),
    "infinite slope": ([one("HardSigmoid", alpha=math.nan)], "not a finite number"),
    "infinite bias": ([one("Gemm", random(3, 3), random(3) / 0)], "not finite"),
    "infinite pad": ([one("Pad", tensor(1, 1, 1, 1), number(-math.inf))], "not finite"),
    "nan": ([one("Max", number(math.nan))], "not a number"),
    "batch norm": ([one("BatchNormalization", *[-random(3).abs()] * 4)], "not positive"),
    "no epsilon": ([one("LayerNormalization", random(3), epsilon=0.0)], "without an epsilon"),
    "antialias": ([one("Resize", "", torch.ones(2), antialias=1)], "filters"),
    "crop": (
        [one("Resize", "", torch.ones(2), coordinate_transformation_mode="tf_crop_and_resize")],
        "tf_crop_and_resize",
    ),
    "lp": ([one("ReduceL2"), ("Unsqueeze", ("v0", tensor(0)), {}), ("GlobalLpPool", ("v1",), {"p": 3})], "order"),
    "unknown": ([one("Det")], "no rule is known"),
    "after unknown": ([one("Det"), ("Relu", ("v0",), {})], "of which nothing is known"),
    "random": ([("RandomNormal", (), {"shape": [3]}), one("Add", "v0")], "not known"),
    "too large": ([one("Expand", tensor(2**40, 1, 1))], "too large"),
    "too large a constant": ([("ConstantOfShape", (tensor(2**40),), {}), one("Add", "v0")], "too large"),
    "too large a range": ([("Range", tuple(tensor(0, 2**50, 1)), {}), one("Add", "v0")], "too large"),
    "too large padding": ([one("Pad", tensor(2**40, 0, 0, 0))], "too large"),
    "too large windows": (
        [one("Unsqueeze", tensor(0)), ("MaxPool", ("v0",), {"kernel_shape": [2], "pads": [2**40, 0]})],
        "too large",
    ),
    "twice": ([("ScatterND", ("x", tensor([0], [0]), random(2, 3)), {})], "occur twice"),
    "outside": ([one("Gather", tensor(7))], "outside of 3 places"),
    "axis": ([one("Softmax", axis=7)], "axis 7"),
    "division that would stop the process": (
        [("Div", (tensor(-(2**63)), tensor(0)), {}), one("Reshape", "v0")],
        "ZeroDivisionError",
    ),
    # Functions that look like known ones, but are none of them.
    "a jump at zero": ([one("Equal", number(0.0)), ("Where", ("v0", number(1.0), "x"), {})], "a choice jumps"),
    "a root that jumps": (
        [
            one("Mul", "x"),
            ("Equal", ("v0", number(0.0)), {}),
            ("Where", ("v1", number(1.0), "v0"), {}),
            ("Sqrt", ("v2",), {}),
        ],
        "the root of a choice jumps",
    ),
    "root of a difference": ([one("Mul", "x"), ("Sub", ("v0", number(1.0)), {}), ("Sqrt", ("v1",), {})], "near 0"),
    "root of a normalisation": (
        [
            one("Mul", "x"),
            ("BatchNormalization", ("v0", *(torch.full((3,), v, dtype=torch.float64) for v in (1, -1, 0, 1))), {}),
            ("Sqrt", ("v1",), {}),
        ],
        "near 0",
    ),
    "root of a padded sum": (
        [
            one("Mul", "x"),
            ("Pad", ("v0", tensor(0, 1, 0, 0), number(-1.0)), {}),
            ("ReduceSum", ("v1", tensor(1)), {}),
            ("Sqrt", ("v2",), {}),
        ],
        "near 0",
    ),
    "root of a sum with constants": (
        [
            one("Mul", "x"),
            ("Concat", ("v0", -torch.ones(3, 1, dtype=torch.float64)), {"axis": 1}),
            ("ReduceSum", ("v1", tensor(1)), {}),
            ("Sqrt", ("v2",), {}),
        ],
        "near 0",
    ),
    "shifted gate": ([one("Add", number(-9.0)), ("Sigmoid", ("v0",), {}), ("Mul", ("x", "v1"), {})], "both depend"),
    "turned gate": ([one("Transpose"), ("Sigmoid", ("v0",), {}), ("Mul", ("x", "v1"), {})], "both depend"),
    "negative gate": ([one("Neg"), ("Sigmoid", ("v0",), {}), ("Mul", ("x", "v1"), {})], "both depend"),
    "half of a gelu": ([one("Erf"), ("Add", ("v0", number(2.0)), {}), ("Mul", ("x", "v1"), {})], "both depend"),
    "sign of another": ([one("Neg"), ("Sign", ("v0",), {}), one("Abs"), ("Mul", ("v1", "v2"), {})], "both depend"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_what_has_no_constant_is_unbounded_for_a_reason(name, tmp_path):
    steps, reason = WITHOUT[name]
    tiny = Tiny(tmp_path, steps, (3, 3))
    assert tiny.bound() == math.inf
    assert any(reason in found for found in tiny.reasons()), tiny.reasons()


def test_casts_to_a_few_bits_are_unbounded(tmp_path):
    for kind in (TensorProto.FLOAT8E4M3FN, TensorProto.INT64, TensorProto.BOOL):
        assert "jumps" in Tiny(tmp_path, [one("Cast", to=kind)], (3,)).reasons()[0]


def test_integers_may_only_move_until_they_are_real(tmp_path):
    steps = [one("Transpose"), ("Cast", ("v0",), {"to": 11}), ("Relu", ("v1",), {})]
    assert Tiny(tmp_path, steps, (2, 3), kind=TensorProto.UINT8).bound() == 1
    tiny = Tiny(tmp_path, [one("Transpose"), ("Add", ("v0", "v0"), {})], (2, 3), kind=TensorProto.UINT8)
    assert tiny.reasons() == ["Add: integers that depend on the input may wrap around"]


def test_outputs_that_do_not_depend_on_the_input_are_noted(tmp_path):
    graph = Tiny(tmp_path, [one("Shape")], (3,)).graph
    assert (graph.outputs, graph.constant_outputs) == ({}, ["y"])


def test_control_flow_is_never_a_constant():
    branch = OnnxNode("choose", "If", "", ("c",), ("y",), {"then_branch": None}, has_subgraph=True)
    model = OnnxModel({"x": (3,)}, {"x": torch.float32}, [branch], {"c": torch.tensor(True)}, ("y",), 21)
    graph = graph_of(model, {"x": (3,)})
    (node,) = (node for node in graph.nodes.values() if isinstance(node.operation, Unbounded))
    assert graph.outputs == {"y": node.name}
    assert node.inputs == ("0",)
    assert "control flow" in node.operation.reason


def test_operators_of_others_are_unknown():
    node = OnnxNode("", "Relu", "com.example", ("x",), ("y",), {})
    model = OnnxModel({"x": (3,)}, {"x": torch.float32}, [node], {}, ("y",), 21)
    graph = graph_of(model, {"x": (3,)})
    made = graph.nodes[graph.outputs["y"]]
    assert (made.label, made.source) == ("y", "com.example::Relu")
    assert "domain com.example" in made.operation.reason


def test_digests_tell_constants_apart(tmp_path):
    def digest(**attributes):
        graph = Tiny(tmp_path, [one("Gemm", random(3, 3), attributes.pop("bias"), **attributes)], (2, 3)).graph
        return [node.digest for node in graph.nodes.values()][-1]

    assert digest(bias=random(3)) == digest(bias=random(3))
    assert len({digest(bias=random(3)), digest(bias=random(3) + 1), digest(bias=random(3), beta=2.0)}) == 3


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({}, "has the shape"),
        ({"x": (2, 4)}, r"has the shape \('\?', 3\), got \(2, 4\)"),
        ({"x": (3,)}, "has the shape"),
        ({"x": (0, 3)}, "has the shape"),
        ({"x": (2, 3), "z": (1,)}, "got also"),
    ],
)
def test_shapes_must_fit(shapes, message):
    model = OnnxModel({"x": (None, 3)}, {"x": torch.float32}, [], {}, ("x",), 21)
    with pytest.raises(BadModel, match=message):
        graph_of(model, shapes)


REAL = {
    "ultralight_face/version-RFB-320.onnx": {"Exp"},
    "yunet/yunet_n_320_320.onnx": set(),
    "gtcrn/gtcrn.onnx": {"Pow", "Sqrt", "GRU", "Mul", "Div"},  # products with gates, masks, squared magnitudes
}


@pytest.mark.parametrize("file", REAL)
def test_real_models(file):
    path = MODELS / file
    if not path.exists():
        pytest.skip(f"{path} is not there")
    model = read_onnx(path)
    graph = graph_of(model, dict(model.inputs)).needed()
    unbounded = {node.source for node in graph.nodes.values() if isinstance(node.operation, Unbounded)}
    assert unbounded <= REAL[file]
    assert ("GRU" in unbounded) == ("GRU" in REAL[file])
    assert set(graph.outputs) == set(model.outputs)
    for node in graph.nodes.values():
        assert math.prod(node.shape) > 0


class Usual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect", groups=2),
            nn.SiLU(),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.InstanceNorm2d(8, affine=True),
            nn.PReLU(8),
            nn.AvgPool2d(2),
            nn.Hardswish(),
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.PixelShuffle(2),
            nn.GELU(),
            nn.Upsample(size=(5, 6), mode="bicubic"),
            nn.GroupNorm(1, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.LayerNorm(2),
            nn.Linear(2, 5),
        )

    def forward(self, x):
        return torch.softmax(self.layers(x), -1)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_what_torch_exports_is_understood(tmp_path):
    torch.manual_seed(0)
    network = Usual().eval()
    path = tmp_path / "usual.onnx"
    program = torch.onnx.export(network, (torch.zeros(1, 3, 8, 8),), dynamo=True, verbose=False, optimize=False)
    for change in (lambda: None, program.optimize):
        change()
        program.save(path, external_data=True)
        model = read_onnx(path)
        graph = graph_of(model, dict(model.inputs)).needed()
        reasons = [node.operation.reason for node in graph.nodes.values() if isinstance(node.operation, Unbounded)]
        assert reasons == []
        assert next(reversed(graph.nodes.values())).shape == (1, 5)
