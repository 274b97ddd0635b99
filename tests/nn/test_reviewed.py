"""What a reviewer found: each was a bound below the truth, or a layer that did not keep its promise."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gramcert.nn as gnn
from gramcert import Convolution, lipschitz_bound
from gramcert.nn.guarantee import constant_and_size
from gramcert.parametrizations import spectral_rescaling
from gramcert.rescaling import rescaling_vector
from reference import jacobian_norm

ROUNDING = 100 * torch.finfo(torch.float32).eps


def filled(layer, value):
    """A layer with all weights the same."""
    nn.init.constant_(layer.weight, value)
    return layer


def test_residual_sums_do_not_repeat_entries():
    """A module with one output would be added to each of many: a constant of 2.5 where 1 was said."""
    for module, x in ((nn.Linear(16, 1), torch.ones(1, 16)), (nn.Conv2d(8, 1, 1), torch.ones(1, 8, 4, 4))):
        block = gnn.Residual(module)
        with pytest.raises(ValueError, match=r"Residual\(module\): expected an output of shape .*, got"):
            block(x)
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            gnn.export(block)(x)


def test_parts_that_overwrite_their_input_are_refused():
    for make in (gnn.Residual, gnn.Concatenation):
        with pytest.raises(ValueError, match=r"LeakyReLU\(inplace=True\) may overwrite the input"):
            make(nn.Sequential(nn.LeakyReLU(3.0, inplace=True)))
        block = make(nn.LeakyReLU(3.0))
        block.get_submodule("module" if make is gnn.Residual else "parts.0").inplace = True
        with pytest.raises(ValueError, match=r"lipschitz_bound\(.*may overwrite the input"):
            lipschitz_bound(block)


def test_one_element_tuples_of_pooling():
    pool = nn.MaxPool2d((3,), stride=1)
    assert lipschitz_bound(pool) >= 3
    pool = nn.AvgPool2d((1, 4), stride=(1,))
    assert jacobian_norm(pool, torch.zeros(1, 1, 1, 12)) <= lipschitz_bound(pool)


@pytest.mark.parametrize("sizes", [(4,), (5,), (7,)])
@pytest.mark.parametrize("taps", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_sizes_after_pooling_are_those_of_torch(sizes, taps, stride):
    for padding, ceil_mode in ((0, False), (0, True), (taps // 2, False), (taps // 2, True)):
        pool = nn.MaxPool1d(taps, stride, padding, ceil_mode=ceil_mode)
        assert constant_and_size("test", pool, sizes)[1] == tuple(pool(torch.zeros(1, 1, *sizes)).shape[2:])


def test_sizes_are_followed():
    """Linear layers change the last axis, shuffles only the last two, pooling drops windows beyond the input."""
    linear = nn.Linear(2, 32, bias=False)
    with torch.no_grad():
        linear.weight.zero_()
        linear.weight[:, 0] = 32**-0.5
    model = nn.Sequential(linear, filled(nn.Conv1d(1, 1, 3, padding=1, bias=False), 1))
    assert jacobian_norm(model.double(), torch.zeros(1, 1, 2)) <= lipschitz_bound(model, 2)
    model = nn.Sequential(nn.PixelUnshuffle(2), filled(nn.Conv3d(1, 1, (3, 1, 1), padding=(1, 0, 0), bias=False), 1))
    with pytest.raises(ValueError, match=r"lipschitz_bound\(PixelUnshuffle\): expected 2 spatial sizes"):
        lipschitz_bound(model, (2, 2, 2))
    assert jacobian_norm(model.double(), torch.zeros(1, 1, 2, 2, 2)) <= lipschitz_bound(model)
    conv = nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular", bias=False)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([[[1.0, -2.0, 1.0]]]))
    model = nn.Sequential(nn.MaxPool1d(1, 2, ceil_mode=True), conv)
    assert jacobian_norm(model.double(), torch.arange(4.0).reshape(1, 1, 4)) <= lipschitz_bound(model, 4)


def test_residual_layers_check_their_activation_again():
    layer = gnn.SLLLinear(4, 4)
    layer.activation = gnn.Abs()
    with pytest.raises(ValueError, match="only for elementwise activations"):
        lipschitz_bound(layer)
    layer = gnn.SLLLinear(4, 4)
    layer.activation.register_forward_hook(lambda module, args, output: 5 * output)
    with pytest.raises(TypeError, match="its hook"):
        lipschitz_bound(layer)
    layer = gnn.SLLLinear(4, 4, nn.LeakyReLU(0.1))
    layer.activation.negative_slope = -3.0
    with pytest.raises(ValueError, match="only for elementwise activations"):
        lipschitz_bound(layer)


def test_changes_after_construction():
    block = gnn.Concatenation(nn.Identity(), nn.Identity())
    block.parts.append(nn.Identity())
    assert jacobian_norm(block, torch.zeros(1, 2)) <= lipschitz_bound(block)
    block.factor = -2.0
    assert jacobian_norm(block, torch.zeros(1, 2)) <= lipschitz_bound(block)
    block = gnn.Residual(gnn.Abs())
    block.weight = -3.0
    assert jacobian_norm(block, -torch.ones(1, 2)) <= lipschitz_bound(block)
    pool = gnn.ScaledAvgPool(2)
    pool.stride = (1, 1)
    assert jacobian_norm(pool, torch.zeros(1, 1, 4, 4)) <= lipschitz_bound(pool)
    conv = nn.Conv1d(1, 1, 1, padding=1, padding_mode="circular")
    conv.padding = (0,)
    with pytest.raises(TypeError, match="its padding was changed after construction"):
        lipschitz_bound(conv)


class Larger(gnn.ScaledAvgPool):
    def means(self, x):
        return 4 * super().means(x)


class Thousandfold(nn.Linear):
    def _call_impl(self, *args, **kwargs):
        return 1000 * super()._call_impl(*args, **kwargs)


class Renamed(gnn.ScaledAvgPool):
    def extra_repr(self):
        return "renamed"


def test_replaced_parts_are_found():
    layer = gnn.Abs()
    layer.compute = lambda x: 7 * x
    conv = nn.Conv1d(1, 1, 1)
    conv._conv_forward = lambda *arguments: 7
    for module in (layer, conv):
        with pytest.raises(TypeError, match="was replaced, so what it computes is unknown"):
            lipschitz_bound(module)
    with pytest.raises(TypeError, match=r"lipschitz_bound\(Larger\): Larger overrides means"):
        lipschitz_bound(Larger(2))
    assert lipschitz_bound(Renamed(2)) == 1
    with pytest.raises(TypeError, match=r"lipschitz_bound\(Thousandfold\): Thousandfold overrides _call_impl"):
        lipschitz_bound(Thousandfold(2, 2))
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: 3 * output)
    try:
        with pytest.raises(TypeError, match="its hook"):
            lipschitz_bound(nn.ReLU())
    finally:
        handle.remove()


def test_values_that_are_not_numbers():
    layer = gnn.Householder(2)
    layer.normals = torch.full((1, 2), torch.nan)
    with pytest.raises(ValueError, match="expected finite values"):
        lipschitz_bound(layer)
    with pytest.raises(TypeError, match="it has no constant: a parameter that is not finite"):
        lipschitz_bound(nn.LeakyReLU(float("nan")))
    assert lipschitz_bound(nn.Sequential(filled(nn.Linear(2, 2).double(), 1e308), filled(nn.Linear(2, 2), 0))) == 0


@pytest.mark.parametrize(("iterations", "size"), [(4, 0.05), (5, 0.2), (6, 0.45)])
@pytest.mark.parametrize("form", ["spatial", "frequency"])
def test_channels_that_never_meet(form, iterations, size):
    """A low and a high pass: where the one is large the other's share is far below rounding, and was dropped."""
    low, high = torch.tensor([1.0, 2.0, 1.0]) / 4, torch.tensor([1.0, -2.0, 1.0]) / 4
    layer = gnn.SRConv2d(2, 2, 3, padding=1, iterations=iterations, form=form)
    weight = torch.zeros(2, 2, 3, 3)
    weight[0, 0], weight[1, 1] = torch.outer(low, low), size * torch.outer(high, high)
    layer.weight = weight
    assert lipschitz_bound(layer) <= 1 + ROUNDING


