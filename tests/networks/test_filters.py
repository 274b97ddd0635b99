"""Filters against the sums that they stand for."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gramcert.auditing.reading import Source
from gramcert.certified.frequencies import Frequencies
from gramcert.geometry.symbol import FrequencyGrid
from gramcert.networks.filters import Filter, filter_of
from gramcert.operators.linear import LinearMap

EPS = torch.finfo(torch.float64).eps


@st.composite
def filters(draw, axes=None):
    axes = draw(st.integers(1, 2)) if axes is None else axes
    torch.manual_seed(draw(st.integers(0, 1000)))
    taps = [draw(st.integers(1, 3)) for _ in range(axes)]
    kernel = torch.randn(draw(st.integers(1, 2)), draw(st.integers(1, 2)), *taps, dtype=torch.float64)
    stride = tuple(draw(st.integers(1, 3)) for _ in range(axes))
    first = tuple(draw(st.integers(-3, 3)) for _ in range(axes))
    return Filter(kernel, stride, first, 0.0, draw(st.booleans()))


def on_torus(found, x, sizes):
    """The map on a torus, place by place; ``sizes`` of its coarser side."""
    fine = tuple(s * n for s, n in zip(found.stride, sizes, strict=True))
    outputs, inputs = found.kernel.shape[:2]
    y = x.new_zeros(inputs, *fine) if found.adjoint else x.new_zeros(outputs, *sizes)
    for place in itertools.product(*map(range, sizes)):
        for tap in itertools.product(*map(range, found.taps)):
            read = tuple(
                (s * n + a + f) % m for s, n, a, f, m in zip(found.stride, place, tap, found.first, fine, strict=True)
            )
            matrix = found.kernel[(slice(None), slice(None), *tap)]
            if found.adjoint:
                y[(slice(None), *read)] += matrix.T @ x[(slice(None), *place)]
            else:
                y[(slice(None), *place)] += matrix @ x[(slice(None), *read)]
    return y


def in_phases(x, phases, sizes):
    """(channels·phases, *sizes) in the frequency domain."""
    axes = len(sizes)
    split = x.reshape(len(x), *itertools.chain.from_iterable(zip(sizes, phases, strict=True)))
    order = [0, *range(2, 2 * axes + 1, 2), *range(1, 2 * axes + 1, 2)]
    moved = split.permute(order).reshape(len(x) * math.prod(phases), *sizes)
    return torch.fft.fftn(moved, dim=tuple(range(1, axes + 1)))


@given(found=filters(), scale=st.integers(1, 2), size=st.integers(2, 3))
def test_symbols_are_the_map_in_the_frequency_domain(found, scale, size):
    axes = len(found.stride)
    phases, sizes = (scale,) * axes, (size,) * axes
    coarse = tuple(scale * n for n in sizes)
    fine_phases = tuple(s * scale for s in found.stride)
    source = coarse if found.adjoint else tuple(s * n for s, n in zip(found.stride, coarse, strict=True))
    x = torch.randn(found.kernel.shape[0 if found.adjoint else 1], *source, dtype=torch.float64)
    y = on_torus(found, x, coarse)
    of_x, of_y = (phases, fine_phases) if found.adjoint else (fine_phases, phases)
    grid = Frequencies.of_grid(FrequencyGrid.unshifted(sizes), list(range(axes)))
    symbols = found.on_phases(phases).at(grid)
    left, right = in_phases(y, of_y, sizes), in_phases(x, of_x, sizes)
    for symbol, place in zip(symbols, (grid.numerators // 2).tolist(), strict=True):
        at = (slice(None), *place)
        expected = symbol @ right[at]
        assert torch.allclose(left[at], expected, rtol=0, atol=1e3 * EPS * (1 + float(x.norm()) * found.size))


@given(one=filters(axes=1), two=filters(axes=1))
def test_filters_behind_each_other(one, two):
    torch.manual_seed(0)
    middle = one.kernel.shape[1 if one.adjoint else 0]
    shape = list(two.kernel.shape)
    shape[0 if two.adjoint else 1] = middle
    two = Filter(torch.randn(shape, dtype=torch.float64), two.stride, two.first, 0.0, two.adjoint)
    both = two.after(one)
    if both is None:
        return
    size = 12
    source = size if one.adjoint else size * one.stride[0]
    x = torch.randn(one.kernel.shape[0 if one.adjoint else 1], source, dtype=torch.float64)
    first = on_torus(one, x, (size,))
    length = first.shape[1]
    coarse = length if two.adjoint else length // two.stride[0]
    if not two.adjoint and length % two.stride[0]:
        return
    apart = on_torus(two, first, (coarse,))
    whole = source if both.adjoint else source // both.stride[0]
    together = on_torus(both, x, (whole,))
    assert torch.allclose(apart, together, rtol=0, atol=1e-12 * (1 + float(x.norm()) * one.size * two.size))


def only_map(model, shape):
    graph = Source.of("audit", model.double().eval()).graph("audit", shape).needed()
    return [node.operation for node in graph.nodes.values() if isinstance(node.operation, LinearMap)]


class _Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "is_filter"),
    [
        (lambda x: x[:, :, ::2], True),
        (lambda x: x[:, :, 1:, :-1], True),
        (lambda x: torch.nn.functional.pad(x, (1, 0, 2, 1)), True),
        (lambda x: torch.nn.functional.pad(x, (0, 0, 0, 0, 1, 2)), True),
        (lambda x: x[:, [1, 0]], True),
        (lambda x: x.roll(1, 2), False),
        (lambda x: x.flip(2), False),
        (lambda x: x.transpose(2, 3), False),
        (lambda x: torch.nn.functional.avg_pool2d(x, 3, 2, 1), True),
        (lambda x: torch.nn.functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False), False),
    ],
)
def test_moves_and_pooling_that_are_filters(function, is_filter):
    """And those that are do the same as the map."""
    maps = only_map(_Of(function), (2, 5, 5))
    found = [filter_of(part, 2) for part in maps]
    assert all(one is not None for one in found) == is_filter
    if not is_filter:
        return
    x = torch.randn(1, 2, 5, 5, dtype=torch.float64)
    for part, one in zip(maps, found, strict=True):
        big = torch.zeros(x.shape[1], 24, 24, dtype=torch.float64)
        big[:, : x.shape[2], : x.shape[3]] = x[0]
        sizes = tuple(24 // s for s in one.stride)
        y = part.apply(x.reshape(1, *part.source)).reshape(-1, *part.target[-2:])
        assert torch.allclose(on_torus(one, big, sizes)[:, : y.shape[1], : y.shape[2]], y)
        x = y[None]


@settings(max_examples=20)
@given(st.integers(0, 10), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3))
def test_nothing_comes_out_beyond_the_support(seed, taps, stride, padding):
    torch.manual_seed(seed)
    one = Filter(torch.ones(1, 1, taps, dtype=torch.float64), (stride,), (-padding,))
    big = torch.zeros(1, 20 * stride, dtype=torch.float64)
    big[:, :4] = 1
    places = on_torus(one, big, (20,))[0].nonzero().flatten().tolist()
    ((low, high),) = one.support((4,))
    assert {place if place < 10 else place - 20 for place in places} == set(range(low, high + 1)) - {
        n for n in range(low, high + 1) if not any(0 <= stride * n + a - padding < 4 for a in range(taps))
    }
