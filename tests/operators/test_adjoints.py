"""Adjoints of linear maps: ⟨Ax, y⟩ = ⟨x, Aᵀy⟩ to the last bit, and their rounding against exact numbers."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import MODES, layers
from certification.exact import convolved, fractions, is_within
from gramcert.geometry.padding import pad
from gramcert.minorants.quick import Quick, there_and_back
from gramcert.operators.linear import LinearMap, Move, Scale, Shift
from gramcert.operators.matrices import AxisMatrix, Convolve

EPS = torch.finfo(torch.float64).eps

# Everything that tests below draw from; a new class of maps has to be added to them.
CLASSES = {Move, Scale, Shift, AxisMatrix, Convolve}


def integers(*shape):
    """Small ones: all sums of products are exact."""
    return torch.randint(-4, 5, shape).double()


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64) * 10.0 ** torch.randint(-3, 4, shape)


@st.composite
def moves(draw):
    """Reshapes, slices, padding of every mode, repeated and shuffled entries."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    shape = (draw(st.integers(1, 2)), draw(st.integers(2, 4)), draw(st.integers(2, 4)))
    places = torch.arange(1, math.prod(shape) + 1).reshape(shape)
    kind = draw(st.sampled_from(["view", "turned", "cut", "padded", "repeated", "any", "nothing"]))
    if kind == "padded":
        mode = draw(st.sampled_from(MODES))
        places = pad(places, ((draw(st.integers(0, 1)), 1), (1, draw(st.integers(0, 1)))), mode)
    changes = {
        "view": lambda x: x.flatten(),
        "turned": lambda x: x.transpose(0, 2).flip(1),
        "cut": lambda x: x[:, 1:, ::2],
        "padded": lambda x: x,
        "repeated": lambda x: x.repeat(2, 1, 3),
        "any": lambda x: x.flatten()[torch.randint(0, x.numel(), (3, 5))] * torch.randint(0, 2, (3, 5)),
        "nothing": lambda x: torch.zeros_like(x),
    }
    return Move(shape, changes[kind](places).contiguous())


