"""l2 attacks on a network, by foolbox: how small a change of each input was found that changes its class.

An attack shows that an input is *not* robust at a distance; a certificate that it *is*. An attack that succeeds inside
a certified radius would refute the certificate, and is looked for here.
"""

import importlib
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gramcert.arguments import checked_radii
from gramcert.auditing.reading import Source
from gramcert.certification.accuracy import checked_batch
from gramcert.nn.baking import export
from gramcert.operators.evaluation import Runnable
from gramcert.progress import Report, silent
from gramcert.rounding import next_up, norm_up

ATTACKS = ("DDN", "Carlini-Wagner", "projected gradient")

# How much closer to its image a change is made, to see whether it still succeeds.
_BISECTIONS = 12


@dataclass(frozen=True)
class AttackedAccuracy:
    """What attacks found on a set of labelled inputs.

    Attributes:
        clean: share of inputs whose class is right.
        attacked: for each radius, the share of inputs whose class is right and for which no change of l2 norm up to
            that radius was found that makes it wrong. Certified accuracy is never above it.
        labels: the true classes.
        distances: for each input the least l2 norm of a change that gives it another class than its label; 0 where the
            class is wrong without a change, infinity where no attack found one.
        by: for each input the attack that found it, one of :data:`ATTACKS`; empty for none.
        changed: the inputs so changed, in float64; as they were where no attack found a change.
    """

    clean: float
    attacked: dict[float, float]
    labels: Tensor
    distances: Tensor
    by: tuple[str, ...]
    changed: Tensor

    def at(self, radius: float) -> float:
        """Attacked accuracy at any radius; projected gradient tried only those that were asked for."""
        checked_radii("AttackedAccuracy.at", [radius])
        return _share_beyond(self.distances, radius)


