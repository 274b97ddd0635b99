"""Values combined with values: without a constant in general, but some combinations are known functions in disguise.

x·sigmoid(kx) is SiLU, x·(1 + erf(kx)) is GELU, √(mean of x²) a pooling, d/√(mean of d² + ε) a normalisation, whatever
roots, inverses and views it is made of. Each is recognised by its nodes.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.operators import elementwise
from gramcert.operators.choices import Choices
from gramcert.operators.graph import Builder, Node, Nonlinear, Unbounded, Variable, added
from gramcert.operators.joining import entries, through
from gramcert.operators.linear import LinearMap, Move, Scale, Shape, Shift
from gramcert.operators.matrices import AxisMatrix
from gramcert.operators.polynomials import is_tanh_gelu, polynomial
from gramcert.operators.reflection import reflected
from gramcert.operators.rounded import Compute
from gramcert.operators.rules import (
    Unknown,
    activation,
    axis_of,
    exact,
    normalised_by,
    reduce_linear,
    times,
    typed,
)
from gramcert.operators.written_out import centring, clamped, divided, gate, root_of, tanh_gate
from gramcert.rounding import down, gamma, root_up, total_up, up

# What depends on the input, or a constant.
Value = Variable | Tensor | float


@dataclass(frozen=True)
class Length:
    """√(c·Σd² + ε), the sum over some axes of d, c > 0."""

    of: str
    axes: frozenset[int]
    epsilon: float
    compute: Compute | None = None


class Patterns:
    """Of one graph."""

    def __init__(self, builder: Builder) -> None:
        self.b = builder
        self.choices = Choices(builder)
        self._zero_tests: dict[str, str] = {}  # the names of x == 0, and of x
        self._guarded: dict[str, str] = {}  # those of where(x == 0, 1, x), and of x
        self._rooted: dict[str, str] = {}  # those of the roots of these, and of x
        self._lengths: dict[str, Length] = {}
        self._inverses: dict[str, Length] = {}  # 1/√ of these
        self._cubes: set[str] = set()  # the names of x³
        # Values minus their means over axes, by the type that numbers are rounded to beside them.
        self._centred: dict[tuple[str, frozenset[int], torch.dtype | None], Variable] = {}

    def sum(self, first: Value, second: Value, sign: int, like: torch.dtype) -> Variable:
        """The sum, or with sign -1 the difference, of two values of which at least one depends on the input."""
        if isinstance(first, Variable) and isinstance(second, Variable):
            if sign < 0:
                known = self.centred(first, second) or self._shrunk(first, second) or reflected(self.b, first, second)
            else:
                known = self.choices.shrunk(first, second)
            return known if known is not None else self.b.sum([(first, 1), (second, sign)])
        x, constant = (first, second) if isinstance(first, Variable) else (second, first)
        assert isinstance(x, Variable)
        if x is second and sign < 0:
            x, sign = self.b.scaled(x, -1.0), 1
        if isinstance(constant, Tensor):
            offset = exact(constant, "summand")
            x = self.b.spread(x, tuple(offset.shape))
        else:
            assert not isinstance(constant, Variable)
            offset = torch.tensor(typed(constant, like), dtype=torch.float64)
        return self.b.shifted(x, sign * offset)

    def product(self, first: Value, second: Value, like: torch.dtype) -> Variable:
        """Of two values of which at least one depends on the input."""
        if isinstance(first, Variable) and isinstance(second, Variable):
            return self._product(first, second)
        x, constant = (first, second) if isinstance(first, Variable) else (second, first)
        assert isinstance(x, Variable)
        assert not isinstance(constant, Variable)
        return times(self.b, x, constant, like)

    def quotient(self, first: Value, second: Value, like: torch.dtype) -> Variable:
        r"""By a constant, or d/√(mean of d² + ε), a normalisation; other quotients have no constant."""
        if not isinstance(second, Variable):
            assert isinstance(first, Variable)
            result = times(self.b, first, second, like, divide=True)
            if not isinstance(second, Tensor) or second.numel() == 1:
                number = float(second) if isinstance(second, Tensor) else typed(second, like)
                self.choices.divisors[result.name] = number
            return result
        shape = tuple(torch.broadcast_shapes(_shape(first), second.shape))
        if isinstance(first, Variable):
            known = self._normalised(first, second, self._lengths)
            if known is not None:
                return known
            if self._is_one_plus_size(second, first):
                return activation(self.b, first, "softsign")
            reason = "a quotient of two values that both depend on the input"
            return self.b.unbounded((first, second), shape, reason)
        if isinstance(first, (int, float)) or first.numel() == 1:
            return times(
                self.b, self.reciprocal(self.b.spread(second, tuple(torch.as_tensor(first).shape))), first, like
            )
        return self.b.unbounded((second,), shape, "a quotient by a value that depends on the input")

    def reciprocal(self, x: Variable) -> Variable:
        """1/x, which has no constant; of lengths it is remembered for what is multiplied by it."""
        result, found = activation(self.b, x, "reciprocal"), entries(self.b.graph, x.name)
        if found.origin in self._lengths and _is_view(found.index, self._node(found.origin).shape):
            self._inverses[result.name] = self._lengths[found.origin]
        return result

    def logarithm(self, x: Variable) -> Variable:
        """It has no constant, but that of a sigmoid has."""
        node = self.b.node(x)
        if isinstance(node.operation, Nonlinear) and node.operation.name == "sigmoid":
            return activation(self.b, self._variable(node.inputs[0]), "log_sigmoid")
        return activation(self.b, x, "log")

    def power(self, x: Variable, exponent: float | None) -> Variable:
        """Of a number; ``None`` for several."""
        if exponent == 2:
            return activation(self.b, x, "square")
        if exponent == 0.5:
            return self.root(x)
        if exponent == -0.5:
            return self.inverse_root(x)
        if exponent == -1:
            return self.reciprocal(x)
        if exponent == 1:
            return self.b.same(x)
        result = activation(self.b, x, "pow")
        self._cubes |= {result.name} if exponent == 3 else set()
        return result

    def _normalised(self, x: Variable, length: Variable, table: dict[str, Length]) -> Variable | None:
        """X divided by a multiple of its length, or times one of its inverse; each entry by that of its own line."""
        part, factor = entries(self.b.graph, length.name), 1.0
        index, node = part.index, self._node(part.origin)
        while self._is_multiple(node):
            assert isinstance(node.operation, Scale)
            factor *= float(node.operation.factors)
            part = entries(self.b.graph, node.inputs[0])
            index, node = through(part.index, index), self._node(part.origin)
        found = table.get(node.name)
        if found is None or factor == 0 or self._itself(found.of) != self._itself(x.name):
            return None
        kept = tuple(1 if axis in found.axes else size for axis, size in enumerate(x.shape))
        if not _meets_own_line(index, kept, x.shape):
            return None
        count = math.prod(x.shape[axis] for axis in found.axes)
        # The number was rounded where it was added.
        compute = None if found.compute is None else divided(found.compute, found.epsilon, index)
        result = normalised_by(self.b, x, count, found.epsilon, "rms norm", compute)
        return self._times(result, factor if table is self._inverses else 1 / factor)

    def _is_multiple(self, node: Node) -> bool:
        """Whether it is a value times one number."""
        if not isinstance(node.operation, Scale) or isinstance(node.operation, Shift):
            return False
        return node.operation.factors.numel() == 1 and node.operation.error == 0

    def _itself(self, name: str) -> str:
        """The value of which another is a copy, in another type or without any change."""
        node = self._node(name)
        while self._is_multiple(node) and isinstance(node.operation, Scale) and float(node.operation.factors) == 1:
            node = self._node(node.inputs[0])
        return node.name

    def _product(self, first: Variable, second: Variable) -> Variable:
        if first.name == second.name:
            return activation(self.b, first, "square")
        for x, other in ((first, second), (second, first)):
            found = self._normalised(x, other, self._inverses)
            if found is None and first.shape == second.shape:
                found = self._gated(x, other) or self._signed(x, other)
            if found is not None:
                return found
        shape = tuple(torch.broadcast_shapes(first.shape, second.shape))
        reason = "a product of two values that both depend on the input"
        return self.b.unbounded((first, second), shape, reason, "product")

    def _gated(self, x: Variable, other: Variable) -> Variable | None:
        """c·x·(a + b·g(kx + s)), k > 0."""
        node, scale, offset = self._affine(other)
        if not isinstance(node.operation, Nonlinear):
            return None
        name, numbers = node.operation.name, node.operation.parameters
        below = self._node(node.inputs[0])
        if name == "tanh" and offset == 0 and isinstance(below.operation, Nonlinear):
            is_softplus = below.operation.name == "softplus"
            is_plain = below.operation.parameters == elementwise.TABLE["softplus"].parameters
            if is_softplus and is_plain and below.inputs == (x.name,):
                return self._times(activation(self.b, x, "mish"), scale)
            return None
        if name == "tanh" and offset == scale:
            for node, factor, shift in self._multiples(x):
                found = polynomial(self.b.graph, self._cubes, below.name, node.name)
                if shift == 0 and found is not None and is_tanh_gelu(found):
                    compute = tanh_gate(found[1], found[3])
                    product = activation(self.b, self._variable(node.name), "gelu by tanh", compute)
                    return self._times(product, 2 * factor * scale)
            return None
        for origin, factor, stretch, moved in self._common(x, self._variable(below.name)):
            if stretch <= 0:
                continue
            if name == "clamp" and offset == 0 and all(map(math.isfinite, (moved, *numbers.values()))):
                # Between the limits kx is at most as large as they and the shift.
                gain = 1 + abs(moved) + sum(map(abs, numbers.values()))
                compute = gate(functools.partial(clamped, moved, numbers), stretch, gain)
                product = activation(self.b, origin, "gated clamp", compute, shift=moved, **numbers)
                return self._times(product, factor * scale)
            if moved != 0:
                continue
            if name == "sigmoid" and offset == 0:
                compute = gate(torch.sigmoid, stretch)
                return self._times(activation(self.b, origin, "silu", compute), factor * scale)
            if name == "hardsigmoid" and offset == 0 and stretch == 1:
                # A network in float64 takes another sixth than one in float32.
                off = 8 * (elementwise.SIXTH - 1 / 6)
                compute = gate(lambda t: (numbers["alpha"] * t + 0.5).clamp(0, 1), 1.0, 1 + numbers["alpha"], off)
                return self._times(activation(self.b, origin, "hardswish", compute), factor * scale)
            if name == "erf" and offset == scale:
                compute = gate(lambda t: (1 + torch.erf(t)) / 2, stretch)
                return self._times(activation(self.b, origin, "gelu", compute), 2 * factor * scale)
        return None

    def _common(self, x: Variable, y: Variable) -> Iterator[tuple[Variable, float, float, float]]:
        """Values u with x = c·u and y = k·u + s: u, c, k, s; the nearest to x first, which may be x itself."""
        below = {node.name: (scale, shift) for node, scale, shift in self._multiples(y)}
        for node, factor, shift in self._multiples(x):
            if node.name in below and shift == 0:
                yield self._variable(node.name), factor, *below[node.name]

    def _signed(self, x: Variable, sign: Variable) -> Variable | None:
        """sign(u)·|u| = u, also with a ReLU around |u|."""
        node, below = self.b.node(sign), self.b.node(x)
        if not isinstance(node.operation, Unbounded) or node.operation.name != "sign":
            return None
        if isinstance(below.operation, Nonlinear) and below.operation.name == "relu":
            below = self._node(below.inputs[0])
        is_size = isinstance(below.operation, Nonlinear) and below.operation.name == "abs"
        return self._variable(node.inputs[0]) if is_size and below.inputs == node.inputs else None

    def centred(self, x: Variable, mean: Variable) -> Variable | None:
        """A value minus its mean over some of its axes: an orthogonal projection."""
        part = entries(self.b.graph, mean.name)  # what brings the mean to the shape of x
        node, axes = self._node(part.origin), set[int]()
        kept = node.shape
        while isinstance(node.operation, AxisMatrix) and node.operation.kind == "mean":
            axes.add(node.operation.axis)
            node = self._node(node.inputs[0])
        name = self._itself(x.name)
        if not axes or self._itself(node.name) != name or not _meets_own_line(part.index, kept, x.shape):
            return None
        key = name, frozenset(axes), self.b.graph.types.get(x.name)
        if key not in self._centred:
            why, compute = "an orthogonal projection", centring(tuple(axis + 1 for axis in axes))
            self._centred[key] = self.b.nonlinear(x, Nonlinear(1.0, "centring", why=why, compute=compute))
        return self._centred[key]

    def variance(self, x: Variable, axes: list[int], *, keep: bool, correction: float) -> Variable:
        """Σ(x - mean)²/(n - correction) over some axes."""
        axes = [axis_of(axis, x.dim) for axis in axes] or list(range(x.dim))
        count = math.prod(x.shape[axis] for axis in axes)
        if not count > correction:
            raise Unknown(f"the variance of {count} entries with the correction {correction:g}")
        centred = self.centred(x, reduce_linear(self.b, x, axes, keep=True, mean=True))
        assert centred is not None
        total = reduce_linear(self.b, activation(self.b, centred, "square"), axes, keep=keep, mean=True)
        factor = count / (count - correction)
        return total if correction == 0 else self.b.scaled(total, factor, up(gamma(4) * factor))

    def _shrunk(self, x: Variable, tanh: Variable) -> Variable | None:
        """The value minus its hyperbolic tangent."""
        node = self.b.node(tanh)
        known = isinstance(node.operation, Nonlinear) and node.operation.name == "tanh" and node.inputs == (x.name,)
        return activation(self.b, x, "tanhshrink") if known else None

    def _is_one_plus_size(self, value: Variable, x: Variable) -> bool:
        """Whether a value is 1 + |x|."""
        node, scale, shift = self._affine(value)
        is_size = isinstance(node.operation, Nonlinear) and node.operation.name == "abs"
        return is_size and node.inputs == (x.name,) and scale == shift == 1

    def zero_test(self, x: Variable) -> Variable:
        """Whether each entry is 0."""
        result = self.b.unbounded((x,), x.shape, "a comparison jumps")
        self._zero_tests[result.name] = x.name
        return result

    def guard(self, test: Variable, at_zero: float, otherwise: Variable) -> Variable | None:
        """where(x == 0, 0, √where(x == 0, c, x)) is √x, written so that its gradient stays finite; ``None`` otherwise.

        The inner choice jumps, and so does its root: both have no constant before the outer one puts 0 in its place.
        """
        x = self._zero_tests.get(test.name)
        if x is None:
            return None
        if otherwise.name == x:
            jumping = self.b.unbounded((otherwise,), otherwise.shape, "a choice jumps", "choice")
            self._guarded[jumping.name] = x
            return jumping
        root = self._rooted.get(otherwise.name)
        return self.root(self._variable(x)) if root == x and at_zero == 0 else None

    def root(self, x: Variable) -> Variable:
        r"""√(A x² + ε) with A >= 0: each entry is a seminorm of x, so the constant is √‖A‖₁, its largest column sum."""
        if x.name in self._guarded:
            jumping = self.b.unbounded((x,), x.shape, "the root of a choice jumps", "root of a choice")
            self._rooted[jumping.name] = self._guarded[x.name]
            return jumping
        node, square, epsilon, axes, is_length = self.b.node(x), 1.0, 0.0, set[int](), True
        factor = 1.0  # of what is done after the node, as long as that is one number
        maps: list[LinearMap] = []
        while isinstance(node.operation, LinearMap):
            maps.append(node.operation)
            shift, most = added(node), _largest_column_sum(node.operation)
            if most is None or not shift >= 0:
                return activation(self.b, x, "sqrt")
            square = up(square * most) if most != 1 else square
            # For a normalisation: sums over axes of d, then only what keeps their order and factors for all of them.
            if isinstance(node.operation, AxisMatrix):
                is_length = is_length and _is_sum(node.operation)
                axes.add(node.operation.axis)
            elif isinstance(node.operation, Scale) and node.operation.factors.numel() == 1:
                is_length = is_length and not axes and node.operation.size > 0
                epsilon = down(epsilon + down(factor * shift)) if factor != 1 else epsilon + shift
                factor = factor * (node.operation.size - node.operation.error)
            else:
                is_length = is_length and not axes and isinstance(node.operation, Move) and node.operation.is_view
            node = self._node(node.inputs[0])
        if not isinstance(node.operation, Unbounded) or node.operation.name != "square":
            return activation(self.b, x, "sqrt")
        origin = self._variable(node.inputs[0])
        constant = root_up(square) if square != 1 else 1.0
        compute = root_of(maps[::-1])
        why = "the root of the largest column sum"
        result = self.b.nonlinear(origin, Nonlinear(constant, "l2 pool", why=why, compute=compute), x.shape)
        if is_length and epsilon > 0:
            epsilon = epsilon if factor == 1 else down(epsilon * (1 - 2.0**-40))
            self._lengths[result.name] = Length(origin.name, frozenset(axes), epsilon, compute)
        return result

    def inverse_root(self, x: Variable) -> Variable:
        """1/√x, which has no constant; of lengths it is remembered for what is multiplied by it."""
        root, result = self.root(x), activation(self.b, x, "rsqrt")
        if root.name in self._lengths:
            self._inverses[result.name] = self._lengths[root.name]
        return result

    def _affine(self, x: Variable) -> tuple[Node, float, float]:
        """The last value of which x is a multiple plus a number, with both."""
        *_, last = self._multiples(x)
        return last

    def _multiples(self, x: Variable) -> Iterator[tuple[Node, float, float]]:
        """The values of which x is a multiple plus a number, with both; x itself first."""
        node, scale, shift, shifts = self.b.node(x), 1.0, 0.0, 0
        yield node, scale, shift
        while isinstance(node.operation, Scale) and node.operation.factors.numel() == 1:
            amount = added(node)
            shift, shifts = shift + scale * amount, shifts + (amount != 0)
            scale *= float(node.operation.factors)
            node = self._node(node.inputs[0])
            yield node, scale, shift if shifts <= 1 else math.nan  # sums of several might cancel by rounding

    def _times(self, x: Variable, factor: float) -> Variable:
        if not 2.0**-900 < abs(factor) < 2.0**900:  # a product of factors that may have lost its digits
            raise Unknown("factors that are too large or too small together")
        return x if factor == 1 else self.b.scaled(x, factor, abs(factor) * 2.0**-48)

    def _node(self, name: str) -> Node:
        return self.b.graph.nodes[name]

    def _variable(self, name: str) -> Variable:
        return Variable(name, self._node(name).shape)


def _shape(value: Value) -> Shape:
    return tuple(value.shape) if isinstance(value, (Variable, Tensor)) else ()


def _is_view(index: Tensor, shape: Shape) -> bool:
    """Whether an index has all entries of a value of this shape in their order."""
    return torch.equal(index.flatten(), torch.arange(1, math.prod(shape) + 1))


def _meets_own_line(index: Tensor, kept: Shape, shape: Shape) -> bool:
    """Whether entries of what has one for each line of a shape, beside it, are those of the same line."""
    if tuple(torch.broadcast_shapes(index.shape, shape)) != shape:
        return False
    own = torch.arange(1, math.prod(kept) + 1).reshape(kept)
    return torch.equal(index.expand(shape), own.expand(shape))


def _is_sum(linear: AxisMatrix) -> bool:
    """Whether all entries along an axis become one, by the same positive factor."""
    first = linear.matrix.flatten()[:1]
    return linear.matrix.shape[0] == 1 and bool((linear.matrix == first).all()) and bool((first > 0).all())


def _largest_column_sum(linear: LinearMap) -> float | None:
    """Upper bound of it, if no entry is negative."""
    if isinstance(linear, Move):
        return float(linear.repetition)
    if isinstance(linear, Scale) and bool((linear.factors >= 0).all()):
        return up(linear.size + linear.error) if linear.error else linear.size
    if isinstance(linear, AxisMatrix) and bool((linear.matrix >= 0).all()):
        # A column of the matrix may be off by its distance in length, so by √rows times that in its sum.
        rows = linear.matrix.shape[0]
        return up(total_up(linear.matrix.T) + up(root_up(rows) * linear.distance))
    return None
