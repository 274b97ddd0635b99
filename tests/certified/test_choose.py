import math
import sys

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gramcert
from cases import layers
from gramcert import (
    Convolution,
    gram_norm,
    norm2_circ,
    norm2_sampled,
    norm2_toep,
    singular_values,
    spectral_norm,
)
from gramcert.rescaling import rescaling_vector
from reference import dense_norm, supremum

EPS = torch.finfo(torch.float64).eps
TOLERANCES = [0.3, 1e-2, 1e-3, 1e-6, 1e-9]

# At least 200 layers in `make test`, and those of the profile in `make test-slow`.
many = settings(max_examples=max(200, hypothesis.settings.default.max_examples))


def check(enclosure, truth, tol, weights):
    """The truth of a dense SVD is inside up to its own rounding, and the width is what was asked for.

    Where weights cancel almost completely, float64 cannot reach a relative tolerance, and says so.
    """
    doubt = 20 * EPS * (truth + 1e-3 * weights)
    assert enclosure.lower <= truth + doubt
    assert truth - doubt <= enclosure.upper
    assert enclosure.tol_reached == (enclosure.relative_width <= tol)
    if not enclosure.tol_reached:
        assert enclosure.upper <= 1e-5 * weights
        assert "rounding" in enclosure.explain()


@many
@given(layers(), st.sampled_from(TOLERANCES))
def test_one_size(case, tol):
    layer, size = case
    check(spectral_norm(layer, size, tol=tol), dense_norm(layer, size).item(), tol, layer.kernel.abs().sum().item())


@given(layers(dtype=torch.float32), st.sampled_from(TOLERANCES))
def test_one_size_in_float32(case, tol):
    layer, size = case
    check(spectral_norm(layer, size, tol=tol), dense_norm(layer, size).item(), tol, layer.kernel.abs().sum().item())


@many
@given(layers(), st.sampled_from(TOLERANCES[:4]))
def test_every_size(case, tol):
    layer, size = case
    enclosure = spectral_norm(layer, tol=tol)
    truth = dense_norm(layer, size).item()
    assert truth <= enclosure.upper * (1 + 20 * EPS)
    if enclosure.tol_reached:
        assert enclosure.relative_width <= tol
    else:
        assert layer.padding_mode != "zeros"
        assert "cannot close" in " ".join(enclosure.notes)


