"""Composed maps against products of dense matrices, over geometry that Hypothesis draws."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gramcert
from auditing_networks import random_batch_norm
from gramcert import Convolution
from gramcert.operators.composition import Stage, compose, composed
from gramcert.operators.linear import Move, Scale, composed_error
from gramcert.operators.matrices import AxisMatrix, Convolve
from gramcert.operators.measurement import Norm
from gramcert.operators.windows import average_matrix
from reference import sigma

EPS = torch.finfo(torch.float64).eps


@st.composite
def convolutions(draw, source):
    """A convolution of tensors (1, channels, height, width)."""
    groups = draw(st.sampled_from([g for g in (1, 2, 3) if source[1] % g == 0]))
    transposed = draw(st.booleans())
    taps = draw(st.lists(st.integers(1, 3), min_size=2, max_size=2))
    outputs = groups * draw(st.integers(1, 3))
    mode = "zeros" if transposed else draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"]))
    shape = (source[1], outputs // groups, *taps) if transposed else (outputs, source[1] // groups, *taps)
    pads = [
        draw(st.integers(0, min(2, n - 1, k - 1) if transposed else min(2, n - 1)))
        for n, k in zip(source[2:], taps, strict=True)
    ]
    kernel = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    strides = draw(st.lists(st.integers(1, 2), min_size=2, max_size=2))
    dilation = draw(st.integers(1, 2))
    layer = Convolution(kernel, strides, pads, mode, dilation, groups, transposed)
    try:
        return Convolve(source, layer)
    except ValueError:  # it does not fit
        return (
            Convolve(source, Convolution(kernel, 1, 0, "zeros", 1, groups, transposed)) if min(source[2:]) > 2 else None
        )


@st.composite
def maps(draw, source):
    """Any linear map of tensors (1, channels, height, width)."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    kind = draw(st.sampled_from(["convolution", "convolution", "channels", "places", "pad", "flip", "matrix", "pool"]))
    if kind == "convolution":
        found = draw(convolutions(source))
        if found is not None:
            return found
    if kind == "channels":
        return Scale(source, torch.randn(source[1], 1, 1, dtype=torch.float64, generator=generator))
    if kind == "places":
        return Scale(source, torch.randn(source[2:], dtype=torch.float64, generator=generator))
    places = torch.arange(1, math.prod(source) + 1).reshape(source)
    if kind == "pad":
        return Move(source, torch.nn.functional.pad(places, (1, 0, 2, 1)), ("zeros", ((2, 1), (1, 0))), "zeros padding")
    if kind == "matrix":
        axis = draw(st.integers(1, 3))
        matrix = torch.randn(draw(st.integers(1, 3)), source[axis], dtype=torch.float64, generator=generator)
        return AxisMatrix(source, matrix, axis)
    if kind == "pool":
        window = average_matrix(source[2], min(2, source[2]), 2, 0, 0, round_up=True, count_padding=True)
        return AxisMatrix(source, window, 2, 0.0, "average pool")
    return Move(source, places.flip(2))


@st.composite
def chains(draw):
    source = (1, draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    chain = []
    for _ in range(draw(st.integers(2, 4))):
        chain.append(draw(maps(source)))
        source = chain[-1].target
    return chain


@given(chains())
def test_a_composition_is_the_product(chain):
    whole = chain[0].dense()
    for part in chain[1:]:
        whole = part.dense() @ whole
    stages = composed([Stage(part, (str(number),)) for number, part in enumerate(chain)])
    assert tuple(name for stage in stages for name in stage.nodes) == tuple(
        str(number) for number, part in enumerate(chain) if any(str(number) in stage.nodes for stage in stages)
    )
    product, scale = torch.eye(whole.shape[1], dtype=torch.float64), 1.0
    for stage in stages:
        product = stage.map.dense() @ product
        scale *= max(1.0, stage.map.size)
    assert float(sigma(product - whole)) <= 5e3 * EPS * max(scale, float(sigma(whole)), 1e-300)
    bound = 1.0
    for stage in stages:
        bound *= Norm(stage.map).run(1e-3).upper
    assert float(sigma(whole)) <= bound * (1 + 5e3 * EPS)


@given(chains())
def test_neighbours_that_can_be_composed_are_one_map(chain):
    for first, second in itertools.pairwise(chain):
        merged = compose(first, second)
        if merged is None:
            continue
        truth = second.dense() @ first.dense()
        assert merged.source == first.source
        assert merged.target == second.target
        assert float(sigma(merged.dense() - truth)) <= merged.error + 500 * EPS * first.size * second.size
        found = Norm(merged).run(1e-3)
        norm, doubt = float(sigma(truth)), 5e3 * EPS * first.size * second.size + 1e-300
        assert norm * (1 - 5e3 * EPS) - 1e-300 <= found.upper <= norm * (1 + 1.1e-3) + 2 * merged.error + doubt
        assert found.lower <= norm * (1 + 5e3 * EPS) + 1e-300


@given(st.integers(0, 10**6))
def test_the_error_of_a_composition_holds_exactly(seed):
    """Against rational arithmetic: in the Frobenius norm, which is above the operator norm that is bounded."""
    generator = torch.Generator().manual_seed(seed)
    one, two = (torch.randn(2, 2, dtype=torch.float64, generator=generator) for _ in range(2))
    two = two * 10.0 ** torch.randint(-20, 20, (2, 2), generator=generator)
    first, second = AxisMatrix((2,), one, 0), AxisMatrix((2,), two, 0)
    merged = compose(first, second)
    exact = [
        [sum(Fraction(float(two[i, k])) * Fraction(float(one[k, j])) for k in range(2)) for j in range(2)]
        for i in range(2)
    ]
    distance = sum((exact[i][j] - Fraction(float(merged.matrix[i, j]))) ** 2 for i in range(2) for j in range(2))
    assert distance <= Fraction(merged.error) ** 2
    assert merged.error <= composed_error(first, second, 2)


def test_digests_tell_maps_apart():
    source = (1, 2, 4, 4)
    kernel = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    same = [Convolve(source, Convolution(kernel.clone(), padding=1)).digest for _ in range(2)]
    others = [
        Convolve(source, Convolution(kernel, padding=1, padding_mode="circular")).digest,
        Convolve(source, Convolution(kernel + 2.0**-50, padding=1)).digest,
        Convolve((1, 2, 5, 4), Convolution(kernel, padding=1)).digest,
        Convolve(source, Convolution(kernel, padding=1), 1e-9).digest,
    ]
    assert same[0] == same[1]
    assert len({same[0], *others}) == 5


@pytest.mark.parametrize("matrix", [torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 3.0]]), torch.eye(3)[:, :2]])
def test_rows_or_columns_that_share_no_place_have_a_norm_in_closed_form(matrix):
    linear = AxisMatrix((matrix.shape[1],), matrix.double(), 0)
    found = Norm(linear).run(1e-3)
    assert Norm(linear).is_instant
    assert found.lower <= float(sigma(matrix.double())) <= found.upper
    assert found.upper - found.lower <= 50 * EPS * found.upper


def test_batch_normalisation_is_folded_into_the_convolution():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), random_batch_norm(4)).eval()
    found = gramcert.audit(layers, (3, 8, 8))
    apart = gramcert.spectral_norm(layers[0], 8).lower * float(
        (layers[1].weight.detach() / (layers[1].running_var + 1e-5).sqrt()).abs().max()
    )
    assert [row.name for row in found.rows] == ["0 + 1"]
    assert found.upper < 0.95 * apart
