"""Programs of torch.export as graphs: moves, outputs, types, and what has no constant for which reason."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramcert
from auditing_networks import ROUNDING, Function, check_linear, expect
from gramcert.auditing.aten import Translator
from gramcert.auditing.fixing import Passed
from gramcert.auditing.program import Call, Program, Ref
from gramcert.auditing.traced import traced
from gramcert.operators.graph import Unbounded
from reference import jacobian_norm

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.export

IMAGE = (4, 6, 6)
LINEAR = {
    "pixel shuffle": (lambda: nn.PixelShuffle(2), IMAGE),
    "pixel unshuffle": (lambda: nn.PixelUnshuffle(2), IMAGE),
    "channel shuffle": (lambda: nn.ChannelShuffle(2), IMAGE),
    "flatten": (lambda: nn.Flatten(), IMAGE),
    "dropout": (lambda: nn.Dropout(), IMAGE),
    "slice": (lambda: Function(lambda x: x[:, 1:, ::2]), IMAGE),
    "transpose": (lambda: Function(lambda x: x.transpose(1, 3).reshape(1, -1)), IMAGE),
    "expand": (lambda: Function(lambda x: x[:, :1].expand(-1, 5, -1, -1)), IMAGE),
    "repeat": (lambda: Function(lambda x: x.repeat(1, 1, 2, 3)), IMAGE),
    "roll": (lambda: Function(lambda x: torch.roll(x, 2, 2)), IMAGE),
    "chosen": (lambda: Function(lambda x, i: x[:, i], i=torch.tensor([0, 2, 2])), IMAGE),
}


@pytest.mark.parametrize("name", LINEAR)
def test_moves_are_measured_as_a_whole(name):
    check_linear(*LINEAR[name])


UNBOUNDED = {
    "attention": (nn.TransformerEncoderLayer(8, 2, 16), (3, 8), "attention: a product of values that both depend"),
    "product": (Function(lambda x: x * torch.relu(x)), (4,), "a product of two values"),
    "gate": (nn.GLU(1), (4,), "glu: a product of two values"),
    "hardshrink": (nn.Hardshrink(), (4,), "it jumps"),
    "threshold": (nn.Threshold(0.1, 20.0), (4,), "it jumps"),
    "exp": (Function(torch.exp), (4,), r"its slope e\^x is unbounded"),
    "square": (Function(lambda x: x**2), (4,), "its slope 2x is unbounded"),
    "root": (Function(lambda x: torch.sqrt(torch.relu(x))), (4,), "its slope is unbounded near 0"),
    "quotient": (Function(lambda x: x / x.norm()), (4,), "a quotient of two values"),
    "round": (Function(torch.round), (4,), "it jumps"),
    "softplus with a jump": (nn.Softplus(threshold=1.0), (4,), "it jumps at its threshold 1 with beta 1"),
    "softplus with a small beta": (nn.Softplus(beta=1e-3), (4,), "it jumps at its threshold 20 with beta 0.001"),
    "unknown operator": (Function(torch.special.i0), (4,), "no rule is known for this operator"),
    "variance": (Function(lambda x: x.var(1)), (4,), "its slope 2x is unbounded"),
    "similarity": (Function(lambda x: F.cosine_similarity(x, 2 * x)), (4,), "no rule is known for this operator"),
    "data-dependent kernel": (Function(lambda x: F.conv1d(x[:, None], x[:, None])), (4,), "its weight depends on the"),
    "choice": (Function(lambda x: torch.where(x > 0, x, 2 + x)), (4,), "a comparison jumps.*a choice that depends on"),
    "a weight from an unknown operator": (
        Function(lambda x, w: F.layer_norm(x, (4,), torch.special.i0(w)), w=torch.full((4,), 10.0)),
        (4,),
        "its weight is not known: special_i0: computed from constants by an operator that is not known",
    ),
    "a constant from an unknown operator": (
        Function(lambda x, c: torch.stack([x, torch.special.i0(c)]), c=torch.ones(1, 4)),
        (4,),
        "stack",
    ),
    "indices": (Function(lambda x: (x, 100.0 * x.max(1).indices)), (4,), "its further results are not followed"),
    "filled by what depends on the input": (
        Function(lambda x, m: x.masked_fill(m, x.sum()), m=torch.ones(4, dtype=torch.bool)),
        (4,),
        "its value depends on the input",
    ),
    "integers": (Function(lambda x: x.to(torch.int32).to(x.dtype)), (4,), "rounding to int32 jumps"),
    "type of integers": (
        Function(lambda x, i: x.type_as(i) * 1.0, i=torch.zeros(1, dtype=torch.int64)),
        (4,),
        "rounding to int64 jumps",
    ),
    "sums of integers": (Function(lambda x: x.sum(1, dtype=torch.int64) * 1.0), (4,), "rounding to int64 jumps"),
    "bits of integers": (Function(lambda x: x.view(torch.int32) * 1.0), (4,), "bits that are read as another type"),
    "type of a comparison": (Function(lambda x: x.type_as(x > 0) * 100.0), (4,), "a comparison jumps"),
    "type of an index": (Function(lambda x: x.type_as(x.argmax(1)) * 1.0), (4,), "an index jumps"),
    "length of a number": (Function(lambda x: torch.linalg.vector_norm(x.sum(), dim=0)), (4,), "linalg_vector_norm"),
    "mean of nothing": (Function(lambda x: x[:, :0].mean(1)), (4,), "division by zero"),
    "an epsilon of almost nothing": (nn.LayerNorm(4, eps=5e-324).double(), (4,), "layer_norm"),
    "control flow": (Function(lambda x: x if x.sum() > 0 else -x), (4,), "that torch.export cannot follow"),
    "weights that are not finite": (
        Function(lambda x, w: x @ w.T, w=torch.tensor([[1.0, math.nan], [0.0, 1.0]])),
        (2,),
        "not finite",
    ),
    "large integers": (
        Function(lambda x, c: x * c, c=torch.tensor([2**53 + 1, 1], dtype=torch.int64)),
        (2,),
        "too large for float64",
    ),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_what_has_no_constant_is_unbounded_with_a_reason(name):
    model, shape, reason = UNBOUNDED[name]
    expect(gramcert.audit(model.eval(), shape), reason)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.BatchNorm1d(4), "batch normalisation in training mode mixes the examples of a batch; call .eval"),
        (nn.Dropout(), "in training mode it is random"),
    ],
    ids=["batch norm", "dropout"],
)
def test_layers_in_training_mode_are_unbounded(model, reason):
    expect(gramcert.audit(model.train(), (4,)), reason)
    expect(gramcert.audit(model.eval(), (4,)), 1.0, 1e-5)


BOUNDED = {
    "the same output twice": (Function(lambda x: (torch.relu(x),) * 2), math.sqrt(2)),
    "the input and what is made of it": (Function(lambda x: [x, torch.relu(x), x]), math.sqrt(3)),
    "an output that is nothing": (Function(lambda x: (x, None)), 1.0),
    "an output that is a number": (Function(lambda x: (x, 3.0)), 1.0),
    "an input that may be left out": (Function(lambda x, y=None: x if y is None else x + y), 1.0),
    "where that repeats": (
        Function(lambda x, m, c: torch.where(m, x, c), m=torch.ones(4, dtype=torch.bool), c=torch.zeros(5, 4)),
        math.sqrt(5),
    ),
    "clamp that repeats": (Function(lambda x, c: torch.clamp(x, min=c), c=torch.full((5, 4), -99.0)), math.sqrt(5)),
    "integers": (Function(lambda x, c: x * c, c=torch.tensor([3, 1, -2, 0])), 3.0),
    "no outputs": (Function(lambda x, w: F.linear(x, w), w=torch.zeros(0, 4)), 0.0),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_constants_are_reached(name):
    model, constant = BOUNDED[name]
    found = gramcert.audit(model, (4,))
    expect(found, constant, ROUNDING)

    def outputs(x):
        result = model(x)
        parts = result if isinstance(result, (tuple, list)) else [result]
        return torch.cat([part.flatten() for part in parts if isinstance(part, torch.Tensor)])

    if constant:
        assert float(jacobian_norm(outputs, torch.ones(1, 4))) == pytest.approx(constant, rel=ROUNDING)


def test_a_sum_of_nothing_is_nothing():
    found = gramcert.audit(Function(lambda x: x[:, :0].sum(1)), (4,))
    assert found.reasons == ()
    assert 0 <= found.upper < torch.finfo(torch.float64).tiny * 100


def test_arguments_that_torch_would_ignore_are_not_used():
    calls = [
        Call("aten.mul.Tensor", {"self": Ref("x"), "other": 50.0}, ("y",), "y"),
        Call("aten.linear.default", {"self": Ref("x"), "input": Ref("y"), "weight": Ref("w")}, ("z",), "z"),
    ]
    program = Program({"x": (1, 4)}, {"w": torch.eye(4)}, calls, ("z",))
    graph = Translator(program).run({"x": (1, 4)})
    assert isinstance(graph.nodes[graph.outputs["z"]].operation, Unbounded)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: torch.clamp(x, min=torch.full((9, 4), -math.inf)), 3.0),
        (lambda x: (x[0] ** torch.ones(1, 1, 1)).mean(0), 1.0),
        (lambda x: torch.where(torch.tensor([True, False, True, True]), x, -math.inf).softmax(1), 0.5),
        (lambda x: F.pad(x, (2, -1), mode="circular"), "circular padding by a negative amount"),
    ],
    ids=["infinite limits", "an exponent", "a choice of nothing", "cropped circles"],
)
def test_shapes_and_limits_that_are_easily_forgotten(function, expected):
    expect(gramcert.audit(Function(function), (4,)), expected)


def test_a_shape_that_the_program_does_not_say_is_not_believed():
    model = Function(lambda x: 2 * x).eval()
    program = traced(model, Passed.to("test", model, torch.zeros(1, 4), {}))
    told = dataclasses.replace(program, shapes=dict.fromkeys(program.shapes, (3, 4)))
    nodes = Translator(told).run({next(iter(told.inputs)): (1, 4)}).nodes.values()
    assert any("where the program says (3, 4)" in getattr(node.operation, "reason", "") for node in nodes)
