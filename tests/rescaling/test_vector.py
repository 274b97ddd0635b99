import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import layers
from gramcert import Convolution, lipschitz_bound, sampling_factor
from gramcert.geometry import symbol as symbols
from gramcert.nn import SRConv2d
from gramcert.rescaling import frequency as frequency_form
from gramcert.rescaling import rescaling_vector
from gramcert.rescaling import spatial as spatial_form
from reference import dense_norm, literal_rescaling, sigma

FORMS = ("spatial", "frequency")
TINY = 100 * torch.finfo(torch.float64).eps


def scaled(layer, factors, side):
    """The layer with the channels of one side multiplied by factors."""
    grouped = layer.kernel.reshape(layer.groups, -1, *layer.kernel.shape[1:])
    shape = (1, -1) if (side == "input") != layer.transposed else (-1, 1)
    kernel = grouped * factors.reshape(layer.groups, *shape, *(1,) * layer.axes)
    return layer.with_kernel(kernel.reshape(layer.kernel.shape))


@given(layers(), st.integers(1, 4), st.sampled_from(["input", "output"]), st.integers(0, 2**31))
def test_any_geometry_is_inside_with_any_q(case, iterations, side, seed):
    layer, size = case
    channels = layer.in_channels if side == "input" else layer.out_channels
    generator = torch.Generator().manual_seed(seed)
    q = None if seed % 2 else 0.2 + torch.rand(channels, generator=generator, dtype=torch.float64)
    options = {"q": q, "side": side}
    for form in FORMS:
        for at in (None, size):
            factors = rescaling_vector(layer, iterations, form=form, input_size=at, **options)
            assert dense_norm(scaled(layer, factors, side), size) <= 1 + TINY
    # At the same size the frequencies' row sums are never above the spatial ones.
    spatial, frequency = (rescaling_vector(layer, iterations, form=f, input_size=size, **options) for f in FORMS)
    assert (frequency >= spatial * (1 - TINY)).all()
    # Nor on the grid for every size, but for its factor.
    spatial, frequency = (rescaling_vector(layer, iterations, form=f, **options) for f in FORMS)
    taps = [
        -(-k // (s // math.gcd(s, d))) for k, s, d in zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
    ]
    factor = sampling_factor(taps, [max(1, 8 * (k - 1)) for k in taps])
    assert (frequency * factor >= spatial * (1 - TINY)).all()


@pytest.mark.parametrize("iterations", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(4, 5, 3), (3, 2, 3, 2), (2, 3, 2, 1, 3)])
def test_spatial_form_is_the_paper_line_by_line(shape, iterations):
    torch.manual_seed(0)
    kernel = torch.randn(shape, dtype=torch.float64)
    found = rescaling_vector(Convolution(kernel), iterations, side="output")
    torch.testing.assert_close(found, 1 / literal_rescaling(kernel, iterations), rtol=TINY, atol=0)


def test_one_iteration_is_almost_orthogonal():
    """R_i = (Σ_{j,x} |Σ_l K_li ⋆ K_lj|[x])^(-1/2), from the formula itself."""
    torch.manual_seed(0)
    kernel = torch.randn(3, 4, 2, 3, dtype=torch.float64)
    sums = torch.zeros(4, dtype=torch.float64)
    for i in range(4):
        for j in range(4):
            for x in range(-1, 2):
                for y in range(-2, 3):
                    lag = sum(
                        float(kernel[:, i, a, b] @ kernel[:, j, a + x, b + y])
                        for a in range(2)
                        for b in range(3)
                        if 0 <= a + x < 2 and 0 <= b + y < 3
                    )
                    sums[i] += abs(lag)
    torch.testing.assert_close(rescaling_vector(Convolution(kernel), 1), sums**-0.5, rtol=TINY, atol=0)


@pytest.mark.parametrize("shape", [(5, 3), (3, 7), (4, 4)])
def test_matrices_follow_the_formula(shape):
    torch.manual_seed(1)
    matrix = torch.randn(shape, dtype=torch.float64)
    q = torch.rand(shape[1], dtype=torch.float64) + 0.5
    for t in (1, 2, 3, 6):
        power = torch.linalg.matrix_power(matrix.T @ matrix, 2 ** (t - 1)).abs()
        expected = (power @ q / q) ** -(2.0**-t)
        torch.testing.assert_close(rescaling_vector(matrix, t, q=q), expected, rtol=TINY, atol=0)


