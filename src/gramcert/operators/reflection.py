"""z - 2a·φ(aᵀz) along the lines of an axis, φ with slopes in [0, 1]: the Householder activation, written out.

Its derivative I - 2d·aaᵀ, 0 <= d <= 1, is symmetric with the eigenvalues 1 and 1 - 2d‖a‖²: the constant is
max(1, 2‖a‖² - 1).
"""

import math

import torch
from torch import Tensor

from gramcert.operators.graph import Builder, Node, Nonlinear, Variable
from gramcert.operators.linear import LinearMap, Move, Scale
from gramcert.operators.matrices import AxisMatrix
from gramcert.operators.rounded import Compute, Rounded, norms, rounding
from gramcert.rounding import next_up, root_up, square_norm, up


def reflected(b: Builder, x: Variable, y: Variable) -> Variable | None:
    """What x - y is, if y is 2a·φ(aᵀx); otherwise ``None``."""
    phi, after = _linear_before(b, b.node(y), None)
    if not isinstance(phi.operation, Nonlinear) or phi.operation.slopes is None or phi.operation.compute is None:
        return None
    if phi.operation.slopes[0] < 0 or phi.operation.slopes[1] > 1:
        return None
    origin, before = _linear_before(b, b.graph.nodes[phi.inputs[0]], x.name)
    sums = [part for part in before if isinstance(part, AxisMatrix)]
    spread = [part for part in after if isinstance(part, Move)]
    others = [part for part in before if isinstance(part, Move)] + [p for p in after if isinstance(p, AxisMatrix)]
    if origin.name != x.name or others or len(sums) != 1 or len(spread) != 1 or sums[0].kind != "sum":
        return None
    axis, lines = sums[0].axis, phi.shape
    if lines != tuple(1 if a == axis else n for a, n in enumerate(x.shape)):
        return None
    # Each entry has to meet the sum of its own line.
    places = torch.arange(1, math.prod(lines) + 1).reshape(lines)
    if spread[0].target != x.shape or not torch.equal(spread[0].index, places.expand(x.shape)):
        return None
    inner, outer = _factors([*before, *spread]), _factors(after)
    if inner is None or outer is None or not torch.equal(*torch.broadcast_tensors(2 * inner, outer)):
        return None
    return b.nonlinear(x, _reflection(inner.expand(x.shape), axis, phi.operation.compute))


def _linear_before(b: Builder, node: Node, stop: str | None) -> tuple[Node, list[LinearMap]]:
    """The linear maps that lead to a value, but those that do nothing, and what they start from."""
    found: list[LinearMap] = []
    while isinstance(node.operation, (Move, Scale, AxisMatrix)) and node.name != stop:
        part = node.operation
        if not (isinstance(part, Move) and part.is_view and part.source == part.target):
            found.append(part)
        node = b.graph.nodes[node.inputs[0]]
    return node, found


def _factors(parts: list[LinearMap]) -> Tensor | None:
    """All factors as one, unless their product is rounded: at most one of them may not be a power of two."""
    scales = [part for part in parts if isinstance(part, Scale)]
    others = [part for part in parts if not isinstance(part, (Scale, Move, AxisMatrix))]
    if others or any(part.error or part.kind == "shift" for part in scales):
        return None
    product = torch.ones((), dtype=torch.float64)
    for factors in sorted((part.factors for part in scales), key=lambda factors: factors.numel()):
        if product.numel() > 1 or math.frexp(float(product))[0] not in (0.5, -0.5):
            return None
        product = product * factors
    return product


def constant_of(normals: Tensor) -> float:
    """max(1, 2‖a‖² - 1) for the longest of some rows."""
    return max(1.0, up(2 * _longest_square(normals) - 1))


def _longest_square(normals: Tensor) -> float:
    return max((square_norm(normal)[1] for normal in normals), default=0.0)


def _reflection(normals: Tensor, axis: int, phi: Compute) -> Nonlinear:
    rows = normals.movedim(axis, -1).flatten(0, -2).unique(dim=0)  # the same at every place of an image
    constant, largest = constant_of(rows), _longest_square(rows)
    amount, terms = up(1 + up(2 * largest)), 2 * normals.shape[axis] + 8

    def compute(z: Tensor) -> Rounded:
        """Sums of |z| + 2|a||a|ᵀ|z|; what φ rounds is stretched by 2|a|."""
        depth, inside = phi((z * normals).sum(axis + 1, keepdim=True))
        y = z - 2 * depth * normals
        passed = next_up(inside * up(2 * root_up(largest)))
        return y, next_up(passed + rounding(terms, next_up(norms(z) * amount), y))

    return Nonlinear(constant, "reflection", why="max(1, 2‖a‖² - 1) for its longest normal", compute=compute)
