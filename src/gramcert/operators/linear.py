r"""Linear maps between tensors of fixed shapes: what all of them have, moving entries, scaling them.

Each holds its numbers in float64 and knows how far, in operator norm, rounding may have moved them from the true map:
``error``. Maps are made by composing others, and if A + ΔA and B + ΔB are composed to C = fl(AB), with sums of n
products,

    ‖C - (A + ΔA)(B + ΔB)‖ <= γ_n·‖|A|‖·‖|B|‖ + ‖ΔA‖·‖B‖ + ‖A‖·‖ΔB‖ + ‖ΔA‖·‖ΔB‖,

for which ``size`` bounds ‖|A|‖, the norm of the map with the absolute values, and with it ‖A‖.
"""

import abc
import functools
import hashlib
import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gramcert.geometry.padding import PaddingMode, Pairs
from gramcert.operators.rounded import Rounded, exactly, flat, norms, rounding
from gramcert.rounding import (
    gamma,
    next_up,
    root_up,
    underflow,
    up,
)

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LinearMap(abc.ABC):
    """From tensors of shape ``source`` to those of shape ``target``."""

    source: Shape

    @property
    @abc.abstractmethod
    def target(self) -> Shape:
        """Shape of the result."""

    @property
    @abc.abstractmethod
    def size(self) -> float:
        """Upper bound of the norm of the map with the absolute values of its numbers."""

    @property
    @abc.abstractmethod
    def terms(self) -> int:
        """At least the number of products that are summed in one entry of the result, or of its adjoint."""

    @abc.abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """The stored map on a batch (samples, *source) in float64, as conventional sums of products."""

    @abc.abstractmethod
    def adjoint(self, y: Tensor) -> Tensor:
        """Its adjoint on a batch (samples, *target), in the same way."""

    def run(self, x: Tensor) -> Rounded:
        """The map on a batch, and a bound of the distance of each sample from what the true map makes of it."""
        return self._rounded(x, self.apply(x))

    def pull(self, y: Tensor) -> Rounded:
        """The same for the adjoint."""
        return self._rounded(y, self.adjoint(y))

    def _rounded(self, x: Tensor, y: Tensor) -> Rounded:
        length = norms(x)
        stored = rounding(self.terms, next_up(length * self.size), y)
        return y, next_up(stored + next_up(length * self.error)) if self.error else stored

    @abc.abstractmethod
    def dense(self) -> Tensor:
        """Its matrix on flattened tensors, float64, within ``dense_error`` of the stored numbers."""

    @property
    def dense_error(self) -> float:
        """How far, in operator norm, the dense matrix is from the stored map."""
        return 0.0

    @property
    @abc.abstractmethod
    def geometry(self) -> str:
        """For people."""

    @property
    def kind(self) -> str:
        """For people."""
        return type(self).__name__.lower()

    @property
    def error(self) -> float:
        """Upper bound of the distance from the true map."""
        return 0.0

    @property
    def is_isometry(self) -> bool:
        """Whether it only gives the entries other places."""
        return False

    @property
    def is_part(self) -> bool:
        """Whether it has at most norm 1 by its nature: no entry occurs twice."""
        return False

    @functools.cached_property
    def digest(self) -> str:
        """What it is, to the last bit; computed once."""
        sha = hashlib.sha256(repr((type(self).__name__, self.source, self.target, self.error)).encode())
        for part in self._parts():
            sha.update(part)
        return sha.hexdigest()

    @abc.abstractmethod
    def _parts(self) -> list[bytes]:
        """Everything that distinguishes it from others of its class and shapes."""


@dataclass(frozen=True, eq=False)
class Move(LinearMap):
    """Each entry of the result is an entry of the source, or 0: reshaping, slicing, padding, repeating, shuffling.

    Its norm is √m, m how often the most repeated entry occurs: it sends the unit vectors to orthogonal ones.

    Attributes:
        index: for each place of the result 1 + the place in the flattened source, or 0.
        padding: how the trailing axes were padded, if that is all it does.
        name: what people call it.
    """

    index: Tensor
    padding: tuple[PaddingMode, Pairs] | None = None
    name: str = "reshape"

    @property
    def target(self) -> Shape:
        """Shape of the result."""
        return tuple(self.index.shape)

    @functools.cached_property
    def repetition(self) -> int:
        """How often the most repeated entry occurs."""
        if not self.index.numel():
            return 0
        counts = torch.bincount(self.index.flatten(), minlength=2)
        return int(counts[1:].max())

    @property
    def size(self) -> float:
        """√m."""
        root = math.isqrt(self.repetition)
        return float(root) if root * root == self.repetition else root_up(self.repetition)

    @property
    def terms(self) -> int:
        """Sums only occur in the adjoint."""
        return self.repetition + 1

    @functools.cached_property
    def is_isometry(self) -> bool:
        """Whether every entry of the source occurs exactly once, and nothing else."""
        places = math.prod(self.source)
        return self.index.numel() == places and self.repetition == 1 and bool((self.index > 0).all())

    @property
    def is_part(self) -> bool:
        """Slices, padding by zeros, and all that keeps or drops entries."""
        return self.repetition <= 1

    @functools.cached_property
    def is_view(self) -> bool:
        """Whether the entries stay in their order, all of them."""
        flat = self.index.flatten()
        return len(flat) == math.prod(self.source) and bool((flat == torch.arange(1, len(flat) + 1)).all())

    def apply(self, x: Tensor) -> Tensor:
        """Places 1 and on hold the entries, place 0 a zero."""
        if self.is_view:
            return x.reshape(-1, *self.target)
        return torch.nn.functional.pad(flat(x), (1, 0))[:, self.index]

    def adjoint(self, y: Tensor) -> Tensor:
        """Each entry is the sum of those that it was moved to."""
        if self.is_view:
            return y.reshape(-1, *self.source)
        x = y.new_zeros(len(y), math.prod(self.source) + 1)
        return x.index_add_(1, self.index.flatten(), flat(y))[:, 1:].reshape(-1, *self.source)

    def run(self, x: Tensor) -> Rounded:
        """Nothing is rounded."""
        return exactly(self.apply(x))

    def pull(self, y: Tensor) -> Rounded:
        """Nothing is rounded where no entry occurs twice."""
        return exactly(self.adjoint(y)) if self.is_part else super().pull(y)

    def dense(self) -> Tensor:
        """A matrix of zeros and ones."""
        matrix = torch.zeros(self.index.numel(), math.prod(self.source) + 1, dtype=torch.float64)
        matrix[torch.arange(self.index.numel()), self.index.flatten()] = 1
        return matrix[:, 1:]

    def then(self, second: "Move") -> "Move":
        """This one first, then the second."""
        flat = torch.cat([torch.zeros(1, dtype=torch.int64), self.index.flatten()])
        same = self.is_view and self.source == self.target
        name = second.name if self.is_view else self.name if second.is_view else f"{self.name}, {second.name}"
        return Move(self.source, flat[second.index], second.padding if same else None, name)

    @property
    def kind(self) -> str:
        """Such as ``pad``."""
        return self.name

    @property
    def geometry(self) -> str:
        """Shapes, and how often entries repeat."""
        repeated = f", entries up to {self.repetition} times" if self.repetition > 1 else ""
        return f"{shown(self.source)} → {shown(self.target)}{repeated}"

    def _parts(self) -> list[bytes]:
        return [self.index.contiguous().numpy().tobytes()]