@settings(max_examples=hypothesis.settings.default.max_examples // 2)
@given(layers(), st.sampled_from([5e-324, 1e-320, 1e-300, 1e-30, 1e30, 1e290]))
def test_weights_of_every_scale(case, scale):
    layer, size = case
    kernel = layer.kernel * scale
    fields = (layer.padding, layer.padding_mode, layer.dilation, layer.groups, layer.transposed, layer.output_padding)
    enclosure = spectral_norm(Convolution(kernel, layer.stride, *fields), size, tol=1e-3)
    # The same weights, exactly, at a scale where a dense matrix has no trouble.
    exponent = math.frexp(kernel.abs().max().item())[1]
    moderate = kernel * 2.0 ** (-exponent // 2) * 2.0 ** (-exponent - (-exponent // 2))
    truth = dense_norm(Convolution(moderate, layer.stride, *fields), size).item()
    doubt = 20 * EPS * (truth + 1e-3 * moderate.abs().sum().item())
    # Ends below the normal range have few digits, but are on the right side.
    assert math.ldexp(enclosure.lower, -exponent // 2) * 2.0 ** (-exponent - (-exponent // 2)) <= truth + doubt
    assert truth - doubt <= math.ldexp(enclosure.upper, -exponent // 2) * 2.0 ** (-exponent - (-exponent // 2))


@pytest.mark.parametrize(
    ("arguments", "size", "norm"),
    [
        ((torch.ones(1, 1, 3, 1), 1, (1, 0)), 16, 2.96595),
        ((torch.ones(1, 1, 5, 1), 1, (2, 0)), 16, 4.84137),
        ((torch.ones(1, 1, 5, 3), 1, (2, 1)), 16, 14.35923),
        ((torch.ones(1, 1, 3, 3), 1, 1, "circular"), 2, 9),
        ((torch.ones(1, 1, 3, 3), 1, 1), 32, 8.94575),
        ((torch.full((8, 1, 3, 3), 0.5 / 9), 1, 1, "zeros", 1, 8), 8, 0.46060),
        ((torch.ones(1, 1, 2, 2), 2, 0, "zeros", 2), 16, 3.84776),
        ((torch.full((1, 1, 2, 2), 0.25), 1, 1, "circular"), 8, 1.33360),
        ((torch.ones(1, 1, 1, 1), 1, 1, "circular"), 8, 2),
        ((torch.ones(1, 1, 3), 2, 1, "circular"), 3, 2.44949),
        ((torch.ones(1, 1, 3), 2, 1, "circular"), 13, 2.34874),
        ((torch.ones(1, 1, 3), 1, 1, "zeros", 2), 7, 2.41421),
        ((torch.ones(1, 1, 3), 3, 3, "zeros", 2), 5, 1.73205),
        ((torch.ones(1, 1, 3, 3), 1, 1, "reflect"), 8, 9.53455),
        ((torch.tensor([[[1.0]], [[-1.0]]]).transpose(0, 1), 1, 0), 5, 1.41421),
        ((torch.outer(*[torch.tensor([2.0, -1.0, 2.0]) / 3] * 2)[None, None], 1, 1, "circular"), 6, 25 / 9),
    ],
)
def test_where_published_tools_go_wrong(arguments, size, norm):
    enclosure = spectral_norm(Convolution(*arguments), size, tol=1e-7)
    assert enclosure.tol_reached
    assert enclosure.lower - 1e-5 <= norm <= enclosure.upper + 1e-5


@pytest.mark.parametrize("size", [3, 4, 6, 8, 16])
def test_zero_padding_depends_on_the_size(size):
    torch.manual_seed(size)
    layer = nn.Conv2d(2, 2, 3, padding=1)
    smaller, larger = spectral_norm(layer, size, tol=1e-6), spectral_norm(layer, 2 * size, tol=1e-6)
    assert smaller < larger
    assert larger < spectral_norm(layer, tol=1e-6)


def test_the_supremum_is_approached_by_large_sizes():
    layer = Convolution(torch.randn(2, 3, 3, 3, generator=torch.Generator().manual_seed(0)), padding=1)
    everywhere = spectral_norm(layer, tol=1e-6)
    assert supremum(layer.kernel).item() <= everywhere.upper
    large = spectral_norm(layer, 300, tol=1e-3)
    assert everywhere.lower * (1 - 2e-3) <= large.upper <= everywhere.upper * (1 + 1e-3)


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv1d(2, 4, 3, stride=2, padding=1), 9),
        (nn.Conv2d(4, 2, (3, 2), padding="same", groups=2), (7, 5)),
        (nn.Conv3d(1, 2, 2, dilation=2), 5),
        (nn.ConvTranspose1d(2, 3, 3, stride=2, output_padding=1), 6),
        (nn.ConvTranspose2d(2, 2, 3, stride=2, padding=1, dilation=2, output_padding=1), 4),
        (nn.ConvTranspose3d(1, 1, 2, stride=2), 3),
        (nn.Conv2d(1, 1, 3, padding=2, padding_mode="replicate"), 4),
        (nn.Conv2d(2, 2, 7, padding=3), 2),
    ],
)
def test_torch_layers(layer, size):
    check(spectral_norm(layer, size), dense_norm(Convolution.of(layer), size).item(), 1e-3, 1.0)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (7, 3), (40, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
def test_matrices(shape, dtype):
    matrix = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    wide = matrix.to(torch.complex128 if dtype.is_complex else torch.float64)
    check(spectral_norm(matrix, tol=1e-9), torch.linalg.matrix_norm(wide, 2).item(), 1e-9, 1.0)


def test_linear_layers_and_effective_weights():
    linear = nn.Linear(5, 3)
    check(spectral_norm(linear), torch.linalg.matrix_norm(linear.weight.double(), 2).item(), 1e-3, 1.0)
    nn.utils.parametrizations.weight_norm(linear)
    with torch.no_grad():
        linear.parametrizations.weight.original0.mul_(10)
    check(spectral_norm(linear), torch.linalg.matrix_norm(linear.weight.double(), 2).item(), 1e-3, 1.0)


HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


@HALF
def test_half_precision_is_taken_exactly(dtype):
    """Layers, kernels and matrices alike: widened without rounding, then enclosed like any other (finite)."""
    for layer, made in ((nn.Conv2d(2, 3, 3), Convolution), (nn.Linear(5, 7), lambda weight: weight)):
        weight = layer.to(dtype).weight.detach()
        norms = [spectral_norm(thing) for thing in (layer, made(weight), made(weight.float()))]
        assert len({(norm.lower, norm.upper) for norm in norms}) == 1
    truth = torch.linalg.svdvals(weight.double())
    assert (
        norms[0].lower
        <= float(truth[0]) * (1 + 100 * EPS)
        <= norms[0].upper * (1 + 2 * 100 * EPS)
        <= 1.002 * float(truth[0])
    )
    found = singular_values(weight)
    assert bool(((found.values - truth).abs() <= found.error + 100 * EPS * truth[0]).all())
    assert found.error < 1e-9


@HALF
def test_bounds_of_half_precision_are_not_computed_in_it(dtype):
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    truth = float(torch.linalg.matrix_norm(weight.double(), 2))
    rounding = float(torch.finfo(torch.float32).eps) * 100
    kernel = weight[:, :, None]
    bounds = [gram_norm(weight), norm2_circ(kernel, 3), norm2_toep(kernel), norm2_sampled(kernel, 3)]
    for bound in bounds:
        assert bound.dtype == torch.float32
        assert truth * (1 - rounding) <= float(bound) <= 1.05 * truth
    factors = rescaling_vector(weight)
    assert factors.dtype == torch.float32
    assert 0.5 < float(torch.linalg.matrix_norm(weight.float() * factors, 2)) <= 1 + rounding


def test_zero_layers_are_exactly_zero():
    for layer, size in (
        (torch.zeros(3, 2), None),
        (Convolution(torch.zeros(2, 2, 3, 3)), None),
        (Convolution(torch.zeros(1, 1, 3)), 5),
    ):
        norm = spectral_norm(layer, size)
        assert norm == 0
        assert norm.relative_width == 0
    nowhere = Convolution(torch.tensor([[[1.0, 0.0, 0.0]]]), padding=((2, 0),))  # reads padding only
    assert spectral_norm(nowhere, 1) == 0


def test_taps_that_are_zero_cost_nothing():
    """Trimmed, this is a 1×1 kernel, and reflecting or replicating pixels does not matter."""
    kernel = torch.zeros(2, 2, 5, 5)
    kernel[:, :, 2, 2] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for mode in ("zeros", "circular", "reflect", "replicate"):
        norm = spectral_norm(Convolution(kernel, padding=2, padding_mode=mode), tol=1e-9)
        assert norm.tol_reached
        assert norm.lower <= 5.4649857042190426 <= norm.upper


@pytest.mark.parametrize(
    ("layer", "large", "small"),
    [
        (nn.Conv2d(3, 3, 1, padding_mode="circular"), 64, 2),
        (nn.Conv2d(3, 4, 2, stride=2, padding_mode="circular"), 200, 4),
        (nn.Conv1d(2, 2, 1, padding_mode="circular"), 10_000, 2),
        (nn.Conv3d(1, 2, (1, 2, 1), stride=(1, 2, 1), padding_mode="circular"), 32, 4),
        (nn.Conv2d(2, 2, (3, 1), padding=(1, 0), padding_mode="circular"), (12, 900), (12, 2)),
        (Convolution(torch.randn(2, 2, 3, 3) * torch.tensor([0.0, 1.0, 0.0]), 1, 1, "circular"), (11, 900), (11, 3)),
        (Convolution(torch.randn(2, 2, 3, 3) * torch.eye(9)[4].reshape(3, 3), 1, 1, "circular"), 80, 3),
    ],
)
def test_circulants_of_one_tap_on_large_grids(layer, large, small):
    """A symbol that is constant, on some axes or on all."""
    check(spectral_norm(layer, large), dense_norm(Convolution.of(layer), small).item(), 1e-3, 1.0)


def test_every_size_with_repeated_pixels_says_that_it_cannot_close():
    norm = spectral_norm(Convolution(torch.ones(1, 1, 3, 3), padding=1, padding_mode="reflect"))
    assert not norm.tol_reached
    assert norm.lower <= 9 <= 9.53455 <= norm.upper <= 9 * 3 * (1 + 1e-3)
    assert "√9" in norm.method
    assert "cannot close; at a given input_size it can" in " ".join(norm.explain().split())


def test_steps_bound_the_norm_or_say_what_else():
    """The supremum over all frequencies is above the norm at one size."""
    layer = Convolution(torch.randn(2, 3, 3, 3, generator=torch.Generator().manual_seed(0)), padding=1)
    norm = spectral_norm(layer, 40, tol=1e-5)
    names = {step.quantity for step in norm.steps}
    assert names == {"the norm", "the supremum over all frequencies"}
    for step in norm.steps:
        if step.quantity == "the norm":
            assert step.lower <= norm.upper <= step.upper
        else:
            assert norm.upper < step.lower
    assert "the supremum over all frequencies from" in " ".join(norm.explain().split())


def test_gradients_and_training_are_left_alone():
    layer = nn.Conv2d(1, 1, 3)
    spectral_norm(layer, 8)
    assert layer.weight.grad is None
    assert torch.is_grad_enabled()


def test_overflow_is_an_honest_infinity():
    norm = spectral_norm(torch.full((4, 4), 1.7e308, dtype=torch.float64))
    assert norm.lower == sys.float_info.max
    assert norm.upper == math.inf
    assert not norm.tol_reached
    assert norm.notes == ("the norm may be beyond the largest float, so that no finite float is certainly above it",)


def test_the_smallest_weights_say_why_the_tolerance_is_missed():
    norm = spectral_norm(torch.full((1, 1), 5e-324, dtype=torch.float64))
    assert norm.lower <= 5e-324 <= norm.upper
    assert not norm.tol_reached
    assert norm.notes == ("the norm is so small that floats next to it differ by more than the tolerance",)


@given(layers(), st.integers(-1080, 1024), st.sampled_from([1e-2, 1e-6, 1e-12]), st.sampled_from([1000, 2**31]))
def test_a_tolerance_that_is_missed_has_a_note(case, exponent, tol, max_bytes):
    layer, size = case
    half = exponent // 2
    kernel = (layer.kernel.double() * 2.0**half * 2.0 ** (exponent - half)).clamp(-1.79e308, 1.79e308)
    fields = (layer.padding, layer.padding_mode, layer.dilation, layer.groups, layer.transposed, layer.output_padding)
    for size_or_none in (size, None):
        norm = spectral_norm(Convolution(kernel, layer.stride, *fields), size_or_none, tol=tol, max_bytes=max_bytes)
        assert norm.tol_reached or norm.notes
        assert 0 <= norm.lower <= norm.upper
        assert norm.upper > 0 or not norm.lower


@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e300, 1.79e308])
@pytest.mark.parametrize("mode", ["zeros", "circular", "replicate"])
def test_extreme_weights_have_bounds_that_are_numbers(scale, mode):
    kernel = torch.tensor([[[1.0, -1.0, 1.0], [0.5, 1.0, 0.0]]], dtype=torch.float64) * scale
    layer = Convolution(kernel.transpose(0, 1), padding=1, padding_mode=mode)
    exponent = 1074 if scale < 1 else -1000
    moderate = Convolution(layer.kernel * 2.0 ** (exponent // 2) * 2.0 ** (exponent // 2), padding=1, padding_mode=mode)
    truth = torch.linalg.svdvals(moderate.to_dense(6))
    norm, spectrum = spectral_norm(layer, 6), singular_values(layer, 6)
    ends = (norm.lower * 2.0 ** (exponent // 2) * 2.0 ** (exponent // 2), norm.upper * 2.0 ** (exponent // 2))
    assert ends[0] <= truth[0] * (1 + 20 * EPS)
    assert truth[0] * (1 - 20 * EPS) <= ends[1] * 2.0 ** (exponent // 2)
    values = spectrum.values * 2.0 ** (exponent // 2) * 2.0 ** (exponent // 2)
    error = spectrum.error * 2.0 ** (exponent // 2) * 2.0 ** (exponent // 2)
    assert spectrum.error == math.inf or (values - truth).abs().max() <= error + 50 * EPS * truth[0]


class TestLimits:
    layer = Convolution(torch.randn(8, 8, 3, 3, generator=torch.Generator().manual_seed(0)), padding=1)

    def test_memory(self):
        norm = spectral_norm(self.layer, 24, tol=1e-8, max_bytes=2**20)
        assert not norm.tol_reached
        assert "more than max_bytes=1048576" in norm.explain()
        assert norm.lower <= spectral_norm(self.layer, 24, tol=1e-8).upper
        assert spectral_norm(self.layer, 24, tol=1e-8).lower <= norm.upper <= 1.01 * norm.lower

    def test_memory_for_every_size(self):
        norm = spectral_norm(self.layer, max_bytes=1000)
        assert not norm.tol_reached
        assert "max_bytes=1000" in norm.explain()
        exact = spectral_norm(self.layer)
        assert norm.lower <= exact.upper
        assert exact.lower <= norm.upper <= 4 * exact.upper

    @pytest.mark.parametrize("size", [None, 24])
    def test_time(self, size, clock):
        """It may run out anywhere: before the first vectors, before the first cells, between later ones."""
        exact = spectral_norm(self.layer, size, tol=1e-8)
        for seconds in (0, 1, 2, 8, 32, 64):
            norm = spectral_norm(self.layer, size, tol=1e-8, max_seconds=seconds)
            assert norm.lower <= exact.upper
            assert exact.lower <= norm.upper <= 4 * exact.upper
            assert not norm.tol_reached
            assert f"max_seconds={seconds} " in norm.explain()

    def test_enough_time_is_enough(self):
        assert spectral_norm(self.layer, max_seconds=1e9).tol_reached


@pytest.mark.slow
def test_large_square_matrices_fit_into_the_default_memory():
    assert spectral_norm(nn.Linear(3600, 3600, bias=False), tol=1e-2).tol_reached


def test_matrices_beyond_the_memory_still_get_a_good_lower_bound():
    matrix = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    norm = spectral_norm(matrix, max_bytes=5 * 8 * matrix.numel())
    assert not norm.tol_reached
    truth = torch.linalg.matrix_norm(matrix.double(), 2).item()
    assert 0.99 * truth <= norm.lower <= truth <= norm.upper <= 10 * truth


def test_hopeless_tolerances_are_given_up_early(clock):
    layer = Convolution(torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(0)))
    norm = spectral_norm(layer, tol=1e-17, max_seconds=1e9)
    assert clock.looks < 200  # one or two for each batch of frequencies
    assert not norm.tol_reached
    assert "rounding" in norm.explain()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((nn.ReLU(),), {}, TypeError, r"spectral_norm\(layer\): cannot bound ReLU; expected Linear"),
        (("conv",), {}, TypeError, "cannot bound str"),
        (
            (nn.Conv2d(1, 1, 3), (32,)),
            {},
            ValueError,
            r"spectral_norm\(input_size=\(32,\)\): Conv2d needs 2 sizes, got 1",
        ),
        ((nn.Conv2d(1, 1, 3), 0), {}, ValueError, r"input_size=\(0, 0\)\): expected sizes of at least 1"),
        ((nn.Conv2d(1, 1, 3), 10**30), {}, ValueError, r"input_size=.*expected sizes up to 2147483647"),
        ((nn.Conv2d(1, 1, 3), 2), {}, ValueError, r"spectral_norm\(input_size=\(2, 2\)\): the output would be empty"),
        ((nn.Conv2d(1, 1, 3), 8.5), {}, TypeError, "expected an int or a sequence of ints, got 8.5"),
        ((nn.Linear(2, 2), 8), {}, ValueError, "Linear has no spatial size, expected None"),
        ((torch.ones(2, 2), 8), {}, ValueError, "a matrix has no spatial size, expected None"),
        ((torch.ones(2, 2, 2),), {}, ValueError, r"expected a matrix with rows and columns, got shape \(2, 2, 2\)"),
        ((torch.ones(0, 2),), {}, ValueError, "expected a matrix with rows and columns"),
        ((torch.ones(2, 2, dtype=torch.int64),), {}, TypeError, "expected a floating-point or complex matrix"),
        ((torch.ones(2, 2).to_sparse(),), {}, TypeError, "expected a dense tensor"),
        ((torch.full((2, 2), math.nan),), {}, ValueError, "expected finite values, got 4 NaN or infinite of 4"),
        ((torch.full((2, 2), math.inf),), {}, ValueError, "expected finite values"),
        ((nn.LazyConv2d(2, 3),), {}, ValueError, "the layer has no weights yet"),
        ((torch.ones(2, 2),), {"tol": 0}, ValueError, r"spectral_norm\(tol=0\): expected 0 < tol < 1"),
        ((torch.ones(2, 2),), {"tol": 1.0}, ValueError, "expected 0 < tol < 1"),
        ((torch.ones(2, 2),), {"tol": math.nan}, ValueError, "expected 0 < tol < 1"),
        ((torch.ones(2, 2),), {"tol": "1e-3"}, TypeError, r"spectral_norm\(tol\): expected a number, got '1e-3'"),
        ((torch.ones(2, 2),), {"max_bytes": 0}, ValueError, r"max_bytes=0\): expected a positive int"),
        ((torch.ones(2, 2),), {"max_seconds": -1}, ValueError, r"max_seconds=-1\): expected None or a number"),
    ],
)
def test_bad_input(arguments, options, error, message):
    with pytest.raises(error, match=message):
        spectral_norm(*arguments, **options)


def test_lazy_layers_that_have_run_are_known():
    layer = nn.LazyConv2d(2, 3)
    layer(torch.zeros(1, 3, 5, 5))
    assert spectral_norm(layer).tol_reached


@pytest.mark.usefixtures("threads")
def test_the_guarantee_does_not_depend_on_threads():
    layer = Convolution(torch.randn(12, 12, 3, 3, generator=torch.Generator().manual_seed(5)), padding=1)
    check(spectral_norm(layer, 8, tol=1e-9), dense_norm(layer, 8).item(), 1e-9, 1.0)
    assert spectral_norm(layer, tol=1e-9).tol_reached


def test_it_is_public():
    assert gramcert.spectral_norm is spectral_norm
