r"""Multipliers that make ρ small: a closed form, then a descent. Whatever it finds is only a proposal.

log ρ is a smooth function of the logarithms of the multipliers once the largest eigenvalue over all frequencies is
smoothed to (Σ λ^q)^(1/q), and the forms themselves are a barrier: (aΛ - M)⁻¹ grows where Λ comes too near to M. So
limited-memory BFGS descends, with steps that stay inside. The smoothing costs up to log(n)/q for n eigenvalues; when
the descent has come to its end, q grows.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gramcert.networks.elimination import Eliminated, Elimination
from gramcert.progress import Report, silent

# Shapes of the closed form that are tried: power of the diagonal, factor of the size.
CLOSED_FORMS = ((0.25, 0.7), (0.25, 0.75), (0.5, 0.8), (0.25, 0.9), (0.0, 1.0))

# Sharpness of the smoothed maximum: first, growth, last.
FIRST_SHARPNESS, GROWTH, LAST_SHARPNESS = 8.0, 4.0, 3e7

# Pairs of steps and gradients that are kept, and steps with one sharpness.
MEMORY, MOST_STEPS = 30, 100

# A descent has come to its end when so many steps gained less than this part of the smoothing.
WINDOW, SMALL_GAIN = 10, 2e-3

# What a sharper maximum has to gain in log ρ, so that the next one is tried.
NOTHING_LEFT = 1e-6

# The largest change of the logarithm of a multiplier in one step, and the part of the gain a step has to keep.
LONGEST_STEP, SUFFICIENT = 1.0, 1e-4


@dataclass(frozen=True, eq=False)
class Proposal:
    """Parameters of an elimination.

    Attributes:
        parameters: of each variable.
        logarithm: log ρ, with the exact maximum over the frequencies of the elimination.
        sharpness: with which the descent goes on from here.
        closed: the closed form that it is, if it is one.
        shifts: the frequencies that it is about.
    """

    parameters: list[Tensor]
    logarithm: float
    sharpness: float = FIRST_SHARPNESS
    closed: tuple[float, float] | None = None
    shifts: tuple[bool, ...] = ()


Keep = Callable[[Proposal], None]


def is_finished(proposal: Proposal) -> bool:
    """Whether a descent came to its end by itself, not by its budget."""
    return proposal.sharpness > LAST_SHARPNESS


class Budget:
    """How long a descent may go on: some seconds, or some passes, which are the same on every machine."""

    def __init__(
        self,
        seconds: float = math.inf,
        passes: int | None = None,
        report: Report = silent,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds, self.passes, self.report, self.clock = seconds, passes, report, clock
        self.begin, self.done = clock(), 0

    @property
    def goes_on(self) -> bool:
        """Whether something is left."""
        is_left = self.passes is None or self.done < self.passes
        return is_left and self.clock() - self.begin < self.seconds

    def tell(self, logarithm: float) -> None:
        """Report what has been reached."""
        constant = f"forms: {math.exp(min(logarithm, 1400.0) / 2):.6g}"
        if self.passes is not None:
            self.report(constant, min(self.done, self.passes), self.passes)
        else:
            self.report(constant, round(min(self.clock() - self.begin, self.seconds)), round(self.seconds))


def closed_form(elimination: Elimination, only: tuple[float, float] | None = None) -> Proposal | None:
    """The best of a few, or a given one."""
    best: Proposal | None = None
    for power, factor in CLOSED_FORMS if only is None else (only,):
        passed = elimination.closed_form(power, factor)
        if passed is None or not math.isfinite(value := float(passed.logarithm)):
            continue
        if best is None or value < best.logarithm:
            shifts = tuple(component.is_shifted for component in elimination.program.components)
            best = Proposal(passed.parameters, value, FIRST_SHARPNESS, (power, factor), shifts)
    return best


def descend(elimination: Elimination, start: Proposal, budget: Budget, keep: Keep = lambda _: None) -> Proposal:
    """From a proposal to a better one; ``keep`` is told where to go on if the descent is interrupted."""
    best, sharpness = start, start.sharpness
    sizes = [len(part) for part in start.parameters]
    flat = torch.cat(start.parameters)
    while sharpness <= LAST_SHARPNESS and budget.goes_on:
        descent = _Descent(elimination, replace(start, sharpness=sharpness), budget, keep)
        flat = descent.run(flat)
        if budget.goes_on:
            sharpness *= GROWTH
        with torch.no_grad():
            passed = elimination.run(list(flat.split(sizes)), math.inf)
        before = best.logarithm
        if passed is not None and float(passed.logarithm) < best.logarithm:
            best = Proposal(list(flat.split(sizes)), float(passed.logarithm), sharpness, None, start.shifts)
        else:
            best = replace(best, sharpness=sharpness)
        if before - best.logarithm < NOTHING_LEFT and sharpness > FIRST_SHARPNESS * GROWTH and budget.goes_on:
            best = replace(best, sharpness=math.inf)  # also for whoever goes on from here
        keep(best)
        sharpness = best.sharpness
    return best


class _Descent:
    """Limited-memory BFGS for one sharpness."""

    def __init__(self, elimination: Elimination, start: Proposal, budget: Budget, keep: Keep) -> None:
        self.elimination, self.sharpness, self.shifts = elimination, start.sharpness, start.shifts
        self.sizes = [len(part) for part in start.parameters]
        self.budget, self.keep = budget, keep
        self.steps: list[tuple[Tensor, Tensor, float]] = []

    def value(self, flat: Tensor) -> tuple[float, Tensor]:
        """The smoothed logarithm and its gradient; infinity where a multiplier is too small."""
        self.budget.done += 1
        with torch.enable_grad():
            point = flat.detach().requires_grad_(True)
            passed: Eliminated | None = self.elimination.run(list(point.split(self.sizes)), self.sharpness)
            if passed is None or not math.isfinite(float(passed.logarithm.detach())):
                return math.inf, flat
            if not passed.logarithm.requires_grad:  # nothing to choose
                return float(passed.logarithm), torch.zeros_like(flat)
            (gradient,) = torch.autograd.grad(passed.logarithm, point)
        if not bool(gradient.isfinite().all()):
            return math.inf, flat
        return float(passed.logarithm.detach()), gradient

    def run(self, flat: Tensor) -> Tensor:
        """Until nothing is gained any more, or the time is over."""
        value, gradient = self.value(flat)
        if math.isinf(value):
            return flat
        values = [value]
        for _ in range(MOST_STEPS):
            direction = self._direction(gradient)
            slope = float(gradient @ direction)
            if not slope < 0:
                self.steps.clear()
                direction, slope = -gradient, -float(gradient @ gradient)
            if slope == 0:
                break
            length = min(1.0, LONGEST_STEP / float(direction.abs().max()))
            while length > 1e-12 and self.budget.goes_on:
                new_value, new_gradient = self.value(flat + length * direction)
                if new_value <= value + SUFFICIENT * length * slope:
                    break
                length /= 2
            else:
                break
            step, change = length * direction, new_gradient - gradient
            curvature = float(step @ change)
            if curvature > 1e-12 * float(step.norm() * change.norm()):
                self.steps = [*self.steps[1 - MEMORY :], (step, change, curvature)]
            flat, value, gradient = flat + step, new_value, new_gradient
            self.budget.tell(value)
            self.keep(Proposal(list(flat.split(self.sizes)), value, self.sharpness, None, self.shifts))
            values.append(value)
            if len(values) > WINDOW and values[-1 - WINDOW] - value < SMALL_GAIN / self.sharpness:
                break
        return flat

    def _direction(self, gradient: Tensor) -> Tensor:
        """Minus the inverse Hessian, as far as it is known, times the gradient."""
        direction, weights = -gradient, []
        for step, change, curvature in reversed(self.steps):
            weight = float(step @ direction) / curvature
            weights.append(weight)
            direction = direction - weight * change
        if self.steps:
            _, change, curvature = self.steps[-1]
            direction = direction * (curvature / float(change @ change))
        else:
            direction = direction * min(1.0, 0.1 / max(float(gradient.abs().max()), 1e-300))
        for (step, change, curvature), weight in zip(self.steps, reversed(weights), strict=True):
            direction = direction + (weight - float(change @ direction) / curvature) * step
        return direction
