import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from cases import kernels
from gramcert import Convolution, norm2, norm2_circ
from gramcert.geometry import symbol
from reference import circulant_norm, literal_circular

EPS = torch.finfo(torch.float64).eps


def gauss(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


@given(kernels(), st.integers(0, 8))
def test_bounds_the_circulant_matrix_and_closes(drawn, iterations):
    kernel, sizes = drawn
    eps = torch.finfo(torch.float64).eps
    truth, bound = circulant_norm(kernel, sizes), norm2_circ(kernel, sizes, iterations)
    worst = min(kernel.shape[:2]) ** (2.0 ** -(iterations + 1))
    assert truth * (1 - 100 * eps) <= bound <= truth * worst * (1 + 100 * eps) + 1e-300


@pytest.mark.parametrize("shape", [(3, 2, 3, 3), (2, 4, 2, 5)])
def test_agrees_with_the_literal_algorithm(shape):
    kernel = gauss(*shape).requires_grad_()
    ours, literal = norm2_circ(kernel, (6, 9), 3), literal_circular(kernel, (6, 9), 3)
    torch.testing.assert_close(ours, literal, rtol=5e3 * EPS, atol=0)
    torch.testing.assert_close(torch.autograd.grad(ours, kernel), torch.autograd.grad(literal, kernel))


@pytest.mark.parametrize(("shape", "size"), [((2, 3, 4), (3,)), ((3, 2, 3, 2), (4, 5)), ((2, 2, 2, 1, 3), (2, 3, 2))])
def test_gradients(shape, size):
    kernel = gauss(*shape).requires_grad_()
    for iterations in (0, 1, 4):
        assert gradcheck(lambda k, t=iterations: norm2_circ(k, size, t), kernel)
    assert gradgradcheck(lambda k: norm2_circ(k, size, 2), kernel)


def test_zero_kernel():
    kernel = torch.zeros(2, 3, 3, 3, requires_grad=True)
    value = norm2_circ(kernel, 5)
    value.backward()
    assert value.item() == 0
    assert torch.equal(kernel.grad, torch.zeros_like(kernel))


@pytest.mark.parametrize("shape", [(1, 5, 1, 1), (5, 1, 1), (1, 1, 1)])
def test_norm_of_a_single_row_or_column(shape):
    """The last layer of a critic."""
    size = (3,) * (len(shape) - 2)
    kernel = gauss(*shape).requires_grad_()
    assert norm2_circ(kernel, size).item() == pytest.approx(kernel.norm().item(), rel=10 * EPS)
    assert gradcheck(lambda k: norm2_circ(k, size), kernel)
    assert gradgradcheck(lambda k: norm2_circ(k, size), kernel)
    for scale in (1e-300, 1e300):  # whose squares are out of range
        ratio = norm2_circ(kernel.detach() * scale, size) / scale
        assert float(ratio) == pytest.approx(float(kernel.detach().norm()), rel=10 * EPS)
    with pytest.raises(ValueError, match=r"norm2_circ.*finite"):
        norm2_circ(torch.full(shape, torch.nan), size)
    zero = torch.zeros(shape, requires_grad=True)
    (first,) = torch.autograd.grad(norm2_circ(zero, size), zero, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), zero)
    assert not first.any()
    assert torch.isfinite(second).all()


def test_groups_with_a_single_row():
    kernel = torch.tensor([[3.0, 4.0], [0.0, 0.0], [5.0, 12.0]])[:, :, None, None].requires_grad_()
    norm = norm2(Convolution(kernel, groups=3))
    (gradient,) = torch.autograd.grad(norm, kernel)
    assert norm.item() == pytest.approx(13, rel=1e-6)
    torch.testing.assert_close(gradient[:, :, 0, 0], torch.tensor([[0.0, 0.0], [0.0, 0.0], [5 / 13, 12 / 13]]))


