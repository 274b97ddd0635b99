import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocks import in_blocks
from cases import kernels
from gramcert.certified import gram_symbol
from gramcert.certified.frequencies import Cells, Frequencies
from gramcert.certified.gram_symbol import GramSymbol

EPS = torch.finfo(torch.float64).eps


def literal(symbol, frequencies):
    """E(ω) by the definition, from the symbol's own (trimmed, transposed) kernel."""
    result = []
    for omega in frequencies.values().tolist():
        block = torch.zeros(symbol.kernel.shape[:2], dtype=torch.complex128)
        for tap in itertools.product(*map(range, symbol.kernel.shape[2:])):
            phase = sum(a * w for a, w in zip(tap, omega, strict=True))
            block += symbol.kernel[(slice(None), slice(None), *tap)] * complex(math.cos(phase), -math.sin(phase))
        result.append(block)
    return torch.stack(result)


@given(kernels(), st.sampled_from([torch.float32, torch.float64]))
def test_values_are_within_their_error(case, dtype):
    kernel = case[0] / case[0].abs().max().clamp_min(1)
    symbol = GramSymbol(kernel)
    frequencies = Cells.cover(symbol.degrees, 1.0).centres
    blocks = literal(symbol, frequencies)
    exact = blocks @ blocks.mH
    error = torch.linalg.matrix_norm(symbol.evaluate(frequencies, dtype).to(torch.complex128) - exact, 2).max()
    assert error <= symbol.error(dtype) + 50 * EPS * symbol.crude
    assert symbol.error(dtype) <= 200 * torch.finfo(dtype).eps * symbol.crude
    assert torch.linalg.matrix_norm(exact, 2).max() <= symbol.crude


@pytest.mark.parametrize("is_blocked", [False, True])
@given(kernels(), st.sampled_from([torch.float32, torch.float64]), st.floats(-1, 1), st.sampled_from([1, -1]))
def test_proofs_are_right_and_nearly_complete(is_blocked, case, dtype, offset, sign):
    """Levels all around the eigenvalue: below it nothing is proved, above it, by more than rounding, everything."""
    kernel = case[0] / case[0].abs().max().clamp_min(1)
    symbol = GramSymbol(kernel)
    frequencies = Cells.cover(symbol.degrees, 1.0).centres
    blocks = literal(symbol, frequencies)
    largest = torch.linalg.eigvalsh(sign * (blocks @ blocks.mH))[:, -1]
    doubt = 100 * EPS * symbol.crude
    lost = 2 * symbol.rounding(symbol.crude, dtype) + 10 * torch.finfo(dtype).eps * symbol.crude + doubt
    level = float(largest.median()) + offset * 3 * lost
    with in_blocks(is_blocked):
        passed = symbol.all_below(frequencies, level, dtype, sign)
    assert (largest[passed] <= level + doubt).all()
    assert passed[largest < level - 2 * lost].all()


@given(kernels(), st.integers(0, 2**31))
def test_lower_bounds_hold_and_touch(case, seed):
    kernel = case[0] / case[0].abs().max().clamp_min(1)
    symbol = GramSymbol(kernel)
    generator = torch.Generator().manual_seed(seed)
    omega = torch.rand(len(symbol.axes), dtype=torch.float64, generator=generator) * 6 - 3
    frequency = Frequencies.nearest(omega)
    left, values, _ = torch.linalg.svd(literal(symbol, frequency)[0])
    below = symbol.norm_below(frequency, left[:, 0])
    doubt = 100 * EPS * math.sqrt(symbol.crude)
    assert values[0] - 10 * doubt <= below <= values[0] + doubt
    random = torch.randn(symbol.order, dtype=torch.complex128, generator=generator)
    assert symbol.norm_below(frequency, random) <= values[0] + doubt
    assert symbol.norm_below(frequency, 0 * random) == 0


@pytest.mark.parametrize("shape", [(3, 2, 3), (2, 3, 3)])
def test_right_vectors_are_inputs_of_the_kernel_as_given(shape):
    kernel = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    symbol = GramSymbol(kernel)
    frequency = Frequencies.nearest(torch.tensor([0.7], dtype=torch.float64))
    block = sum(kernel[:, :, a] * torch.exp(-1j * a * frequency.values()[0, 0]) for a in range(3))
    vector = torch.linalg.eigh(symbol.evaluate(frequency, torch.float64)[0])[1][:, -1]
    right = symbol.right_vector(frequency, vector)
    gain = (block @ right).norm() / right.norm()
    torch.testing.assert_close(gain, torch.linalg.matrix_norm(block, 2))


@pytest.mark.parametrize("seed", range(20))
def test_gains_where_weights_cancel(seed):
    generator = torch.Generator().manual_seed(seed)
    half = torch.rand(16, 33, generator=generator, dtype=torch.float64)
    matrix = torch.cat([half, -half[torch.randperm(16, generator=generator)] * (1 + 1e-14)])
    here = Frequencies(torch.zeros(1, 0, dtype=torch.int64), ())
    least, most = GramSymbol(matrix[..., None]).gain(here, torch.ones(32, dtype=torch.float64))
    exact = sum(sum(map(Fraction, column)) ** 2 for column in matrix.T.tolist()) / 32
    assert Fraction(least) ** 2 <= exact <= Fraction(most) ** 2


@pytest.mark.parametrize("columns", [3, 40])
def test_the_amount_of_coefficients(columns, monkeypatch):
    monkeypatch.setattr(gram_symbol, "AMOUNT", 7 * columns)
    kernel = torch.randn(5, columns, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    symbol = GramSymbol(kernel)
    even, odd = symbol._coefficients()
    sums = torch.cat([even, odd]).abs().reshape(-1, symbol.order, symbol.order).sum((0, 2))
    assert sums.max() <= symbol._amount <= sums.max() * (1 + 1e-12)
