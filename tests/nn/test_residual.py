"""The residual layer of Corollary 1 against its dense Jacobian, with the weights as deployed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cases import tensors
from gramcert import lipschitz_bound
from gramcert.geometry.convolution import Convolution
from gramcert.nn import Abs, MaxMin, SLLConv1d, SLLConv2d, SLLConv3d, SLLLinear, export
from gramcert.operators.measurement import ResidualLayer
from reference import jacobian_norm, sigma

RESCALINGS = ("sr", "aol", "sn")
FORMS = ("spatial", "frequency")
SIZES = {SLLConv1d: (7,), SLLConv2d: (4, 3), SLLConv3d: (2, 3, 2)}
ROUNDING = 100 * torch.finfo(torch.float32).eps


@st.composite
def residual_layers(draw):
    """A layer with any weights, biases and q, and an input."""
    rescaling = draw(st.sampled_from(RESCALINGS))
    channels, hidden = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    activation = draw(st.sampled_from([nn.ReLU(), nn.LeakyReLU(0.5), nn.Tanh(), nn.Identity(), nn.ELU()]))
    kind = draw(st.sampled_from([SLLLinear, *SIZES]))
    if kind is SLLLinear:
        layer = SLLLinear(channels, hidden, activation, rescaling=rescaling)
        x = torch.randn(1, channels)
    else:
        taps = draw(st.integers(1, 4 if kind is SLLConv1d else 3))
        size = draw(st.sampled_from([None, SIZES[kind]]))
        layer = kind(
            channels, hidden, taps, activation, rescaling=rescaling, form=draw(st.sampled_from(FORMS)), input_size=size
        )
        x = torch.randn(1, channels, *SIZES[kind])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    with torch.no_grad():
        layer.weight.copy_(draw(tensors(tuple(layer.weight.shape), torch.float32)))
        layer.bias.copy_(torch.randn(hidden, generator=generator))
        if layer.log_q is not None:
            layer.log_q.copy_(torch.randn(hidden, generator=generator))
    return layer, 3 * torch.randn(x.shape, generator=generator)


@given(residual_layers())
def test_jacobian_is_below_the_certified_constant(case):
    layer, x = case
    size = tuple(x.shape[2:]) or None
    bound = lipschitz_bound(layer, size)
    assert bound <= 1 + ROUNDING
    # The exported layer has the deployed float32 weights; float64 holds them exactly.
    deployed = export(layer).double()
    assert jacobian_norm(deployed, x) <= bound * (1 + 1e-12)
    if getattr(layer, "input_size", None) is None:
        assert jacobian_norm(deployed, x) <= lipschitz_bound(layer) * (1 + 1e-12)


def test_the_bound_is_reached():
    """Where nothing is active the layer is the identity; where all is, a reflection: both have norm 1."""
    layer = SLLLinear(6, 4)
    deployed = export(layer).double()
    norms = []
    for bias in (-100.0, 100.0):
        nn.init.constant_(deployed.inner.bias, bias)
        norms.append(jacobian_norm(deployed, torch.randn(1, 6)))
    assert 1 - 1e-6 < min(norms) <= max(norms) <= lipschitz_bound(layer)


def test_constants_above_one_are_found():
    """Weights that are not those of the rescaling: the certified constant says so."""
    weight = torch.eye(3)[:, :, None]
    factors = torch.tensor([2.0, 2.2, 1.0])
    bound = ResidualLayer(Convolution(weight), weight * factors[:, None, None], None).run(1e-3).upper
    exact = sigma(torch.eye(3) - torch.diag(factors))
    assert exact <= bound <= exact + 1e-6
    # An outer weight that is not the inner one times the factors.
    outer = weight * factors[:, None, None]
    outer[0, 1] = 0.5
    bound = ResidualLayer(Convolution(weight), outer, None).run(1e-3).upper
    active = sigma(torch.eye(3) - outer[:, :, 0].T)
    assert active <= bound < active + 0.6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rescaling", ["sr", "aol"])
def test_q_acts_in_the_convolution(form, rescaling):
    """A published layer reshapes q so that it cancels: here it has a gradient, and changes the output."""
    layer = SLLConv2d(4, 6, 3, rescaling=rescaling, form=form)
    x = torch.randn(2, 4, 5, 5)
    before = layer(x)
    before.square().sum().backward()
    assert layer.log_q.grad.abs().min() > 0
    with torch.no_grad():
        layer.log_q += torch.randn(6)
    assert (layer(x) - before).abs().max() > 1e-3
    assert 1 <= lipschitz_bound(layer) <= 1 + ROUNDING


def test_normalisation_is_cpl():
    """x - 2/‖W‖²·Wᵀφ(Wx + b), with the norm itself."""
    layer = SLLLinear(5, 7, rescaling="sn", iterations=20, dtype=torch.float64)
    x = torch.randn(3, 5, dtype=torch.float64)
    hidden = torch.relu(x @ layer.weight.T + layer.bias)
    expected = x - 2 / sigma(layer.weight) ** 2 * hidden @ layer.weight
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert layer.log_q is None
    assert 1 <= lipschitz_bound(layer) <= 1 + 1e-12


@pytest.mark.parametrize(
    "make", [lambda: SLLConv2d(3, 4, 3, dtype=torch.float64), lambda: SLLLinear(3, 4, dtype=torch.float64)]
)
def test_gradients(make):
    layer = make()
    x = torch.randn(1, 3, *(3, 3) if isinstance(layer, SLLConv2d) else (), dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]
    values = [value.detach().clone().requires_grad_() for value in layer.parameters()]

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *values))


@pytest.mark.parametrize("rescaling", RESCALINGS)
def test_still_inside_after_training(rescaling):
    model = nn.Sequential(SLLConv2d(2, 4, 3, rescaling=rescaling), nn.Flatten(), SLLLinear(32, 16, rescaling=rescaling))
    x, y = torch.randn(16, 2, 4, 4), torch.randn(16, 32)
    steps = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(20):
        steps.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        steps.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert jacobian_norm(export(model).double(), x[:1]) <= lipschitz_bound(model) <= 1 + ROUNDING


def test_zero_weights_leave_the_identity():
    for layer in (SLLLinear(3, 2), SLLConv2d(3, 2, 3, rescaling="aol"), SLLConv2d(3, 2, 3, rescaling="sn")):
        nn.init.zeros_(layer.weight)
        x = torch.randn(2, 3, *(4, 4) if isinstance(layer, SLLConv2d) else ())
        assert torch.equal(layer(x), x)
        assert lipschitz_bound(layer) == pytest.approx(1, abs=1e-12)
        layer(x).sum().backward()
        assert torch.isfinite(layer.weight.grad).all()


def test_rows_of_very_different_size():
    layer = SLLLinear(4, 3)
    with torch.no_grad():
        layer.weight.mul_(torch.tensor([[1e30], [1e5], [1.0]]))
    assert 1 <= lipschitz_bound(layer) <= 1 + ROUNDING


@pytest.mark.parametrize("value", [-200.0, 200.0])
def test_extreme_q(value):
    layer = SLLLinear(4, 3)
    with torch.no_grad():
        layer.log_q[0] = value
    assert torch.isfinite(layer(torch.ones(1, 4))).all()
    assert 1 <= lipschitz_bound(layer) <= 1 + ROUNDING


def test_half_precision_and_compilation():
    layer = SLLConv2d(4, 6, 3)
    x = torch.randn(2, 4, 5, 5)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    outer, plain = layer.outer_weight(), layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.outer_weight(), outer)
        torch.testing.assert_close(layer(x), plain, rtol=0, atol=4 * torch.finfo(torch.bfloat16).eps)
    half = SLLConv2d(4, 6, 3).bfloat16()
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert 1 < lipschitz_bound(half) < 1.05


class Slanted(nn.ReLU):
    pass


@pytest.mark.parametrize(
    "activation",
    [
        MaxMin(),
        nn.GELU(),
        nn.SiLU(),
        nn.SELU(),
        nn.PReLU(),
        nn.RReLU(),
        nn.Softplus(),
        nn.LeakyReLU(-0.1),
        nn.LeakyReLU(2.0),
        nn.ELU(2.0),
        Slanted(),
    ],
    ids=str,
)
def test_other_activations_are_refused(activation):
    with pytest.raises(ValueError, match=r"SLLConv2d\(activation=.*only for elementwise activations with"):
        SLLConv2d(2, 2, 3, activation)


def test_residual_layers_check_their_activation_again():
    layer = SLLLinear(4, 4)
    layer.activation = Abs()
    with pytest.raises(ValueError, match="only for elementwise activations"):
        lipschitz_bound(layer)
    layer = SLLLinear(4, 4)
    layer.activation.register_forward_hook(lambda module, args, output: 5 * output)
    with pytest.raises(TypeError, match="its hook"):
        lipschitz_bound(layer)
    layer = SLLLinear(4, 4, nn.LeakyReLU(0.1))
    layer.activation.negative_slope = -3.0
    with pytest.raises(ValueError, match="only for elementwise activations"):
        lipschitz_bound(layer)


def test_other_errors():
    with pytest.raises(TypeError, match=r"SLLLinear\(activation\): expected a torch.nn.Module"):
        SLLLinear(2, 2, torch.relu)
    with pytest.raises(ValueError, match=r"SLLLinear\(rescaling='x'\): expected one of sr, aol, sn"):
        SLLLinear(2, 2, rescaling="x")
    with pytest.raises(ValueError, match=r"rescaling='aol' is one iteration"):
        SLLLinear(2, 2, rescaling="aol", iterations=3)
    with pytest.raises(ValueError, match=r"SLLConv2d\(kernel_size=\(3,\)\): SLLConv2d needs 2 sizes, got 1"):
        SLLConv2d(2, 2, (3,))
    with pytest.raises(ValueError, match=r"SLLConv2d\(x\): expected \(batch, 2, 2 sizes\), got shape \(1, 3, 4, 4\)"):
        SLLConv2d(2, 2, 3)(torch.zeros(1, 3, 4, 4))
    with pytest.raises(ValueError, match=r"SLLLinear\(x\): expected \(..., 2\), got shape \(1, 3\)"):
        SLLLinear(2, 2)(torch.zeros(1, 3))


def test_layers_made_for_one_size_refuse_others():
    layer = SLLConv2d(2, 3, 3, input_size=4)
    assert layer(torch.zeros(1, 2, 4, 4)).shape == (1, 2, 4, 4)
    with pytest.raises(ValueError, match=r"SLLConv2d\(x\): expected the input_size \(4, 4\) that it was made for"):
        layer(torch.zeros(1, 2, 5, 5))
