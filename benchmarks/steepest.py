"""Where a network is steepest, searched for: what no Lipschitz constant, or none that follows from slopes, is below.

The Jacobian of a network with ReLU is constant on polytopes, so its norm has no gradient. With softened activations it
has one: a kink becomes as wide as a part of the spread of its layer's values, the norm of J(x)ᵀu climbs in x by Adam
and in u by power iterations, and that part shrinks until almost the original network is left. What ``steepest``
returns is a difference quotient of the original network in float64, a lower bound whatever the search did. Where the
first layer is a small matrix and onto, its values are moved instead of the inputs: each kink is then near in one step.

Bounds that know of an activation nothing but its slopes hold for every choice of slopes, also for those that no input
brings about. ``steepest_slopes`` searches among these: between it and ``steepest`` lies what such bounds cannot see.
"""

import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

WIDTHS = (0.3, 0.01)  # of the kinks, at the first and the last step
RATES = (0.01, 0.3)  # of Adam, against the size of an input; each start draws its own
SCALES = (0.1, 100.0)  # of the first inputs
LOOKS = 10  # how often the original network is asked during one climb
SMALL = 512  # values of a first layer that is inverted
KEPT = 4  # of so many starts one is kept for the next round


def steepest(
    model: nn.Module,
    shape: tuple[int, ...],
    *,
    starts: int = 64,
    steps: int = 150,
    rounds: int = 4,
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

        def tell(looks, before=number * LOOKS):
            report("steps", (before + looks) * steps // LOOKS, rounds * steps)

        found, reached = _climb(searched, lift, points, _drawn(RATES, starts, generator), steps, generator, tell)
        kept, norms = torch.cat([kept, found]), torch.cat([norms, reached])
        order = norms.argsort(descending=True)[: max(1, starts // KEPT)]
        kept, norms = kept[order], norms[order]
        points = kept.repeat(-(-starts // len(kept)), *[1] * len(free))[:starts]
    return max(_quotient(exact, point, generator) for point in lift(kept[:8].double()))


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
    chosen = Chosen(generator)
    v = _unit(torch.randn(starts, *shape, generator=generator))
    for step in range(steps):
        report("steps", step, steps)
        v.requires_grad_()
        norms = _linear(searched, chosen, v).flatten(1).norm(dim=1)
        turned, *towards = torch.autograd.grad(norms.sum(), (v, *chosen.shares))
        v = _unit(turned)
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
    """Each unit of each sample multiplies with a slope of its own: a share of 1, and the rest of the least slope."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.shares: list[Tensor] = []
        self.generator, self.next = generator, 0

    def __enter__(self):
        self.next = 0
        return super().__enter__()

    def instead(self, x: Tensor, slope: float) -> Tensor:
        if self.next == len(self.shares):
            self.shares.append(torch.rand(x.shape, generator=self.generator).requires_grad_())
        share = self.shares[self.next]
        self.next += 1
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


def _coordinates(model, shape):
    """The shape of what is moved, and the inputs that follow from it."""
    x = torch.zeros(1, *shape, dtype=torch.float64, requires_grad=True)
    with Recorded() as recorded:
        model(x)
    first = recorded.inputs[0].flatten()
    if len(first) > min(SMALL, x.numel()):
        return shape, lambda points: points
    matrix = torch.stack([torch.autograd.grad(value, x, retain_graph=True)[0].flatten() for value in first])
    if torch.linalg.matrix_rank(matrix) < len(first):
        return shape, lambda points: points
    inverse = torch.linalg.pinv(matrix)
    values = first.detach()  # of the input zero, which the bias shifted
    return (len(first),), lambda points: ((points - values.to(points)) @ inverse.T.to(points)).reshape(-1, *shape)


def _climb(model, lift, start, rates, steps, generator, tell):
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
        adam.step()
        u = _unit(turned)
        looks, rest = divmod(step + 1, steps // LOOKS)
        if rest == 0:
            tell(looks)
            here = (start + scale * moved).detach()
            norms = _jacobian_norm(model, lift(here), u, 3)[0]
            better = norms > reached
            best[better], reached[better] = here[better], norms[better]
    return best, reached


def _quotient(model, point, generator) -> float:
    """The largest quotient along the steepest direction at a point, over steps of many lengths."""
    x = point[None]
    v = _jacobian_norm(model, x, torch.randn(model(x).shape, generator=generator, dtype=x.dtype), 50)[1]
    lengths = x.norm() * 2.0 ** -torch.arange(21.0, dtype=x.dtype)
    steps = _column(lengths, x.shape[1:]) * v
    with torch.no_grad():
        ends = model(x + steps) - model(x - steps)
    return float((ends.flatten(1).norm(dim=1) / (2 * lengths)).max())


def _linear(model, chosen, v):
    """What the network with chosen slopes, which is affine, does to v."""
    with chosen:
        there = model(v)
    with chosen:
        return there - model(torch.zeros_like(v))


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
