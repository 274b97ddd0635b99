"""Every rule against Jacobians: no sampled one is above the constant, and the constant is met where it is exact."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramcert
from auditing_networks import Function
from gramcert import nn as gnn
from reference import jacobian_norm, sigma

TOL = 1e-3


def random_batch_norm(channels):
    layer = nn.BatchNorm2d(channels)
    with torch.no_grad():
        layer.weight.normal_()
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.1, 3)
    return layer


def sampled(model, shape, points=12, scale=1.0):
    """The largest norm of the Jacobian at random points."""
    torch.manual_seed(5)
    return max(float(jacobian_norm(model, scale * torch.randn(1, *shape))) for _ in range(points))


def audited(model, shape, tol=TOL):
    torch.manual_seed(3)
    model = model.double().eval()
    return model, gramcert.audit(model, shape, tol=tol)


IMAGE = (4, 6, 6)
LINEAR = {
    "convolution": (lambda: nn.Conv2d(4, 5, 3, padding=1), IMAGE),
    "stride": (lambda: nn.Conv2d(4, 5, 3, stride=2, padding=1), IMAGE),
    "dilation": (lambda: nn.Conv2d(4, 5, 3, dilation=2, padding=1), IMAGE),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), IMAGE),
    "same": (lambda: nn.Conv2d(4, 3, 3, padding="same"), IMAGE),
    "circular": (lambda: nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"), IMAGE),
    "reflect": (lambda: nn.Conv2d(4, 3, 3, padding=2, padding_mode="reflect"), IMAGE),
    "replicate": (lambda: nn.Conv2d(4, 3, 3, padding=1, padding_mode="replicate"), IMAGE),
    "zero padding before": (lambda: nn.Sequential(nn.ZeroPad2d((0, 1, 2, 0)), nn.Conv2d(4, 3, 3)), IMAGE),
    "transposed": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1), IMAGE),
    "1-D": (lambda: nn.Conv1d(4, 3, 5, padding=2), (4, 12)),
    "3-D": (lambda: nn.Conv3d(2, 2, 2, padding=1), (2, 3, 3, 3)),
    "linear": (lambda: nn.Linear(7, 5), (7,)),
    "linear on the last axis": (lambda: nn.Linear(7, 5), (3, 7)),
    "batch norm": (lambda: random_batch_norm(4), IMAGE),
    "batch norm after": (lambda: nn.Sequential(nn.Conv2d(4, 5, 3, padding=1), random_batch_norm(5)), IMAGE),
    "batch norm before": (lambda: nn.Sequential(random_batch_norm(4), nn.Conv2d(4, 5, 3, padding=1)), IMAGE),
    "batch norm after transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), random_batch_norm(6)),
        IMAGE,
    ),
    "batch norm around": (
        lambda: nn.Sequential(random_batch_norm(4), nn.Conv2d(4, 6, 3, groups=2), random_batch_norm(6)),
        IMAGE,
    ),
    "two linear": (lambda: nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 6)), (7,)),
    "two convolutions": (lambda: nn.Sequential(nn.Conv2d(4, 5, 3, stride=2, padding=1), nn.Conv2d(5, 3, 2)), IMAGE),
    "pointwise after": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4, padding=1), nn.Conv2d(4, 6, 1)), IMAGE),
    "pointwise before": (lambda: nn.Sequential(nn.Conv2d(4, 6, 1), nn.Conv2d(6, 6, 3, groups=6, padding=1)), IMAGE),
    "pointwise and transposed": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, 1), nn.ConvTranspose2d(6, 3, 3, 2), nn.Conv2d(3, 4, 1)),
        IMAGE,
    ),
    "pooling and linear": (lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), IMAGE),
    "convolution and linear": (
        lambda: nn.Sequential(nn.Conv2d(4, 3, 3, padding=1), nn.Flatten(), nn.Linear(108, 5)),
        IMAGE,
    ),
    "average pool": (lambda: nn.AvgPool2d(3, 2, 1), IMAGE),
    "average pool, not counting padding": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), IMAGE),
    "average pool, rounded up": (lambda: nn.AvgPool2d((2, 3), (3, 2), (1, 1), ceil_mode=True), (2, 7, 8)),
    "average pool, divisor": (lambda: nn.AvgPool2d(2, divisor_override=3), IMAGE),
    "adaptive pool": (lambda: nn.AdaptiveAvgPool2d((4, 5)), IMAGE),
    "mean": (lambda: Function(lambda x: x.mean((2, 3))), IMAGE),
    "sum": (lambda: Function(lambda x: x.sum(1, keepdim=True)), IMAGE),
    "nearest": (lambda: nn.Upsample(scale_factor=2), IMAGE),
    "bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "bilinear, corners": (lambda: nn.Upsample(size=(9, 7), mode="bilinear", align_corners=True), IMAGE),
    "bicubic": (lambda: nn.Upsample(size=(9, 7), mode="bicubic"), IMAGE),
    "linear upsampling": (lambda: nn.Upsample(scale_factor=3, mode="linear"), (4, 6)),
    "pixel shuffle": (lambda: nn.PixelShuffle(2), IMAGE),
    "pixel unshuffle": (lambda: nn.PixelUnshuffle(2), IMAGE),
    "channel shuffle": (lambda: nn.ChannelShuffle(2), IMAGE),
    "flatten": (lambda: nn.Flatten(), IMAGE),
    "dropout": (lambda: nn.Dropout(), IMAGE),
    "reflection pad": (lambda: nn.ReflectionPad2d((1, 2, 0, 3)), IMAGE),
    "replication pad": (lambda: nn.ReplicationPad2d(2), IMAGE),
    "circular pad": (lambda: nn.CircularPad2d(2), IMAGE),
    "constant pad": (lambda: nn.ConstantPad2d((1, -2, 0, 1), 3.0), IMAGE),
    "slice": (lambda: Function(lambda x: x[:, 1:, ::2]), IMAGE),
    "transpose": (lambda: Function(lambda x: x.transpose(1, 3).reshape(1, -1)), IMAGE),
    "expand": (lambda: Function(lambda x: x[:, :1].expand(-1, 5, -1, -1)), IMAGE),
    "repeat": (lambda: Function(lambda x: x.repeat(1, 1, 2, 3)), IMAGE),
    "roll": (lambda: Function(lambda x: torch.roll(x, 2, 2)), IMAGE),
    "chosen": (lambda: Function(lambda x, i: x[:, i], i=torch.tensor([0, 2, 2])), IMAGE),
    "times constants": (lambda: Function(lambda x, c: 3 * x * c / 2 - 1, c=torch.randn(4, 1, 1)), IMAGE),
    "scaled places": (lambda: Function(lambda x, c: x * c, c=torch.randn(6, 6)), IMAGE),
    "channel-wise difference": (lambda: Function(lambda x: 1 - x), IMAGE),
    "parts of one value side by side": (lambda: Function(lambda x: torch.cat([x[:, 2:], x[:, :2]], 1)), IMAGE),
    "masked": (lambda: Function(lambda x, m: torch.where(m, x, 0.0), m=torch.rand(6, 6) > 0.5), IMAGE),
    "matrix from the left": (lambda: Function(lambda x, w: w @ x, w=torch.randn(3, 6)), IMAGE),
    "stack": (lambda: Function(lambda x: torch.stack([x, x[:, [1, 0, 2, 3]]], 1)), IMAGE),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_maps_are_measured_as_a_whole(name):
    build, shape = LINEAR[name]
    torch.manual_seed(0)
    model, found = audited(build(), shape)
    truth = float(jacobian_norm(model, torch.zeros(1, *shape)))
    assert found.reasons == ()
    assert truth <= found.upper * (1 + 1e-13)
    assert found.upper <= truth * (1 + 1.1 * TOL) + 1e-12


# The input at which the slope is largest, and the constant.
ACTIVATIONS = {
    "relu": (nn.ReLU(), 1.0, 1.0),
    "relu6": (nn.ReLU6(), 1.0, 1.0),
    "leaky": (nn.LeakyReLU(0.2), 1.0, 1.0),
    "steep leaky": (nn.LeakyReLU(1.5), -1.0, 1.5),
    "elu": (nn.ELU(2.0), -1e-9, 2.0),
    "selu": (nn.SELU(), -1e-12, 1.7580993408473766),
    "celu": (nn.CELU(0.5), -1e-9, 1.0),
    "gelu": (nn.GELU(), math.sqrt(2), 1.1289041451851548),
    "gelu tanh": (nn.GELU("tanh"), 1.4185040087908283, 1.1289930686587718),
    "silu": (nn.SiLU(), 2.3993572805154677, 1.0998393201288669),
    "mish": (nn.Mish(), 1.4905711794854285, 1.0884981612517279),
    "softplus": (nn.Softplus(), 30.0, 1.0),
    "tanh": (nn.Tanh(), 0.0, 1.0),
    "sigmoid": (nn.Sigmoid(), 0.0, 0.25),
    "hardsigmoid": (nn.Hardsigmoid(), 0.0, 1 / 6),
    "hardswish": (nn.Hardswish(), 3 - 1e-9, 1.5),
    "hardtanh": (nn.Hardtanh(-2, 2), 0.0, 1.0),
    "softsign": (nn.Softsign(), 1e-9, 1.0),
    "log sigmoid": (nn.LogSigmoid(), -40.0, 1.0),
    "softshrink": (nn.Softshrink(), 2.0, 1.0),
    "tanhshrink": (nn.Tanhshrink(), 30.0, 1.0),
    "prelu": (nn.PReLU(4, init=-1.25), -1.0, 1.25),
    "rrelu": (nn.RReLU(1.0, 2.0), -1.0, 1.5),
    "abs": (gnn.Abs(), 1.0, 1.0),
    "swish written out": (Function(lambda x: x * torch.sigmoid(1.7 * x)), 2.3993572805154677 / 1.7, 1.0998393201288669),
    "gelu written out": (Function(lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5))), math.sqrt(2), 1.1289041451851548),
    "mish written out": (Function(lambda x: x * torch.tanh(F.softplus(x))), 1.4905711794854285, 1.0884981612517279),
    "hardswish written out": (Function(lambda x: x * F.hardsigmoid(x)), 3 - 1e-9, 1.5),
    "clamp": (Function(lambda x: x.clamp(min=-1)), 0.0, 1.0),
    "sine": (Function(torch.sin), 0.0, 1.0),
    "erf": (Function(torch.erf), 0.0, 1.1283791670955126),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_have_their_exact_constant(name):
    module, place, constant = ACTIVATIONS[name]
    model, found = audited(module, (4, 3))
    x = torch.full((1, 4, 3), place, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x)
    assert found.reasons == ()
    assert float(slope.abs().max()) <= found.upper * (1 + 1e-13)
    assert found.upper == pytest.approx(constant, rel=1e-6)
    assert found.upper <= float(slope.abs().max()) * (1 + 1e-6)
    assert sampled(model, (4, 3), scale=3.0) <= found.upper * (1 + 1e-13)


class ChannelSoftmax(nn.Module):
    def forward(self, x):
        return torch.softmax(x, 1)


def rms_norm(x):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-2)


# Other functions, and their constants.
NONLINEAR = {
    "max pool": (nn.MaxPool2d(2), 1.0),
    "overlapping max pool": (nn.MaxPool2d(3, stride=2), 2.0),
    "max pool with padding": (nn.MaxPool2d(3, 2, 1), 2.0),
    "max pool rounded up": (nn.MaxPool2d(3, 2, ceil_mode=True), 2.0),
    "adaptive max pool": (nn.AdaptiveMaxPool2d(4), 2.0),
    "lp pool": (nn.LPPool2d(2, 2), 1.0),
    "l2 pool": (gnn.L2Pool(2), 1.0),
    "overlapping l2 pool": (gnn.L2Pool(3, 2), 1.0),
    "softmax": (ChannelSoftmax(), 0.5),
    "log softmax": (nn.LogSoftmax(1), 2.0),
    "layer norm": (nn.LayerNorm([4, 6, 6]), 1 / math.sqrt(1e-5)),
    "instance norm": (nn.InstanceNorm2d(4), 1 / math.sqrt(1e-5)),
    "group norm": (nn.GroupNorm(2, 4), 1 / math.sqrt(1e-5)),
    "rms norm": (nn.RMSNorm([4, 6, 6], eps=1e-2), 10.0),
    "max-min": (gnn.MaxMin(), 1.0),
    "group sort": (gnn.GroupSort(2), 1.0),
    "centring": (gnn.Centering(4), 1.0),
    "norm": (Function(lambda x: torch.linalg.vector_norm(x, dim=1)), 1.0),
    "largest": (Function(lambda x: x.amax((2, 3))), 1.0),
    "maximum": (Function(lambda x: torch.maximum(x, 2 * x)), math.sqrt(5)),
    "residual": (Function(lambda x: x + torch.tanh(x)), 2.0),
    "concatenation": (Function(lambda x: torch.cat([x, torch.relu(x)], 1)), math.sqrt(2)),
    "layer norm written out": (
        Function(lambda x: rms_norm(x - x.mean(-1, keepdim=True))),
        10.0,
    ),
    "lengths of resized squares": (
        Function(lambda x: F.interpolate(x * x, scale_factor=2, mode="bilinear").sqrt()),
        2.0,
    ),
    "rms norm written out": (Function(lambda x: rms_norm(x)), 10.0),
}


@pytest.mark.parametrize("name", NONLINEAR)
def test_other_functions_have_their_constant(name):
    module, constant = NONLINEAR[name]
    model, found = audited(module, IMAGE)
    assert found.reasons == ()
    assert found.upper == pytest.approx(constant, rel=1e-5)
    assert max(sampled(model, IMAGE, 4, scale) for scale in (1e-6, 1.0)) <= found.upper * (1 + 1e-9)


def test_overlapping_windows_reach_their_constant():
    # One entry that is the maximum of four windows.
    model, found = audited(nn.MaxPool2d(3, stride=2), (1, 5, 5))
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, 2, 2] = 1.0
    assert float(jacobian_norm(model, x)) == pytest.approx(2.0) == found.upper


def test_softmax_and_normalisation_reach_their_constants():
    assert float(jacobian_norm(nn.Softmax(1), torch.tensor([[0.0, 0.0, -60.0]]))) == pytest.approx(0.5)
    corner = torch.tensor([[60.0, 0.0, 0.0, 0.0]])
    assert float(jacobian_norm(nn.LogSoftmax(1), corner)) == pytest.approx(2.0)
    norm = nn.LayerNorm(4, eps=1e-2)
    assert float(jacobian_norm(norm.double(), torch.zeros(1, 4))) == pytest.approx(10.0, rel=1e-6)


UNBOUNDED = {
    "attention": (nn.TransformerEncoderLayer(8, 2, 16), (3, 8), "product of two values|attention"),
    "product": (Function(lambda x: x * torch.relu(x)), (4,), "a product of two values"),
    "gate": (nn.GLU(1), (4,), "a product of two values"),
    "training-mode batch norm": (nn.BatchNorm1d(4).train(), (4,), "call .eval|statistics of the batch|buffers"),
    "training-mode dropout": (nn.Dropout().train(), (4,), "call .eval|random"),
    "hardshrink": (nn.Hardshrink(), (4,), "it jumps"),
    "threshold": (nn.Threshold(0.1, 20.0), (4,), "it jumps"),
    "exp": (Function(torch.exp), (4,), "unbounded"),
    "square": (Function(lambda x: x**2), (4,), "its slope 2x is unbounded"),
    "root": (Function(lambda x: torch.sqrt(torch.relu(x))), (4,), "near 0"),
    "quotient": (Function(lambda x: x / x.norm()), (4,), "a quotient of two values"),
    "round": (Function(torch.round), (4,), "it jumps"),
    "integers": (Function(lambda x: x.to(torch.int32).to(x.dtype)), (4,), "jumps"),
    "softplus with a jump": (nn.Softplus(threshold=1.0), (4,), "threshold"),
    "softplus with a small beta": (nn.Softplus(beta=1e-3), (4,), "threshold"),
    "unknown operator": (Function(torch.special.i0), (4,), "no rule is known"),
    "data-dependent kernel": (Function(lambda x: F.conv1d(x[:, None], x[:, None])), (4,), "depends on the input"),
    "choice": (Function(lambda x: torch.where(x > 0, x, 2 + x)), (4,), "depends on the input|comparison|gt"),
    "variance": (Function(lambda x: x.var(1)), (4,), "square: its slope 2x"),
    "overwritten view": (Function(lambda x: _overwritten(x + 1)), (4,), "overwritten|fill"),
    "recurrence": (Function(lambda x: nn.functional.cosine_similarity(x, 2 * x)), (4,), ""),
}


class Gate(nn.Module):
    """Looks like SiLU, but there is a bias between x and the sigmoid."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1)
        with torch.no_grad():
            self.norm.bias.fill_(-20.0)

    def forward(self, x):
        return x * torch.sigmoid(self.norm(x))


