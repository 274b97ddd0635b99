r"""One activation in a backward pass: the least value of what is left when a linear function of its input is taken off.

Around a centre ẑ, with Δ = z - ẑ and Δφ = φ(z) - φ(ẑ), a unit has to minimise

    h(Δ) = c·Δφ - ½d·Δφ² - g·Δ + ½λ·Δ²,        λ = d·s² + e,  e > 0,

where s bounds the slopes of φ. The result, at most h(0) = 0, is what the unit adds to the constant of the minorant; g
and λ go on to its input. Every g and every e > 0 are allowed, so they may come from any search.

Each function here gives a lower bound of the minimum. With ``is_proof`` it includes the rounding of its own operations
in float64; without, it is the same formula for a search, whose gradient is that of h at the minimiser.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.operators.elementwise import Curvature, Local, Number, Pieces, Slopes
from gramcert.rounding import gamma, next_down, next_up

# At least the roundings in a row of any formula here.
_ROUNDINGS = 24

# Numbers of a proof are at most 2³⁰⁰, and each extra curvature at least 2⁻³⁰⁰. So what the operations here lose to
# underflow, 2⁻¹⁰²² each and then multiplied by at most two such numbers, is together below 2⁻⁴⁰⁰.
LARGEST, SMALLEST, LOST = 2.0**300, 2.0**-300, 2.0**-400


@dataclass(frozen=True)
class Problem:
    """Of many units at once: (pairs, *shape); d, λ and e are one for all units of a pair.

    Attributes:
        centre: ẑ.
        c, g: slopes before and behind.
        d, extra: d and e.
        steepest: s², or more.
    """

    centre: Tensor
    c: Tensor
    g: Tensor
    d: Tensor
    extra: Tensor
    steepest: float


@dataclass(frozen=True)
class Slope:
    """The slope of φ at the centres, and how far the true one may be from it."""

    value: Tensor
    off: Tensor


def lowest(problem: Problem, slopes: Slopes, local: Local, at: Slope | None, *, is_proof: bool) -> Tensor:
    """The best bound that is known for a function of each entry."""
    if isinstance(local, tuple):
        found = [_piecewise(problem, pieces, is_proof=is_proof) for pieces in local]
        return found[0] if len(found) == 1 else torch.stack(found).amin(0)
    by_slopes = _by_slopes(problem, slopes, is_proof=is_proof)
    if isinstance(local, Curvature) and at is not None:
        return torch.maximum(by_slopes, _curved(problem, local, at, is_proof=is_proof))
    return by_slopes


def _piecewise(problem: Problem, pieces: Pieces, *, is_proof: bool) -> Tensor:
    r"""On each piece h is a convex parabola, of curvature λ - d·s_k² >= e.

    Let p be a point of the piece, found in any way. For all others h(p') >= h(p) + h'(p)(p' - p) + ½e(p' - p)², which
    is at least h(p) - w²/2e, where w is what of h'(p) can still be gained: all of it inside the piece, at an end only
    what leads into it.
    """
    z, c, g, d, extra = problem.centre, problem.c, problem.g, problem.d, problem.extra
    ends = (-math.inf, *pieces.breaks, math.inf)
    value, size = _value(pieces, z)
    lowest: Tensor | None = None
    for k, (slope, offset) in enumerate(zip(_typed(pieces.slopes, z), pieces.offsets, strict=True)):
        # Δφ = s_k·Δ + jump, so that d·s²·Δ² - d·Δφ² has no large terms that cancel where e is small beside d.
        spare = torch.as_tensor(problem.steepest - slope * slope, dtype=z.dtype).clamp_min(0)
        jump = slope * z + offset - value
        with torch.no_grad():
            free = (g - c * slope + d * slope * jump) / (extra + d * spare)
            point = (z + free).clamp(ends[k], ends[k + 1])
        step = point - z
        turn = 2 * slope * step + jump
        # In a proof from the point itself: a piece continued to a centre far from it has large terms that cancel.
        rise = slope * point + offset - value if is_proof else slope * step + jump
        least = c * rise - g * step + (extra * step * step + d * (spare * step * step - jump * turn)) / 2
        if is_proof:
            off = gamma(_ROUNDINGS)
            steps, jumps = point.abs() + z.abs(), (slope * z).abs() + abs(offset) + size
            turns = 2 * (slope * steps).abs() + jumps
            rises = (slope * point).abs() + abs(offset) + size
            amount = c.abs() * rises + g.abs() * steps
            amount = amount + (extra * steps * steps + d * (problem.steepest * steps * steps + jumps * turns)) / 2
            change = c * slope - g + extra * step + d * (spare * step - slope * jump)
            sizes = (c * slope).abs() + g.abs() + extra * steps
            unsure = off * (sizes + d * (problem.steepest * steps + (slope * jumps).abs())) + LOST
            inside = (point > ends[k]) & (point < ends[k + 1])
            out = torch.where(inside, change.abs() + unsure, _back(change, unsure, point, ends[k]))
            excess = next_up(out * out / (2 * extra)) * (1 + 2 * off) + LOST
            least = next_down(least - (next_up(off * amount * (1 + 2 * off)) + excess) * (1 + 2 * off) - LOST)
        lowest = least if lowest is None else torch.minimum(lowest, least)
    assert lowest is not None
    return lowest


def _back(change: Tensor, unsure: Tensor, point: Tensor, low: float) -> Tensor:
    """At an end of a piece: how much a step into the piece may still gain."""
    return torch.where(point <= low, unsure - change, unsure + change).clamp_min(0)


def _value(pieces: Pieces, z: Tensor) -> tuple[Tensor, Tensor]:
    """φ(z), and a bound of the numbers that it was summed from."""
    first, *others = _typed(pieces.slopes, z)
    value = first * z + pieces.offsets[0]
    size = value.abs() + 2 * abs(pieces.offsets[0])
    for place, slope, offset in zip(pieces.breaks, others, pieces.offsets[1:], strict=True):
        behind = slope * z + offset
        is_behind = z > place
        size = torch.where(is_behind, behind.abs() + 2 * abs(offset), size)
        value = torch.where(is_behind, behind, value)
    return value, size


def _typed(slopes: tuple[Number, ...], like: Tensor) -> list[Number]:
    """One for each channel in the type of the values."""
    return [slope.to(like.dtype) if isinstance(slope, Tensor) else slope for slope in slopes]


def _by_slopes(problem: Problem, slopes: Slopes, *, is_proof: bool) -> Tensor:
    """Δφ = DΔ with D between the slopes, so that h >= (cD - g)Δ + ½eΔ² >= -(cD - g)²/2e."""
    c, g = problem.c, problem.g
    steepest = torch.maximum((c * slopes[0] - g).abs(), (c * slopes[1] - g).abs())
    if is_proof:
        steepest = steepest + _unsure(c * max(map(abs, slopes)), g)
    return _parabola(steepest, problem.extra, is_proof=is_proof)


def _curved(problem: Problem, curvature: Curvature, at: Slope, *, is_proof: bool) -> Tensor:
    """c·Δφ >= c·φ'(ẑ)Δ - ½bΔ², where -b <= c·φ'' is the strongest bend; so h >= (cφ' - g)Δ + ½(e - b)Δ²."""
    c, g = problem.c, problem.g
    bend = -torch.minimum(c * curvature.least, c * curvature.most).clamp_max(0)
    is_known = torch.isfinite(at.off)
    off = torch.where(is_known, at.off, 0.0)
    steep = (c * at.value - g).abs() + c.abs() * off
    room = problem.extra - bend
    if is_proof:
        steep = steep + _unsure(c * (at.value.abs() + off), g)
        room = next_down(problem.extra - next_up(bend))
    is_known &= room > 0
    found = _parabola(steep, torch.where(is_known, room, 1.0), is_proof=is_proof)
    return torch.where(is_known, found, -math.inf)


def largest(problem: Problem, gap: Tensor, *, is_proof: bool) -> Tensor:
    r"""The same for y = max_j z_j of a window, with g on the entry t that is largest at the centre.

    c·Δy >= c·Δ_t where c >= 0, and h >= (c - g)Δ_t + ½eΔ_t². Where c < 0, c·y is the least of all c·z_j. With j = t
    this is the same bound; any other j is at least ``gap`` below t at the centre, and

        c(Δ_j - gap) - gΔ_t + ½e(Δ_j² + Δ_t²) >= |c|·gap - (c² + g²)/2e.

    Here Δ² of a unit is summed over its window, and d·Δy² is at most d times that sum.
    """
    c, g, extra = problem.c, problem.g, problem.extra
    off = gamma(_ROUNDINGS) if is_proof else 0.0
    steep = (c - g).abs()
    first = _parabola(steep + _unsure(c, g) if is_proof else steep, extra, is_proof=is_proof)
    gain = torch.where(torch.isfinite(gap), c.abs() * gap, 0.0)
    spent = (c * c + g * g) / (2 * extra)
    if is_proof:
        gain, spent = gain * (1 - off), next_up(spent * (1 + 2 * off) + LOST)
    second = gain - spent
    second = next_down(second) if is_proof else second
    return torch.where((c < 0) & torch.isfinite(gap), torch.minimum(first, second), first)


def _parabola(steep: Tensor, curvature: Tensor, *, is_proof: bool) -> Tensor:
    """-a²/2k, the least value of aΔ + ½kΔ²."""
    least = -steep * steep / (2 * curvature)
    return next_down(least * (1 + 2 * gamma(_ROUNDINGS)) - LOST) if is_proof else least


def _unsure(first: Tensor, second: Tensor) -> Tensor:
    """Rounding of a difference of products."""
    return next_up(gamma(_ROUNDINGS) * (first.abs() + second.abs())) + LOST
