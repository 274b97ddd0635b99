"""Values that are not numbers are refused everywhere, also where torch.func hides them."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import gramcert
import gramcert.nn as gnn
from gramcert.rescaling import rescaling_vector


def in_grad(function):
    """A function called inside torch.func.grad, where values are wrapped."""

    def call(weight):
        found = []

        def inner(wrapped):
            found.append(function(wrapped))
            return wrapped.sum()

        torch.func.grad(inner)(weight)
        return found[0]

    return call


def functional(make):
    """lipschitz_bound of a layer that functional_call gives its weight."""

    class Asked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = make()

        def forward(self):
            return gramcert.lipschitz_bound(self.layer)

    asked = Asked()
    return lambda weight: torch.func.functional_call(asked, {"layer.weight": weight}, ())


CALLS = {
    "gram_norm": gramcert.gram_norm,
    "norm2": lambda weight: gramcert.norm2(gramcert.Convolution(weight[:, :, None])),
    "norm2_circ": lambda weight: gramcert.norm2_circ(weight[:, :, None], 4),
    "norm2_toep": lambda weight: gramcert.norm2_toep(weight[:, :, None]),
    "rescaling_vector": rescaling_vector,
    "rescaling_vector of q": lambda weight: rescaling_vector(torch.eye(2), q=weight[0].abs()),
    "spectral_norm": gramcert.spectral_norm,
    "singular_values": lambda weight: gramcert.singular_values(weight).values.max(),
    "lipschitz_bound": functional(lambda: nn.Linear(2, 2)),
    "lipschitz_bound of a residual layer": functional(lambda: gnn.SLLLinear(2, 2)),
}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_is_not_finite_is_refused_inside_torch_func(call, bad):
    weight = torch.eye(2)
    weight[0, 1] = bad
    for use in (call, in_grad(call)):
        with pytest.raises(ValueError, match="expected finite"):
            use(weight)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_finite_weights_give_the_same_inside_torch_func(call):
    weight = torch.tensor([[1.0, 0.5], [0.25, 2.0]])
    inside, outside = in_grad(call)(weight), call(weight)
    if isinstance(outside, gramcert.Enclosure):
        inside, outside = inside.upper, outside.upper
    assert torch.allclose(torch.as_tensor(inside).detach(), torch.as_tensor(outside).detach())


def test_a_batch_of_vmap_is_not_one_layer():
    for call in (gramcert.spectral_norm, gramcert.singular_values):
        with pytest.raises(TypeError, match=r"\(layer\): expected one tensor with values, got a batch of them"):
            torch.func.vmap(lambda weight, call=call: call(weight).upper)(torch.ones(3, 2, 2))


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (np.float32("nan"), TypeError, "it has no constant: a parameter that is not finite"),
        (np.float64("inf"), TypeError, "it has no constant: a parameter that is not finite"),
        (torch.tensor(math.nan), ValueError, r"lipschitz_bound\(LeakyReLU.negative_slope\): expected finite values"),
    ],
    ids=["float32", "float64", "tensor"],
)
def test_slopes_that_are_not_finite_are_no_slopes(bad, error, message):
    with pytest.raises(error, match=message):
        gramcert.lipschitz_bound(nn.LeakyReLU(bad))