def test_norm_tends_to_one_and_stays_below():
    torch.manual_seed(0)
    matrix = torch.randn(12, 9, dtype=torch.float64)
    kernel = Convolution(torch.randn(3, 3, 3, dtype=torch.float64), padding=1, padding_mode="circular")
    for t in (1, 2, 3, 5, 8, 12):
        norm = sigma(matrix * rescaling_vector(matrix, t))
        assert norm <= 1 + TINY
        if t >= 8:
            assert norm > 1 - 2.0 ** (4 - t)
    for t in (6, 8):
        factors = rescaling_vector(kernel, t, form="frequency", input_size=16)
        assert 1 - 2.0 ** (3 - t) < dense_norm(scaled(kernel, factors, "input"), 16) <= 1 + TINY


def test_many_iterations_of_tall_matrices():
    factors = rescaling_vector(torch.ones(64, 256), 14)
    torch.testing.assert_close(factors, torch.full((256,), (64 * 256) ** -0.5))


@pytest.mark.parametrize("form", FORMS)
def test_frequency_form_is_tighter(form):
    """Mean factors at random initialisation, 32 channels, t = 1: far above AOL's."""
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(32, 32, 3, padding=1, bias=False)
    torch.nn.init.normal_(layer.weight)
    almost_orthogonal = rescaling_vector(layer, 1).mean()
    assert rescaling_vector(layer, 1, form="frequency").mean() > 1.4 * almost_orthogonal
    assert rescaling_vector(layer, 2, form="frequency").mean() > rescaling_vector(layer, 3).mean()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_channels_get_zero(form, dtype):
    kernel = torch.randn(3, 4, 3, 3, dtype=dtype)
    kernel[:, 1] = 0
    factors = rescaling_vector(Convolution(kernel), 3, form=form)
    assert factors[1] == 0
    assert (factors[[0, 2, 3]] > 0).all()
    assert (rescaling_vector(Convolution(torch.zeros(2, 3, 3, dtype=dtype)), form=form) == 0).all()
    weight = kernel.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(rescaling_vector(Convolution(weight), form=form).sum(), weight)
    assert torch.isfinite(gradient).all()
    zero = torch.zeros(2, 3, 3, dtype=dtype, requires_grad=True)
    (first,) = torch.autograd.grad(rescaling_vector(Convolution(zero), form=form).sum(), zero, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), zero)
    assert not first.any()
    assert torch.isfinite(second).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e30])
def test_scales_do_not_overflow(form, scale):
    """R of s·W is R/s, also in float32 and for many iterations."""
    torch.manual_seed(0)
    kernel = torch.randn(4, 3, 3)
    for t in (1, 3, 6):
        small = rescaling_vector(Convolution(kernel * scale), t, form=form)
        torch.testing.assert_close(
            small * scale, rescaling_vector(Convolution(kernel), t, form=form), rtol=1e-5, atol=0
        )


@pytest.mark.parametrize("form", FORMS)
def test_rows_far_below_the_others_are_sound_and_have_gradients(form):
    """Channels that meet no other, of very different sizes: sums below the smallest are taken for it."""
    for dtype in (torch.float32, torch.float64):
        kernel = torch.diag(torch.tensor([1.0, 1e-8, 1e-16], dtype=dtype))[:, :, None].repeat(1, 1, 2)
        kernel.requires_grad_()
        for t in (1, 3, 6):
            factors = rescaling_vector(Convolution(kernel), t, form=form)
            assert torch.isfinite(factors).all()
            assert (factors > 0).all()
            assert (kernel.diagonal()[0] * factors <= 0.5 + 100 * torch.finfo(dtype).eps).all()
            (gradient,) = torch.autograd.grad((kernel * factors[:, None]).sum(), kernel)
            assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(("iterations", "size"), [(4, 0.05), (5, 0.2), (6, 0.45)])