# Functions that look like known ones: a reason is fine, a constant that is too small is not.
DISGUISED = {
    "another line's mean": (Function(lambda x: x - x.mean(1)[None]), (3,)),
    "columns minus means of rows": (Function(lambda x: x - x.mean(2)[:, None]), (3, 3)),
    "a gate with a bias": (Gate(), (1,)),
    "a root with a bias": (
        Function(lambda x, w, b: F.linear(x * x, w.abs(), b).sqrt(), w=torch.ones(2, 2), b=-torch.ones(2)),
        (2,),
    ),
    "a root of a padded square": (Function(lambda x: F.pad(x * x, (1, 0), value=-1.0).mean(1).sqrt()), (2,)),
    "a choice that jumps": (Function(lambda x: torch.where(x == 0, 1.0, x)), (2,)),
    "a root of a choice": (Function(lambda x: torch.where(x == 0, 1.0, x * x).sqrt()), (2,)),
    "a gate of another value": (Function(lambda x: x * torch.sigmoid(x.flip(1))), (4,)),
    "a gate of the opposite sign": (Function(lambda x: x * torch.sigmoid(-3 * x + 9)), (4,)),
    "a length of other entries": (
        Function(lambda x: x / torch.sqrt((x.flip(1) ** 2).mean(1, keepdim=True) + 1e-2)),
        (2,),
    ),
    "maximum and minimum of different pairs": (
        Function(lambda x: torch.cat([torch.maximum(x[:, :2], x[:, 2:]), torch.minimum(x[:, :2], 2 * x[:, 2:])], 1)),
        (4,),
    ),
}


