import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cases import layers
from gramcert import Convolution, Spectrum, singular_values

EPS = torch.finfo(torch.float64).eps


def check(spectrum, truth):
    assert spectrum.values.dtype == torch.float64
    assert spectrum.values.shape == truth.shape
    assert (spectrum.values.diff() <= 0).all()
    assert (spectrum.values - truth).abs().max() <= spectrum.error + 50 * EPS * (1 + truth[0])
    assert spectrum.error <= 1e-9 * (1 + truth[0])


def check_sums(spectrum, truth):
    """Valid and tight: the true sums are inside, and the ends no farther than the error of each value makes them."""
    assert spectrum.omitted == 0
    rounding = 50 * EPS * (1 + float(truth[0]))  # of each value of the reference
    number = len(truth)
    for count in {1, (number + 1) // 2, number}:
        found, exact = spectrum.ky_fan(count), math.fsum(truth[:count].tolist())
        assert found.lower - count * rounding <= exact <= found.upper + count * rounding
        assert found.upper - found.lower <= 2 * count * spectrum.error + 8 * EPS * exact
    nuclear, whole = spectrum.nuclear, spectrum.ky_fan(number)
    assert (nuclear.lower, nuclear.upper) == (whole.lower, whole.upper)
    length = float(truth.norm())
    assert spectrum.frobenius.lower - number * rounding <= length <= spectrum.frobenius.upper + number * rounding
    assert spectrum.frobenius.relative_width * length <= 2.1 * spectrum.error * number**0.5 + 4 * number * EPS * length
    assert spectrum.largest.lower - rounding <= truth[0] <= spectrum.largest.upper + rounding
    assert spectrum.smallest.lower - rounding <= truth[-1] <= spectrum.smallest.upper + rounding
    least, most = spectrum.above(1)
    assert int((truth > 1 + rounding).sum()) <= most <= int((truth > 1 - 2 * spectrum.error - rounding).sum())
    assert int((truth > 1 + 2 * spectrum.error + rounding).sum()) <= least <= int((truth > 1 - rounding).sum())


@given(layers())
def test_every_layer_with_a_small_matrix(case):
    layer, size = case
    spectrum, truth = singular_values(layer, size), torch.linalg.svdvals(layer.to_dense(size))
    check(spectrum, truth)
    check_sums(spectrum, truth)


@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("k", [1, 3, 1000])
def test_the_largest_few(mode, k):
    layer = Convolution(torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0)), padding=1, padding_mode=mode)
    wide = Convolution(layer.kernel.double(), padding=1, padding_mode=mode)
    check(singular_values(layer, 12, k), torch.linalg.svdvals(wide.to_dense(12))[:k])


@pytest.mark.parametrize(
    ("stride", "dilation", "size"),
    [
        ((2, 1), (1, 1), (8, 6)),
        ((2, 2), (1, 3), (6, 6)),
        ((2, 2), (2, 2), (8, 8)),
        ((1, 1), (2, 3), (6, 9)),
        ((3, 1), (1, 2), (9, 4)),
    ],
)
def test_circular_padding_with_strides_and_dilations(stride, dilation, size):
    """The whole spectrum comes from the grid, also where the grid is met several times or places are never read."""
    kernel = torch.randn(3, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    spans = [d * 2 for d in dilation]
    pads = [(0, span + 1 - s) for span, s in zip(spans, stride, strict=True)]
    pads = [(max(0, before), max(0, after)) for before, after in pads]
    layer = Convolution(kernel, stride, pads, "circular", dilation)
    assert [out * s for out, s in zip(layer.output_size(size), stride, strict=True)] == list(size)
    check(singular_values(layer, size), torch.linalg.svdvals(layer.to_dense(size)))


def test_large_circular_layers():
    layer = Convolution(
        torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(0)), padding=1, padding_mode="circular"
    )
    spectrum = singular_values(layer, 64)
    assert spectrum.values.shape == (4 * 64 * 64,)
    energy = 64**2 * layer.kernel.double().square().sum()  # ‖T‖_F²
    torch.testing.assert_close(spectrum.values.square().sum(), energy)


@pytest.mark.parametrize("layer", [nn.Linear(4, 6), torch.randn(6, 4), torch.randn(3, 3, dtype=torch.float64)])
def test_matrices(layer):
    matrix = layer.weight if isinstance(layer, nn.Module) else layer
    check(singular_values(layer, None), torch.linalg.svdvals(matrix.detach().double()))


