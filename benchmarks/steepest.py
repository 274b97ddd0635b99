"""Where a network is steepest, searched for: what no Lipschitz constant, or none that follows from slopes, is below.

The Jacobian of a network with ReLU is constant on polytopes, so its norm has no gradient. With softened activations it
has one: a kink becomes as wide as a part of the spread of its layer's values, the norm of J(x)ᵀu climbs in x by Adam
and in u by power iterations, and that part shrinks until almost the original network is left. What ``steepest``
returns is a difference quotient of the original network in float64, a lower bound whatever the search did. Where the
first layer is a small matrix and onto, its values are moved instead of the inputs: each kink is then near in one step.

The steepest polytopes are tiny ones, around points where many units are at their kinks at once, and Adam passes them
by. In a network with few units, a walk goes on from where it stopped: from corner to corner of polytopes, by linear
programs. From a corner where as many units are at kinks as there are coordinates, small steps bring about any slopes of
these units, so that the best ones are chosen as if they were free.

Bounds that know of an activation nothing but its slopes hold for every choice of slopes, also for those that no input
brings about. ``steepest_slopes`` searches among these: between it and ``steepest`` lies what such bounds cannot see.
"""

import copy
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linprog
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

WIDTHS = (0.3, 0.01)  # of the kinks, at the first and the last step
RATES = (0.03, 0.5)  # of Adam, against the size of an input; each start draws its own
SCALES = (0.03, 30.0)  # of the first inputs
LOOKS = 10  # how often the original network is asked during one climb
SMALL = 512  # values of a first layer that is inverted
KEPT = 8  # of so many starts one is kept
WALKED = 2**19  # units times coordinates up to which there is a walk, for the time that linear programs take
WALKS = ((16, 10), (4, 30), (1, 60))  # the steepest so many points walk on, each with so many linear programs
AT_KINK = 1e-9  # so near to zero are the values of units at kinks
LOSS = 0.02  # of the norm, which a step of a walk may cost


