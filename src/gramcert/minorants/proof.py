r"""The radius that multipliers prove: one pass in float64, every rounding counted.

Rounding enters in two ways. Centres are computed, v̂ = fl(f(û)): c·Δv then has a part c·ρ with ‖ρ‖ at most what the
evaluation says, which is taken off the constant, and

    ‖Δv + ρ‖² <= (1 + η)‖Δv‖² + (1 + 1/η)‖ρ‖².

Slopes are computed, ĉ = fl(Aᵀc): what is lost is at most ‖ĉ - Aᵀc‖·‖Δu‖, and ‖Δu‖ <= L_u·ε + (distance of û from the
exact value) for all inputs within ε. So the margin is at least

    M + c·δ - ½d·‖δ‖² - ½Σ q_z‖A_zδ‖² - B·ε.

At the input, for any point p and τ = ξ + Σ q_z‖A_z‖², the sum of the terms with δ and ½τ‖δ‖² is strongly convex with
modulus ξ, so that it is at least its value at p minus ‖its gradient at p‖²/2ξ. With V for that, the margin is positive
for all ‖δ‖ <= ε if M + V - B·ε - ½(τ + d)ε² > 0.
"""

import math

import torch
from torch import Tensor

from gramcert.minorants.backward import Backward, Minorant, Multipliers, Pairs
from gramcert.minorants.layout import Centre, Layout
from gramcert.minorants.quick import DTYPE, Quick, there_and_back
from gramcert.minorants.units import LARGEST, LOST, SMALLEST, Problem
from gramcert.operators.graph import Node
from gramcert.operators.linear import LinearMap, Shift
from gramcert.operators.rounded import Rounded, flat, norms
from gramcert.rounding import gamma, next_down, next_up, up

# η of the split between what moves and what was rounded, and 1 + 1/η.
_SHARE, _RATIO = 2.0**-26, 2.0**26 + 1

# Steps of the iteration that looks for p.
POINT_STEPS = 12


def prove(layout: Layout, centre: Centre, pairs: Pairs, multipliers: Multipliers) -> Tensor:
    """For each pair of a sample and a class: up to which distance the sample is proved to stay apart from the class."""
    logits = centre.course.values[layout.output][pairs.samples].flatten(1)
    margin, slope = pairs.margins(logits)
    margin = next_down(margin)
    exact = Multipliers.of_tensors({name: value.double() for name, value in multipliers.tensors().items()})
    counted = _Counted(layout, centre, pairs.samples)
    found = counted(margin, slope.reshape(-1, *layout.nodes[layout.output].shape), exact)
    radius = _radius(layout, found, exact.room, counted)
    is_allowed = torch.stack([_is_positive(part) for name, part in exact.tensors().items() if "slopes/" not in name])
    return torch.where(is_allowed.all(0) & counted.is_moderate, radius, 0.0)


class _Counted(Backward):
    """All roundings go to two sums: what they cost at the centre, and by how much that grows with the distance."""

    is_proof = True

    def __init__(self, layout: Layout, centre: Centre, samples: Tensor) -> None:
        super().__init__(layout, centre, samples)
        self.cost, self.growth = (torch.zeros(len(samples), dtype=torch.float64) for _ in range(2))
        self.is_moderate = torch.ones(len(samples), dtype=torch.bool)

    def charge(self, name: str, error: Tensor) -> None:
        """A slope of a value is off by at most so much."""
        away = self.centre.distances[name][self.samples]
        self.cost = next_up(self.cost + _product(error, away))
        self.growth = next_up(self.growth + _product(error, error.new_tensor(self.layout.constants[name])))

    def pull(self, node: Node, c: Tensor) -> Tensor:
        assert isinstance(node.operation, LinearMap)
        back, error = node.operation.pull(c)
        self.charge(node.inputs[0], error)
        return back

    def value(self, values: Tensor) -> Tensor:
        return values[self.samples]

    def squared(self, constant: float) -> float:
        return up(constant * constant)

    def square(self, c: Tensor) -> Tensor:
        length = norms(c)
        return next_up(length * length)

    def up(self, values: Tensor) -> Tensor:
        return next_up(values)

    def sum_up(self, weights: Tensor) -> Tensor:
        return next_up(weights.sum(1) * (1 + 2 * gamma(weights.shape[1])))

    def less(self, constant: Tensor, loss: Tensor) -> Tensor:
        return next_down(constant - loss)

    def plus(self, constant: Tensor, low: Tensor, problem: Problem) -> Tensor:
        for part in (problem.centre, problem.c, problem.g, problem.d * problem.steepest, problem.d, problem.extra):
            self.is_moderate &= (flat(part).abs() <= LARGEST).all(1)  # what is no number is not
        self.is_moderate &= flat(problem.extra).amin(1) >= SMALLEST
        rows = flat(low)
        off = next_up(rows.abs().sum(1) * (2 * gamma(rows.shape[1] + 1)))
        return next_down(constant + next_down(next_down(rows.sum(1) - off) - LOST))

    def added(self, name: str, first: Tensor, second: Tensor) -> Tensor:
        total = first + second
        self.charge(name, next_up(norms(total) * gamma(1)))
        return total

    def gathered(self, name: str, g: Tensor, constant: float) -> None:
        # Sums of n = L² numbers are off by γ_n times the sums of their sizes, which together have a norm of L·‖g‖.
        self.charge(name, next_up(norms(g) * up(gamma(math.ceil(constant * constant)) * constant)))

    def rounded(self, name: str, c: Tensor) -> None:
        self.cost = next_up(self.cost + _product(norms(c), self.centre.course.local[name][self.samples]))

    def unrounded(self, name: str, d: Tensor) -> Tensor:
        between = self.centre.course.between[name][self.samples]
        self.cost = next_up(self.cost + _product(next_up(d * _RATIO), next_up(between * between)))
        return next_up(d * (1 + _SHARE))


