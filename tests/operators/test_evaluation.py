"""Values of a graph and their distance from the exact ones: operation by operation, and over whole networks."""

import copy
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

import gramcert
import gramcert.nn as gnn
from auditing_networks import Function
from cases import layers, modules
from certification.exact import convolved, exact_batch, fractions, is_within
from gramcert import Convolution, lipschitz_bound
from gramcert.auditing.reading import Source
from gramcert.operators.evaluation import Evaluation, NotEvaluatedError
from gramcert.operators.graph import Builder, Nonlinear
from gramcert.operators.linear import Shift
from gramcert.operators.matrices import Convolve
from gramcert.operators.network import Network
from gramcert.rounding import checked_arithmetic

EPS = torch.finfo(torch.float64).eps

# Layers that a network of one to three axes, or of vectors, is drawn from; each may refuse the shape it is given.
EVERYWHERE = {
    "ReLU": lambda shape, count: nn.ReLU(inplace=count % 2 == 0),
    "leaky": lambda shape, count: nn.LeakyReLU(0.25),
    "clipped": lambda shape, count: nn.Hardtanh(-0.5, 0.75),
    "MaxMin": lambda shape, count: gnn.MaxMin(),
    "sorted": lambda shape, count: gnn.GroupSort(count),
    "absolute": lambda shape, count: gnn.Abs(),
    "reflected": lambda shape, count: reflected(shape[0]),
    "shift": lambda shape, count: gnn.Shift(torch.randn(shape[0])),
    "batch centring": lambda shape, count: batch_centred(shape[0]),
    "padded": lambda shape, count: gnn.PadChannels(shape[0] + count),
    "last axis": lambda shape, count: nn.Linear(shape[-1], count),
    "rescaled": lambda shape, count: gnn.SRLinear(shape[-1], count),
    "residual dense": lambda shape, count: gnn.SLLLinear(shape[-1], count),
    "sum": lambda shape, count: gnn.Residual(gnn.SLLLinear(shape[-1], count), 0.3),
    "plain sum": lambda shape, count: gnn.Residual(nn.Sequential(gnn.Abs(), nn.LeakyReLU(0.5)), None),
    "side by side": lambda shape, count: gnn.Concatenation(*[nn.Linear(shape[-1], 2) for _ in range(count)]),
}
SPATIAL = {
    "convolution": lambda shape, count: convolution(nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(shape) - 2](
        shape[0], 2, 2, stride=count % 2 + 1, padding=1, padding_mode=("zeros", "circular", "replicate")[count % 3]
    ),
    "transposed": lambda shape, count: convolution(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[
        len(shape) - 2
    ](shape[0], count, 2, padding=count % 2),
    "rescaled convolution": lambda shape, count: convolution(gnn.SRConv1d, gnn.SRConv2d, gnn.SRConv3d)[len(shape) - 2](
        shape[0], count, 3, padding=1
    ),
    "residual": lambda shape, count: convolution(gnn.SLLConv1d, gnn.SLLConv2d, gnn.SLLConv3d)[len(shape) - 2](
        shape[0], count, count, nn.LeakyReLU(0.125) if count == 2 else None
    ),
    "means": lambda shape, count: convolution(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[len(shape) - 2](2, 1),
    "maxima": lambda shape, count: convolution(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[len(shape) - 2](count, 2),
    "sums": lambda shape, count: gnn.ScaledAvgPool(2, count, axes=len(shape) - 1),
    "subsampled": lambda shape, count: gnn.Subsample(2, axes=len(shape) - 1),
    "centring": lambda shape, count: centred(shape[0]),
    "unshuffled": lambda shape, count: unshuffled(shape),
    "flattened": lambda shape, count: nn.Flatten(),
}


def convolution(*kinds):
    return kinds


def unshuffled(shape):
    if len(shape) != 3:
        raise ValueError
    return nn.PixelUnshuffle(2)


def centred(channels):
    layer = gnn.LayerCentering(channels)
    nn.init.normal_(layer.bias)
    return layer


def batch_centred(channels):
    layer = gnn.BatchCentering(channels)
    nn.init.normal_(layer.running_mean)
    nn.init.normal_(layer.bias)
    return layer


def reflected(channels):
    layer = gnn.Householder(channels)
    layer.normals = torch.randn(layer.normals.shape)
    return layer


@st.composite
def networks(draw, most=4):
    """Up to ``most`` layers that fit together, and two inputs in float64."""
    axes = draw(st.integers(0, 3))
    shape = (draw(st.integers(1, 4)), *(draw(st.integers(2, (6, 4, 3)[axes - 1])) for _ in range(axes)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw(st.integers(0, 2**31 - 1)))
        x = torch.randn(2, *shape, dtype=torch.float64)
        layers, y = [], x.to(dtype)
        for _ in range(most):
            known = EVERYWHERE | (SPATIAL if y.dim() > 2 else {})
            make = known[draw(st.sampled_from(sorted(known)))]
            try:
                layer = make(tuple(y.shape[1:]), draw(st.integers(1, 3))).to(dtype).eval()
                with torch.no_grad():
                    after = layer(y.clone())
            except (ValueError, RuntimeError):  # not for this shape
                continue
            if not 0 < after[0].numel() <= 200:
                continue
            layers.append(layer)
            y = after
    return nn.Sequential(*layers), x


def evaluated(layers, x):
    """The constant of a network, its values for a batch in float64, and their distances from the exact ones."""
    model = layers if isinstance(layers, nn.Module) else nn.Sequential(*layers)
    with checked_arithmetic("test"):
        graph = Source.of("test", model).graph("test", tuple(x.shape[1:]))
        network = Network("test", graph)
        (output,) = graph.outputs.values()
        values, distance = Evaluation(network.plan, network.measure)(x[:, None], output)
        return network.follow().upper, values[:, 0], distance


@given(networks())
def test_computed_features_are_as_near_the_exact_ones_as_is_said(case):
    network, x = case
    _, values, distance = evaluated(network, x)
    truth = exact_batch(network, x)
    assert values.dtype == torch.float64
    assert values.shape[1:] == truth[0].shape
    assert is_within(values, truth, distance)
    # Each layer passes on at most its constant, and adds roundings of a few hundred terms.
    amount = 1 + float(x.norm()) + sum(float(p.detach().double().norm()) for p in network.parameters())
    constants = [1 + lipschitz_bound(layer) for layer in network]
    most = 1e3 * 200 * EPS * amount**2 * max(1, len(network)) * math.prod(constants)
    if not any(isinstance(layer, (nn.LeakyReLU, nn.Hardtanh)) for layer in network.modules()):
        assert float(distance.max()) <= most


@pytest.mark.parametrize("name", EVERYWHERE | SPATIAL)
def test_every_layer_by_itself(name):
    """In front of each a product, so that what comes in was rounded."""
    tried = 0
    types = [torch.float32, torch.float64, torch.bfloat16, torch.float32]
    shapes = [(4,), (4, 6), (2, 4, 4), (2, 2, 3, 2)]
    for number, (shape, dtype) in enumerate(zip(shapes, types, strict=True)):
        if name in SPATIAL and len(shape) == 1:
            continue
        try:
            layer = (EVERYWHERE | SPATIAL)[name](shape, number % 3 + 1).to(dtype).eval()
            x = torch.randn(2, *shape, dtype=torch.float64)
            layer(x.to(dtype))
        except (ValueError, RuntimeError):  # not for this shape
            continue
        chain = [nn.Linear(shape[-1], shape[-1], dtype=dtype), layer]
        _, values, distance = evaluated(chain, x)
        assert is_within(values, exact_batch(chain, x), distance)
        tried += 1
    assert tried


@settings(max_examples=settings.default.max_examples // 4)
@given(networks())
def test_it_is_the_network(case):
    network, x = case
    upper, values, _ = evaluated(network, x)
    plain = gnn.export(network).double()  # with the outer weights as they were rounded
    torch.testing.assert_close(values, plain(x.clone()).detach())
    assert upper <= math.prod(lipschitz_bound(layer) for layer in network) * (1 + 1e-2) + 1e-300


def test_constants_multiply_what_was_lost_before():
    """A layer of constant 1000 behind one that rounds: its own rounding is no more than of its numbers."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        second.weight.copy_(1024 * torch.eye(4))
    x = torch.randn(2, 4, dtype=torch.float64)
    before = evaluated([first], x)[2]
    _, values, distance = evaluated([first, second], x)
    assert bool((distance >= 1024 * before).all())
    assert is_within(values, exact_batch([first, second], x), distance)


def test_what_is_lost_nowhere_is_nothing_even_if_a_constant_overflows():
    layer = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    nn.init.constant_(layer.weight, 1.5e308)
    upper, _, distance = evaluated([layer], torch.full((1, 2), 1e-308, dtype=torch.float64))
    assert upper == math.inf
    assert not bool(distance.isnan().any())


def test_what_is_not_a_number_stays_unknown():
    """An infinite error times a constant of 0 is no error of 0."""
    first, second = nn.Linear(2, 2, dtype=torch.float64), nn.Linear(2, 2, dtype=torch.float64)
    nn.init.constant_(first.weight, 1e200)
    nn.init.zeros_(second.weight)
    _, _, distance = evaluated([first, second, nn.Linear(2, 2).double()], torch.ones(1, 2, dtype=torch.float64))
    assert not float(distance) < math.inf


def test_without_its_rounding_terms_the_distance_is_wrong(without_rounding):
    """The mutation check for residual layers, sums and concatenations."""
    blocks = [
        gnn.SLLLinear(4, 3),
        gnn.SLLConv1d(2, 3, 3),
        gnn.SLLConv2d(2, 2, 2),
        gnn.Residual(nn.Linear(4, 4), 0.3),
        gnn.Concatenation(nn.Linear(4, 2), nn.Linear(4, 3)),
    ]
    shapes = [(4,), (2, 4), (2, 3, 3), (4,), (4,)]
    cases = [
        (block, torch.randn(1, *shape, dtype=torch.float64))
        for block, shape in zip(blocks, shapes, strict=True)
        for _ in range(4)
    ]

    def right():
        found = []
        for block, x in cases:
            _, values, distance = evaluated([block], x)
            found.append(is_within(values, exact_batch([block], x), distance))
        return found

    assert all(right())
    without_rounding()
    assert sum(right()) <= 2  # a residual layer whose hidden numbers are all negative does nothing


class Doubled(gnn.SLLLinear):
    """A layer that computes something else than its base class."""

    def forward(self, x):
        return 2 * x


class Twice(nn.Sequential):
    def forward(self, x):
        return super().forward(super().forward(x))


def hooked(layer):
    layer.register_forward_hook(lambda module, args, output: 3 * output)
    return layer


@pytest.mark.parametrize(
    ("layer", "constant"),
    [(Doubled(4, 4), 2.0), (Twice(nn.LeakyReLU(-2.0)), 4.0), (hooked(nn.ReLU()), 3.0)],
    ids=["subclass", "sequential", "hook"],
)
def test_what_is_called_counts_and_not_what_a_class_is_known_for(layer, constant):
    x = torch.randn(2, 4, dtype=torch.float64)
    upper, values, distance = evaluated([layer], x)
    assert constant <= upper <= constant * (1 + 4 * EPS)
    assert bool(((values - layer(x.clone())).norm(dim=1) <= distance + EPS).all())


def test_what_cannot_be_computed_is_an_error():
    b = Builder()
    x = b.input("x", (1, 4))
    b.at("length", "Length", [])
    b.output("y", b.nonlinear(x, Nonlinear(1.0, "l2 pool"), (1, 1)))
    network = Network("test", b.graph)
    with pytest.raises(
        NotEvaluatedError, match=r"^length: how l2 pool rounds is not known, so nothing can be certified"
    ):
        Evaluation(network.plan, network.measure)


def test_layers_that_are_parametrised_keep_their_rule():
    layers = [gnn.SLLLinear(4, 3), gnn.Householder(4), gnn.BatchCentering(4).eval()]
    for layer in (layers[0], layers[2]):
        parametrize.register_parametrization(layer, "bias", nn.Tanh())
    x = torch.randn(2, 4, dtype=torch.float64)
    _, values, distance = evaluated(layers, x)
    assert is_within(values, exact_batch(layers, x), distance)


UNIT = EPS / 2
TINY = torch.finfo(torch.float64).tiny

# Where products are exact, where squares vanish or overflow, where products vanish.
SCALES = [1.0, 1e-160, 1e-300, 2.0**-1060, 1e150]

seeds = st.integers(0, 2**31 - 1)


def gauss(seed, *shape, scale=1.0):
    """Gaussian numbers, rounded to float32 for odd seeds."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (values.float().double() if seed % 2 else values) * scale


def convolved_with(layer, x, bias=None):
    """A convolution at the size of a batch, and a bias, as operations of a graph."""
    values, bound = Convolve((1, *x.shape[1:]), layer.with_kernel(layer.kernel.double())).run(x[:, None])
    if bias is not None:
        offset = bias.reshape(-1, *(1,) * layer.axes)
        values, local = Shift(tuple(values.shape[1:]), torch.ones(()), 0.0, offset).run(values)
        bound = bound + local
    return values[:, 0], bound


def is_tight(bound, terms, amount):
    """Whether a bound is about what so many roundings of numbers of that size can do."""
    return bool((bound <= 1e3 * (terms * EPS * amount + TINY)).all())


@given(layers(), seeds, st.sampled_from(SCALES))
def test_convolutions_of_any_geometry(case, seed, scale):
    layer, size = case
    x, bias = gauss(seed, 2, layer.in_channels, *size, scale=scale), gauss(seed + 1, layer.out_channels, scale=scale)
    values, bound = convolved_with(layer, x, bias)
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
    _, values, bound = evaluated([layer], x)
    assert is_within(values, exact_batch([layer], x), bound)
    assert is_tight(bound, x[0].numel() + 3, (1 + layer.weight.norm()) * (1 + x.norm()) * values.numel())


def test_linear_layers_act_on_the_last_axis():
    layer, x = nn.Linear(5, 3), gauss(0, 2, 4, 2, 5)
    _, values, bound = evaluated([layer], x)
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
        _, values, bound = evaluated([layer], x)
        assert values.shape[1:] == truth[0].shape
        assert is_within(values, truth, bound)
        in_float32 = 2.0**29 if isinstance(layer, (nn.LeakyReLU, nn.Hardtanh)) else 1  # what float32 makes of slopes
        assert scale > 1e100 or is_tight(bound, x[0].numel() + 8, 10 * in_float32 * amount)


@pytest.mark.parametrize("arguments", [(2,), (3, 1), ((1, 4), (1, 2))])
@pytest.mark.parametrize("scale", SCALES)
def test_lengths_of_windows(arguments, scale):
    layer, x = gnn.ScaledL2NormPool(*arguments), gauss(3, 2, 2, 4, 5, scale=scale)
    x[1, 0] = 0
    _, values, bound = evaluated([layer], x)
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
    _, values, bound = evaluated([layer], x)
    assert all(is_within(values, truth, bound) for truth in truths)


def test_one_rounding_is_counted_as_one():
    """1 + 2⁻⁵³ is 1 in float64: the error is a whole unit roundoff, and the bound hardly more."""
    _, values, bound = evaluated([gnn.Shift([UNIT]).double()], torch.ones(1, 1, 1, dtype=torch.float64))
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
        _, values, bound = evaluated([layer], x)
        truth = sum(map(Fraction, numbers)) / side**3
        assert abs(Fraction(float(values)) - truth) <= Fraction(float(bound))


@pytest.mark.parametrize("layer", [gnn.ScaledAvgPool(2, axes=1), gnn.ScaledL2NormPool(2, axes=1)])
@pytest.mark.parametrize("factor", [1000.25, -3 * 2.0**100])  # of float32, in which the layer runs
@pytest.mark.parametrize("scale", [1.0, 2.0**-1060])
def test_pools_whose_factor_was_changed(layer, factor, scale):
    layer.factor = factor
    x = gauss(4, 3, 2, 8, scale=scale)
    _, values, bound = evaluated([layer], x)
    assert is_within(values, exact_batch([layer], x), bound)


@settings(max_examples=settings.default.max_examples // 4)
@given(layers(), seeds)
def test_numbers_too_large_for_float64_have_no_bound(case, seed):
    """Where squares overflow the bound is infinite, not a number that happened to come out."""
    layer, size = case
    values, bound = convolved_with(layer, gauss(seed, 1, layer.in_channels, *size, scale=1e200))
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
            not is_within(*reordered(convolved_with(layer, x), [convolved(layer, fractions(x[0]))]))
            for layer, x in cases
        ]
        return found, [
            not is_within(*reordered(evaluated([layer], x)[1:], exact_batch([layer], x))) for layer, x in pools
        ]

    assert not any(any(found) for found in wrong())
    without_rounding()
    of_convolutions, of_pools = wrong()
    assert all(of_convolutions)
    assert sum(of_pools) >= len(of_pools) - 2


def reordered(found, truth):
    values, bound = found
    return values, truth, bound


MASK = torch.tensor([True, False, True, False])
THIRD = 1e9 / 3

# Functions of vectors of four entries in float64 whose constants or numbers were once lost, misplaced or rounded.
ONCE_WRONG = {
    "a constant between values": lambda x: torch.cat([torch.relu(x), torch.ones(1, 4).double(), torch.tanh(x)], 1),
    "zeros between values": lambda x: torch.stack([torch.relu(x) - 1, torch.zeros_like(x), torch.tanh(x)], 1).amax(1),
    "lengths without an axis": lambda x: (lambda h: (h / torch.sqrt((h * h).sum(0) + 1)).t())(x.t()),
    "an epsilon beside squares": lambda x: x / torch.sqrt((x * x).mean(1, keepdim=True) + 1e-3),
    "a factor of squares": lambda x: (x.square() * 1e-50).sum(1, keepdim=True).sqrt() * 1e25,
    "GELU by tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "x times hardsigmoid": lambda x: x * nn.functional.hardsigmoid(x),
    "filled": lambda x: x.masked_fill(MASK, 0.1),
    "chosen": lambda x: torch.where(MASK, x, THIRD),
    "padded": lambda x: nn.functional.pad(x, (1, 1), value=0.1),
    "a multiple": lambda x: torch.add(x, THIRD, alpha=3),
    "numbers without an axis": lambda x: x[0].sum() * 0.1 + x,
}


@pytest.mark.parametrize("name", ONCE_WRONG)
def test_values_are_those_of_the_model(name):
    """Of each sample alone: torch in float64 is as near as its own rounding."""
    model = Function(lambda x, wide: ONCE_WRONG[name](x), wide=torch.zeros((), dtype=torch.float64))
    x = torch.randn(3, 4, dtype=torch.float64)
    upper, values, distance = evaluated(model, x)
    assert math.isfinite(upper)
    for sample, value, bound in zip(x, values, distance.tolist(), strict=True):
        truth = model(sample[None])[0]
        assert value.shape == truth.shape
        assert float((value - truth).norm()) <= bound + 100 * EPS * (1 + float(truth.norm()))


def test_constants_whose_rounding_is_not_followed_are_refused():
    a = torch.full((4,), 1e8 + 1 / 3, dtype=torch.float64)
    model = Function(lambda x, a: torch.addcmul(x, a, a), a=a)
    assert gramcert.audit(model, (4,)).upper == 1
    with pytest.raises(NotEvaluatedError, match=r"addcmul: a constant that is added was not kept"):
        evaluated(model, torch.zeros(1, 4, dtype=torch.float64))
