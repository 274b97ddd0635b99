"""The parametrisations as torch's users meet them: every layer, every way of saving, copying, compiling, training."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

import gramcert
from cases import modules
from gramcert import Convolution, lipschitz_bound
from gramcert.bounds import symmetric
from gramcert.geometry.reduction import grouped_kernels, reduced_kernels
from gramcert.parametrizations import almost_orthogonal, spectral_norm, spectral_rescaling
from patience import PATIENCE
from reference import dense_norm, sigma

EPS = torch.finfo(torch.float64).eps

MAPS = {
    "default": spectral_rescaling,
    "output": lambda layer, **options: spectral_rescaling(layer, side="output", **options),
    "spatial": lambda layer, **options: spectral_rescaling(layer, form="spatial", **options),
    "frequency": lambda layer, **options: spectral_rescaling(layer, form="frequency", **options),
    "almost orthogonal": almost_orthogonal,
    "normalised": spectral_norm,
    "normalised, 6 iterations": lambda layer, **options: spectral_norm(layer, iterations=6, **options),
}
ROUNDING = 100 * torch.finfo(torch.float32).eps


def conv(**options):
    torch.manual_seed(0)
    return nn.Conv2d(4, 6, 3, padding=1, **options)


def true_norm(layer, x):
    """Dense norm of the layer's own weights, in float64."""
    if isinstance(layer, nn.Linear):
        return sigma(layer.weight.detach().double())
    return dense_norm(Convolution.of(layer), tuple(x.shape[2:]))


@pytest.mark.parametrize("name", MAPS)
@given(modules(), st.booleans(), st.sampled_from([1.0, 0.3, 2.5]))
def test_every_layer_is_inside(name, case, one_size, norm):
    layer, x = case
    spatial = not isinstance(layer, nn.Linear)
    size = tuple(x.shape[2:]) if spatial and one_size else None
    MAPS[name](layer, norm=norm, **({"input_size": size} if spatial else {}))
    bound = lipschitz_bound(layer, size)
    assert true_norm(layer, x) <= bound * (1 + 5e3 * EPS)
    assert bound <= norm * (1 + ROUNDING)


@pytest.mark.parametrize("norm", [1e-20, 0.1, 3, 1e20])
@pytest.mark.parametrize("name", MAPS)
def test_another_norm_is_a_multiple_and_known_as_well(name, norm):
    """Where the bound of the norm is the norm: the constant is known far better than to the tolerance of a search."""
    plain, layer = (nn.Linear(4, 4, bias=False) for _ in range(2))
    torch.nn.init.constant_(plain.weight, 0.7)
    layer.load_state_dict(plain.state_dict())
    MAPS[name](plain), MAPS[name](layer, norm=norm)
    torch.testing.assert_close(layer.weight, norm * plain.weight, rtol=ROUNDING, atol=0.0)
    bound = lipschitz_bound(layer)
    assert norm * (1 - ROUNDING) <= bound <= norm * (1 + ROUNDING)
    assert gramcert.audit(layer, (4,)).upper <= norm * (1 + 1e-3)
    assert f"norm={norm:g}" in repr(layer)
    assert "norm=" not in repr(plain).replace("spectral_norm=", "")
    again = copy.deepcopy(layer)
    assert torch.equal(again.weight, layer.weight)


@pytest.mark.parametrize("norm", [0.1, 1.0, 3.0])
def test_a_convolution_of_another_norm_is_known_as_well_as_one_of_norm_one(norm):
    """Twenty iterations at the frequencies of one size leave nothing of the distance to the norm."""
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular", bias=False).double()
    spectral_norm(layer, iterations=20, input_size=9, norm=norm)
    assert norm * (1 - 1e-5) <= lipschitz_bound(layer, 9) <= norm * (1 + 1e-6)


def test_a_layer_of_another_norm_stays_inside_while_it_is_trained():
    layer = spectral_rescaling(conv(), norm=2.0)
    optimizer, x = torch.optim.SGD(layer.parameters(), lr=10.0), torch.randn(2, 4, 6, 6)
    for _ in range(3):
        optimizer.zero_grad()
        (-layer(x).square().mean()).backward()
        optimizer.step()
        assert 1.4 < lipschitz_bound(layer) <= 2 * (1 + ROUNDING)


