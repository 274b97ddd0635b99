"""Small networks of every structure that forms know, drawn by Hypothesis."""

import torch
from hypothesis import strategies as st
from torch import nn

from networks.frozen import SLOPES, Choice, Slope

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d)
NORMALISATIONS = (nn.BatchNorm1d, nn.BatchNorm2d)
POOLS = (nn.AvgPool1d, nn.AvgPool2d)


class Block(nn.Module):
    """A residual block: activation after the sum or not, a shortcut that may be strided."""

    def __init__(self, inner, shortcut, after, sign):
        super().__init__()
        self.inner, self.shortcut, self.after, self.sign = inner, shortcut, after, sign

    def forward(self, x):
        return self.after(self.shortcut(x) + self.sign * self.inner(x))


class Beside(nn.Module):
    """Two branches side by side along the channels."""

    def __init__(self, one, two):
        super().__init__()
        self.one, self.two = one, two

    def forward(self, x):
        return torch.cat([self.one(x), self.two(x)], 1)


class Mean(nn.Module):
    """Over all places."""

    def forward(self, x):
        return x.flatten(2).mean(2) if x.dim() == 3 else x.mean((2, 3))


class Both(nn.Module):
    """Two outputs."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        y = self.first(x)
        return y, self.second(y)


@st.composite
def dense_networks(draw):
    """Linear layers, activations, residual blocks."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    width = draw(st.integers(1, 5))
    parts, start = [], width
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(SLOPES)))
        if draw(st.booleans()):
            inner = nn.Sequential(nn.Linear(width, 4), Slope(name), nn.Linear(4, width))
            after = Slope("relu") if draw(st.booleans()) else nn.Identity()
            parts.append(Block(inner, nn.Identity(), after, draw(st.sampled_from([1, -1]))))
        else:
            new = draw(st.integers(1, 5))
            parts += [nn.Linear(width, new), Slope(name)]
            width = new
    parts.append(nn.Linear(width, draw(st.integers(1, 3))))
    return nn.Sequential(*parts).double().eval(), (start,)


@st.composite
def image_networks(draw):
    """Convolutions of every geometry, in one and two dimensions."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    axes = draw(st.integers(1, 2))
    channels, size = draw(st.integers(1, 2)), draw(st.integers(4, 6))
    shape = (channels, *(size,) * axes)
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        part = draw(_parts(axes, channels, size))
        with torch.no_grad():
            probe = nn.Sequential(*parts, part).double().eval()
            try:
                found = probe(torch.zeros(1, *shape, dtype=torch.float64))
            except (RuntimeError, ValueError):  # too small for this part
                continue
        if min(found.shape[2:]) < 2:
            continue
        parts.append(part)
        channels, size = found.shape[1], found.shape[2]
    if not parts:
        parts, channels = [CONVOLUTIONS[axes - 1](channels, 2, 3, padding=1)], 2
    places = size**axes
    end = draw(st.sampled_from(["none", "flat", "mean", "deep mean", "two"]))
    if end == "flat":
        parts += [nn.Flatten(), nn.Linear(channels * places, 3)]
    elif end == "mean":
        parts += [Mean(), nn.Linear(channels, 2)]
    elif end == "deep mean":
        parts += [Mean(), nn.Linear(channels, 3), Slope(draw(st.sampled_from(sorted(SLOPES)))), nn.Linear(3, 2)]
    model = nn.Sequential(*parts)
    if end == "two":
        model = Both(model, CONVOLUTIONS[axes - 1](channels, 1, 1))
    return _with_statistics(model).double().eval(), shape


@st.composite
def _parts(draw, axes, channels, size):
    name = draw(st.sampled_from(sorted(SLOPES)))
    kind = draw(
        st.sampled_from(["plain", "plain", "normal", "block", "strided", "beside", "pool", "max", "up", "bare"])
    )
    new = draw(st.integers(1, 2))
    if kind == "plain":
        return nn.Sequential(draw(_convolutions(axes, channels, new)), Slope(name))
    if kind == "normal":
        convolution = draw(_convolutions(axes, channels, new))
        return nn.Sequential(convolution, NORMALISATIONS[axes - 1](new), Slope(name))
    if kind == "bare":
        return nn.Sequential(draw(_convolutions(axes, channels, new)), draw(_convolutions(axes, new, new)))
    if kind == "block":
        same = CONVOLUTIONS[axes - 1]
        mode = draw(st.sampled_from(["zeros", "zeros", "circular", "reflect"]))
        inner = nn.Sequential(
            same(channels, new, 3, padding=1, padding_mode=mode), Slope(name), same(new, channels, 3, padding=1)
        )
        after = Slope("relu") if draw(st.booleans()) else nn.Identity()
        return Block(inner, nn.Identity(), after, draw(st.sampled_from([1, -1])))
    if kind == "strided":
        same = CONVOLUTIONS[axes - 1]
        inner = nn.Sequential(same(channels, new, 3, stride=2, padding=1), Slope(name), same(new, new, 3, padding=1))
        return Block(inner, same(channels, new, 1, stride=2), Slope("relu"), 1)
    if kind == "beside":
        one = nn.Sequential(CONVOLUTIONS[axes - 1](channels, new, 3, padding=1), Slope(name))
        return Beside(one, nn.Identity() if draw(st.booleans()) else CONVOLUTIONS[axes - 1](channels, 1, 1))
    if kind == "pool":
        size = draw(st.integers(2, 3))
        return POOLS[axes - 1](size, stride=draw(st.integers(1, 2)), padding=draw(st.integers(0, 1)))
    if kind == "max":
        return Choice(axes)
    stride = draw(st.integers(1, 2))
    return nn.Sequential(TRANSPOSED[axes - 1](channels, new, 3, stride=stride, padding=1), Slope(name))


@st.composite
def _convolutions(draw, axes, channels, new):
    taps = draw(st.integers(1, 4))
    mode = draw(st.sampled_from(["zeros", "zeros", "zeros", "circular", "reflect", "replicate"]))
    padding = draw(st.integers(0, min(3, taps)))
    stride, dilation = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2), (3, 1), (2, 2)]))
    return CONVOLUTIONS[axes - 1](
        channels, new, taps, stride=stride, padding=padding, dilation=dilation, padding_mode=mode
    )


def _with_statistics(model):
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, NORMALISATIONS):
                part.weight.normal_()
                part.running_mean.normal_()
                part.running_var.uniform_(0.2, 2)
    return model
