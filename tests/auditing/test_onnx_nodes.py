import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gramcert.auditing.onnx_file import OnnxModel, OnnxNode, read_onnx
from gramcert.auditing.onnx_nodes import graph_of
from gramcert.operators.graph import BadModel, Input, Joint, Nonlinear, Sum, Unbounded
from gramcert.operators.linear import LinearMap
from real_layers import MODELS

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

EPS = torch.finfo(torch.float64).eps
ROUNDING = 1e5 * EPS  # sums of a few hundred products
DIFFERENCES = EPS**0.4  # of difference quotients


def tensor(*values):
    return torch.tensor(values)


def random(*shape):
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


class Tiny:
    """A model with the input x, written to a file, read again, and run by ONNX's own reference."""

    def __init__(self, folder, steps, shape, opset=21, outputs=("y",), truth=None, kind=TensorProto.DOUBLE):
        self.shape, self.outputs, initializers, nodes = tuple(shape), outputs, [], []
        for index, (op, inputs, attributes) in enumerate(steps):
            names = []
            for value in inputs:
                if isinstance(value, torch.Tensor):
                    names.append(f"c{len(initializers)}")
                    initializers.append(numpy_helper.from_array(value.numpy(), names[-1]))
                else:
                    names.append(value)
            last = index == len(steps) - 1
            result = list(outputs) if last else [f"v{index}"]
            attributes = {
                key: numpy_helper.from_array(value.numpy()) if isinstance(value, torch.Tensor) else value
                for key, value in attributes.items()
            }
            nodes.append(helper.make_node(op, names, result, name=f"{op}_{index}", **attributes))
        inputs = [helper.make_tensor_value_info("x", kind, shape)]
        results = [helper.make_tensor_value_info(name, kind, None) for name in outputs]
        graph = helper.make_graph(nodes, "tiny", inputs, results, initializers)
        self.proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        path = folder / "tiny.onnx"
        path.write_bytes(self.proto.SerializeToString())
        self.model = read_onnx(path)
        self.graph = graph_of(self.model, dict(self.model.inputs))
        self._reference, self.truth = None, truth

    def __call__(self, x):
        if self.truth is not None:
            return self.truth(x.reshape(self.shape)).flatten()
        self._reference = self._reference or ReferenceEvaluator(self.proto)
        y = self._reference.run([self.outputs[0]], {"x": x.reshape(self.shape).numpy()})[0]
        return torch.tensor(y.copy(), dtype=torch.float64).flatten()

    def shape_of(self, name="y"):
        return self.graph.nodes[self.graph.outputs[name]].shape

    def matrix(self, name="y"):
        """That of the graph, of linear nodes only."""
        found = {}
        for node in self.graph.needed().nodes.values():
            if isinstance(node.operation, Input):
                found[node.name] = torch.eye(math.prod(node.shape), dtype=torch.float64)
            elif isinstance(node.operation, Sum):
                parts = zip(node.operation.signs, node.inputs, strict=True)
                found[node.name] = sum(sign * found[part] for sign, part in parts)
            else:
                assert isinstance(node.operation, LinearMap), node
                found[node.name] = node.operation.dense() @ found[node.inputs[0]]
        return found[self.graph.outputs[name]]

    def bound(self, name="y"):
        """The product of the constants on the way."""
        found = {}
        for node in self.graph.nodes.values():
            operation, before = node.operation, [found[part] for part in node.inputs]
            if isinstance(operation, Input):
                found[node.name] = 1.0
            elif isinstance(operation, LinearMap):
                found[node.name] = before[0] * float(torch.linalg.matrix_norm(operation.dense(), 2))
            elif isinstance(operation, Nonlinear):
                found[node.name] = before[0] * operation.constant
            else:
                joined = math.hypot(*before) if isinstance(operation, Joint) else sum(before)
                found[node.name] = math.inf if isinstance(operation, Unbounded) else joined
        return found[self.graph.outputs[name]]

    def slope(self, x):
        """The norm of the Jacobian, by central differences."""
        step = EPS ** (1 / 3)
        units = torch.eye(math.prod(self.shape), dtype=torch.float64) * step
        columns = [(self(x.flatten() + unit) - self(x.flatten() - unit)) / (2 * step) for unit in units]
        matrix = torch.stack(columns, 1)
        return float(torch.linalg.matrix_norm(matrix, 2)) if bool(matrix.isfinite().all()) else math.nan

    def reasons(self):
        nodes = self.graph.needed().nodes.values()
        return [node.operation.reason for node in nodes if isinstance(node.operation, Unbounded)]


def one(op, *inputs, **attributes):
    return (op, ("x", *inputs), attributes)