@pytest.mark.parametrize(
    ("norm", "error", "message"),
    [
        (0.0, ValueError, r"\(norm=0.0\): expected a positive finite number"),
        (-1, ValueError, r"\(norm=-1\): expected a positive finite number"),
        (float("nan"), ValueError, r"\(norm=nan\): expected a positive finite number"),
        (float("inf"), ValueError, r"\(norm=inf\): expected a positive finite number"),
        (1e-30, ValueError, r"\(norm=1e-30\): expected a number from 1e-20 to 1e\+20"),
        (1e30, ValueError, r"\(norm=1e\+30\): expected a number from 1e-20 to 1e\+20"),
        ("1", TypeError, r"\(norm\): expected a number, got '1'"),
        (True, TypeError, r"\(norm\): expected a number, got True"),
    ],
)
@pytest.mark.parametrize("function", [spectral_rescaling, almost_orthogonal, spectral_norm])
def test_norms_that_are_none(function, norm, error, message):
    layer = conv()
    with pytest.raises(error, match=f"^{function.__name__}{message}"):
        function(layer, norm=norm)
    assert not parametrize.is_parametrized(layer)


SHAPES = [(1, 32, 4, 2), (16, 32, 4, 2), (16, 32, 3, 1), (24, 24, 3, 1), (32, 1, 4, 1), (40, 8, 5, 3)]


def gaussian(inputs, outputs, taps, stride):
    torch.manual_seed(0)
    return nn.Conv2d(inputs, outputs, taps, stride=stride, padding=1, bias=False)


def mean_singular_value(layer, points=8):
    """Over a grid of frequencies of the layer on the phases of its stride."""
    description = Convolution.of(layer)
    kernel = reduced_kernels(grouped_kernels(description), description.stride, description.dilation)[0].detach()
    return float(torch.linalg.svdvals(torch.fft.fft2(kernel, s=(points, points)).permute(2, 3, 0, 1)).mean())


@pytest.mark.parametrize("shape", SHAPES)
def test_defaults_are_about_as_tight_as_what_costs_ten_times_as_much(shape):
    ours, paper = spectral_rescaling(gaussian(*shape)), spectral_rescaling(gaussian(*shape), form="spatial")
    assert mean_singular_value(ours) > 0.95 * mean_singular_value(paper)
    assert 0.7 < lipschitz_bound(ours) <= 1 + ROUNDING
    quick, thorough = spectral_norm(gaussian(*shape)), spectral_norm(gaussian(*shape), iterations=6)
    assert 0.93 < lipschitz_bound(quick) <= 1 + ROUNDING
    assert mean_singular_value(quick) > 0.95 * mean_singular_value(thorough)


def test_defaults_choose_the_side_with_fewer_channels():
    def side(layer, **options):
        return spectral_rescaling(layer, **options).parametrizations.weight[0].side

    assert side(nn.Linear(3, 4)) == "input"
    assert side(nn.Linear(4, 3)) == "output"
    assert side(nn.Conv2d(4, 8, 3)) == "input"
    assert side(nn.Conv2d(4, 8, 4, stride=2)) == "output"  # 16 channels with the phases
    assert side(nn.Conv2d(4, 8, 3, stride=2, dilation=2)) == "input"  # one phase is used
    assert side(nn.ConvTranspose2d(8, 4, 4, stride=2)) == "input"
    assert side(nn.ConvTranspose2d(8, 4, 3)) == "output"
    assert side(nn.Conv2d(8, 4, 3, groups=2)) == "output"
    assert side(nn.Conv2d(8, 4, 3), form="frequency") == "input"  # as it was before there was a choice
    assert side(nn.Conv2d(8, 4, 3), form="spatial", side="output") == "output"


@pytest.mark.parametrize("name", ["default", "normalised"])
@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_of_defaults(name, stride):
    layer = MAPS[name](nn.Conv2d(2, 3, 4, stride=stride).double())
    weight = torch.randn(3, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer.parametrizations.weight[0], (weight,))
    assert torch.autograd.gradgradcheck(layer.parametrizations.weight[0], (weight,))


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.Adam])
def test_still_inside_after_training(name, optimiser):
    torch.manual_seed(0)
    layer = MAPS[name](nn.Conv2d(3, 5, 3, stride=2, padding=1, padding_mode="reflect"))
    x, y = torch.randn(8, 3, 8, 8), torch.randn(8, 5, 4, 4)
    steps = optimiser(layer.parameters(), lr=0.1)
    before = layer.weight.detach().clone()
    losses = []
    for _ in range(20):
        steps.zero_grad()
        loss = (layer(x) - y).square().mean()
        loss.backward()
        steps.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert not torch.equal(layer.weight, before)
    assert lipschitz_bound(layer) <= 1 + ROUNDING
    assert true_norm(layer, x) <= lipschitz_bound(layer)


