import pytest
import torch
from hypothesis import given

from cases import layers
from gramcert import Convolution
from gramcert.certified.gram_symbol import GramSymbol
from gramcert.certified.tapwise import TapwiseLayer, dense_matrix, plane_waves
from gramcert.certified.torus import torus_maximum
from gramcert.certified.work import Work
from gramcert.geometry.axis import layer_axes
from gramcert.geometry.reduction import grouped_kernels, reduced_kernels
from reference import dense_norm

EPS = torch.finfo(torch.float64).eps


@given(layers())
def test_it_is_the_layer_or_its_adjoint(case):
    layer, size = case
    tapwise = TapwiseLayer(grouped_kernels(layer), layer_axes(layer, size))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tapwise.input_shape, dtype=torch.float64, generator=generator)
    y = torch.randn(tapwise.output_shape, dtype=torch.float64, generator=generator)
    forward = layer.adjoint(x.flatten(0, 1), size) if layer.transposed else layer.apply(x.flatten(0, 1))
    torch.testing.assert_close(tapwise.apply(x).flatten(0, 1), forward)
    torch.testing.assert_close((tapwise.apply(x) * y).sum(), (x * tapwise.adjoint(y)).sum())


@given(layers())
def test_dense_matrices(case):
    layer, size = case
    axes = layer_axes(layer, size)
    norms = [torch.linalg.matrix_norm(dense_matrix(kernel, axes), 2) for kernel in grouped_kernels(layer)]
    torch.testing.assert_close(torch.stack(norms).amax(), dense_norm(layer, size))


@given(layers())
def test_ratios_are_below_the_norm(case):
    layer, size = case
    tapwise = TapwiseLayer(grouped_kernels(layer), layer_axes(layer, size))
    x = torch.randn(tapwise.input_shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ratio = tapwise.norm_below(x)
    plain = (tapwise.apply(x).norm() / x.norm()).item()
    assert ratio <= plain
    assert ratio <= dense_norm(layer, size).item() * (1 + 20 * EPS)
    assert plain - ratio <= 1e-10 * (1 + plain)
    assert tapwise.norm_below(0 * x) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"padding": 1},
        {"padding": 1, "stride": 2},
        {"padding": 2, "dilation": 2},
        {"padding": 3, "dilation": 3, "stride": 2},
        {"padding": 1, "stride": (2, 1)},
        {"padding": 1, "padding_mode": "replicate"},
    ],
)
@pytest.mark.parametrize("channels", [(3, 2), (2, 5)])
def test_plane_waves_come_near_the_supremum_on_large_inputs(arguments, channels):
    kernel = torch.randn(*channels, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    layer = Convolution(kernel, **arguments)
    axes = layer_axes(layer, (96, 90))
    reduced = reduced_kernels(kernel[None], layer.stride, layer.dilation)[0]
    symbol = GramSymbol(reduced / 8)
    found = torus_maximum(symbol, 1e-6, Work(2**31, None))
    waves = plane_waves(symbol, found.frequency, found.vector, axes, channels[1])
    ratio = max(TapwiseLayer(kernel[None], axes).norm_below(wave[None]) for wave in waves)
    assert ratio >= 8 * found.lower * (1 - 2e-2)
