"""What an audit says that its constant rests on."""

import copy

import pytest
import torch
from torch import nn

import gramcert
from auditing_networks import Function
from gramcert.auditing.certificate import seal

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.export


def rounded_to(audit):
    return [
        line.split(":")[0].removeprefix("values are rounded to ") for line in audit.assumptions if "rounded" in line
    ]


TYPES = {
    "half": (lambda: Function(lambda x: x.half().float()), ["float16, first in to"]),
    "bfloat16": (lambda: Function(lambda x: x.to(torch.bfloat16)), ["bfloat16, first in to"]),
    "both": (lambda: Function(lambda x: x.half().bfloat16()), ["bfloat16, first in to_1", "float16, first in to"]),
    "as another": (lambda: Function(lambda x, h: x.type_as(h), h=torch.zeros(1).double()), []),
    "softmax": (lambda: Function(lambda x: x.softmax(-1, torch.half)), ["float16, first in softmax"]),
    "half model": (lambda: nn.Sequential(nn.Linear(4, 4)).half(), ["float16, first in input"]),
    "float64 model": (
        lambda: Function(lambda x, w: (x * w).float(), w=torch.ones(4).double()),
        ["float32, first in to"],
    ),
    "usual": (lambda: Function(lambda x: x.double().float()), []),
    "not needed": (lambda: Function(lambda x: (x.half(), x)[1]), []),
}


@pytest.mark.parametrize("name", TYPES)
def test_rounding_to_narrow_types_is_said(name, tmp_path):
    build, expected = TYPES[name]
    model = build().eval()
    found = gramcert.audit(model, (4,))
    assert found.reasons == ()
    assert rounded_to(found) == expected
    dtype = next((tensor.dtype for tensor in model.state_dict().values()), torch.float32)
    torch.export.save(torch.export.export(model, (torch.zeros(1, 4, dtype=dtype),)), tmp_path / "model.pt2")
    in_file = rounded_to(gramcert.audit(tmp_path / "model.pt2", (4,)))
    assert [line.split(",")[0] for line in in_file] == [line.split(",")[0] for line in expected]


def test_casts_in_onnx_files_are_said(tmp_path):
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper

    for kind, name in ((TensorProto.FLOAT16, "float16"), (TensorProto.BFLOAT16, "bfloat16"), (TensorProto.DOUBLE, "")):
        nodes = [
            helper.make_node("Cast", ["x"], ["v"], name="narrow", to=kind),
            helper.make_node("Cast", ["v"], ["y"], name="wide", to=TensorProto.FLOAT),
        ]
        ends = [[helper.make_tensor_value_info(end, TensorProto.FLOAT, [1, 3])] for end in ("x", "y")]
        model = helper.make_model(
            helper.make_graph(nodes, "casts", *ends), opset_imports=[helper.make_opsetid("", 21)], ir_version=8
        )
        onnx.save(model, tmp_path / "casts.onnx")
        found = gramcert.audit(tmp_path / "casts.onnx", (3,))
        assert (found.upper, rounded_to(found)) == (1.0, [f"{name}, first in narrow"] if name else [])


def test_a_certificate_without_them_does_not_hold():
    model = Function(lambda x: x.half())
    certificate = copy.deepcopy(gramcert.audit(model, (4,)).certificate)
    assert gramcert.verify(certificate, model).holds
    certificate["assumptions"].pop()
    certificate["seal"] = seal(certificate)
    problems = gramcert.verify(certificate, model).problems
    assert any(problem.startswith("assumptions") for problem in problems)
