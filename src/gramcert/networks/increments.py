"""From a graph to the relations between its increments.

Images, values ([1,] channels, *sizes), lie on the lattice Z^D, zero outside of their window. A convolution with zero
padding is a filter of the whole lattice followed by the window, a diagonal of zeros and ones. The window is left to the
activation that comes next, whose slopes then have to contain 0; where none comes, it is a step of its own with slopes
[0, 1]. Everything that is done place by place may come in between. On a torus nothing may come round into a window,
which is what ``needs`` is about.

A sum over a whole axis with weights w, of which a mean is one, is the multiplication by ‖w‖ at every place: for every
form Q >= 0 that comes after, Q(Σ w_i s_i) <= ‖w‖² Σ Q(s_i).

What is no filter is kept by its constant, channel by channel if it acts so, and the value goes on in another component;
in the same way values go from images to vectors, and back.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gramcert.networks.coupling import MOST_COUPLED, Coupling
from gramcert.networks.filters import (
    MOST_TAPS,
    Filter,
    NotDescribedError,
    TooManyTapsError,
    channel_axis,
    convolution_filter,
    filter_of,
    is_circle,
    is_image,
    padding_square,
    row_length,
)
from gramcert.networks.program import CoupledPaddingError, Program, Relation, Term, Variable
from gramcert.networks.values import SizedMatrix, Value, are_alike, in_order, least_torus, moved_on
from gramcert.operators.composition import compose
from gramcert.operators.graph import Graph, Input, Joint, Node, Nonlinear, Sum
from gramcert.operators.linear import LinearMap, Move, Scale, Shape, composed_error
from gramcert.operators.matrices import AxisMatrix, Convolve
from gramcert.rounding import root_up, up

# Entries of all values of a network up to which all of it is made of vectors; of one vector, of one that is a matrix of
# itself, and of one matrix.
SMALL_NETWORK, MOST_ENTRIES, MOST_IDENTITY, MOST_MATRIX = 1536, 2**17, 8192, 4 * 10**7

# Functions of corresponding entries.
ENTRYWISE = ("maximum", "minimum")


def program_of(graph: Graph, most_coupled: float = MOST_COUPLED, norms: Mapping[str, float] | None = None) -> Program:
    """All relations; :class:`NotDescribedError` where there is something that forms do not reach.

    Args:
        graph: without nodes that no output needs.
        most_coupled: cost of one component, see :mod:`~gramcert.networks.coupling`, above which values are cut off.
        norms: of linear maps, by their nodes; used where a map is too large for a form.
    """
    reader = _Reader(graph, most_coupled, norms or {}, has_circles=True)
    try:
        return reader.run()
    except (CoupledPaddingError, TooManyTapsError):
        if not reader.met_circle:
            raise
        return _Reader(graph, most_coupled, norms or {}, has_circles=False).run()


class _Reader:
    def __init__(self, graph: Graph, most_coupled: float, norms: Mapping[str, float], *, has_circles: bool) -> None:
        self.graph, self.norms, self.has_circles = graph, norms, has_circles
        self.met_circle = False
        self.variables: list[Variable] = []
        self.needs: list[tuple[int, Shape, bool]] = []
        self.values: dict[str, Value] = {}
        self.unflattened: dict[int, Value] = {}  # the images that vectors were
        self.node = ""
        self.axes = self._image_axes()
        self.coupling = Coupling(graph, self.axes, most_coupled)

    def run(self) -> Program:
        padding = self._padding_of_convolutions()
        for node in self.graph.nodes.values():
            self.node = node.name
            if node.name not in padding:
                value = self.values[node.name] = self._value(node)
                if self._ends_component(node, value):
                    self._cut(node.name, value)
        outputs = []
        for name in dict.fromkeys(self.graph.outputs.values()):
            repeated = sum(value == name for value in self.graph.outputs.values())
            if repeated > 1:
                raise NotDescribedError("one value is several outputs")
            outputs.append(self._terms(self.values[name]))
        program = Program(self.variables, outputs, self.needs)
        assert program.components  # or an error says what cannot be in one component
        return program

    def _image_axes(self) -> int:
        """Of the lattice: as many as convolutions have; 0 where there are none, or where all is small."""
        nodes = self.graph.nodes.values()
        found = {node.operation.layer.axes for node in nodes if isinstance(node.operation, Convolve)}
        entries = sum(math.prod(node.shape) for node in nodes if isinstance(node.operation, (Input, Nonlinear)))
        if entries <= SMALL_NETWORK or len(found) != 1:
            return 0
        return found.pop()

    def _value(self, node: Node) -> Value:
        operation = node.operation
        if isinstance(operation, Input):
            return self._input(node.shape)
        if isinstance(operation, LinearMap):
            before = self.graph.nodes[node.inputs[0]]
            if before.name not in self.values:  # padding, which goes into the convolution
                assert isinstance(before.operation, LinearMap)
                merged = compose(before.operation, operation)
                assert merged is not None
                return self._linear(node, self.values[before.inputs[0]], merged)
            return self._linear(node, self.values[before.name], operation)
        values = [self.values[name] for name in node.inputs]
        if isinstance(operation, Nonlinear):
            return self._nonlinear(node, values[0], operation)
        if isinstance(operation, Sum):
            return self._sum(node, values, operation.signs)
        if isinstance(operation, Joint):
            return self._joint(node, values, operation)
        raise NotDescribedError(f"{node.label or node.name}: forms do not reach it")

    def _padding_of_convolutions(self) -> set[str]:
        """Nodes that repeat places, and that only convolutions read, into which they go."""
        found = set[str]()
        readers: dict[str, list[Node]] = {}
        for node in self.graph.nodes.values():
            for name in node.inputs:
                readers.setdefault(name, []).append(node)
        for name, after in readers.items():
            move = self.graph.nodes[name].operation
            if not isinstance(move, Move) or move.padding is None or move.padding[0] == "zeros":
                continue
            maps = [node.operation for node in after]
            fits = all(isinstance(linear, Convolve) and compose(move, linear) is not None for linear in maps)
            if fits and name not in self.graph.outputs.values():
                found.add(name)
        return found

    # Variables

    def _new(self, value: Value, relation: Relation) -> Value:
        """A variable, as a value."""
        self.variables.append(Variable(self.node, value.channels, value.sizes, value.step, relation))
        v = len(self.variables) - 1
        self.coupling.add(self.variables[v])
        if value.sizes and not value.is_spread:
            self._need_of(v, value.sizes, is_exact=False)
        return replace(value, terms=((v, None),), is_whole=True)

    def _input(self, shape: Shape) -> Value:
        if self.variables:
            raise NotDescribedError("it has several inputs")
        value = (
            Value.image(shape, self.axes)
            if self.axes and is_image(shape, self.axes)
            else Value.vector(math.prod(shape))
        )
        if value.is_vector:
            self._require_room(value.channels)
        nothing = torch.zeros(0, dtype=torch.int64)
        return self._new(value, Relation((), None, 1.0, torch.zeros(value.channels, dtype=torch.int64), nothing))

    def _terms(self, value: Value) -> tuple[Term, ...]:
        """Without those that are zero, as of a branch that was initialised so: their variables do not occur.

        One that is too large to have a symbol is told here, and not after all of the network has been read.
        """
        if any(found is None for _, found in value.terms) and value.channels**2 > MOST_TAPS:
            raise TooManyTapsError
        terms = tuple(Term(v, self._identity(value) if found is None else found) for v, found in value.terms)
        terms = tuple(term for term in terms if term.filter.error or bool(term.filter.kernel.any())) or terms[:1]
        if any(term.filter.kernel.numel() > MOST_TAPS for term in terms):
            raise TooManyTapsError
        return terms

    def _identity(self, value: Value, sign: int = 1) -> Filter:
        self._require_room(value.channels, MOST_IDENTITY)
        eye = torch.zeros(value.channels, value.channels, dtype=torch.float64).fill_diagonal_(sign)
        return Filter(eye.reshape(*eye.shape, *(1,) * value.axes), (1,) * value.axes, (0,) * value.axes)

    def _related(self, value: Value, slopes: tuple[float, float]) -> Value:
        """A function of each entry with such slopes, and the window."""
        low, high = slopes
        if not value.is_whole:
            low, high = min(low, 0.0), max(high, 0.0)
        ties = torch.arange(value.channels)
        return self._new(value, Relation(self._terms(value), (low, high), 0.0, ties, ties))

    def _bounded(
        self, value: Value, result: Value, constant: float, ties: Tensor | None = None, sources: Tensor | None = None
    ) -> Value:
        """Something of which only the constant is known; for all together unless there are ties."""
        if ties is None or sources is None:
            ties = torch.zeros(result.channels, dtype=torch.int64)
            sources = torch.zeros(value.channels, dtype=torch.int64)
        if not constant < math.inf:
            raise NotDescribedError(f"{self.node}: it has no constant")
        square = 1.0 if constant == 1 else up(constant * constant)
        return self._new(result, Relation(self._terms(value), None, square, ties, sources))

    def _cut(self, name: str, value: Value) -> Value:
        """A value in a component of its own; also for what comes later, if it is that of a node of this name."""
        is_known, here = value is self.values.get(name), self.node
        ties, self.node = torch.arange(value.channels), name if is_known else here
        value = self._bounded(value, value, 1.0, ties, ties)
        self.node = here
        if is_known:
            self.values[name] = value
        return value

    def _ends_component(self, node: Node, value: Value) -> bool:
        """Whether the component of a value would become too large by what comes next."""
        if not isinstance(node.operation, (Nonlinear, Sum, Joint)) or value.summed or value.channels > MOST_IDENTITY:
            return False
        others = [self.values[name].variables for name in self.coupling.kept_with(node.name) if name in self.values]
        return self.coupling.is_full(node.name, value.variables, others)

    # Images and vectors

    def _as_vector(self, value: Value) -> Value:
        """All entries; a multiplier for each channel."""
        if value.is_vector:
            return value
        places = math.prod(value.sizes)
        self._require_room(value.channels * places)
        channels = torch.arange(value.channels)
        ties = channels.repeat_interleave(places)
        flat = self._bounded(value, Value.vector(value.channels * places), 1.0, ties, channels)
        self.unflattened[flat.variables[0]] = value
        return flat

    def _plain_vector(self, value: Value) -> Value:
        """Without a lattice."""
        if value.is_spread:
            ties = torch.arange(value.channels)
            return self._bounded(value, Value.vector(value.channels), 1.0, ties, ties)
        return self._as_vector(value)

    def _as_image(self, value: Value, shape: Shape, axes: int) -> Value:
        """A vector of this shape on a lattice."""
        image = Value.image(shape, axes)
        places = math.prod(image.sizes)
        channels = torch.arange(image.channels)
        return self._bounded(value, image, 1.0, channels, channels.repeat_interleave(places))

    def _require_room(self, entries: int, most: int = MOST_ENTRIES) -> None:
        if entries > most:
            raise NotDescribedError(f"{self.node}: a vector of {entries} entries")

    def _settled(self, value: Value) -> Value:
        """One that is not summed along some axes only."""
        return self._as_vector(value) if value.summed and not value.is_spread else value

    # Linear maps

    def _linear(self, node: Node, value: Value, linear: LinearMap) -> Value:
        if isinstance(linear, Scale) and linear.error == 0 and bool((linear.factors == 1).all()):
            return value
        if value.is_vector:
            if not value.is_spread and self.axes and self._wants_image(linear):
                value = self._as_image(value, linear.source, self.axes)
            else:
                return self._vector_map(node, value, linear)
        return self._image_map(node, value, linear)

    def _wants_image(self, linear: LinearMap) -> bool:
        large = math.prod(linear.source) + math.prod(linear.target) > SMALL_NETWORK
        return isinstance(linear, Convolve) and is_image(linear.source, self.axes) and large

    def _vector_map(self, node: Node, value: Value, linear: LinearMap) -> Value:
        """A matrix of each filter, made by applying the map to its columns."""
        if isinstance(linear, Move) and linear.is_view:
            return value
        channels = math.prod(linear.target)
        widest = max(self.variables[v].channels for v, _ in value.terms)
        if channels > MOST_ENTRIES or widest * channels > MOST_MATRIX:
            self._require_room(channels)
            if [before for _, before in value.terms] == [None]:  # without the matrix from an image to its entries
                value = self.unflattened.get(value.variables[0], value)
            return self._bounded(value, Value.vector(channels), self._norm(node, linear))
        terms = []
        for v, before in value.terms:
            if before is None:
                after = self._matrix(linear, value.axes)
            elif value.is_spread:  # at every place, behind a filter
                found = self._matrix(linear, value.axes).after(before)
                assert found is not None
                after = found
            else:
                after = self._applied(linear, before)
            terms.append((v, after))
        return replace(value, terms=tuple(terms), channels=channels)

    def _norm(self, node: Node, linear: LinearMap) -> float:
        """What was measured, if it was, or what the sums of its numbers say."""
        known = self.norms.get(node.name, math.inf) if linear is node.operation else math.inf
        return min(known, up(linear.size + linear.error))

    @staticmethod
    def _applied(linear: LinearMap, before: Filter) -> Filter:
        """A map of the columns of a matrix."""
        if isinstance(linear, Move):  # of its rows, and nothing is rounded
            index = linear.index.flatten()
            rows = before.kernel[(index - 1).clamp_min(0)]
            rows[index == 0] = 0
            return Filter(rows, (), (), up(before.error * linear.size) if before.error else 0.0)
        columns = before.kernel.T
        matrix = linear.apply(columns.reshape(-1, *linear.source)).reshape(len(columns), -1).T.contiguous()
        error = composed_error(SizedMatrix(columns, before.error), linear, linear.terms)
        return Filter(matrix, (), (), error)

    @staticmethod
    def _matrix(linear: LinearMap, axes: int) -> Filter:
        """The map of all entries, at every place."""
        error = 0.0 if isinstance(linear, Move) else up(linear.error + linear.dense_error)
        matrix = linear.dense()
        return Filter(matrix.reshape(*matrix.shape, *(1,) * axes), (1,) * axes, (0,) * axes, error)

    def _image_map(self, node: Node, value: Value, linear: LinearMap) -> Value:
        axes = value.axes
        same = isinstance(linear, Move) and linear.is_view and is_image(linear.target, axes)
        if same and linear.source[-axes - 1 :] == linear.target[-axes - 1 :]:
            return value
        length = row_length(linear, axes)
        if length is not None:
            assert isinstance(linear, AxisMatrix)
            return self._summed(node, value, linear, length)
        if value.summed:  # along some axes only
            return self._vector_map(node, self._as_vector(value), linear)
        self.met_circle |= is_circle(linear)
        found = None if is_circle(linear) and not self.has_circles else filter_of(linear, axes)
        if found is None and isinstance(linear, Convolve) and linear.layer.axes == axes and not linear.layer.transposed:
            return self._padded(node, value, linear)
        if found is None and isinstance(linear, Scale) and is_image(linear.source, axes):
            return self._scaled(value, linear)
        along = isinstance(linear, AxisMatrix) and linear.axis > channel_axis(linear.source, axes)
        if found is None and along and is_image(linear.source, axes):  # on each channel the same matrix
            ties = torch.arange(value.channels)
            return self._bounded(value, Value.image(linear.target, axes), self._norm(node, linear), ties, ties)
        if found is None:
            return self._vector_map(node, self._as_vector(value), linear)
        return self._filtered(node, value, found, linear.target, is_circle(linear))

    def _filtered(self, node: Node, value: Value, found: Filter, target: Shape, is_circle: bool) -> Value:
        """A filter, and what it asks of the torus."""
        sizes = target[-value.axes :]
        step = tuple(a / s if found.adjoint else a * s for a, s in zip(value.step, found.stride, strict=True))
        least = value.sizes if is_circle else least_torus(found, value.sizes, sizes)
        is_strided = set(found.stride) != {1} and not found.adjoint
        fits = self.coupling.has_room(value.variables, least, value.step, is_exact=is_circle)
        if not fits or (is_strided and not self.coupling.is_worth(value.variables, step)):
            if is_strided and self._is_sampled(node, found):
                sampled = replace(value, sizes=sizes, step=step, is_whole=True)
                ties = torch.arange(value.channels)
                value = self._bounded(value, sampled, 1.0, ties, ties)
                found = replace(found, stride=(1,) * value.axes)
                return self._filtered(node, value, found, target, is_circle)
            value = self._cut(node.inputs[0], value)
        reach = found.reach(value.sizes, sizes)
        larger = sizes if found.adjoint else value.sizes
        is_inside = all(low >= 0 and high < n for (low, high), n in zip(reach, larger, strict=True))
        if not value.is_whole and (found.adjoint or not is_inside or set(found.taps) != {1}):
            value = self._related(value, (1.0, 1.0))
        filters = []
        for v, before in value.terms:
            after = found if before is None else found.after(before)
            if after is None:
                value = self._related(value, (1.0, 1.0))
                filters = [(value.terms[0][0], found)]
                break
            filters.append((v, after))
        support = found.support(value.sizes)
        is_whole = is_circle or all(low >= 0 and high < n for (low, high), n in zip(support, sizes, strict=True))
        is_whole = is_whole and value.is_whole
        if is_circle or not found.is_pointwise:
            self._need(value, least, is_exact=is_circle)
        return Value(tuple(filters), target[-value.axes - 1], sizes, step, is_whole)

    def _is_sampled(self, node: Node, found: Filter) -> bool:
        """Whether one place of all phases is read, and others by nothing that takes the same steps."""
        if set(found.taps) != {1} or any(found.first):
            return False
        maps = [other.operation for other in self.graph.nodes.values() if node.inputs[0] in other.inputs]
        return all(
            not isinstance(one, Convolve) or one is node.operation or one.layer.stride == (1,) * len(found.stride)
            for one in maps
        )

    def _need(self, value: Value, sizes: Shape, *, is_exact: bool) -> None:
        """Of the places of this value; its variables may lie denser."""
        for v in value.variables:
            dense = [b / a for a, b in zip(self.variables[v].step, value.step, strict=True)]
            self._need_of(v, tuple(math.ceil(n * d) for n, d in zip(sizes, dense, strict=True)), is_exact=is_exact)

    def _need_of(self, v: int, sizes: Shape, *, is_exact: bool) -> None:
        self.needs.append((v, sizes, is_exact))
        self.coupling.need(v, sizes, is_exact=is_exact)

    def _summed(self, node: Node, value: Value, linear: AxisMatrix, length: float) -> Value:
        """A sum along one axis: the multiplication by the length of its weights, at every place of the axis."""
        axis = linear.axis - channel_axis(linear.source, value.axes) - 1
        found = Filter(self._identity(value).kernel * length, (1,) * value.axes, (0,) * value.axes, linear.error)
        filters = [(v, found if before is None else found.after(before)) for v, before in value.terms]
        sizes = tuple(1 if j == axis else n for j, n in enumerate(value.sizes))
        summed = tuple(sorted({*value.summed, (axis, linear.digest)}))
        if axis in {known for known, _ in value.summed}:  # a second sum along an axis of one place
            return self._vector_map(node, self._as_vector(value), linear)
        return replace(value, terms=tuple(filters), sizes=sizes, is_whole=True, summed=summed)

    def _padded(self, node: Node, value: Value, linear: Convolve) -> Value:
        """Padding that repeats places by its norm, channel by channel, then the convolution without padding."""
        value = value if value.is_whole else self._related(value, (1.0, 1.0))
        ties = torch.arange(value.channels)
        sizes = tuple(axis.used for axis in linear.axes)
        image = replace(value, sizes=sizes, is_whole=True)
        padded = self._bounded(value, image, root_up(padding_square(linear.axes)), ties, ties)
        found = convolution_filter(linear, (0,) * value.axes)
        return self._filtered(node, padded, found, linear.target, is_circle=False)

    def _scaled(self, value: Value, linear: Scale) -> Value:
        """Factors that differ from place to place are slopes."""
        factors = linear.factors
        low, high = float(factors.min()) - linear.error, float(factors.max()) + linear.error
        return self._related(value, (-up(-low), up(high)))

    # Other operations

    def _nonlinear(self, node: Node, value: Value, operation: Nonlinear) -> Value:
        value = self._settled(value)
        if operation.slopes is not None and node.shape == self.graph.nodes[node.inputs[0]].shape:
            return self._related(value, operation.slopes)
        before = self.graph.nodes[node.inputs[0]].shape
        axes = value.axes
        if not value.is_vector and is_image(before, axes) and is_image(node.shape, axes):
            image = Value.image(node.shape, axes)
            step = moved_on(value, image.sizes)
            result = replace(image, step=step)
            # The last axes are pooled: with as many as the lattice has, channels stay apart.
            if operation.name == "max pool" and operation.parameters.get("axes") == axes:
                ties = torch.arange(value.channels)
                return self._bounded(value, result, operation.constant, ties, ties)
            return self._bounded(value, result, operation.constant)
        vector = Value.vector(math.prod(node.shape))
        self._require_room(vector.channels)
        return self._bounded(value, vector, operation.constant)

    def _sum(self, node: Node, values: list[Value], signs: tuple[int, ...]) -> Value:
        values = self._alike(values)
        terms: list[tuple[int, Filter | None]] = []
        for value, sign in zip(values, signs, strict=True):
            for v, found in value.terms:
                if found is not None:
                    terms.append((v, found.signed(sign)))
                else:
                    terms.append((v, None if sign == 1 else self._identity(value, sign)))
        is_whole = all(value.is_whole for value in values)
        return replace(values[0], terms=tuple(terms), is_whole=is_whole)

    def _alike(self, values: list[Value]) -> list[Value]:
        """Values on one lattice, or all of them as vectors."""
        values = [self._settled(value) for value in values]
        return values if are_alike(values) else [self._plain_vector(value) for value in values]

    def _joint(self, node: Node, values: list[Value], operation: Joint) -> Value:
        shapes = [self.graph.nodes[name].shape for name in node.inputs]
        if operation.name in ENTRYWISE and set(shapes) == {node.shape}:
            values = self._alike(values)
            ties = torch.arange(values[0].channels)
            together = self._beside(values, in_order(values))
            return self._bounded(together, values[0], 1.0, ties, ties.repeat(len(values)))
        if operation.name != "concatenate":
            values = [self._plain_vector(self._settled(value)) for value in values]
            vector = Value.vector(math.prod(node.shape))
            self._require_room(vector.channels)
            return self._bounded(self._beside(values, in_order(values)), vector, 1.0)
        values = [self._settled(value) for value in values]
        at = channel_axis(node.shape, values[0].axes)
        others = {(*shape[:at], *shape[at + 1 :]) for shape in [*shapes, node.shape]}
        if are_alike(values) and not values[0].is_vector and at >= 0 and len(others) == 1:
            return self._beside(values, in_order(values))
        return self._beside_vectors(node, values, shapes, operation)

    def _beside_vectors(self, node: Node, values: list[Value], shapes: list[Shape], operation: Joint) -> Value:
        """Entries of vectors in their places."""
        vectors = [self._plain_vector(value) for value in values]
        self._require_room(math.prod(node.shape))
        starts = [0]
        for shape in shapes:
            starts.append(starts[-1] + math.prod(shape))
        parts = [
            torch.arange(start, start + math.prod(shape)).reshape(1, *shape).double()
            for start, shape in zip(starts, shapes, strict=False)
        ]
        order = operation.select(parts).flatten().long()  # which entry of all is in each place
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        rows = [place[start : start + math.prod(shape)] for start, shape in zip(starts, shapes, strict=False)]
        return self._beside(vectors, rows)

    def _beside(self, values: list[Value], rows: list[Tensor]) -> Value:
        """Channels in these rows of a larger value."""
        total = sum(map(len, rows))
        terms = []
        for value, places in zip(values, rows, strict=True):
            for v, found in value.terms:
                one = self._identity(value) if found is None else found
                kernel = one.kernel.movedim(1, 0) if one.adjoint else one.kernel
                larger = kernel.new_zeros(total, *kernel.shape[1:])
                larger[places] = kernel
                terms.append((v, replace(one, kernel=larger.movedim(1, 0) if one.adjoint else larger)))
        is_whole = all(value.is_whole for value in values)
        return replace(values[0], terms=tuple(terms), channels=total, is_whole=is_whole)