@st.composite
def maps(draw, numbers, is_single=False):
    """Of every class, with entries from ``numbers``; batches of transposed layers unless ``is_single``."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    kind = draw(st.sampled_from(["move", "scale", "shift", "matrix", "convolution", "batch of convolutions"]))
    shape = tuple(draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 3))))
    if kind == "move":
        return draw(moves())
    if kind == "scale":
        return Scale(shape, numbers(*shape) if draw(st.booleans()) else numbers(shape[-1]))
    if kind == "shift":
        return Shift(shape, torch.ones((), dtype=torch.float64), 0.0, numbers(*shape))
    if kind == "matrix":
        axis = draw(st.integers(0, len(shape) - 1))
        return AxisMatrix(shape, numbers(draw(st.integers(1, 5)), shape[axis]), axis)
    layer, sizes = draw(layers())
    layer = layer.with_kernel(numbers(*layer.kernel.shape))
    is_batch = "batch" in kind and not (layer.transposed and is_single)
    return Convolve((*((2,) if is_batch else ()), layer.in_channels, *sizes), layer)


def test_every_class_is_drawn():
    def below(kind):
        return {kind, *(found for part in kind.__subclasses__() for found in below(part))}

    ours = {kind for kind in below(LinearMap) if kind.__module__.startswith("gramcert.")}
    assert ours - {LinearMap} == CLASSES


@settings(max_examples=2 * settings.default.max_examples)
@given(maps(integers))
def test_products_are_the_same_on_both_sides(linear):
    """In integers nothing is rounded. A shift is the identity, as differences of values see it."""
    x, y = integers(3, *linear.source), integers(2, *linear.target)
    image = x if isinstance(linear, Shift) else linear.apply(x)
    back = linear.adjoint(y)
    assert tuple(back.shape) == (2, *linear.source)
    assert tuple(image.shape) == (3, *linear.target)
    assert torch.equal(image.flatten(1) @ y.flatten(1).T, x.flatten(1) @ back.flatten(1).T)


@given(maps(integers, is_single=True))
def test_adjoints_are_transposed_matrices(linear):
    y = integers(2, *linear.target)
    assert torch.equal(linear.adjoint(y).flatten(1), y.flatten(1) @ linear.dense())


@settings(max_examples=max(8, settings.default.max_examples // 2))
@given(maps(integers))
def test_quick_maps_are_the_same(linear):
    """Integers are exact in float32, too, but for routines that take other ways than sums of products."""
    quick = Quick.of(linear)
    x, y = integers(2, *linear.source), integers(2, *linear.target)
    unit = 64 * torch.finfo(torch.float32).eps
    image = x if isinstance(linear, Shift) else linear.apply(x)
    for found, truth in ((quick.apply(x.float()), image), (quick.adjoint(y.float()), linear.adjoint(y))):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), truth, rtol=0, atol=unit * (1 + float(truth.abs().max())))
    whole = there_and_back([quick, Quick.of(Scale(linear.target, torch.tensor(2.0)))], x.float())
    assert torch.equal(whole[1], quick.adjoint(4 * quick.apply(x.float())))


def exact_rows(linear):
    """The matrix of a map in exact numbers, from the definition of the layer and not from its adjoint."""
    if isinstance(linear, Convolve):
        axes = linear.layer.axes
        single = linear.source[-axes - 1 :]
        units = fractions(torch.eye(math.prod(single))).reshape(-1, *single)
        block = np.stack([convolved(linear.layer, unit).reshape(-1) for unit in units], axis=1)
        count = math.prod(linear.source[: -axes - 1])
        rows, columns = block.shape
        whole = np.full((count * rows, count * columns), Fraction(0), dtype=object)
        for place in range(count):
            whole[place * rows : (place + 1) * rows, place * columns : (place + 1) * columns] = block
        return whole
    return fractions(linear.dense())  # one number of the map, or none, in each place


@settings(max_examples=max(8, settings.default.max_examples // 2))
@given(maps(random))
def test_rounding_of_adjoints(linear):
    """Within the bound of each sample, which is as small as rounding is."""
    y = random(2, *linear.target)
    found, bound = linear.pull(y)
    matrix = exact_rows(linear)
    truth = [(fractions(row).reshape(-1) @ matrix).reshape(linear.source) for row in y]
    assert is_within(found, truth, bound)
    length = y.flatten(1).norm(dim=1)
    assert bool((bound <= 4 * linear.terms * EPS * (1 + linear.size) * length + 1e-290).all())


def test_the_bound_of_an_adjoint_is_needed():
    """Adjoints of random matrices and layers are rounded, so a bound of zero is wrong."""
    torch.manual_seed(0)
    linear = AxisMatrix((7,), random(9, 7), 0)
    y = random(20, 9)
    found, bound = linear.pull(y)
    truth = [fractions(row) @ fractions(linear.matrix) for row in y]
    assert is_within(found, truth, bound)
    assert not is_within(found, truth, torch.zeros(20))


@pytest.mark.parametrize(
    "linear",
    [
        AxisMatrix((3,), torch.eye(3, dtype=torch.float64), 0, 0.125),
        Scale((3,), torch.ones(3, dtype=torch.float64), 0.125),
    ],
    ids=["matrix", "scale"],
)
def test_what_a_map_is_off_by_is_in_the_bound(linear):
    """The true map may be any within the distance, such as 9/8 of it."""
    y = random(4, 3)
    found, bound = linear.pull(y)
    assert is_within(found, [Fraction(9, 8) * fractions(row) for row in y], bound)
    assert not is_within(found, [Fraction(5, 4) * fractions(row) for row in y], bound)


def test_nothing_is_rounded_where_entries_only_move():
    moved = Move((2, 3), torch.tensor([[3, 0], [1, 6]]))
    assert not moved.pull(random(5, 2, 2))[1].any()
    twice = Move((2,), torch.tensor([1, 1, 2]))
    assert bool((twice.pull(random(5, 3))[1] > 0).all())
    signs = Scale((3,), torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64))
    assert not signs.pull(random(5, 3))[1].any()