@pytest.mark.parametrize(("iterations", "size"), [(5, 0.03), (6, 0.1), (7, 0.3)])
def test_gradients_of_channels_that_never_meet(iterations, size):
    kernel = torch.zeros(2, 2, 3, dtype=torch.float64)
    kernel[0, 0], kernel[1, 1] = torch.tensor([1.0, 2.0, 1.0]) / 4, size * torch.tensor([1.0, -2.1, 1.0]) / 4

    def factor(value):
        mask = torch.zeros_like(kernel)
        mask[1, 1, 1] = 1
        weight = torch.where(mask > 0, value, kernel)
        return rescaling_vector(Convolution(weight), iterations, form="frequency")[1]

    value = kernel[1, 1, 1].clone().requires_grad_()
    step = 1e-6 * abs(float(kernel[1, 1, 1]))
    slope = float(factor(value.detach() + step) - factor(value.detach() - step)) / (2 * step)
    (gradient,) = torch.autograd.grad(factor(value), value)
    assert float(gradient) == pytest.approx(slope, rel=1e-4)
    assert abs(slope) > 1


@pytest.mark.parametrize("scale", [1e-37, 1e-30, 1e-20, 1e20, 1e30, 1.5e38])
def test_weights_at_the_ends_of_the_range(scale):
    torch.manual_seed(0)
    for layer in (
        *(gnn.SLLLinear(4, 3, rescaling=rescaling) for rescaling in ("sr", "aol", "sn")),
        gnn.SLLConv2d(2, 3, 3, form="frequency"),
    ):
        with torch.no_grad():
            layer.weight.copy_(scale * torch.rand_like(layer.weight))
        assert 1 <= lipschitz_bound(layer) <= 1 + ROUNDING
    for layer in (spectral_rescaling(nn.Linear(4, 3)), gnn.SRConv2d(2, 3, 3, form="frequency"), gnn.SRConv1d(2, 2, 3)):
        layer.weight = scale * torch.rand_like(layer.weight)
        assert 0.1 < lipschitz_bound(layer) <= 1 + ROUNDING
        (gradient,) = torch.autograd.grad(layer.weight.sum(), layer.parametrizations.weight.original)
        assert torch.isfinite(gradient).all()


