r"""Two inputs whose outputs are far apart: what no Lipschitz constant is below, with a proof.

For any two inputs, ‖f(a) - f(b)‖/‖a - b‖ is a lower bound of the constant. A search moves pairs c ± hv: the gradient of
‖f(a) - f(b)‖² at both ends turns v as a power iteration on the Jacobians does, and moves c to where they differ. The
search proves nothing and is in plain float64. Of the best pairs the quotient is then computed anew with everything that
rounding may have done to f(a), f(b), their difference and its norm taken off it.

How much is tried follows from the size of the network and not from the clock, so that a network has one lower bound.
"""

import math

import torch
from torch import Tensor

from gramcert.operators.evaluation import Evaluation, run_node
from gramcert.operators.graph import Graph, Input
from gramcert.operators.linear import LinearMap
from gramcert.operators.propagation import Measure, Plan
from gramcert.operators.rounded import flat
from gramcert.rounding import (
    checked_arithmetic,
    down,
    gamma,
    norm_down,
    norm_up,
    product_down,
    product_up,
    root_down,
    sum_up,
)

# Products in one search, one to three seconds; one evaluation with its gradient counts as three. Each node is worth
# so many in any case, for all pairs together.
WORK, GRADIENT, CALL = 2**32, 3, 2**18

# Pairs that are moved at once, and steps of each in the largest networks.
MOST_PAIRS, LEAST_STEPS = 16, 3

# Of the first centres, entry by entry; the largest is one over it.
SMALLEST_SCALE = 0.1

# The half distance of a pair against its first centre, at the first and at the last step.
REACH = (0.3, 0.01)

# Parts of the best pair's distance that are tried too: where slopes change, a shorter way may be steeper.
SHORTER = (1.0, 2.0**-3, 2.0**-6, 2.0**-10)


def lower_by_pairs(plan: Plan, measure: Measure, steps: int, *, seed: int = 0) -> float:
    """A proved lower bound of the constant of all outputs together, by the best pair that was found.

    Args:
        plan: of a graph whose values can all be computed.
        measure: its norms, which bound what rounding may do.
        steps: of the search; large networks get fewer.
        seed: of the first pairs.

    Raises:
        NotEvaluatedError: some value cannot be computed here.
    """
    evaluation = Evaluation(plan, measure)
    graph = plan.graph
    outputs = list(dict.fromkeys(graph.outputs.values()))  # one that is returned twice may count once
    inputs = [node for node in graph.nodes.values() if isinstance(node.operation, Input)]
    if not outputs or not inputs:
        return 0.0
    affordable = WORK // max(1, _work(graph))
    calls = WORK // (GRADIENT * CALL * len(graph.nodes))
    steps = max(LEAST_STEPS, min(steps, affordable // (2 * GRADIENT), calls))
    count = max(1, min(MOST_PAIRS, affordable // (2 * GRADIENT * steps)))
    centres, ways = _search(graph, outputs, inputs[0].shape, steps, count, seed)
    ends = torch.cat([centres + ways, centres - ways])
    with checked_arithmetic("audit"):
        course = evaluation.course(ends, set(outputs))
        images = [(course.values[name], course.distances[name]) for name in outputs]
        return max(_quotient(ends, images, i, i + len(centres)) for i in range(len(centres)))


def _quotient(ends: Tensor, images: list[tuple[Tensor, Tensor]], one: int, two: int) -> float:
    """‖f(a) - f(b)‖/‖a - b‖ from below; both differences are rounded once in each entry."""
    once = sum_up([1.0, gamma(1)])
    total = 0.0
    for values, distances in images:
        apart = down(norm_down(values[one] - values[two]) / once)
        part = max(0.0, down(apart - sum_up([float(distances[one]), float(distances[two])])))
        total = max(0.0, down(total + product_down(part, part)))
    distance = product_up(norm_up(ends[one] - ends[two]), once)
    found = down(root_down(total) / distance) if distance > 0 else 0.0
    return found if 0.0 <= found < math.inf else 0.0  # also what is not a number


def _search(
    graph: Graph, outputs: list[str], shape: tuple[int, ...], steps: int, count: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Centres and half differences of the pairs that are worth a proof."""
    generator = torch.Generator().manual_seed(seed)
    # Evenly in logarithms; one alone in the middle, at 1.
    places = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    scales = SMALLEST_SCALE ** (1 - 2 * places)
    centres = torch.randn(count, *shape, generator=generator, dtype=torch.float64) * _column(scales, shape)
    ways = _unit(torch.randn(count, *shape, generator=generator, dtype=torch.float64))
    sizes = scales * math.sqrt(math.prod(shape))
    best, kept_centres, kept_ways = torch.zeros(count, dtype=torch.float64), centres.clone(), ways.clone()
    with torch.inference_mode(False), torch.enable_grad():
        for step in range(steps):
            reach = sizes * REACH[0] * (REACH[1] / REACH[0]) ** (step / max(1, steps - 1))
            halves = ways * _column(reach, shape)
            ends = torch.cat([centres + halves, centres - halves]).requires_grad_()
            one, two = _values(graph, outputs, ends).chunk(2)
            apart = (one - two).square().sum(1)
            (gradient,) = torch.autograd.grad(apart.sum(), ends)
            quotients = apart.detach().sqrt() / (2 * reach)
            better = quotients > best
            best = torch.where(better, quotients, best)
            kept_centres[better], kept_ways[better] = centres[better], halves[better]
            up, low = gradient.chunk(2)
            turned = _unit(up - low)
            still = (flat(turned) == 0).all(1)  # where nothing moves, the way stays as it was
            ways = torch.where(_column(still, shape), ways, turned)
            centres = centres + _column(reach, shape) * _unit(up + low)
    first = int(best.argmax())
    shorter = torch.stack([part * kept_ways[first] for part in SHORTER])
    few = best.argsort(descending=True)[1:4]
    return torch.cat([kept_centres[first].expand_as(shorter), kept_centres[few]]), torch.cat([shorter, kept_ways[few]])


def _values(graph: Graph, outputs: list[str], x: Tensor) -> Tensor:
    """All outputs side by side, for gradients; nothing is said of rounding."""
    values: dict[str, Tensor] = {}
    for node in graph.nodes.values():
        inputs = [values[name] for name in node.inputs]
        values[node.name] = run_node(node, inputs)[0] if inputs else x
    return torch.cat([flat(values[name]) for name in outputs], 1)


def _work(graph: Graph) -> int:
    """Products of one evaluation, or entries where there are none."""
    return sum(
        math.prod(node.shape) * (node.operation.terms if isinstance(node.operation, LinearMap) else 1)
        for node in graph.nodes.values()
    )


def _unit(x: Tensor) -> Tensor:
    return x / _column(flat(x).norm(dim=1).clamp(min=torch.finfo(x.dtype).tiny), x.shape[1:])


def _column(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """One value for each sample, against samples of this shape."""
    return values.reshape(-1, *[1] * len(shape))