@pytest.mark.parametrize("name", MAPS)
def test_state_dict_copy_and_removal(name):
    layer = MAPS[name](conv())
    x = torch.randn(2, 4, 5, 5)
    other = MAPS[name](nn.Conv2d(4, 6, 3, padding=1))
    other.load_state_dict(layer.state_dict())
    assert list(layer.state_dict()) == ["bias", "parametrizations.weight.original"]
    assert torch.equal(other(x), layer(x))
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))
    with torch.no_grad():
        twin.parametrizations.weight.original.mul_(3).add_(0.1)
    assert not torch.equal(twin.weight, layer.weight)
    weight = layer.weight.detach().clone()
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is nn.Conv2d
    assert torch.equal(layer.weight, weight)


def test_assignment_sets_the_weight_before_rescaling():
    layer = spectral_rescaling(conv())
    value = torch.randn_like(layer.weight)
    layer.weight = value
    assert torch.equal(layer.parametrizations.weight.original, value)
    # Up to its scale: R removes it.
    weight = layer.weight.detach().clone()
    layer.weight = 7 * value
    torch.testing.assert_close(layer.weight.detach(), weight)


def test_large_matrices_compiled_and_exported(monkeypatch):
    """Those whose symmetric products are made by halves."""
    monkeypatch.setattr(symmetric, "LEAST_ORDER", 8)
    layer, x = spectral_rescaling(nn.Linear(20, 24)), torch.randn(3, 20)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
    torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x), layer(x))


@pytest.mark.parametrize("name", MAPS)
def test_compiled_and_exported(name):
    layer = nn.Sequential(MAPS[name](conv(groups=2)), nn.ReLU()).double()
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    expected = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    original = layer[0].parametrizations.weight.original
    gradients = [torch.autograd.grad(f(x).square().sum(), original)[0] for f in (layer, compiled)]
    torch.testing.assert_close(gradients[1], gradients[0])
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), expected)


@pytest.mark.parametrize("name", MAPS)
def test_half_precision(name):
    """Under autocast R is that of float32; half-precision weights are rescaled in float32 and rounded once."""
    layer = MAPS[name](conv())
    weight = layer.weight.detach().clone()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.weight, weight)
        assert layer(torch.randn(1, 4, 5, 5)).dtype == torch.bfloat16
    half = MAPS[name](conv().bfloat16())
    assert half.weight.dtype == torch.bfloat16
    assert lipschitz_bound(half) <= 1 + 2 * torch.finfo(torch.bfloat16).eps


WORKER = """
import os, sys, torch
import torch.distributed as dist
from torch import nn
from gramcert.parametrizations import spectral_rescaling
rank, world, store = int(sys.argv[1]), 2, sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=world)

def make():
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(48, 2)
    return nn.Sequential(spectral_rescaling(layers[0]), nn.Flatten(), spectral_rescaling(layers[1]))

model = make()
data = torch.randn(8, 2, 4, 4)
parallel = nn.parallel.DistributedDataParallel(model)
steps = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    steps.zero_grad()
    parallel(data[rank * 4 : rank * 4 + 4]).square().mean().backward()
    steps.step()
if rank == 0:
    alone = make()
    steps = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(3):
        steps.zero_grad()
        alone(data).square().mean().backward()
        steps.step()
    torch.testing.assert_close(model(data), alone(data))
    print("same")
dist.destroy_process_group()
"""


