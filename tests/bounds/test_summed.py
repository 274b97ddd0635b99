import pytest
import torch

from gramcert.bounds import circular, gram_filter, symmetric
from gramcert.bounds.summed import moduli, squared
from gramcert.geometry.symbol import FrequencyGrid

TINY = 100 * torch.finfo(torch.float64).eps


def hermitian(*shape):
    torch.manual_seed(0)
    matrix = torch.randn(*shape, shape[-1], dtype=torch.complex128)
    return matrix + matrix.mH


def test_squares_and_moduli_of_hermitian_matrices():
    matrix = hermitian(3, 2, 5)
    summed = matrix.real + matrix.imag
    square = matrix @ matrix
    torch.testing.assert_close(squared(summed), square.real + square.imag, rtol=TINY, atol=TINY)
    torch.testing.assert_close(moduli(summed), matrix.abs(), rtol=TINY, atol=TINY)
    torch.testing.assert_close(summed.square().sum((-2, -1)), matrix.abs().square().sum((-2, -1)))


def test_moduli_of_small_entries_do_not_vanish():
    matrix = torch.full((1, 2, 2), 1e-30)
    torch.testing.assert_close(moduli(matrix), torch.full((1, 2, 2), 1e-30))


@pytest.mark.parametrize("groups", [1, 2])
def test_symmetric_products_by_halves(groups, monkeypatch):
    torch.manual_seed(0)
    matrix = torch.randn(groups, 11, 7, dtype=torch.float64)
    monkeypatch.setattr(symmetric, "LEAST_ORDER", 2)
    with torch.no_grad():
        found = symmetric.symmetric_product(matrix, matrix.mT)
        torch.testing.assert_close(found, matrix @ matrix.mT, rtol=TINY, atol=TINY)
        assert torch.equal(found, found.mT)


def test_gradient_of_a_symmetric_square():
    torch.manual_seed(0)
    matrix = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)

    def square(matrix):
        return symmetric.symmetric_square(matrix + matrix.mT)

    assert torch.autograd.gradcheck(square, (matrix,))
    assert torch.autograd.gradgradcheck(square, (matrix,))


@pytest.mark.parametrize("shape", [(1, 3, 4, 2, 2), (2, 3, 2, 3), (2, 2, 3, 2, 1, 2), (1, 2, 5, 3, 4)])
@pytest.mark.parametrize("few", [0, 4, 100])
def test_all_ways_of_a_gram_filter(shape, few, monkeypatch):
    """Pairs of taps at once, tap by tap, and on frequencies; their gradients too."""
    torch.manual_seed(0)
    kernels = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def both():
        gram = gram_filter.gram_filter(kernels)
        return gram, torch.autograd.grad((gram * torch.arange(gram.numel()).reshape(gram.shape)).sum(), kernels)[0]

    expected = both()
    monkeypatch.setattr(gram_filter, "MOST_ENTRIES", 0)
    monkeypatch.setattr(gram_filter, "FEW_TAPS", few)
    for found, wanted in zip(both(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=TINY * float(wanted.detach().abs().max()))
    # And by its definition, at lag 0.
    middle = len(expected[0]) // 2
    rows = kernels.flatten(2)
    torch.testing.assert_close(expected[0][middle], rows @ rows.mT)


@pytest.mark.parametrize("shape", [(1, 3, 4), (2, 3, 2, 3)])
@pytest.mark.parametrize("most", [0, 2**15])
def test_gram_filters_of_several_kernels(shape, most, monkeypatch):
    """Put together or one by one, with a gradient for those that ask for one."""
    monkeypatch.setattr(gram_filter, "MOST_COPIED", most)
    torch.manual_seed(0)
    kernels = [torch.randn(shape, dtype=torch.float64, requires_grad=wanted) for wanted in (True, False, True)]
    asking = kernels[::2]
    found = gram_filter.gram_filter(*kernels)
    expected = torch.cat([gram_filter.gram_filter(kernel) for kernel in kernels], 1)
    torch.testing.assert_close(found, expected, rtol=TINY, atol=TINY)
    weights = torch.randn_like(found)
    gradients = [torch.autograd.grad((weights * gram).sum(), asking) for gram in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=TINY, atol=TINY)

    def function(first, last):
        return gram_filter.gram_filter(first, kernels[1], last)

    assert torch.autograd.gradcheck(function, asking)
    assert torch.autograd.gradgradcheck(function, asking)


@pytest.mark.parametrize("shape", [(1, 3, 5, 3), (2, 4, 3, 2, 2), (1, 6, 2, 1, 1), (1, 1, 4, 4, 4)])
@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_values_on_a_grid_by_filters_and_by_symbols(shape, iterations):
    torch.manual_seed(0)
    kernels = torch.randn(shape, dtype=torch.float64)
    axes = len(shape) - 3
    grid = FrequencyGrid((7,) * axes, (0.5,) * axes)
    found = circular._filter_values(kernels, grid, iterations)
    torch.testing.assert_close(found, circular._symbol_values(kernels, grid, iterations), rtol=1e-12, atol=1e-12)
    assert not circular._filter_values(torch.zeros(shape), grid, iterations).any()
