r"""Polynomials of degree 3 that are written out: what GELU by tanh is made of.

x·½(1 + tanh(αx + βx³)) has slopes that depend on β/α³ alone: with v = αx it is, but for the factor 1/α that the slope
cancels, v·½(1 + tanh(v + ρv³)) with ρ = β/α³. GELU's is ρ = 0.044715·π/2. With T = tanh(v + ρv³) the slope changes with
ρ by (1 - T²)·v³·(2 - T·v·(1 + 3ρv²)), which is less than ½ on all reals: the slopes of the table are wider by that.
"""

import math

from gramcert.operators.graph import Graph, Sum, Unbounded, added
from gramcert.operators.linear import Scale

# Coefficients from the constant on.
Coefficients = tuple[float, float, float, float]

# ρ, and how far from it, relatively, the slopes of the table hold: numbers are written with six digits, or as float32.
RATIO, REACH = 0.044715 * math.pi / 2, 1e-5

# Operations that are followed, so that no file takes long.
MOST_NODES = 64

_X: Coefficients = (0.0, 1.0, 0.0, 0.0)


def polynomial(graph: Graph, cubes: set[str], name: str, origin: str) -> Coefficients | None:
    """A value as a polynomial of degree 3 in another, within a few roundings; ``None`` if it is none."""
    known: dict[str, Coefficients | None] = {origin: _X}
    # Each value is made after what it is made of: from the nearest on, not by recursion.
    order, wanted = list[str](), [name]
    while wanted:
        current = wanted.pop()
        if current in order or current == origin:
            continue
        order.append(current)
        if len(order) > MOST_NODES:
            return None
        wanted += graph.nodes[current].inputs
    for current in sorted(order, key=int):
        known[current] = _of_node(graph, cubes, current, known, graph.nodes[origin].shape)
    return known[name]


def _of_node(
    graph: Graph,
    cubes: set[str],
    name: str,
    known: dict[str, Coefficients | None],
    shape: tuple[int, ...],
) -> Coefficients | None:
    node = graph.nodes[name]
    parts = [known.get(part) for part in node.inputs]
    if not parts or None in parts or node.shape != shape:
        return None
    found = [part for part in parts if part is not None]
    if isinstance(node.operation, Scale) and node.operation.factors.numel() == 1:
        factor, shift = float(node.operation.factors), added(node)
        constant, *others = (factor * c for c in found[0])
        return None if math.isnan(shift) else (constant + shift, others[0], others[1], others[2])
    if isinstance(node.operation, Sum):
        signed = list(zip(node.operation.signs, found, strict=True))
        return _of([sum(sign * part[power] for sign, part in signed) for power in range(4)])
    if isinstance(node.operation, Unbounded):
        if node.operation.name == "square":
            return _product(found[0], found[0])
        if node.operation.name == "product":
            return _product(*found)
        if name in cubes:
            square = _product(found[0], found[0])
            return None if square is None else _product(square, found[0])
    return None


def _of(values: list[float]) -> Coefficients | None:
    """The first four coefficients, if the others are zero."""
    return None if any(values[4:]) else (values[0], values[1], values[2], values[3])


def _product(first: Coefficients, second: Coefficients) -> Coefficients | None:
    values = [0.0] * 7
    for one, a in enumerate(first):
        for two, b in enumerate(second):
            values[one + two] += a * b
    return _of(values)


def is_tanh_gelu(found: Coefficients) -> bool:
    """Whether x·½(1 + tanh of this) has the slopes of the table."""
    constant, linear, square, cubic = found
    if constant != 0 or square != 0 or not (linear > 0 and math.isfinite(linear) and math.isfinite(cubic)):
        return False
    return abs(cubic / linear / linear / linear - RATIO) <= REACH * RATIO * (1 - 1e-6)