IMAGE = (1, 2, 5, 4)
LINEAR = {
    "conv": (one("Conv", random(3, 2, 3, 2), random(3), pads=[1, 0, 2, 1], strides=[2, 1]), IMAGE),
    "conv groups": (one("Conv", random(4, 1, 2, 2), group=2, dilations=[2, 1]), IMAGE),
    "conv upper": (one("Conv", random(1, 2, 3, 2), auto_pad="SAME_UPPER", strides=[2, 3]), IMAGE),
    "conv lower": (one("Conv", random(1, 2, 3, 2), auto_pad="SAME_LOWER", kernel_shape=[3, 2]), IMAGE),
    "conv valid": (one("Conv", random(1, 2, 3), auto_pad="VALID"), (2, 2, 6)),
    "conv 3d": (one("Conv", random(1, 1, 2, 2, 2), pads=[0, 0, 1, 1, 0, 0]), (1, 1, 2, 3, 2)),
    "transposed": (one("ConvTranspose", random(2, 3, 3, 2), random(3), strides=[2, 1], pads=[1, 0, 0, 1]), IMAGE),
    "transposed more": (
        one("ConvTranspose", random(2, 1, 3, 3), group=2, strides=[2, 2], output_padding=[1, 0], dilations=[1, 2]),
        (1, 2, 3, 2),
    ),
    "transposed shape": (one("ConvTranspose", random(1, 1, 3, 3), strides=[2, 2], output_shape=[5, 3]), (1, 1, 3, 2)),
    "gemm": (one("Gemm", random(4, 3), random(3), alpha=0.5, beta=2.0), (2, 4)),
    "gemm turned": (one("Gemm", random(3, 4), random(2, 1), transB=1), (2, 4)),
    "gemm right": (("Gemm", (random(3, 2), "x"), {"transA": 1, "transB": 1}), (4, 3)),
    "gemm with itself": (("Gemm", ("x", random(3, 3), "x"), {"transA": 1, "beta": 0.5}), (3, 3)),
    "matmul": (one("MatMul", random(4, 3)), (2, 3, 4)),
    "matmul vector": (one("MatMul", random(4)), (2, 3, 4)),
    "matmul of vector": (one("MatMul", random(4, 3)), (4,)),
    "matmul left": (("MatMul", (random(2, 3), "x"), {}), (2, 3, 4)),
    "matmul left of vector": (("MatMul", (random(2, 3), "x"), {}), (3,)),
    "matmul left vector": (("MatMul", (random(3), "x"), {}), (2, 3, 4)),
    "matmul batched": (one("MatMul", random(2, 4, 3)), (3, 1, 2, 4)),
    "matmul left batched": (("MatMul", (random(2, 5, 3), "x"), {}), (2, 3, 4)),
    "batch norm": (
        one("BatchNormalization", random(2), random(2), random(2), random(2).square(), epsilon=1e-3),
        IMAGE,
    ),
    "cumsum": (one("CumSum", torch.tensor(1)), (2, 3, 2)),
    "cumsum back": (one("CumSum", torch.tensor(-1), exclusive=1, reverse=1), (2, 4)),
    "neg": (one("Neg"), (3,)),
    "add": (one("Add", random(2, 1, 3)), (4, 3)),
    "subtracted": (("Sub", (random(3), "x"), {}), (2, 3)),
    "sum": (("Sum", ("x", random(3), "x"), {}), (2, 3)),
    "mean": (("Mean", ("x", "x", random(2, 3)), {}), (2, 3)),
    "mul": (("Mul", (random(2, 1), "x"), {}), (3,)),
    "div": (one("Div", random(3)), (2, 3)),
    "pow 1": (one("Pow", torch.ones(1, 1, dtype=torch.float64)), (3,)),
    "identity": (one("Identity"), (3,)),
    "dropout": (one("Dropout"), (3,)),
    "where": (("Where", (tensor(True, False, True), "x", random(2, 3)), {}), (3,)),
    "where twice": (("Where", (tensor(True, False, True), "x", "x"), {}), (2, 3)),
    "concat": (("Concat", ("x", random(1, 2), "x"), {"axis": 0}), (3, 2)),
    "split": (one("Split", tensor(1, 3), axis=1), (2, 4)),
    "slice": (one("Slice", tensor(-1, 1), tensor(-9, 9), tensor(0, -1), tensor(-2, 2)), (4, 5)),
    "gather": (one("Gather", tensor([0, -1], [2, 2]), axis=1), (2, 3, 2)),
    "gather number": (one("Gather", torch.tensor(1)), (2, 3)),
    "gather elements": (one("GatherElements", tensor([0, -1], [1, 1]), axis=1), (2, 3)),
    "gather nd": (one("GatherND", tensor([0, 1], [1, -1])), (2, 3, 2)),
    "scatter nd": (("ScatterND", (random(4, 2), tensor([3], [1]), "x"), {}), (2, 2)),
    "scatter nd into": (("ScatterND", ("x", tensor([3, 1], [0, 0]), random(2)), {}), (4, 2)),
    "reshape": (one("Reshape", tensor(0, -1, 2)), (3, 4, 2)),
    "flatten": (one("Flatten", axis=2), (2, 3, 4)),
    "flatten all": (one("Flatten", axis=0), (2, 3)),
    "transpose": (one("Transpose", perm=[2, 0, 1]), (2, 3, 4)),
    "transpose all": (one("Transpose"), (2, 3, 4)),
    "squeeze": (one("Squeeze", tensor(-1)), (2, 1, 3, 1)),
    "squeeze all": (one("Squeeze"), (2, 1, 3, 1)),
    "unsqueeze": (one("Unsqueeze", tensor(0, -1)), (2, 3)),
    "expand": (one("Expand", tensor(2, 1, 3)), (2, 1)),
    "tile": (one("Tile", tensor(2, 3)), (2, 2)),
    "trilu": (one("Trilu", torch.tensor(1), upper=0), (3, 4)),
    "pad": (one("Pad", tensor(0, 1, -1, 2), random(1)[0]), (3, 2)),
    "pad reflect": (one("Pad", tensor(2, 1), mode="reflect"), (4,)),
    "pad edge": (one("Pad", tensor(2, 1), torch.tensor(0.0, dtype=torch.float64), tensor(-1), mode="edge"), (2, 3)),
    "pad wrap": (one("Pad", tensor(0, 2, 0, 1), mode="wrap"), (2, 3)),
    "depth to space": (one("DepthToSpace", blocksize=2), (1, 8, 2, 3)),
    "depth to space crd": (one("DepthToSpace", blocksize=2, mode="CRD"), (1, 8, 2, 3)),
    "space to depth": (one("SpaceToDepth", blocksize=2), (1, 2, 4, 6)),
    "average": (one("AveragePool", kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1]), IMAGE),
    "average padded": (one("AveragePool", kernel_shape=[3, 2], pads=[1, 0, 1, 1], count_include_pad=1), IMAGE),
    "average ceil": (one("AveragePool", kernel_shape=[2, 3], strides=[2, 2], ceil_mode=1), IMAGE),
    "average same": (one("AveragePool", kernel_shape=[2, 3], strides=[2, 1], auto_pad="SAME_UPPER"), IMAGE),
    "global average": (one("GlobalAveragePool"), IMAGE),
    "reduce mean": (one("ReduceMean", tensor(1, -1), keepdims=0), (2, 3, 2)),
    "reduce sum": (one("ReduceSum"), (2, 3)),
    "reduce nothing": (one("ReduceSum", noop_with_empty_axes=1), (2, 3)),
}