def test_rows_of_very_different_size():
    layer = gnn.SLLLinear(4, 3)
    with torch.no_grad():
        layer.weight.mul_(torch.tensor([[1e30], [1e5], [1.0]]))
    assert 1 <= lipschitz_bound(layer) <= 1 + ROUNDING


def test_many_iterations_of_tall_matrices():
    factors = rescaling_vector(torch.ones(64, 256), 14)
    torch.testing.assert_close(factors, torch.full((256,), (64 * 256) ** -0.5))


def test_layers_that_occur_twice_are_exported_twice():
    layer, activation = gnn.SRLinear(3, 3), gnn.Abs()
    plain = gnn.export(nn.Sequential(layer, activation, layer, activation))
    assert plain[0] is plain[2]
    assert plain[1] is plain[3]
    assert not [part for part in plain.modules() if type(part).__module__.startswith("gramcert")]


@pytest.mark.parametrize("value", [-200.0, 200.0])
def test_extreme_q(value):
    layer = gnn.SLLLinear(4, 3)
    with torch.no_grad():
        layer.log_q[0] = value
    assert torch.isfinite(layer(torch.ones(1, 4))).all()
    assert lipschitz_bound(layer) <= 1 + ROUNDING


def test_exported_layers_can_be_saved_and_loaded(tmp_path):
    plain = gnn.export(nn.Sequential(gnn.MaxMin(), gnn.ScaledAvgPool(2), gnn.SLLConv2d(2, 3, 3)))
    torch.save(plain, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    x = torch.randn(1, 2, 4, 4)
    assert torch.equal(again(x), plain(x))


@pytest.mark.parametrize("make", [lambda: gnn.SRLinear(4, 4), lambda: gnn.SRConv2d(4, 8, 3, groups=2)])
def test_resetting_parameters(make):
    layer = make()
    original = layer.parametrizations.weight.original
    nn.init.ones_(original)
    layer.reset_parameters()
    assert lipschitz_bound(layer) == pytest.approx(1, abs=1e-6)
    assert not (original == 1).all()


def test_layers_without_values():
    """On the meta device, by skip_init, and as fake tensors: shapes are known, values are not read."""
    with torch.device("meta"):
        layers = [
            gnn.SRLinear(3, 4),
            gnn.SRConv2d(3, 8, 3),
            gnn.SLLConv2d(3, 4, 3),
            gnn.SLLLinear(3, 4, rescaling="sn"),
        ]
    for layer, shape in zip(layers, [(2, 3), (2, 3, 5, 5), (2, 3, 5, 5), (2, 3)], strict=True):
        assert layer(torch.empty(shape, device="meta")).is_meta
    for kind, arguments in ((gnn.SRConv2d, (3, 8, 3)), (gnn.SRLinear, (3, 4)), (gnn.SLLConv2d, (3, 4, 3))):
        assert nn.utils.skip_init(kind, *arguments).bias is not None
    with pytest.raises(TypeError, match="expected a dense tensor with values, got a meta tensor"):
        lipschitz_bound(layers[1])
    with FakeTensorMode():
        assert gnn.SRConv2d(3, 8, 3)(torch.empty(1, 3, 5, 5)).shape == (1, 8, 3, 3)


@pytest.mark.parametrize(
    "layer", [gnn.ScaledAvgPool(2), gnn.ScaledL2NormPool(2), gnn.Concatenation(nn.Identity(), gnn.Abs())]
)
def test_layers_without_weights_compile_as_one_graph(layer):
    x = torch.randn(1, 2, 4, 4)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


def test_empty_batches():
    layer = gnn.BatchCentering(3)
    assert layer(torch.zeros(0, 3, 2, 2)).shape == (0, 3, 2, 2)
    assert torch.equal(layer.running_mean, torch.zeros(3))


def test_frozen_weights_stay_frozen_when_exported():
    layer = gnn.SRLinear(3, 3)
    layer.parametrizations.weight.original.requires_grad_(False)
    assert not gnn.export(layer).weight.requires_grad


def test_wrappers_are_looked_through_and_graphs_refused():
    layer = gnn.SRLinear(3, 3)
    assert lipschitz_bound(torch.compile(layer, backend="eager")) == lipschitz_bound(layer)
    assert lipschitz_bound(nn.DataParallel(layer)) == lipschitz_bound(layer)
    with pytest.raises(TypeError, match="a traced graph is not known as a layer"):
        lipschitz_bound(gnn.export(gnn.MaxMin()))


class Pretender(nn.Module):
    def __init__(self):
        super().__init__()
        self._orig_mod = nn.ReLU()

    def forward(self, x):
        return 5 * x


def test_only_the_wrappers_of_torch_are_looked_through():
    with pytest.raises(TypeError, match=r"lipschitz_bound\(Pretender\): its constant is not known"):
        lipschitz_bound(Pretender())
    wrapped = nn.DataParallel(nn.ReLU())
    wrapped.register_forward_hook(lambda module, args, output: 5 * output)
    with pytest.raises(TypeError, match=r"lipschitz_bound\(DataParallel\)"):
        lipschitz_bound(wrapped)


def test_layers_made_for_one_size_refuse_others():
    layer = gnn.SLLConv2d(2, 3, 3, input_size=4)
    assert layer(torch.zeros(1, 2, 4, 4)).shape == (1, 2, 4, 4)
    with pytest.raises(ValueError, match=r"SLLConv2d\(x\): expected the input_size \(4, 4\) that it was made for"):
        layer(torch.zeros(1, 2, 5, 5))


def test_tables_made_in_inference_mode_serve_training():
    layer = gnn.SRConv2d(2, 3, 5, iterations=2)
    with torch.inference_mode():
        layer(torch.zeros(1, 2, 7, 7))
    layer(torch.ones(1, 2, 7, 7)).sum().backward()
    assert layer.parametrizations.weight.original.grad is not None


def test_more_bad_input():
    for call, message in (
        (lambda: gnn.Residual(3), r"Residual\(module\): expected a torch.nn.Module, got 3"),
        (lambda: gnn.Concatenation([nn.ReLU()]), r"Concatenation\(\*modules\): expected torch.nn.Modules"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    with pytest.raises(ValueError, match=r"got \(2, 3\) and \(1,\)"):
        gnn.LogitAnnealing()(torch.ones(2, 3), torch.tensor([0]))
    layer = gnn.SRLinear(3, 3)
    with torch.no_grad():
        layer.parametrizations.weight.original[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"SRLinear\(layer\): expected finite values, got 1 NaN"):
        layer(torch.ones(1, 3))


def test_residual_whose_weight_was_taken_away_is_a_plain_sum():
    block = gnn.Residual(nn.Identity())
    block.weight = None
    assert lipschitz_bound(block) == 2


def test_tensors_of_another_shape_are_refused():
    """Torch would repeat the input along them: more outputs than the constant is for."""
    reflection, shift, centering, mean = (
        gnn.Householder(2),
        gnn.Shift([0.0, 0.0]),
        gnn.LayerCentering(2),
        gnn.BatchCentering(2),
    )
    with torch.no_grad():
        reflection.normals = torch.ones(4, 2)
        shift.values, mean.running_mean = torch.zeros(2, 2), torch.zeros(2, 1)
        centering.bias = nn.Parameter(torch.zeros(3, 2))
    for layer, name in ((reflection, "normals"), (shift, "values"), (centering, "bias"), (mean.eval(), "running_mean")):
        with pytest.raises(ValueError, match=rf"lipschitz_bound\(\w+\.{name}\): expected shape \(.*\), got \(.*\)"):
            lipschitz_bound(layer)
