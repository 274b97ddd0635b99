import dataclasses
import itertools
from fractions import Fraction

import numpy as np
import pytest

from gramcert.training.configuration import named
from gramcert.training.schedule import learning_rate

EPS = np.finfo(np.float64).eps

PUBLISHED = named("cifar10-S")


def rates(configuration, steps):
    return np.array([learning_rate(configuration, step, steps) for step in range(steps)])


def exact(configuration, step, steps):
    """On the line between the two points around it, in rationals."""
    share = Fraction(2 * step + 1, 2 * steps)
    places = map(Fraction, (0, *configuration.knots, 1))
    points = zip(places, map(Fraction, (0, configuration.lr, configuration.final_lr, 0)), strict=True)
    (a, low), (b, high) = next(ends for ends in itertools.pairwise(points) if ends[0][0] <= share < ends[1][0])
    return float(low + (high - low) * (share - a) / (b - a))


@pytest.mark.parametrize("steps", [1, 2, 7, 1000])
@pytest.mark.parametrize("knots", [(0.4, 0.8), (0.01, 0.99), (0.3, 0.31)])
@pytest.mark.parametrize(("lr", "final_lr"), [(0.01, 0.0005), (0.01, 0.0), (0.01, 0.1)])
def test_pieces_are_lines(steps, knots, lr, final_lr):
    configuration = dataclasses.replace(PUBLISHED, knots=knots, lr=lr, final_lr=final_lr)
    expected = [exact(configuration, step, steps) for step in range(steps)]
    np.testing.assert_allclose(rates(configuration, steps), expected, rtol=1e-12, atol=1e-16)


def test_rises_to_the_first_knot_falls_to_the_second_and_ends_near_zero():
    found = rates(PUBLISHED, 1000)
    assert (np.diff(found[:400]) > 0).all()
    assert (np.diff(found[400:]) < 0).all()
    assert found[399] < PUBLISHED.lr
    assert found[[399, 400]] == pytest.approx(PUBLISHED.lr, rel=2e-3)
    assert found[[799, 800]] == pytest.approx(PUBLISHED.final_lr, rel=3e-2)
    assert 0 < found[-1] < PUBLISHED.final_lr / 100
    assert found[0] == pytest.approx(PUBLISHED.lr * 0.5 / 400)


def test_a_knot_is_reached_at_a_step_whose_middle_it_is():
    configuration = dataclasses.replace(PUBLISHED, knots=(0.25, 0.75))
    assert learning_rate(configuration, 0, 2) == pytest.approx(configuration.lr)
    assert learning_rate(configuration, 1, 2) == pytest.approx(configuration.final_lr)


def test_equal_knots_are_a_jump():
    configuration = dataclasses.replace(PUBLISHED, knots=(0.5, 0.5))
    found = rates(configuration, 10)
    np.testing.assert_allclose(found[:5], configuration.lr * np.array([0.1, 0.3, 0.5, 0.7, 0.9]))
    np.testing.assert_allclose(found[5:], configuration.final_lr * np.array([0.9, 0.7, 0.5, 0.3, 0.1]))
