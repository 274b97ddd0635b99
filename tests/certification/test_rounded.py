"""Bounds of rounding against exact rational arithmetic: never too small, and not much too large."""

import copy
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gramcert.nn as gnn
from cases import layers, modules
from certification.exact import convolved, exact_batch, fractions, is_within, square_distance
from gramcert import Convolution
from gramcert.certification.forward import CertifiedForward
from gramcert.certification.rounded import Linear, rule

EPS = torch.finfo(torch.float64).eps
UNIT = EPS / 2
TINY = torch.finfo(torch.float64).tiny

# Where products are exact, where squares vanish or overflow, where products vanish.
SCALES = [1.0, 1e-160, 1e-300, 2.0**-1060, 1e150]

seeds = st.integers(0, 2**31 - 1)


def gauss(seed, *shape, scale=1.0):
    """Gaussian numbers, rounded to float32 for odd seeds."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (values.float().double() if seed % 2 else values) * scale


def is_tight(bound, terms, amount):
    """Whether a bound is about what so many roundings of numbers of that size can do."""
    return bool((bound <= 1e3 * (terms * EPS * amount + TINY)).all())


@given(layers(), seeds, st.sampled_from(SCALES))
def test_convolutions_of_any_geometry(case, seed, scale):
    layer, size = case
    linear = Linear("test", layer, size)
    x, bias = gauss(seed, 2, layer.in_channels, *size, scale=scale), gauss(seed + 1, layer.out_channels, scale=scale)
    values, bound = linear(x, bias)
    truth = [convolved(layer, fractions(sample)) for sample in x]
    truth = [exact + fractions(bias).reshape(-1, *(1,) * layer.axes) for exact in truth]
    assert values.shape[1:] == truth[0].shape
    assert is_within(values, truth, bound)
    if scale == 1:
        amount = float(layer.kernel.norm() * x.norm() + bias.norm() * math.sqrt(values[0, 0].numel()))
        assert is_tight(bound, layer.kernel.numel(), amount)


@given(st.one_of(modules(torch.float32), modules(torch.float64)), seeds, st.sampled_from(SCALES[:2]))
def test_layers_of_torch(case, seed, scale):
    layer, zeros = case
    with torch.no_grad():
        layer.bias.copy_(gauss(seed + 1, *layer.bias.shape))
    x = gauss(seed, 2, *zeros.shape[1:], scale=scale)
    values, bound = Linear.of("test", layer, tuple(x.shape[2:]))(x, layer.bias)
    assert is_within(values, exact_batch([layer], x), bound)
    assert is_tight(bound, x[0].numel() + 3, (1 + layer.weight.norm()) * (1 + x.norm()) * values.numel())


def test_linear_layers_act_on_the_last_axis():
    layer, x = nn.Linear(5, 3), gauss(0, 2, 4, 2, 5)
    values, bound = Linear.of("test", layer, None)(x, layer.bias)
    assert is_within(values, exact_batch([layer], x), bound)
    torch.testing.assert_close(values, layer.double()(x))


# Layers without a matrix, with a shape that they take.
LAYERS = {
    "shift": (lambda: gnn.Shift([0.1, -0.7, 3.0, 1e-9]), (4, 3, 3)),
    "centring": (lambda: with_bias(gnn.LayerCentering(3)), (3, 5)),
    "centring of volumes": (lambda: with_bias(gnn.LayerCentering(2)), (2, 2, 3, 2)),
    "centring in half precision": (lambda: with_bias(gnn.LayerCentering(3).bfloat16()), (3, 4, 4)),
    "batch centring": (lambda: with_bias(batch_centring()), (3, 4)),
    "batch centring of vectors": (lambda: with_bias(batch_centring()), (3,)),
    "Householder": (lambda: turned(gnn.Householder(4)), (4, 3)),
    "Householder in half precision": (lambda: turned(gnn.Householder(6).bfloat16()), (6,)),
    "leaky": (lambda: nn.LeakyReLU(0.1), (3, 4)),
    "leaky in place": (lambda: nn.LeakyReLU(0.01, inplace=True), (3, 4)),
    "steep": (lambda: nn.LeakyReLU(-3.7), (3, 4)),
    "clipped": (lambda: nn.Hardtanh(-0.3, 0.7), (3, 4)),
    "ReLU6": (lambda: nn.ReLU6(), (3, 4)),
    "means of pairs": (lambda: nn.AvgPool1d(2), (2, 7)),
    "means that overlap": (lambda: nn.AvgPool2d((3, 2), stride=1, padding=1), (2, 5, 4)),
    "means in one-element tuples": (lambda: nn.AvgPool2d((3,), stride=(2,)), (2, 5, 6)),
    "means of volumes": (lambda: nn.AvgPool3d(2, stride=1), (1, 3, 3, 4)),
    "sums": (lambda: gnn.ScaledAvgPool(2), (2, 4, 6)),
    "sums that overlap": (lambda: gnn.ScaledAvgPool(3, 1, axes=1), (2, 7)),
    "sums of volumes": (lambda: gnn.ScaledAvgPool((1, 3, 2), axes=3), (1, 2, 3, 4)),
    "maxima": (lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), (2, 6, 5)),
    "maxima with gaps": (lambda: nn.MaxPool1d(2, 1, dilation=2), (2, 7)),
    "maxima of volumes": (lambda: nn.MaxPool3d(2), (1, 4, 2, 3)),
    "shuffled": (lambda: nn.PixelShuffle(2), (4, 2, 3)),
    "unshuffled": (lambda: nn.PixelUnshuffle(2), (1, 4, 6)),
    "flattened": (lambda: nn.Flatten(), (2, 3, 2)),
    "partly flattened": (lambda: nn.Flatten(2), (2, 3, 2)),
    "subsampled": (lambda: gnn.Subsample((2, 3)), (2, 5, 4)),
    "padded": (lambda: gnn.PadChannels(5), (2, 3)),
    "MaxMin": (lambda: gnn.MaxMin(), (4, 3)),
    "sorted": (lambda: gnn.GroupSort(3), (6, 2)),
    "absolute values": (lambda: gnn.Abs(), (3, 2)),
    "ReLU in place": (lambda: nn.ReLU(inplace=True), (3, 2)),
    "dropout": (lambda: nn.Dropout(0.5).eval(), (3, 2)),
    "alpha dropout": (lambda: nn.AlphaDropout(0.5).eval(), (3, 2)),
}


def with_bias(layer):
    nn.init.normal_(layer.bias)
    return layer


def batch_centring():
    layer = gnn.BatchCentering(3).eval()
    nn.init.normal_(layer.running_mean)
    return layer


def turned(layer):
    with torch.no_grad():
        layer.normals = torch.randn(layer.normals.shape).to(layer.normals.dtype)
    return layer


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("scale", SCALES)
def test_layers_without_a_matrix(name, scale):
    make, shape = LAYERS[name]
    layer = make()
    for seed in range(3):
        x = gauss(seed, 2, *shape, scale=scale)
        truth = exact_batch([layer], x)
        amount = float(x.norm()) + math.sqrt(x.numel())
        values, bound = rule(layer)(x)
        assert values.shape[1:] == truth[0].shape
        assert is_within(values, truth, bound)
        in_float32 = 2.0**29 if isinstance(layer, (nn.LeakyReLU, nn.Hardtanh)) else 1  # what float32 makes of slopes
        assert scale > 1e100 or is_tight(bound, x[0].numel() + 8, 10 * in_float32 * amount)


@pytest.mark.parametrize("arguments", [(2,), (3, 1), ((1, 4), (1, 2))])
@pytest.mark.parametrize("scale", SCALES)
def test_lengths_of_windows(arguments, scale):
    layer, x = gnn.ScaledL2NormPool(*arguments), gauss(3, 2, 2, 4, 5, scale=scale)
    x[1, 0] = 0
    values, bound = rule(layer)(x)
    truth = exact_batch([layer], x)  # from below, within a tiny number of the roots
    assert is_within(values, truth, bound)
    assert is_within(values, [exact + Fraction(1, 2**2390) for exact in truth], bound)
    if scale == 1:
        assert is_tight(bound, 20, float(x.norm()))


@pytest.mark.parametrize("make", [nn.LeakyReLU, lambda number: nn.Hardtanh(-number, 3 * number)])
@pytest.mark.parametrize("inplace", [False, True])
def test_networks_in_float32_have_their_own_slopes_and_limits(make, inplace):
    """The numbers of a layer are rounded to the type of its input: the bound holds for them rounded and as they are."""
    layer, x = make(0.01), gauss(1, 4, 50)
    layer.inplace = inplace
    narrow = copy.deepcopy(layer)
    for name in vars(layer).keys() & {"negative_slope", "min_val", "max_val"}:
        setattr(narrow, name, float(torch.tensor(getattr(layer, name), dtype=torch.float32)))
    truths = exact_batch([layer], x), exact_batch([narrow], x)
    assert any((one != other).any() for one, other in zip(*truths, strict=True))
    values, bound = rule(layer)(x)
    assert all(is_within(values, truth, bound) for truth in truths)


def test_one_rounding_is_counted_as_one():
    """1 + 2⁻⁵³ is 1 in float64: the error is a whole unit roundoff, and the bound hardly more."""
    values, bound = rule(gnn.Shift([UNIT]))(torch.ones(1, 1, 1, dtype=torch.float64))
    assert float(values) == 1
    assert UNIT <= float(bound) <= UNIT * (1 + 100 * EPS)


@pytest.mark.usefixtures("threads")
def test_sums_that_are_always_rounded_down():
    """Each number is just less than half a unit above what the sum so far can take in: all of that is lost."""
    side = 16
    halves = [2.0 ** (math.frexp(total)[1] - 54) for total in range(1, side**3 + 1)]  # of a unit in the last place
    numbers = [1 + max(0.0, half - EPS) for half in halves]
    x = torch.tensor(numbers, dtype=torch.float64).reshape(1, 1, side, side, side)
    for sizes in (side, (side,), (side, side, side)):  # a lone size in a tuple once counted for one axis only
        layer = nn.AvgPool3d(sizes)
        values, bound = rule(layer)(x)
        truth = sum(map(Fraction, numbers)) / side**3
        assert abs(Fraction(float(values)) - truth) <= Fraction(float(bound))


@pytest.mark.parametrize("layer", [gnn.ScaledAvgPool(2, axes=1), gnn.ScaledL2NormPool(2, axes=1)])
@pytest.mark.parametrize("factor", [1000.3, -3e30, 1e100])
@pytest.mark.parametrize("scale", [1.0, 2.0**-1060])
def test_pools_whose_factor_was_changed(layer, factor, scale):
    layer.factor = factor
    x = gauss(4, 3, 2, 8, scale=scale)
    values, bound = rule(layer)(x)
    assert is_within(values, exact_batch([layer], x), bound)


def test_what_is_not_known_has_no_rule():
    class Mine(gnn.MaxMin):
        pass

    for layer in (nn.Tanh(), nn.Softshrink(), nn.ELU(), nn.BatchNorm2d(3), Mine()):
        assert rule(layer) is None


def test_samples_stay_apart():
    for layer in (nn.Flatten(0), nn.Flatten(0, 1), nn.Flatten(-3)):
        with pytest.raises(ValueError, match=r"Flatten\(.*it joins inputs of a batch, of shape \(1, 2, 4\), to \(8|2"):
            rule(layer)(torch.zeros(1, 2, 4, dtype=torch.float64))


def test_shapes_that_a_layer_does_not_take():
    convolution = Linear("certify(Conv2d)", Convolution(torch.ones(2, 3, 1, 1)), (4, 5))
    for shape in ((1, 2, 4, 5), (1, 3, 5, 4), (1, 3, 4, 6)):
        with pytest.raises(
            ValueError, match=r"certify\(Conv2d\): expected inputs of shape \(..., 3, 4, 5\), got \(1, "
        ):
            convolution(torch.zeros(shape, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"certify\(Linear\): expected inputs of shape \(..., 3\), got \(2, 4\)"):
        Linear.of("certify", nn.Linear(3, 2), None)(torch.zeros(2, 4, dtype=torch.float64))


@settings(max_examples=settings.default.max_examples // 4)
@given(layers(), seeds)
def test_numbers_too_large_for_float64_have_no_bound(case, seed):
    """Where squares overflow the bound is infinite, not a number that happened to come out."""
    layer, size = case
    values, bound = Linear("test", layer, size)(gauss(seed, 1, layer.in_channels, *size, scale=1e200))
    assert bool(torch.isfinite(values).all())
    assert bool(torch.isinf(bound).all())


def test_without_its_rounding_terms_the_bound_is_wrong(without_rounding):
    """The mutation check: the comparisons above notice if error terms and directed rounding are taken out."""
    cases = [(Convolution(gauss(seed, 3, 2, 3), padding=1), gauss(seed + 1, 1, 2, 6)) for seed in range(10)]
    pools = [(make(), gauss(2 * seed, 1, *shape)) for seed, (make, shape) in enumerate(LAYERS.values())]
    rounding = {"Shift", "LayerCentering", "BatchCentering", "Householder", "AvgPool", "ScaledAvgPool"}
    pools = [(layer, x) for layer, x in pools if any(name in str(layer) for name in rounding)]

    def wrong():
        found = [
            not is_within(*reordered(Linear("test", layer, tuple(x.shape[2:]))(x), [convolved(layer, fractions(x[0]))]))
            for layer, x in cases
        ]
        return found, [not is_within(*reordered(rule(layer)(x), exact_batch([layer], x))) for layer, x in pools]

    assert not any(any(found) for found in wrong())
    without_rounding()
    of_convolutions, of_pools = wrong()
    assert all(of_convolutions)
    assert sum(of_pools) >= len(of_pools) - 2


def reordered(found, truth):
    values, bound = found
    return values, truth, bound


def test_chains_report_each_layer_and_follow_the_size():
    seen = []
    chain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Sequential(nn.Flatten(), nn.Linear(8, 2)))
    forward = CertifiedForward.of("test", [chain], (6, 6), lambda *done: seen.append(done))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert forward.size == ()
    x = gauss(0, 3, 1, 6, 6)
    values, distance = forward(x)
    assert is_within(values, exact_batch([chain], x), distance)
    assert square_distance(values[0], exact_batch([chain], x)[0]) > 0
