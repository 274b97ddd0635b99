import math
import re

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gramcert
from cases import layers, modules, tensors
from gramcert import Convolution, project, spectral_norm
from gramcert.geometry.symbol import FrequencyGrid
from gramcert.projecting.nearest import nearest, top_values
from gramcert.projecting.project import constraint, search
from gramcert.projecting.sampled import Places, Sampling

few = hypothesis.settings(max_examples=max(25, hypothesis.settings().max_examples // 4))


def gaussian(*shape, norm=1.3, **options):
    generator = torch.Generator().manual_seed(0)
    layer = Convolution(torch.randn(shape, generator=generator), **options)
    return layer.with_kernel(layer.kernel * (norm / spectral_norm(layer).upper))


def distance(layer, kernel):
    return float(torch.dist(kernel, layer.kernel))


@few
@given(layers(), st.booleans(), st.sampled_from([2.0, 0.8, 0.1]))
def test_the_norm_is_proved_and_the_kernel_no_farther_than_the_scaled_one(drawn, at_one_size, part):
    layer, sizes = drawn
    size = sizes if at_one_size else None
    before = spectral_norm(layer, size).upper
    hypothesis.assume(before > 0)
    norm = part * before
    kernel = project(layer, norm, size)
    assert kernel.shape == layer.kernel.shape
    assert kernel.dtype == layer.kernel.dtype
    assert spectral_norm(layer.with_kernel(kernel), size).upper <= norm
    assert distance(layer, kernel) <= (1 - min(part, 1)) * float(layer.kernel.norm()) * (1 + 1e-9)
    assert torch.equal(project(layer.with_kernel(kernel), norm, size), kernel)


@few
@given(modules())
def test_modules_take_their_projected_weights(drawn):
    layer, _ = drawn
    before = spectral_norm(layer).upper
    hypothesis.assume(before > 0)
    weight = project(layer, before / 2)
    assert weight.shape == layer.weight.shape
    assert not weight.requires_grad
    with torch.no_grad():
        layer.weight.copy_(weight)
    assert spectral_norm(layer).upper <= before / 2


@few
@given(tensors((5, 3)))
def test_of_a_matrix_it_is_the_matrix_with_clipped_singular_values(matrix):
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    norm = 0.5 * float(values[0])
    hypothesis.assume(norm > 0)
    exact = left @ torch.diag(values.clamp_max(norm)) @ right
    torch.testing.assert_close(project(matrix, norm, tol=1e-9), exact, rtol=0, atol=1e-7 * norm)


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"padding_mode": "circular"}, {"groups": 2}], ids=str)
def test_the_distance_is_near_the_least_one(options):
    """The lower bound is what a long plain run of Dykstra's algorithm comes to, and ours is little above it."""
    layer = gaussian(6, 6 // options.get("groups", 1), 4, padding=1, **options)
    found = distance(layer, project(layer, tol=1e-4, steps=100))
    grid = FrequencyGrid.unshifted((24,))
    _, searched = search(layer, None, grid, 1.0, 400, 1e-5, fine=True)
    assert searched.lower == pytest.approx(plain_dykstra(layer, grid, 1000), rel=2e-3)
    assert searched.lower <= found <= 1.05 * searched.lower
    assert found < 0.8 * float(layer.kernel.norm()) * (1 - 1 / 1.3)


def plain_dykstra(layer, grid, rounds):
    """The distance after many alternations of clipping by SVD and truncation, with Dykstra's correction."""
    places = Places(layer)
    matrices = places.gather(layer.kernel.double())
    sampling = Sampling.on(grid, places.taps, matrices)
    point, correction = matrices, 0
    for _ in range(rounds):
        ahead = sampling.symbols(point) + correction
        left, values, right = torch.linalg.svd(ahead, full_matrices=False)
        clipped = (left * values.clamp_max(1)[..., None, :]) @ right
        correction = ahead - clipped
        point = sampling.adjoint(clipped) * places.hold
    return float((point - matrices).norm())


def test_following_vectors_and_skipping_frequencies_change_nothing(monkeypatch):
    """A kernel with one direction far above the others: a few vectors at some frequencies have to be followed."""
    torch.manual_seed(0)
    wave = torch.randn(32) / 32**0.5
    kernel = 0.1 * torch.randn(32, 32, 3, 3) / 32**0.5 + torch.einsum("a,b,xy->abxy", wave, wave, torch.ones(3, 3) / 4)
    layer = Convolution(kernel.double())
    places = Places(layer)
    matrices = places.gather(layer.kernel)
    sampling = Sampling.on(FrequencyGrid.unshifted((16, 16)), places.taps, matrices)
    tops = top_values(matrices, sampling)
    quick = nearest(matrices, places.hold, sampling, tops, 60, 1e-6)
    monkeypatch.setitem(nearest.__globals__, "MOST", 0.0)
    whole = nearest(matrices, places.hold, sampling, tops, 60, 1e-6)
    assert float((quick.matrices - whole.matrices).norm()) < 1e-3 * float((whole.matrices - matrices).norm())
    assert quick.lower == pytest.approx(whole.lower, rel=1e-3)


def test_taps_that_nothing_is_read_with_stay():
    layer = gaussian(3, 3, 3, 3, padding=1)
    kernel = project(layer, 0.1, input_size=1)
    others = torch.ones(3, 3, dtype=torch.bool)
    others[1, 1] = False
    assert torch.equal(kernel[:, :, others], layer.kernel[:, :, others])
    values = torch.linalg.svdvals(kernel[:, :, 1, 1])
    assert 0.099 < float(values[0]) <= 0.1


def test_at_one_size_what_that_size_allows_is_used():
    layer = gaussian(4, 4, 3, padding=1)
    every, one = project(layer, 0.8), project(layer, 0.8, 4)
    assert distance(layer, one) < distance(layer, every)
    assert 0.79 < spectral_norm(layer.with_kernel(one), 4).upper <= 0.8 < spectral_norm(layer.with_kernel(one)).lower


def test_kernels_larger_than_their_input_wrap():
    layer = gaussian(4, 4, 5, padding=2, padding_mode="circular")
    kernel = project(layer, 0.5, 3)
    norm = spectral_norm(layer.with_kernel(kernel), 3)
    assert 0.49 < norm.upper <= 0.5
    exact = clipped_dense(layer, 3, 0.5)
    assert distance(layer, kernel) == pytest.approx(exact, rel=0.02)


def clipped_dense(layer, size, norm):
    """The least distance where taps wrap, by plain dual steps on the sums of taps that meet.

    A change of a sum is shared by the taps in it: its square counts 1/count.
    """
    matrices = layer.kernel.double()
    sums = torch.zeros(*matrices.shape[:2], size, dtype=torch.float64)
    counts = torch.zeros(size)
    for tap in range(matrices.shape[2]):
        sums[:, :, tap % size] += matrices[:, :, tap]
        counts[tap % size] += 1
    scale = counts.double()
    point, correction = sums, 0
    for _ in range(20000):
        ahead = torch.fft.fft(point, dim=2) / size**0.5 / float(scale.max()) + correction
        left, values, right = torch.linalg.svd(ahead.movedim(2, 0), full_matrices=False)
        level = norm / size**0.5 / float(scale.max())
        kept = ((left * (values - level).clamp_min(0)[..., None, :].to(left.dtype)) @ right).movedim(0, 2)
        following = sums - scale * torch.fft.ifft(kept, dim=2).real * size**0.5
        if torch.is_tensor(correction) and float((following - point).norm()) < 1e-12:
            break
        point, correction = following, kept
    return math.sqrt(float(((point - sums).square() / scale).sum()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rounding_to_the_type_of_the_weights_is_included(dtype):
    torch.manual_seed(0)
    layer = nn.Conv2d(6, 6, 3, dtype=dtype)
    weight = project(layer, 0.7)
    assert weight.dtype == dtype
    layer.weight.data.copy_(weight)
    assert 0.68 < spectral_norm(layer).upper <= 0.7


@pytest.mark.parametrize(("size", "norm"), [(1e30, 1.0), (1e-30, 1e-33), (1.0, 1e-6), (1.0, 1e-44), (1e200, 1e-200)])
def test_sizes_far_from_one(size, norm):
    layer = gaussian(4, 4, 3, 3)
    layer = layer.with_kernel(layer.kernel.to(torch.float64 if size > 1e38 else torch.float32) * size)
    kernel = project(layer, norm)
    assert spectral_norm(layer.with_kernel(kernel)).upper <= norm
    assert distance(layer, kernel) <= float(layer.kernel.norm())


def test_what_is_inside_is_left_alone():
    layer = gaussian(4, 4, 3, norm=0.9)
    kernel = project(layer)
    assert torch.equal(kernel, layer.kernel)
    assert kernel.data_ptr() != layer.kernel.data_ptr()
    zero = torch.zeros(3, 2)
    assert torch.equal(project(zero, 1e-300), zero)


def test_the_weight_that_a_parametrised_layer_computes():
    torch.manual_seed(0)
    layer = gramcert.parametrizations.spectral_norm(nn.Conv2d(4, 4, 3))
    weight = project(layer, 0.5)
    assert spectral_norm(Convolution(weight)).upper <= 0.5
    assert distance(Convolution(layer.weight.detach()), weight) < 0.5 * float(layer.weight.detach().norm())


def test_several_threads(threads):
    layer = gaussian(16, 16, 3, 3, padding=1)
    assert spectral_norm(layer.with_kernel(project(layer))).upper <= 1


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.eye(2), 0), {}, "project(norm=0): expected a positive finite number"),
        ((torch.eye(2), -1.0), {}, "project(norm=-1.0): expected a positive finite number"),
        ((torch.eye(2), math.nan), {}, "project(norm=nan): expected a positive finite number"),
        ((torch.eye(2), math.inf), {}, "project(norm=inf): expected a positive finite number"),
        ((torch.eye(2), "1"), {}, "project(norm): expected a number, got '1'"),
        ((torch.eye(2), 1, 8), {}, "project(input_size=8): a matrix has no spatial size, expected None"),
        ((torch.eye(2),), {"steps": 0}, "project(steps=0): expected at least 1"),
        ((torch.eye(2),), {"steps": 1.5}, "project(steps): expected an int, got 1.5"),
        ((torch.eye(2),), {"tol": 2}, "project(tol=2): expected 0 < tol < 1"),
        ((torch.full((2, 2), math.nan),), {}, "project(layer): expected finite values, got 4 NaN or infinite of 4"),
        ((torch.zeros(2, 0),), {}, "project(layer): expected a matrix with rows and columns, got shape (2, 0)"),
        ((torch.zeros(2, 2, 3),), {}, "project(layer): expected a matrix with rows and columns, got shape (2, 2, 3)"),
        ((torch.eye(2, dtype=torch.complex64),), {}, "project(layer): expected real weights, got torch.complex64"),
        ((nn.ReLU(),), {}, "project(layer): cannot bound ReLU"),
    ],
    ids=str,
)
def test_what_is_refused(arguments, options, message):
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
        project(*arguments, **options)


def test_nothing_unproved_is_returned(monkeypatch):
    layer = gaussian(2, 2, 3)
    found = spectral_norm(layer)
    endless = gramcert.Enclosure(found.lower, math.inf, "none")
    monkeypatch.setitem(project.__globals__, "enclose", lambda *_: endless)
    with pytest.raises(ValueError, match=re.escape("project(layer): no finite bound of its norm")):
        project(layer)
    monkeypatch.setitem(project.__globals__, "enclose", lambda *_: found)
    with pytest.raises(ValueError, match=re.escape("project(norm=1.0): no weights of torch.float32 were proved")):
        project(layer)


def test_grids_of_large_layers_are_coarser():
    small, large = (constraint(Convolution(torch.zeros(n, n, 3, 3)), None, 1.0)[0] for n in (64, 1024))
    assert small.sizes == (16, 16)
    assert large.sizes < small.sizes
