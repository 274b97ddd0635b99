"""A search for multipliers that certify large radii: floating point and heuristics, nothing proved.

For a fixed distance ε the bound is concave in all multipliers together, a minimum of functions that are linear in them,
so that ascent does not end in a local maximum. The largest radius is found with ε following the radius that the present
multipliers have, as in Dinkelbach's method for quotients.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gramcert.minorants.backward import Backward, Minorant, Multipliers, Pairs
from gramcert.minorants.layout import Centre, Layout
from gramcert.minorants.quick import DTYPE, Quick, there_and_back
from gramcert.operators.graph import Node
from gramcert.operators.linear import LinearMap

# Length of a first step, relative to the mean size of the slopes of a layer; of logarithms it is the length itself.
_STEP = 0.1

# Decay of the two means of Adam.
_MEAN, _SQUARE = 0.9, 0.99

# Steps between two looks at which pairs are settled, and by how much their radius has to be beyond what is asked.
_EVERY, _BEYOND = 10, 1 + 2e-3

# Where the search begins: the extra curvature of a layer as a part of what pays for all of its slopes.
_FIRST_EXTRA = 0.05

# What is thought of the radii of all pairs halfway.
IsHopeful = Callable[[Tensor], bool]


class Search:
    """A network made ready for searches."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.quick = {
            name: Quick.of(node.operation)
            for name, node in layout.nodes.items()
            if isinstance(node.operation, LinearMap)
        }
        self.first = {name: [Quick.of(part) for part in maps] for name, maps in layout.first.items()}

    def __call__(
        self,
        centre: Centre,
        pairs: Pairs,
        start: Tensor,
        enough: Tensor,
        steps: int,
        is_hopeful: IsHopeful = lambda _: True,
    ) -> Multipliers:
        """Multipliers for each pair, from radii that are known; not longer than until their radius is enough.

        After half of the steps ``is_hopeful`` is asked about the radii of all pairs, whether to go on.
        """
        with torch.enable_grad():
            return _Ascent(self, centre, pairs, start.clamp_min(1e-30), enough).run(steps, is_hopeful)


