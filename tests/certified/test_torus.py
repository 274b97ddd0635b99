import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import kernels
from gramcert.certified.frequencies import Cells, Frequencies
from gramcert.certified.gram_symbol import GramSymbol
from gramcert.certified.torus import (
    SINGULAR,
    _curvature,
    _Search,
    grid_maximum,
    grid_minimum,
    torus_maximum,
    torus_minimum,
)
from gramcert.certified.work import Work

EPS = torch.finfo(torch.float64).eps


def work(seconds=None):
    return Work(2**31, seconds)


def gaussian(*shape, seed=0):
    kernel = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return kernel / kernel.abs().max()


def orthogonal(channels, seed=0):
    """A 3×3 convolution with G(ω) = I: half of the channels shifted one way, half another."""
    basis = torch.linalg.qr(gaussian(channels, channels, seed=seed))[0]
    kernel = torch.zeros(channels, channels, 3, 3, dtype=torch.float64)
    kernel[:, : channels // 2, 0, 2] = basis[:, : channels // 2]
    kernel[:, channels // 2 :, 2, 1] = basis[:, channels // 2 :]
    return kernel


def on_fine_grid(kernel, samples):
    axes = tuple(range(2, kernel.dim()))
    blocks = torch.fft.fftn(kernel, s=(samples,) * len(axes), dim=axes).movedim((0, 1), (-2, -1))
    return torch.linalg.matrix_norm(blocks, 2).max().item()


@given(kernels(), st.sampled_from([1e-1, 1e-2, 1e-3, 1e-6]))
def test_the_supremum_is_enclosed(case, tol):
    kernel = case[0] / case[0].abs().max().clamp_min(1e-300)
    if not kernel.any():
        return
    found = torus_maximum(GramSymbol(kernel), tol, work())
    samples = (512, 64, 16)[kernel.dim() - 3]
    sampled = on_fine_grid(kernel, samples)
    factor = math.prod(1 / math.cos(math.pi * (k - 1) / (2 * samples)) for k in kernel.shape[2:])
    assert sampled * (1 - 100 * EPS) <= found.upper
    assert found.lower <= sampled * factor * (1 + 100 * EPS)
    assert found.upper - found.lower <= tol * found.upper
    assert not found.missed


@given(kernels(), st.sampled_from([1e-1, 1e-2, 1e-3, 1e-6]))
def test_the_infimum_is_enclosed(case, tol):
    """On a fine grid it is at most as much larger as σ changes from point to point."""
    kernel = case[0] / case[0].abs().max().clamp_min(1e-300)
    if not kernel.any():
        return
    found = torus_minimum(GramSymbol(kernel), tol, work())
    samples = (512, 64, 16)[kernel.dim() - 3]
    axes = tuple(range(2, kernel.dim()))
    blocks = torch.fft.fftn(kernel, s=(samples,) * len(axes), dim=axes).movedim((0, 1), (-2, -1))
    sampled = torch.linalg.svdvals(blocks).amin().item()
    steepest = sum((k - 1) / 2 for k in kernel.shape[2:]) * torch.linalg.svdvals(blocks).amax().item() * 1.2
    doubt = 1e-13 * kernel.abs().sum().item()
    assert found.lower <= sampled + doubt
    assert sampled - steepest * math.pi / samples <= found.upper + doubt
    if found.missed:
        assert found.upper <= 1e-5 * kernel.abs().sum().item()
    else:
        assert found.upper - found.lower <= tol * found.upper


@pytest.mark.parametrize("channels", [(3, 4), (24, 40), (100, 130)])  # with eigenvectors, and by inverse iteration
def test_minima_are_proved(channels):
    kernel = gaussian(*channels, 3, 3)
    found = torus_minimum(GramSymbol(kernel), 1e-3, work())
    blocks = torch.fft.fft2(kernel, s=(24, 24)).movedim((0, 1), (-2, -1))
    assert not found.missed
    assert 0 < found.lower <= torch.linalg.svdvals(blocks).amin().item()
    at_minimiser = GramSymbol(kernel).evaluate(found.frequency, torch.float64)
    assert torch.linalg.eigvalsh(at_minimiser)[0, 0].sqrt().item() == pytest.approx(found.upper, rel=1e-3)


@pytest.mark.parametrize("rows", [12, 120])
def test_a_square_symbol_with_a_zero_is_said_to_be_singular(rows):
    """det E of a real square kernel in two dimensions vanishes at isolated points, in general."""
    found = torus_minimum(GramSymbol(gaussian(rows, rows, 3, 3)), 1e-3, work())
    assert found.lower == 0
    assert found.upper < 1e-7
    assert found.missed == SINGULAR


def test_the_minimum_of_a_grid():
    kernel = gaussian(5, 5, 3, 4)
    blocks = torch.fft.fft2(kernel, s=(9, 40)).movedim((0, 1), (-2, -1))  # more points than are looked at first
    truth = torch.linalg.svdvals(blocks).amin().item()
    found = grid_minimum(GramSymbol(kernel), Frequencies.of_grid(_grid([9, 40]), [0, 1]), 1e-6, work())
    assert not found.missed
    assert found.lower <= truth * (1 + 1e-12)
    assert truth * (1 - 1e-12) <= found.upper
    assert found.upper - found.lower <= 1e-6 * found.upper


def test_a_minimum_need_not_be_nearer_than_another_one():
    kernel = gaussian(8, 16, 3, 3)
    alone = torus_minimum(GramSymbol(kernel), 1e-4, work())
    helped = torus_minimum(GramSymbol(kernel), 1e-4, work(), alone.lower / 2)
    assert helped.evaluations < alone.evaluations
    assert (1 - 1e-4) * alone.lower / 2 <= helped.lower <= alone.upper


@given(kernels(), st.integers(0, 2**31), st.floats(0.05, 1.4))
def test_the_rules_for_cells(case, seed, radius):
    """λ_max at any point within the radius of the maximiser is at least M - κ, for each κ of the module's docstring."""
    kernel = case[0] / case[0].abs().max().clamp_min(1e-300)
    symbol = GramSymbol(kernel)
    if not kernel.any() or not symbol.axes:
        return
    found = torus_maximum(symbol, 1e-9, work())
    grid = Frequencies.of_grid(
        _grid([64] * len(symbol.axes) if len(symbol.axes) < 3 else [12] * 3), list(range(len(symbol.axes)))
    )
    lowest = torch.linalg.eigvalsh(symbol.evaluate(grid, torch.float64))[:, 0].min().item()
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(40, len(symbol.axes), dtype=torch.float64, generator=generator)
    steps *= radius / (steps.abs() @ torch.tensor(symbol.degrees, dtype=torch.float64))[:, None]
    values = []
    for step in steps:
        near = Frequencies.nearest(found.frequency.values()[0] + step)
        values.append(torch.linalg.eigvalsh(symbol.evaluate(near, torch.float64)[0])[-1].item())
    largest, doubt = found.lower**2, 1e-8 * symbol.crude
    assert min(values) >= largest * math.cos(radius) ** 2 - doubt
    assert min(values) >= largest - _curvature(symbol) * radius**2 / 2 - doubt
    # The grid's lowest value is only near the infimum: what it may miss is (M - μ) times the grid's own sin².
    coarse = math.sin(sum(d * math.pi / 64 for d in symbol.degrees)) ** 2 if len(symbol.axes) < 3 else 1
    spread = max(0.0, largest - lowest)  # which rounding may make negative for a symbol that is constant
    infimum = max(0.0, lowest - spread * coarse / max(1e-9, 1 - coarse))
    assert min(values) >= largest - (largest - infimum) * math.sin(radius) ** 2 - doubt


def _grid(sizes):
    from gramcert.geometry.symbol import FrequencyGrid

    return FrequencyGrid.unshifted(tuple(sizes))


@pytest.mark.parametrize("tol", [1e-2, 1e-4, 1e-6, 1e-9])
def test_isolated_maximisers_close_at_any_tolerance(tol):
    found = torus_maximum(GramSymbol(gaussian(8, 8, 3, 3)), tol, work())
    assert found.upper - found.lower <= tol * found.upper
    assert found.evaluations <= 1500


@pytest.mark.parametrize(("noise", "tol", "most"), [(0.0, 1e-6, 100), (1e-6, 1e-5, 400), (1e-3, 1e-4, 2000)])
def test_flat_symbols_close_at_once(noise, tol, most):
    kernel = orthogonal(16) + noise * gaussian(16, 16, 3, 3)
    found = torus_maximum(GramSymbol(kernel), tol, work())
    assert not found.missed
    assert found.evaluations <= most
    assert found.lower <= on_fine_grid(kernel, 32) * (1 + 1e-3)


def test_flat_symbols_that_are_not_orthogonal_use_the_smallest_eigenvalue():
    """An orthogonal kernel with every tap disturbed: the bound of the second derivative is crude, μ is not."""
    search = _Search(GramSymbol(orthogonal(16) + 0.02 * gaussian(16, 16, 3, 3)), 1e-4, work(), 0.0, moving=True)
    first = Cells.cover(search.symbol.degrees, 0.4)
    search.look(first)
    search.measure_flatness(first)
    blocks = torch.linalg.eigvalsh(
        search.symbol.evaluate(Cells.cover(search.symbol.degrees, 0.1).centres, torch.float64)
    )
    assert 0 < search.bottom <= blocks[:, 0].min()
    assert blocks[:, -1].max().sqrt() <= search.proved


def test_the_curvature_holds_for_correlations_as_wrong_as_rounding_allows():
    """K_b = e_b fᵀ: each ‖C_a‖ = ‖f‖² = 1, so norms of the errors add up to more than the norm of their sum."""
    kernel = torch.zeros(8, 64, 8, dtype=torch.float64)
    kernel[range(8), :, range(8)] = 1 / 8
    symbol = GramSymbol(kernel.reshape(8, 64, 2, 2, 2))
    assert set(symbol.correlations.flatten().tolist()) == {0.0, 1.0}
    terms = 64 * 8 + 2
    symbol.correlations = symbol.correlations * (1 - terms * EPS / 2)  # exact, and within γ of the truth
    exact = 26 * 4  # lags other than 0, each weighted by max_j(a_j/d_j)² = (1/½)²
    assert Fraction(_curvature(symbol)) >= exact
    assert _curvature(symbol) <= exact * (1 + 1e-10)


@given(kernels())
def test_the_curvature_is_that_of_exact_correlations(case):
    kernel = case[0].sign() * (case[0] * 8).abs().ceil().clamp_max(64) / 64  # whose products are exact
    symbol = GramSymbol(kernel)
    total = Fraction(0)
    for lag, matrix in zip(symbol.lags.tolist()[1:], symbol.correlations[1:], strict=True):
        weight = max(Fraction(abs(a)) / Fraction(d) for a, d in zip(lag, symbol.degrees, strict=True))
        entries = [[Fraction(entry) for entry in row] for row in matrix.abs().tolist()]
        square = sum(entry**2 for row in entries for entry in row)
        mixed = max(map(sum, entries)) * max(map(sum, zip(*entries, strict=True)))
        total += 2 * weight**2 * Fraction(math.sqrt(min(square, mixed)) * (1 - EPS))
    assert total <= Fraction(_curvature(symbol)) <= total * Fraction(1 + 1e-10) + Fraction(1e-10)


def test_delta_and_averaging_kernels():
    delta = torch.zeros(2, 2, 3, 3, dtype=torch.float64)
    delta[:, :, 1, 1] = torch.eye(2)
    for kernel, norm in ((delta, 1.0), (torch.full((1, 1, 3, 3), 1 / 9, dtype=torch.float64), 1.0)):
        found = torus_maximum(GramSymbol(kernel), 1e-9, work())
        assert found.lower <= norm * (1 + EPS)
        assert norm * (1 - EPS) <= found.upper
        assert found.evaluations <= 500


def test_lines_of_maximisers():
    """|E| = 2|cos((ω₁ + ω₂)/2)| is largest along a line, where the product of cosines would be unsound."""
    found = torus_maximum(GramSymbol(torch.eye(2, dtype=torch.float64)[None, None] * 0.75), 1e-5, work())
    assert found.lower <= 1.5 <= found.upper
    assert not found.missed


def test_grids():
    kernel = gaussian(3, 3, 3, 3)
    blocks = torch.fft.fftn(kernel, s=(7, 6), dim=(2, 3)).movedim((0, 1), (-2, -1))
    exact = torch.linalg.matrix_norm(blocks, 2).max().item()
    found = grid_maximum(GramSymbol(kernel), Frequencies.of_grid(_grid([7, 6]), [0, 1]), 1e-9, work())
    assert found.lower <= exact * (1 + 10 * EPS)
    assert exact * (1 - 10 * EPS) <= found.upper
    assert found.upper - found.lower <= 1e-9 * found.upper


def test_impossible_tolerances_end_with_the_reason():
    found = torus_maximum(GramSymbol(gaussian(4, 4, 3, 3)), 1e-15, work())
    assert "rounding" in found.missed
    assert 0 < found.upper - found.lower <= 1e-11 * found.upper


def test_no_time_at_all_still_gives_a_valid_answer():
    kernel = gaussian(16, 16, 3, 3)
    found = torus_maximum(GramSymbol(kernel), 1e-6, work(0))
    exact = on_fine_grid(kernel, 64)
    assert "max_seconds=0" in found.missed
    assert found.lower <= exact * 1.01
    assert exact <= found.upper < math.inf


@pytest.mark.parametrize("looks", [2, 4, 8, 15])
def test_the_bound_after_too_little_time_is_not_far_off(looks, clock):
    """With the first of them after the first cells."""
    kernel = gaussian(32, 32, 3, 3)
    exact = on_fine_grid(kernel, 32)
    found = torus_maximum(GramSymbol(kernel), 1e-12, work(looks))
    assert f"max_seconds={looks} " in found.missed
    assert exact <= found.upper <= 1.2 * exact


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_nothing_false_is_proved_by_a_search_that_found_too_little(seed, sign, noise):
    """A search that believes an extremum a tenth from the true one must not close on its target."""
    kernel = orthogonal(8, seed=seed) + noise * gaussian(8, 8, 3, 3, seed=seed + 10)
    symbol = GramSymbol(kernel / kernel.abs().max())
    truth = (torus_maximum if sign > 0 else torus_minimum)(symbol, 1e-6, work())
    search = _Search(symbol, 1e-2, work(), 0.0 if sign > 0 else math.inf, moving=True, sign=sign)
    first = Cells.cover(symbol.degrees, 0.7)
    search.look(first)
    search.attained = truth.lower * 0.9 if sign > 0 else truth.upper * 1.1
    if sign < 0:
        search.bottom = -(torus_maximum(symbol, 0.1, work()).upper ** 2)
    search.look = lambda cells: None
    search.close(search.cover(1.0))
    assert search.proved >= truth.lower if sign > 0 else search.proved <= truth.upper
    # Nor by a cover whose centres miss both extremes.
    search.measure_flatness(first)
    extremes = [end.upper**2 for end in (torus_maximum(symbol, 1e-6, work()), torus_minimum(symbol, 1e-6, work()))]
    assert search.bottom <= (extremes[1] if sign > 0 else -extremes[0] * (1 - 1e-5))
    assert search.proved >= truth.lower if sign > 0 else search.proved <= truth.upper


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("second", [0.2, -0.3])
def test_rules_that_are_sharp(second, sign):
    """Of two taps G = 1 + a² + 2a·cos ω: the rule with μ is an equality, and so is what a cover says of extremes."""
    symbol = GramSymbol(torch.tensor([[[1.0, second]]], dtype=torch.float64))
    largest, smallest = (1 + abs(second)) ** 2, (1 - abs(second)) ** 2
    search = _Search(symbol, 1e-6, work(), 0.0 if sign > 0 else math.inf, moving=True, sign=sign)
    search.attained = math.sqrt(largest if sign > 0 else smallest)
    search.bottom = smallest if sign > 0 else -largest
    search.curvature = math.inf
    for angle in (0.1, 0.5, 1.0, 2.0):
        rise = (largest - smallest) * math.sin(angle / 2) ** 2  # from the one extreme to a frequency at that distance
        assert rise <= search._allowance(angle / 2) <= rise * (1 + 1e-3)
    # Centres at odd multiples of π/8 cover everything, and none of them is an extreme.
    cells = Cells(Frequencies(torch.tensor([[1], [3], [5], [7]]), (16,)), math.pi / 16 * (1 + 1e-12))
    nearest = 1 + second**2 + sign * 2 * abs(second) * math.cos(math.pi / 8)
    search = _Search(symbol, 1e-6, work(), 0.0 if sign > 0 else math.inf, moving=True, sign=sign)
    search.typical, search.attained = torch.ones(1), math.sqrt(nearest)
    assert search.measure_flatness(cells)
    assert search.proved**2 >= largest if sign > 0 else search.proved**2 <= smallest
    assert search.bottom <= (smallest if sign > 0 else -largest)
