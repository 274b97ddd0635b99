"""Errors name the call that the user made, not a function below it."""

import inspect
import re

import pytest
import torch
from torch import nn

import gramcert
from gramcert import parametrizations
from gramcert.rescaling import rescaling_vector

ON_LAYERS = {
    "spectral_norm": gramcert.spectral_norm,
    "singular_values": lambda layer: gramcert.singular_values(layer, 8 if isinstance(layer, nn.Conv2d) else None),
    "norm2": gramcert.norm2,
    "lipschitz_bound": gramcert.lipschitz_bound,
    "rescaling_vector": rescaling_vector,
    "spectral_rescaling": parametrizations.spectral_rescaling,
    "almost_orthogonal": parametrizations.almost_orthogonal,
    "certify": lambda layer: gramcert.certify(layer, [(torch.ones(1, 1, 8, 8), torch.zeros(1, dtype=torch.int64))], []),
    "audit": lambda layer: gramcert.audit(layer, (1, 8, 8)),
    "export": gramcert.nn.export,
}
MODELS = ("audit", "export")
KERNELS = {
    "norm2_circ": lambda kernel: gramcert.norm2_circ(kernel, 8),
    "norm2_toep": gramcert.norm2_toep,
    "norm2_sampled": lambda kernel: gramcert.norm2_sampled(kernel, 8),
    "Convolution": gramcert.Convolution,
    "gram_norm": gramcert.gram_norm,
}


class Overridden(nn.Conv2d):
    def forward(self, x):
        return x


def hooked():
    layer = nn.Conv2d(1, 1, 3)
    layer.register_forward_hook(lambda module, inputs, output: None)
    return layer


def repadded():
    layer = nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")
    layer.padding = (0, 0)
    return layer


# What no function can use as a layer.
LAYERS = {
    "nothing": lambda: None,
    "a word": lambda: "layer",
    "a number": lambda: 3,
    "a vector": lambda: torch.ones(3),
    "integers": lambda: torch.ones(2, 2, dtype=torch.int64),
    "another forward": lambda: Overridden(1, 1, 3),
    "a hook": hooked,
    "another padding": repadded,
    "no weights yet": lambda: nn.LazyConv2d(3, 3),
    "complex weights": lambda: nn.Conv2d(1, 1, 3, dtype=torch.complex64),
}


# Whole models may compute anything; a word is a file.
FINE_AS_MODELS = {"a word", "another forward", "a hook", "another padding", "complex weights"}


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        (name, layer)
        for name in ON_LAYERS
        for layer in LAYERS
        if (name not in MODELS or layer not in FINE_AS_MODELS) and (name, layer) != ("certify", "a word")
    ],
)
def test_layers_that_cannot_be_used(name, layer):
    with pytest.raises((TypeError, ValueError), match=rf"^{name}\("):
        ON_LAYERS[name](LAYERS[layer]())


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("kernel", [None, "kernel", torch.ones(3), torch.ones(1, 1, 3, dtype=torch.int64)])
def test_kernels_that_cannot_be_used(name, kernel):
    with pytest.raises((TypeError, ValueError), match=rf"^{name}\("):
        KERNELS[name](kernel)


