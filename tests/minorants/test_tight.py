"""Minorants that touch the margin: a constant that is a little too small shows here, and hardly in random networks.

The margin is -|w·f(x) - w·f(x̂)|. With all slopes 0 and hardly any curvature but that of the last function, its minorant
falls with the square of L·‖δ‖, and equals the margin where f stretches most. Points move to where both are nearest.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gramcert.auditing.reading import Source
from gramcert.certification.local import LocalBounds
from gramcert.minorants.backward import Multipliers, Pairs
from gramcert.minorants.proof import _Counted
from gramcert.operators.linear import Shift
from gramcert.operators.outputs import logits_of
from gramcert.rounding import checked_arithmetic

# Distances are of size 1 and computed in float64.
ROUNDED = 2.0**16 * torch.finfo(torch.float64).eps


class Function(nn.Module):
    """A function that torch can trace."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Distance(nn.Module):
    """-|w·f(x) + b| and 0: the class is the second, but for the point where both are 0."""

    def __init__(self, before, weight):
        super().__init__()
        self.before, self.last = before, nn.Linear(len(weight), 1)
        with torch.no_grad():
            self.last.weight.copy_(weight[None])

    def forward(self, x):
        z = self.last(self.before(x))
        return torch.cat([-z.abs(), 0 * z], 1)


def pooled(*arguments):
    return Function(lambda x: F.max_pool1d(x[:, None], *arguments)[:, 0])


# What stands before the last layer, how many entries it takes, and how many it gives.
STRUCTURES = {
    "overlapping windows": (pooled(3, 1, 1), 3, 3),
    "wide windows": (pooled(5, 1, 2), 5, 5),
    "strided windows": (pooled(3, 2, 1), 5, 3),
    "twice": (Function(lambda x: x + x), 3, 3),
    "three times": (Function(lambda x: x + x - (-x)), 2, 2),
    "side by side": (Function(lambda x: torch.cat([x, F.relu(x)], 1)), 2, 4),
    "itself side by side": (Function(lambda x: torch.cat([x, F.relu(x), x], 1)), 2, 6),
    "relu": (nn.ReLU(), 3, 3),
    "steep": (nn.LeakyReLU(3.0), 3, 3),
    "residual": (Function(lambda x: x + F.relu(x)), 3, 3),
    "maximum": (Function(lambda x: torch.maximum(x, F.relu(x))), 2, 2),
}

# With weights that are all equal these stretch every entry as much as their constant says.
TOUCHING = ("overlapping windows", "wide windows", "twice", "itself side by side", "relu", "residual")


def minorant(layout, centre, pairs, multipliers):
    """As a function of the distance from the centre, rounding included."""
    margin, slope = pairs.margins(centre.course.values[layout.output][pairs.samples].flatten(1))
    counted = _Counted(layout, centre, pairs.samples)
    found = counted(margin, slope.reshape(-1, *layout.nodes[layout.output].shape), multipliers)

    def value(delta):
        total = found.constant - counted.cost - counted.growth * delta.norm(dim=1)
        total = total + (found.slope.flatten(1) * delta).sum(1) - found.curvature * delta.square().sum(1) / 2
        for name, q in found.first.items():
            image = delta[:, None]
            for part in layout.first[name]:
                image = image if isinstance(part, Shift) else part.apply(image)
            total = total - q * image.flatten(1).square().sum(1) / 2
        return total

    return value


@pytest.mark.parametrize("weight", ["even", "drawn"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_below_the_margin_and_touching_it(name, weight):
    before, inputs, outputs = STRUCTURES[name]
    count = 16
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        w = torch.ones(outputs) / math.sqrt(outputs) if weight == "even" else torch.rand(outputs) + 0.1
        x = torch.rand(1, inputs, dtype=torch.float64) / 2 + 0.5
        x[0, inputs // 2] += 3 * ("windows" in name)
        extras = torch.randn(count, dtype=torch.float64).exp()
        delta = 0.3 * torch.randn(count, inputs, dtype=torch.float64)
    model = Distance(before, w).double().requires_grad_(False)
    model.last.bias.sub_(model.last(before(x))[0])
    with checked_arithmetic("test"):
        graph = logits_of("test", Source.of("test", model).graph("test", (inputs,)))
        layout = LocalBounds.of("test", graph, None, steps=1).layout
        centre = layout.centre(x[:, None])
        (last,) = (place for place in layout.bent if layout.nodes[place].operation.name == "abs")
        small = torch.full((count,), 1e-6, dtype=torch.float64)
        multipliers = Multipliers(
            {place: torch.zeros(count, *layout.nodes[place].shape, dtype=torch.float64) for place in layout.bent},
            {place: extras if place == last else small for place in (*layout.bent, *layout.cut)},
            {place: torch.ones(count, len(layout.nodes[place].inputs), dtype=torch.float64) for place in layout.sums},
            extras,
        )
        assert multipliers.fits(layout, count)
        samples = torch.zeros(count, dtype=torch.int64)
        below = minorant(layout, centre, Pairs(samples, samples, samples + 1), multipliers)
    least = math.inf
    for step in range(150):
        moved = delta.detach().requires_grad_()
        logits = model(x + moved)
        apart = logits[:, 0] - logits[:, 1] - below(moved)
        assert bool((apart >= -ROUNDED).all())
        least = min(least, float(apart.detach().min()))
        (gradient,) = torch.autograd.grad(apart.sum(), moved)
        delta = moved - 0.2 * 0.97**step * gradient / gradient.norm(dim=1, keepdim=True).clamp_min(1e-9)
    assert least < (1e-3 if weight == "even" and name in TOUCHING else 1.0)
