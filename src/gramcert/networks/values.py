"""Values of a network as sums of filters of variables, while its graph is read."""

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from gramcert.networks.filters import Filter
from gramcert.networks.program import Steps
from gramcert.operators.linear import Shape
from gramcert.rounding import absolute_sums, norm_up, root_up, up


@dataclass(frozen=True, eq=False)
class Value:
    """A value as a sum of filters of variables, without its window where ``is_whole`` is false.

    Attributes:
        terms: variable and filter; ``None`` for the variable itself.
        channels: how many.
        sizes: of the window.
        step: distance of its places.
        is_whole: whether the sum is zero outside of the window.
        summed: axes along which it was summed, and the digests of the weights: it stands for their sum at every place.
    """

    terms: tuple[tuple[int, Filter | None], ...]
    channels: int
    sizes: Shape
    step: Steps
    is_whole: bool = True
    summed: tuple[tuple[int, str], ...] = ()

    @classmethod
    def vector(cls, channels: int) -> "Value":
        """Of nothing yet, without axes."""
        return cls((), channels, (), ())

    @classmethod
    def image(cls, shape: Shape, axes: int) -> "Value":
        """Of nothing yet, at every place of a lattice."""
        return cls((), shape[-axes - 1], tuple(shape[-axes:]), (Fraction(1),) * axes)

    @property
    def axes(self) -> int:
        """Number of axes of the lattice."""
        return len(self.step)

    @property
    def is_spread(self) -> bool:
        """Whether it stands for one vector, at every place of the lattice."""
        return bool(self.axes) and len(self.summed) == self.axes

    @property
    def lattice(self) -> tuple[object, ...]:
        """What values that are added have in common."""
        return self.sizes, self.step, self.summed

    @property
    def variables(self) -> list[int]:
        """What it is a sum of."""
        return [v for v, _ in self.terms]

    @property
    def is_vector(self) -> bool:
        """Whether its channels are all that it has."""
        return not self.axes or self.is_spread


class SizedMatrix:
    """What the error of a composition asks of a matrix."""

    def __init__(self, matrix: Tensor, error: float) -> None:
        rows, columns = absolute_sums(matrix)
        self.size, self.error = min(root_up(up(rows * columns)), norm_up(matrix)), error


def are_alike(values: list[Value]) -> bool:
    """Whether they lie on one lattice."""
    return len({value.lattice for value in values}) == 1


def least_torus(found: Filter, inputs: Shape, outputs: Shape) -> Shape:
    """Of the places that a filter reads, so that nothing comes round into a window."""
    if found.is_pointwise:
        return inputs
    if found.adjoint:  # the torus of the outputs, in places of the inputs
        span, larger = found.support(inputs), outputs
    else:
        span, larger = found.reach(inputs, outputs), inputs
    least = tuple(n + max(-low, high - n + 1, 0) for n, (low, high) in zip(larger, span, strict=True))
    if found.adjoint:
        return tuple(max(-(-n // s), m) for n, s, m in zip(least, found.stride, inputs, strict=True))
    return tuple(max(n, m * s) for n, m, s in zip(least, outputs, found.stride, strict=True))


def in_order(values: list[Value]) -> list[Tensor]:
    """The rows of values one after the other."""
    return list(torch.arange(sum(value.channels for value in values)).split([value.channels for value in values]))


def moved_on(value: Value, sizes: Shape) -> Steps:
    """The likely distance of places after pooling, which only has to fit where values meet again."""
    return tuple(
        a * max(1, round(before / after)) for a, before, after in zip(value.step, value.sizes, sizes, strict=True)
    )
