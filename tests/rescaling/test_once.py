"""A weight is computed once per step, and nobody can tell: every change is seen, every backward pass works."""

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from gramcert import parametrizations
from gramcert.parametrizations import spectral_norm, spectral_rescaling

MAPS = {"rescaled": spectral_rescaling, "normalised": spectral_norm}


@pytest.fixture(params=MAPS)
def layer(request):
    torch.manual_seed(0)
    return MAPS[request.param](nn.Conv2d(3, 4, 3, padding=1).double())


def original(layer):
    return layer.parametrizations.weight.original


def fresh(layer):
    """The weight as it would be computed now."""
    twin = copy.deepcopy(layer)
    return twin.weight.detach()


def computed(layer, weight):
    """The weight as a function of another parameter, without anything that is kept."""
    parametrization = layer.parametrizations.weight[0]
    return type(parametrization).forward(_WithoutOnce(parametrization), weight)


class _WithoutOnce:
    def __init__(self, parametrization):
        self.__dict__.update(
            parametrization.__dict__, _once=lambda compute, settings, weight: compute(*settings, weight)
        )


@pytest.fixture
def count(monkeypatch):
    """How often R was computed."""
    calls, compute = [], parametrizations._rescaled

    def counted(*arguments):
        calls.append(arguments)
        return compute(*arguments)

    monkeypatch.setattr(parametrizations, "_rescaled", counted)
    return calls


def test_once_per_step(count):
    torch.manual_seed(0)
    layer = spectral_rescaling(nn.Linear(5, 4))
    steps = torch.optim.Adam(layer.parameters())
    count.clear()
    for step in range(1, 4):
        layer(torch.randn(2, 5)).sum().backward()
        (layer(torch.randn(2, 5)) - layer(torch.randn(2, 5))).square().sum().backward()
        with torch.no_grad():
            layer(torch.randn(2, 5))
        steps.step()
        assert len(count) <= step + 1  # the first weight is that of the registration
    assert len(count) == 2


def test_uses_are_told_apart_by_nobody(layer):
    """Several uses, in one backward pass and in several, as with weights that are computed each time."""
    x, weight = torch.randn(2, 3, 5, 5, dtype=torch.float64), original(layer)
    losses = [layer(x).square().sum(), layer(2 * x).sum(), layer(x - 1).cos().sum()]
    together = torch.autograd.grad(sum(losses), weight, retain_graph=True)[0]
    apart = [torch.autograd.grad(loss, weight)[0] for loss in losses]
    torch.testing.assert_close(together, sum(apart))
    plain = nn.functional.conv2d(x, computed(layer, weight), layer.bias, padding=1).square().sum()
    torch.testing.assert_close(apart[0], torch.autograd.grad(plain, weight)[0])


@pytest.mark.parametrize("gradients", [True, False])
def test_every_change_is_seen(layer, gradients):
    weight = original(layer)
    changes = [
        lambda: weight.data.add_(torch.randn_like(weight)),  # which no version counts
        lambda: setattr(weight, "data", torch.randn_like(weight)),
        lambda: layer.load_state_dict({**layer.state_dict(), "parametrizations.weight.original": weight.flip(0)}),
        lambda: setattr(layer, "weight", torch.randn_like(weight)),
        lambda: layer.float(),
        lambda: layer.double(),
        lambda: nn.utils.vector_to_parameters(
            torch.randn_like(nn.utils.parameters_to_vector(layer.parameters())), layer.parameters()
        ),
    ]
    with torch.set_grad_enabled(gradients):
        for change in changes:
            before = layer.weight.detach().clone()
            with torch.no_grad():
                change()
            assert torch.equal(layer.weight, fresh(layer))
            assert layer.weight.dtype != before.dtype or not torch.equal(layer.weight, before) or change is changes[-2]
    assert layer.weight.requires_grad == torch.is_grad_enabled()


def test_bad_values_are_seen(layer):
    _ = layer.weight
    original(layer).data[0, 0, 0, 0] = torch.nan
    for _ in range(2):
        with pytest.raises(ValueError, match="expected finite values"):
            _ = layer.weight


def test_the_result_may_be_overwritten(layer):
    before = fresh(layer)
    with torch.no_grad():
        layer.weight.zero_()
    layer.weight.data.zero_()
    assert torch.equal(layer.weight, before)


def test_the_same_values_written_again(layer):
    """As distributed training writes them: the graph must not be that of an older version."""
    loss = layer.weight.square().sum()
    with torch.no_grad():
        original(layer).copy_(original(layer).clone())
    layer.weight.square().sum().backward()
    with pytest.raises(RuntimeError, match="modified in place"):
        loss.backward()


def test_modes(layer):
    with torch.inference_mode():
        inside = layer.weight
    assert inside.is_inference()
    with torch.no_grad():
        assert not layer.weight.requires_grad
    assert layer.weight.requires_grad
    layer.weight.sum().backward()
    original(layer).requires_grad_(False)
    assert not layer.weight.requires_grad


