"""The circulant but for a few vectors: forced on every layer that it is made for, and what it must not accept."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from cases import layers
from gramcert import Convolution, spectral_norm
from gramcert.certified import embedding, one_size
from gramcert.certified.deflation import Deflation, TooLowError
from gramcert.certified.embedded import EmbeddedLayer, proves_below
from gramcert.certified.embedding import EMBEDDED, Embedding, embeddings
from gramcert.certified.gram_symbol import GramSymbol
from gramcert.certified.lifted import LiftedLayer
from gramcert.certified.tapwise import dense_matrix
from gramcert.certified.work import OutOfBudgetError, Work
from gramcert.geometry.axis import layer_axes
from reference import dense_norm, sigma

EPS = torch.finfo(torch.float64).eps


def work():
    return Work(2**31, None)


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Parts:
    """The proofs of all parts of one group, as one."""

    def __init__(self, lifted, group, limits=None):
        kernel, reduced = lifted.kernels[group], lifted.reduced[group]
        limits = limits or work()
        parts = embeddings(lifted.axes, limits)
        self.layers = [EmbeddedLayer(kernel, reduced, GramSymbol(reduced), part, limits) for part in parts]

    def bound(self, lower, tol):
        return max(layer.bound(lower, tol) for layer in self.layers)

    @property
    def count(self):
        return max(layer.count for layer in self.layers)


def embedded_layer(layer, size):
    """The first group of a layer."""
    lifted = LiftedLayer.of(layer, layer_axes(layer, size))
    return Parts(lifted, 0), sigma(dense_matrix(lifted.kernels[0], lifted.axes)).item()


ZOO = {
    "square": (Convolution(gaussian(4, 4, 3, 3), padding=1), (9, 9)),
    "few inputs": (Convolution(gaussian(5, 2, 3, 3), padding=1), (7, 8)),
    "few outputs": (Convolution(gaussian(2, 5, 3, 3), padding=1), (8, 7)),
    "even size": (Convolution(gaussian(3, 3, 2, 4), padding=((0, 1), (2, 1))), (8, 9)),
    "no padding": (Convolution(gaussian(3, 3, 3, 3)), (9, 8)),
    "too much padding": (Convolution(gaussian(3, 3, 3, 3), padding=4), (6, 7)),
    "stride": (Convolution(gaussian(6, 3, 3, 3), 2, 1), (13, 12)),
    "stride as the kernel": (Convolution(gaussian(6, 3, 3, 2), (2, 2), 1), (9, 9)),
    "dilation": (Convolution(gaussian(3, 3, 3, 3), padding=2, dilation=2), (11, 10)),
    "stride and dilation": (Convolution(gaussian(3, 3, 3, 3), 2, 3, dilation=2), (15, 16)),
    "stride and dilation without a common factor": (Convolution(gaussian(3, 3, 3, 3), 3, 3, dilation=2), (17, 16)),
    "dilation and many residues": (Convolution(gaussian(2, 2, 2, 3), padding=4, dilation=(5, 4)), (7, 11)),
    "transposed": (Convolution(gaussian(3, 4, 4, 4), 2, 1, transposed=True), (7, 6)),
    "one axis": (Convolution(gaussian(4, 5, 5), padding=2), (23,)),
    "three axes": (Convolution(gaussian(2, 2, 2, 3, 3), padding=1), (5, 6, 5)),
    "an axis with one tap": (Convolution(gaussian(3, 4, 1, 3), padding=(0, 1)), (5, 14)),
    "smooth": (
        Convolution(torch.ones(2, 2, 3, 3, dtype=torch.float64) + 0.1 * gaussian(2, 2, 3, 3), padding=1),
        (9, 9),
    ),
}


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("tol", [1e-1, 1e-3, 1e-7])
def test_the_bound_is_just_above_the_norm(name, tol):
    layer, truth = embedded_layer(*ZOO[name])
    upper = layer.bound(truth * (1 - tol / 10), tol)
    assert truth * (1 - 50 * EPS) <= upper <= truth * (1 + tol)


@pytest.mark.parametrize("name", ZOO)
def test_a_level_below_the_norm_is_never_proved(name):
    layer, truth = embedded_layer(*ZOO[name])
    for gap in (1e-1, 1e-3, 1e-6):
        try:
            upper = layer.bound(truth * (1 - gap), gap / 4)
        except TooLowError:
            continue
        assert upper >= truth * (1 - 50 * EPS)


def test_vectors_are_needed():
    """Without them the circulant alone would do, and this file would test nothing."""
    for name in ("square", "few inputs", "few outputs", "stride", "dilation", "transposed", "three axes", "one axis"):
        layer, truth = embedded_layer(*ZOO[name])
        assert math.isfinite(layer.bound(truth, 1e-4)), name
        assert layer.count > 0, name


@given(layers(), st.sampled_from([1e-1, 1e-3, 1e-6]))
def test_drawn_layers(case, tol):
    layer, size = case
    assume(layer.padding_mode == "zeros")
    norm = dense_norm(layer, size).item()
    assume(norm > 1e-6)
    lifted = LiftedLayer.of(layer, layer_axes(layer, size))
    uppers = []
    for group in range(len(lifted.kernels)):
        try:
            proof = Parts(lifted, group)
        except OutOfBudgetError:  # not made for it
            return
        uppers.append(proof.bound(norm / 2.0**lifted.exponent * (1 - tol / 10), tol))
    upper = max(uppers) * 2.0**lifted.exponent
    assert norm * (1 - 50 * EPS) <= upper
    assert upper <= norm * (1 + 1.1 * tol)


class TestWhatMustNotBeAccepted:
    """Each step of the proof taken out, or given something wrong, for a norm that is far below the circulant's."""

    @pytest.fixture
    def layer(self):
        found, truth = embedded_layer(Convolution(gaussian(3, 3, 3, 3, seed=5), padding=1), (5, 5))
        return found.layers[0], truth

    def level_and_vectors(self, layer, truth, tol=1e-2):
        level = truth * (1 + tol)
        found = layer._above(level, layer._failing(level))
        times = layer._grid.multiplicity(torch.device("cpu")).tolist()
        layer.count = sum(int(times[index]) * len(values) for index, (values, _) in found.items())
        return level, *layer._vectors(level, found, tol)

    def test_vectors_as_they_are_prove_it(self, layer):
        found, truth = layer
        level, x, y = self.level_and_vectors(found, truth)
        assert level <= found._verify(level, x, y, 1e-2) <= level * (1 + 1e-2)

    @pytest.mark.parametrize("below", [1e-3, 1e-2])
    def test_what_residuals_add_is_in_the_bound(self, layer, below):
        """Vectors for a level above the norm, at one below it: whatever is proved must be above the norm again."""
        found, truth = layer
        _, x, y = self.level_and_vectors(found, truth)
        level = truth * (1 - below)
        assert len(found._failing(truth * 1.01)) == len(found._failing(level))
        upper = found._verify(level, x, y, 4.0)
        assert truth * (1 - 50 * EPS) <= upper < 3 * truth

    def test_waves_that_were_not_solved_for_prove_nothing(self, layer, monkeypatch):
        found, truth = layer
        monkeypatch.setattr("gramcert.certified.deflation.MOST_STEPS", 0)
        level, x, y = self.level_and_vectors(found, truth)
        assert found._verify(level, x, y, 1e-3) == math.inf

    def test_vectors_on_which_the_form_is_positive_prove_nothing(self, layer):
        found, truth = layer
        level, x, y = self.level_and_vectors(found, truth)
        assert found._verify(level, x, -y, 1e-2) == math.inf
        assert found._verify(level, torch.zeros_like(x), torch.zeros_like(y), 1e-2) == math.inf

    def test_dependent_vectors_prove_nothing(self, layer):
        found, truth = layer
        level, x, y = self.level_and_vectors(found, truth)
        x[..., 0], y[..., 0] = x[..., 1], y[..., 1]
        assert found._verify(level, x, y, 1e-2) == math.inf

    def test_a_singular_value_that_was_overlooked_is_found(self, layer):
        found, truth = layer
        level = truth * 1.01
        pairs = found._failing(level)
        assert len(pairs) > 0
        index, (values, vectors) = next(iter(pairs.items()))
        pairs[index] = values[:-1], vectors[:, :-1]
        assert found._above(level, pairs) is None

    def test_too_few_vectors_are_noticed(self, layer, monkeypatch):
        found, truth = layer
        waves = Deflation.waves
        monkeypatch.setattr(Deflation, "waves", lambda self, *arguments: waves(self, *arguments)[..., :1])
        assert found.bound(truth, 1e-2) == math.inf

    def test_a_circle_that_is_too_small_is_noticed(self, monkeypatch):
        layer = Convolution(gaussian(2, 2, 3, 3), padding=1)
        circle = embedding._circle

        def smaller(axis):
            found = circle(axis)
            return type(found)(found.size - 1, found.outputs - 1, *list(vars(found).values())[2:])

        monkeypatch.setattr(embedding, "_circle", smaller)
        with pytest.raises(ArithmeticError, match="does not contain"):
            Embedding.of(layer_axes(layer, (6, 6)))


