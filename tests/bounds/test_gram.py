import itertools
import math
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from gramcert import gram_norm
from reference import literal_gram, sigma

EPS = torch.finfo(torch.float64).eps

NORMS = ("fro", "inf", "one", "trace")
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def random_matrix(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@given(
    st.integers(1, 7),
    st.integers(1, 7),
    st.integers(0, 12),
    st.sampled_from(NORMS),
    st.sampled_from(DTYPES),
    st.integers(0, 2**31),
)
def test_upper_bound_that_closes(rows, columns, iterations, norm, dtype, seed):
    iterations = iterations if norm == "fro" else iterations + 1
    matrix = random_matrix(rows, columns, dtype=dtype, seed=seed)
    eps = torch.finfo(dtype).eps
    truth, bound = sigma(matrix.to(torch.complex128)).double(), gram_norm(matrix, iterations, norm=norm)
    assert bound.dtype == matrix.real.dtype
    order = min(rows, columns)
    # Every reading of an iterate of order r is at most r times its largest eigenvalue; Frobenius √r.
    worst = order ** (0.5 if norm == "fro" else 1.0)
    assert truth * (1 - 50 * eps) <= bound <= truth * worst ** (2.0**-iterations) * (1 + 50 * eps)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 5), (9, 9)])
def test_agrees_with_the_algorithm_line_by_line(norm, dtype, shape):
    matrix = random_matrix(*shape, dtype=dtype).requires_grad_()
    for iterations in range(0 if norm == "fro" else 1, 7):
        ours, literal = gram_norm(matrix, iterations, norm=norm), literal_gram(matrix, iterations, norm)
        torch.testing.assert_close(ours, literal, rtol=5e3 * EPS, atol=0)
        if norm == "trace" and min(shape) == 1:
            continue  # autograd through the literal square root divides by zero there
        (gradient,) = torch.autograd.grad(ours, matrix)
        (expected,) = torch.autograd.grad(literal, matrix)
        torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(2, 3, 4), (5, 2), (1, 1), (6, 6)])
def test_gradcheck(norm, dtype, shape):
    matrix = random_matrix(*shape, dtype=dtype).requires_grad_()
    for iterations in range(0 if norm == "fro" else 1, 6):
        assert gradcheck(lambda x, t=iterations: gram_norm(x, t, norm=norm), matrix)


@pytest.mark.parametrize("norm", NORMS)
def test_second_derivative(norm):
    assert gradgradcheck(lambda x: gram_norm(x, 3, norm=norm), random_matrix(3, 4).requires_grad_())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("iterations", [1, 2, 6, 20, 40])
@pytest.mark.parametrize("order", [1, 5, 64])
def test_subgradient_at_orthogonal_matrices(norm, iterations, order):
    """f(W + H) >= f(W) + <g, H> - o(H) fails for no direction H, and <g, W> = f(W)."""
    matrix = torch.linalg.qr(random_matrix(order, order))[0].requires_grad_()
    value = gram_norm(matrix, iterations, norm=norm)
    (gradient,) = torch.autograd.grad(value, matrix)
    assert torch.isfinite(gradient).all()
    torch.testing.assert_close((gradient * matrix).sum(), value, rtol=1e-9, atol=0)
    step = 1e-6 * random_matrix(order, order, seed=1)
    with torch.no_grad():
        change = gram_norm(matrix + step, iterations, norm=norm) - value
    # The curvature that is left out grows with the power 2^t of the iterate.
    curvature = 2.0 ** min(iterations, 10) * float(step.square().sum()) * order
    assert change >= (gradient * step).sum() - curvature - 5e3 * EPS


def test_orthogonal_matrices_are_exact_by_the_trace_reading():
    matrix = torch.linalg.qr(random_matrix(64, 64))[0]
    assert float(gram_norm(matrix, 1, norm="trace")) == pytest.approx(1, rel=5e3 * EPS)
    # Pitfall: the Frobenius reading of the identity of order r is r^(2^-t) at the paper's t = iterations + 1.
    for iterations, excess in ((0, 7), (1, 1.8284), (2, 0.6818), (3, 0.2968)):
        assert float(gram_norm(torch.eye(64), iterations)) - 1 == pytest.approx(excess, rel=1e-3)


def test_repeated_singular_values_only_halve_the_error():
    errors = [float(gram_norm(torch.eye(16, dtype=torch.float64), t)) - 1 for t in range(12, 16)]
    for previous, current in itertools.pairwise(errors):
        assert current / previous == pytest.approx(0.5, rel=1e-3)