@pytest.mark.parametrize("form", ["spatial", "frequency"])
def test_channels_that_never_meet(form, iterations, size):
    """A low and a high pass: where the one is large the other's share is far below rounding, and was dropped."""
    low, high = torch.tensor([1.0, 2.0, 1.0]) / 4, torch.tensor([1.0, -2.0, 1.0]) / 4
    layer = SRConv2d(2, 2, 3, padding=1, iterations=iterations, form=form)
    weight = torch.zeros(2, 2, 3, 3)
    weight[0, 0], weight[1, 1] = torch.outer(low, low), size * torch.outer(high, high)
    layer.weight = weight
    assert 0.97 <= lipschitz_bound(layer) <= 1 + 100 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(("iterations", "size"), [(5, 0.03), (6, 0.1), (7, 0.3)])
def test_gradients_of_channels_that_never_meet(iterations, size):
    kernel = torch.zeros(2, 2, 3, dtype=torch.float64)
    kernel[0, 0], kernel[1, 1] = torch.tensor([1.0, 2.0, 1.0]) / 4, size * torch.tensor([1.0, -2.1, 1.0]) / 4

    def factor(value):
        mask = torch.zeros_like(kernel)
        mask[1, 1, 1] = 1
        weight = torch.where(mask > 0, value, kernel)
        return rescaling_vector(Convolution(weight), iterations, form="frequency")[1]

    value = kernel[1, 1, 1].clone().requires_grad_()
    step = 1e-6 * abs(float(kernel[1, 1, 1]))
    slope = float(factor(value.detach() + step) - factor(value.detach() - step)) / (2 * step)
    (gradient,) = torch.autograd.grad(factor(value), value)
    assert float(gradient) == pytest.approx(slope, rel=1e-4)
    assert abs(slope) > 1


GRADIENT_LAYERS = {
    "plain": lambda k: Convolution(k),
    "strided": lambda k: Convolution(k, stride=2, padding=1),
    "groups": lambda k: Convolution(k, groups=2),
    "transposed": lambda k: Convolution(k, stride=2, transposed=True, groups=2),
    "replicate": lambda k: Convolution(k, padding=1, padding_mode="replicate"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("iterations", [1, 2, 3, 5])
@pytest.mark.parametrize("geometry", GRADIENT_LAYERS)
def test_gradients(geometry, iterations, form):
    torch.manual_seed(2)
    make = GRADIENT_LAYERS[geometry]
    kernel = torch.randn(4, 2, 2, 3, dtype=torch.float64, requires_grad=True)
    q = (torch.rand(make(kernel).in_channels, dtype=torch.float64) + 0.5).requires_grad_()

    def factors(kernel, q):
        return rescaling_vector(make(kernel), iterations, q=q, form=form)

    assert torch.autograd.gradcheck(factors, (kernel, q))
    if iterations in (1, 3):
        assert torch.autograd.gradgradcheck(factors, (kernel, q))


@pytest.mark.parametrize("shape", [(3, 6), (6, 3)])
def test_gradients_of_matrices(shape):
    torch.manual_seed(3)
    matrix = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for t in (1, 2, 4):
        assert torch.autograd.gradcheck(lambda m, t=t: rescaling_vector(m, t), (matrix,))
        assert torch.autograd.gradgradcheck(lambda m, t=t: rescaling_vector(m, t), (matrix,))


@pytest.mark.parametrize("form", FORMS)
def test_float32_follows_float64(form):
    torch.manual_seed(0)
    kernel = torch.randn(16, 12, 3, 3, dtype=torch.float64)
    results = []
    for dtype in (torch.float64, torch.float32):
        weight = kernel.to(dtype).requires_grad_()
        factors = rescaling_vector(Convolution(weight), 4, form=form)
        (gradient,) = torch.autograd.grad((factors * torch.arange(12)).sum(), weight)
        results.append((factors.detach().double(), gradient.double()))
    (exact, slope), (single, single_slope) = results
    torch.testing.assert_close(single, exact, rtol=1e-6, atol=0)
    assert (single_slope - slope).norm() < 1e-4 * slope.norm()


@pytest.mark.parametrize("iterations", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(3, 5, 4), (6, 4, 3, 2), (7, 3, 3, 3)])
def test_gradients_of_the_frequency_form_go_four_ways(shape, iterations, monkeypatch):
    """No symbols, a matrix per row, the rows of each frequency, all frequencies: with q, groups and several chunks."""
    torch.manual_seed(0)
    kernel = torch.randn(2 * shape[0], *shape[1:], dtype=torch.float64, requires_grad=True)
    q = (0.5 + torch.rand(2 * shape[0], dtype=torch.float64)).requires_grad_()

    def gradients(**options):
        layer = Convolution(kernel, groups=2)
        factors = rescaling_vector(layer, iterations, q=q, form="frequency", side="output")
        return torch.autograd.grad((factors * torch.arange(len(q))).sum(), (kernel, q), **options)

    results = [gradients(), gradients(create_graph=True)]
    monkeypatch.setattr(frequency_form, "MOST_ROWS", {})
    results.append(gradients())
    monkeypatch.setattr(frequency_form, "MOST_ENTRIES", 0)
    monkeypatch.setattr(symbols, "REAL_BYTES", 0)
    results += [gradients(), gradients(create_graph=True)]
    for other in results[1:]:
        for found, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-10, atol=1e-12)


