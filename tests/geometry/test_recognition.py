"""Layers that compute something else than their class says are refused by name, wherever the change is hidden."""

import copy
import functools
import math
import random
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

import gramcert
import gramcert.nn as gnn
from gramcert import certify, lipschitz_bound, norm2, spectral_norm
from gramcert.auditing.entry import audit
from reference import sigma

LAYERS = {
    gnn.MaxMin: (),
    gnn.Abs: (),
    gnn.SLLLinear: (4, 4),
    gnn.SLLConv2d: (2, 2, 3),
    gnn.SRLinear: (4, 4),
    gnn.SRConv2d: (2, 2, 3),
    gnn.NormalizedLinear: (4, 4),
    gnn.Householder: (2,),
    gnn.Residual: (nn.ReLU(),),
    gnn.Concatenation: (nn.ReLU(), nn.ReLU()),
    gnn.ScaledAvgPool: (2,),
    nn.Linear: (4, 4),
    nn.Conv2d: (2, 2, 3),
    nn.ConvTranspose2d: (2, 2, 3),
    nn.Sequential: (nn.ReLU(), nn.Linear(4, 4)),
    nn.ReLU: (),
    nn.MaxPool2d: (2,),
    nn.Flatten: (),
}

# Methods through which what a layer computes can be changed.
METHODS = ["forward", "compute", "__call__", "_call_impl", "__getattr__", "__getattribute__"]


def mixin(method):
    """A class that knows nothing of torch, with one method that changes what the next class gives."""

    def changed(self, *args, **kwargs):
        result = getattr(super(kind, self), method)(*args, **kwargs)
        return 10 * result if isinstance(result, torch.Tensor) else result

    kind = type("Tenfold", (), {method: changed})
    return kind


@given(st.sampled_from(list(LAYERS)), st.sampled_from(METHODS), st.booleans(), st.booleans(), st.booleans())
def test_mixins_that_change_a_method_are_refused(kind, method, is_first, is_nested, in_sequence):
    """Before the layer in the order of resolution, or after it where nothing else defines the method."""
    tenfold = mixin(method)
    loud = type("Loud", (tenfold, kind) if is_first else (kind, tenfold), {})

    def bound():
        layer = (type("Louder", (loud,), {}) if is_nested else loud)(*LAYERS[kind])
        return lipschitz_bound(nn.Sequential(layer) if in_sequence else layer)

    winner = next(found for found in loud.__mro__ if method in vars(found))
    if winner is tenfold and (method != "compute" or hasattr(kind, "compute")):
        message = r"\(\w*Loude?r?\): (Tenfold overrides|its constant is not known)"
        with pytest.raises(TypeError, match=message):
            bound()
    elif kind not in (nn.ReLU, nn.MaxPool2d, nn.Flatten):  # of which subclasses are never known
        assert 0 < bound() < math.inf


def test_helper_methods_are_part_of_what_a_layer_computes():
    for base, method in (
        (nn.ConvTranspose2d, "_output_padding"),
        (nn.Conv2d, "_conv_forward"),
        (gnn.SLLConv2d, "outer_weight"),
        (gnn.SLLConv2d, "padding"),
        (nn.Sequential, "__iter__"),
    ):
        layer = base(nn.ReLU()) if base is nn.Sequential else base(1, 1, 3)
        layer.__class__ = type("Changed", (base,), {method: lambda self, *args, **kwargs: None})
        with pytest.raises(TypeError, match=f"Changed overrides {method}, so what it computes is unknown"):
            lipschitz_bound(layer)


