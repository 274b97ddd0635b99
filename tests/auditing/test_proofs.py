"""Proofs that a map is below a number: they succeed just above the norm, and never below."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gramcert
from gramcert import Convolution
from gramcert.auditing import proofs
from gramcert.operators.linear import Move, Scale
from gramcert.operators.matrices import AxisMatrix, Convolve
from reference import dense_norm, sigma


@st.composite
def layers(draw):
    """A small convolution of any geometry, and an input size."""
    axes = draw(st.integers(1, 2))
    groups = draw(st.integers(1, 2))
    transposed = draw(st.booleans())
    mode = "zeros" if transposed else draw(st.sampled_from(["zeros", "zeros", "circular", "reflect", "replicate"]))
    sizes = draw(st.lists(st.integers(2, 9 if axes == 1 else 6), min_size=axes, max_size=axes))
    taps = draw(st.lists(st.integers(1, 3), min_size=axes, max_size=axes))
    pads = [draw(st.integers(0, min(n - 1, 2))) for n in sizes]
    strides = draw(st.lists(st.integers(1, 2), min_size=axes, max_size=axes))
    inputs, outputs = (groups * draw(st.integers(1, 3)) for _ in range(2))
    shape = (inputs, outputs // groups) if transposed else (outputs, inputs // groups)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    kernel = torch.randn(*shape, *taps, generator=generator, dtype=torch.float64)
    kernel = kernel if draw(st.booleans()) else kernel.sign()
    layer = Convolution(kernel, strides, pads, mode, draw(st.integers(1, 2)), groups, transposed)
    try:
        layer.output_size(tuple(sizes))
    except ValueError:
        layer = Convolution(
            kernel, 1, [k - 1 for k in taps] if transposed is False else 0, "zeros", 1, groups, transposed
        )
    return layer, tuple(sizes)


@given(layers())
def test_proofs_succeed_above_the_norm_and_never_below(case):
    layer, size = case
    truth = float(dense_norm(layer, size))
    linear = Convolve((1, layer.in_channels, *size), layer)
    assert proofs.proves_below(linear, truth * (1 + 1e-6)).proved
    if truth == 0:
        return
    for share in (1 - 1e-6, 0.9, 0.1):
        assert not proofs.proves_below(linear, truth * share).proved


@given(layers())
@settings(max_examples=settings.default.max_examples // 2)
def test_each_test_alone_never_proves_too_much(case):
    layer, size = case
    truth = float(dense_norm(layer, size))
    linear = Convolve((1, layer.in_channels, *size), layer)
    tests = (proofs._by_cells, proofs._by_grids, proofs._by_matrices, proofs._by_circulants) if truth > 0 else ()
    for test in tests:
        assert not test(linear, truth * (1 - 1e-6)).proved


@pytest.mark.parametrize("order", [3, 40, 70, 200])
def test_matrices_are_proved_by_balls_or_factorisations(order):
    matrix = torch.randn(order, order + 5, generator=torch.Generator().manual_seed(order), dtype=torch.float64)
    linear, truth = AxisMatrix((order + 5,), matrix, 0), float(sigma(matrix))
    assert proofs.proves_below(linear, truth * (1 + 1e-9)).proved
    assert not proofs.proves_below(linear, truth * (1 - 1e-9)).proved
    assert not proofs.proves_below(AxisMatrix((order + 5,), matrix, 0, truth * 1e-3), truth * (1 + 1e-9)).proved


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", [(24, 24), (20, 31)])
def test_larger_layers_are_proved_by_bands_and_frequencies(size):
    kernel = torch.randn(5, 5, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    layer = Convolution(kernel, padding=1)
    enclosure = gramcert.spectral_norm(layer, size, tol=1e-8)
    linear = Convolve((1, 5, *size), layer)
    supremum = gramcert.spectral_norm(layer).upper
    assert proofs._by_cells(linear, supremum * (1 + 1e-3)).proved
    assert not proofs._by_cells(linear, enclosure.lower).proved
    assert proofs._by_matrices(linear, enclosure.upper * (1 + 1e-7)).method == "banded Cholesky factorisation"
    assert proofs._by_matrices(linear, enclosure.upper * (1 + 1e-7)).proved
    assert not proofs._by_matrices(linear, enclosure.lower * (1 - 1e-9)).proved
    for tol in (1e-2, 1e-3, 1e-5):
        assert proofs._by_circulants(linear, enclosure.upper * (1 + tol)).proved
    assert not proofs._by_circulants(linear, enclosure.lower * (1 - 1e-9)).proved


def test_layers_whose_matrices_are_too_large_are_proved_by_a_circulant(monkeypatch):
    monkeypatch.setattr(proofs, "MOST_OPERATIONS", 0.0)
    kernel = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    layer = Convolution(kernel, stride=2, padding=1, groups=2)
    norm = gramcert.spectral_norm(layer, 20, tol=1e-3)
    linear = Convolve((1, 8, 20, 20), layer)
    found = proofs.proves_below(linear, norm.upper)
    assert found.proved
    assert found.method == "circulant but for a few vectors"
    assert not proofs.proves_below(linear, norm.lower * (1 - 1e-6)).proved
    reflected = Convolve((1, 8, 20, 20), Convolution(kernel, stride=2, padding=1, groups=2, padding_mode="reflect"))
    assert proofs.proves_below(reflected, 3 * norm.upper).method != "circulant but for a few vectors"


def test_moves_and_factors_are_counted():
    repeated = Move((3,), torch.tensor([1, 1, 2, 0]))
    assert proofs.proves_below(repeated, math.nextafter(math.sqrt(2), 2)).proved
    assert not proofs.proves_below(repeated, 1.414).proved
    factors = Scale((3,), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    assert proofs.proves_below(factors, 2.0).proved
    assert not proofs.proves_below(factors, math.nextafter(2.0, 1)).proved
