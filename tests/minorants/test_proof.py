"""Minorants of whole networks: below the margin whatever the multipliers are, and near it where they are good."""

import functools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gramcert.nn as gnn
from certification.exact import exact, fractions
from gramcert.auditing.reading import Source
from gramcert.certification.local import LocalBounds
from gramcert.minorants.backward import Multipliers, Pairs
from gramcert.minorants.proof import _Counted, prove
from gramcert.minorants.search import Search
from gramcert.operators.linear import Shift
from gramcert.operators.outputs import logits_of
from gramcert.rounding import checked_arithmetic

EPS = torch.finfo(torch.float64).eps
# Relative to the sum of the sizes of all terms: what the values of both sides are rounded by, with room.
ROUNDED = 2.0**14 * EPS

CLASSES = 3


class Act(nn.Module):
    """A network given by a function of its layers and the input."""

    def __init__(self, action, *layers):
        super().__init__()
        self.action, self.layers = action, nn.ModuleList(layers)

    def forward(self, x):
        return self.action(x, *self.layers)


def head(count):
    return nn.Linear(count, CLASSES)


NETWORKS = {
    "linear": lambda: ((5,), nn.Sequential(nn.Linear(5, 4), head(4))),
    "dense": lambda: ((5,), nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), head(6))),
    "activation first": lambda: ((5,), nn.Sequential(nn.ReLU(), nn.Linear(5, 4), nn.Hardtanh(), head(4))),
    "activation last": lambda: ((5,), nn.Sequential(nn.Linear(5, CLASSES), nn.LeakyReLU(0.1))),
    "leaky": lambda: ((5,), nn.Sequential(nn.Linear(5, 7), nn.LeakyReLU(), nn.Linear(7, 4), nn.ReLU6(), head(4))),
    "prelu": lambda: ((5,), nn.Sequential(nn.Linear(5, 7), nn.PReLU(7, -0.3), head(7))),
    "tanh": lambda: ((5,), nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5), nn.Sigmoid(), head(5))),
    "gelu": lambda: ((5,), nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5), nn.SiLU(), head(5))),
    "softplus": lambda: ((5,), nn.Sequential(nn.Linear(5, 7), nn.Softplus(), nn.Linear(7, 5), nn.ELU(), head(5))),
    "slopes alone": lambda: ((5,), nn.Sequential(nn.Linear(5, 7), nn.SELU(), nn.Linear(7, 5), nn.Hardswish(), head(5))),
    "strided": lambda: (
        (2, 5, 5),
        nn.Sequential(
            nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.Tanh(), nn.Flatten(), head(8)
        ),
    ),
    "normalised": lambda: (
        (1, 4, 4),
        nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), normalised(3), nn.ReLU(), nn.Flatten(), head(48)),
    ),
    "max pool": lambda: (
        (1, 5, 5),
        nn.Sequential(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2), nn.ReLU(), nn.MaxPool2d(2, stride=1), nn.Flatten(), head(2)),
    ),
    "overlapping max pool": lambda: (
        (2, 6),
        nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.MaxPool1d(3, stride=1, padding=1), nn.Flatten(), head(18)),
    ),
    "max pool of the input": lambda: ((2, 6), nn.Sequential(nn.MaxPool1d(2), nn.Flatten(), head(6))),
    "average pool": lambda: (
        (1, 4, 4),
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), head(8)),
    ),
    "SLL": lambda: ((4,), nn.Sequential(gnn.SLLLinear(4, 6), nn.Linear(4, 4), nn.ReLU(), gnn.SLLLinear(4, 3), head(4))),
    "SLL images": lambda: ((2, 4, 4), nn.Sequential(gnn.SLLConv2d(2, 3, 3), nn.Flatten(), head(32))),
    "residual": lambda: (
        (4,),
        nn.Sequential(
            nn.Linear(4, 4),
            Act(lambda x, one, two: torch.relu(x + two(torch.relu(one(x)))), nn.Linear(4, 5), nn.Linear(5, 4)),
            head(4),
        ),
    ),
    "residual with a minus": lambda: (
        (4,),
        nn.Sequential(Act(lambda x, one, two: two(x) - torch.tanh(one(x)), nn.Linear(4, 3), nn.Linear(4, 3)), head(3)),
    ),
    "twice itself": lambda: (
        (4,),
        nn.Sequential(nn.Linear(4, 5), Act(lambda x: torch.relu(x) + torch.relu(x) + x), head(5)),
    ),
    "the input twice": lambda: ((4,), Act(lambda x, one: one(torch.relu(x + x)), head(4))),
    "side by side": lambda: (
        (4,),
        Act(
            lambda x, one, two, last: last(torch.cat([torch.relu(one(x)), x, torch.tanh(two(x))], 1)),
            nn.Linear(4, 3),
            nn.Linear(4, 2),
            head(9),
        ),
    ),
    "larger ones": lambda: (
        (4,),
        Act(
            lambda x, one, two, last: last(torch.maximum(torch.relu(one(x)), two(x))),
            nn.Linear(4, 3),
            nn.Linear(4, 3),
            head(3),
        ),
    ),
    "sorted": lambda: ((4,), nn.Sequential(nn.Linear(4, 6), gnn.MaxMin(), nn.Linear(6, 4), nn.ReLU(), head(4))),
}