def test_two_processes_agree_with_one(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    (printed, errors), _ = (worker.communicate(timeout=PATIENCE) for worker in workers)
    assert printed.strip() == "same", errors


class TestPublishedFailures:
    """What published layers get wrong, each of them run: here they are inside, or refused."""

    @pytest.mark.parametrize("name", MAPS)
    @pytest.mark.parametrize("size", [3, 8, 16])
    def test_reflect_padding(self, name, size):
        layer = nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")
        nn.init.ones_(layer.weight)
        MAPS[name](layer)
        assert true_norm(layer, torch.zeros(1, 1, size, size)) <= 1 + ROUNDING

    @pytest.mark.parametrize("name", MAPS)
    def test_stride_with_dilation(self, name):
        layer = nn.Conv2d(2, 2, 2, stride=2, dilation=2)
        nn.init.ones_(layer.weight)
        MAPS[name](layer)
        assert true_norm(layer, torch.zeros(1, 2, 16, 16)) <= 1 + ROUNDING

    @pytest.mark.parametrize("name", MAPS)
    def test_zero_weights(self, name):
        layer = MAPS[name](nn.Conv2d(2, 3, 3))
        layer.weight = torch.zeros(3, 2, 3, 3)
        assert torch.equal(layer.weight, torch.zeros(3, 2, 3, 3))
        assert lipschitz_bound(layer) == 0

    def test_torch_measures_the_reshaped_kernel(self):
        """Its spectral_norm leaves the 3×3 mean filter with a gain of 2.93; ours brings it to 1."""
        layers = [nn.Conv2d(1, 1, 3, padding=1) for _ in range(2)]
        for layer in layers:
            nn.init.ones_(layer.weight)
        theirs, ours = (
            nn.utils.parametrizations.spectral_norm(layers[0]),
            spectral_norm(layers[1], input_size=16),
        )
        assert lipschitz_bound(theirs.eval(), 16) > 2.9
        assert 0.99 < lipschitz_bound(ours, 16) <= 1 + ROUNDING

    @pytest.mark.parametrize("name", MAPS)
    def test_grouped_and_rectangular_kernels(self, name):
        layer = nn.Conv2d(8, 8, (5, 3), padding=(2, 1), groups=8)
        nn.init.constant_(layer.weight, 0.5 / 15)
        MAPS[name](layer, input_size=16)
        assert 0.9 < true_norm(layer, torch.zeros(1, 8, 16, 16)) <= 1 + ROUNDING


class Flipped(nn.Conv2d):
    def forward(self, x):
        return super().forward(x.flip(-1))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: spectral_rescaling(nn.ReLU()), TypeError, r"spectral_rescaling\(ReLU\): expected Linear or a Conv"),
        (
            lambda: almost_orthogonal(conv(), "bias"),
            ValueError,
            r"almost_orthogonal\(name='bias'\): the weight of Conv2d",
        ),
        (lambda: spectral_rescaling(conv(), iterations=0), ValueError, r"spectral_rescaling\(iterations=0\)"),
        (lambda: spectral_rescaling(conv(), form="x"), ValueError, r"spectral_rescaling\(form='x'\)"),
        (lambda: spectral_rescaling(conv(), side="x"), ValueError, r"spectral_rescaling\(side='x'\)"),
        (lambda: spectral_norm(conv(), input_size=(3,)), ValueError, r"Conv2d needs 2 sizes, got 1"),
        (lambda: spectral_rescaling(nn.Linear(2, 2), input_size=3), ValueError, "Linear has no spatial size"),
        (lambda: spectral_rescaling(nn.Conv2d(1, 1, 5), input_size=3), ValueError, "the output would be empty"),
        (lambda: spectral_rescaling(Flipped(1, 1, 3)), TypeError, "overrides forward"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_refused_layers_are_left_alone():
    layer = conv()
    with pytest.raises(ValueError, match="form"):
        spectral_rescaling(layer, form="x")
    assert not parametrize.is_parametrized(layer)
    assert gramcert.spectral_norm(layer).tol_reached


@pytest.mark.parametrize("entries", [2**20, 0])
def test_gradients_of_channels_that_hardly_count_are_finite(entries, monkeypatch):
    monkeypatch.setattr("gramcert.rescaling.frequency.MOST_ENTRIES", entries)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        layer = nn.Conv1d(5, 6, 3)
        sizes = 10.0 ** (-25 * torch.rand(1, 5, 1, generator=generator))
        with torch.no_grad():
            layer.weight.copy_(torch.randn(6, 5, 3, generator=generator) * sizes)
        spectral_rescaling(layer, side="input")
        (layer.weight * torch.randn(6, 5, 3, generator=generator)).sum().backward()
        assert torch.isfinite(layer.parametrizations.weight.original.grad).all()


@pytest.mark.parametrize("first", [spectral_rescaling, spectral_norm, almost_orthogonal])
@pytest.mark.parametrize("second", [spectral_rescaling, spectral_norm, almost_orthogonal])
def test_a_second_one_is_refused(first, second):
    layer = first(torch.nn.Conv2d(2, 2, 3))
    bounded = f"its weight is bounded already, by {first.__name__}"
    with pytest.raises(ValueError, match=rf"{second.__name__}\(.*Conv2d\): {bounded}"):
        second(layer)
    assert len(layer.parametrizations.weight) == 1
    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
    second(layer)
