import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gramcert.geometry import symbol
from gramcert.geometry.symbol import FrequencyGrid, InverseTransform, symbols, symbols_adjoint, taps_first

EPS = torch.finfo(torch.float64).eps

grids = st.integers(1, 3).flatmap(
    lambda axes: st.builds(
        FrequencyGrid,
        st.tuples(*[st.integers(1, 6)] * axes),
        st.tuples(*[st.sampled_from([0.0, 0.5])] * axes),
    )
)


def table(grid, taps, like):
    indices = torch.arange(len(grid))
    return grid.twiddles(indices, grid.tables([range(k) for k in taps], like))


@given(grids, st.data())
def test_symbols_are_the_sum_over_taps(grid, data):
    taps = [data.draw(st.integers(1, 4)) for _ in grid.sizes]
    kernel = torch.randn(2, 3, *taps, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    blocks = symbols(taps_first(kernel, len(taps)), table(grid, taps, kernel))
    for block, index in zip(blocks, itertools.product(*map(range, grid.shape)), strict=True):
        omega = [2 * math.pi * (j + s) / m for j, s, m in zip(index, grid.shifts, grid.sizes, strict=True)]
        expected = torch.zeros(2, 3, dtype=torch.complex128)
        for tap in itertools.product(*map(range, taps)):
            angle = torch.tensor(-sum(a * w for a, w in zip(tap, omega, strict=True)), dtype=torch.float64)
            expected += kernel[(slice(None), slice(None), *tap)] * torch.polar(torch.ones_like(angle), angle)
        torch.testing.assert_close(block, expected, rtol=5e3 * EPS, atol=5e3 * EPS)


@given(grids)
def test_half_grid_represents_the_whole(grid):
    """Every frequency or its negative is in the half grid, counted by the multiplicities."""
    steps = [(2 * j + round(2 * s), 2 * m) for j, s, m in zip((0,) * 3, grid.shifts, grid.sizes, strict=False)]
    assert float(grid.multiplicity(torch.device("cpu")).sum()) == math.prod(grid.sizes)

    def residues(index):
        return tuple((2 * j + start) % double for j, (start, double) in zip(index, steps, strict=True))

    half = {residues(index) for index in itertools.product(*map(range, grid.shape))}
    negatives = {tuple(-r % double for r, (_, double) in zip(point, steps, strict=True)) for point in half}
    assert half | negatives == {residues(index) for index in itertools.product(*map(range, grid.sizes))}


def test_adjoint():
    grid = FrequencyGrid((4, 5), (0.0, 0.5))
    kernel = torch.randn(2, 3, 3, 2, dtype=torch.float64)
    twiddles = table(grid, (3, 2), kernel)
    blocks = torch.randn(len(grid), 2, 3, dtype=torch.complex128)
    image = symbols(taps_first(kernel, 2), twiddles)
    back = symbols_adjoint(blocks, twiddles, kernel.shape)
    torch.testing.assert_close((image.conj() * blocks).sum().real, (kernel * back).sum())


@pytest.mark.parametrize("sizes", [(7,), (4, 5), (3, 4, 5)])
@pytest.mark.parametrize("longest", [3, 256])
def test_inverse_transform_inverts_symbols(sizes, longest, monkeypatch):
    monkeypatch.setattr(symbol, "TABLE_LENGTH", longest)
    grid = FrequencyGrid(sizes, (0.0,) * len(sizes))
    kernel = torch.randn(2, 3, *sizes, dtype=torch.float64)
    taps = taps_first(kernel, len(sizes))
    torch.testing.assert_close(
        InverseTransform(grid, kernel)(symbols(taps, table(grid, sizes, kernel)).flatten(1)), taps.real.flatten(1)
    )


def test_large_indices_lose_nothing():
    """Pitfall: angles are reduced in integers, so tap 10^6 at 224 frequencies is as exact as its residue."""
    grid = FrequencyGrid((224,), (0.0,))
    like = torch.ones(1, dtype=torch.float64)
    indices = torch.arange(len(grid))
    far = grid.twiddles(indices, grid.tables([[224 * 10**6 + 5]], like))
    assert torch.equal(far, grid.twiddles(indices, grid.tables([[5]], like)))