@pytest.mark.parametrize("name", DISGUISED)
def test_functions_in_disguise_are_not_taken_for_others(name):
    module, shape = DISGUISED[name]
    model, found = audited(module, shape)
    torch.manual_seed(0)
    points = [scale * torch.randn(1, *shape) for scale in (0.01, 1.0, 20.0, 30.0) for _ in range(20)]
    jacobians = [
        torch.autograd.functional.jacobian(model, point.double()).reshape(-1, math.prod(shape)) for point in points
    ]
    inside = [jacobian for jacobian in jacobians if jacobian.isfinite().all()]  # where roots are defined
    assert inside
    assert max(float(sigma(jacobian)) for jacobian in inside) <= found.upper * (1 + 1e-9)


def _overwritten(x):
    part = x[:, :2]
    part.mul_(3)
    return x + 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNBOUNDED)
def test_what_has_no_constant_is_unbounded_with_a_reason(name):
    model, shape, reason = UNBOUNDED[name]
    found = gramcert.audit(model if model.training and "training" in name else model.eval(), shape)
    assert found.upper == math.inf
    assert found.reasons
    assert re.search(reason, " ".join(found.reasons)), found.reasons


def test_control_flow_that_depends_on_data_is_unbounded():
    found = gramcert.audit(Function(lambda x: x if x.sum() > 0 else -x), (4,))
    assert found.upper == math.inf
    assert "that torch.export cannot follow" in found.reasons[0]