def steepest(
    model: nn.Module,
    shape: tuple[int, ...],
    *,
    starts: int = 64,
    steps: int = 120,
    rounds: int = 5,
    seed: int = 0,
    report: Callable[[str, int, int | None], None] = lambda what, done, total: None,
) -> float:
    """The largest difference quotient found; a round starts from the steepest points of those before it."""
    searched, exact = copy.deepcopy(model).float().eval(), copy.deepcopy(model).double().eval()
    generator = torch.Generator().manual_seed(seed)
    free, lift = _coordinates(exact, shape)
    points = torch.randn(starts, *free, generator=generator) * _column(_drawn(SCALES, starts, generator), free)
    kept, norms = points[:0], torch.zeros(0)
    for number in range(rounds):
        count = steps if number else steps // 4  # soon it shows which starts are good
        rates = _drawn(RATES, len(points), generator)
        found, reached = _climb(searched, lift, points, rates, count, generator, report)
        kept, norms = torch.cat([kept, found]), torch.cat([norms, reached])
        order = norms.argsort(descending=True)[: -(-starts // KEPT)]
        kept, norms = kept[order], norms[order]
        points = kept
    points = list(kept[:8].double())
    if len(_flat(_recorded(exact, lift(points[0][None])))) * points[0].numel() <= WALKED:
        walks = [Walk(exact, lift, point, generator) for point in kept.double()]
        for most, programs in WALKS:
            walks = sorted(walks, key=lambda walk: -walk.best)[:most]
            for number, walk in enumerate(walks):
                report(f"linear programs, {most} walks", number * programs, len(walks) * programs)
                walk.go(programs)
        points += [walk.inside for walk in walks]
    return max(_quotient(exact, point, generator) for point in lift(torch.stack(points)))


def steepest_slopes(
    model: nn.Module,
    shape: tuple[int, ...],
    *,
    starts: int = 16,
    steps: int = 300,
    seed: int = 0,
    report: Callable[[str, int, int | None], None] = lambda what, done, total: None,
) -> float:
    """The largest norm found of the linear map that is left when the slope of each activation is chosen freely."""
    searched, exact = copy.deepcopy(model).float().eval(), copy.deepcopy(model).double().eval()
    generator = torch.Generator().manual_seed(seed)
    chosen = Chosen(generator=generator)
    v = _unit(torch.randn(starts, *shape, generator=generator))
    for step in range(steps):
        report("steps", step, steps)
        _, v, towards = _turned(searched, chosen, v)
        for i, (share, gradient) in enumerate(zip(chosen.shares, towards, strict=True)):
            if step < steps // 3:  # all of them a little, while the vectors settle
                size = _column(gradient.flatten(1).abs().mean(1).clamp(min=1e-30), gradient.shape[1:])
                moved = torch.logit(share.detach(), 1e-4) + 0.3 * (gradient / size).clamp(-3, 3)
                share.data = torch.sigmoid(moved)
            elif step % len(towards) == i:  # the norm is convex in one layer's slopes: the best are the extreme ones
                share.data = (gradient > 0).to(share.dtype)
    chosen.shares = [share.detach().double() for share in chosen.shares]
    with torch.no_grad():
        return float(_linear(exact, chosen, _unit(v.double())).flatten(1).norm(dim=1).max())


class Activations(TorchFunctionMode):
    """Inside it, ReLU and leaky ReLU are what ``instead`` computes from their input and their least slope."""

    def instead(self, x: Tensor, slope: float) -> Tensor:
        raise NotImplementedError

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (F.relu, torch.relu):
            return self.instead(args[0], 0.0)
        if function is F.leaky_relu:
            return self.instead(args[0], args[1] if len(args) > 1 else kwargs.get("negative_slope", 0.01))
        return function(*args, **kwargs)


class Chosen(Activations):
    """Each unit multiplies with a slope of its own: a share of 1, and the rest of the least slope.

    Shares that are not given are drawn, for each sample its own; what the units are given is kept.
    """

    def __init__(self, shares: Sequence[Tensor] = (), generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.shares = [share.requires_grad_() for share in shares]
        self.generator = generator
        self.inputs: list[Tensor] = []

    def __enter__(self):
        self.inputs = []
        return super().__enter__()

    def instead(self, x: Tensor, slope: float) -> Tensor:
        if len(self.inputs) == len(self.shares):
            self.shares.append(torch.rand(x.shape, generator=self.generator).requires_grad_())
        share = self.shares[len(self.inputs)]
        self.inputs.append(x)
        return x * (slope + (1 - slope) * share)


class Recorded(Activations):
    """Keeps what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []

    def instead(self, x: Tensor, slope: float) -> Tensor:
        self.inputs.append(x)
        return F.leaky_relu(x, slope)


class Softened(Activations):
    """They turn smoothly, over ``width`` times the spread of their inputs in each sample."""

    def __init__(self, width: float) -> None:
        super().__init__()
        self.width = width

    def instead(self, x: Tensor, slope: float) -> Tensor:
        spread = x.detach().flatten(1).std(1, correction=0)
        width = _column((self.width * spread).clamp(min=1e-30), x.shape[1:])
        return slope * x + (1 - slope) * width * F.softplus(x / width)


class Walk:
    """From corner to corner of polytopes; ``inside`` is a point in the steepest one so far, where ``best`` is the norm.

    A polytope is given by which of all units are ``above`` their kinks. Units at ``kinks`` may choose their sides.
    """

    def __init__(self, model: nn.Module, lift, start: Tensor, generator: torch.Generator) -> None:
        self.model, self.lift, self.generator = model, lift, generator
        self.at, self.inside, self.reach = start.flatten(), start, 10 * float(start.square().mean().sqrt())
        above = self._above(start)
        self.kinks = torch.zeros_like(above)
        v = torch.randn(lift(start[None]).shape, generator=generator, dtype=torch.float64)
        self.norm, self.v, self.above, self.gains = self._steepest_around(above, self.kinks, _unit(v))
        self.best = self.norm

    def go(self, programs: int) -> None:
        for _ in range(programs):
            # A polytope at this corner, often not the steepest: it may open a way that goes further up.
            noise = torch.randn(len(self.gains), generator=self.generator) * self.gains[self.kinks].abs().mean()
            near = torch.where(self.kinks, self.gains + self._share() ** 2 * noise > 0, self.above)
            rows, offsets, signs = self._affine(near)
            corner = self._corner(rows, offsets, signs)
            if corner is None:
                continue
            kinks = (rows @ corner + offsets).abs() < AT_KINK
            norm, v, above, gains = self._steepest_around(near, kinks, self.v)
            if norm < self.norm * (1 - LOSS * self._share()):
                continue
            inside = self._inside(corner, kinks, above)
            if not torch.equal(self._above(inside), above):
                continue  # too many units at kinks: no input has these slopes
            self.norm, self.v, self.above, self.gains, self.at, self.kinks = norm, v, above, gains, corner, kinks
            if norm > self.best:
                self.best, self.inside = norm, inside

    def _corner(self, rows, offsets, signs):
        """Where units on their wrong sides come to their kinks, drawn by what they gain and by how near they are."""
        distances = (rows @ self.at + offsets).abs()
        drawn = torch.rand(len(signs), generator=self.generator) < self._share()
        drawn &= (self.gains * signs < 0) & ~self.kinks
        near = (distances + 1e-3 * distances.mean()) ** (2 * self._share())
        wanted = torch.where(drawn, self.gains / near, 0.0) @ rows
        solved = linprog(
            -(wanted / wanted.abs().max().clamp(min=1e-30)).numpy(),
            A_ub=(-signs[:, None] * rows).numpy(),
            b_ub=(signs * offsets).numpy(),
            bounds=(-self.reach, self.reach),
            method="highs-ds",
        )
        return None if solved.x is None else torch.from_numpy(solved.x)

    def _inside(self, corner, kinks, above):
        """Away from all kinks of a corner at once, half as far as the other units allow."""
        rows, offsets, signs = self._affine(above)
        away = torch.from_numpy(np.linalg.lstsq(rows[kinks].numpy(), signs[kinks].numpy())[0])
        speeds, distances = -signs * (rows @ away), signs * (rows @ corner + offsets)
        times = (distances / speeds)[(speeds > 0) & ~kinks]
        return (corner + (times.min() / 2 if len(times) else 1.0) * away).reshape(self.inside.shape)

    def _steepest_around(self, above, kinks, v):
        """The largest norm found for free sides at kinks, its direction, the sides, and what each slope adds to it."""
        chosen, free = Chosen(self._by_layer(above.double())), self._by_layer(kinks)
        before, norm = 0.0, 1e-30
        while norm > before * (1 + 1e-4):
            before = norm
            for i, share in enumerate(chosen.shares):  # one layer after the other, as the norm is convex in each
                _, v, towards = _turned(self.model, chosen, v)
                share.data = torch.where(free[i], (towards[i] > 0).double(), share.data)
            norms, v, towards = _turned(self.model, chosen, v)
            norm = float(norms)
        return norm, v, _flat(chosen.shares) > 0.5, _flat(towards)

    def _affine(self, above):
        """The values of all units: rows that multiply the coordinates, what is added, and the signs in the polytope."""
        count = len(self.at)
        ends = torch.eye(count + 1, count, dtype=torch.float64)  # zero is the last
        chosen = Chosen(self._by_layer(above.double()))
        with chosen, torch.no_grad():
            self.model(self.lift(ends.reshape(-1, *self.inside.shape)))
        values = torch.cat([value.flatten(1) for value in chosen.inputs], 1)
        return (values[:-1] - values[-1]).T, values[-1], 2.0 * above.double() - 1

    def _above(self, point):
        values = _recorded(self.model, self.lift(point[None]))
        self.shapes = [value.shape for value in values]
        return _flat(values) > 0

    def _by_layer(self, units):
        parts = units.split([shape.numel() for shape in self.shapes])
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def _share(self):
        return float(torch.rand((), generator=self.generator))


def _recorded(model, x):
    with Recorded() as recorded:
        model(x)
    return recorded.inputs


def _flat(parts):
    return torch.cat([part.detach().flatten() for part in parts])


def _coordinates(model, shape):
    """The shape of what is moved, and the inputs that follow from it."""
    x = torch.zeros(1, *shape, dtype=torch.float64, requires_grad=True)
    first = _recorded(model, x)[0].flatten()
    if len(first) > min(SMALL, x.numel()):
        return shape, lambda points: points
    matrix = torch.stack([torch.autograd.grad(value, x, retain_graph=True)[0].flatten() for value in first])
    if torch.linalg.matrix_rank(matrix) < len(first):
        return shape, lambda points: points
    inverse = torch.linalg.pinv(matrix)
    values = first.detach()  # of the input zero, which the bias shifted
    return (len(first),), lambda points: ((points - values.to(points)) @ inverse.T.to(points)).reshape(-1, *shape)


def _climb(model, lift, start, rates, steps, generator, report):
    """For each start the steepest point on its way and the norm of the Jacobian there, of the original network."""
    sizes = start.flatten(1).square().mean(1).sqrt()
    scale = _column(sizes * rates, start.shape[1:])
    moved = torch.zeros_like(start, requires_grad=True)
    adam = torch.optim.Adam([moved], lr=1.0)
    u = _unit(torch.randn(model(lift(start)).shape, generator=generator))
    best, reached = start.clone(), torch.zeros(len(start))
    for step in range(steps):
        width = WIDTHS[0] * (WIDTHS[1] / WIDTHS[0]) ** (step / (steps - 1))
        u.requires_grad_()
        with Softened(width):
            norms = _pulled_back(model, lift(start + scale * moved), u, create_graph=True).flatten(1).norm(dim=1)
        # In u, the gradient of the logarithm has the direction of J Jᵀu: a step of the power iteration.
        climbing, turned = torch.autograd.grad(norms.clamp(min=1e-30).log().sum(), (moved, u))
        moved.grad = -climbing
        adam.param_groups[0]["lr"] = (width / WIDTHS[0]) ** 0.7  # what is narrow is missed by wide steps
        adam.step()
        u = _unit(turned)
        if (step + 1) % max(1, steps // LOOKS) == 0:
            report("steps", step + 1, steps)
            here = (start + scale * moved).detach()
            norms = _jacobian_norm(model, lift(here), u, 3)[0]
            better = norms > reached
            best[better], reached[better] = here[better], norms[better]
    return best, reached


def _quotient(model, point, generator) -> float:
    """The largest quotient along the steepest direction at a point, over steps of many lengths."""
    x = point[None]
    v = _jacobian_norm(model, x, torch.randn(model(x).shape, generator=generator, dtype=x.dtype), 50)[1]
    lengths = x.norm() * 2.0 ** -torch.arange(31.0, dtype=x.dtype)
    steps = _column(lengths, x.shape[1:]) * v
    ahead, behind = x + steps, x - steps  # their difference is exact, and not always twice the step
    with torch.no_grad():
        ends = (model(ahead) - model(behind)).flatten(1).norm(dim=1)
    rounding = 2.0**-48 * x.norm() / lengths  # of the quotient, about ten times what is to be expected
    return float((ends / (ahead - behind).flatten(1).norm(dim=1) * (1 - rounding)).max())


def _linear(model, chosen, v):
    """What the network with chosen slopes, which is affine, does to v."""
    with chosen:
        there = model(v)
    with chosen:
        return there - model(torch.zeros_like(v))


def _turned(model, chosen, v):
    """‖Jv‖ with chosen slopes, a power iteration on v, and what each slope adds to the norm."""
    v = v.detach().requires_grad_()
    norms = _linear(model, chosen, v).flatten(1).norm(dim=1)
    turned, *towards = torch.autograd.grad(norms.sum(), (v, *chosen.shares))
    return norms.detach(), _unit(turned), towards


def _jacobian_norm(model, x, u, rounds):
    """Power iterations from u: ‖J(x) v‖ and the unit vectors v."""
    for _ in range(rounds):
        v = _unit(_pulled_back(model, x.clone(), u))
        zero = torch.zeros_like(u, requires_grad=True)  # Jᵀu is linear in u, and its derivative is Jᵀ
        pulled = _pulled_back(model, x.clone(), zero, create_graph=True)
        (pushed,) = torch.autograd.grad((pulled * v).sum(), zero)
        norms, u = pushed.flatten(1).norm(dim=1), _unit(pushed)
    return norms, v


def _pulled_back(model, x, u, create_graph=False):
    if not x.requires_grad:
        x.requires_grad_()
    return torch.autograd.grad((model(x) * u).sum(), x, create_graph=create_graph)[0]


def _unit(x: Tensor) -> Tensor:
    return (x / _column(x.flatten(1).norm(dim=1).clamp(min=1e-30), x.shape[1:])).detach()


def _column(values: Tensor, shape) -> Tensor:
    """One value for each sample, against samples of this shape."""
    return values.reshape(-1, *[1] * len(shape))


def _drawn(bounds, count, generator) -> Tensor:
    low, high = map(math.log, bounds)
    return torch.exp(low + (high - low) * torch.rand(count, generator=generator))
