"""Choices between two values by a comparison: most jump, some are functions of the table written out.

where(u > c, a, b) is recognised only where it is such a function over the real numbers, for every u: numbers are
compared as they are, without a tolerance. Where a and b agree at u = c, it does not matter which of them is taken
there, so strict comparisons and others are the same.
"""

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from gramcert.operators.graph import Builder, Node, Nonlinear, Sum, Unbounded, Variable, added
from gramcert.operators.linear import Scale, Shift
from gramcert.operators.rules import activation, clamped

# What a comparison is called by torch and by ONNX, and whether it is true above the number.
ABOVE = dict.fromkeys(("gt", "ge", "Greater", "GreaterOrEqual"), True)
ABOVE |= dict.fromkeys(("lt", "le", "Less", "LessOrEqual"), False)


@dataclass(frozen=True)
class Comparison:
    """Whether each entry of a value is above, or below, a number."""

    of: str
    limit: float
    is_above: bool


class Choices:
    """Of one graph."""

    def __init__(self, builder: Builder) -> None:
        self.b = builder
        self._comparisons: dict[str, Comparison] = {}
        self.divisors: dict[str, float] = {}  # by the names of quotients; the factor 1/β would be rounded

    def compared(self, x: Variable, name: str, limit: Tensor | None, *, swapped: bool = False) -> Variable:
        """Of a value with a constant, by the name of the operator; the constant first if they are swapped."""
        shape = x.shape if limit is None else tuple(torch.broadcast_shapes(x.shape, limit.shape))
        result = self.b.unbounded((x,), shape, f"{name}: a comparison jumps")
        if name in ABOVE and limit is not None and limit.numel() == 1 and shape == x.shape and bool(limit.isfinite()):
            self._comparisons[result.name] = Comparison(x.name, float(limit), ABOVE[name] != swapped)
        return result

    def choice(self, test: Variable, yes: Variable | Tensor, no: Variable | Tensor) -> Variable | None:
        """The first value where a test is true, the second elsewhere; ``None`` unless it is a known function."""
        known = self._comparisons.get(test.name)
        if known is None or any(not _fits(part, test.shape) for part in (yes, no)):
            return None
        above, below = (yes, no) if known.is_above else (no, yes)
        found = self._clamped(known, above, below) or self._clamped(known, below, above, name="max")
        return found or self._softplus(known, above, below) or self._softshrink(known, above, below)

    def _clamped(
        self, test: Comparison, y: Variable | Tensor, number: Variable | Tensor, name: str = "min"
    ) -> Variable | None:
        """The value x + s above c and c + s elsewhere, which is max(x + s, c + s)."""
        if not isinstance(y, Variable) or not isinstance(number, Tensor) or not bool(number.isfinite()):
            return None
        shift = self._distance(y.name, test.of)
        if shift is None or Fraction(test.limit) + shift != Fraction(float(number)):
            return None
        return clamped(self.b, y, {name: number.double().reshape(())})

    def _softplus(self, test: Comparison, x: Variable | Tensor, other: Variable | Tensor) -> Variable | None:
        """The value x where βx is above the threshold, log(1 + e^(βx))/β elsewhere: torch's softplus."""
        if not isinstance(x, Variable) or not isinstance(other, Variable):
            return None
        beta, node = self._factor(test.of, x.name), self.b.node(other)
        divisor: Fraction | None = Fraction(1)
        if node.name in self.divisors:
            divisor, node = Fraction(self.divisors[node.name]), self._node(node.inputs[0])
        elif (factor := _factor_of(node)) is not None:
            divisor, node = 1 / factor if factor else None, self._node(node.inputs[0])
        if beta is None or divisor != beta or node.inputs != (test.of,):
            return None
        if not isinstance(node.operation, Nonlinear) or node.operation.name != "softplus":
            return None
        if node.operation.parameters["beta"] != 1:
            return None
        # Torch's own switches to the identity, too: at the smaller of both thresholds.
        threshold = min(test.limit, node.operation.parameters["threshold"])
        return activation(self.b, x, "softplus", beta=float(beta), threshold=threshold)

    def _softshrink(self, test: Comparison, above: Variable | Tensor, below: Variable | Tensor) -> Variable | None:
        """The value x - λ·sign(x) where |x| is above λ, and 0, or 0·x, elsewhere."""
        size = self._node(test.of)
        if not isinstance(size.operation, Nonlinear) or size.operation.name != "abs" or test.limit < 0:
            return None
        (x,) = size.inputs
        is_zero = not bool(below.any()) if isinstance(below, Tensor) else self._factor(below.name, x) == 0
        if not is_zero or not isinstance(above, Variable):
            return None
        node = self.b.node(above)
        if not isinstance(node.operation, Sum) or node.operation.signs != (1, -1) or node.inputs[0] != x:
            return None
        sign = self._node(node.inputs[1])
        factor = _factor_of(sign)
        sign = sign if factor is None else self._node(sign.inputs[0])
        if not isinstance(sign.operation, Unbounded) or sign.operation.name != "sign" or sign.inputs != (x,):
            return None
        if (Fraction(1) if factor is None else factor) != Fraction(test.limit):
            return None
        return activation(self.b, self._variable(x), "softshrink", lambd=test.limit)

    def shrunk(self, first: Variable, second: Variable) -> Variable | None:
        """What max(x - λ, 0) + min(x + λ, 0) is, the same in two halves; ``None`` for other sums."""
        for one, other in ((first, second), (second, first)):
            upper, lower = self._limited(one, "min"), self._limited(other, "max")
            if upper is None or lower is None:
                continue
            x = upper.inputs[0] if isinstance(upper.operation, Shift) else upper.name
            above, below = self._distance(upper.name, x), self._distance(lower.name, x)
            if above is not None and above <= 0 and below == -above:
                return activation(self.b, self._variable(x), "softshrink", lambd=float(-above))
        return None

    def _limited(self, value: Variable, name: str) -> Node | None:
        """The value of which another is the larger, or the smaller, of it and 0."""
        operation = self.b.node(value).operation
        if not isinstance(operation, Nonlinear):
            return None
        limits = {"min": 0.0, "max": torch.inf} if name == "min" else {"min": -torch.inf, "max": 0.0}
        is_clamp = operation.name == "clamp" and operation.parameters == limits
        is_relu = operation.name == "relu" and name == "min"
        return self._node(self.b.node(value).inputs[0]) if is_clamp or is_relu else None

    def _distance(self, name: str, of: str) -> Fraction | None:
        """The number that a value is another one plus; ``None`` if it is not."""
        if name == of:
            return Fraction(0)
        node = self._node(name)
        is_shift = isinstance(node.operation, Shift) and node.inputs == (of,)
        return Fraction(added(node)) if is_shift and added(node) == added(node) else None

    def _factor(self, name: str, of: str) -> Fraction | None:
        """The number that a value is another one times; ``None`` if it is not."""
        if name == of:
            return Fraction(1)
        node = self._node(name)
        return _factor_of(node) if node.inputs == (of,) else None

    def _node(self, name: str) -> Node:
        return self.b.graph.nodes[name]

    def _variable(self, name: str) -> Variable:
        return Variable(name, self._node(name).shape)


def _factor_of(node: Node) -> Fraction | None:
    """The number that a node multiplies its input by, if it is one number and not rounded."""
    operation = node.operation
    if not isinstance(operation, Scale) or isinstance(operation, Shift) or operation.error:
        return None
    return Fraction(float(operation.factors)) if operation.factors.numel() == 1 else None


def _fits(part: Variable | Tensor, shape: tuple[int, ...]) -> bool:
    """Whether it is of a shape, or one number that does not enlarge it."""
    if isinstance(part, Variable):
        return part.shape == shape
    return part.numel() == 1 and tuple(torch.broadcast_shapes(part.shape, shape)) == shape