def test_subclasses_that_change_nothing_are_known():
    class Named(nn.Conv2d):
        size = 3

        def describe(self):
            return f"{self.size}"

        def extra_repr(self):
            return self.describe()

    layer = Named(1, 1, 3)
    layer.size = 4
    for name, value in (("mask", torch.ones(2, dtype=torch.bool)), ("table", torch.ones(2).to(torch.float8_e5m2))):
        layer.register_buffer(name, value)
    layer.register_buffer("sparse", torch.eye(2).to_sparse())
    assert lipschitz_bound(layer) == lipschitz_bound(nn.Sequential(layer))
    assert 0 < spectral_norm(layer).upper < math.inf

    class Own(gnn.MaxMin):
        def compute(self, x):
            return 2 * super().compute(x)

        def describe_operators(self, outline, x):
            return outline.constant(x, 2.0, "doubled")

    assert lipschitz_bound(Own()) == 2


@pytest.mark.parametrize(
    ("kind", "method", "make"),
    [
        (nn.ReLU, "forward", nn.ReLU),
        (nn.ReLU, "forward", lambda: gnn.SLLLinear(2, 2)),
        (nn.Linear, "forward", lambda: nn.Linear(2, 2)),
        (nn.Sequential, "forward", lambda: nn.Sequential(nn.ReLU())),
        (nn.Conv2d, "_conv_forward", lambda: nn.Conv2d(1, 1, 1)),
        (gnn.MaxMin, "compute", gnn.MaxMin),
        (gnn.MaxMin, "describe_operators", gnn.MaxMin),
        (gnn.MaxMin, "outlined", gnn.MaxMin),
        (gnn.MaxMin.__mro__[1], "forward", gnn.MaxMin),
        (nn.Module, "__call__", nn.ReLU),
        (nn.Module, "_call_impl", nn.ReLU),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),  # no address: processes have to agree
)
@pytest.mark.parametrize("wrapped", [True, False], ids=["wraps", "lambda"])
def test_patched_classes_are_refused(kind, method, make, wrapped, monkeypatch):
    """Also where the patch looks like the function that it replaces, and where it is one of the same module."""
    layer = make()
    before = getattr(kind, method)
    patch = functools.wraps(before)(lambda *args, **kwargs: 5) if wrapped else lambda *args, **kwargs: 5
    monkeypatch.setattr(kind, method, patch, raising=False)
    with pytest.raises(TypeError, match=rf"was patched at {method}|{kind.__name__}.describe_operators"):
        lipschitz_bound(layer)


@pytest.mark.parametrize("method", ["_conv_forward", "forward"])
def test_what_is_no_function_is_a_patch_too(method, monkeypatch):
    for patch in (mock.MagicMock(side_effect=lambda x, *rest: 100 * x), functools.partialmethod(lambda self, x: 5)):
        monkeypatch.setattr(nn.Conv2d, method, patch)
        with pytest.raises(TypeError, match=f"Conv2d was patched at {method}"):
            lipschitz_bound(nn.Conv2d(1, 1, 1))


