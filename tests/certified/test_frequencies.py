import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gramcert.certified.frequencies import Cells, Frequencies
from gramcert.geometry.symbol import FrequencyGrid

EPS = torch.finfo(torch.float64).eps

degrees = st.lists(st.sampled_from([0.5, 1.0, 1.5, 3.0]), min_size=1, max_size=3)


def distances(cells, points, degrees):
    """Σ d|ω - c| from each point to its nearest centre, on the torus."""
    turns = torch.remainder(points[:, None] - cells.centres.values() + math.pi, 2 * math.pi) - math.pi
    return (turns.abs() @ torch.tensor(degrees, dtype=torch.float64)).amin(1)


@given(degrees, st.floats(0.5, 3), st.integers(0, 2**31), st.integers(0, 2))
def test_cells_cover_every_frequency_up_to_its_sign(degrees, radius, seed, levels):
    generator = torch.Generator().manual_seed(seed)
    points = (torch.rand(200, len(degrees), dtype=torch.float64, generator=generator) * 2 - 1) * math.pi
    cells = Cells.cover(degrees, radius)
    assert cells.radius <= radius * (1 + 50 * EPS)
    for _ in range(levels):
        finer = cells.split()
        assert finer.radius <= cells.radius / 2 * (1 + 5 * EPS)
        assert len(finer) == len(cells) * 2 ** len(degrees)
        cells = finer
    nearest = torch.minimum(distances(cells, points, degrees), distances(cells, -points, degrees))
    assert (nearest <= cells.radius * (1 + 5e3 * EPS)).all()


def test_diamonds_are_half_as_many_as_squares():
    cells = Cells.cover([1.0, 1.0], 0.1)
    squares = (math.pi / (0.1 / 2) + 1) * (math.pi / 0.1 + 1)
    assert len(cells) <= 0.55 * squares


def test_angles_are_reduced_in_integers():
    """A place and a numerator whose product has 60 bits: the float product would have lost every digit of the angle."""
    size = 2**40
    frequencies = Frequencies(torch.tensor([[size - 1]]), (size,))
    cosines, sines = frequencies.waves([torch.tensor([2**20 + 1])])
    expected = 2 * math.pi * (((size - 1) * (2**20 + 1)) % size) / size
    assert (cosines.item(), sines.item()) == pytest.approx((math.cos(expected), math.sin(expected)), abs=50 * EPS)


@pytest.mark.parametrize("shift", [0.0, 0.5])
@pytest.mark.parametrize("sizes", [(4, 5), (3, 6), (1, 1)])
def test_half_grids(sizes, shift):
    grid = FrequencyGrid(sizes, (shift, shift))
    half = Frequencies.of_grid(grid, [0, 1]).values()
    whole = {
        tuple(round(2 * math.pi * (j + shift) / m, 9) % round(2 * math.pi, 9) for j, m in zip(pair, sizes, strict=True))
        for pair in torch.cartesian_prod(*(torch.arange(m) for m in sizes)).tolist()
    }
    both = torch.remainder(torch.cat([half, -half]), 2 * math.pi)
    found = {tuple(round(value, 9) % round(2 * math.pi, 9) for value in row) for row in both.tolist()}
    assert found == whole
