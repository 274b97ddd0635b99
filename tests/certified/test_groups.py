import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import tensors
from gramcert import Convolution, spectral_norm
from gramcert.certified import groups
from gramcert.certified.gram_symbol import crude_norm
from gramcert.certified.groups import group_bounds
from gramcert.certified.work import Work
from gramcert.geometry.symbol import FrequencyGrid
from reference import dense_norm

EPS = torch.finfo(torch.float64).eps


def work():
    return Work(2**31, None)


def grid_norms(kernels, sizes, shifts):
    """σ(E) of each group on a whole grid, by SVD."""
    axes = kernels.dim() - 3
    angles = [2 * math.pi * (torch.arange(n).double() + shift) / n for n, shift in zip(sizes, shifts, strict=True)]
    blocks = kernels.to(torch.complex128)
    for axis in range(axes):
        taps = blocks.shape[3 + axis]
        table = torch.exp(-1j * angles[axis][:, None] * torch.arange(taps))
        blocks = torch.tensordot(blocks, table, ([3 + axis], [1])).movedim(-1, 3 + axis)
    return torch.linalg.matrix_norm(blocks.movedim((1, 2), (-2, -1)), 2).flatten(1).amax(1)


def rounding(kernels):
    """What may be lost where weights cancel."""
    return 1e-12 * torch.tensor([crude_norm(kernel) for kernel in kernels], dtype=torch.float64) + 1e-150


@st.composite
def grouped(draw):
    taps = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    shape = (draw(st.integers(2, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 4)), *taps)
    return draw(tensors(shape))


@given(grouped(), st.sampled_from([1, 3, 100]))
def test_all_frequencies(kernels, batch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "WORKED_ON", 1000 * kernels.numel() * batch)
        found = torch.tensor(group_bounds(kernels, work()), dtype=torch.float64)
    axes = kernels.dim() - 3
    sampled = grid_norms(kernels, (48,) * axes if axes < 3 else (12,) * 3, (0.3,) * axes)
    assert bool((sampled * (1 - 100 * EPS) <= found).all())
    # Within the grid's factor and the reading's, the fourth root of the number of rows, of what is sampled well.
    missed = math.prod(
        1 / math.cos(math.pi / 24) / math.cos(math.pi * 3 / (96 if axes < 3 else 24)) for _ in range(axes)
    )
    limit = sampled * missed * min(kernels.shape[1:3]) ** 0.25
    assert bool((found <= limit + rounding(kernels)).all())


@given(grouped(), st.data())
def test_the_points_of_grids(kernels, data):
    sizes = tuple(data.draw(st.integers(1, 9)) for _ in kernels.shape[3:])
    shifts = tuple(data.draw(st.sampled_from([0.0, 0.5])) for _ in sizes)
    grid = FrequencyGrid(sizes, shifts)
    found = torch.tensor(group_bounds(kernels, work(), (grid,)), dtype=torch.float64)
    truth = grid_norms(kernels, sizes, shifts)
    assert bool((truth * (1 - 100 * EPS) <= found).all())
    if 1 in kernels.shape[1:3] and len(grid) <= 12 * max(kernels.shape[3:]):
        assert bool((found <= truth + rounding(kernels)).all())


@pytest.mark.parametrize("rows", [1, 3])
def test_rounding_is_included(rows):
    # Of positive weights the largest σ(E) is that at frequency 0: for equal channels a sum of weights, known exactly.
    generator = torch.Generator().manual_seed(rows)
    depthwise = torch.rand(400, 1, 1, 3, 3, generator=generator, dtype=torch.float64)
    kernels = depthwise.expand(-1, rows, rows, -1, -1).contiguous()
    found = group_bounds(kernels, work(), (FrequencyGrid.unshifted((4, 4)),))
    exact = [rows * sum(map(Fraction, kernel.flatten().tolist())) for kernel in depthwise]
    assert all(
        size <= Fraction(bound) <= size * (1 + Fraction(1, 10**13)) for size, bound in zip(exact, found, strict=True)
    )


def test_rounding_where_weights_cancel():
    # At frequency 0 E is a sum whose terms all but cancel: rounding is what is left, of the size of the weights.
    generator = torch.Generator().manual_seed(0)
    half = torch.rand(400, 16, generator=generator, dtype=torch.float64)
    other = -half[:, torch.randperm(16, generator=generator)] * (1 + 1e-14)
    weights = torch.cat([half, other], 1)[:, torch.randperm(32, generator=generator)]
    found = group_bounds(weights[:, None, None], work(), (FrequencyGrid.unshifted((1,)),))
    exact = [abs(sum(map(Fraction, row))) for row in weights.tolist()]
    assert all(size <= Fraction(bound) for size, bound in zip(exact, found, strict=True))


def test_no_time_is_no_bound_of_its_own():
    kernels = torch.randn(3, 2, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert group_bounds(kernels, Work(2**31, 0.0)) == [crude_norm(kernel) for kernel in kernels]


def test_sums_of_absolute_weights_where_there_is_no_room():
    kernels = torch.randn(3, 2, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    crude = [crude_norm(kernel) for kernel in kernels]
    assert group_bounds(kernels, Work(2**13, None)) == crude
    assert group_bounds(kernels[:1], work()) == crude[:1]
    assert all(near < far for near, far in zip(group_bounds(kernels, work()), crude, strict=True))


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect"])
@pytest.mark.parametrize(("channels", "stride"), [(1, 1), (1, 2), (2, 1)])
def test_layers_of_many_groups(mode, channels, stride):
    # Groups of very different sizes, of which the largest is not the first.
    generator = torch.Generator().manual_seed(channels)
    kernel = torch.randn(24 * channels, channels, 5, 3, dtype=torch.float64, generator=generator)
    kernel *= torch.rand(24, generator=generator).repeat_interleave(channels)[:, None, None, None]
    layer = Convolution(kernel, stride, (2, 1), mode, groups=24)
    norm = spectral_norm(layer, (8, 6), tol=1e-6)
    truth = dense_norm(layer, (8, 6)).item()
    assert norm.lower * (1 - 100 * EPS) <= truth <= norm.upper * (1 + 100 * EPS)
    assert norm.tol_reached
