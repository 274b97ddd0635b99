"""What is said where a model has no constant: the cause, and what can be done about it."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramcert
from auditing_networks import Function
from gramcert import nn as gnn
from gramcert.certification.accuracy import certify

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's older functions and its exporters

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402


def reasons(model, *shape):
    """Why a model is unbounded."""
    found = gramcert.audit(model, shape)
    assert found.upper == math.inf
    return found.reasons


def exported(model, *shape):
    return torch.export.export(model, (torch.zeros(1, *shape),))


# Training mode

TRAINING = [
    (nn.Dropout(), (4,), "0: dropout: in training mode it is random; "),
    (nn.AlphaDropout(), (4,), "0: alpha_dropout: in training mode it is random; "),
    (nn.RReLU(), (4,), "0: rrelu: in training mode its slope is random; "),
]


@pytest.mark.parametrize(("layer", "shape", "reason"), TRAINING)
def test_training_mode_is_left_in_a_module_and_exported_again_from_a_file(layer, shape, reason, tmp_path):
    model = nn.Sequential(layer)
    assert reasons(model, *shape) == (f"{reason}call .eval() first",)
    torch.export.save(exported(model, *shape), tmp_path / "model.pt2")
    for source in (exported(model, *shape), tmp_path / "model.pt2"):
        assert reasons(source, *shape) == (f"{reason}export it again from evaluation mode",)
    assert gramcert.audit(nn.Sequential(layer).eval(), shape).upper < math.inf


def test_batch_normalisation_in_training_mode():
    text = "batch normalisation in training mode mixes the examples of a batch; "
    model = nn.Sequential(nn.BatchNorm1d(4))
    assert reasons(model, 4, 5) == (f"0: {text}call .eval() first",)
    constant_statistics = Function(lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True))
    assert reasons(constant_statistics, 4, 5) == (f"batch_norm: {text}call .eval() first",)
    file = exported(constant_statistics, 4, 5)
    assert reasons(file, 4, 5) == (f"batch_norm: {text}export it again from evaluation mode",)


@pytest.mark.parametrize("training", [False, True])
def test_batch_normalisation_without_statistics_is_not_told_to_change_its_mode(training):
    model = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)).train(training)
    (reason,) = reasons(model, 4, 5)
    assert reason.startswith("0: ")
    assert "keeps no running statistics (track_running_stats=False) normalises by the batch itself" in reason
    assert ".eval()" not in reason


def test_instance_normalisation_that_changes_its_statistics():
    layer = nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True))
    text = "0: instance normalisation in training mode changes its running statistics; call .eval() first"
    assert reasons(layer, 4, 5) == (text,)
    assert gramcert.audit(layer.eval(), (4, 5)).upper < math.inf


# Layers whose weight or code is hidden

HIDING = [
    (nn.utils.weight_norm, "weight_norm", nn.utils.remove_weight_norm, nn.utils.parametrizations.weight_norm),
    (nn.utils.spectral_norm, "spectral_norm", nn.utils.remove_spectral_norm, nn.utils.parametrizations.spectral_norm),
]


@pytest.mark.parametrize(("hide", "name", "remove", "instead"), HIDING)
def test_older_norms_of_torch_are_told_what_to_do(hide, name, remove, instead):
    model = nn.Sequential(hide(nn.Linear(4, 3))).eval()
    text = re.escape(
        f"(Linear): torch.nn.utils.{name} makes its weight in a hook; call torch.nn.utils.remove_{name}(layer) first, "
        f"or use torch.nn.utils.parametrizations.{name} instead"
    )
    for call in (
        lambda: gramcert.audit(model, (4,)),
        lambda: gramcert.lipschitz_bound(model),
        lambda: gramcert.spectral_norm(model[0]),
        lambda: certify(model, [(torch.zeros(1, 4), torch.zeros(1).long())], [0.1]),
    ):
        with pytest.raises(TypeError, match=text):
            call()
    model(torch.zeros(1, 4))
    remove(model[0])  # what the text says helps
    assert gramcert.audit(model, (4,)).upper < math.inf
    assert gramcert.audit(nn.Sequential(instead(nn.Linear(4, 3))).eval(), (4,)).upper < math.inf


@pytest.mark.parametrize("script", [torch.jit.script, lambda model: torch.jit.trace(model, torch.zeros(1, 4))])
def test_torchscript_is_refused_by_name(script, tmp_path):
    model = script(nn.Sequential(nn.Linear(4, 3)).eval())
    for call in (
        lambda: gramcert.audit(model, (4,)),
        lambda: gramcert.audit(nn.Sequential(model), (4,)),
        lambda: gramcert.lipschitz_bound(model),
        lambda: gramcert.nn.export(model),
        lambda: certify(model, [(torch.zeros(1, 4), torch.zeros(1).long())], [0.1]),
    ):
        with pytest.raises(TypeError, match=r"\(Sequential\): TorchScript is not read; give the module"):
            call()
    torch.jit.save(model, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"model.pt: .* it is TorchScript; save the state_dict of its module, or that"):
        gramcert.audit(tmp_path / "model.pt", (4,))


# Choices


def chosen(x):
    return x[x > 0].sum()


def test_masks_that_depend_on_the_input():
    assert reasons(Function(chosen), 4)[-1] == "index: a choice of entries that depends on the input"
    selected = Function(lambda x: torch.masked_select(x, x > 0))
    assert reasons(selected, 4)[-1] == "masked_select: a choice of entries that depends on the input"
    written = Function(lambda x: torch.index_put(x, (x > 0,), torch.tensor(0.0)))
    assert reasons(written, 4)[-1] == "index_put: a choice of entries that depends on the input"


@pytest.mark.parametrize("mask", [[True, False, True, True], [False] * 4])
def test_constant_masks_have_finite_constants(mask):
    model = Function(lambda x, mask: 2 * x[:, mask], mask=torch.tensor(mask))
    found = gramcert.audit(model, (4,))
    expected = 2.0 if any(mask) else 0.0
    assert expected <= found.upper <= expected * (1 + torch.finfo(torch.float32).eps)


def test_constant_masks_of_several_axes():
    mask = torch.tensor([[True, False, True], [False, False, True]])
    weight = torch.tensor([[1.0, 2.0, 3.0]])
    model = Function(lambda x, mask, weight: x[:, mask] @ weight.mT, mask=mask, weight=weight)
    found = gramcert.audit(model, (2, 3))
    expected = math.sqrt(14)
    assert expected * (1 - 1e-6) <= found.upper <= expected * (1 + 2e-3)


def test_tables_that_are_read_at_indices_of_the_input():
    table = Function(lambda x, table: table[x.argmax(1)], table=torch.randn(4, 3))
    assert reasons(table, 4)[-1] == "index: an embedding: indices that depend on the input"
    embedded = Function(lambda x, table: F.embedding(x.argmax(1), table), table=torch.randn(4, 3))
    assert reasons(embedded, 4)[-1] == "embedding: an embedding: indices that depend on the input"
    with pytest.raises(ValueError, match="an embedding takes indices, and a constant is about real numbers"):
        gramcert.audit(nn.Sequential(nn.Embedding(4, 3)), (4,))


def test_branches_of_python_code():
    model = Function(lambda x: x if x.sum() > 0 else -x)
    (reason,) = reasons(model, 4)
    assert reason.startswith("Function: its code branches on values that depend on the input, in a way that torch")


# ONNX


def written(folder, nodes, kind=TensorProto.FLOAT, shape=(1, 4), **tensors):
    """A file with the input x and the output y."""
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value.numpy(), name) for name, value in tensors.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=8)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def branch(name, factor, constant="c", operands=("x",)):
    """One side of an ``If`` that gives the input of the model times a constant of its own."""
    result = [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)]
    tensors = [numpy_helper.from_array(torch.tensor([factor]).numpy(), constant)]
    return helper.make_graph([helper.make_node("Mul", [*operands, constant], [f"{name}_y"])], name, [], result, tensors)


def test_embeddings_in_onnx(tmp_path):
    nodes = [helper.make_node("Gather", ["table", "x"], ["y"], name="lookup")]
    path = written(tmp_path, nodes, TensorProto.INT64, table=torch.randn(5, 3))
    assert reasons(path, 4) == ("lookup: Gather: an embedding: indices that depend on the input",)


def test_indices_of_the_input_in_onnx(tmp_path):
    nodes = [
        helper.make_node("ArgMax", ["x"], ["i"], name="largest", axis=1),
        helper.make_node("GatherElements", ["x", "i"], ["y"], name="chosen", axis=1),
    ]
    assert reasons(written(tmp_path, nodes), 4)[0] == "largest: ArgMax: an index jumps"


@pytest.mark.parametrize(("condition", "factor"), [(True, 3.0), (False, 5.0)])
def test_a_constant_condition_takes_its_branch(tmp_path, condition, factor):
    sides = {"then_branch": branch("then", 3.0), "else_branch": branch("else", 5.0)}
    nodes = [helper.make_node("If", ["flag"], ["z"], name="choose", **sides), helper.make_node("Relu", ["z"], ["y"])]
    path = written(tmp_path, nodes, flag=torch.tensor(condition))
    found = gramcert.audit(path, (4,))
    assert factor <= found.upper <= factor * (1 + torch.finfo(torch.float32).eps)
    assert gramcert.verify(found.certificate, path).holds


def test_a_condition_about_shapes_is_constant(tmp_path):
    """As the older exporter of torch writes ``squeeze``."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["size"]),
        helper.make_node("Equal", ["size", "four"], ["flag"]),
        helper.make_node(
            "If", ["flag"], ["y"], name="choose", then_branch=branch("then", 3.0), else_branch=branch("else", 5.0)
        ),
    ]
    path = written(tmp_path, nodes, one=torch.tensor(1), four=torch.tensor(4))
    assert 3 <= gramcert.audit(path, (4,)).upper < 3.001


