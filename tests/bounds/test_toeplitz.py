import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from cases import kernels
from gramcert import Convolution, norm2_toep
from gramcert.bounds import filter_powers, toeplitz
from gramcert.geometry import symbol
from reference import dense_norm, literal_toeplitz, supremum

EPS = torch.finfo(torch.float64).eps


def gauss(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


SHAPES = [
    (3, 3, 3),
    (2, 4, 5),
    (4, 2, 2),
    (12, 12, 2),
    (3, 3, 3, 3),
    (2, 5, 1, 3),
    (5, 2, 4, 2),
    (2, 3, 2, 2, 2),
    (1, 1, 1),
]


@pytest.mark.parametrize("norm", ["inf", "fro"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_literal_loop(shape, norm):
    kernel = gauss(*shape).requires_grad_()
    for iterations in range(1 if norm == "inf" else 0, 4 if len(shape) == 5 else 6):
        ours, literal = norm2_toep(kernel, iterations, norm=norm), literal_toeplitz(kernel, iterations, norm)
        torch.testing.assert_close(ours, literal, rtol=5e3 * EPS, atol=0)
        (gradient,) = torch.autograd.grad(ours, kernel)
        (expected,) = torch.autograd.grad(literal, kernel)
        torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-10)


@given(kernels(), st.sampled_from(["inf", "fro"]), st.integers(1, 3))
def test_bounds_every_zero_padded_layer(drawn, norm, iterations):
    kernel, sizes = drawn
    taps = kernel.shape[2:]
    bound = norm2_toep(kernel, iterations, norm=norm)
    layer = Convolution(kernel, padding=tuple((k - 1, k - 1) for k in taps))
    eps = torch.finfo(torch.float64).eps
    assert dense_norm(layer, sizes) <= bound * (1 + 100 * eps)
    # Row sums of a matrix of order r with N taps exceed its largest norm by √(rN)·√N at most, Frobenius norms by less.
    points = math.prod(2**iterations * (k - 1) + 1 for k in taps)
    worst = points * min(kernel.shape[:2])
    fine = supremum(kernel, 64 if len(taps) < 3 else 24)
    assert bound <= 1.05 * fine * worst ** (2.0**-iterations) * (1 + 100 * eps)


def test_converges_to_the_supremum_not_to_the_norm_at_one_size():
    """Pitfall: one value for all sizes, above each of them."""
    kernel = gauss(2, 2, 3)
    truths = [float(dense_norm(Convolution(kernel, padding=1), n)) for n in (3, 4, 6, 8, 16, 128)]
    assert truths == sorted(truths)
    bound = float(norm2_toep(kernel, 9))
    assert truths[-1] < bound < 1.02 * truths[-1]
    assert bound > 1.02 * truths[0]


def test_frobenius_factor():
    """Pitfall: the printed factor k² gives 7.55 for ones 3×3, t = 1, below the true 8.946 at n = 32."""
    kernel = torch.ones(1, 1, 3, 3, dtype=torch.float64)
    truth = float(dense_norm(Convolution(kernel, padding=1), 32))
    assert truth == pytest.approx(8.946, abs=5e-4)
    assert float(norm2_toep(kernel, 1, norm="fro")) >= truth
    correlated = torch.nn.functional.conv2d(kernel, kernel, padding=2)
    assert float((9 * correlated.square().sum()) ** 0.25) == pytest.approx(7.550, abs=5e-4)


@pytest.mark.parametrize(
    ("shape", "iterations"), [((3, 2, 3), 1), ((3, 4, 3), 3), ((2, 2, 2, 3), 2), ((1, 2, 2, 2, 2), 2)]
)
def test_gradients(shape, iterations):
    kernel = gauss(*shape).requires_grad_()
    for norm in ("inf", "fro"):
        assert gradcheck(lambda k, n=norm: norm2_toep(k, iterations, norm=n), kernel)
        assert gradgradcheck(lambda k, n=norm: norm2_toep(k, iterations, norm=n), kernel)


@pytest.mark.parametrize("norm", ["inf", "fro"])
def test_zero_and_scaled_kernels(norm):
    kernel = torch.zeros(2, 3, 3, 3, requires_grad=True)
    value = norm2_toep(kernel, 2, norm=norm)
    value.backward()
    assert value.item() == 0
    assert torch.equal(kernel.grad, torch.zeros_like(kernel))
    plain = gauss(3, 3, 3, 3, dtype=torch.float32)
    for scale in (1e-30, 1e30):
        expected = float(norm2_toep(plain, 3, norm=norm))
        assert float(norm2_toep(plain * scale, 3, norm=norm) / scale) == pytest.approx(expected, rel=1e-5)


def test_many_iterations_neither_overflow_nor_vanish():
    kernel = gauss(2, 3, 3, dtype=torch.float32).requires_grad_()
    value = norm2_toep(kernel, 11)
    value.backward()
    assert value.item() == pytest.approx(supremum(kernel.detach(), 512).item(), rel=5e-3)
    assert (kernel.grad * kernel).sum().item() == pytest.approx(value.item(), rel=1e-3)


@pytest.mark.parametrize("norm", ["inf", "fro"])
def test_little_memory_changes_nothing(norm, monkeypatch):
    kernel = gauss(5, 6, 3, 3).requires_grad_()
    whole = norm2_toep(kernel, 3, norm=norm)
    (gradient,) = torch.autograd.grad(whole, kernel)
    monkeypatch.setattr(symbol, "CHUNK_BYTES", 5 * 6 * 16 * 20)
    monkeypatch.setattr(toeplitz, "KEPT_BYTES", 153 * 5 * 16 * 2)
    monkeypatch.setattr(filter_powers, "SPECTRA_BYTES", 153 * 5 * 16 * 2)
    monkeypatch.setattr(symbol, "TABLE_LENGTH", 4)
    pieces = norm2_toep(kernel, 3, norm=norm)
    torch.testing.assert_close(pieces, whole)
    torch.testing.assert_close(torch.autograd.grad(pieces, kernel)[0], gradient)


@pytest.mark.parametrize("norm", ["inf", "fro"])
def test_torch_func_and_compile(norm):
    batch = gauss(3, 2, 4, 3, 2)

    def value(kernel):
        return norm2_toep(kernel, 2, norm=norm)

    singles = torch.stack([value(kernel) for kernel in batch])
    torch.testing.assert_close(torch.func.vmap(value)(batch), singles)
    gradients = torch.func.vmap(torch.func.grad(value))(batch)
    kernel = batch[1].clone().requires_grad_()
    value(kernel).backward()
    torch.testing.assert_close(gradients[1], kernel.grad)
    compiled = torch.compile(value, fullgraph=True, backend="aot_eager")(kernel)
    torch.testing.assert_close(compiled, singles[1])
    torch.testing.assert_close(torch.autograd.grad(compiled, kernel)[0], kernel.grad)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((torch.ones(2, 2),), {}, ValueError, r"norm2_toep\(kernel\): expected shape"),
        (
            (torch.ones(2, 2, 3), 0),
            {},
            ValueError,
            "at least 1 for norm='inf', which bounds the spectral norm only after",
        ),
        ((torch.ones(2, 2, 3), -1), {"norm": "fro"}, ValueError, r"norm2_toep\(iterations=-1\): expected at least 0"),
        (
            (torch.ones(2, 2, 3),),
            {"norm": "trace"},
            ValueError,
            r"norm2_toep\(norm='trace'\): expected one of inf, fro",
        ),
        ((torch.full((1, 1, 3), math.inf), 1), {}, ValueError, r"norm2_toep\(kernel\): expected finite values, got 3"),
        ((torch.full((1, 1, 3), math.nan), 1), {"norm": "fro"}, ValueError, r"norm2_toep\(kernel\): expected finite"),
        ((torch.ones(2, 2, 3, dtype=torch.int32),), {}, TypeError, "got torch.int32"),
        ((torch.ones(2, 2, 3, 3), 20), {}, ValueError, "one row of the iterate has 2097153×2097153 taps per channel"),
        ((torch.ones(2, 2, 1), 61), {"norm": "fro"}, ValueError, r"norm2_toep\(iterations=61\): expected at most 60"),
    ],
)
def test_bad_input(arguments, options, error, message):
    with pytest.raises(error, match=message):
        norm2_toep(*arguments, **options)
