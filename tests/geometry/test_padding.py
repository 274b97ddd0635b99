import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gramcert.geometry.padding import (
    largest_repetition,
    largest_repetition_of_any_size,
    pad,
    pad_adjoint,
    source_indices,
)

MODES = ("circular", "reflect", "replicate")


def padding_matrix(size, before, after, mode):
    return pad(torch.eye(size, dtype=torch.float64), ((before, after),), mode).T


@given(st.integers(1, 7), st.integers(0, 6), st.integers(0, 6), st.sampled_from(MODES), st.data())
def test_norm_of_the_padding_map(size, before, after, mode, data):
    if mode == "reflect":
        before, after = min(before, size - 1), min(after, size - 1)
    matrix = padding_matrix(size, before, after, mode)
    used = data.draw(st.integers(1, size + before + after))
    norm = torch.linalg.matrix_norm(matrix[:used], 2)
    assert float(norm**2) == pytest.approx(largest_repetition(size, before, used, mode))
    assert largest_repetition(size, before, used, mode) <= largest_repetition_of_any_size(before, after, mode)


@given(st.integers(0, 4), st.integers(0, 4), st.sampled_from(MODES))
def test_worst_size_is_attained(before, after, mode):
    smallest = max(before, after) + 1 if mode == "reflect" else 1
    worst = max(largest_repetition(n, before, n + before + after, mode) for n in range(smallest, smallest + 8))
    assert worst == largest_repetition_of_any_size(before, after, mode)


@pytest.mark.parametrize("mode", MODES)
def test_agrees_with_torch(mode):
    x = torch.arange(20.0).reshape(1, 1, 4, 5)
    padded = torch.nn.functional.pad(x, (2, 1, 3, 0), mode=mode)
    assert torch.equal(pad(x, ((3, 0), (2, 1)), mode), padded)


@pytest.mark.parametrize("mode", ["zeros", *MODES])
def test_adjoint(mode):
    x, padding = torch.randn(2, 5, 4, dtype=torch.float64), ((2, 3), (0, 1))
    y = torch.randn(2, 10, 5, dtype=torch.float64)
    torch.testing.assert_close((pad(x, padding, mode) * y).sum(), (x * pad_adjoint(y, (5, 4), padding, mode)).sum())


def test_source_indices():
    assert source_indices(3, 2, 4, "circular").tolist() == [1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert source_indices(3, 2, 2, "reflect").tolist() == [2, 1, 0, 1, 2, 1, 0]
    assert source_indices(3, 2, 1, "replicate").tolist() == [0, 0, 0, 1, 2, 2]
