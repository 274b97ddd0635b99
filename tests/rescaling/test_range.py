"""R is valid for every positive finite q and every finite weight, at the ends of the range of numbers too."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gramcert.nn as gnn
from gramcert import Convolution, lipschitz_bound
from gramcert.parametrizations import spectral_rescaling
from gramcert.rescaling import rescaling_vector

ROUNDING = 100 * torch.finfo(torch.float32).eps
exponents = st.floats(-44, 38)


@given(
    st.integers(0, 2**31),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from(["tall", "square", "spatial", "frequency"]),
    st.tuples(exponents, exponents),
    st.floats(-320, 300),
    st.floats(-44, 38),
    st.sampled_from([1, 3, 5, 7]),
)
def test_any_q_and_any_scale_are_valid(seed, dtype, form, powers, wide, scale, iterations):
    """Channels of different size that hardly meet, so that small sums count."""
    generator = torch.Generator().manual_seed(seed)
    size, meeting = 10 ** (-2 * torch.rand(2, generator=generator, dtype=torch.float64))
    matrix = torch.tensor([[1.0, meeting**10 if seed % 2 else 0.0], [0.0, size]], dtype=torch.float64)
    q = torch.tensor([10.0 ** powers[0], 10.0 ** powers[1]], dtype=torch.float64)
    if dtype == torch.float64:
        q[seed % 2], scale = 10.0**wide, wide
    if form in ("spatial", "frequency"):
        iterations = min(iterations, 5)
        matrix = matrix[:, :, None] * torch.tensor([1.0, 0.5, 0.25])
    elif form == "tall":
        matrix = matrix.T
        matrix = torch.cat([matrix, matrix])[:, :2]
    weight = (matrix * 10.0**scale).to(dtype)
    if not weight.abs().max():
        return
    layer = weight if weight.dim() == 2 else Convolution(weight)
    options = {"form": form} if weight.dim() == 3 else {}
    factors = rescaling_vector(layer, iterations, q=q, **options)
    assert torch.isfinite(factors).all()
    assert (factors >= 0).all()
    # In a moderate range, so that the norm itself is right.
    unit = 2.0 ** math.frexp(float(weight.double().abs().max()))[1]
    shape = (1, -1, *(1,) * (weight.dim() - 2))
    rescaled = weight.double() / unit * (factors.double() * unit).reshape(shape)
    if rescaled.dim() == 3:
        angles = torch.linspace(0, math.pi, 65, dtype=torch.float64)
        twiddles = torch.exp(-1j * angles[:, None] * torch.arange(3))
        symbols = torch.einsum("oit,ft->foi", rescaled.to(torch.complex128), twiddles)
        norm = torch.linalg.matrix_norm(symbols, 2).max()
    else:
        norm = torch.linalg.matrix_norm(rescaled, 2)
    assert norm <= 1 + 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("q", [[1e-30, 1.0], [1.0, 1e-30], [1e300, 1.0], [5e-324, 1e308], [1e300, 1e300]])
def test_extreme_weights_of_channels(q):
    matrix = torch.diag(torch.tensor([1.0, 0.35]))
    factors = rescaling_vector(matrix, 5, q=torch.tensor(q, dtype=torch.float64))
    assert torch.linalg.matrix_norm(matrix * factors, 2) <= 1 + ROUNDING


def test_the_scale_of_q_does_not_matter():
    matrix = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    q = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    for scale in (2.0**-1000, 2.0**900):
        assert torch.equal(rescaling_vector(matrix, q=q), rescaling_vector(matrix, q=q * scale))


@pytest.mark.parametrize(("value", "dtype"), [(1e-42, torch.float32), (5e-324, torch.float64)])
def test_layers_of_subnormal_weights_have_a_finite_vector(value, dtype):
    matrix = torch.full((2, 2), value, dtype=dtype)
    assert torch.isfinite(rescaling_vector(matrix)).all()


@pytest.mark.parametrize("scale", [1e-37, 1e-30, 1e-20, 1e20, 1e30, 1.5e38])
def test_weights_at_the_ends_of_the_range(scale):
    torch.manual_seed(0)
    for layer in (
        *(gnn.SLLLinear(4, 3, rescaling=rescaling) for rescaling in ("sr", "aol", "sn")),
        gnn.SLLConv2d(2, 3, 3, form="frequency"),
    ):
        with torch.no_grad():
            layer.weight.copy_(scale * torch.rand_like(layer.weight))
        assert 1 <= lipschitz_bound(layer) <= 1 + ROUNDING
    for layer in (spectral_rescaling(nn.Linear(4, 3)), gnn.SRConv2d(2, 3, 3, form="frequency"), gnn.SRConv1d(2, 2, 3)):
        layer.weight = scale * torch.rand_like(layer.weight)
        assert 0.1 < lipschitz_bound(layer) <= 1 + ROUNDING
        (gradient,) = torch.autograd.grad(layer.weight.sum(), layer.parametrizations.weight.original)
        assert torch.isfinite(gradient).all()
