"""Several values that become one: side by side, or the larger and the smaller of two.

Parts of one value are counted once: they are recognised by following moves back to the value whose entries they hold.
The largest and the smallest of the same values are entries of all of them sorted, and sorting moves nothing apart.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.operators.graph import BadModel, Builder, Graph, Joint, Node, Nonlinear, Variable
from gramcert.operators.linear import Move, Shape
from gramcert.operators.rounded import selecting
from gramcert.operators.rules import axis_of, exact

LARGEST, SMALLEST = "largest entry", "smallest entry"


@dataclass(frozen=True)
class Entries:
    """Of which value some entries are, and for each of them 1 + its place there; 0 stands for a constant."""

    origin: str
    index: Tensor


def entries(graph: Graph, name: str) -> Entries:
    """The entries of a value, followed back through moves."""
    node = graph.nodes[name]
    index = torch.arange(1, math.prod(node.shape) + 1).reshape(node.shape)
    while isinstance(node.operation, Move):
        index = through(node.operation.index, index)
        node = graph.nodes[node.inputs[0]]
    return Entries(node.name, index)


def through(places: Tensor, index: Tensor) -> Tensor:
    """Where entries that have an index into these places come from."""
    return torch.cat([places.new_zeros(1), places.flatten()])[index]


def concatenated(b: Builder, parts: list[Variable | Tensor], axis: int) -> Variable:
    """Side by side: parts of one value make a move of its entries, maxima and minima of the same two a sorting."""
    shapes = [tuple(part.shape) for part in parts]
    axis = axis_of(axis, len(shapes[0]))
    if any(s[:axis] != shapes[0][:axis] or s[axis + 1 :] != shapes[0][axis + 1 :] for s in shapes):
        raise BadModel(f"shapes {shapes} cannot be side by side on axis {axis}")
    shape = (*shapes[0][:axis], sum(s[axis] for s in shapes), *shapes[0][axis + 1 :])
    variables = [part for part in parts if isinstance(part, Variable)]
    if len(variables) == 1 and len(parts) == 1:
        return b.same(variables[0])
    together = _together(b, parts, variables, shapes, axis, shape)
    constants = [exact(part, "constant") if isinstance(part, Tensor) else _zeros(part.shape) for part in parts]
    offset = torch.cat(constants, axis)
    return b.shifted(together, offset) if bool(offset.any()) else together


def _zeros(shape: Shape) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def _together(
    b: Builder,
    parts: list[Variable | Tensor],
    variables: list[Variable],
    shapes: list[Shape],
    axis: int,
    shape: Shape,
) -> Variable:
    """The parts that depend on the input in their places, and zeros where the others are."""
    found = _sorted_pairs(b, [entries(b.graph, part.name) for part in variables])
    origins = list(dict.fromkeys(part.origin for part in found))
    if len(origins) == len(variables) == len(parts) > 1:
        return b.joint(variables, "concatenate", shape, lambda values: torch.cat(values, axis + 1))
    known = iter(found)
    places = [None if isinstance(part, Tensor) else next(known) for part in parts]
    if len(origins) == 1:
        return _moved(
            b, origins[0], _side_by_side([None if part is None else part.index for part in places], shapes, axis)
        )
    # All entries of each origin in a row, these rows one after the other, and then each entry in its place.
    rows = {origin: torch.cat([part.index.flatten() for part in found if part.origin == origin]) for origin in origins}
    joint = b.joint(
        [_moved(b, origin, row) for origin, row in rows.items()],
        "concatenate",
        (sum(map(len, rows.values())),),
        lambda values: torch.cat(values, 1),
    )
    ends = [0, *itertools.accumulate(map(len, rows.values()))]
    free, indices = dict(zip(rows, ends, strict=False)), list[Tensor | None]()
    for part in places:
        if part is None:
            indices.append(None)
            continue
        first, count = free[part.origin], part.index.numel()
        free[part.origin] += count
        indices.append(torch.arange(first + 1, first + count + 1).reshape(part.index.shape))
    return _moved(b, joint.name, _side_by_side(indices, shapes, axis))


def _side_by_side(indices: list[Tensor | None], shapes: list[Shape], axis: int) -> Tensor:
    """One index for all parts, those of constants being 0."""
    parts = zip(indices, shapes, strict=True)
    return torch.cat([torch.zeros(s, dtype=torch.int64) if index is None else index for index, s in parts], axis)


def _moved(b: Builder, origin: str, index: Tensor, name: str = "concatenate") -> Variable:
    shape = b.graph.nodes[origin].shape
    return b.linear(Variable(origin, shape), Move(shape, index, None, name))


def extremum(b: Builder, first: Variable, second: Variable, name: str) -> Variable:
    """The larger, or the smaller, of two values: |max(a, b) - max(a', b')| <= max(|a - a'|, |b - b'|).

    Of entries of one value it is the largest entry along a new axis of two places.
    """
    shape = tuple(torch.broadcast_shapes(first.shape, second.shape))
    pair = [b.spread(x, shape) for x in (first, second)]
    one, two = (entries(b.graph, x.name) for x in pair)
    if one.origin != two.origin:
        select = torch.maximum if name == "maximum" else torch.minimum
        return b.joint(pair, name, shape, lambda values: select(*values))
    return extreme_entry(b, _pair(b, one.origin, one.index, two.index), [0], shape, largest=name == "maximum")


def _pair(b: Builder, origin: str, one: Tensor, two: Tensor) -> Variable:
    """Two tensors of entries of a value one behind the other, made once whatever their order."""
    ways = [torch.stack([one, two]), torch.stack([two, one])]
    for node in b.graph.nodes.values():
        if isinstance(node.operation, Move) and node.operation.name == "pair" and node.inputs == (origin,):
            index = node.operation.index
            if index.shape == ways[0].shape and any(torch.equal(index, way) for way in ways):
                return Variable(node.name, node.shape)
    return _moved(b, origin, ways[0], "pair")


def extreme_entry(b: Builder, x: Variable, axes: list[int], shape: Shape, *, largest: bool) -> Variable:
    """The largest, or smallest, entry along some axes: no further from each other than the entries."""
    along = {"axis": float(axes[0])} if len(axes) == 1 else {}
    extreme = torch.amax if largest else torch.amin
    compute = selecting(lambda x: extreme(x, [axis + 1 for axis in axes]).reshape(-1, *shape))
    name = LARGEST if largest else SMALLEST
    return b.nonlinear(x, Nonlinear(1.0, name, None, "entries occur once", along, compute), shape)


def _sorted_pairs(b: Builder, parts: list[Entries]) -> list[Entries]:
    """The same entries, where the largest and the smallest of some values are entries of these values, sorted."""
    kinds = {part.origin: _extreme_of(b.graph.nodes[part.origin]) for part in parts}
    halves = dict[object, set[bool]]()
    for kind in kinds.values():
        if kind is not None:
            halves.setdefault(kind[0], set()).add(kind[1])
    made = dict[object, tuple[Variable, int]]()
    result = []
    for part in parts:
        kind = kinds[part.origin]
        if kind is None or len(halves[kind[0]]) < 2:
            result.append(part)
            continue
        key, largest = kind
        made[key] = made.get(key) or _sorted(b, b.graph.nodes[part.origin])
        (x, axis) = made[key]
        places = torch.arange(1, math.prod(x.shape) + 1).reshape(x.shape).select(axis, -1 if largest else 0)
        result.append(Entries(x.name, through(places, part.index)))
    return result


def _extreme_of(node: Node) -> tuple[object, bool] | None:
    """For the largest or the smallest of some values, of which, and whether it is the largest; ``None`` for others."""
    operation = node.operation
    if isinstance(operation, Joint) and operation.name in ("maximum", "minimum") and len(set(node.inputs)) == 2:
        return frozenset(node.inputs), operation.name == "maximum"
    if isinstance(operation, Nonlinear) and operation.name in (LARGEST, SMALLEST) and operation.parameters:
        return (node.inputs, operation.parameters["axis"]), operation.name == LARGEST
    return None


def _sorted(b: Builder, node: Node) -> tuple[Variable, int]:
    """The values of an extremum, sorted along an axis."""
    if isinstance(node.operation, Joint):
        stacked: list[Variable | Tensor] = [
            b.moved(Variable(name, b.graph.nodes[name].shape), lambda places: places.unsqueeze(0))
            for name in node.inputs
        ]
        pair, axis = concatenated(b, stacked, 0), 0
    else:
        assert isinstance(node.operation, Nonlinear)
        (name,), axis = node.inputs, int(node.operation.parameters["axis"])
        pair = Variable(name, b.graph.nodes[name].shape)
    compute = selecting(lambda x: x.sort(axis + 1).values)
    return b.nonlinear(pair, Nonlinear(1.0, "max-min", why="a permutation of its input", compute=compute)), axis