# Where ONNX's own reference is incomplete or wrong.
TRUTH = {
    "transposed shape": lambda x: F.conv_transpose2d(x, random(1, 1, 3, 3), stride=2, padding=1),
    "pad": lambda x: F.pad(x, (1, 2, 0, -1), value=float(random(1))),
    "batch norm 9": lambda x: F.batch_norm(x, random(2), random(2).square(), random(2), random(2), eps=EPSILON),
    "softmax rows": lambda x: torch.softmax(x.flatten(1), 1),
    "max pool": lambda x: F.max_pool1d(x, 3, 1, 1),
    "max pool same": lambda x: F.max_pool1d(x, 3, 1, 1),
    "global max": lambda x: x.amax(2),
    "global l2": lambda x: torch.linalg.vector_norm(x, dim=2),
}
EPSILON = float(torch.tensor(1e-5, dtype=torch.float32))


@pytest.mark.parametrize("name", LINEAR)
def test_linear(name, tmp_path):
    step, shape = LINEAR[name]
    outputs = ("y", "z") if step[0] == "Split" else ("y",)
    tiny = Tiny(tmp_path, [step], shape, outputs=outputs, truth=TRUTH.get(name))
    _same_matrix(tiny)


def _same_matrix(tiny, tolerance=ROUNDING):
    zero = torch.zeros(math.prod(tiny.shape), dtype=torch.float64)
    start = tiny(zero)
    truth = torch.stack([tiny(unit) - start for unit in torch.eye(len(zero), dtype=torch.float64)], 1)
    assert math.prod(tiny.shape_of()) == len(start)
    assert torch.allclose(tiny.matrix(), truth, rtol=tolerance, atol=tolerance * float(truth.abs().max()))


OLDER = {
    "slice": (one("Slice", starts=[1], ends=[9], axes=[1]), (2, 4), 9),
    "squeeze": (one("Squeeze", axes=[1]), (2, 1, 3), 11),
    "unsqueeze": (one("Unsqueeze", axes=[0, 3]), (2, 3), 11),
    "split": (one("Split", split=[1, 3], axis=1), (2, 4), 11),
    "split evenly": (one("Split", axis=1), (2, 4), 11),
    "split unevenly": (one("Split", axis=1, num_outputs=2), (2, 5), 18),
    "pad": (one("Pad", pads=[0, 1, 0, 2], value=1.5), (2, 3), 10),
    "reduce mean": (one("ReduceMean", axes=[1], keepdims=0), (2, 3), 11),
    "reduce sum": (one("ReduceSum", axes=[-1]), (2, 3), 11),
    "batch norm": (one("BatchNormalization", random(2), random(2), random(2), random(2).square()), IMAGE, 9),
    "resize": (one("Resize", torch.tensor([1.0, 2.0])), (2, 3), 10),
    "upsample": (one("Upsample", torch.tensor([1.0, 1.0, 2.0, 3.0])), (1, 1, 2, 3), 9),
    "upsample attribute": (one("Upsample", scales=[1.0, 1.0, 2.0, 3.0]), (1, 1, 2, 3), 7),
}


