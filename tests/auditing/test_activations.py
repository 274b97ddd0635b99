"""Every activation has one constant: as a module, as a .pt2 and as an ONNX file, after layers with a bias."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramcert
import gramcert.nn as gnn
from auditing_networks import TOL, Function
from gramcert.operators.elementwise import TABLE

pytest.importorskip("onnx")

CHANNELS = 6

# Parameters of torch's layers: what they need, and others than the defaults.
OPTIONS = {
    "hardtanh": [{}, {"min_val": -0.3, "max_val": 1.7}],
    "leaky_relu": [{}, {"negative_slope": 0.37}, {"negative_slope": -1.7}],
    "rrelu": [{}, {"lower": 1.5, "upper": 2.5}],
    "prelu": [{}, {"num_parameters": CHANNELS, "init": -2.0}],
    "threshold": [{"threshold": 0.0, "value": 0.0}, {"threshold": 0.8, "value": 0.8}, {"threshold": -2, "value": -2}],
    "elu": [{}, {"alpha": 1.3}, {"alpha": 0.3}],
    "celu": [{}, {"alpha": 0.3}, {"alpha": 2.3}],
    "softplus": [{}, {"beta": 3.0, "threshold": 25.0}, {"beta": 0.7}, {"beta": 2}],
    "softshrink": [{}, {"lambd": 0.8}, {"lambd": 0.0}, {"lambd": 1.0}],
    "gelu": [{}, {"approximate": "tanh"}],
    "hardshrink": [{}, {"lambd": 0.9}],
}
# Functions that have no layer, or another form of one.
WRITTEN = {
    "clamp": lambda x: x.clamp(-0.3, 1.7),
    "clamp below": lambda x: x.clamp(min=0.2),
    "clamp above": lambda x: x.clamp(max=0.2),
    "gated clamp": lambda x: x * (x + 2.5).clamp(-0.5, 4.0),
    "gelu by tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "erf": torch.erf,
    "abs": torch.abs,
    "sin": torch.sin,
    "cos": torch.cos,
    "atan": torch.atan,
    "asinh": torch.asinh,
    "written silu": lambda x: torch.sigmoid(1.7 * x) * x,
    "written gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "written mish": lambda x: x * torch.tanh(F.softplus(x)),
    "written log_sigmoid": lambda x: torch.log(torch.sigmoid(x)),
    "written log_sigmoid by softplus": lambda x: -F.softplus(-x),
    "written threshold": lambda x: torch.where(x > 0.8, x, 0.8),
    "written hardswish": lambda x: x * F.relu6(x + 3) / 6,
    "written softsign": lambda x: x / (1 + x.abs()),
}
# Of several entries.
OTHERS = {
    "softmax": nn.Softmax(1),
    "softmin": nn.Softmin(1),
    "log softmax": nn.LogSoftmax(1),
    "MaxMin": gnn.MaxMin(),
    "GroupSort": gnn.GroupSort(3),
    "Abs": gnn.Abs(),
    "Householder": gnn.Householder(CHANNELS),
}
WITHOUT = {
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "square": torch.square,
    "pow": lambda x: x**3,
    "tan": torch.tan,
    "sign": torch.sign,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "glu": nn.GLU(1),
    "threshold that jumps": nn.Threshold(0.5, 0.1),
    "softplus that jumps": nn.Softplus(1.0, 5.0),
}

# What torch's exporters of ONNX refuse.
NOT_WRITTEN = {
    True: ("rrelu",),
    False: ("asinh", "Householder", "threshold that", *(f"threshold {{'threshold': {at}" for at in (0.8, -2))),
}
# What the older one leaves out, so that the file is of another function: one that has a constant.
LEFT_OUT = {True: (), False: ("softplus that jumps",)}


def layers():
    """All that the table has, by a name of its own."""
    found = {}
    for name, function in TABLE.items():
        if function.module is not None:
            for options in OPTIONS.get(name, [{}]):
                found[f"{name} {options or ''}".strip()] = function.module(**options)
        elif name in WRITTEN or name in WITHOUT:
            found[name] = Function(WRITTEN.get(name) or WITHOUT[name])
    found |= {name: Function(function) for name, function in WRITTEN.items()} | OTHERS
    return found | {name: part if isinstance(part, nn.Module) else Function(part) for name, part in WITHOUT.items()}


def is_bounded(name):
    return name not in WITHOUT and not name.startswith("hardshrink")


class Side(nn.Module):
    """One layer with a bias, then each of many functions: an output for each of them."""

    def __init__(self, first, functions):
        super().__init__()
        self.first, self.functions = first, nn.ModuleList(functions)

    def forward(self, x):
        y = self.first(x)
        return tuple(function(y) for function in self.functions)


FIRST = {"convolution": (nn.Conv2d(2, CHANNELS, 3, padding=1), (2, 4, 4)), "linear": (nn.Linear(5, CHANNELS), (5,))}


def side(kind, functions):
    """With weights and a bias of some size."""
    layer, shape = FIRST[kind]
    torch.manual_seed(0)
    layer.reset_parameters()
    with torch.no_grad():
        layer.bias.add_(torch.linspace(-1, 1, CHANNELS))
    return gnn.export(Side(layer, functions).eval()), shape


def constants(model, shape, names):
    found = gramcert.audit(model, shape, search_seconds=0, measure=True).outputs
    return dict(zip(names, found.values(), strict=True))


def agree(one, other):
    return one == other or abs(one - other) <= TOL * min(one, other)


@pytest.fixture(scope="module", params=FIRST)
def modules(request):
    """All functions after one kind of layer: the module's constants."""
    found = layers()
    model, shape = side(request.param, found.values())
    return request.param, constants(model, shape, found)


def test_every_function_of_the_table_is_here():
    names = {name.partition(" {")[0] for name in layers()}
    listed = set(TABLE) - {"gelu_tanh", "hard sigmoid"}  # an option of GELU, and one of ONNX alone
    assert listed <= names


def test_modules_have_the_constant_of_the_layer_times_their_own(modules):
    _, found = modules
    norm = found["identity"]
    for name, constant in found.items():
        assert math.isfinite(constant) == is_bounded(name), name
    assert agree(found["leaky_relu {'negative_slope': -1.7}"], 1.7 * norm)
    assert agree(found["softplus {'beta': 3.0, 'threshold': 25.0}"], norm)
    assert agree(found["sigmoid"], norm / 4)


def test_programs_agree_with_modules(modules, tmp_path):
    kind, known = modules
    found = layers()
    model, shape = side(kind, found.values())
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model, (torch.zeros(1, *shape),)), path)
    read = constants(path, None, found)
    assert [name for name in known if not agree(read[name], known[name])] == []


@pytest.mark.filterwarnings("ignore")  # of torch's own exporters
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "older"])
def test_onnx_files_agree_with_modules(modules, dynamo, tmp_path):
    kind, known = modules
    found = {name: part for name, part in layers().items() if not name.startswith(NOT_WRITTEN[dynamo])}
    model, shape = side(kind, found.values())
    path = tmp_path / "model.onnx"
    options = {"verbose": False} if dynamo else {"opset_version": 18}
    torch.onnx.export(model, (torch.zeros(1, *shape),), path, dynamo=dynamo, **options)
    read = constants(path, None, found)
    differing = [name for name in found if not agree(read[name], known[name])]
    assert differing == [name for name in found if name in LEFT_OUT[dynamo]]
