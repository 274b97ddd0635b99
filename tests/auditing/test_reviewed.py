"""What reviews found: constants below the truth, forged certificates, and files that made them crash."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramcert
from auditing_networks import Function
from gramcert.auditing.aten import Translator
from gramcert.auditing.certificate import seal
from gramcert.auditing.program import Call, Program, Ref
from gramcert.operators.graph import Unbounded
from reference import sigma


def largest_quotient(model, shape, dtype=torch.float64):
    """Of many pairs of inputs, near each other, far apart and around zero."""
    torch.manual_seed(0)
    best = 0.0
    for scale in (1e-3, 1e-2, 1.0, 30.0):
        for step in (1e-4, 1.0):
            for _ in range(20):
                x = (scale * torch.randn(1, *shape)).to(dtype)
                y = x + (scale * step * torch.randn(1, *shape)).to(dtype)
                one, two = ([part.double().flatten() for part in _parts(model(z.clone()))] for z in (x, y))
                distance = torch.cat(one).sub(torch.cat(two)).norm()
                if distance.isfinite():
                    best = max(best, float(distance / (x - y).double().norm()))
    return best


def _parts(result):
    return result if isinstance(result, (tuple, list)) else [result]


def write_into_zeros(x):
    o = torch.zeros(1, 4, dtype=x.dtype)
    o[:, :2] = x[:, :2] * 30
    return o + x


def write_into_ones(x):
    m = torch.ones(4, dtype=x.dtype)
    m[0] = 50.0
    return x * m


def write_into_weight(x, w):
    w = w.clone()
    w[0].mul_(50.0)
    return x @ w.T


def write_into_input(x):
    x[:, :2].mul_(3)
    return x + 0


def write_into_chunk(x):
    x.chunk(2, 1)[0].mul_(9)
    return x


def write_through(view):
    def function(x):
        t = x * 1
        F.leaky_relu_(view(t), 3.0)
        return t

    return function


def length(view):
    return lambda x: x / torch.sqrt(view((x * x).mean(2, keepdim=True)) + 1e-2)


CASES = {
    "zeros written into": (write_into_zeros, (4,), {}),
    "ones written into": (write_into_ones, (4,), {}),
    "weight written into": (write_into_weight, (4,), {"w": torch.ones(4, 4)}),
    "input written into": (write_into_input, (4,), {}),
    "chunk of the input written into": (write_into_chunk, (4,), {}),
    "swapdims": (write_through(lambda t: t.swapdims(0, 1)), (4,), {}),
    "ravel": (write_through(lambda t: t.ravel()), (4,), {}),
    "broadcast_to": (write_through(lambda t: t.broadcast_to(1, 4)), (4,), {}),
    "as_strided": (write_through(lambda t: t.as_strided((1, 4), (4, 1))), (4,), {}),
    "reshape": (write_through(lambda t: t.reshape(4)), (4,), {}),
    "the same output twice": (lambda x: (torch.relu(x),) * 2, (4,), {}),
    "the input and what is made of it": (lambda x: [x, torch.relu(x), x], (4,), {}),
    "a weight from an unknown operator": (
        lambda x, w: F.layer_norm(x, (4,), torch.special.i0(w)),
        (4,),
        {"w": torch.full((4,), 10.0)},
    ),
    "indices as an output": (lambda x: (x, 100.0 * x.max(1).indices), (4,), {}),
    "indices of pooling": (lambda x: F.max_pool1d(x, 2, return_indices=True)[1] * 1.0, (1, 8), {}),
    "alpha under a root": (
        lambda x: x / torch.sqrt(torch.add((x * x).mean(1, keepdim=True), 1.0, alpha=1e-4)),
        (4,),
        {},
    ),
    "alpha in softsign": (lambda x: x / torch.add(x.abs(), 1.0, alpha=1e-3), (4,), {}),
    "alpha in gelu": (lambda x: x * torch.add(torch.erf(x), 1.0, alpha=50), (4,), {}),
    "lengths of other lines": (length(lambda m: m.view(1, 1, 4)), (4, 4), {}),
    "lengths of lines the other way": (lambda x: x / torch.sqrt((x * x).mean(1).unsqueeze(2) + 1e-2), (4, 4), {}),
    "mish with another beta": (lambda x: x * torch.tanh(F.softplus(x, beta=50.0)), (4,), {}),
    "where that repeats": (
        lambda x, m, c: torch.where(m, x, c),
        (4,),
        {"m": torch.ones(4, dtype=torch.bool), "c": torch.zeros(5, 4)},
    ),
    "clamp that repeats": (lambda x, c: torch.clamp(x, min=c), (4,), {"c": torch.full((5, 4), -99.0)}),
    "filled by what depends on the input": (
        lambda x, m: x.masked_fill(m, x.sum()),
        (4,),
        {"m": torch.ones(4, dtype=torch.bool)},
    ),
    "nearest by an odd factor": (
        lambda x, w: F.interpolate(x, scale_factor=2.1, mode="nearest") @ w,
        (1, 2),
        {"w": torch.tensor([[1.0], [0.0], [1.0], [0.0]])},
    ),
    "type of integers": (lambda x, i: x.type_as(i) * 1.0, (4,), {"i": torch.zeros(1, dtype=torch.int64)}),
    "bits of integers": (lambda x: x.view(torch.int32) * 1.0, (4,), {}),
    "sums of integers": (lambda x: x.sum(1, dtype=torch.int64) * 1.0, (4,), {}),
    "scalars of another type": (lambda x: x.double() * 0.7, (4,), {}),
    "epsilon of another type": (
        lambda x, h: F.layer_norm(x.float(), (4,), eps=1e-7),
        (4,),
        {"h": torch.zeros(1, dtype=torch.float16)},
    ),
}


def overlapping(x):
    v = x * 1
    y = v.unfold(1, 2, 1)
    y.mul_(2)
    return y


def unsafe(x):
    v = x * 1
    v.unsafe_split(2, 1)[0].mul_(9)
    return v


def statistics(x, mean, variance):
    F.batch_norm(x, mean, variance, training=True, momentum=1.0)
    return x * variance


def comparison_as_type(x):
    return x.type_as(x > 0) * 100.0


CASES |= {
    "an overlapping view written into": (overlapping, (4,), {}),
    "an unsafe split": (unsafe, (4,), {}),
    "statistics that are updated": (statistics, (1, 8), {"m": torch.zeros(1), "v": torch.ones(1)}),
    "the type of a comparison": (comparison_as_type, (4,), {}),
    "the type of an index": (lambda x: x.type_as(x.argmax(1)) * 1.0, (4,), {}),
    "shifts that cancel": (
        lambda x: (((x.double() + 1.0) + 1e-17) - 1.0) * torch.sigmoid(x.double() * 1e38),
        (4,),
        {},
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_no_pair_of_inputs_is_further_apart_than_the_constant(name):
    function, shape, buffers = CASES[name]
    model = Function(function, **buffers).eval()
    found = gramcert.audit(model, shape)
    floating = [buffer.dtype for buffer in buffers.values() if buffer.dtype == torch.float32]
    dtype = torch.float32 if floating or "bits" in name or "epsilon" in name else torch.float64
    assert largest_quotient(model, shape, dtype) <= found.upper * (1 + 1e-4)
    assert found.reasons or found.upper < math.inf


def test_scalars_are_those_of_the_value_s_own_type():
    assert gramcert.audit(Function(lambda x: x.double() * 0.7), (4,)).upper >= 0.7
    half = nn.LayerNorm(4, eps=1e-7).half()
    assert gramcert.audit(half, (4,)).upper >= 3162
    assert gramcert.audit(Function(lambda x, h: x * 0.1 + h, h=torch.zeros(1).half()), (4,)).upper >= 0.1


@pytest.mark.parametrize("scale", [1e160, 1e-200, 1e200, 1e300, 0.0, 1e-315, 5e-324])
def test_extreme_weights_have_a_true_bound_and_a_certificate(scale):
    for model in (
        nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 1)),
        nn.Linear(1, 1),
        nn.Linear(3, 2),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)),
    ):
        torch.manual_seed(0)
        model = model.double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        shape = (2, 6, 6) if isinstance(model, nn.Sequential) and isinstance(model[0], nn.Conv2d) else None
        shape = shape or ((1,) if getattr(model, "in_features", 3) == 1 else (3,))
        found = gramcert.audit(model, shape)
        assert not math.isnan(found.upper)
        assert bool(found.reasons) == math.isinf(found.upper)
        if isinstance(model, nn.Linear) and scale < 1e300:
            truth = float(sigma(model.weight.detach() / (scale or 1.0)))
            assert found.rows[0].lower <= truth * scale * (1 + 1e-12) + 5e-324
            assert truth * scale * (1 - 1e-12) <= found.upper
        checked = gramcert.verify(found.certificate, model)
        assert checked.holds, checked.problems


@pytest.mark.parametrize("layer", [gramcert.nn.SLLLinear(6, 6), gramcert.nn.SLLConv2d(2, 3, 3)])
def test_negative_norms_in_a_claim_prove_nothing(layer):
    shape = (6,) if isinstance(layer, gramcert.nn.SLLLinear) else (2, 5, 5)
    content = copy.deepcopy(gramcert.audit(layer.eval(), shape).certificate)
    for norms in ([-1.0, 0.0], [0.5, -1e6], [0.0, 1.0], ["unbounded", 1.0], [-0.0, 0.0]):
        content["claims"][0]["norms"] = norms
        content["claims"][0]["upper"] = content["upper"] = 1e-3
        content["outputs"] = dict.fromkeys(content["outputs"], 1e-3)
        assert not gramcert.verify(content | {"seal": seal(content)}, layer).holds


def test_certificates_with_extreme_numbers_are_refused():
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2)).eval()
    good = gramcert.audit(model, (2, 6, 6)).certificate
    changes = [
        ("upper", 1e308),
        ("lower", 10**400),
        ("witness", "AAAA"),
        ("lower", 1e308),
    ]
    for field, value in changes:
        content = copy.deepcopy(good)
        content["claims"][0][field] = value
        found = gramcert.verify(content | {"seal": seal(content)}, model)
        assert not found.holds
    for shape in ([2, 2**19, 2**19], [2, 10**30, 6], "266", [2.5, 6.5, 6.5], []):
        content = copy.deepcopy(good) | {"input_shape": shape}
        assert not gramcert.verify(content | {"seal": seal(content)}, model).holds
    without = {name: value for name, value in good.items() if name != "graph"}
    assert not gramcert.verify(without | {"seal": seal(without)}, model).holds


def test_outputs_that_do_not_depend_on_the_input_have_the_constant_0():
    found = gramcert.audit(Function(lambda x, c: c + 1, c=torch.ones(3)), (4,))
    assert found.upper == 0
    assert gramcert.verify(found.certificate, Function(lambda x, c: c + 1, c=torch.ones(3))).holds
    assert gramcert.audit(Function(lambda x: (x, None)), (4,)).upper == 1
    assert gramcert.audit(Function(lambda x: (x, 3.0)), (4,)).upper == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model",
    [
        Function(lambda x, w: F.linear(x, w), w=torch.zeros(0, 4)),
        Function(lambda x: x[:, :0].sum(1)),
        Function(lambda x: x.sum().amax(0)),
        Function(lambda x: torch.linalg.vector_norm(x.sum(), dim=0)),
        Function(lambda x: x[:, :0].mean(1)),
        nn.LayerNorm(4, eps=5e-324).double(),
        Function(lambda x, c: torch.stack([x, torch.special.i0(c)]), c=torch.ones(1, 4)),
    ],
)
def test_odd_models_end_in_a_number_or_a_reason(model):
    found = gramcert.audit(model.eval(), (4,))
    assert bool(found.reasons) == math.isinf(found.upper)


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match=r"audit\(input_shape\): expected a sequence of ints or an example, got 4"):
        gramcert.audit(nn.Linear(4, 4), 4)
    with pytest.raises(TypeError, match=r"audit\(cache\): expected a folder or None, got 5"):
        gramcert.audit(nn.Linear(4, 4), (4,), cache=5)
    with pytest.raises(TypeError, match=r"audit\(measure='yes'\): expected True or False"):
        gramcert.audit(nn.Linear(4, 4), (4,), measure="yes")
    with pytest.raises(ValueError, match="expected at most"):
        gramcert.audit(nn.Linear(4, 4), (2**20, 2**20))
    with pytest.raises(TypeError, match="sparse or meta"):
        gramcert.audit(nn.Linear(4, 4, device="meta"), (4,))


def test_what_ran_out_of_time_is_not_kept(tmp_path):
    torch.manual_seed(0)
    model = nn.Conv2d(8, 8, 5)
    rough = gramcert.audit(model, (8, 16, 16), tol=1e-6, max_seconds=0, cache=tmp_path)
    fine = gramcert.audit(model, (8, 16, 16), tol=1e-2, cache=tmp_path)
    again = gramcert.audit(model, (8, 16, 16), tol=1e-6, cache=tmp_path, max_seconds=1e9)
    assert again.upper < fine.upper < rough.upper


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "function",
    [lambda x: (x * 7).chunk(1, 1)[0], lambda x: x.split(4, 1)[0] * 7, lambda x: (7 * x).unbind(0)[0]],
)
def test_lists_of_one_part_are_followed_in_files_too(function, tmp_path):
    torch.export.save(torch.export.export(Function(function), (torch.randn(1, 4),)), tmp_path / "model.pt2")
    assert gramcert.audit(tmp_path / "model.pt2", (4,)).upper == gramcert.audit(Function(function), (4,)).upper == 7


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layer", [gramcert.nn.SLLLinear(4, 4), gramcert.nn.MaxMin()])
@pytest.mark.parametrize("change", ["hook", "pre-hook", "forward"])
def test_hooks_and_changed_layers_of_this_package_are_not_overlooked(layer, change):
    layer = copy.deepcopy(layer).eval()
    if change == "hook":
        layer.register_forward_hook(lambda module, inputs, output: 10 * output)
    elif change == "pre-hook":
        layer.register_forward_pre_hook(lambda module, inputs: (10 * inputs[0],))
    else:
        layer.forward = lambda x: 10 * x
    for model in (layer, nn.Sequential(layer)):
        assert gramcert.audit(model, (4,)).upper >= 9
        exported, x = gramcert.nn.export(model), torch.randn(1, 4)
        assert torch.allclose(exported(x), model(x))


class Changing(nn.Module):
    """Its buffers are other ones after each call."""

    def __init__(self, way):
        super().__init__()
        self.register_buffer("a", torch.ones(4))
        self.register_buffer("b", self.a.view(4))
        self.way = way

    def forward(self, x):
        y = x * self.b
        if self.way == "in place":
            self.a.mul_(50.0)
        elif self.way == "through a view":
            self.a[:2].mul_(50.0)
        else:
            self.a = self.a * 50.0
        return y


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["in place", "through a view", "assigned"])
def test_models_that_change_their_buffers_are_unbounded(way, tmp_path):
    found = gramcert.audit(Changing(way), (4,))
    assert found.upper == math.inf
    assert "changes its own" in found.reasons[0]
    torch.export.save(torch.export.export(Changing(way), (torch.zeros(1, 4),)), tmp_path / "model.pt2")
    assert gramcert.audit(tmp_path / "model.pt2", (4,)).upper == math.inf


class RandomWeight(nn.Module):
    def forward(self, weight):
        return F.dropout(weight, 0.5, self.training)


def test_random_weights_are_unbounded():
    layer = nn.utils.parametrize.register_parametrization(nn.Linear(4, 4), "weight", RandomWeight())
    assert "its parametrisation of weight gives another one each time" in gramcert.audit(layer.train(), (4,)).reasons[0]
    assert gramcert.audit(layer.eval(), (4,)).upper < math.inf


@pytest.mark.parametrize("size", [(1, 12), (3, 8), (8, 8), (16, 4)])
@pytest.mark.parametrize("factor", [2, 4])
def test_upsampling_verifies_its_own_certificate(size, factor):
    model = nn.Upsample(scale_factor=factor, mode="bilinear")
    found = gramcert.audit(model, (size[0], size[1], size[1]))
    assert gramcert.verify(found.certificate, model).holds


def test_shares_have_the_sign_of_what_they_do():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.copy_(2 * torch.eye(4))
        model[2].weight.copy_(0.1 * torch.eye(4))
    grows, shrinks = (row.share for row in gramcert.audit(model, (4,)).rows)
    assert grows > 0 > shrinks
    assert grows + shrinks == pytest.approx(-1)


def test_arguments_that_torch_would_ignore_are_not_used():
    calls = [
        Call("aten.mul.Tensor", {"self": Ref("x"), "other": 50.0}, ("y",), "y"),
        Call("aten.linear.default", {"self": Ref("x"), "input": Ref("y"), "weight": Ref("w")}, ("z",), "z"),
    ]
    program = Program({"x": (1, 4)}, {"w": torch.eye(4)}, calls, ("z",))
    graph = Translator(program).run({"x": (1, 4)})
    assert isinstance(graph.nodes[graph.outputs["z"]].operation, Unbounded)


def test_integers_without_an_exact_float_are_a_reason():
    model = Function(lambda x, c: x * c, c=torch.tensor([2**53 + 1, 1], dtype=torch.int64))
    assert "too large for float64" in gramcert.audit(model, (2,)).reasons[0]
    model = Function(lambda x, c: x * c, c=torch.tensor([3, 1], dtype=torch.int64))
    assert gramcert.audit(model, (2,)).upper == 3