@given(st.integers(0, 2**31), st.sampled_from([-8, -2, -1, 0, 1, 2, 8, 10**4, 10**12]))
def test_what_is_proved_of_vectors_holds_in_rational_numbers(seed, units):
    """R*R <= ηN, at levels where N is about 0, so that nothing but the error terms decides."""
    kernel = gaussian(1, 1, 3, seed=seed)
    lifted = LiftedLayer.of(Convolution(kernel, padding=1), layer_axes(Convolution(kernel, padding=1), (4,)))
    layer = Parts(lifted, 0).layers[0]
    matrix = dense_matrix(lifted.kernels[0], layer.embedding.axes)
    right, left = torch.linalg.svd(matrix)[2][0], torch.linalg.svd(matrix)[0][:, 0]
    noise = 0.1 * gaussian(2, len(right), seed=seed)
    x, y = right + noise[0], left + noise[1]
    level = float(2 * (y @ matrix @ x) / (x @ x + y @ y) * (1 - units * EPS))
    assume(level > 0)
    found = layer._verify(level, x.reshape(1, 1, -1, 1), y.reshape(1, 1, -1, 1), 1e30)
    if found == math.inf:
        assert units < 10**12
        return
    x, y = ([Fraction(v) for v in side.tolist()] for side in (x, y))
    level, found = Fraction(level), Fraction(found)
    rows = [[Fraction(v) for v in row] for row in matrix.tolist()]
    image = [sum(a * b for a, b in zip(row, x, strict=True)) for row in rows]
    back = [sum(a * b for a, b in zip(column, y, strict=True)) for column in zip(*rows, strict=True)]
    negative = sum(2 * a * b - level * b * b for a, b in zip(image, y, strict=True)) - level * sum(v * v for v in x)
    inside = [(level * a - b) for a, b in zip(x, back, strict=True)][layer.embedding.inputs[0]]
    inside += [(level * a - b) for a, b in zip(y, image, strict=True)][layer.embedding.outputs[0]]
    assert negative > 0
    assert sum(v * v for v in inside) <= (found - level) * negative


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Convolution(gaussian(2, 2, 3, 3), 4), "not made for stride 4 with 3 taps"),
        (Convolution(gaussian(2, 2, 3, 3), padding=3000, dilation=3000), "up to 1024 places"),
        (Convolution(gaussian(2, 2, 3, 3), padding=1, padding_mode="reflect"), "made for zero padding"),
    ],
)
def test_what_it_is_not_made_for(layer, reason):
    with pytest.raises(OutOfBudgetError, match=reason):
        embeddings(layer_axes(layer, (12, 12)), work())