@pytest.mark.parametrize(("dtype", "tiny"), [(torch.float32, 1e-40), (torch.float64, 1e-310)])
def test_subnormal_groups_beside_others(dtype, tiny):
    kernel = gauss(2, 1, 3, 3, dtype=dtype)
    kernel[0] *= tiny
    kernel.requires_grad_()
    norm = norm2(Convolution(kernel, groups=2), 6)
    (gradient,) = torch.autograd.grad(norm, kernel)
    assert norm == norm2(Convolution(kernel[1:].detach()), 6)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e38), (torch.float64, 1e300)])
def test_gradients_of_a_length_are_in_range(dtype, size):
    kernel = torch.full((1, 4, 1), size, dtype=dtype, requires_grad=True)
    (gradient,) = torch.autograd.grad(1e10 * norm2_circ(kernel, 3), kernel)
    torch.testing.assert_close(gradient / 1e10, torch.full_like(kernel, 0.5))


def test_kernel_larger_than_the_input_wraps():
    """Pitfall: 4 from a cropped kernel, or NaN."""
    assert float(norm2_circ(torch.ones(1, 1, 3, 3), 2)) == pytest.approx(9, rel=1e-6)


@pytest.mark.parametrize("size", [2, 6, 8])
def test_sharp_kernel(size):
    """Pitfall: e⊗e with e = (2, -1, 2)/3 has norm 25/9 at every even size."""
    row = torch.tensor([2.0, -1.0, 2.0], dtype=torch.float64) / 3
    kernel = torch.outer(row, row)[None, None]
    assert float(norm2_circ(kernel, size)) == pytest.approx(25 / 9, rel=5e3 * EPS)


def test_chunks_change_nothing(monkeypatch):
    kernel = gauss(3, 4, 3, 3).requires_grad_()
    whole = norm2_circ(kernel, 8)
    (gradient,) = torch.autograd.grad(whole, kernel)
    monkeypatch.setattr(symbol, "CHUNK_BYTES", 3 * 4 * 16 * 5)
    assert len(symbol.FrequencyGrid((8, 8), (0.0, 0.0)).chunks(torch.zeros(9, 3, 4, dtype=torch.complex128))) == 8
    chunked = norm2_circ(kernel, 8)
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(torch.autograd.grad(chunked, kernel)[0], gradient)


def test_torch_func_and_compile():
    batch = gauss(3, 2, 2, 3, 3)
    singles = torch.stack([norm2_circ(kernel, 5) for kernel in batch])
    torch.testing.assert_close(torch.func.vmap(lambda k: norm2_circ(k, 5))(batch), singles)
    gradients = torch.func.vmap(torch.func.grad(lambda k: norm2_circ(k, 5)))(batch)
    kernel = batch[1].clone().requires_grad_()
    norm2_circ(kernel, 5).backward()
    torch.testing.assert_close(gradients[1], kernel.grad)
    compiled = torch.compile(lambda k: norm2_circ(k, 5), fullgraph=True, backend="aot_eager")
    value = compiled(kernel)
    torch.testing.assert_close(value, singles[1])
    torch.testing.assert_close(torch.autograd.grad(value, kernel)[0], kernel.grad)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(2, 2), 4), ValueError, r"norm2_circ\(kernel\): expected shape .* got shape \(2, 2\)"),
        ((torch.ones(2, 2, 3) + 0j, 4), TypeError, "expected a real float32 or float64 kernel, got torch.complex64"),
        ((torch.ones(2, 2, 3), 0), ValueError, r"norm2_circ\(input_size=\(0,\)\): expected sizes of at least 1, got 0"),
        ((torch.ones(2, 2, 3), (4, 4)), ValueError, "the kernel needs 1 sizes, got 2"),
        ((torch.ones(2, 2, 3), "4"), TypeError, "expected an int or a sequence of ints, got '4'"),
        ((torch.full((1, 1, 3), math.nan), 4), ValueError, r"norm2_circ\(kernel\): expected finite values, got 3 NaN"),
        ((torch.ones(2, 2, 3), 4, -2), ValueError, r"norm2_circ\(iterations=-2\): expected at least 0"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        norm2_circ(*arguments)
