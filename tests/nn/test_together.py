"""The weights of equal residual layers computed at once are those that each computes for itself."""

import copy
import threading

import pytest
import torch
from torch import nn

from gramcert.nn import SLLConv1d, SLLConv2d, SLLLinear, together
from gramcert.nn import residual as residual_layers


def network(rescaling="sr", dtype=torch.float64, **options):
    torch.manual_seed(0)
    layers = [
        *(SLLConv2d(4, 6, 3, rescaling=rescaling, dtype=dtype, **options) for _ in range(3)),
        SLLConv2d(4, 6, 3, nn.Tanh(), rescaling=rescaling, dtype=dtype, **options),
        SLLConv2d(4, 2, 3, rescaling=rescaling, dtype=dtype, **options),
        nn.Flatten(),
        *(SLLLinear(64, 10, rescaling=rescaling, dtype=dtype) for _ in range(2)),
        *(SLLLinear(64, 80, rescaling=rescaling, dtype=dtype) for _ in range(2)),
    ]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1e-30 if name in ("1.weight", "1.bias") else 2.0)  # scales are each layer's own
            parameter.add_(torch.randn_like(parameter) if name.endswith("log_q") else 0.0)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"iterations": 1},
        {"form": "frequency", "iterations": 2},
        {"form": "frequency", "iterations": 3, "input_size": 4},
        {"rescaling": "aol"},
        {"rescaling": "sn"},
    ],
)
def test_values_and_gradients(options):
    model = network(**options)
    twin = copy.deepcopy(model)
    x = torch.randn(3, 4, 4, 4, dtype=torch.float64)
    expected = model(x)
    with together(twin):
        assert len(residual_layers._INSIDE.layers) == 9
        found = twin(x)
    torch.testing.assert_close(found, expected)
    for result in (found, expected):
        result.square().sum().backward()  # outside, as the graph is there
    for parameter, other in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def test_one_call_for_equal_layers(monkeypatch):
    model, calls = network(), []
    compute = residual_layers.rescaling_of_all

    def counted(layers, *arguments, **options):
        calls.append(len(layers))
        return compute(layers, *arguments, **options)

    monkeypatch.setattr(residual_layers, "rescaling_of_all", counted)
    with together(model):
        model(torch.randn(1, 4, 4, 4, dtype=torch.float64))
    assert sorted(calls) == [1, 2, 2, 4]


def test_nothing_stays_behind():
    model = network()
    x = torch.randn(2, 4, 4, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="expected"), together(model):
        model(x[:, :3])
    assert not len(residual_layers._INSIDE.layers)
    with together(model):
        model(x)
    before = model(x)
    with torch.no_grad():
        model[0].weight.add_(torch.randn_like(model[0].weight))
    assert not torch.allclose(model(x), before)
    # A part of it inside another, and a certificate inside, which looks at the weights themselves.
    with together(model[:2]), together(model):
        assert len(residual_layers._INSIDE.layers) == 9
        torch.testing.assert_close(
            model[0].outer_weight().detach(), -residual_layers._INSIDE.layers[model[0]].weight.detach()
        )
    assert not len(residual_layers._INSIDE.layers)


def test_layers_of_one_dimension_and_half_precision():
    torch.manual_seed(0)
    model = nn.Sequential(*(SLLConv1d(3, 5, 3, dtype=torch.bfloat16) for _ in range(2)))
    x = torch.randn(2, 3, 7, dtype=torch.bfloat16)
    with together(model):
        found = model(x)
    torch.testing.assert_close(found, model(x))


def linear_layers():
    torch.manual_seed(0)
    return nn.Sequential(*(SLLLinear(6, 8, dtype=torch.float64) for _ in range(3)))


def gradients(model, y):
    return torch.autograd.grad(y.square().sum(), list(model.parameters()))


def test_other_parameters_inside():
    model, x = linear_layers(), torch.randn(4, 6, dtype=torch.float64)
    others = {name: torch.randn_like(each) for name, each in model.named_parameters()}
    call = torch.func.functional_call
    with together(model):
        found = call(model, others, (x,))
        by_others = torch.func.grad(lambda given: call(model, given, (x,)).square().sum())(others)
    torch.testing.assert_close(found, call(model, others, (x,)))
    expected = torch.func.grad(lambda given: call(model, given, (x,)).square().sum())(others)
    torch.testing.assert_close(by_others, expected)


@pytest.mark.parametrize("name", ["weight", "log_q"])
def test_changes_inside_are_seen(name):
    model, x = linear_layers(), torch.randn(4, 6, dtype=torch.float64)
    with together(model):
        with torch.no_grad():
            getattr(model[0], name).mul_(3).add_(torch.randn(8, 1)[:, 0] if name == "log_q" else 0.0)
        found = model(x)
        with together(model):
            torch.testing.assert_close(model(x), found)
    torch.testing.assert_close(found, model(x))
    with together(model):
        model.float()
        assert model(x.float()).dtype == torch.float32


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_gradient_is_lost(mode):
    model, x = linear_layers(), torch.randn(4, 6, dtype=torch.float64)
    expected = gradients(model, model(x))
    with mode(), together(model):
        with torch.inference_mode(False), torch.enable_grad():
            torch.testing.assert_close(gradients(model, model(x)), expected)
            with together(model):
                torch.testing.assert_close(gradients(model, model(x)), expected)
        assert not model(x).requires_grad
    model[0].requires_grad_(False)
    with together(model):
        model[0].requires_grad_(True)
        torch.testing.assert_close(gradients(model, model(x)), expected)


def test_threads_have_their_own():
    model, x = linear_layers(), torch.randn(4, 6, dtype=torch.float64)
    expected, found = gradients(model, model(x)), []

    def step():
        with together(model):
            found.append(gradients(model, model(x)))

    with torch.no_grad(), together(model):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        assert len(residual_layers._INSIDE.layers) == 3
    torch.testing.assert_close(found[0], expected)