def normalised(channels):
    layer = nn.BatchNorm2d(channels)
    with torch.no_grad():
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.3, 2)
        layer.weight.normal_()
    return layer


class Prepared:
    """A network, an input, and every pair of its class and another one."""

    def __init__(self, model, shape, x):
        self.model = gnn.export(model).double().eval()
        self.x = x.double()
        with checked_arithmetic("certify"):
            graph = logits_of("certify", Source.of("certify", self.model).graph("certify", shape, "loader"))
            self.layout = LocalBounds.of("certify", graph, None, steps=1).layout
            self.centre = self.layout.centre(self.x[None, None])
        self.logits = self.values(self.x[None])[0]
        winner = int(self.logits.argmax())
        others = torch.tensor([i for i in range(len(self.logits)) if i != winner])
        self.pairs = Pairs(torch.zeros_like(others), torch.full_like(others, winner), others)

    def values(self, x):
        with torch.no_grad():
            return self.model(x)

    def margins(self, changes):
        """Of the changed inputs (changes, pairs)."""
        logits = self.values(self.x + changes)
        return logits[:, self.pairs.winners] - logits[:, self.pairs.others]

    def random(self, spread=2.0):
        """Any multipliers."""
        count = len(self.pairs)
        extras = {name: torch.exp(spread * torch.randn(count)) for name in (*self.layout.bent, *self.layout.cut)}
        slopes = {name: torch.randn(count, *self.layout.nodes[name].shape) for name in self.layout.bent}
        weights = {
            name: torch.exp(spread * torch.randn(count, len(self.layout.nodes[name].inputs)))
            for name in self.layout.sums
        }
        found = Multipliers(slopes, extras, weights, torch.exp(spread * torch.randn(count)))
        assert found.fits(self.layout, count)
        return found

    def searched(self, steps=40, share=1.0):
        """By the usual search, from what the constant of the network certifies, or a part of it."""
        constant = math.sqrt(2) * self.layout.constants[self.layout.output]
        radii = share * self.margins(torch.zeros(1, *self.x.shape))[0] / constant
        with checked_arithmetic("certify"):
            return Search(self.layout)(self.centre, self.pairs, radii, torch.full_like(radii, math.inf), steps)

    def prove(self, multipliers):
        with checked_arithmetic("certify"), torch.no_grad():
            return prove(self.layout, self.centre, self.pairs, multipliers)

    def minorant(self, multipliers, changes):
        """The quadratic function at some changes, without what rounding costs, and the sizes of its terms."""
        wide = Multipliers.of_tensors({name: value.double() for name, value in multipliers.tensors().items()})
        margin, slope = self.pairs.margins(self.logits.expand(len(self.pairs), -1))
        with torch.no_grad():
            counted = _Counted(self.layout, self.centre, self.pairs.samples)
            found = counted(margin, slope.reshape(-1, *self.layout.nodes[self.layout.output].shape), wide)
        assert bool(counted.is_moderate.all())
        delta = changes.flatten(1)
        linear = delta @ found.slope.flatten(1).T
        bent = delta.square().sum(1)[:, None] * found.curvature / 2
        for name, q in found.first.items():
            image = changes[:, None]
            for part in self.layout.first[name]:
                image = image if isinstance(part, Shift) else part.apply(image)
            bent = bent + image.flatten(1).square().sum(1)[:, None] * q / 2
        return found.constant + linear - bent, found.constant.abs() + margin.abs() + linear.abs() + bent