# Arguments of the layers, each of them wrong in one way.
WRONG = {
    "SRLinear": [(), (2,), ("a", 2), (2, 0, 1, 2, 3, 4), {"iterations": 0}, {"dtype": torch.int32}, {"device": "x"}],
    "SRConv1d": [(), (1, 2), (3, 4, 3, 1, 0, 1, 2), {"iterations": 0}, {"form": "x"}, {"input_size": 1}, {"stride": 0}],
    "SRConv2d": [(), ("a", 2, 3), {"padding_mode": "x"}, {"speed": 1}, {"input_size": (1, 2, 3)}, {"dilation": "a"}],
    "SRConv3d": [(), (1,), {"iterations": 1.5}, {"dtype": torch.int32}],
    "NormalizedLinear": [(), (2,), ("a", 2), {"speed": 1}, {"device": "x"}],
    "SLLLinear": [(), (2,), (0, 2), ("a", 2), (2, 2, nn.ELU(2.0)), {"rescaling": "x"}, {"dtype": torch.int32}],
    "SLLConv1d": [(), (1, 2), {"rescaling": "x"}, {"form": "x"}, {"iterations": 0}, {"speed": 1}],
    "SLLConv2d": [(), (1, 2), (1, 2, (3, 3, 3)), (1, 0, 3), (1, 2, 3, "relu"), {"device": "x"}, {"input_size": 0}],
    "SLLConv3d": [(), (1, 2), (1, 2, 3, None, "sr")],
    "ScaledAvgPool": [(), (0,), ("a",), {"stride": 0}, {"axes": 4}, {"speed": 1}],
    "ScaledL2NormPool": [(), (0,), ("a",), {"axes": 4}],
    "Subsample": [(), (0,), {"axes": 4}],
    "PadChannels": [(), (0,), ("a",)],
    "Shift": [(), ("a",), ([float("nan")],)],
    "LayerCentering": [(), (0,), {"dtype": torch.int32}, {"device": "x"}],
    "BatchCentering": [(), (0,), {"momentum": 2}, {"dtype": torch.int32}],
    "GroupSort": [(0,), ("a",), {"speed": 1}],
    "MaxMin": [(3,), {"speed": 1}],
    "Abs": [(3,), {"speed": 1}],
    "Householder": [(), (3,), ("a",), {"dtype": torch.int32}],
    "Residual": [(), (3,), (nn.ReLU(), 2)],
    "Concatenation": [(), (3,)],
    "OffsetCrossEntropy": [("a",), {"temperature": 0}],
    "HingeMargin": [("a",), (0.0,), {"speed": 1}],
    "LogitAnnealing": [("a",), {"power": -1}, {"temperature": 0}],
}
# What else is made rightly with.
RIGHT = {
    "SRLinear": (2, 2),
    "SRConv1d": (1, 1, 3),
    "SRConv2d": (1, 1, 3),
    "SRConv3d": (1, 1, 3),
    "NormalizedLinear": (2, 2),
    "SLLLinear": (2, 2),
    "SLLConv1d": (1, 1, 3),
    "SLLConv2d": (1, 1, 3),
    "SLLConv3d": (1, 1, 3),
    "ScaledAvgPool": (2,),
    "ScaledL2NormPool": (2,),
    "Subsample": (2,),
    "LayerCentering": (2,),
    "BatchCentering": (2,),
    "Householder": (2,),
}


@pytest.mark.parametrize(("name", "wrong"), [(name, wrong) for name, cases in WRONG.items() for wrong in cases])
def test_layers_that_cannot_be_made(name, wrong):
    arguments, options = (wrong, {}) if isinstance(wrong, tuple) else (RIGHT.get(name, ()), wrong)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=rf"^{name}\b"):
        getattr(gramcert.nn, name)(*arguments, **options)


def test_every_layer_is_among_them():
    layers = {name for name in gramcert.nn.__all__ if inspect.isclass(getattr(gramcert.nn, name))}
    assert layers - {"Flatten"} == WRONG.keys()


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("name", ["spectral_norm", "singular_values", "norm2", "rescaling_vector"])
def test_a_kernel_in_place_of_a_layer_is_told_what_to_give(name, axes):
    kernel = torch.ones(1, 1, *(3,) * axes)
    with pytest.raises(
        (TypeError, ValueError), match=rf"^{name}\(layer\): .*give the layer, or gramcert\.Convolution\(w"
    ):
        ON_LAYERS[name](kernel)


@pytest.mark.parametrize("name", ["SRLinear", "NormalizedLinear"])
def test_linear_layers_keep_the_positions_of_torch(name):
    kind = getattr(gramcert.nn, name)
    torchs = list(inspect.signature(nn.Linear).parameters)
    assert [p.name for p in inspect.signature(kind).parameters.values() if p.kind is not p.KEYWORD_ONLY] == torchs
    layer = kind(3, 2, False, torch.device("cpu"), torch.float64)
    assert layer.bias is None
    assert layer.weight.dtype == torch.float64


def test_the_arguments_of_python_are_named_too():
    with pytest.raises(
        TypeError, match=re.escape("SLLConv2d.__init__() missing 1 required positional argument: 'kernel")
    ):
        gramcert.nn.SLLConv2d(1, 2)
    with pytest.raises(TypeError, match=re.escape("SRConv1d.__init__() got an unexpected keyword argument 'speed'")):
        gramcert.nn.SRConv1d(1, 2, 3, speed=1)