@pytest.mark.parametrize("name", OLDER)
def test_linear_operators_of_older_versions(name, tmp_path):
    step, shape, opset = OLDER[name]
    outputs = ("y", "z") if step[0] == "Split" else ("y",)
    tiny = Tiny(tmp_path, [step], shape, opset, outputs, TRUTH.get(f"{name} {opset}"))
    if step[0] in ("Upsample", "Resize"):  # ONNX has no reference for these
        rows = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
        factors = step[1][1].int().tolist() if len(step[1]) > 1 else [1, 1, 2, 3]
        for axis, factor in enumerate(factors):
            rows = rows.repeat_interleave(factor, axis)
        assert torch.equal(tiny.matrix() @ torch.arange(math.prod(shape), dtype=torch.float64), rows.flatten())
    else:
        _same_matrix(tiny)


SCALES, SIZES = torch.tensor([1.0, 1.0, 2.0, 0.625]), tensor(1, 1, 7, 3)
RESIZED = [
    *(
        {"mode": mode, "coordinate_transformation_mode": place}
        for mode in ("linear", "cubic", "nearest")
        for place in ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners")
    ),
    {"mode": "linear", "coordinate_transformation_mode": "half_pixel_symmetric"},
    {"mode": "cubic", "cubic_coeff_a": -0.5},
    *({"mode": "nearest", "nearest_mode": mode} for mode in ("round_prefer_ceil", "floor", "ceil")),
]


@pytest.mark.parametrize("attributes", RESIZED, ids=lambda attributes: " ".join(map(str, attributes.values())))
def test_resizing(attributes, tmp_path):
    tolerance = 16 * torch.finfo(torch.float32).eps if attributes["mode"] == "cubic" else ROUNDING  # of the reference
    _same_matrix(Tiny(tmp_path, [one("Resize", "", "", SIZES, **attributes)], (1, 1, 4, 5)), tolerance)
    if attributes.get("coordinate_transformation_mode") != "align_corners":
        _same_matrix(Tiny(tmp_path, [one("Resize", "", SCALES, **attributes)], (1, 1, 3, 5)), tolerance)
    on_one_axis = one("Resize", "", "", tensor(4), axes=[2], **attributes)
    _same_matrix(Tiny(tmp_path, [on_one_axis], (1, 2, 3)), tolerance)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_resizing_as_torch_does(mode, align, tmp_path):
    place = "align_corners" if align else "pytorch_half_pixel"
    step = one("Resize", "", "", SIZES, mode=mode, coordinate_transformation_mode=place)

    def truth(x):
        return F.interpolate(x, (7, 3), mode=f"bi{mode}", align_corners=align)

    _same_matrix(Tiny(tmp_path, [step], (1, 1, 4, 5), truth=truth))


def nearest(place, **attributes):
    return {"coordinate_transformation_mode": place, **attributes}


UNSETTLED = {
    "a place beside a whole number": (23, 1.6666666, nearest("asymmetric", nearest_mode="ceil"), 21, "nearest place"),
    "a place and a size": (24, 1.6666666, nearest("asymmetric", nearest_mode="ceil"), 21, "39 or 40"),
    "a place beside the middle": (22, 0.2, nearest("half_pixel", nearest_mode="floor"), 19, "nearest place"),
    "the centre of a cut size": (12, 4, nearest("half_pixel_symmetric", nearest_mode="floor"), 19, "nearest place"),
    "a ratio of sizes": (42, 14, nearest("half_pixel", nearest_mode="floor"), 19, None),
    "a size below a whole number": (22, 0.8181818, {"mode": "linear"}, 21, "the new size depends .*: 17 or 18"),
    "a scale that leaves the size": (6, 1.1, {"mode": "linear"}, 21, "leaves 6 places"),
    "nearly 1": (6, 1.0000001, nearest("asymmetric"), 21, "leaves 6 places"),
    "corners": (5, 1.5, {"mode": "linear", **nearest("align_corners")}, 21, "corners"),
    "an older version that shrinks": (10, 0.4, {}, 10, "nearest place"),
    "an older version that halves": (10, 0.5, {}, 10, None),
    "an older version that grows by a fraction": (28, 1.6, {}, 10, "nearest place"),
    "by seven": (30, 7.0, nearest("asymmetric", nearest_mode="floor"), 21, None),
}


@pytest.mark.parametrize("name", UNSETTLED)
def test_resizing_has_no_constant_where_the_arithmetic_decides(name, tmp_path):
    size, change, attributes, opset, reason = UNSETTLED[name]
    if isinstance(change, int):
        step = one("Resize", "", "", tensor(1, 1, change), **attributes)
    else:
        step = one("Resize", *[""] * (opset > 10), torch.tensor([1.0, 1.0, change]), **attributes)
    tiny = Tiny(tmp_path, [step], (1, 1, size), opset)
    if reason is None:
        assert tiny.reasons() == []
        if opset > 10:
            _same_matrix(tiny)
    else:
        assert re.search(reason, tiny.reasons()[0])


_PLACES = {
    "asymmetric": lambda i, scale, size, out: i / scale,
    "half_pixel": lambda i, scale, size, out: (i + np.float32(0.5)) / scale - np.float32(0.5),
    "align_corners": lambda i, scale, size, out: i * np.float32(size - 1) / np.float32(max(1, out - 1)),
}
_NEAREST = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round_prefer_floor": lambda x: np.ceil(x - np.float32(0.5)),
    "round_prefer_ceil": lambda x: np.floor(x + np.float32(0.5)),
}