def test_several_inputs_are_unbounded():
    found = gramcert.audit(Function(lambda x, y=None: x if y is None else x + y), (4,))
    assert found.upper == 1.0


@pytest.mark.parametrize("slopes", ["relu", "tanh"])
def test_the_residual_layer_has_the_constant_of_its_theorem(slopes):
    torch.manual_seed(0)
    activation = nn.ReLU() if slopes == "relu" else nn.Tanh()
    model = nn.Sequential(gnn.SLLConv2d(3, 5, 3, activation), nn.Flatten(), gnn.SLLLinear(75, 20)).eval()
    found = gramcert.audit(model, (3, 5, 5))
    assert 1 <= found.upper <= 1 + 1e-5
    assert [row.kind for row in found.rows] == ["residual layer", "residual layer"]


def test_a_residual_layer_with_another_activation_has_no_theorem():
    torch.manual_seed(0)
    layer = gnn.SLLLinear(6, 6).eval()
    layer.activation = nn.LeakyReLU(-1.0)  # the absolute value
    found = gramcert.audit(layer, (6,))
    assert found.upper > 2
    assert sampled(layer.double(), (6,), 200) <= found.upper


def test_the_sign_of_a_residual_branch_counts():
    torch.manual_seed(0)
    plain = gramcert.nn.export(gnn.SLLLinear(6, 6))
    weights = dict(plain.named_parameters())
    inner, outer = weights["inner.weight"], weights["outer.weight"]
    model = Function(lambda x: x + torch.relu(x @ inner.detach().T) @ outer.detach().T)
    found = gramcert.audit(model, (6,))
    assert found.upper > 2  # x + 2WR²φ(Wᵀx) reaches 3


