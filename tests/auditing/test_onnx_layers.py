"""Layers with weights, sums and products of ONNX, against its own reference."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

from gramcert.operators.linear import LinearMap
from reference import sigma
from tiny_onnx import IMAGE, ROUNDING, TensorProto, Tiny, one, random, same_matrix, tensor

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
    "dropout": (one("Dropout"), (3,)),
    "where": (("Where", (tensor(True, False, True), "x", random(2, 3)), {}), (3,)),
    "where twice": (("Where", (tensor(True, False, True), "x", "x"), {}), (2, 3)),
    "concat": (("Concat", ("x", random(1, 2), "x"), {"axis": 0}), (3, 2)),
    "scatter nd": (("ScatterND", (random(4, 2), tensor([3], [1]), "x"), {}), (2, 2)),
    "scatter nd into": (("ScatterND", ("x", tensor([3, 1], [0, 0]), random(2)), {}), (4, 2)),
    "pad": (one("Pad", tensor(0, 1, -1, 2), random(1)[0]), (3, 2)),
    "pad reflect": (one("Pad", tensor(2, 1), mode="reflect"), (4,)),
    "pad edge": (one("Pad", tensor(2, 1), torch.tensor(0.0, dtype=torch.float64), tensor(-1), mode="edge"), (2, 3)),
    "pad wrap": (one("Pad", tensor(0, 2, 0, 1), mode="wrap"), (2, 3)),
}
# Where ONNX's own reference is incomplete or wrong.
TRUTH = {
    "transposed shape": lambda x: F.conv_transpose2d(x, random(1, 1, 3, 3), stride=2, padding=1),
    "pad": lambda x: F.pad(x, (1, 2, 0, -1), value=float(random(1))),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear(name, tmp_path):
    step, shape = LINEAR[name]
    same_matrix(Tiny(tmp_path, [step], shape, truth=TRUTH.get(name)))


def test_weights_that_depend_on_the_input_have_no_constant(tmp_path):
    tiny = Tiny(tmp_path, [one("Conv", "x")], (1, 1, 3))
    assert tiny.bound() == math.inf
    assert tiny.reasons() == ["Conv: its weight depends on the input"]


# Means of other lines than those they are subtracted from.
MEANS = {
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


@pytest.mark.parametrize("name", MEANS)
def test_means_that_do_not_centre(name, tmp_path):
    tiny = Tiny(tmp_path, MEANS[name], (3, 3))
    same_matrix(tiny)
    assert tiny.bound() == pytest.approx(2, rel=ROUNDING)


def test_pads_of_older_versions(tmp_path):
    same_matrix(Tiny(tmp_path, [one("Pad", pads=[0, 1, 0, 2], value=1.5)], (2, 3), 10))


def test_scattering_one_value_into_another_keeps_their_sizes(tmp_path):
    steps = [one("Slice", tensor(0), tensor(2)), ("ScatterND", ("x", tensor([3], [1]), "v0"), {})]
    tiny = Tiny(tmp_path, steps, (4,))
    truth = torch.stack([tiny(unit) for unit in torch.eye(4, dtype=torch.float64)], 1)
    assert float(sigma(truth)) == pytest.approx(tiny.bound(), rel=ROUNDING)


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("name", ["pads", "strides", "dilations"])
def test_large_geometry_is_not_laid_out(op, name, tmp_path):
    amounts = [2**40] * (2 if name == "pads" else 1)
    tiny = Tiny(tmp_path, [one(op, random(1, 1, 2), **{name: amounts})], (1, 1, 3))
    assert tiny.bound() == math.inf
    assert re.search("too large to be followed|expected sizes up to", tiny.reasons()[0])


def test_many_groups_are_not_too_large(tmp_path):
    step = one("Conv", random(512, 1, 3).float(), group=512)
    graph = Tiny(tmp_path, [step], (1, 512, 2**12), kind=TensorProto.FLOAT).graph
    assert isinstance(graph.nodes[graph.outputs["y"]].operation, LinearMap)