@given(
    size=st.integers(1, 40),
    ratio=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    ulps=st.integers(-1, 1),
    place=st.sampled_from(sorted(_PLACES)),
    rounding=st.sampled_from(sorted(_NEAREST)),
)
def test_the_nearest_place_is_that_of_runtimes_in_float32(tmp_path_factory, size, ratio, ulps, place, rounding):
    scale = np.float32(ratio[0] / ratio[1])
    scale = np.nextafter(scale, np.float32(ulps * np.inf)) if ulps else scale
    scales = torch.tensor([1.0, 1.0, float(scale)])
    step = one("Resize", "", scales, coordinate_transformation_mode=place, nearest_mode=rounding)
    tiny = Tiny(tmp_path_factory.getbasetemp(), [step], (1, 1, size))
    if tiny.reasons():
        return
    out = int(np.float32(size) * scale)
    places = _PLACES[place](np.arange(out, dtype=np.float32), scale, size, out)
    taken = _NEAREST[rounding](places).clip(0, size - 1).astype(int)
    assert torch.equal(tiny.matrix(), torch.eye(size, dtype=torch.float64)[taken])


# A point where the function is as steep as its constant says, nearly.
POINT = {
    "Relu": 1.0,
    "LeakyRelu": 1.0,
    "Elu": 1.0,
    "Selu": -1e-4,
    "Celu": 1.0,
    "Sigmoid": 0.0,
    "HardSwish": 2.999,
    "Tanh": 0.0,
    "Softplus": 30.0,
    "Softsign": 1e-4,
    "Erf": 0.0,
    "Mish": 1.49,
    "Abs": 1.0,
    "Sin": 0.0,
    "Cos": math.pi / 2,
    "Atan": 0.0,
    "Asinh": 0.0,
}
ELEMENTWISE = [
    *((op, (), {}, point) for op, point in POINT.items()),
    ("LeakyRelu", (), {"alpha": -2.5}, -1.0),
    ("Elu", (), {"alpha": 3.0}, -1e-4),
    ("Celu", (), {"alpha": 0.5}, 1.0),
    ("ThresholdedRelu", (), {"alpha": 0.0}, 1.0),
    ("HardSigmoid", (), {}, 0.0),
    ("HardSigmoid", (), {"alpha": 0.75, "beta": 0.25}, 0.0),
    ("Gelu", (), {}, math.sqrt(2)),
    ("Gelu", (), {"approximate": "tanh"}, 1.4),
    ("Shrink", (), {"lambd": 0.5, "bias": 0.5}, 1.0),
    ("PRelu", (torch.tensor([3.0], dtype=torch.float64),), {}, -1.0),
    ("Clip", (torch.tensor(-1.0, dtype=torch.float64),), {}, 0.0),
    ("Max", (random(1),), {}, 9.0),
    ("Min", (random(1), random(3)), {}, -9.0),
]


@pytest.mark.parametrize(("op", "inputs", "attributes", "point"), ELEMENTWISE, ids=lambda v: str(v)[:30])
def test_functions_of_each_entry(op, inputs, attributes, point, tmp_path):
    tiny = Tiny(tmp_path, [one(op, *inputs, **attributes)], (3,), 22)
    steepest = max(tiny.slope(3 * random(3, seed)[:, 0]) for seed in range(1, 9))
    assert steepest <= tiny.bound() * (1 + DIFFERENCES)
    assert tiny.slope(torch.full((3,), point, dtype=torch.float64)) >= 0.999 * tiny.bound()


def test_swish_has_the_slopes_of_silu_for_every_alpha(tmp_path):
    for alpha in (1.0, 0.3, -2.0):
        tiny = Tiny(tmp_path, [one("Swish", alpha=alpha)], (1,), 24)
        gate = torch.linspace(-9, 9, 2000, dtype=torch.float64) / alpha
        x = gate.requires_grad_()
        (slopes,) = torch.autograd.grad((x * torch.sigmoid(torch.tensor(alpha) * x)).sum(), x)
        assert 0.999 * tiny.bound() <= float(slopes.abs().max()) <= tiny.bound()