def test_second_derivatives(layer):
    weight = original(layer)
    gradient = torch.autograd.grad(layer.weight.square().sum() + layer.weight.sum(), weight, create_graph=True)[0]
    second = torch.autograd.grad(gradient.square().sum(), weight)[0]
    plain = computed(layer, weight)
    expected = torch.autograd.grad(plain.square().sum() + plain.sum(), weight, create_graph=True)[0]
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(second, torch.autograd.grad(expected.square().sum(), weight)[0])


def test_copies_and_files(layer):
    _ = layer(torch.randn(1, 3, 4, 4, dtype=torch.float64))
    twin = copy.deepcopy(layer)
    assert torch.equal(twin.weight, layer.weight)
    twin.weight.sum().backward()
    assert original(twin).grad is not None
    assert original(layer).grad is None
    parametrization = layer.parametrizations.weight[0]
    file = io.BytesIO()
    torch.save(parametrization, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(original(layer)), layer.weight)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(layer, reentrant):
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    original(layer).data.add_(0.1)  # so that the first pass computes, and the second does not
    found = torch.autograd.grad(layer(x).square().sum(), original(layer))[0]
    original(layer).data.add_(0.0)
    checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(original(layer).grad, found)


def test_functional_calls(layer):
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    gradients = torch.func.grad(loss)(parameters, x)
    torch.testing.assert_close(
        gradients["parametrizations.weight.original"],
        torch.autograd.grad(layer(x).square().sum(), original(layer))[0],
    )
    each = torch.func.vmap(lambda one: layer(one[None])[0])(x)  # over inputs alone
    torch.testing.assert_close(each, layer(x))
    by_input = torch.func.grad(lambda one: layer(one).square().sum())(x)
    assert by_input.shape == x.shape


def test_torchs_own_cache(layer):
    with parametrize.cached():
        first = layer.weight
        assert layer.weight is first
    assert torch.equal(layer.weight, first)


def test_settings_are_seen():
    layer = spectral_rescaling(nn.Linear(5, 4).double(), iterations=1)
    _ = layer.weight
    layer.parametrizations.weight[0].iterations = 6
    assert torch.equal(layer.weight, fresh(layer))


def test_nothing_leads_to_the_parameter(layer):
    """After a step the parameter may be swapped, which torch refuses while a graph leads to it, or a weak reference."""
    layer(torch.randn(1, 3, 4, 4, dtype=torch.float64)).sum().backward()
    torch.utils.swap_tensors(original(layer), nn.Parameter(torch.randn_like(original(layer))))
    assert torch.equal(layer.weight, fresh(layer))


def test_nothing_that_made_the_weight_stays(layer):
    base = torch.randn_like(original(layer), requires_grad=True)
    inner = torch.randn_like(base)
    kept, made = weakref.ref(inner), base * inner
    call = torch.func.functional_call
    call(layer, {"parametrizations.weight.original": made}, torch.randn(1, 3, 4, 4).double()).sum().backward()
    assert base.grad is not None
    last = weakref.ref(made)
    del inner, made
    gc.collect()
    assert kept() is None
    assert last() is None


def test_one_node_for_all_uses(layer):
    """While there are any; a second pass after the first has its own."""
    first, second = layer.weight, layer.weight
    assert first.grad_fn.next_functions[0][0] is second.grad_fn.next_functions[0][0]
    for _ in range(2):
        layer.weight.square().sum().backward()
    found = original(layer).grad
    torch.testing.assert_close(
        found, 2 * torch.autograd.grad(computed(layer, original(layer)).square().sum(), original(layer))[0]
    )


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch's own rules of tangents
@pytest.mark.parametrize("gradients", [True, False])
def test_tangents_are_not_lost(layer, gradients):
    weight = original(layer).detach().requires_grad_(gradients)
    parametrization = layer.parametrizations.weight[0]
    refused = pytest.raises(NotImplementedError, match="to use it with forward mode AD")  # as without anything kept
    with forward_ad.dual_level(), refused:
        parametrization(forward_ad.make_dual(weight, torch.ones_like(weight)))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_frozen_between_forward_and_backward(layer):
    x = torch.randn(1, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    loss = layer(x).square().sum()
    original(layer).requires_grad_(False)
    loss.backward(create_graph=True)
    assert original(layer).grad is None
    assert x.grad is not None


def test_modes_of_torch(layer):
    x = torch.randn(1, 3, 4, 4, dtype=torch.float64)
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        original(layer).data.add_(0.1)
        layer(x).sum().backward()
    original(layer).data.add_(0.1)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x)).shape == (1, 4, 4, 4)
    assert torch.equal(layer.weight, fresh(layer))
    before = original(layer).detach().clone().requires_grad_()
    original(layer).grad = None
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        loss = layer(x).square().sum()
        with torch.no_grad():
            original(layer).add_(1.0)
        loss.backward()
    plain = nn.functional.conv2d(x, computed(layer, before), layer.bias, padding=1).square().sum()
    torch.testing.assert_close(original(layer).grad, torch.autograd.grad(plain, before)[0])