def _radius(layout: Layout, found: Minorant, room: Tensor, counted: _Counted) -> Tensor:
    """The largest ε with M + V - B·ε - ½(τ + d)ε² >= 0, rounded down; 0 where there is none."""
    shaped = (-1, *[1] * (found.slope.dim() - 1))
    maps = {name: [part for part in layout.first[name] if not isinstance(part, Shift)] for name in found.first}
    norm = {name: layout.evaluation.steps[name][1] for name in maps}
    tau = room
    for name, q in found.first.items():
        tau = next_up(tau + next_up(q * up(norm[name] * norm[name])))
    point = _point(found, maps, tau.reshape(shaped)) if maps else -found.slope / tau.reshape(shaped)
    gradient = found.slope + tau.reshape(shaped) * point
    slope_norm, point_norm = norms(found.slope), norms(point)
    amount, off = next_up(slope_norm + next_up(tau * point_norm)), torch.zeros_like(tau)
    entries = math.prod(point.shape[1:])
    low = (found.slope * point).flatten(1).sum(1)
    low = next_down(low - next_up(next_up(slope_norm * point_norm) * gamma(entries + 2)))
    squares = point.flatten(1).square().sum(1) * (1 - 2 * gamma(entries + 2))
    low = next_down(low + next_down(tau * next_down(squares - LOST).clamp_min(0)) / 2)
    for name, q in found.first.items():
        image, image_off = _through(maps[name], point)
        back, back_off = _through(maps[name][::-1], image, is_adjoint=True)
        length = next_up(norms(image) + image_off)
        low = next_down(low - next_up(q * next_up(length * length)) / 2)
        gradient = gradient - q.reshape(shaped) * back
        amount = next_up(amount + next_up(q * norms(back)))
        off = next_up(off + next_up(q * next_up(back_off + next_up(norm[name] * image_off))))
    off = next_up(off + next_up(amount * gamma(2 * len(maps) + 4)))
    steep = next_up(norms(gradient) + off)
    low = next_down(low - next_up(next_up(steep * steep) / (2 * room)))
    margin = next_down(next_down(next_down(found.constant - counted.cost) + low) - LOST)
    total, growth = next_up(tau + found.curvature), counted.growth
    root = next_up(next_up(next_up(growth * growth) + next_up(2 * next_up(total * margin))).sqrt())
    radius = next_down(2 * margin / next_up(growth + root))
    return torch.where(margin > 0, radius, 0.0).nan_to_num(0.0, float("inf"), 0.0).clamp_min(0)


def _point(found: Minorant, maps: dict[str, list[LinearMap]], tau: Tensor) -> Tensor:
    """Near to where τδ = Σ q_z·A_zᵀA_zδ - c; whatever it is, it may be used."""
    quick = {name: [Quick.of(part) for part in parts] for name, parts in maps.items()}
    slope, wide, tau = found.slope.to(DTYPE), tau, tau.to(DTYPE)
    factors = {name: q.to(DTYPE).reshape(tau.shape) for name, q in found.first.items()}
    point = -slope / tau
    for _ in range(POINT_STEPS):
        bent = sum(q * there_and_back(quick[name], point)[1] for name, q in factors.items())
        point = (bent - slope) / tau
    exact = -found.slope / wide
    return torch.where(torch.isfinite(point), point, exact)  # numbers that float32 does not hold


def _through(maps: list[LinearMap], x: Tensor, *, is_adjoint: bool = False) -> Rounded:
    """Linear maps one after the other, or their adjoints, and how far the result may be from the exact one."""
    off = torch.zeros(len(x), dtype=torch.float64)
    for part in maps:
        x, local = part.pull(x) if is_adjoint else part.run(x)
        off = next_up(next_up(off * up(part.size + part.error)) + local)
    return x, off


def _is_positive(part: Tensor) -> Tensor:
    """Whether all numbers of a pair are, and none is too small or too large to be divided by."""
    rows = flat(part)
    return ((rows >= SMALLEST) & (rows <= LARGEST)).all(1)


def _product(first: Tensor, second: Tensor) -> Tensor:
    """Upper bound of a product of numbers that are not negative, 0 where one of them is."""
    return torch.where((first == 0) | (second == 0), 0.0, next_up(first * second))