@dataclass(frozen=True, eq=False)
class Scale(LinearMap):
    """Each entry times a number: batch normalisation in evaluation mode, products with constants.

    Attributes:
        factors: float64, broadcast to the source.
        distance: of the factors from the true ones, in absolute value.
    """

    factors: Tensor
    distance: float = 0.0

    @property
    def target(self) -> Shape:
        """Shape of the result."""
        return self.source

    @property
    def error(self) -> float:
        """As far as any factor."""
        return self.distance

    @functools.cached_property
    def size(self) -> float:
        """The largest factor."""
        if not self.factors.numel():
            return 0.0
        return float(self.factors.abs().max())

    @property
    def terms(self) -> int:
        """One product."""
        return 1

    def apply(self, x: Tensor) -> Tensor:
        """Products."""
        return x * self.factors

    def adjoint(self, y: Tensor) -> Tensor:
        """The same products."""
        return y * self.factors

    def _rounded(self, x: Tensor, y: Tensor) -> Rounded:
        """Signs round nothing."""
        is_exact = not self.error and bool((self.factors.abs() == 1).all())
        return exactly(y) if is_exact else super()._rounded(x, y)

    def dense(self) -> Tensor:
        """A diagonal matrix."""
        return torch.diag(self.factors.expand(self.source).flatten())

    def along(self, axis: int) -> Tensor | None:
        """The factors as a vector along one axis, if they are the same along all others."""
        factors = self.factors.reshape((1,) * (len(self.source) - self.factors.dim()) + tuple(self.factors.shape))
        if any(size != 1 for dim, size in enumerate(factors.shape) if dim != axis):
            return None
        return factors.flatten().expand(self.source[axis])

    @property
    def geometry(self) -> str:
        """How many factors."""
        count = self.factors.numel()
        return f"{count} factor{'s' * (count > 1)}, {shown(self.source)}"

    def _parts(self) -> list[bytes]:
        return [repr(tuple(self.factors.shape)).encode(), bytes_of(self.factors)]


@dataclass(frozen=True, eq=False)
class Shift(Scale):
    """The value itself plus a constant, which no difference of two values shows: as a linear map, the identity.

    Attributes:
        offset: what is added, broadcast to the source; ``None`` where it was not kept.
        off: distance of the offset from the true one, in the l2 norm.
    """

    offset: Tensor | None = None
    off: float = 0.0

    def run(self, x: Tensor) -> Rounded:
        """One sum in each entry, relative to what comes out."""
        assert self.offset is not None
        y = x + self.offset
        return y, next_up(rounding(1, norms(y), y) + self.off)


class Sized(Protocol):
    """What the error of a composition depends on."""

    @property
    def size(self) -> float:
        """See :class:`LinearMap`."""

    @property
    def error(self) -> float:
        """See :class:`LinearMap`."""


def composed_error(first: Sized, second: Sized, terms: int) -> float:
    """Bound of the error of a map whose numbers are sums of so many products of those of two others."""
    if not math.isfinite(up(first.size * second.size)):  # nothing is known, rather than not a number
        return math.inf
    rounding = up(up(gamma(terms) * up(first.size * second.size)) + underflow(terms * terms))
    carried = up(up(second.error * up(first.size + first.error)) + up(second.size * first.error))
    return up(rounding + carried)


def shown(shape: Shape) -> str:
    """For people: 1×3×32×32."""
    return "×".join(map(str, shape)) or "scalar"


def bytes_of(tensor: Tensor) -> bytes:
    """Its numbers to the last bit."""
    return tensor.detach().contiguous().numpy().tobytes()