def test_memory_is_limited():
    layer = Convolution(gaussian(8, 8, 3, 3), padding=1)
    lifted = LiftedLayer.of(layer, layer_axes(layer, (20, 20)))
    truth = spectral_norm(layer, 20, tol=1e-6).lower / 2.0**lifted.exponent
    few = Work(2**19, None)
    with pytest.raises(OutOfBudgetError, match="circulant but for a few vectors: needs"):
        Parts(lifted, 0, few).bound(truth, 1e-4)


def test_wide_layers_are_proved_by_it():
    layer = Convolution(gaussian(32, 32, 3, 3).float(), padding=1)
    norm = spectral_norm(layer, 20, tol=1e-3)
    assert norm.tol_reached
    assert norm.method == EMBEDDED
    assert "vectors" in norm.explain()


def test_groups_are_proved_one_by_one(monkeypatch):
    monkeypatch.setattr(one_size, "SMALL_ORDER", 0)
    monkeypatch.setattr(one_size, "QUICK_BAND", 0.0)
    kernel = gaussian(8, 2, 3, 3)
    kernel[2:4] *= 1.5
    layer = Convolution(kernel, padding=1, groups=4)
    truth = dense_norm(layer, (9, 9)).item()
    norm = spectral_norm(layer, 9, tol=1e-4)
    assert norm.method == EMBEDDED
    assert truth * (1 - 50 * EPS) <= norm.upper <= truth * (1 + 2e-4)


def test_a_lower_bound_that_is_too_low_is_raised(monkeypatch):
    """Lanczos iteration that stopped too early goes on where the proof shows that there is more."""
    monkeypatch.setattr(one_size, "SMALL_ORDER", 0)
    monkeypatch.setattr(one_size, "QUICK_BAND", 0.0)
    lanczos, calls = one_size.OneSize._lanczos, []

    def early(self):
        calls.append(None)
        return "" if len(calls) == 1 else lanczos(self)

    monkeypatch.setattr(one_size.OneSize, "_lanczos", early)
    layer = Convolution(gaussian(4, 4, 3, 3), padding=1)
    norm = spectral_norm(layer, 8, tol=1e-4)
    assert norm.tol_reached
    assert len(calls) > 1
    assert norm.lower <= dense_norm(layer, (8, 8)).item() * (1 + 50 * EPS) <= norm.upper * (1 + 100 * EPS)


@pytest.mark.parametrize("norm", [0.0, 1e-310, 1e-3])
def test_norms_that_are_told_far_too_low_are_not_proved(norm):
    layer = Convolution(gaussian(3, 2, 3, 3), padding=1, dilation=(2, 3))
    assert not proves_below(layer, layer_axes(layer, (8, 9)), norm, work())


def test_layers_that_read_nothing_have_any_norm():
    layer = Convolution(torch.zeros(3, 2, 3, 3), padding=1)
    assert proves_below(layer, layer_axes(layer, (8, 9)), 0.0, work())