@functools.cache
def prepared(name, seed=0):
    torch.manual_seed(seed)
    shape, model = NETWORKS[name]()
    return Prepared(model, shape, torch.randn(shape)), shape


def drawn_changes(shape, count=40):
    """From next to nothing to far away."""
    sizes = 10.0 ** torch.linspace(-9, 3, count, dtype=torch.float64)
    return torch.randn(count, *shape, dtype=torch.float64) * sizes.reshape(-1, *[1] * len(shape))


@pytest.mark.parametrize("name", NETWORKS)
def test_minorants_are_below_the_margin(name):
    """Near the centre and far away, with multipliers of any kind."""
    for seed in range(2):
        network, shape = prepared(name, seed)
        changes = drawn_changes(shape)
        changes[0] = 0
        for multipliers in (network.random(0.5), network.random(3.0), network.searched(20)):
            below, sizes = network.minorant(multipliers, changes)
            assert bool(torch.isfinite(below).all())
            assert bool((below <= network.margins(changes) + ROUNDED * sizes).all())


@pytest.mark.parametrize("name", NETWORKS)
def test_searches_prove_something_that_attempts_do_not_refute(name):
    """A radius that is not 0, and within it no change downhill or at random leads to another class."""
    network, shape = prepared(name)
    radii = network.prove(network.searched(60))
    assert bool((radii > 1e-3 * network.margins(torch.zeros(1, *shape))[0]).any())
    for pair, radius in enumerate(radii.tolist()):
        changes = drawn_changes(shape)
        for _ in range(8):
            length = changes.flatten(1).norm(dim=1).reshape(-1, *[1] * len(shape))
            changes = changes / length.clamp_min(1e-300) * radius * (1 - 4 * EPS)
            assert float(network.margins(changes)[:, pair].min()) > 0
            leaf = changes.clone().requires_grad_()
            logits = network.model(network.x + leaf)
            margin = logits[:, network.pairs.winners[pair]] - logits[:, network.pairs.others[pair]]
            (slope,) = torch.autograd.grad(margin.sum(), leaf)
            size = slope.flatten(1).norm(dim=1).reshape(length.shape).clamp_min(1e-300)
            changes = changes - slope / size * radius


# Exact numbers


def rational_network(seed, dtype=torch.float32):
    """Two inputs, ReLU, two classes."""
    torch.manual_seed(seed)
    kind = (nn.ReLU(), nn.LeakyReLU(0.25), gnn.Abs())[seed % 3]
    parts = [nn.Linear(2, 4), kind, *([nn.Linear(4, 4), nn.ReLU()] if seed % 2 else []), nn.Linear(4, 2)]
    return nn.Sequential(*parts).to(dtype)


def exact_margin(model, x, winner):
    """x is a vector of fractions."""
    logits = exact(model, x)
    return logits[winner] - logits[1 - winner]


def square_reach(model, network, directions=24):
    """The least squared distance, in exact numbers, of a point with another class along some rays."""
    x, winner = fractions(network.x), int(network.pairs.winners[0])
    angles = [2 * math.pi * k / directions for k in range(directions)]
    found = []
    for angle in angles:
        ray = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
        sizes = torch.linspace(0, 20, 4001, dtype=torch.float64)[:, None]
        beyond = torch.where(network.margins(sizes * ray)[:, 0] <= 0)[0]
        if not len(beyond):
            continue
        low, high = float(sizes[beyond[0] - 1]), float(sizes[beyond[0]])
        for _ in range(40):
            middle = (low + high) / 2
            is_beyond = float(network.margins(middle * ray[None])[0, 0]) <= 0
            low, high = (low, middle) if is_beyond else (middle, high)
        step = Fraction(high * (1 + 2.0**-30)) * fractions(ray)
        if exact_margin(model, x + step, winner) <= 0:
            found.append(step @ step)
    return min(found, default=None)