def test_simple_singular_value_converges_quadratically():
    """Error about 2^-(t+1)·(σ2/σ1)^(2^(t+1)) after t products."""
    matrix = torch.diag(torch.tensor([1.0, 0.9], dtype=torch.float64))
    for iterations in (4, 5):
        excess = float(gram_norm(matrix, iterations)) - 1
        power = 2.0 ** (iterations + 1)
        assert excess == pytest.approx(0.9**power / power, rel=0.05)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_scale_does_not_matter(norm, dtype):
    matrix = random_matrix(8, 12, dtype=dtype)
    value = gram_norm(matrix, 6, norm=norm)
    for scale in (1e-30, 1e30):
        assert float(gram_norm(matrix * scale, 6, norm=norm) / scale) == pytest.approx(float(value), rel=1e-6)
    tiny = matrix * 1e-30
    tiny.requires_grad_()
    gram_norm(tiny, 6, norm=norm).backward()
    plain = matrix.clone().requires_grad_()
    gram_norm(plain, 6, norm=norm).backward()
    torch.testing.assert_close(tiny.grad, plain.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("iterations", [1, 6])
def test_zero_matrix(norm, iterations):
    matrix = torch.zeros(2, 3, 4, requires_grad=True)
    value = gram_norm(matrix, iterations, norm=norm)
    value.sum().backward()
    assert torch.equal(value, torch.zeros(2))
    assert torch.equal(matrix.grad, torch.zeros_like(matrix))


def test_no_iterations_is_the_frobenius_norm():
    matrix = random_matrix(3, 4, 5)
    torch.testing.assert_close(gram_norm(matrix, 0), torch.linalg.matrix_norm(matrix))


def test_empty_batch():
    assert gram_norm(torch.zeros(0, 3, 4)).shape == (0,)


def test_readings_are_ordered():
    matrix = random_matrix(10, 6, 9)
    assert (gram_norm(matrix, 2, norm="trace") <= gram_norm(matrix, 2)).all()
    assert torch.equal(gram_norm(matrix, 2, norm="inf"), gram_norm(matrix, 2, norm="one"))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_torch_func(norm, dtype):
    batch = random_matrix(5, 4, 6, dtype=dtype)

    def value(matrix):
        return gram_norm(matrix, 3, norm=norm)

    direct = gram_norm(batch, 3, norm=norm)
    torch.testing.assert_close(torch.func.vmap(value, in_dims=1)(batch.movedim(0, 1)), direct)
    summed = torch.func.grad(lambda x: gram_norm(x, 3, norm=norm).sum())(batch)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(value))(batch), summed)


def test_torch_func_refuses_nan_inside_vmap():
    with pytest.raises(ValueError, match=r"gram_norm\(matrix\): expected finite values, got 1 NaN"):
        torch.func.vmap(gram_norm)(torch.tensor([[[1.0]], [[math.nan]]]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_torch_compile(dtype):
    def values(matrix):
        return torch.stack([gram_norm(matrix, 3, norm=norm) for norm in NORMS])

    matrix = random_matrix(4, 6, dtype=dtype).requires_grad_()
    compiled, expected = torch.compile(values, fullgraph=True, backend="aot_eager")(matrix), values(matrix)
    torch.testing.assert_close(compiled, expected)
    for number in range(len(NORMS)):
        gradients = [torch.autograd.grad(found[number], matrix, retain_graph=True)[0] for found in (compiled, expected)]
        torch.testing.assert_close(*gradients)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::FutureWarning:torch", "ignore::DeprecationWarning")
def test_torch_compile_inductor():
    compiled = torch.compile(lambda x: gram_norm(x, 3, norm="inf"), fullgraph=True)
    matrix = random_matrix(4, 6, dtype=torch.float32).requires_grad_()
    value = compiled(matrix)
    value.backward()
    torch.testing.assert_close(value, gram_norm(matrix.detach(), 3, norm="inf"))
    assert torch.isfinite(matrix.grad).all()


def saved_bytes(function):
    sizes = {}

    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(sizes.values())


def test_what_the_backward_keeps():
    matrix = random_matrix(8, 100).requires_grad_()
    own, small = matrix.numel() * 8, 8 * 8 * 8
    for norm in ("fro", "trace"):
        assert saved_bytes(lambda n=norm: gram_norm(matrix, 9, norm=n)) <= own + small
    for norm in ("inf", "one"):
        assert saved_bytes(lambda n=norm: gram_norm(matrix, 9, norm=n)) <= own + 10 * small


@pytest.mark.parametrize("norm", ["inf", "one", "trace"])
def test_no_iterations_is_refused_with_the_reason(norm):
    with pytest.raises(ValueError, match="bounds the spectral norm only after a Gram product"):
        gram_norm(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), 0, norm=norm)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([[1.0]],), TypeError, r"gram_norm\(matrix\): expected a torch.Tensor, got list"),
        ((torch.ones(2, 2, dtype=torch.int64),), TypeError, "expected a floating-point or complex matrix"),
        ((torch.ones(2, 2, dtype=torch.int32),), TypeError, "got torch.int32"),
        ((torch.ones(3),), ValueError, r"expected shape \(..., p, q\) with p, q >= 1, got shape \(3,\)"),
        ((torch.ones(3, 0),), ValueError, r"got shape \(3, 0\)"),
        ((torch.tensor([[math.nan, 1.0]]),), ValueError, "expected finite values, got 1 NaN or infinite of 2"),
        ((torch.tensor([[math.inf]]),), ValueError, "expected finite values"),
        ((torch.ones(2, 2), -1), ValueError, r"gram_norm\(iterations=-1\): expected at least 0"),
        ((torch.ones(2, 2), 1.0), TypeError, r"gram_norm\(iterations\): expected an int, got float"),
        ((torch.ones(2, 2), True), TypeError, "expected an int, got bool"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        gram_norm(*arguments)


def test_unknown_norm():
    with pytest.raises(ValueError, match=r"gram_norm\(norm='nuc'\): expected one of fro, inf, one, trace"):
        gram_norm(torch.ones(2, 2), norm="nuc")