def test_classes_with_methods_of_every_kind_are_as_they_were_written(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/peers", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        assert lipschitz_bound(wrapped) == lipschitz_bound(wrapped.module)
    finally:
        torch.distributed.destroy_process_group()


def test_methods_of_another_class_of_the_same_module_are_patches(monkeypatch):
    monkeypatch.setattr(nn.Tanh, "forward", nn.SELU.forward)
    with pytest.raises(TypeError, match="Tanh was patched at forward"):
        lipschitz_bound(nn.Tanh())


def test_parametrised_classes_are_looked_at_too():
    layer = gnn.SRLinear(2, 2)
    type(layer).forward = lambda self, x: 5 * x
    with pytest.raises(TypeError, match="ParametrizedSRLinear overrides forward"):
        lipschitz_bound(layer)


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


def test_wrappers_with_a_forward_of_their_own_are_refused():
    wrapped = nn.DataParallel(nn.ReLU())
    wrapped.forward = lambda x: 5 * x
    with pytest.raises(TypeError, match=r"lipschitz_bound\(DataParallel\): its forward was replaced"):
        lipschitz_bound(wrapped)
    compiled = torch.compile(nn.ReLU(), backend="eager")
    assert lipschitz_bound(compiled) == 1
    compiled.forward = functools.wraps(compiled.forward)(lambda x: 5 * x)
    with pytest.raises(TypeError, match=r"lipschitz_bound\(OptimizedModule\): its forward was replaced"):
        lipschitz_bound(compiled)
    compiled = torch.compile(nn.ReLU(), backend="eager")
    compiled.register_forward_hook(lambda module, args, output: 5 * output)
    with pytest.raises(TypeError, match=r"lipschitz_bound\(OptimizedModule\): it has hooks"):
        lipschitz_bound(compiled)
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    compiled._modules["_orig_mod"] = nn.ReLU()
    with pytest.raises(TypeError, match=r"its forward was replaced"):
        lipschitz_bound(compiled)
    layer = nn.ReLU()
    layer.compile(backend="eager")
    assert lipschitz_bound(layer) == 1
    layer._compiled_call_impl = lambda x: 5 * x
    with pytest.raises(TypeError, match=r"lipschitz_bound\(ReLU\): its _compiled_call_impl was replaced"):
        lipschitz_bound(layer)


def test_padding_that_was_changed_after_construction_is_refused():
    conv = nn.Conv1d(1, 1, 1, padding=1, padding_mode="circular")
    conv.padding = (0,)
    with pytest.raises(TypeError, match="its padding was changed after construction"):
        lipschitz_bound(conv)


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


def test_wrappers_are_looked_through_and_graphs_refused():
    layer = gnn.SRLinear(3, 3)
    assert lipschitz_bound(torch.compile(layer, backend="eager")) == lipschitz_bound(layer)
    assert lipschitz_bound(nn.DataParallel(layer)) == lipschitz_bound(layer)
    with pytest.raises(TypeError, match="a traced graph is not known as a layer"):
        lipschitz_bound(gnn.export(gnn.MaxMin()))


class Tenfold(torch.Tensor):
    """Computes something else wherever it occurs."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        return 10 * result if function is torch.nn.functional.linear else result


def test_subclasses_of_tensors_are_refused():
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Tenfold))
    biased = nn.Conv1d(1, 1, 1)
    biased.bias = nn.Parameter(biased.bias.detach().as_subclass(Tenfold))
    residual = gnn.SLLLinear(2, 2)
    residual.bias = nn.Parameter(residual.bias.detach().as_subclass(Tenfold))
    for module, name in ((layer, "weight"), (biased, "bias"), (residual, "bias")):
        with pytest.raises(TypeError, match=rf"\w+\.{name}\): expected a torch.Tensor, got its subclass Tenfold"):
            lipschitz_bound(module)
    for call in (spectral_norm, norm2):
        with pytest.raises(TypeError, match="got its subclass Tenfold"):
            call(layer)

    class Wrapping(nn.Module):
        def forward(self, weight):
            return weight.as_subclass(Tenfold)

    parametrised = parametrize.register_parametrization(gnn.SRLinear(2, 2), "bias", Wrapping(), unsafe=True)
    with pytest.raises(TypeError, match=r"SRLinear.bias\): expected a torch.Tensor, got its subclass Tenfold"):
        lipschitz_bound(parametrised)
    with pytest.raises(TypeError, match=r"spectral_norm\(layer\): expected a torch.Tensor, got its subclass Tenfold"):
        spectral_norm(layer.weight)
    hidden = nn.Linear(2, 2, bias=False)
    hidden.__dict__["bias"] = torch.zeros(2).as_subclass(Tenfold)
    with pytest.raises(TypeError, match="got its subclass Tenfold"):
        lipschitz_bound(hidden)
    small = nn.Linear(2, 2)
    small.weight.detach = lambda: torch.zeros(2, 2)
    with pytest.raises(TypeError, match=r"Linear.weight\): its detach was replaced"):
        lipschitz_bound(small)


def test_what_an_instance_says_of_itself_is_no_guarantee():
    layer = nn.Linear(2, 2)
    before = lipschitz_bound(layer)
    layer.describe_operators = lambda outline, x: outline.constant(x, 0.001, "small")
    assert lipschitz_bound(layer) == before


def test_parametrisations_of_this_package_may_be_changed_too():
    layer = gnn.SRLinear(2, 2)
    layer.parametrizations.weight[0].register_forward_hook(lambda module, args, output: 100 * output)
    with pytest.raises(TypeError, match=r"lipschitz_bound\(SpectralRescaling\): its hook"):
        lipschitz_bound(layer)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_biases_are_finite(bad):
    for layer in (nn.Linear(2, 2), gnn.SLLLinear(2, 2), gnn.LayerCentering(2)):
        with torch.no_grad():
            layer.bias[0] = bad
        with pytest.raises(ValueError, match="expected finite values"):
            lipschitz_bound(layer)


class Impostor(gnn.MaxMin):
    def __deepcopy__(self, memo):
        return gnn.MaxMin()

    def describe_operators(self, outline, x):
        return outline.constant(x, 100.0, "large")


def test_layers_that_copy_as_something_else_are_refused():
    model = nn.Sequential(Impostor(), nn.Linear(2, 2))
    batch = torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)
    for use in (lambda: certify(model, [batch], [0.1]), lambda: gnn.export(model), lambda: audit(model, (2,))):
        with pytest.raises(TypeError, match=r"\(Impostor\): it overrides __deepcopy__, so a copy of it may be"):
            use()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.__deepcopy__ = lambda memo: nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(TypeError, match=r"certify\(Linear\): a copy of 0 is something else"):
        certify(model, [batch], [0.1])
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    model[0].__deepcopy__ = lambda memo: nn.Tanh()
    with pytest.raises(TypeError, match=r"certify\(ReLU\): it overrides __deepcopy__"):
        certify(model, [batch], [0.1])
    assert certify(copy.deepcopy(nn.Sequential(gnn.SRLinear(2, 2), nn.Linear(2, 2))), [batch], [0.1]).lipschitz > 0


class Drawn(nn.Module):
    """Multiplies a weight by a random number, from one of several generators."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, weight):
        return weight * (1 + self.draw())


@pytest.mark.parametrize(
    "part",
    [
        nn.Dropout(0.5),
        nn.Dropout(1e-9),  # hardly ever another weight, but by chance
        Drawn(random.random),
        Drawn(np.random.rand),
        Drawn(lambda: torch.rand(())),
        Drawn(iter(range(100)).__next__),  # not random, but another one each time
    ],
    ids=["dropout", "rare dropout", "random", "numpy", "torch", "counter"],
)
def test_weights_that_change_by_themselves_are_refused(part):
    layer = parametrize.register_parametrization(nn.Linear(4, 4), "weight", part)
    for call in (lipschitz_bound, spectral_norm, lambda layer: certify(nn.Sequential(layer, layer), [], [1.0])):
        with pytest.raises(ValueError, match=r"its parametrisation of weight gives another one each time; call .eval"):
            call(layer)
    if isinstance(part, nn.Dropout):
        assert lipschitz_bound(layer.eval()) == pytest.approx(float(sigma(layer.weight.detach().double())), rel=2e-3)


def test_power_iteration_has_to_stand_still():
    """In training mode torch's spectral_norm takes another step each time that the weight is read."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
    with pytest.raises(ValueError, match="gives another one each time"):
        lipschitz_bound(layer)
    norm = float(sigma(layer.weight.detach().double()))
    assert norm <= lipschitz_bound(layer.eval()) <= norm * (1 + 2e-3)


def test_the_classes_of_this_package_and_of_torch_are_as_they_were_written():
    """Nothing that is known is refused: every layer with a constant, as it comes."""
    for kind, arguments in LAYERS.items():
        assert 0 < lipschitz_bound(kind(*arguments)) < math.inf, kind
    for name in ("Conv1d", "Conv3d", "ConvTranspose1d", "ConvTranspose3d"):
        assert 0 < gramcert.spectral_norm(getattr(nn, name)(1, 1, 2)).upper < math.inf
