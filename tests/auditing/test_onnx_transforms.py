"""Linear operators of ONNX against its reference; a finite constant is expected of every LINEAR."""

import math

import pytest
import torch

import gramcert

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

TOL = 1e-3
ROUNDING = 1e4 * torch.finfo(torch.float64).eps


def random(*shape):
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def written(path, nodes, shape, constants, *, opset=20, told=(), kind=TensorProto.DOUBLE):
    """A model with the input x and the output y."""
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(value.numpy(), name) for name, value in constants.items()],
        value_info=[helper.make_tensor_value_info(name, kind, sizes) for name, sizes in told],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    return model


def single(op, *inputs, **attributes):
    """One node; tensors among its inputs become constants."""
    constants = {f"c{place}": value for place, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
    names = [value if isinstance(value, str) else f"c{place}" for place, value in enumerate(inputs)]
    return [helper.make_node(op, names, ["y"], **attributes)], constants


def jacobian(model, shape):
    """By the reference, on unit vectors."""
    reference, count = ReferenceEvaluator(model), math.prod(shape)
    at_zero, *others = (
        torch.tensor(reference.run(None, {"x": point.reshape(shape).numpy()})[0]).flatten()
        for point in (torch.zeros(count, dtype=torch.float64), *torch.eye(count, dtype=torch.float64))
    )
    return torch.stack([other - at_zero for other in others], 1)


def integers(*values):
    return torch.tensor(values, dtype=torch.int64)


SIGNAL = (2, 6, 1)
LINEAR = {
    "einsum": (single("Einsum", "x", random(4, 3), equation="bij,jk->bik"), (2, 3, 4)),
    "einsum of several": (single("Einsum", random(3, 2), "x", random(4), equation="ik,bij,j->bk"), (2, 3, 4)),
    "einsum for each": (single("Einsum", "x", random(3, 4, 2), equation="bij,ijk->bik"), (2, 3, 4)),
    "einsum with dots": (single("Einsum", "x", random(4, 3), equation="...j,jk->...k"), (2, 3, 4)),
    "diagonal": (single("Einsum", "x", equation="bii->bi"), (2, 3, 3)),
    "scatter": (single("ScatterElements", "x", integers([0, -1, 1]), random(1, 3), axis=1), (2, 4)),
    "scatter into a constant": (single("ScatterElements", random(2, 5), integers([4, 0], [1, 2]), "x", axis=1), (2, 2)),
    "scattered sums": (
        single("ScatterElements", random(2, 5), integers([4, 4, 1], [1, 1, 1]), "x", axis=1, reduction="add"),
        (2, 3),
    ),
    "scattered rows": (single("ScatterND", random(4, 3), integers([2], [0]), "x"), (2, 3)),
    "sums of rows": (single("ScatterND", random(4, 3), integers([2], [2]), "x", reduction="add"), (2, 3)),
    "centre": (single("CenterCropPad", "x", integers(3, 7)), (6, 4)),
    "centre of one axis": (single("CenterCropPad", "x", integers(4), axes=[-1]), (2, 7)),
    "col2im": (
        single("Col2Im", "x", integers(4, 5), integers(2, 3), strides=[2, 1], pads=[1, 0, 1, 0], dilations=[1, 1]),
        (1, 12, 9),
    ),
    "dft": (single("DFT", "x"), SIGNAL),
    "dft of complex numbers": (single("DFT", "x", "", integers(0).reshape(())), (5, 2, 2)),
    "half a dft": (single("DFT", "x", onesided=1), SIGNAL),
    "shorter dft": (single("DFT", "x", integers(4).reshape(())), SIGNAL),
    "inverse dft": (single("DFT", "x", inverse=1), (2, 5, 2)),
    "stft": (
        single("STFT", "x", integers(2).reshape(()), random(4), integers(4).reshape(())),
        (1, 10, 1),
    ),
    "stft of both sides": (
        single("STFT", "x", integers(3).reshape(()), random(4), integers(4).reshape(()), onesided=0),
        (2, 8, 1),
    ),
    "grid": (single("GridSample", "x", 2.4 * torch.rand(1, 3, 3, 2).double() - 1.2, mode="linear"), (1, 2, 3, 4)),
    "nearest of a grid": (
        single("GridSample", "x", random(1, 2, 3, 2) / 3, mode="nearest", padding_mode="border"),
        (1, 2, 3, 4),
    ),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_operator_has_its_true_norm(name, tmp_path):
    (nodes, constants), shape = LINEAR[name]
    path = tmp_path / "model.onnx"
    model = written(path, nodes, shape, constants)
    matrix = jacobian(model, shape)
    if name == "grid":  # whose weights the reference has to float32 only: torch's are compared with them, and used
        basis = torch.eye(matrix.shape[1], dtype=torch.float64).reshape(-1, *shape[1:])
        images = torch.nn.functional.grid_sample(
            basis, constants["c1"].expand(len(basis), -1, -1, -1), align_corners=False
        )
        exact = images.flatten(1).T
        assert (exact - matrix.reshape(exact.shape)).abs().max() <= 1e-6
        matrix = exact
    truth = float(torch.linalg.matrix_norm(matrix, 2))
    found = gramcert.audit(path, shape[1:], tol=TOL)
    assert found.reasons == ()
    assert truth <= found.upper * (1 + ROUNDING)
    assert found.upper <= truth * (1 + 1.1 * TOL)
    assert gramcert.verify(found.certificate, path).holds


def test_extrema_of_one_value_are_a_sorting(tmp_path):
    """Finite: 1."""
    nodes = [
        helper.make_node("ReduceMax", ["x", "axis"], ["a"]),
        helper.make_node("ReduceMin", ["x", "axis"], ["b"]),
        helper.make_node("Concat", ["a", "b"], ["y"], axis=1),
    ]
    path = tmp_path / "model.onnx"
    written(path, nodes, (2, 3, 4), {"axis": integers(1)})
    assert gramcert.audit(path, (3, 4)).upper == 1


def test_layer_norm_written_out(tmp_path):
    """Finite: 1/√ε, of what exporters make of x·(mean of x² + ε)^(-½)."""
    nodes = [
        helper.make_node("Pow", ["x", "two"], ["squares"]),
        helper.make_node("ReduceMean", ["squares", "axis"], ["mean"]),
        helper.make_node("Add", ["mean", "epsilon"], ["sum"]),
        helper.make_node("Sqrt", ["sum"], ["length"]),
        helper.make_node("Reciprocal", ["length"], ["inverse"]),
        helper.make_node("Mul", ["x", "inverse"], ["y"]),
    ]
    constants = {"two": torch.tensor(2.0).double(), "axis": integers(-1), "epsilon": torch.tensor(0.01).double()}
    path = tmp_path / "model.onnx"
    written(path, nodes, (2, 3), constants)
    assert gramcert.audit(path, (3,)).upper == pytest.approx(10, rel=1e-6)


@pytest.mark.parametrize("norm", ["ReduceL2", "ReduceL1"])
def test_weights_that_are_normalised_in_the_file_are_constants(norm, tmp_path):
    """Finite: the norm of the convolution by W/‖W‖."""
    nodes = [
        helper.make_node(norm, ["w", "axes"], ["size"]),
        helper.make_node("Div", ["w", "size"], ["weight"]),
        helper.make_node("Conv", ["x", "weight"], ["y"], kernel_shape=[3]),
    ]
    weight, shape = random(4, 3, 3), (1, 3, 8)
    path = tmp_path / "model.onnx"
    model = written(path, nodes, shape, {"w": weight, "axes": integers(1, 2)})
    truth = float(torch.linalg.matrix_norm(jacobian(model, shape), 2))
    assert truth <= gramcert.audit(path, shape[1:], tol=TOL).upper * (1 + ROUNDING) <= truth * (1 + 2 * TOL)


UNBOUNDED = {
    "two values": (single("Einsum", "x", "x", equation="bi,bj->bij"), "both depend on the input"),
    "largest of both": (
        single("ScatterElements", "x", integers([0], [1]), random(2, 1), axis=1, reduction="max"),
        "reduction max",
    ),
    "written twice": (single("ScatterElements", "x", integers([0, 0], [1, 2]), random(2, 2), axis=1), "twice"),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_other_uses_are_unbounded(name, tmp_path):
    (nodes, constants), reason = UNBOUNDED[name]
    path = tmp_path / "model.onnx"
    written(path, nodes, (2, 4), constants)
    found = gramcert.audit(path, (4,))
    assert found.upper == math.inf
    assert reason in " ".join(found.reasons)


def unknown_and_more(last):
    return [
        helper.make_node("NonMaxSuppression", ["x", "x"], ["lost"]),
        helper.make_node("Exp", ["lost"], ["steep"]),
        *last,
    ]


def test_reasons_behind_unknown_operators_are_found_where_the_file_tells_shapes(tmp_path):
    """Unbounded, with both reasons; without shapes only the first is known."""
    path, nodes = tmp_path / "model.onnx", unknown_and_more([helper.make_node("Relu", ["steep"], ["y"])])
    written(path, nodes, (2, 4), {}, told=[("lost", (2, 3))])
    told = gramcert.audit(path, (4,)).reasons
    written(path, nodes, (2, 4), {})
    untold = gramcert.audit(path, (4,)).reasons
    assert len(told) == 2
    assert "its slope e^x is unbounded" in told[1]
    assert untold == told[:1]


def test_no_told_shape_makes_a_model_bounded(tmp_path):
    """Unbounded: a slice that would be empty, and a factor 0 that would be the only one, if the shape were true."""
    path = tmp_path / "model.onnx"
    sliced = [
        helper.make_node("Slice", ["lost", "one", "two"], ["none"]),
        helper.make_node("ReduceSum", ["none"], ["sum"]),
        helper.make_node("Add", ["x", "sum"], ["y"]),
    ]
    written(path, unknown_and_more(sliced), (2, 4), {"one": integers(1), "two": integers(2)}, told=[("lost", (1,))])
    assert gramcert.audit(path, (4,), measure=True).upper == math.inf
    sized = [
        helper.make_node("Size", ["lost"], ["count"]),
        helper.make_node("Cast", ["count"], ["factor"], to=TensorProto.DOUBLE),
        helper.make_node("Mul", ["x", "factor"], ["y"]),
    ]
    written(path, unknown_and_more(sized), (2, 4), {}, told=[("lost", (1,))])
    assert gramcert.audit(path, (4,), measure=True).upper == math.inf
