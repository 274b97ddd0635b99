"""Blocks that may be diagonals against the same with matrices."""

import itertools

import pytest
import torch

from gramcert.networks.blocks import dense, factorised, is_diagonal, product, solved, total, with_rows

KINDS = list(itertools.product((True, False), (True, False)))
CLOSE = {"rtol": 0, "atol": 1e3 * torch.finfo(torch.float64).eps}


def drawn(is_diagonal, seed, count=3, order=4):
    generator = torch.Generator().manual_seed(seed)
    shape = (count, order) if is_diagonal else (count, order, order)
    return torch.randn(shape, dtype=torch.complex128, generator=generator)


@pytest.mark.parametrize(("one", "two"), KINDS)
def test_sums_and_products(one, two):
    left, right = drawn(one, 1), drawn(two, 2)
    assert is_diagonal(total(left, right)) == is_diagonal(product(left, right)) == (one and two)
    torch.testing.assert_close(dense(total(left, right)), dense(left) + dense(right), **CLOSE)
    torch.testing.assert_close(dense(product(left, right)), dense(left).mH @ dense(right), **CLOSE)
    weights = torch.arange(1.0, 5.0, dtype=torch.float64)
    torch.testing.assert_close(dense(with_rows(weights, left)), weights[:, None] * dense(left), **CLOSE)


@pytest.mark.parametrize(("one", "two"), KINDS)
def test_factors(one, two):
    root, right = drawn(one, 3), drawn(two, 4)
    matrix = total(product(root, root), torch.ones(1, 4, dtype=torch.complex128))
    factor, failed = factorised(matrix)
    assert not bool(failed.any())
    torch.testing.assert_close(dense(factor).to(torch.complex128) @ dense(solved(factor, right)), dense(right), **CLOSE)


@pytest.mark.parametrize("kind", [True, False])
def test_what_is_not_positive_has_no_factor_and_others_have(kind):
    matrix = torch.ones(3, 4, dtype=torch.complex128)
    matrix[1, 2] = -1e-300
    _, failed = factorised(matrix if kind else dense(matrix))
    assert failed.tolist() == [False, True, False]
    matrix[1, 2] = torch.nan
    assert factorised(matrix if kind else dense(matrix))[1].tolist() == [False, True, False]
