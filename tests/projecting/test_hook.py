import copy
import re

import pytest
import torch
from torch import nn

import gramcert
from gramcert import projection, spectral_norm


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 6, 4, stride=2, padding=1, padding_mode="circular"),
        nn.Flatten(),
        nn.Linear(6 * 4 * 4, 3),
    )


def layers_of(model):
    return [layer for layer in model if hasattr(layer, "weight")]


def step(model, optimizer):
    """One that makes every norm larger."""
    optimizer.zero_grad()
    (-model(torch.randn(8, 2, 8, 8)).square().mean()).backward()
    optimizer.step()


def uppers(model):
    return [spectral_norm(layer, tol=1e-2).upper for layer in layers_of(model)]


def test_every_step_ends_inside_and_nothing_else_is_touched():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    weights = [layer.weight for layer in layers_of(model)]
    handle = projection(optimizer, layers_of(model), norm=0.8)
    assert max(uppers(model)) <= 0.8  # at once
    for count in range(1, 4):
        step(model, optimizer)
        assert 0.7 < max(uppers(model)) <= 0.8
        assert all(layer.weight is weight for layer, weight in zip(layers_of(model), weights, strict=True))
        assert all(optimizer.state[weight]["step"] == count for weight in weights)
    handle.remove()
    step(model, optimizer)
    assert max(uppers(model)) > 0.8


def test_the_optimiser_moves_as_it_would():
    """One step from the same weights: the projected step of an optimiser without the hook."""
    models = [network(), network()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9) for model in models]
    projection(optimizers[0], layers_of(models[0]))
    models[1].load_state_dict(copy.deepcopy(models[0].state_dict()))
    for model, optimizer in zip(models, optimizers, strict=True):
        torch.manual_seed(1)
        step(model, optimizer)
    for layer, free in zip(layers_of(models[0]), layers_of(models[1]), strict=True):
        assert torch.equal(layer.weight, gramcert.project(free, steps=8, tol=1e-2))
        assert torch.equal(layer.bias, free.bias)


def test_between_projections_weights_are_free():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    projection(optimizer, layers_of(model), every=2, norm=0.5)
    for inside in (False, True, False, True):
        step(model, optimizer)
        assert (max(uppers(model)) <= 0.5) == inside


def test_half_precision_and_one_size():
    layer = nn.Conv2d(3, 3, 3, padding=1, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([layer.weight], lr=0.1)
    projection(optimizer, [layer], norm=0.5, input_size=4)
    layer.weight.grad = torch.randn_like(layer.weight)
    optimizer.step()
    assert layer.weight.dtype == torch.bfloat16
    assert layer.weight.requires_grad
    assert spectral_norm(layer, 4, tol=1e-2).upper <= 0.5


LINEAR = nn.Linear(2, 2)
SGD = torch.optim.SGD(LINEAR.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((LINEAR, [LINEAR]), {}, "projection(optimizer): expected a torch.optim.Optimizer, got Linear"),
        ((SGD, LINEAR), {}, "projection(layers): expected a sequence of layers, got Linear"),
        ((SGD, []), {}, "projection(layers): expected at least one layer, got none"),
        ((SGD, [LINEAR, nn.ReLU()]), {}, "projection(layers[1]): expected Linear or a Conv or ConvTranspose layer"),
        ((SGD, [LINEAR, LINEAR]), {}, "projection(layers[1]): its weight is that of an earlier layer"),
        ((SGD, [nn.Linear(2, 2)]), {}, "projection(layers[0]): its weight is not among the parameters"),
        ((SGD, [LINEAR], 0), {}, "projection(every=0): expected at least 1"),
        ((SGD, [LINEAR], 1.5), {}, "projection(every): expected an int, got 1.5"),
        ((SGD, [LINEAR], 1, 0.0), {}, "projection(norm=0.0): expected a positive finite number"),
        ((SGD, [LINEAR]), {"steps": 0}, "projection(steps=0): expected at least 1"),
        ((SGD, [LINEAR]), {"tol": 0}, "projection(tol=0): expected 0 < tol < 1"),
        ((SGD, [LINEAR]), {"input_size": 3}, "projection(input_size=3): Linear has no spatial size, expected None"),
    ],
    ids=str,
)
def test_what_is_refused(arguments, options, message):
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
        projection(*arguments, **options)
    assert not SGD._optimizer_step_post_hooks


def test_parametrised_layers_are_refused():
    layer = gramcert.parametrizations.spectral_norm(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=re.escape("projection(layers[0]): its weight is computed by a paramet")):
        projection(optimizer, [layer])
