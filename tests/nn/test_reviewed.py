"""What a reviewer found: each was a bound below the truth, or a layer that did not keep its promise."""

import pytest
import torch
from torch import nn

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
    assert jacobian_norm(block, torch.zeros(1, 2)) <= lipschitz_bound(block) == 1
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
    with pytest.raises(TypeError, match=r"lipschitz_bound\(Larger\): it overrides means"):
        lipschitz_bound(Larger(2))
    assert lipschitz_bound(Renamed(2)) == 1
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: 3 * output)
    try:
        with pytest.raises(TypeError, match="its hook"):
            lipschitz_bound(nn.ReLU())
    finally:
        handle.remove()


class Noisy(nn.Module):
    def forward(self, weight):
        return weight * (1 + torch.rand(()))


def test_a_weight_is_read_once():
    """A parametrisation that gives other weights each time: the bound is for one of them, not for none."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(4))
    nn.utils.parametrize.register_parametrization(layer, "weight", Noisy())
    for seed in range(5):
        torch.manual_seed(seed)
        weight = layer.weight.detach()
        torch.manual_seed(seed)
        assert lipschitz_bound(layer) >= float(weight[0, 0])


def test_values_that_are_not_numbers():
    layer = gnn.Householder(2)
    layer.normals = torch.full((1, 2), torch.nan)
    with pytest.raises(ValueError, match="expected finite values"):
        lipschitz_bound(layer)
    with pytest.raises(TypeError, match="its constant is not known"):
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
