"""Activations, softmax and normalisations of ONNX: no steeper than their constant, and nearly so somewhere."""

import math

import pytest
import torch
import torch.nn.functional as F

from tiny_onnx import IMAGE, ROUNDING, Tiny, check_function, half, number, one, random, same_matrix, tensor

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
    truth = F.gelu if (op, attributes) == ("Gelu", {}) else None  # ONNX's own reference rounds erf to float32
    check_function(Tiny(tmp_path, [one(op, *inputs, **attributes)], (3,), 22, truth=truth), torch.full((3,), point))


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


def softmax_of_rows(x):
    """Where ONNX's own reference is wrong."""
    return torch.softmax(x.flatten(1), 1)


@pytest.mark.parametrize("name", VECTORS)
def test_functions_of_several_entries(name, tmp_path):
    step, shape, opset, point = VECTORS[name]
    tiny = Tiny(tmp_path, [step], shape, opset, truth=softmax_of_rows if name == "softmax rows" else None)
    # The layers with scales: the projection on what is centred does not meet the largest of them.
    check_function(tiny, point, 0.6 if "norm" in name else 0.999)


@pytest.mark.parametrize(("opset", "options"), [(9, {}), (21, {"epsilon": 1e-3})])
def test_batch_normalisation(opset, options, tmp_path):
    """Against torch: ONNX's own reference of version 9 is wrong."""
    factors, biases, means, variances = random(2), random(2) + 1, random(2) + 2, random(2).square()
    epsilon = float(torch.tensor(options.get("epsilon", 1e-5)))

    def truth(x):
        return F.batch_norm(x, means, variances, factors, biases, eps=epsilon)

    step = one("BatchNormalization", factors, biases, means, variances, **options)
    same_matrix(Tiny(tmp_path, [step], IMAGE, opset, truth=truth))


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
    check_function(Tiny(tmp_path, steps, (3,), truth=F.gelu if name == "gelu" else None), torch.full((3,), point))


def test_the_pattern_of_l2_pooling_has_a_constant(tmp_path):
    steps = [one("Pow", number(2.0)), ("ReduceSum", ("v0", tensor(1)), {}), ("Sqrt", ("v1",), {})]
    check_function(Tiny(tmp_path, steps, (2, 3)), FAR)


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


def test_recurrent_layers_have_shapes_but_no_constant(tmp_path):
    weights = random(1, 12, 3), random(1, 12, 4)
    tiny = Tiny(tmp_path, [("GRU", ("x", *weights), {"hidden_size": 4})], (5, 2, 3), outputs=("y", "z"))
    assert [tiny.shape_of(name) for name in "yz"] == [(5, 1, 2, 4), (1, 2, 4)]
    assert tiny.reasons() == ["GRU: a recurrent layer"] * 2
