"""The distance of computed features from the exact ones, over whole networks and in exact arithmetic."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

import gramcert.nn as gnn
from certification.exact import exact_batch, is_within
from gramcert import lipschitz_bound
from gramcert.certification.forward import CertifiedForward, open_chain
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
    """What is computed, with its distance from the exact values, as ``certify`` does it."""
    with checked_arithmetic("test"):
        forward = CertifiedForward.of("test", list(layers), tuple(x.shape[2:]))
        return forward, *forward(x.clone())


@given(networks())
def test_computed_features_are_as_near_the_exact_ones_as_is_said(case):
    network, x = case
    forward, values, distance = evaluated(network, x)
    truth = exact_batch(network, x)
    assert values.dtype == torch.float64
    assert values.shape[1:] == truth[0].shape
    assert is_within(values, truth, distance)
    # Each layer passes on at most its constant, and adds roundings of a few hundred terms.
    amount = 1 + float(x.norm()) + sum(float(p.detach().double().norm()) for p in network.parameters())
    constants = [1 + step.constant for step in forward.steps]
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
        chain = [nn.Linear(shape[-1], shape[-1]), layer]
        _, values, distance = evaluated(chain, x)
        assert is_within(values, exact_batch(chain, x), distance)
        tried += 1
    assert tried


@settings(max_examples=settings.default.max_examples // 4)
@given(networks())
def test_it_is_the_network(case):
    network, x = case
    forward, values, _ = evaluated(network, x)
    plain = gnn.export(network).double()  # with the outer weights as they were rounded
    torch.testing.assert_close(values, plain(x.clone()).detach())
    assert forward.lipschitz <= math.prod(lipschitz_bound(layer) for layer in network) * (1 + 1e-2) + 1e-300


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
    forward, _, distance = evaluated([layer], torch.full((1, 2), 1e-308, dtype=torch.float64))
    assert forward.lipschitz == math.inf
    assert not bool(distance.isnan().any())


def test_what_is_not_a_number_stays_unknown():
    """An infinite error times a constant of 0 is no error of 0."""
    first, second = nn.Linear(2, 2, dtype=torch.float64), nn.Linear(2, 2, dtype=torch.float64)
    nn.init.constant_(first.weight, 1e200)
    nn.init.zeros_(second.weight)
    _, _, distance = evaluated([first, second, nn.Linear(2, 2)], torch.ones(1, 2, dtype=torch.float64))
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


def test_chains_are_opened_through_the_wrappers_of_torch():
    inner = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Flatten()))
    assert [type(layer) for layer in open_chain("test", [nn.DataParallel(inner), nn.Tanh()])] == [
        nn.ReLU,
        nn.Flatten,
        nn.Tanh,
    ]


class Doubled(gnn.SLLLinear):
    """A layer that says something about its constant, but computes something else than its base class."""

    def forward(self, x):
        return 2 * x

    def guarantee(self, call, size):
        return 2.0, size


class Twice(nn.Sequential):
    def forward(self, x):
        return super().forward(super().forward(x))


def hooked(layer):
    layer.register_forward_hook(lambda module, args, output: 3 * output)
    return layer


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Doubled(4, 4), r"test\(Doubled\): how it rounds is not known, so nothing can be certified"),
        (parametrize.register_parametrization(Doubled(4, 4), "weight", nn.Identity()), r"test\(Doubled\): how it"),
        (nn.Tanh(), r"test\(Tanh\): how it rounds is not known"),
        (gnn.SLLLinear(4, 4, nn.Tanh()), r"test\(Tanh\): how it rounds is not known"),
        (gnn.Residual(nn.Sigmoid()), r"test\(Sigmoid\): how it rounds is not known"),
        (nn.LayerNorm(4), r"test\(LayerNorm\): its constant is not known"),
        (Twice(nn.ReLU()), r"test\(Twice\): Twice overrides forward"),
        (hooked(nn.Linear(4, 4)), r"test\(Linear\): its hook <lambda> may change"),
        (hooked(nn.ReLU()), r"test\(ReLU\): its hook <lambda> may change"),
        (hooked(gnn.SLLLinear(4, 4)), r"test\(SLLLinear\): its hook <lambda> may change"),
        (gnn.SLLLinear(4, 4, hooked(nn.ReLU())), r"test\(ReLU\): its hook <lambda> may change"),
    ],
)
def test_what_is_not_known_is_an_error(layer, message):
    with pytest.raises(TypeError, match=message):
        CertifiedForward.of("test", [layer], ())


def test_layers_that_are_parametrised_keep_their_rule():
    layers = [gnn.SLLLinear(4, 3), gnn.Householder(4), gnn.BatchCentering(4).eval()]
    for layer in (layers[0], layers[2]):
        parametrize.register_parametrization(layer, "bias", nn.Tanh())
    x = torch.randn(2, 4, dtype=torch.float64)
    _, values, distance = evaluated(layers, x)
    assert is_within(values, exact_batch(layers, x), distance)


def test_sums_do_not_repeat_entries():
    """As in the layer itself: one output added to each of many has another constant than was said."""
    for module, shape in ((nn.Linear(4, 1), (4,)), (nn.Conv2d(3, 1, 1), (3, 2, 2))):
        forward = CertifiedForward.of("certify", [gnn.Residual(module)], shape[1:])
        with pytest.raises(
            ValueError, match=r"certify\(Residual\): its module turns shape \(1, .*\) into \(1, 1.*\), so"
        ):
            forward(torch.zeros(1, *shape, dtype=torch.float64))


def test_training_mode_is_refused_where_it_matters():
    for layer in (nn.Dropout(), gnn.BatchCentering(4)):
        with pytest.raises(ValueError, match=r"test\(.*in training mode .*; call .eval\(\) first"):
            CertifiedForward.of("test", [layer], ())
