import copy
import math

import pytest
import torch
from hypothesis import given
from torch import nn

from cases import layers
from gramcert import Convolution, norm2, spectral_norm
from gramcert.geometry.convolution import as_convolution
from gramcert.rescaling import rescaling_vector

EPS = torch.finfo(torch.float64).eps


@given(layers())
def test_adjoint_is_the_transpose(drawn):
    layer, sizes = drawn
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, layer.in_channels, *sizes, dtype=torch.float64, generator=generator)
    y = torch.randn(2, layer.out_channels, *layer.output_size(sizes), dtype=torch.float64, generator=generator)
    image, pre_image = layer.apply(x), layer.adjoint(y, sizes)
    assert image.shape == y.shape
    assert pre_image.shape == x.shape
    scale = float(image.abs().sum() * y.abs().max() + x.abs().max() * pre_image.abs().sum()) + 1
    torch.testing.assert_close((image * y).sum(), (x * pre_image).sum(), rtol=0, atol=100 * EPS * scale)


@given(layers())
def test_dense_matrix_is_apply(drawn):
    layer, sizes = drawn
    x = torch.randn(layer.in_channels, *sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dense = layer.to_dense(sizes) @ x.flatten()
    torch.testing.assert_close(dense, layer.apply(x).flatten(), rtol=1000 * EPS, atol=1000 * EPS)


@given(layers())
def test_apply_agrees_with_torch(drawn):
    layer, sizes = drawn
    before = [pair[0] for pair in layer.padding]
    symmetric = tuple((p, p) for p in before)
    layer = Convolution(
        layer.kernel,
        layer.stride,
        symmetric,
        layer.padding_mode,
        layer.dilation,
        layer.groups,
        layer.transposed,
        layer.output_padding,
    )
    kinds = (
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        if layer.transposed
        else (
            nn.Conv1d,
            nn.Conv2d,
            nn.Conv3d,
        )
    )
    options = {"output_padding": layer.output_padding} if layer.transposed else {}
    module = kinds[layer.axes - 1](
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,
        stride=layer.stride,
        padding=before,
        padding_mode=layer.padding_mode,
        dilation=layer.dilation,
        groups=layer.groups,
        bias=False,
        dtype=torch.float64,
        **options,
    )
    with torch.no_grad():
        module.weight.copy_(layer.kernel)
    x = torch.randn(2, layer.in_channels, *sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    try:
        expected = module(x)
    except RuntimeError:
        return  # torch refuses a size; what we do there is covered by the tests above
    torch.testing.assert_close(layer.apply(x), expected, rtol=1000 * EPS, atol=1000 * EPS)
    torch.testing.assert_close(Convolution.of(module).apply(x), expected, rtol=1000 * EPS, atol=1000 * EPS)


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
def test_named_padding_agrees_with_torch(mode, padding):
    module = nn.Conv2d(2, 3, (4, 3), padding=padding, padding_mode=mode, dilation=(1, 2), bias=False)
    x = torch.randn(1, 2, 9, 8)
    torch.testing.assert_close(Convolution.of(module).apply(x), module(x))


def test_circular_padding_wraps_as_often_as_needed():
    layer = Convolution(torch.ones(1, 1, 7), padding="same", padding_mode="circular")
    assert layer.apply(torch.tensor([[1.0, 10.0]])).tolist() == [[43.0, 34.0]]


def test_fields_are_normalised_and_immutable():
    layer = Convolution(torch.ones(4, 2, 3, 3), stride=2, padding=(1, 2), groups=2)
    assert (layer.stride, layer.padding, layer.dilation) == ((2, 2), ((1, 1), (2, 2)), (1, 1))
    assert (layer.in_channels, layer.out_channels) == (4, 4)
    with pytest.raises(AttributeError, match="cannot assign"):
        layer.stride = (1, 1)


def test_adjoint_needs_a_size_only_where_stride_makes_it_ambiguous():
    kernel = torch.ones(1, 1, 3)
    assert Convolution(kernel, padding=1).adjoint(torch.ones(1, 5)).shape == (1, 5)
    assert Convolution(kernel, stride=2, transposed=True).adjoint(torch.ones(1, 11)).shape == (1, 5)
    strided = Convolution(kernel, stride=2, padding=1)
    assert strided.adjoint(torch.ones(1, 3), 6).shape == (1, 6)
    with pytest.raises(ValueError, match=r"adjoint\(input_size=None\): stride \(2,\) allows several input sizes"):
        strided.adjoint(torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"no input of size \(9,\) gives an output of size \(3,\)"):
        strided.adjoint(torch.ones(1, 3), 9)


def test_parametrised_layers_use_their_effective_weight():
    module = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 2, 3))
    with torch.no_grad():
        module.parametrizations.weight.original0.mul_(3)
    assert torch.equal(Convolution.of(module).kernel, module.weight)
    Convolution.of(module).kernel.sum().backward()
    assert module.parametrizations.weight.original0.grad is not None


def test_lazy_layer_is_refused_until_it_has_weights():
    module = nn.LazyConv2d(3, 3)
    with pytest.raises(ValueError, match="no weights yet"):
        Convolution.of(module)
    module(torch.zeros(1, 2, 5, 5))
    assert Convolution.of(module).in_channels == 2