def test_iterates_that_are_not_kept_are_computed_again(monkeypatch):
    torch.manual_seed(0)
    kernel = torch.randn(4, 3, 3, 3, dtype=torch.float64, requires_grad=True)

    def gradient():
        return torch.autograd.grad(rescaling_vector(Convolution(kernel), 4).sum(), kernel)[0]

    kept = gradient()
    monkeypatch.setattr(spatial_form, "KEPT_BYTES", 0)
    torch.testing.assert_close(gradient(), kept)


@pytest.mark.parametrize("form", FORMS)
def test_compiled_as_one_graph(form):
    torch.manual_seed(0)
    kernel = torch.randn(4, 3, 3, requires_grad=True)

    def factors(weight):
        return rescaling_vector(Convolution(weight, stride=2), 3, form=form)

    compiled = torch.compile(factors, fullgraph=True, backend="aot_eager")
    results = [(f(kernel), torch.autograd.grad(f(kernel).sum(), kernel)[0]) for f in (factors, compiled)]
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("form", FORMS)
def test_vmap_and_autocast(form):
    torch.manual_seed(0)
    kernels = torch.randn(3, 4, 2, 3)

    def factors(kernel):
        return rescaling_vector(Convolution(kernel), 3, form=form)

    single = torch.stack([factors(kernel) for kernel in kernels])
    torch.testing.assert_close(torch.vmap(factors)(kernels), single)
    gradients = torch.func.vmap(torch.func.grad(lambda k: factors(k).sum()))(kernels)
    for kernel, gradient in zip(kernels, gradients, strict=True):
        leaf = kernel.clone().requires_grad_()
        torch.testing.assert_close(gradient, torch.autograd.grad(factors(leaf).sum(), leaf)[0])
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(factors(kernels[0]), single[0], rtol=0, atol=0)


def test_half_precision_layers_are_lifted():
    layer = torch.nn.Conv1d(2, 3, 3).bfloat16()
    exact = torch.nn.Conv1d(2, 3, 3)
    exact.load_state_dict({name: value.float() for name, value in layer.state_dict().items()})
    torch.testing.assert_close(rescaling_vector(layer), rescaling_vector(exact), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((torch.ones(2, 2), 0), {}, ValueError, r"rescaling_vector\(iterations=0\): expected at least 1"),
        ((torch.ones(2, 2),), {"form": "x"}, ValueError, r"form='x'\): expected one of spatial, frequency"),
        ((torch.ones(2, 2),), {"side": "x"}, ValueError, r"side='x'\): expected one of input, output"),
        ((torch.ones(2, 2),), {"q": torch.ones(3)}, ValueError, r"q\): expected a tensor of shape \(2,\), got \(3,\)"),
        ((torch.ones(2, 2),), {"q": torch.tensor([1.0, 0.0])}, ValueError, "expected positive weights, got 0.0"),
        ((torch.full((2, 2), torch.nan),), {}, ValueError, "expected finite values, got 4 NaN"),
        ((torch.ones(2, 2, 2),), {}, ValueError, r"expected a matrix with rows and columns, got shape \(2, 2, 2\)"),
        ((torch.nn.ReLU(),), {}, TypeError, "cannot rescale ReLU"),
        ((torch.nn.Conv2d(1, 1, 3),), {"input_size": 2}, ValueError, "the output would be empty"),
        ((torch.nn.Conv2d(512, 1, 3), 7), {}, ValueError, "use fewer iterations or form='frequency'"),
    ],
)
def test_bad_input(arguments, options, error, message):
    with pytest.raises(error, match=message):
        rescaling_vector(*arguments, **options)