FAR = torch.tensor([9.0, 0.0, -9.0, 1.0, 5.0, 2.0], dtype=torch.float64)
VECTORS = {
    "softmax": (one("Softmax"), (1, 2), 13, torch.zeros(2)),
    "softmax old": (one("Softmax", axis=1), (1, 2, 1), 11, torch.zeros(2)),
    "softmax rows": (one("Softmax", axis=1), (2, 2, 1), 11, torch.zeros(4)),
    "log softmax": (one("LogSoftmax", axis=0), (6, 1), 13, 9 * FAR),
    "max pool": (one("MaxPool", kernel_shape=[3], strides=[1], pads=[1, 1]), (1, 1, 6), 21, torch.eye(6)[2] * 9),
    "max pool apart": (one("MaxPool", kernel_shape=[2], strides=[2], ceil_mode=1), (1, 1, 5), 21, FAR[:5]),
    "max pool dilated": (one("MaxPool", kernel_shape=[2], dilations=[2]), (1, 1, 6), 21, torch.eye(6)[2] * 9),
    "max pool same": (one("MaxPool", kernel_shape=[3], auto_pad="SAME_LOWER"), (1, 1, 6), 21, torch.eye(6)[2] * 9),
    "l2 pool": (one("LpPool", kernel_shape=[3]), (1, 1, 6), 21, torch.eye(6)[2] * 9),
    "global max": (one("GlobalMaxPool"), (1, 2, 3), 21, FAR),
    "global l2": (one("GlobalLpPool"), (1, 2, 3), 21, FAR),
    "reduce l2": (one("ReduceL2", tensor(1), keepdims=0), (2, 3), 21, FAR),
    "reduce l1": (one("ReduceL1", tensor(1)), (2, 3), 21, FAR + 10),
    "reduce max": (one("ReduceMax", tensor(0)), (2, 3), 21, FAR),
    "reduce min": (one("ReduceMin", tensor(0), keepdims=0), (2, 3), 21, FAR),
    "log sum exp": (one("ReduceLogSumExp", tensor(1)), (2, 3), 21, 9 * FAR),
    "top k": (one("TopK", tensor(2)), (2, 3), 21, FAR),
    "instance norm": (one("InstanceNormalization", random(2), random(2), epsilon=0.5), (1, 2, 3), 21, torch.zeros(6)),
    "layer norm": (one("LayerNormalization", random(3), epsilon=0.5), (2, 3), 21, torch.zeros(6)),
    "layer norm of all": (one("LayerNormalization", random(2, 3), axis=0, epsilon=0.5), (2, 3), 21, torch.zeros(6)),
    "group norm": (
        one("GroupNormalization", random(4), random(4), num_groups=2, epsilon=0.5),
        (1, 4, 2),
        21,
        torch.zeros(8),
    ),
    "group norm old": (
        one("GroupNormalization", random(2), random(2), num_groups=2, epsilon=0.5),
        (1, 4, 2),
        18,
        torch.zeros(8),
    ),
    "rms norm": (one("RMSNormalization", random(3), epsilon=0.5), (2, 3), 23, torch.zeros(6)),
}


@pytest.mark.parametrize("name", VECTORS)
def test_functions_of_several_entries(name, tmp_path):
    step, shape, opset, point = VECTORS[name]
    tiny = Tiny(tmp_path, [step], shape, opset, ("y", "z") if step[0] == "TopK" else ("y",), TRUTH.get(name))
    count = math.prod(shape)
    steepest = max(tiny.slope(random(count, seed)[:, 0]) for seed in range(1, 9))
    assert steepest <= tiny.bound() * (1 + DIFFERENCES)
    # The layers with scales: the projection on what is centred does not meet the largest of them.
    near = 0.6 if "norm" in name else 0.999
    assert near * tiny.bound() <= tiny.slope(point.double()) <= tiny.bound() * (1 + DIFFERENCES)
    assert math.prod(tiny.shape_of()) == len(tiny(point.double()))


def half():
    return torch.tensor(0.5, dtype=torch.float64)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