def test_a_condition_that_depends_on_the_input(tmp_path):
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["flag"], name="compare"),
        helper.make_node(
            "If", ["flag"], ["y"], name="choose", then_branch=branch("then", 3.0), else_branch=branch("else", 5.0)
        ),
    ]
    found = reasons(written(tmp_path, nodes, zero=torch.tensor(0.0)), 4)
    assert "choose: If: control flow that depends on the input" in found


AGAIN = helper.make_graph(
    [helper.make_node("Relu", ["x"], ["x"])],
    "then",
    [],
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)],
)


@pytest.mark.parametrize(
    ("side", "reason"),
    [
        (branch("then", 3.0, constant="x", operands=()), "control flow whose branches are not as the format has them"),
        (branch("then", 3.0, operands=("nothing",)), "a branch that uses a value before it is made"),
        (AGAIN, "a branch that makes a value twice"),
    ],
)
def test_branches_that_are_wrong_are_unbounded(tmp_path, side, reason):
    nodes = [helper.make_node("If", ["flag"], ["y"], name="choose", then_branch=side, else_branch=branch("else", 5.0))]
    assert reasons(written(tmp_path, nodes, flag=torch.tensor(True)), 4) == (f"choose: If: {reason}",)


def test_names_of_a_branch_are_its_own(tmp_path):
    """A value that only the branch makes is not there outside of it: its name is free for another."""
    inner = helper.make_graph(
        [helper.make_node("Mul", ["x", "three"], ["t"]), helper.make_node("Relu", ["t"], ["then_y"])],
        "then",
        [],
        [helper.make_tensor_value_info("then_y", TensorProto.FLOAT, None)],
    )
    nodes = [
        helper.make_node("If", ["flag"], ["z"], name="choose", then_branch=inner, else_branch=branch("else", 5.0)),
        helper.make_node("Mul", ["x", "seven"], ["t"]),
        helper.make_node("Add", ["z", "t"], ["y"]),
    ]
    path = written(tmp_path, nodes, flag=torch.tensor(True), three=torch.tensor(3.0), seven=torch.tensor(7.0))
    assert 10 <= gramcert.audit(path, (4,)).upper < 10.01