def test_batch_normalisation_is_folded_into_the_convolution():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), random_batch_norm(4)).eval()
    found = gramcert.audit(layers, (3, 8, 8))
    apart = gramcert.spectral_norm(layers[0], 8).lower * float(
        (layers[1].weight.detach() / (layers[1].running_var + 1e-5).sqrt()).abs().max()
    )
    assert [row.name for row in found.rows] == ["0 + 1"]
    assert found.upper < 0.95 * apart


def test_in_place_activations_act_on_their_own_value():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x)
            z = torch.nn.functional.leaky_relu_(y, 3.0)
            return y + z  # y has been overwritten: twice z

    torch.manual_seed(0)
    model, found = audited(Block(), (4,))
    norm = float(sigma(model.linear.weight.detach()))
    assert 6 * norm <= found.upper <= 6 * norm * (1 + 2 * TOL)


def test_shares_add_up_and_rows_multiply():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 3)).eval()
    found = gramcert.audit(model, (8,))
    assert abs(sum(row.share for row in found.rows)) == pytest.approx(1)
    assert math.prod(row.upper for row in found.rows) == pytest.approx(found.upper)
    assert found.rows[-1].constant == found.upper


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((3, 8), {}, r"audit\(input_shape=\(3, 8\)\): the model cannot take it"),
        ((0,), {}, "expected sizes of at least 1"),
        ((4,), {"tol": 2.0}, r"audit\(tol=2.0\): expected 0 < tol < 1"),
        ((4,), {"jobs": 0}, r"audit\(jobs=0\)"),
        ((4,), {"architecture": "resnet20"}, "for files of weights only"),
    ],
)
def test_bad_arguments_are_named(shape, options, message):
    with pytest.raises(ValueError, match=message):
        gramcert.audit(nn.Linear(4, 4), shape, **options)


def test_weights_that_are_not_finite_are_a_reason():
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight[0, 0] = math.nan
    found = gramcert.audit(layer, (2,))
    assert found.upper == math.inf
    assert "not finite" in found.reasons[0]
