"""Networks whose slopes can be chosen: the truth that forms have to be above.

A form bounds every network that arises when each activation is replaced by a diagonal with entries between its slopes,
and each maximum by a choice. So these linear networks are lower bounds, and an ascent over their diagonals makes good
ones.
"""

import torch
from torch import nn

SLOPES = {
    "relu": (nn.ReLU(), 0.0, 1.0),
    "leaky": (nn.LeakyReLU(0.25), 0.25, 1.0),
    "turned": (nn.LeakyReLU(-0.5), -0.5, 1.0),
    "tanh": (nn.Tanh(), 0.0, 1.0),
    "hardtanh": (nn.Hardtanh(), 0.0, 1.0),
    "elu": (nn.ELU(), 0.0, 1.0),
}


class Slope(nn.Module):
    """An activation, or the multiplication by numbers between its slopes."""

    def __init__(self, name):
        super().__init__()
        self.function, self.low, self.high = SLOPES[name]
        self.chosen = None

    def forward(self, x):
        return self.function(x) if self.chosen is None else self.chosen * x


class Choice(nn.Module):
    """Max pooling of windows side by side, or a choice of one entry of each."""

    def __init__(self, axes, size=2):
        super().__init__()
        self.axes, self.size = axes, size
        self.pool = (nn.MaxPool1d, nn.MaxPool2d)[axes - 1](size)
        self.scores = None

    def forward(self, x):
        if self.scores is None:
            return self.pool(x)
        _, places = (torch.nn.functional.max_pool1d, torch.nn.functional.max_pool2d)[self.axes - 1](
            self.scores, self.size, return_indices=True
        )
        return x.flatten(2).gather(2, places.flatten(2)).reshape(places.shape)


def largest_gain(model, shape, starts=3, rounds=6):
    """The largest norm found among the linear networks that a model may be, in float64."""
    parts = [part for part in model.modules() if isinstance(part, (Slope, Choice))]
    shapes = _shapes(model, parts, shape)
    best = 0.0
    for start in range(starts):
        generator = torch.Generator().manual_seed(start)
        for part, size in zip(parts, shapes, strict=True):
            noise = torch.rand(size, generator=generator, dtype=torch.float64)
            if isinstance(part, Choice):
                part.scores = noise
            else:
                part.chosen = part.low + (part.high - part.low) * (noise > 0.3)
        for _ in range(rounds):
            gain, inputs, outputs = _stretched(model, shape)
            best = max(best, gain)
            _improve(model, [part for part in parts if isinstance(part, Slope)], inputs, outputs)
    for part in parts:
        part.chosen = part.scores = None
    return best


def _shapes(model, parts, shape):
    found = {}
    hooks = [part.register_forward_pre_hook(lambda part, x: found.update({part: x[0].shape})) for part in parts]
    with torch.no_grad():
        model(torch.zeros(1, *shape, dtype=torch.float64))
    for hook in hooks:
        hook.remove()
    return [found[part] for part in parts]


def _stretched(model, shape):
    """The norm of a linear model, and the directions that it belongs to."""
    x = torch.zeros(1, *shape, dtype=torch.float64)
    matrix = torch.autograd.functional.jacobian(lambda x: _flat(model(x)) - _flat(model(torch.zeros_like(x))), x)
    left, values, right = torch.linalg.svd(matrix.flatten(1), full_matrices=False)
    return float(values[0]), right[0].reshape(1, *shape), left[:, 0]


def _flat(found):
    return torch.cat([part.flatten() for part in found]) if isinstance(found, tuple) else found.flatten()


def _improve(model, parts, inputs, outputs):
    """Every slope to the end of its interval that its derivative points to."""
    for part in parts:
        part.chosen = part.chosen.detach().requires_grad_(True)
    zero = torch.zeros_like(inputs)
    gain = outputs @ (_flat(model(inputs)) - _flat(model(zero)))
    gradients = torch.autograd.grad(gain, [part.chosen for part in parts], allow_unused=True) if parts else []
    for part, gradient in zip(parts, gradients, strict=True):
        chosen = part.chosen.detach()
        part.chosen = chosen if gradient is None else torch.where(gradient > 0, part.high, part.low)