@pytest.mark.parametrize("k", [None, 2])
def test_complex_matrices_have_each_singular_value_once(k):
    matrix = torch.randn(5, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    check(singular_values(matrix, k=k), torch.linalg.svdvals(matrix)[:k])


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scales(scale):
    matrix = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spectrum = singular_values(matrix * scale, None)
    assert (spectrum.values / scale - torch.linalg.svdvals(matrix)).abs().max() <= 200 * EPS
    assert spectrum.error <= 5e3 * EPS * scale


def test_singular_values_that_overflow_have_no_finite_error():
    layer = Convolution(torch.full((1, 1, 2), 1.7e308, dtype=torch.float64), padding=1)
    assert singular_values(layer, 4).error == torch.inf


@pytest.mark.parametrize("mode", ["zeros", "circular", "replicate"])
def test_zero_layers(mode):
    spectrum = singular_values(Convolution(torch.zeros(1, 2, 3, 3), padding=1, padding_mode=mode), 4)
    assert spectrum.values.tolist() == [0.0] * 16
    assert spectrum.error == 0
    dilated = Convolution(torch.zeros(1, 1, 2), dilation=3)
    assert singular_values(dilated, 4).values.tolist() == [0.0]


@pytest.mark.parametrize(
    "arguments", [{"padding": 1}, {"padding": 2, "padding_mode": "reflect", "stride": 2}, {"groups": 2}]
)
@pytest.mark.parametrize("k", [1, 5, 20])
def test_the_largest_few_of_large_matrices(arguments, k):
    kernel = torch.randn(4, 4 // arguments.get("groups", 1), 3, 3, generator=torch.Generator().manual_seed(k))
    size = (27, 28) if arguments.get("stride") else (16, 14)  # beyond what is decomposed
    layer = Convolution(kernel.double(), **arguments)
    spectrum = singular_values(Convolution(kernel, **arguments), size, k)
    truth = torch.linalg.svdvals(layer.to_dense(size))[:k]
    assert spectrum.values.shape == (k,)
    assert (spectrum.values - truth).abs().max() <= spectrum.error + 50 * EPS * truth[0]
    assert spectrum.error <= 1e-7 * truth[0]


def test_repeated_singular_values_are_not_missed():
    """Two groups of the same kernel and a separable one: the largest values come several times."""
    kernel = torch.outer(*[torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)] * 2)[None, None].repeat(2, 1, 1, 1)
    layer = Convolution(kernel, padding=1, groups=2)
    truth = torch.linalg.svdvals(layer.to_dense((30, 30)))[:9]
    spectrum = singular_values(layer, 30, 9)
    assert (spectrum.values - truth).abs().max() <= spectrum.error + 50 * EPS * truth[0]
    assert spectrum.error <= 1e-7


def test_a_missed_vector_shows_in_the_error(monkeypatch):
    """Krylov iteration that overlooks the largest value: the proof on the complement notices."""
    from gramcert.certified import largest

    honest = largest._krylov

    def blind(matrix, count):
        vectors, values = honest(matrix, count + 1)
        return vectors[:, 1:], values[1:]

    layer = Convolution(
        torch.randn(3, 3, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), padding=1
    )
    truth = torch.linalg.svdvals(layer.to_dense((18, 18)))[:4]
    monkeypatch.setattr(largest, "_krylov", blind)
    spectrum = singular_values(layer, 18, 4)
    assert (spectrum.values - truth).abs().max() > 1e-3
    assert (spectrum.values - truth).abs().max() <= spectrum.error


def test_a_wrong_decomposition_shows_in_the_error(monkeypatch):
    """The error is computed from the decomposition, not assumed of the routine."""
    honest = torch.linalg.svd

    def sloppy(*arguments, **options):
        left, values, right = honest(*arguments, **options)
        return left, values * (1 + 1e-3), right

    matrix = torch.randn(5, 4, dtype=torch.float64)
    monkeypatch.setattr(torch.linalg, "svd", sloppy)
    spectrum = singular_values(matrix, None)
    assert (spectrum.values - torch.linalg.svdvals(matrix)).abs().max() <= spectrum.error
    assert spectrum.error >= 1e-4 * spectrum.values[0]


def test_vectors_that_are_not_orthonormal_are_refused(monkeypatch):
    honest = torch.linalg.svd
    monkeypatch.setattr(torch.linalg, "svd", lambda *a, **o: tuple(2 * part for part in honest(*a, **o)))
    with pytest.raises(ArithmeticError, match="not orthonormal"):
        singular_values(torch.eye(3), None)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((nn.Conv2d(1, 1, 3), None), ValueError, r"singular_values\(input_size=None\): Conv2d needs an input size"),
        ((torch.eye(3), 4), ValueError, r"singular_values\(input_size=4\): a matrix has no spatial size"),
        ((nn.Conv2d(1, 1, 3), 8, 0), ValueError, r"singular_values\(k=0\): expected at least 1"),
        ((nn.Conv2d(16, 16, 3, padding=1), 64), ValueError, "at most 4096 for all singular values and 8192 for the k"),
        ((nn.Conv2d(16, 16, 3, padding=1), 64, 3), ValueError, r"singular_values\(k=3\): .* got 65536 by 65536"),
        (
            (nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"), 10_000),
            ValueError,
            r"singular_values: the layer may have at most 33554432 singular values, got 100000000",
        ),
        ((nn.Conv1d(1, 1, 3, stride=10**6), 10**8), ValueError, "67108864 entries where it is decomposed"),
        ((nn.Conv1d(1, 1, 3, stride=10**5), 10**8, 3), ValueError, "got 1000 by 100000000"),
        ((nn.ReLU(), 8), TypeError, r"singular_values\(layer\): cannot bound ReLU"),
        ((torch.full((2, 2), torch.nan), None), ValueError, "expected finite values"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        singular_values(*arguments)


def test_spectra_are_immutable():
    with pytest.raises(AttributeError, match="cannot assign to field 'error'"):
        Spectrum(torch.zeros(1), 0.0).error = 1.0


def test_layers_without_values_are_refused():
    with pytest.raises(TypeError, match=r"singular_values\(layer\): expected a dense tensor with values, got a meta"):
        singular_values(torch.nn.Conv2d(1, 1, 3, device="meta"), 8)


@given(
    st.lists(st.integers(-50, 50), min_size=1, max_size=5),
    st.sampled_from(["circular", "zeros"]),
    st.integers(-40, 40),
    st.randoms(use_true_random=False),
)
def test_sums_of_known_singular_values(entries, mode, exponent, random):
    """A permuted diagonal matrix at each pixel: the singular values are known exactly, and nothing is forgiven."""
    order = random.sample(range(len(entries)), len(entries))
    kernel = torch.zeros(len(entries), len(entries), 3, 3, dtype=torch.float64)
    for row, (column, entry) in enumerate(zip(order, entries, strict=True)):
        kernel[row, column, 1, 1] = entry * 2.0**exponent
    spectrum = singular_values(Convolution(kernel, padding=1, padding_mode=mode), 3)
    scale = Fraction(2) ** exponent
    truth = sorted((abs(entry) * scale for entry in entries for _ in range(9)), reverse=True)
    for count in (1, 5, len(truth)):
        assert sum(truth[:count]) in spectrum.ky_fan(count)
    assert sum(truth) in spectrum.nuclear
    assert truth[0] in spectrum.largest
    assert truth[-1] in spectrum.smallest
    square = sum(value**2 for value in truth)
    assert Fraction(spectrum.frobenius.lower) ** 2 <= square <= Fraction(spectrum.frobenius.upper) ** 2
    least, most = spectrum.above(1)
    assert least <= sum(value > 1 for value in truth) <= most
    if truth[-1]:
        assert truth[0] / truth[-1] in spectrum.condition
        assert spectrum.condition.relative_width <= 1e-9
    else:
        assert spectrum.condition.upper == math.inf


POSITIVE = st.floats(0, 1e300)


@given(st.lists(POSITIVE, min_size=1, max_size=30), st.sampled_from([0.0, 1e-320, 1e-12, 0.5, 1e3]))
def test_sums_are_rounded_outward(values, error):
    """Against exact sums of the ends of each value, whatever they are."""
    values = sorted(values, reverse=True)
    spectrum = Spectrum(torch.tensor(values, dtype=torch.float64), error)
    exact = [Fraction(value) for value in values]
    low = sum(max(value - Fraction(error), Fraction(0)) for value in exact)
    high = sum(value + Fraction(error) for value in exact)
    lower, upper = Fraction(spectrum.nuclear.lower), Fraction(spectrum.nuclear.upper)
    assert lower <= low <= high <= upper
    unit = Fraction(EPS) * 3 * high + Fraction(2) ** -1070
    assert low - lower <= unit
    assert upper - high <= unit
    squares = [sum(max(value + sign * Fraction(error), Fraction(0)) ** 2 for value in exact) for sign in (-1, 1)]
    assert Fraction(spectrum.frobenius.lower) ** 2 <= squares[0]
    assert squares[1] <= Fraction(spectrum.frobenius.upper) ** 2
    least, most = spectrum.above(1)
    assert least <= sum(value - Fraction(error) > 1 for value in exact)
    assert sum(value + Fraction(error) > 1 for value in exact) <= most


def test_sums_at_the_ends_of_the_range():
    nothing = Spectrum(torch.zeros(3, dtype=torch.float64), 0.0)
    for found in (nothing.nuclear, nothing.frobenius, nothing.largest, nothing.smallest, nothing.ky_fan(2)):
        assert (found.lower, found.upper) == (0, 0)
    assert nothing.condition.upper == math.inf
    huge = Spectrum(torch.full((4,), 1.5e308, dtype=torch.float64), 1e290)
    assert 8e307 <= huge.nuclear.lower < huge.nuclear.upper == math.inf
    assert huge.frobenius.upper == math.inf
    assert 1 in huge.condition
    assert huge.largest.upper < math.inf
    unknown = singular_values(Convolution(torch.full((1, 1, 2), 1.7e308, dtype=torch.float64), padding=1), 4)
    for found in (unknown.nuclear, unknown.frobenius, unknown.largest, unknown.smallest, unknown.ky_fan(1)):
        assert (found.lower, found.upper) == (0, math.inf)
    assert (unknown.condition.lower, unknown.condition.upper) == (1, math.inf)
    assert unknown.above(1) == (0, 4)


def test_sums_of_complex_matrices_count_each_value_once():
    matrix = torch.diag(torch.tensor([3j, 4 + 0j, 1 - 1j], dtype=torch.complex128))
    spectrum = singular_values(matrix)
    assert spectrum.nuclear.lower <= 7 + 2**0.5 <= spectrum.nuclear.upper <= spectrum.nuclear.lower + 1e-11
    assert spectrum.frobenius.lower <= 27**0.5 <= spectrum.frobenius.upper <= spectrum.frobenius.lower + 1e-11
    few = singular_values(matrix, k=2)
    assert few.omitted == 1
    assert 7 in few.ky_fan(2)


@pytest.mark.parametrize(("k", "omitted"), [(5, 139), (144, 0), (1000, 0), (None, 0)])
@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_a_spectrum_knows_whether_it_is_whole(mode, k, omitted):
    kernel = torch.randn(1, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    spectrum = singular_values(Convolution(kernel, padding=1, padding_mode=mode), 12, k)
    assert spectrum.omitted == omitted
    if not omitted:
        assert spectrum.nuclear.relative_width < 1e-9
        return
    for name in ("nuclear", "frobenius", "smallest", "condition"):
        with pytest.raises(ValueError, match=rf"Spectrum\.{name}: needs all .* only the 5 largest of 144 are known"):
            getattr(spectrum, name)
    with pytest.raises(ValueError, match=r"ky_fan\(k=6\): expected at most 5, as many as are known"):
        spectrum.ky_fan(6)


def test_how_many_are_above_a_level_where_only_the_largest_are_known():
    spectrum = Spectrum(torch.tensor([3.0, 2.0], dtype=torch.float64), 0.5, omitted=7)
    assert spectrum.above(2.75) == (0, 1)
    assert spectrum.above(2.25) == (1, 9)
    assert spectrum.above(1) == (2, 9)
    assert spectrum.above(math.inf) == (0, 0)
    with pytest.raises(ValueError, match="expected a number"):
        spectrum.above(math.nan)


@pytest.mark.parametrize(("k", "error"), [(0, ValueError), (3, ValueError), (1.0, TypeError), (True, TypeError)])
def test_bad_numbers_of_values(k, error):
    with pytest.raises(error, match=r"Spectrum.ky_fan\(k"):
        Spectrum(torch.ones(2, dtype=torch.float64), 0.0).ky_fan(k)


@pytest.mark.parametrize(("mode", "what"), [("circular", "frequencies"), ("zeros", "matrices")])
def test_progress_is_told(mode, what):
    told = []
    kernel = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    layer = Convolution(kernel, padding=1, padding_mode=mode, groups=2)
    singular_values(layer, 6, report=lambda *words: told.append(words))
    assert {name for name, _, _ in told} == {what}
    assert all(done <= total for _, done, total in told)
    assert told[-1][1] == told[-1][2]