def attack(
    model: nn.Module | torch.export.ExportedProgram | str | Path,
    loader: Iterable[tuple[Tensor, Tensor]],
    radii: Sequence[float],
    *,
    steps: int = 100,
    bounds: tuple[float, float] = (0.0, 1.0),
    seed: int = 0,
    architecture: str | None = None,
    prefix: str | None = None,
    report: Report = silent,
) -> AttackedAccuracy:
    """Look for the smallest change of each input that changes its class, in the l2 norm.

    What :func:`gramcert.certify` is compared with: an attack shows that an input is not robust at a distance, and one
    that succeeded inside a certified radius would refute the certificate. Three attacks of foolbox are tried, which the
    extra ``gramcert[attack]`` installs: DDN and Carlini-Wagner minimise the norm; projected gradient tries each radius,
    on the inputs that withstood so far. A change counts only if the network in float64 gives the wrong class too.

    Args:
        model: what :func:`gramcert.certify` takes.
        loader: batches of inputs and labels; all inputs have one shape. A batch is attacked at once.
        radii: at which attacked accuracy is given, and projected gradient tried.
        steps: gradient steps of each attack at each trial.
        bounds: between which the numbers of an input are, changed or not. Certificates know no such bounds: to try all
            of a certified ball, let them be wider than the inputs by its radius.
        seed: of the random starts; the caller's own random numbers go on as if nothing had happened.
        architecture: of a file that holds weights alone.
        prefix: of the names of the weights to be used, where a file holds several networks.
        report: told which attack is at work, and how many inputs are done.

    Example:
        >>> import torch, gramcert
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> with torch.no_grad():
        ...     _ = model.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> batch = torch.tensor([[0.9, 0.1], [0.5, 0.4], [0.2, 0.6]]), torch.tensor([0, 0, 0])
        >>> found = gramcert.attack(model, [batch], [0.05, 0.2])
        >>> print(f"{found.clean:.2f} {found.attacked[0.05]:.2f} {found.attacked[0.2]:.2f}")
        0.67 0.67 0.33
    """
    call = "attack"
    radii = checked_radii(f"{call}(radii)", radii)
    if not isinstance(loader, Iterable):
        raise TypeError(f"{call}(loader): expected batches of inputs and labels, got {type(loader).__name__}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"{call}(steps={steps!r}): expected a positive int")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"{call}(seed={seed!r}): expected an int")
    attacker: _Attacker | None = None
    found: list[_Found] = []
    done = 0
    for batch in loader:
        labels = checked_batch(call, batch)[1]
        inputs = batch[0].detach()
        if attacker is None:
            source = Source.of(call, model, architecture, prefix)
            attacker = _Attacker(call, source, inputs, steps, _checked_bounds(call, bounds))
        with torch.random.fork_rng(devices=[inputs.device] if inputs.device.type == "cuda" else []):
            torch.manual_seed(seed + done)
            found.append(attacker(inputs, labels, radii, report, done))
        done += len(labels)
    if attacker is None:
        raise ValueError(f"{call}(loader): expected at least one batch")
    distances, labels, changed = (
        torch.cat([getattr(part, name) for part in found]) for name in ("distances", "labels", "changed")
    )
    return AttackedAccuracy(
        clean=_share_beyond(distances, 0.0),
        attacked={radius: _share_beyond(distances, radius) for radius in radii},
        labels=labels,
        distances=distances,
        by=tuple(name for part in found for name in part.by),
        changed=changed,
    )


@dataclass(frozen=True)
class _Found:
    """Of one batch."""

    labels: Tensor
    distances: Tensor
    by: list[str]
    changed: Tensor


class _Attacker:
    """A network made ready for attacks on inputs of the shape of a first batch."""

    def __init__(self, call: str, source: Source, inputs: Tensor, steps: int, bounds: tuple[float, float]) -> None:
        self.call, self.shape, self.bounds = call, tuple(inputs.shape[1:]), bounds
        foolbox = require_foolbox()
        model = source.module if source.module is not None else Runnable(source.graph(call, self.shape, "loader"))
        plain = model if isinstance(model, Runnable) else export(model).float().requires_grad_(False)
        for layer in plain.modules():
            if getattr(layer, "inplace", False):
                vars(layer)["inplace"] = False  # gradients with respect to an input need the input
        self.exact = plain_in_float64(model)
        self.classes = _classes(call, plain.eval(), inputs)
        self.target = foolbox.PyTorchModel(plain, bounds=bounds, device=inputs.device)
        attacks = foolbox.attacks
        self.attacks = (
            attacks.DDNAttack(steps=steps),
            attacks.L2CarliniWagnerAttack(binary_search_steps=4, steps=steps, stepsize=0.01, abort_early=True),
            attacks.L2ProjectedGradientDescentAttack(rel_stepsize=2.5 / steps, steps=steps),
        )

    def __call__(self, x: Tensor, labels: Tensor, radii: list[float], report: Report, done: int) -> _Found:
        """The smallest changes of some inputs, after so many others."""
        self._check(x, labels)
        truth = labels.to(x.device)
        found = torch.where(self.exact(x) == labels, math.inf, 0.0).double()
        by, moved = [""] * len(x), x.to("cpu", torch.float64, copy=True)
        for number, (name, method) in enumerate(zip(ATTACKS, self.attacks, strict=True)):
            report(name, done, None)
            limits = [None] if number < 2 else sorted((radius for radius in radii if radius > 0), reverse=True)
            for limit in limits:
                # Inputs that are wrong already, or were changed within the limit, are done.
                (chosen,) = torch.where(found > (limit or 0))
                if not len(chosen):
                    continue
                _, changed, _ = method(self.target, x[chosen].float(), truth[chosen], epsilons=limit)
                lengths, nearest = _nearest(self.exact, x[chosen], changed.detach(), labels[chosen])
                for place, length, other in zip(chosen.tolist(), lengths.tolist(), nearest, strict=True):
                    if length < found[place]:
                        found[place], by[place], moved[place] = length, name, other
            report(name, done + len(x), None)
        return _Found(labels, found, by, moved)

    def _check(self, x: Tensor, labels: Tensor) -> None:
        (low, high), call = self.bounds, self.call
        if tuple(x.shape[1:]) != self.shape:
            raise ValueError(f"{call}(loader): expected inputs of shape {self.shape}, got {tuple(x.shape[1:])}")
        least, most = float(x.min()), float(x.max())
        if not low <= least <= most <= high:
            expected = f"expected inputs from {low:g} to {high:g}, the bounds"
            raise ValueError(f"{call}(loader): {expected}, got {least:.3g} to {most:.3g}")
        checked_batch(call, (x, labels), self.classes)


def _share_beyond(distances: Tensor, radius: float) -> float:
    return float((distances > radius).double().mean())


def _checked_bounds(call: str, bounds: Any) -> tuple[float, float]:
    is_pair = isinstance(bounds, (tuple, list)) and len(bounds) == 2
    if (
        not is_pair
        or not all(type(end) in (int, float) for end in bounds)
        or not -math.inf < bounds[0] < bounds[1] < math.inf
    ):
        raise ValueError(f"{call}(bounds={bounds!r}): expected two numbers, the smaller one first")
    return float(bounds[0]), float(bounds[1])


def _classes(call: str, plain: nn.Module, inputs: Tensor) -> int:
    """How many classes the network has, if it takes such inputs."""
    try:
        with torch.no_grad():
            shape: tuple[int, ...] = tuple(plain(inputs[:1].float().clone()).shape)
    except (RuntimeError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{call}(loader): the model does not take shape {tuple(inputs.shape)} ({reason})") from None
    if len(shape) != 2 or shape[1] < 2:
        raise ValueError(f"{call}(model): expected an output (count, at least two classes), got {shape}")
    return shape[1]


def plain_in_float64(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The class that the network gives in float64 with its weights as they are."""
    wide = model if isinstance(model, Runnable) else export(model).cpu().double()

    def classes(x: Tensor) -> Tensor:
        with torch.no_grad():
            result: Tensor = wide(x.to("cpu", torch.float64, copy=True)).argmax(1)
        return result

    return classes


def _nearest(exact: Callable[[Tensor], Tensor], x: Tensor, changed: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """The input nearest to x on the way to the changed one whose class is wrong, and an upper bound of its distance.

    The distance is infinite where the changed input itself has the right class.
    """
    x, changed, truth = x.cpu().double(), changed.cpu().double(), truth.cpu()
    wrong = exact(changed) != truth
    # The changed input in between that is still wrong: attacks stop a little beyond the boundary.
    inside, outside = (part.expand(len(x), *(1,) * (x.dim() - 1)) for part in x.new_tensor([0.0, 1.0]))
    for _ in range(_BISECTIONS):
        middle = (inside + outside) / 2
        still = (exact(torch.lerp(x, changed, middle)) != truth).reshape(middle.shape)
        outside, inside = torch.where(still, middle, outside), torch.where(still, inside, middle)
    nearest = torch.lerp(x, changed, outside)
    change = next_up((nearest - x).abs())  # the difference is rounded once
    norms = torch.tensor([norm_up(row) for row in change], dtype=torch.float64)
    return torch.where(wrong, norms, float("inf")), nearest


def require_foolbox() -> Any:
    """The library, or an error that says how to get it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the modules that foolbox imports and we do not use
        try:
            return importlib.import_module("foolbox")
        except ImportError:
            raise ValueError("attack: needs foolbox (pip install 'gramcert[attack]')") from None