def test_layers_that_compute_something_else_are_refused():
    class Doubled(nn.Conv2d):
        def forward(self, x):
            return 2 * super().forward(x)

    patched = copy.deepcopy(nn.Conv2d(1, 1, 3))
    patched.forward = lambda x: x
    with pytest.raises(TypeError, match=r"Doubled.*overrides forward"):
        Convolution.of(Doubled(1, 1, 3))
    with pytest.raises(TypeError, match=r"its forward was replaced"):
        Convolution.of(patched)
    with pytest.raises(TypeError, match=r"Convolution.of\(ReLU\): expected a torch.nn.Conv"):
        Convolution.of(nn.ReLU())


KERNEL = torch.ones(4, 2, 3, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"kernel": [1.0]}, TypeError, r"Convolution\(kernel\): expected a torch.Tensor, got list"),
        ({"kernel": KERNEL.int()}, TypeError, "expected a real float32 or float64 kernel, got torch.int32"),
        ({"kernel": KERNEL + 0j}, TypeError, "expected a real float32 or float64 kernel, got torch.complex64"),
        ({"kernel": KERNEL[0, 0]}, ValueError, r"with 1 to 3 sizes, got shape \(3, 3\)"),
        ({"kernel": KERNEL[:0]}, ValueError, "expected no empty dimension"),
        ({"stride": 0}, ValueError, r"Convolution\(stride=\(0, 0\)\): expected sizes of at least 1, got 0"),
        ({"stride": (1, 2, 3)}, ValueError, "the kernel needs 2 sizes, got 3"),
        ({"stride": 1.5}, TypeError, "expected an int or a sequence of ints, got 1.5"),
        ({"dilation": (1, True)}, TypeError, "expected ints, got True"),
        ({"padding": -1}, ValueError, "expected sizes of at least 0, got -1"),
        ({"padding": ((1, 1),)}, ValueError, "the kernel needs 2 pairs, got 1"),
        ({"padding": ((1, 1), (1, -1))}, ValueError, "expected sizes of at least 0, got -1"),
        ({"padding": "full"}, ValueError, "expected ints, pairs, 'same' or 'valid'"),
        ({"padding": "same", "stride": 2}, ValueError, "expected stride 1"),
        ({"padding_mode": "mirror"}, ValueError, "expected one of zeros, circular, reflect, replicate"),
        (
            {"padding_mode": "circular", "transposed": True},
            ValueError,
            "a transposed convolution has zero padding only",
        ),
        ({"groups": [2]}, TypeError, r"Convolution\(groups\): expected an int, got \[2\]"),
        ({"groups": 3}, ValueError, "expected a divisor of the kernel's 4 channels"),
        ({"output_padding": 1}, ValueError, "for transposed convolutions only"),
        ({"output_padding": 2, "transposed": True}, ValueError, "expected less than stride or dilation"),
        ({"transposed": 1}, TypeError, "expected a bool, got 1"),
    ],
)
def test_bad_descriptions(arguments, error, message):
    with pytest.raises(error, match=message):
        Convolution(**{"kernel": KERNEL, **arguments})


def test_bad_inputs():
    layer = Convolution(torch.ones(1, 2, 3), padding=2, padding_mode="reflect")
    with pytest.raises(ValueError, match=r"apply\(x\): expected shape \(\[batch,\] 2, 1 sizes\), got \(1, 5\)"):
        layer.apply(torch.ones(1, 5))
    with pytest.raises(TypeError, match=r"apply\(x\): expected the kernel's torch.float32, got torch.float64"):
        layer.apply(torch.ones(2, 5, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"apply\(x\): expected a torch.Tensor, got int"):
        layer.apply(3)
    with pytest.raises(ValueError, match=r"reflect padding \(2, 2\) needs more than 2 places, got 2"):
        layer.apply(torch.ones(2, 2))
    with pytest.raises(ValueError, match="the output would be empty"):
        Convolution(torch.ones(1, 1, 3)).output_size(2)
    with pytest.raises(ValueError, match=r"to_dense\(input_size=\(100000,\)\): the .* matrix would take .* GiB"):
        Convolution(torch.ones(1, 1, 3)).to_dense(100000)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 4), lambda: nn.Conv1d(3, 4, 3), lambda: torch.randn(4, 3)])
def test_half_precision_is_widened_exactly_by_all(make, dtype):
    """Every function takes the numbers that are stored, and gives what it gives for them in float32: finite."""
    torch.manual_seed(0)
    half = make().to(dtype)
    full = copy.deepcopy(half).float()
    found, expected = spectral_norm(half), spectral_norm(full)
    assert (found.lower, found.upper) == (expected.lower, expected.upper)
    assert 0 < found.upper < math.inf
    for function in [rescaling_vector, norm2] if isinstance(half, nn.Module) else [rescaling_vector]:
        torch.testing.assert_close(function(half), function(full), rtol=0, atol=0)
    description = as_convolution("f", half)
    weight = full.weight if isinstance(full, nn.Module) else full
    assert torch.equal(description.kernel.flatten(), weight.flatten())
    if isinstance(half, nn.Module):
        description.kernel.sum().backward()
        assert torch.equal(half.weight.grad, torch.ones_like(half.weight))


def test_what_is_no_layer_is_refused_by_the_name_of_the_call():
    with pytest.raises(TypeError, match=r"f\(layer\): cannot fold ReLU; expected Linear, .* or a matrix"):
        as_convolution("f", nn.ReLU(), verb="fold")
    with pytest.raises(TypeError, match=r"f\(layer\): cannot bound Tensor; expected .* or a gramcert.Convolution"):
        as_convolution("f", torch.ones(2, 2), matrices=False)
    with pytest.raises(TypeError, match=r"f\(layer\): expected a real matrix, got torch.complex64"):
        as_convolution("f", torch.ones(2, 2, dtype=torch.complex64))
