"""``nn.export``: torch's own layers, the same function, to ONNX and back."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import gramcert.nn as gnn
from gramcert.parametrizations import spectral_norm


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        gnn.Shift([-0.5]),
        gnn.PadChannels(8),
        gnn.SLLConv2d(8, 12, 3),
        gnn.ScaledAvgPool(2),
        gnn.SRConv2d(8, 16, 3, stride=2, padding=1),
        gnn.MaxMin(),
        gnn.LayerCentering(16),
        gnn.Householder(16),
        gnn.BatchCentering(16),
        spectral_norm(nn.Conv2d(16, 16, 1)),
        gnn.Residual(nn.Sequential(gnn.SLLConv2d(16, 4, 3, nn.Tanh()), gnn.Abs())),
        gnn.Concatenation(nn.Identity(), gnn.GroupSort(2)),
        gnn.ScaledL2NormPool(2),
        gnn.Subsample(1),
        nn.Flatten(),
        gnn.SRLinear(128, 32),
        gnn.SLLLinear(32, 8),
        gnn.NormalizedLinear(32, 10),
    )


@pytest.fixture(scope="module")
def trained():
    model = network()
    model(torch.randn(4, 1, 16, 16)).sum().backward()
    return model.eval()


X = torch.randn(3, 1, 16, 16, generator=torch.Generator().manual_seed(1))


def test_same_function_without_this_package(trained):
    state = {name: value.clone() for name, value in trained.state_dict().items()}
    plain = gnn.export(trained)
    torch.testing.assert_close(plain(X), trained(X), rtol=1e-6, atol=1e-6)
    assert not [kind for kind in {type(part) for part in plain.modules()} if kind.__module__.startswith("gramcert")]
    assert not any(nn.utils.parametrize.is_parametrized(part) for part in plain.modules())
    # The model is left alone, and a later change of it does not reach the copy.
    assert all(torch.equal(value, state[name]) for name, value in trained.state_dict().items())
    before = plain(X)
    with torch.no_grad():
        trained[15].parametrizations.weight.original.mul_(-1)
    assert torch.equal(plain(X), before)
    with torch.no_grad():
        trained[15].parametrizations.weight.original.mul_(-1)


def test_weights_are_those_in_use(trained):
    plain = gnn.export(trained)
    assert torch.equal(plain[4].weight, trained[4].weight)
    assert torch.equal(plain[2].outer.weight, trained[2].outer_weight())
    assert torch.equal(plain[17].weight, trained[17].weight)
    assert type(plain[4]) is nn.Conv2d


def test_torch_export_and_saving(trained):
    plain = gnn.export(trained)
    program = torch.export.export(plain, (X,))
    torch.testing.assert_close(program.module()(X), plain(X))
    again = gnn.export(network())
    file = io.BytesIO()
    torch.save(plain.state_dict(), file)
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(again(X), plain(X))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_onnx(trained, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    plain = gnn.export(trained)
    path = tmp_path / "model.onnx"
    torch.onnx.export(plain, (X,), path, dynamo=True, verbose=False)
    model = onnx.load(path)
    onnx.checker.check_model(model)
    evaluator = onnx.reference.ReferenceEvaluator(model)
    (found,) = evaluator.run(None, {model.graph.input[0].name: X.numpy()})
    np.testing.assert_allclose(found, plain(X).detach().numpy(), rtol=1e-4, atol=1e-5)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = gnn.SRLinear(3, 3), gnn.SLLLinear(3, 2)

    def forward(self, x):
        return self.second(self.first(x)) + x


def test_modules_of_ones_own():
    model = Own()
    plain = gnn.export(model)
    assert type(plain) is Own
    assert type(plain.first) is nn.Linear
    torch.testing.assert_close(plain(torch.ones(1, 3)), model(torch.ones(1, 3)))
    single = gnn.export(gnn.SRLinear(3, 3))
    assert type(single) is nn.Linear


def test_bad_input():
    with pytest.raises(TypeError, match=r"export\(model\): expected a torch.nn.Module, got int"):
        gnn.export(3)


def test_weights_made_of_several_tensors():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    plain = gnn.export(layer)
    assert type(plain) is nn.Linear
    assert torch.equal(plain.weight, layer.weight)
    assert plain.weight.requires_grad


def test_copies_of_a_layer_within_the_cache_of_torch():
    """It takes a layer and its deep copies for one."""
    first = gnn.SRLinear(2, 2)
    second = copy.deepcopy(first)
    with torch.no_grad():
        first.weight, second.weight = torch.eye(2), torch.eye(2).flip(0)
    with parametrize.cached():
        plain = gnn.export(nn.Sequential(first, second))
    assert torch.equal(plain[1].weight, torch.eye(2).flip(0))


def test_what_cannot_be_copied():
    layer = nn.Linear(3, 2)
    layer.kept = torch.ones(1, requires_grad=True) * 2
    with pytest.raises(TypeError, match=r"export\(model\): it cannot be copied"):
        gnn.export(layer)


def test_layers_with_a_replaced_method_are_left_as_they_are():
    """What they compute is not what their class says."""
    layer = gnn.Abs()
    layer.compute = lambda x: 7 * x
    model = nn.Sequential(layer)
    assert torch.equal(gnn.export(model)(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_layers_that_occur_twice_are_exported_twice():
    layer, activation = gnn.SRLinear(3, 3), gnn.Abs()
    plain = gnn.export(nn.Sequential(layer, activation, layer, activation))
    assert plain[0] is plain[2]
    assert plain[1] is plain[3]
    assert not [part for part in plain.modules() if type(part).__module__.startswith("gramcert")]


def test_exported_layers_can_be_saved_and_loaded(tmp_path):
    plain = gnn.export(nn.Sequential(gnn.MaxMin(), gnn.ScaledAvgPool(2), gnn.SLLConv2d(2, 3, 3)))
    torch.save(plain, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    x = torch.randn(1, 2, 4, 4)
    assert torch.equal(again(x), plain(x))


def test_frozen_weights_stay_frozen_when_exported():
    layer = gnn.SRLinear(3, 3)
    layer.parametrizations.weight.original.requires_grad_(False)
    assert not gnn.export(layer).weight.requires_grad