class _Ascent:
    """Adam on the multipliers of all pairs, which have nothing to do with each other."""

    def __init__(self, search: Search, centre: Centre, pairs: Pairs, start: Tensor, enough: Tensor) -> None:
        self.search, self.layout, self.centre, self.pairs = search, search.layout, centre, pairs
        self.start, self.enough = start.to(DTYPE), enough.to(DTYPE)
        self.walk = _Floating(search, centre, pairs)
        self.parameters, self.scales, self.point = self._first()
        self.means = {name: torch.zeros_like(value) for name, value in self.parameters.items()}
        self.squares = {name: torch.zeros_like(value) for name, value in self.parameters.items()}

    def run(self, steps: int, is_hopeful: IsHopeful) -> Multipliers:
        """The best that were seen at each look."""
        found = {name: value.clone() for name, value in self.parameters.items()}
        best, left = torch.full((len(self.pairs),), -math.inf, dtype=DTYPE), torch.arange(len(self.pairs))
        for step in range(steps + 1):
            radius, ahead = self._step(step, (1 + math.cos(math.pi * step / max(1, steps))) / 2)
            if step % _EVERY == _EVERY - 1 or step == steps:
                is_better = radius > best[left]
                best[left[is_better]] = radius[is_better]
                for name, value in self.parameters.items():
                    found[name][left[is_better]] = value[is_better]
                is_open = ~(radius > self.enough * _BEYOND)
                left, ahead = left[is_open], {name: value[is_open] for name, value in ahead.items()}
                self._select(is_open)
                is_halfway = step <= steps / 2 < step + _EVERY
                if not len(left) or (is_halfway and not is_hopeful(best)):
                    break
            self.parameters = ahead
        return _multipliers(found)

    def _select(self, chosen: Tensor) -> None:
        if bool(chosen.all()):
            return
        self.pairs, self.start, self.enough = self.pairs[chosen], self.start[chosen], self.enough[chosen]
        self.point = self.point[chosen]
        for group in (self.parameters, self.scales, self.means, self.squares):
            for name, value in group.items():
                group[name] = value[chosen]
        self.walk = _Floating(self.search, self.centre, self.pairs)

    def _first(self) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """The network linearised at the centre, with little curvature."""
        walk, layout, count = self.walk, self.layout, len(self.pairs)
        begin = _Beginning(self.search, self.centre, self.pairs, self.start)
        weights = {name: torch.ones(count, len(layout.nodes[name].inputs), dtype=DTYPE) for name in layout.sums}
        chosen = Multipliers(begin.slopes, begin.extras, weights, torch.ones(count, dtype=DTYPE))
        minorant = begin(walk.margin, walk.slope, chosen)
        parameters = {
            name: value if name.startswith("slopes/") else value.log() for name, value in chosen.tensors().items()
        }
        length = minorant.slope.flatten(1).norm(dim=1).clamp_min(1e-30)
        parameters["room"] = (length / self.start).log()
        scales = {}
        for name, value in parameters.items():
            mean = value.flatten(1).abs().mean(1) if name.startswith("slopes/") else value.new_ones(count)
            scales[name] = mean.reshape(-1, *[1] * (value.dim() - 1)) * _STEP
        shaped = (-1, *[1] * (minorant.slope.dim() - 1))
        return parameters, scales, -minorant.slope * (self.start / length).reshape(shaped)

    def _step(self, step: int, pace: float) -> tuple[Tensor, dict[str, Tensor]]:
        """The radii of the parameters, and where a step upwards leads."""
        leaves = {name: value.detach().requires_grad_() for name, value in self.parameters.items()}
        minorant = self.walk(self.walk.margin, self.walk.slope, _multipliers(leaves))
        value, curvature = self._at_input(minorant, leaves["room"].exp())
        with torch.no_grad():
            square = (2 * value / curvature).clamp_min(0).nan_to_num(0.0)
            radius = square.sqrt()
            distance = torch.minimum(torch.maximum(radius, self.start), self.enough)
        bound = value - curvature * distance.square() / 2
        gradients = torch.autograd.grad(bound.sum(), list(leaves.values()), allow_unused=True)
        first, second = 1 - _MEAN ** (step + 1), 1 - _SQUARE ** (step + 1)
        ahead = dict(self.parameters)
        with torch.no_grad():
            for (name, value), found in zip(leaves.items(), gradients, strict=True):
                if found is None:
                    continue
                gradient = found.nan_to_num(0.0, 0.0, 0.0)
                mean = self.means[name].mul_(_MEAN).add_(gradient, alpha=1 - _MEAN)
                size = self.squares[name].mul_(_SQUARE).addcmul_(gradient, gradient, value=1 - _SQUARE)
                move = mean / first / ((size / second).sqrt() + 1e-30)
                ahead[name] = value + pace * self.scales[name] * move
        return radius, ahead

    def _at_input(self, minorant: Minorant, room: Tensor) -> tuple[Tensor, Tensor]:
        """M + V, and the curvature τ + d that is paid for it; see :mod:`gramcert.minorants.proof`."""
        shaped = (-1, *[1] * (minorant.slope.dim() - 1))
        tau = room
        for name, q in minorant.first.items():
            tau = tau + q * self.layout.evaluation.steps[name][1] ** 2
        with torch.no_grad():
            bent = sum(q.reshape(shaped) * self._through(name, self.point)[1] for name, q in minorant.first.items())
            self.point = (bent - minorant.slope) / tau.reshape(shaped)
        point = self.point
        gradient = minorant.slope + tau.reshape(shaped) * point
        value = (minorant.slope * point).flatten(1).sum(1) + tau * point.flatten(1).square().sum(1) / 2
        for name, q in minorant.first.items():
            image, back = self._through(name, point)
            value = value - q * image.flatten(1).square().sum(1) / 2
            gradient = gradient - q.reshape(shaped) * back
        value = value - gradient.flatten(1).square().sum(1) / (2 * room)
        return minorant.constant + value, tau + minorant.curvature

    def _through(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        return there_and_back(self.search.first[name], x)


class _Floating(Backward):
    """A pass in float32."""

    is_proof = False

    def __init__(self, search: Search, centre: Centre, pairs: Pairs) -> None:
        super().__init__(search.layout, centre, pairs.samples)
        self.quick = search.quick
        self._known: dict[int, Tensor] = {}
        logits = centre.course.values[search.layout.output].flatten(1)[pairs.samples]
        margin, slope = pairs.margins(logits)
        self.margin = margin.to(DTYPE)
        self.slope = slope.to(DTYPE).reshape(-1, *search.layout.nodes[search.layout.output].shape)

    def pull(self, node: Node, c: Tensor) -> Tensor:
        return self.quick[node.name].adjoint(c)

    def value(self, values: Tensor) -> Tensor:
        if id(values) not in self._known:
            self._known[id(values)] = values[self.samples].to(DTYPE)
        return self._known[id(values)]


class _Beginning(_Floating):
    """Chooses slopes on its way: those of the network linearised at the centre."""

    def __init__(self, search: Search, centre: Centre, pairs: Pairs, start: Tensor) -> None:
        super().__init__(search, centre, pairs)
        self.start = start
        self.slopes: dict[str, Tensor] = {}
        self.extras: dict[str, Tensor] = {}

    def rounded(self, name: str, c: Tensor) -> None:
        """Is told every slope before it is used."""
        layout = self.layout
        if name not in layout.bent and name not in layout.cut:
            return
        constant = max(layout.constants[place] for place in layout.nodes[name].inputs)
        length = c.flatten(1).norm(dim=1).clamp_min(1e-20)
        pays = length / (self.start * max(constant, 1e-30))
        self.extras[name] = (pays if name in layout.cut else _FIRST_EXTRA * pays).clamp(1e-30, 1e30)
        if name in layout.bent:
            at = self.centre.slopes.get(name)
            self.slopes[name] = c * self.value(at[0]) if at is not None else c.clone()


def _multipliers(parameters: dict[str, Tensor]) -> Multipliers:
    """Positive numbers are kept by their logarithms."""
    return Multipliers.of_tensors(
        {name: value if name.startswith("slopes/") else value.exp() for name, value in parameters.items()}
    )
