"""l2 attacks on a network, by foolbox: how small a change of each input was found that changes its class.

An attack shows that an input is *not* robust at a distance; a certificate that it *is*. An attack that succeeds inside
a certified radius would refute the certificate, and is looked for here.
"""

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gramcert.arguments import checked_radii
from gramcert.auditing.reading import Source
from gramcert.nn.baking import export
from gramcert.operators.evaluation import Runnable
from gramcert.progress import Report, silent
from gramcert.rounding import next_up, norm_up

ATTACKS = ("DDN", "Carlini-Wagner", "projected gradient")

# How much closer to its image a change is made, to see whether it still succeeds.
_BISECTIONS = 12


@dataclass(frozen=True)
class AttackResult:
    """What attacks found.

    Attributes:
        distances: for each input the least l2 norm of a change that gives it another class than its label; 0 where the
            class is wrong without a change, infinity where no attack found one.
        best: for each input the attack that found it, an index of :data:`ATTACKS`; -1 for none.
        changed: the inputs so changed, in float64; as they were where no attack found a change.
    """

    distances: Tensor
    best: Tensor
    changed: Tensor

    def accuracy(self, radius: float) -> float:
        """Share of inputs for which no change up to that norm was found."""
        return float((self.distances > radius).double().mean())


def attack(
    model: nn.Module | torch.export.ExportedProgram | str | Path,
    inputs: Tensor,
    labels: Tensor,
    radii: Sequence[float],
    *,
    steps: int = 100,
    batch: int = 100,
    bounds: tuple[float, float] = (0.0, 1.0),
    architecture: str | None = None,
    prefix: str | None = None,
    report: Report = silent,
) -> AttackResult:
    """Look for the smallest change of each input that changes its class: DDN, Carlini-Wagner, projected gradient.

    The first two minimise the norm; projected gradient tries each radius, on the inputs that withstood so far. A change
    counts only if the network in float64 gives the wrong class too.

    Args:
        model: what :func:`gramcert.certify` takes.
        inputs: shape (count, *shape).
        labels: their classes.
        radii: for projected gradient.
        steps: gradient steps of each attack at each trial.
        batch: inputs attacked at once.
        bounds: between which the numbers of an input are, changed or not.
        architecture: of a file that holds weights alone.
        prefix: of the names of the weights to be used, where a file holds several networks.
        report: told which attack is at work, how many inputs are done, and of how many.
    """
    call = "attack"
    if not isinstance(inputs, Tensor) or not isinstance(labels, Tensor) or labels.is_floating_point():
        kinds = [str(part.dtype) if isinstance(part, Tensor) else type(part).__name__ for part in (inputs, labels)]
        raise TypeError(f"{call}(inputs, labels): expected tensors, the labels of integers, got {' and '.join(kinds)}")
    if not inputs.numel() or inputs.dim() < 2 or labels.shape != inputs.shape[:1]:
        shapes = f"{tuple(inputs.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"{call}(inputs, labels): expected (count, ...) and as many labels, got shapes {shapes}")
    low, high = bounds
    if not bool(((inputs >= low) & (inputs <= high)).all()):
        raise ValueError(
            f"{call}(inputs): expected values from {low:g} to {high:g}, got {inputs.min():.3g} to {inputs.max():.3g}"
        )
    for name, count in (("steps", steps), ("batch", batch)):
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{call}({name}={count!r}): expected a positive int")
    radii = checked_radii(f"{call}(radii)", radii)
    foolbox = require_foolbox()
    if not isinstance(model, nn.Module):
        source = Source.of(call, model, architecture, prefix)
        shape = tuple(inputs.shape[1:])
        model = Runnable(source.graph(call, shape, "inputs")) if source.module is None else source.module
    plain = export(model).float().requires_grad_(False) if not isinstance(model, Runnable) else model
    for layer in plain.modules():
        if getattr(layer, "inplace", False):
            vars(layer)["inplace"] = False  # gradients with respect to an input need the input
    target = foolbox.PyTorchModel(plain.eval(), bounds=bounds, device=inputs.device)
    attacks = (
        foolbox.attacks.DDNAttack(steps=steps),
        foolbox.attacks.L2CarliniWagnerAttack(binary_search_steps=4, steps=steps, stepsize=0.01, abort_early=True),
        foolbox.attacks.L2ProjectedGradientDescentAttack(rel_stepsize=2.5 / steps, steps=steps),
    )
    exact = plain_in_float64(model)
    _check_outputs(call, plain, inputs, labels)
    distances = torch.zeros(len(inputs), dtype=torch.float64)
    best = torch.full((len(inputs),), -1)
    moved = inputs.detach().to("cpu", torch.float64, copy=True)
    for start in range(0, len(inputs), batch):
        part = slice(start, start + batch)
        x, truth = inputs[part].detach(), labels[part]
        found = torch.where(exact(x) == truth.cpu(), float("inf"), 0.0).double()
        by = torch.full((len(x),), -1)
        for number, (name, method) in enumerate(zip(ATTACKS, attacks, strict=True)):
            report(name, start, len(inputs))
            limits = [None] if number < 2 else sorted((radius for radius in radii if radius > 0), reverse=True)
            for limit in limits:
                # Inputs that are wrong already, or were changed within the limit, are done.
                (chosen,) = torch.where(found > (limit or 0))
                if not len(chosen):
                    continue
                _, changed, _ = method(target, x[chosen].float(), truth[chosen], epsilons=limit)
                lengths, nearest = _nearest(exact, x[chosen], changed.detach(), truth[chosen])
                better = lengths < found[chosen]
                found[chosen[better]] = lengths[better]
                by[chosen[better]] = number
                moved[start + chosen[better]] = nearest[better]
            report(name, min(start + batch, len(inputs)), len(inputs))
        distances[part], best[part] = found, by
    return AttackResult(distances, best, moved)


def _check_outputs(call: str, plain: nn.Module, inputs: Tensor, labels: Tensor) -> None:
    """Whether the network takes such inputs, and has a class for each label."""
    try:
        with torch.no_grad():
            shape = tuple(plain(inputs[:1].float().clone()).shape)
    except (RuntimeError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{call}(inputs): the model does not take shape {tuple(inputs.shape)} ({reason})") from None
    if len(shape) != 2 or shape[1] < 2:
        raise ValueError(f"{call}(model): expected an output (count, at least two classes), got {shape}")
    if int(labels.min()) < 0 or int(labels.max()) >= shape[1]:
        raise ValueError(
            f"{call}(labels): expected classes from 0 to {shape[1] - 1}, got {int(labels.min())} to {int(labels.max())}"
        )


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
