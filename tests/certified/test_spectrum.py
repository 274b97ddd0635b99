import pytest
import torch
from hypothesis import given
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


@given(layers())
def test_every_layer_with_a_small_matrix(case):
    layer, size = case
    check(singular_values(layer, size), torch.linalg.svdvals(layer.to_dense(size)))


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