def test_loops_in_onnx_are_not_said_to_depend_on_data(tmp_path):
    body = helper.make_graph(
        [helper.make_node("Identity", ["on"], ["again"]), helper.make_node("Relu", ["v"], ["w"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("again", TensorProto.BOOL, []),
            helper.make_tensor_value_info("w", TensorProto.FLOAT, None),
        ],
    )
    nodes = [helper.make_node("Loop", ["count", "", "x"], ["y"], name="turn", body=body)]
    assert reasons(written(tmp_path, nodes, count=torch.tensor(3)), 4) == ("turn: Loop: a loop, which is not followed",)


# Layers of this package in torch's exporters

RESCALED = [gnn.SRConv2d(3, 4, 3, padding=1), gnn.SRConv2d(3, 4, 3, form="frequency"), gnn.SLLConv2d(3, 4, 3)]
HINT = r"its weight is computed anew in each call, .*use gramcert.nn.export\(model\) first"


@pytest.mark.parametrize("layer", RESCALED)
def test_what_cannot_record_rescaled_layers_says_what_to_do(layer, tmp_path):
    model, example = nn.Sequential(layer).eval(), torch.ones(1, 3, 6, 6)
    with pytest.raises(RuntimeError, match=HINT):
        torch.jit.trace(model, example)
    with pytest.raises(RuntimeError, match=HINT):
        torch.onnx.export(model, (example,), tmp_path / "model.onnx", dynamo=False)
    with pytest.raises(torch.onnx.OnnxExporterError, match=HINT):
        torch.onnx.export(model, (example,), dynamo=True, verbose=False)
    model(example)  # and nothing stays behind
    program = torch.onnx.export(gnn.export(model), (example,), dynamo=True, optimize=False, verbose=False)
    program.save(tmp_path / "plain.onnx", external_data=False)
    assert gramcert.audit(tmp_path / "plain.onnx", (3, 6, 6)).upper < 1.01


@pytest.mark.parametrize("layer", RESCALED)
def test_a_program_that_rescales_anew_is_unbounded_and_says_what_to_do(layer):
    model, example = nn.Sequential(layer).eval(), torch.ones(1, 3, 6, 6)
    program = torch.export.export(model, (example,))  # which is right, and slow
    tolerance = 64 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(program.module()(example), model(example), rtol=tolerance, atol=tolerance)
    (reason,) = reasons(program, 3, 6, 6)
    assert "weights go into wrap_with_autocast, a region of code that is not followed" in reason
    assert "gramcert.nn.export(model) makes plain ones before torch.export" in reason
    plain = torch.export.export(gnn.export(model), (example,))
    assert gramcert.audit(plain, (3, 6, 6)).upper < 1.01


def test_unbounded_models_are_told_all_reasons_before_anything_is_measured():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.big, self.drop = nn.Conv2d(3, 64, 7), nn.Dropout()

        def forward(self, x):
            y = self.big(x)
            return {"a": torch.exp(y), "b": self.drop(y), "c": y * y}

    told = []
    found = gramcert.audit(Several(), (3, 32, 32), report=lambda *state: told.append(state))
    assert [total for _, total, _ in told] == [0]
    assert len(found.reasons) == 3
    assert found.upper == math.inf