PATTERNS = {
    "silu": ([one("Sigmoid"), ("Mul", ("x", "v0"), {})], 2.4),
    "hardswish": ([one("HardSigmoid", alpha=1 / 6), ("Mul", ("v0", "x"), {})], 2.999),
    "another hardswish": ([one("HardSigmoid", alpha=0.25), ("Mul", ("v0", "x"), {})], 1.999),
    "mish": ([one("Softplus"), ("Tanh", ("v0",), {}), ("Mul", ("x", "v1"), {})], 1.49),
    "gelu": (
        [
            one("Div", number(math.sqrt(2))),
            ("Erf", ("v0",), {}),
            ("Add", ("v1", number(1.0)), {}),
            ("Mul", ("x", "v2"), {}),
            ("Mul", ("v3", half()), {}),
        ],
        math.sqrt(2),
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_activations_made_of_several_nodes(name, tmp_path):
    steps, point = PATTERNS[name]
    tiny = Tiny(tmp_path, steps, (3,))
    assert tiny.reasons() == []
    steepest = max(tiny.slope(3 * random(3, seed)[:, 0]) for seed in range(1, 9))
    assert steepest <= tiny.bound() * (1 + DIFFERENCES)
    assert tiny.slope(torch.full((3,), point, dtype=torch.float64)) >= 0.999 * tiny.bound()


def test_the_pattern_of_l2_pooling_has_a_constant(tmp_path):
    steps = [one("Pow", number(2.0)), ("ReduceSum", ("v0", tensor(1)), {}), ("Sqrt", ("v1",), {})]
    tiny = Tiny(tmp_path, steps, (2, 3))
    assert 0.999 * tiny.bound() <= tiny.slope(FAR) <= tiny.bound() * (1 + DIFFERENCES)


def test_maxima_and_minima_of_two_halves_only_sort(tmp_path):
    steps = [
        one("Slice", tensor(0), tensor(3)),
        one("Slice", tensor(3), tensor(6)),
        ("Max", ("v0", "v1"), {}),
        ("Min", ("v0", "v1"), {}),
        ("Concat", ("v2", "v3"), {"axis": 0}),
    ]
    tiny = Tiny(tmp_path, steps, (6,))
    assert 1 <= tiny.bound() <= 1 + ROUNDING


def test_scattering_one_value_into_another_keeps_their_sizes(tmp_path):
    steps = [one("Slice", tensor(0), tensor(2)), ("ScatterND", ("x", tensor([3], [1]), "v0"), {})]
    tiny = Tiny(tmp_path, steps, (4,))
    start = tiny(torch.zeros(4, dtype=torch.float64))
    truth = torch.stack([tiny(unit) - start for unit in torch.eye(4, dtype=torch.float64)], 1)
    assert float(torch.linalg.matrix_norm(truth, 2)) <= tiny.bound() * (1 + ROUNDING)


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
    "choice": ([one("Greater", number(1.0)), ("Where", ("v0", "x", number(1.0)), {})], "choice"),
    "zero test": ([one("Equal", number(0.0)), ("Where", ("v0", number(1.0), number(0.0)), {})], "choice"),
    "cast": ([one("Cast", to=7), ("Cast", ("v0",), {"to": 11})], "rounding to integers"),
    "gather": ([one("Cast", to=7), ("Gather", (random(3), "v0"), {})], "rounding to integers"),
    "hardmax": ([one("Hardmax")], "jumps"),
    "arg max": ([one("ArgMax")], "an index jumps"),
    "training": ([one("BatchNormalization", *[random(3)] * 4, training_mode=1)], "training mode"),
    "dropout": ([one("Dropout", half(), tensor(True)[0])], "random"),
    "weights": ([("Conv", (random(1, 1, 3), "v0"), {})], "nothing"),
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
}


# Functions that look like known ones, but are none of them.
DISGUISED = {
    "a jump at zero": [one("Equal", number(0.0)), ("Where", ("v0", number(1.0), "x"), {})],
    "a root that jumps": [
        one("Mul", "x"),
        ("Equal", ("v0", number(0.0)), {}),
        ("Where", ("v1", number(1.0), "v0"), {}),
        ("Sqrt", ("v2",), {}),
    ],
    "root of a difference": [one("Mul", "x"), ("Sub", ("v0", number(1.0)), {}), ("Sqrt", ("v1",), {})],
    "root of a normalisation": [
        one("Mul", "x"),
        ("BatchNormalization", ("v0", *(torch.full((3,), v, dtype=torch.float64) for v in (1, -1, 0, 1))), {}),
        ("Sqrt", ("v1",), {}),
    ],
    "root of a padded sum": [
        one("Mul", "x"),
        ("Pad", ("v0", tensor(0, 1, 0, 0), number(-1.0)), {}),
        ("ReduceSum", ("v1", tensor(1)), {}),
        ("Sqrt", ("v2",), {}),
    ],
    "root of a sum with constants": [
        one("Mul", "x"),
        ("Concat", ("v0", -torch.ones(3, 1, dtype=torch.float64)), {"axis": 1}),
        ("ReduceSum", ("v1", tensor(1)), {}),
        ("Sqrt", ("v2",), {}),
    ],
    "shifted gate": [one("Add", number(-9.0)), ("Sigmoid", ("v0",), {}), ("Mul", ("x", "v1"), {})],
    "turned gate": [one("Transpose"), ("Sigmoid", ("v0",), {}), ("Mul", ("x", "v1"), {})],
    "negative gate": [one("Neg"), ("Sigmoid", ("v0",), {}), ("Mul", ("x", "v1"), {})],
    "half of a gelu": [one("Erf"), ("Add", ("v0", number(2.0)), {}), ("Mul", ("x", "v1"), {})],
    "sign of another": [one("Neg"), ("Sign", ("v0",), {}), one("Abs"), ("Mul", ("v1", "v2"), {})],
    "mean of another axis": [
        one("ReduceMean", tensor(1), keepdims=0),
        ("Unsqueeze", ("v0", tensor(0)), {}),
        one("Sub", "v1"),
    ],
    "mean turned around": [
        one("ReduceMean", tensor(0)),
        ("Gather", ("v0", tensor(2, 1, 0)), {"axis": 1}),
        one("Sub", "v1"),
    ],
}


@pytest.mark.parametrize("name", DISGUISED)
def test_what_looks_like_a_known_function_has_no_smaller_constant_than_it_is_steep(name, tmp_path):
    tiny = Tiny(tmp_path, DISGUISED[name], (3, 3))
    points = [random(9, seed)[:, 0] * scale for seed in (1, 2) for scale in (1, 9)]
    points += [torch.full((9,), value, dtype=torch.float64) for value in (0.0, 1e-3, 1 + 1e-5, 10.0)]
    slopes = [slope for point in points if math.isfinite(slope := tiny.slope(point))]
    assert max(slopes) <= tiny.bound() * (1 + DIFFERENCES)


@pytest.mark.parametrize("name", WITHOUT)
def test_what_has_no_constant_is_unbounded_for_a_reason(name, tmp_path):
    steps, reason = WITHOUT[name]
    if name == "weights":
        steps, reason = [one("Conv", "x")], "its weight depends on the input"
    tiny = Tiny(tmp_path, steps, (3, 3) if name not in ("weights",) else (1, 1, 3), 21)
    assert tiny.bound() == math.inf
    assert any(reason in found for found in tiny.reasons()), tiny.reasons()


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("name", ["pads", "strides", "dilations"])
def test_large_geometry_is_not_laid_out(op, name, tmp_path):
    amounts = [2**40] * (2 if name == "pads" else 1)
    tiny = Tiny(tmp_path, [one(op, random(1, 1, 2), **{name: amounts})], (1, 1, 3))
    assert tiny.bound() == math.inf or (op, name) == ("Conv", "strides")


def test_many_groups_are_not_too_large(tmp_path):
    step = one("Conv", random(512, 1, 3).float(), group=512)
    graph = Tiny(tmp_path, [step], (1, 512, 2**12), kind=TensorProto.FLOAT).graph
    assert isinstance(graph.nodes[graph.outputs["y"]].operation, LinearMap)


def test_second_outputs_are_not_followed(tmp_path):
    step = [one("MaxPool", kernel_shape=[2])]
    tiny = Tiny(tmp_path, step, (1, 1, 4), outputs=("y", "z"))
    assert tiny.bound("y") < math.inf == tiny.bound("z")
    assert tiny.reasons() == ["MaxPool: its output 2 is not followed"]


def test_casts_to_a_few_bits_are_unbounded(tmp_path):
    for kind in (TensorProto.FLOAT8E4M3FN, TensorProto.INT64, TensorProto.BOOL):
        assert "jumps" in Tiny(tmp_path, [one("Cast", to=kind)], (3,)).reasons()[0]


def test_integers_may_only_move_until_they_are_real(tmp_path):
    steps = [one("Transpose"), ("Cast", ("v0",), {"to": 11}), ("Relu", ("v1",), {})]
    assert Tiny(tmp_path, steps, (2, 3), kind=TensorProto.UINT8).bound() == 1
    tiny = Tiny(tmp_path, [one("Transpose"), ("Add", ("v0", "v0"), {})], (2, 3), kind=TensorProto.UINT8)
    assert tiny.reasons() == ["Add: integers that depend on the input may wrap around"]


def test_recurrent_layers_have_shapes_but_no_constant(tmp_path):
    weights = random(1, 12, 3), random(1, 12, 4)
    tiny = Tiny(tmp_path, [("GRU", ("x", *weights), {"hidden_size": 4})], (5, 2, 3), outputs=("y", "z"))
    assert [tiny.shape_of(name) for name in "yz"] == [(5, 1, 2, 4), (1, 2, 4)]
    assert tiny.reasons() == ["GRU: a recurrent layer"] * 2


def test_sizes_that_a_model_computes_are_constants(tmp_path):
    steps = [
        one("Shape"),
        ("Gather", ("v0", torch.tensor(1)), {}),
        ("Mul", ("v1", torch.tensor(3)), {}),
        ("Div", ("v2", torch.tensor(-2)), {}),  # truncates: -9 / 2 = -4
        ("Neg", ("v3",), {}),
        ("Mod", ("v4", torch.tensor(3)), {}),  # 1
        ("Add", ("v5", torch.tensor(1)), {}),
        ("Unsqueeze", ("v6", tensor(0)), {}),
        ("Range", (torch.tensor(3), torch.tensor(0), torch.tensor(-3)), {}),
        ("Cast", ("v8",), {"to": 1}),
        ("Cast", ("v9",), {"to": 7}),
        ("Concat", ("v7", "v10"), {"axis": 0}),
        ("ConstantOfShape", (tensor(2),), {"value": tensor(-1)}),
        ("Equal", ("v11", "v12"), {}),
        ("Where", ("v13", "v12", "v11"), {}),
        ("ScatterND", ("v14", tensor([0]), tensor(2)), {}),
        ("Slice", ("v15", tensor(-1), tensor(-9), tensor(0), tensor(-1)), {}),
        ("ReduceProd", ("v16",), {"keepdims": 1}),
        ("Max", ("v17", tensor(1)), {}),
        ("Expand", ("v18", tensor(1)), {}),
        one("Reshape", "v19"),
    ]
    tiny = Tiny(tmp_path, steps, (2, 3))
    assert tiny.shape_of() == (6,)
    assert tiny.bound() == 1


def test_ranges_of_floats_are_known_where_no_runtime_rounds(tmp_path):
    for values, count in (((0.5, 3.0, 0.5), 5), ((0.0, 1.0, 0.1), None), ((0.0, 2.0**25, 2.0**24), None)):
        steps = [("Range", tuple(torch.tensor(value) for value in values), {}), ("Shape", ("v0",), {})]
        tiny = Tiny(tmp_path, [*steps, one("Expand", "v1")], (1,))
        if count is None:
            assert "depends on how a runtime rounds" in tiny.reasons()[0]
        else:
            assert tiny.shape_of() == (count,)


def test_strides_that_leave_out_places_are_not_padded_to_the_same_size(tmp_path):
    tiny = Tiny(tmp_path, [one("AveragePool", kernel_shape=[1], strides=[6], auto_pad="SAME_UPPER")], (1, 1, 9))
    assert "leave out places" in tiny.reasons()[0]


def test_the_smallest_integer_divided_by_minus_one_does_not_stop_the_process(tmp_path):
    for op in ("Div", "Mod"):
        steps = [(op, (tensor(-(2**63), 7), tensor(-1, -1)), {}), one("Gather", "v0")]
        assert Tiny(tmp_path, steps, (3,)).reasons() or op == "Mod"


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