@settings(max_examples=max(8, settings.default.max_examples // 8))
@given(st.integers(0, 10**6))
def test_no_exact_point_of_another_class_is_nearer(seed):
    model = rational_network(seed)
    network = Prepared(model, (2,), torch.randn(2))
    reach = square_reach(model, network)
    if reach is None:
        return
    for multipliers in (network.searched(30), network.random(1.0)):
        (radius,) = network.prove(multipliers).tolist()
        assert 0 <= Fraction(radius) ** 2 <= reach


def test_many_of_these_radii_are_not_far_from_the_truth():
    """Of a network with one hidden layer the median is above a half of what rays find."""
    shares = []
    for seed in range(0, 20, 2):
        model = rational_network(seed)
        network = Prepared(model, (2,), torch.randn(2))
        reach = square_reach(model, network)
        if reach is not None:
            shares.append(float(network.prove(network.searched(80))) / math.sqrt(reach))
    assert len(shares) >= 5
    assert max(shares) <= 1
    assert sorted(shares)[len(shares) // 2] >= 0.5


@pytest.mark.parametrize("seed", range(6))
def test_rounding_that_decides_the_class_certifies_nothing(seed):
    """A bias brings both logits within a unit or two: whatever the multipliers, nothing is proved."""
    model = rational_network(seed, torch.float64)
    x = torch.randn(2, dtype=torch.float64)
    with torch.no_grad():
        logits = model(x)
        winner = int(logits.argmax())
        model[-1].bias[1 - winner] += logits[winner] - logits[1 - winner]
        for _ in range(100):  # down to the last unit
            if model(x)[winner] > model(x)[1 - winner]:
                break
            model[-1].bias[winner] = math.nextafter(float(model[-1].bias[winner]), math.inf)
    network = Prepared(model, (2,), x)
    assert float(network.margins(torch.zeros(1, 2))) <= 64 * EPS * float(network.logits.abs().max() + 1)
    for multipliers in (network.searched(10), network.random(), scaled(network, 1e12)):
        assert float(network.prove(multipliers)) == 0


def scaled(network, size):
    """Multipliers that lose next to nothing, with so much curvature."""
    found = network.searched(1)
    return Multipliers(
        found.slopes,
        {name: torch.full_like(value, size) for name, value in found.extras.items()},
        found.weights,
        torch.full_like(found.room, size),
    )


# Tightness


def distances(network, shape):
    """To the boundary, if the network were what it is near the centre."""
    jacobian = torch.autograd.functional.jacobian(lambda x: network.model(x[None])[0], network.x)
    rows = jacobian[network.pairs.winners] - jacobian[network.pairs.others]
    return network.margins(torch.zeros(1, *shape))[0] / rows.flatten(1).norm(dim=1)


@pytest.mark.parametrize("shape", [(5,), (1, 4, 4)])
def test_linear_networks_are_certified_up_to_the_boundary(shape):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 2, 3, padding=1)] if len(shape) > 1 else []
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(4), nn.Linear(4, CLASSES))
    model(torch.zeros(1, *shape))
    network = Prepared(model, shape, torch.randn(shape))
    truth = distances(network, shape)
    multipliers = network.searched(200)
    best = Multipliers({}, {}, {}, network.margins(torch.zeros(1, *shape))[0] / truth**2)
    for found, slack in ((multipliers, 1e-4), (best, 1e-6)):
        radii = network.prove(found)
        assert bool((truth * (1 - slack) <= radii).all()), radii / truth - 1
        assert bool((radii <= truth * (1 + 1e-9)).all())


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(), nn.Hardtanh(-100, 100), gnn.Abs()], ids=str)
def test_where_no_unit_switches_a_radius_is_nearly_the_distance(activation):
    """Units a hundred times further from their breaks than the boundary is."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 6), activation, head(6))
    with torch.no_grad():
        model[0].bias.fill_(40.0)
        model[2].bias -= model(torch.zeros(1, 5))[0] - torch.tensor([0.2, 0.0, -0.2])
    network = Prepared(model, (5,), 0.01 * torch.randn(5))
    truth = distances(network, (5,))
    assert float(truth.max()) < 2
    radii = network.prove(network.searched(200))
    assert bool((0.95 * truth <= radii).all()), radii / truth
    assert bool((radii <= truth * (1 + 1e-9)).all())


# Hostile multipliers

HOSTILE = [0.0, -1.0, math.inf, -math.inf, math.nan, 1e300, -1e300, 5e-324, 1e-300, 1e100]


@pytest.mark.parametrize("name", ["dense", "residual", "max pool", "larger ones", "tanh", "twice itself"])
def test_hostile_multipliers_prove_nothing_that_is_wrong(name):
    """A radius of 0, or one that attempts at random do not refute; never anything that is not a number."""
    network, shape = prepared(name)
    good = network.searched(30)
    known = network.prove(good)
    assert bool((known > 0).all())
    changes = drawn_changes(shape, 400)
    margins, lengths = network.margins(changes), changes.flatten(1).norm(dim=1)
    reach = torch.where(margins <= 0, lengths[:, None], math.inf).amin(0)
    refused = 0
    for part in good.tensors():
        for number in HOSTILE:
            for place in (0, ...) if "slopes/" in part else (...,):
                tensors = {key: value.double().clone() for key, value in good.tensors().items()}
                tensors[part].view(len(known), -1)[:, place] = number
                found = network.prove(Multipliers.of_tensors(tensors))
                assert bool(torch.isfinite(found).all())
                assert bool((found >= 0).all())
                assert bool((found <= reach).all())
                refused += int((found == 0).sum())
                if "slopes/" not in part and not 0 < number < 1e100:
                    assert not found.any()
                if not math.isfinite(number):
                    assert not found.any()
    assert refused


def test_multipliers_of_other_shapes_do_not_fit():
    network, _ = prepared("residual")
    good, count = network.random(), len(network.pairs)
    assert good.fits(network.layout, count)
    assert not good.fits(network.layout, count + 1)
    tensors = good.tensors()
    for name, value in tensors.items():
        for other in (value[:1], value[..., None], value.long(), value.new_zeros(0)):
            assert not Multipliers.of_tensors(tensors | {name: other}).fits(network.layout, count)
        if name != "room":
            missing = {key: part for key, part in tensors.items() if key != name}
            assert not Multipliers.of_tensors(missing).fits(network.layout, count)
    assert not Multipliers.of_tensors(tensors | {"extras/another": tensors["room"]}).fits(network.layout, count)


def test_some_of_the_pairs():
    """What is proved of each pair does not depend on the others."""
    network, _ = prepared("max pool")
    multipliers = network.searched(20)
    together = network.prove(multipliers)
    for place in range(len(network.pairs)):
        chosen = torch.tensor([place])
        with checked_arithmetic("certify"):
            alone = prove(network.layout, network.centre, network.pairs[chosen], multipliers[chosen])
        torch.testing.assert_close(alone, together[chosen], rtol=1e6 * EPS, atol=0)


def test_windows_that_share_a_place():
    """Three windows with one largest entry: at g = 0 the minorant meets the margin where that entry falls by c/e."""
    model = nn.Sequential(nn.MaxPool1d(3, stride=1), nn.Flatten(), nn.Linear(3, 2))
    with torch.no_grad():
        model[2].weight.copy_(torch.tensor([[1.0] * 3, [0.0] * 3]))
        model[2].bias.zero_()
    network = Prepared(model, (1, 5), torch.tensor([[0.0, 0.0, 9.0, 0.0, 0.0]]))
    (pool,) = network.layout.bent
    one = torch.ones(1)
    zero = {pool: torch.zeros(1, *network.layout.nodes[pool].shape)}
    change = torch.tensor([[[0.0, 0.0, -1.0, 0.0, 0.0]]], dtype=torch.float64)
    below, sizes = network.minorant(Multipliers(zero, {pool: one}, {}, one), change)
    truth = network.margins(change)
    assert bool((below <= truth + ROUNDED * sizes).all())
    torch.testing.assert_close(below, truth, rtol=2.0**-24, atol=0)  # but for a share of the square, 2⁻²⁶
