"""The smallest singular value and the condition number: valid, near, and refused where they mean nothing."""

import contextlib
import itertools
import math

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cases import layers
from gramcert import Convolution, condition_number, singular_values, smallest_singular_value, spectral_norm
from gramcert.certified import least, sides
from gramcert.certified.work import Work
from gramcert.geometry.axis import layer_axes

EPS = torch.finfo(torch.float64).eps
TOLERANCES = [0.3, 1e-2, 1e-3, 1e-6]

many = settings(max_examples=max(200, hypothesis.settings.default.max_examples))


def gaussian(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def orthogonal(channels):
    """A 3×3 convolution with E*E = I at every frequency: half of the channels shifted one way, half another."""
    basis = torch.linalg.qr(gaussian(channels, channels))[0]
    kernel = torch.zeros(channels, channels, 3, 3, dtype=torch.float64)
    kernel[:, : channels // 2, 0, 2] = basis[:, : channels // 2]
    kernel[:, channels // 2 :, 2, 1] = basis[:, channels // 2 :]
    return kernel


def truth_of(layer, size):
    values = torch.linalg.svdvals(layer.with_kernel(layer.kernel.double()).to_dense(size))
    return values[-1].item(), 20 * EPS * (values[0].item() + 1e-3 * layer.kernel.abs().sum().item())


def check(enclosure, layer, size, tol):
    truth, doubt = truth_of(layer, size)
    assert enclosure.lower <= truth + doubt
    assert truth - doubt <= enclosure.upper
    assert enclosure.tol_reached == (enclosure.relative_width <= tol)
    if not enclosure.tol_reached:
        assert enclosure.upper <= 1e-5 * layer.kernel.abs().sum().item()
        assert enclosure.notes


@many
@given(layers(), st.sampled_from(TOLERANCES))
def test_one_size(case, tol):
    check(smallest_singular_value(*case, tol), *case, tol)


@given(layers(dtype=torch.float32), st.sampled_from(TOLERANCES[:3]))
def test_one_size_of_a_large_layer(case, tol):
    """What is done where the matrix is too large to be written out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(least, "DENSE_ORDER", 0)
        check(smallest_singular_value(*case, tol), *case, tol)


def _shapes(layer, size):
    """Outputs and inputs at many sizes, from the smallest on."""
    for sizes in itertools.product([1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 60], repeat=len(size)):
        with contextlib.suppress(ValueError):
            outputs = layer.output_size(sizes)
            yield layer.out_channels * math.prod(outputs), layer.in_channels * math.prod(sizes)


@many
@given(layers(), st.sampled_from(TOLERANCES))
def test_every_size(case, tol):
    """Below the smallest value at each of several sizes, and not above what the symbols have."""
    layer, size = case
    try:
        enclosure = smallest_singular_value(layer, tol=tol)
    except ValueError:  # the smaller side depends on the size, and two sizes show it
        sides = {shape[0] > shape[1] for shape in _shapes(layer, size) if shape[0] != shape[1]}
        assert sides == {True, False}
        return
    for more in range(3):
        larger = tuple(places + more for places in size)
        truth, doubt = truth_of(layer, larger)
        assert enclosure.lower <= truth + doubt
    if not enclosure.tol_reached:
        assert enclosure.notes


@given(layers(), st.sampled_from([5e-324, 1e-300, 1e30, 1e290]))
def test_weights_of_every_scale(case, scale):
    layer, size = case
    kernel = layer.kernel * scale
    fields = (layer.padding, layer.padding_mode, layer.dilation, layer.groups, layer.transposed, layer.output_padding)
    enclosure = smallest_singular_value(Convolution(kernel, layer.stride, *fields), size)
    exact = Convolution(kernel / scale if scale > 1e-300 else kernel * 2.0**1000, layer.stride, *fields)
    truth, doubt = truth_of(exact, size)
    back = scale if scale > 1e-300 else 2.0**-1000
    assert enclosure.lower <= (truth + doubt + 1e-12 * exact.kernel.abs().sum().item()) * back + 5e-324
    assert (truth - doubt - 1e-12 * exact.kernel.abs().sum().item()) * back <= enclosure.upper


@given(layers(), st.sampled_from(TOLERANCES))
def test_condition_numbers(case, tol):
    layer, size = case
    values = torch.linalg.svdvals(layer.to_dense(size))
    enclosure = condition_number(layer, size, tol)
    if values[-1] > 1e-9 * values[0]:
        truth = (values[0] / values[-1]).item()
        assert enclosure.lower <= truth * (1 + 1e-6)
        assert truth * (1 - 1e-6) <= enclosure.upper
    if enclosure.tol_reached:
        assert enclosure.relative_width <= tol


@pytest.mark.parametrize("noise", [0.0, 1e-3, 2e-2])
@pytest.mark.parametrize("tol", [1e-2, 1e-3, 1e-6])
def test_orthogonal_layers(noise, tol):
    kernel = orthogonal(16) + noise * gaussian(16, 16, 3, 3)
    layer = Convolution(kernel, padding=1, padding_mode="circular")
    enclosure = smallest_singular_value(layer, tol=tol)
    assert enclosure.tol_reached
    blocks = torch.fft.fft2(kernel, s=(32, 32)).movedim((0, 1), (-2, -1))
    assert enclosure.lower <= torch.linalg.svdvals(blocks).amin().item() * (1 + 1e-12)
    assert condition_number(layer, tol=tol).tol_reached


def test_every_size_is_the_infimum():
    """Circular, full and valid: the bound is reached as the input grows, and holds before."""
    kernel = gaussian(2, 3, 3)
    circular = Convolution(kernel, padding=1, padding_mode="circular")
    valid, full = Convolution(kernel), Convolution(kernel.transpose(0, 1), padding=2)
    found = smallest_singular_value(circular, tol=1e-9)
    for layer in (valid, full):
        assert smallest_singular_value(layer, tol=1e-9).lower == pytest.approx(found.lower, rel=1e-8)
    for size in (4, 16, 64, 256):
        values = [truth_of(layer, size)[0] for layer in (circular, valid, full)]
        assert min(values) >= found.lower * (1 - 1e-12)
    assert max(values) == pytest.approx(found.upper, rel=1e-2)


def test_a_shift_loses_a_pixel():
    shift = Convolution(torch.tensor([[[0.0, 0.0, 1.0]]]), padding=1)
    assert smallest_singular_value(shift, 8) == 0
    everywhere = smallest_singular_value(shift)
    assert everywhere.lower == 0
    assert not everywhere.tol_reached
    assert "borders may lose" in everywhere.notes[0]


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate"])
def test_a_tap_that_outweighs_the_others(mode):
    kernel = torch.zeros(4, 4, 3, 3, dtype=torch.float64)
    kernel[:, :, 1, 1] = torch.linalg.qr(gaussian(4, 4))[0]
    kernel += 0.01 * gaussian(4, 4, 3, 3, seed=1)
    layer = Convolution(kernel, padding=1, padding_mode=mode)
    everywhere = smallest_singular_value(layer)
    assert everywhere.lower > 0.5
    for size in (2, 3, 5, 9):
        assert everywhere.lower <= smallest_singular_value(layer, size).upper
    assert "one tap" in everywhere.method


def test_the_side_is_named():
    assert smallest_singular_value(torch.nn.Linear(3, 5)).method.endswith("over all inputs")
    assert smallest_singular_value(torch.nn.Linear(5, 3)).method.endswith("over all outputs")
    assert smallest_singular_value(nn.ConvTranspose1d(5, 3, 1), 4).method.endswith("over all outputs")


def test_dimensions_that_cannot_matter():
    for layer, size in [
        (nn.Conv1d(1, 4, 1, stride=2), 6),  # every second place is not read
        (nn.Conv1d(4, 1, 1, padding=1), 6),  # outputs that read padding only
        (nn.Conv2d(1, 9, (3, 1), stride=(1, 2), padding=(2, 0)), 4),
    ]:
        exactly = smallest_singular_value(layer, size)
        truth = torch.linalg.svdvals(Convolution.of(layer).to_dense(size))[-1].item()
        assert exactly == 0
        assert truth < 1e-6
    dead = nn.Conv1d(3, 3, 3, padding=1, padding_mode="circular")
    with torch.no_grad():
        dead.weight[1] = 0
    assert smallest_singular_value(dead) == 0 == smallest_singular_value(dead, 7)
    singular = condition_number(dead, 7)
    assert singular.upper == math.inf
    assert singular.lower > 1e308
    assert not singular.tol_reached


def test_large_matrices():
    matrix = gaussian(700, 900)
    found, values = smallest_singular_value(matrix, tol=1e-6), torch.linalg.svdvals(matrix)
    assert found.tol_reached
    assert found.lower <= values[-1].item() <= found.upper
    assert "Cholesky" in found.method


def test_nearly_singular_matrices():
    """Gram matrices lose what is below 1e-7 of the norm; a decomposition finds it."""
    left, right = (torch.linalg.qr(gaussian(300, 300, seed=seed))[0] for seed in (1, 2))
    for smallest in (1e-3, 1e-6):
        matrix = (
            left * torch.linspace(1, 2, 300, dtype=torch.float64).index_fill(0, torch.tensor([7]), smallest) @ right
        )
        found = smallest_singular_value(matrix)
        assert found.tol_reached
        assert abs(found.upper - smallest) <= 2e-3 * smallest
    found = smallest_singular_value(left[:, :299] @ right[:299])
    assert found.lower == 0
    assert found.upper < 1e-9
    assert not found.tol_reached


def test_complex_matrices():
    matrix = torch.complex(gaussian(5, 7), gaussian(5, 7, seed=1))
    assert torch.linalg.svdvals(matrix)[-1].item() in smallest_singular_value(matrix)


def test_real_sizes():
    """A banded factor for the vector and for the proof, of a matrix that is too large to be written out."""
    layer = nn.Conv2d(24, 12, 3, padding=1, dtype=torch.float64, bias=False)
    with torch.no_grad():
        layer.weight.copy_(gaussian(12, 24, 3, 3))
    enclosure = smallest_singular_value(layer, 24, 1e-2)
    assert enclosure.tol_reached
    assert "banded" in enclosure.method
    exactly = smallest_singular_value(layer, 12, 1e-6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(least, "DENSE_ORDER", 0)
        banded = smallest_singular_value(layer, 12, 1e-3)
    assert banded.tol_reached
    assert banded.lower <= exactly.upper
    assert exactly.lower <= banded.upper


def test_circulants_at_real_sizes():
    layer = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular")
    for size in (31, (200, 180)):
        assert smallest_singular_value(layer, size).tol_reached
    spectrum = singular_values(layer, 31)
    found = smallest_singular_value(layer, 31, 1e-6)
    assert abs(found.upper - float(spectrum.values[-1])) <= 2e-6 * found.upper


def test_limits():
    layer = nn.Conv2d(64, 64, 3, padding=1)
    stopped = smallest_singular_value(layer, 56, max_seconds=0.0)
    assert not stopped.tol_reached
    assert "max_seconds" in stopped.notes[0]
    little = smallest_singular_value(layer, 16, max_bytes=2**20)
    assert (little.lower, little.tol_reached) == (0.0, False)
    assert little.upper >= spectral_norm(layer, 4, tol=0.1).lower


def test_errors():
    layer = nn.Conv2d(2, 2, 3, padding=1)
    for call, name in ((smallest_singular_value, "smallest_singular_value"), (condition_number, "condition_number")):
        with pytest.raises(ValueError, match=rf"{name}\(tol=0\)"):
            call(layer, 4, 0)
        with pytest.raises(TypeError, match=rf"{name}\(tol\)"):
            call(layer, 4, "fine")
        with pytest.raises(TypeError, match=rf"{name}\(layer\): cannot bound ReLU"):
            call(nn.ReLU())
        with pytest.raises(ValueError, match=rf"{name}\(layer\).*NaN"):
            call(torch.tensor([[math.nan]]))
        with pytest.raises(ValueError, match=f"{name}.*at some sizes and fewer at others"):
            call(nn.Conv2d(3, 96, 4, stride=4))
        with pytest.raises(ValueError, match="max_bytes"):
            call(layer, 4, max_bytes=0)


def one_dimensional():
    """All small geometries of one axis, also those whose conditions hold at some sizes by one reason, at others not."""
    for mode in ("zeros", "circular", "reflect", "replicate"):
        for geometry in itertools.product(range(1, 6), range(1, 4), range(1, 5), range(3), range(4)):
            yield mode, *geometry


def test_what_decides_at_every_size_does_so_at_each():
    """A few sizes stand for all: one that is a circulant beside one that reads no padding says nothing of a third."""
    for mode, stride, dilation, taps, before, after in one_dimensional():
        layer = Convolution(torch.ones(1, 1, taps), stride, ((before, after),), mode, dilation)
        sampled = sides.telling_axes(layer, ((0, 0),))
        for side in ("input", "output"):
            decided = sides.symbols_decide(sampled, side)
            taps_of_all = set.intersection(*(sides.reaching_taps(axes[0], side) for axes in sampled))
            for size in range(1, 30):
                with contextlib.suppress(ValueError):
                    (axis,) = layer_axes(layer, (size,))
                    assert not decided or sides.why_symbols_bound(axis, side), (layer, side, size)
                    assert taps_of_all <= sides.reaching_taps(axis, side)


def test_idle_places_and_outputs():
    """By intervals, without the table of what each output reads with each tap."""
    for mode, stride, dilation, taps, before, after in one_dimensional():
        layer = Convolution(torch.ones(1, 1, taps), stride, ((before, after),), mode, dilation)
        for size in (1, 3, 6, 11):
            with contextlib.suppress(ValueError):
                (axis,) = layer_axes(layer, (size,))
                matrix = layer.to_dense(size)
                assert sides.has_nothing_to_read(axis, "output", Work(2**31, None)) == (not matrix.any(1).all())
                assert sides.has_nothing_to_read(axis, "input", Work(2**31, None)) == (not matrix.any(0).all())
                kept = axis.without_idle_ends()
                assert matrix.any(1).sum() <= kept.outputs <= axis.outputs


def test_circular_strides_with_two_reasons():
    layer = Convolution(torch.tensor([[[1.0, 0.1, -1.0]]]), 3, ((0, 2),), "circular", 2)
    everywhere = smallest_singular_value(layer)
    for size in (3, 4, 5, 7, 10):
        assert everywhere.lower <= smallest_singular_value(layer, size).upper


def test_without_memory_pixels_still_repeat():
    replicated, wrapped = (torch.ones(1, 1, 1), 1, 60, "replicate"), (torch.ones(1, 1, 2), 1, 20, "circular")
    for arguments, size in ((replicated, 2), (wrapped, 3)):
        layer = Convolution(*arguments)
        for most in (64, 2**12, 2**20):
            limited = smallest_singular_value(layer, size, max_bytes=most)
            assert limited.lower <= truth_of(layer, size)[0] * (1 + 1e-9) <= limited.upper * (1 + 2e-9)


def test_much_padding_takes_little():
    """Outputs that read nothing but zeros are left out."""
    kernel = gaussian(1, 1, 501)
    near = smallest_singular_value(Convolution(kernel, padding=500), 100)
    far = smallest_singular_value(Convolution(kernel, padding=10**7), 100)
    assert near.tol_reached
    assert far.tol_reached
    assert far.lower <= near.upper
    assert near.lower <= far.upper
