"""Values combined with values: without a constant in general, but some combinations are known functions in disguise.

x·sigmoid(kx) is SiLU, x·(1 + erf(kx)) is GELU, √(mean of x²) a pooling, d/√(mean of d² + ε) a normalisation. Each is
recognised by the nodes it is made of.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.operators import elementwise
from gramcert.operators.graph import Builder, Node, Nonlinear, Unbounded, Variable
from gramcert.operators.linear import AxisMatrix, LinearMap, Move, Scale, Shape, Shift
from gramcert.operators.reflection import reflected
from gramcert.operators.rounded import Compute, Rounded, norms, rounding
from gramcert.operators.rules import activation, exact, normalised, times, typed
from gramcert.rounding import next_up, root_up, total_up, underflow, up

# What depends on the input, or a constant.
Value = Variable | Tensor | float


class Patterns:
    """Of one graph."""

    def __init__(self, builder: Builder) -> None:
        self.b = builder
        self._zero_tests: dict[str, str] = {}  # the names of x == 0, and of x
        self._guarded: dict[str, str] = {}  # those of where(x == 0, 1, x), and of x
        self._rooted: dict[str, str] = {}  # those of the roots of these, and of x
        self._lengths: dict[str, _Length] = {}

    def sum(self, first: Value, second: Value, sign: int, like: torch.dtype) -> Variable:
        """The sum, or with sign -1 the difference, of two values of which at least one depends on the input."""
        if isinstance(first, Variable) and isinstance(second, Variable):
            if sign < 0:
                known = self.centred(first, second) or self._shrunk(first, second) or reflected(self.b, first, second)
                if known is not None:
                    return known
            return self.b.sum([(first, 1), (second, sign)])
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
            return times(self.b, first, second, like, divide=True)
        shape = tuple(torch.broadcast_shapes(_shape(first), second.shape))
        if isinstance(first, Variable):
            found = self._lengths.get(second.name)
            if found is not None and found.origin == first.name and second.dim == first.dim:
                return normalised(self.b, first, found.count, found.epsilon, like, "rms norm", found.axes)
            if self._is_one_plus_size(second, first):
                return activation(self.b, first, "softsign")
            reason = "a quotient of two values that both depend on the input"
            return self.b.unbounded((first, second), shape, reason)
        return self.b.unbounded((second,), shape, "a quotient by a value that depends on the input")

    def _product(self, first: Variable, second: Variable) -> Variable:
        if first.name == second.name:
            return activation(self.b, first, "square")
        if first.shape == second.shape:
            for x, gate in ((first, second), (second, first)):
                found = self._gated(x, gate) or self._signed(x, gate)
                if found is not None:
                    return found
        shape = tuple(torch.broadcast_shapes(first.shape, second.shape))
        return self.b.unbounded((first, second), shape, "a product of two values that both depend on the input")

    def _gated(self, x: Variable, gate: Variable) -> Variable | None:
        """c·x·(a + b·g(kx + s)), k > 0."""
        node, scale, offset = self._affine(gate)
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
        for origin, factor, stretch, moved in self._common(x, self._variable(below.name)):
            if stretch <= 0:
                continue
            if name == "clamp" and offset == 0 and all(map(math.isfinite, (moved, *numbers.values()))):
                # Between the limits kx is at most as large as they and the shift.
                gain = 1 + abs(moved) + sum(map(abs, numbers.values()))
                compute = _gate(functools.partial(_clamped, moved, numbers), stretch, gain)
                product = activation(self.b, origin, "gated clamp", compute, shift=moved, **numbers)
                return self._times(product, factor * scale)
            if moved != 0:
                continue
            if name == "sigmoid" and offset == 0:
                compute = _gate(torch.sigmoid, stretch)
                return self._times(activation(self.b, origin, "silu", compute), factor * scale)
            if name == "hardsigmoid" and offset == 0 and stretch == 1:
                compute = _gate(lambda t: (numbers["alpha"] * t + 0.5).clamp(0, 1), 1.0, 1 + numbers["alpha"])
                return self._times(activation(self.b, origin, "hardswish", compute), factor * scale)
            if name == "erf" and offset == scale:
                compute = _gate(lambda t: (1 + torch.erf(t)) / 2, stretch)
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
        node, moves = self.b.node(mean), []
        while isinstance(node.operation, Move):  # what brings the mean to the shape of x
            moves.append(node.operation)
            node = self._node(node.inputs[0])
        kept, seen = node.shape, 0
        while isinstance(node.operation, AxisMatrix) and node.operation.kind == "mean":
            node, seen = self._node(node.inputs[0]), seen + 1
        if not seen or node.name != x.name:
            return None
        places = torch.arange(1, math.prod(kept) + 1).reshape(kept)
        index = places
        for move in reversed(moves):
            index = torch.cat([index.new_zeros(1), index.flatten()])[move.index]
        # Each entry has to meet the mean of its own line.
        if tuple(torch.broadcast_shapes(index.shape, x.shape)) != x.shape:
            return None
        if not torch.equal(index.expand(x.shape), places.expand(x.shape)):
            return None
        dims = tuple(1 + axis for axis, (one, other) in enumerate(zip(kept, x.shape, strict=True)) if one != other)

        def compute(x: Tensor) -> Rounded:
            """The mean of |x| is no longer than x."""
            y = x - x.mean(dims, keepdim=True) if dims else torch.zeros_like(x)
            return y, rounding(math.prod(x.shape[axis] for axis in dims) + 3, next_up(2 * norms(x)), y)

        return self.b.nonlinear(x, Nonlinear(1.0, "centring", why="an orthogonal projection", compute=compute))

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
            jumping = self.b.unbounded((otherwise,), otherwise.shape, "a choice jumps")
            self._guarded[jumping.name] = x
            return jumping
        root = self._rooted.get(otherwise.name)
        return self.root(self._variable(x)) if root == x and at_zero == 0 else None

    def root(self, x: Variable) -> Variable:
        r"""√(A x² + ε) with A >= 0: each entry is a seminorm of x, so the constant is √‖A‖₁, its largest column sum."""
        if x.name in self._guarded:
            jumping = self.b.unbounded((x,), x.shape, "the root of a choice jumps")
            self._rooted[jumping.name] = self._guarded[x.name]
            return jumping
        node, square, epsilon, axes, is_length = self.b.node(x), 1.0, 0.0, set[int](), True
        maps: list[LinearMap] = []
        while isinstance(node.operation, LinearMap):
            maps.append(node.operation)
            shift, most = _added(node), _largest_column_sum(node.operation)
            if most is None or not shift >= 0:
                return activation(self.b, x, "sqrt")
            square = up(square * most) if most != 1 else square
            is_mean = isinstance(node.operation, AxisMatrix) and node.operation.kind == "mean"
            # For a normalisation: means over axes of d, then only what keeps their order, ε added once.
            if isinstance(node.operation, AxisMatrix):
                is_length = is_length and is_mean
                axes.add(node.operation.axis)
            else:
                is_view = isinstance(node.operation, Move) and node.operation.is_view
                is_length = is_length and not axes and (is_view or self._is_shift(node))
            epsilon += shift
            node = self._node(node.inputs[0])
        if not isinstance(node.operation, Unbounded) or node.operation.name != "square":
            return activation(self.b, x, "sqrt")
        origin = self._variable(node.inputs[0])
        constant = root_up(square) if square != 1 else 1.0
        compute = _root_of(maps[::-1])
        why = "the root of the largest column sum"
        result = self.b.nonlinear(origin, Nonlinear(constant, "l2 pool", why=why, compute=compute), x.shape)
        if is_length and epsilon > 0 and x.shape == tuple(1 if a in axes else n for a, n in enumerate(origin.shape)):
            count = math.prod(origin.shape[a] for a in axes)
            self._lengths[result.name] = _Length(origin.name, count, epsilon, tuple(axes))
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
            added = _added(node)
            shift, shifts = shift + scale * added, shifts + (added != 0)
            scale *= float(node.operation.factors)
            node = self._node(node.inputs[0])
            yield node, scale, shift if shifts <= 1 else math.nan  # sums of several might cancel by rounding

    def _is_shift(self, node: Node) -> bool:
        return isinstance(node.operation, Scale) and node.operation.factors.numel() == 1 and node.operation.size == 1

    def _times(self, x: Variable, factor: float) -> Variable:
        return x if factor == 1 else self.b.scaled(x, factor, abs(factor) * 2.0**-48)

    def _node(self, name: str) -> Node:
        return self.b.graph.nodes[name]

    def _variable(self, name: str) -> Variable:
        return Variable(name, self._node(name).shape)


@dataclass(frozen=True)
class _Length:
    """√(mean of d² over some axes, of so many entries, + ε)."""

    origin: str
    count: int
    epsilon: float
    axes: tuple[int, ...]


def _gate(gate: Callable[[Tensor], Tensor], stretch: float, gain: float = 1.0) -> Compute:
    """x·g(kx); for these g what rounding of k does to it is a few units of |x|."""
    return lambda x: elementwise.evaluated(x, x * gate(stretch * x), gain)


def _clamped(shift: float, limits: Mapping[str, float], t: Tensor) -> Tensor:
    return (t + shift).clamp(**limits)


def _root_of(maps: list[LinearMap]) -> Compute | None:
    """√(A x²) for maps of numbers that are not negative: nothing cancels, so all rounding is relative to the result.

    But squares may vanish, and √(a + η) - √a <= √η.
    """
    if any(isinstance(part, Shift) and part.offset is None for part in maps):
        return None
    if any(part.error and part.kind not in ("mean", "average pool") for part in maps):
        return None  # the entries of these are within two roundings of the true ones, others only as a whole
    terms = 2 * sum(part.terms + 4 for part in maps) + 5

    def compute(x: Tensor) -> Rounded:
        y = x.square()
        for part in maps:
            y = part.run(y)[0]
        y = y.sqrt()
        largest = math.prod(max(1.0, part.size) for part in maps)
        lost = up(root_up(up(underflow(4 * terms) * largest)) * y[0].numel())
        return y, next_up(rounding(terms, norms(y), y) + lost)

    return compute


def _added(node: Node) -> float:
    """What was added to a value; NaN where that is not one number."""
    if not isinstance(node.operation, Shift):
        return 0.0
    offset = node.operation.offset
    return float(offset) if offset is not None and offset.numel() == 1 else math.nan


def _shape(value: Value) -> Shape:
    return tuple(value.shape) if isinstance(value, (Variable, Tensor)) else ()


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
