"""Climbing to maxima of λ_max(G). Nothing certified rests on it, but every tolerance does."""

import pytest
import torch

from gramcert.certified.frequencies import Frequencies
from gramcert.certified.gram_symbol import GramSymbol
from gramcert.certified.peaks import Peaks


def largest(symbol, frequency):
    return float(torch.linalg.eigvalsh(symbol.evaluate(frequency, torch.float64))[0, -1])


@pytest.mark.parametrize("channels", [3, 24, 100])  # with all eigenvectors, and with one
@pytest.mark.parametrize("seed", range(4))
def test_climbs_end_on_top(channels, seed):
    generator = torch.Generator().manual_seed(seed)
    kernel = torch.randn(channels, channels, 3, 3, generator=generator, dtype=torch.float64)
    symbol = GramSymbol(kernel)
    start = Frequencies.nearest(2 * torch.pi * torch.rand(2, generator=generator, dtype=torch.float64))
    peaks = Peaks(symbol, 1e-4, moving=True)
    ranked = peaks.rank(start, 1, lambda share: None)[1][0]
    found, vector = peaks.follow(start, ranked, dense=False)
    top = largest(symbol, found)
    assert top >= largest(symbol, start)
    assert symbol.norm_below(found, vector) ** 2 >= (1 - 1e-4) * top
    around = found.values()[0] + 0.02 * torch.randn(8, 2, generator=generator, dtype=torch.float64)
    assert all(largest(symbol, Frequencies.nearest(each)) <= (1 + 1e-4) * top for each in around)


def test_a_climb_that_promises_too_little_is_given_up():
    kernel = torch.randn(8, 8, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    symbol = GramSymbol(kernel)
    start, vector = Frequencies.nearest(torch.tensor([1.0, 2.0], dtype=torch.float64)), torch.ones(8)
    peaks = Peaks(symbol, 1e-6, moving=True)
    assert largest(symbol, peaks.follow(start, vector, dense=False)[0]) > largest(symbol, start)
    stopped = peaks.follow(start, vector, 1e6, dense=False)[0]
    assert torch.equal(stopped.numerators, start.numerators)
