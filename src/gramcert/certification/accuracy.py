"""``certify``: clean and certified accuracy of a network on labelled inputs, rounding included."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from gramcert.arguments import checked_radii, require_finite
from gramcert.auditing.reading import Source
from gramcert.certification.network import CertifiedNetwork
from gramcert.exact import float_up
from gramcert.geometry.recognition import unwrapped
from gramcert.nn.baking import frozen_copy
from gramcert.progress import Report, silent
from gramcert.rounding import ASSUMPTIONS, checked_arithmetic


@dataclass(frozen=True)
class CertifiedAccuracy:
    """What is known about a network on a set of labelled inputs.

    Attributes:
        clean: share of inputs whose class is right.
        certified: for each radius, the share of inputs whose class is right and stays so for every change of l2 norm up
            to that radius.
        lipschitz: certified constant of everything before the last layer, if that is linear; otherwise of all.
        labels: the true classes.
        predictions: the computed classes; -1 for ties.
        radii: certified radius of each input, 0 where the prediction is wrong.
        error: largest bound of the distance between computed and exact features.
        assumptions: what all this rests on, besides the program itself.
    """

    clean: float
    certified: dict[float, float]
    lipschitz: float
    labels: Tensor
    predictions: Tensor
    radii: Tensor
    error: float
    assumptions: tuple[str, ...] = ASSUMPTIONS

    def at(self, radius: float, label: int | None = None) -> float:
        """Certified accuracy at any radius, of all inputs or of one class."""
        checked_radii("CertifiedAccuracy.at", [radius])
        chosen = self.radii if label is None else self.radii[self._of_class("at", label)]
        return _share_beyond(chosen, radius)

    def clean_of(self, label: int) -> float:
        """Accuracy on the inputs of one class."""
        return float((self.predictions[self._of_class("clean_of", label)] == label).double().mean())

    def _of_class(self, method: str, label: int) -> Tensor:
        chosen = self.labels == label
        if not bool(chosen.any()):
            raise ValueError(f"CertifiedAccuracy.{method}(label={label}): there is no input of this class")
        return chosen


def certify(
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    radii: Sequence[float],
    *,
    report: Report = silent,
) -> CertifiedAccuracy:
    """Clean accuracy, and accuracy certified against every change of an input up to each radius, in the l2 norm.

    The claim is about the network over the real numbers with its weights as stored: the constant of every layer is
    certified, and the logits are computed in float64 together with a bound of their rounding, which is taken off the
    margins (``docs/what-is-certified.md``). Ties certify nothing.

    Args:
        model: a module whose output is a vector of logits, of operators that :func:`gramcert.audit` knows.
        loader: batches of inputs and labels; all inputs have one shape.
        radii: at which certified accuracy is given.
        report: told what is being done (``layers``, ``inputs``), how many are done, and of how many.

    Example:
        >>> import torch, gramcert
        >>> model = torch.nn.Sequential(gramcert.nn.SRLinear(2, 2), gramcert.nn.NormalizedLinear(2, 2))
        >>> with torch.no_grad():
        ...     model[0].weight, model[0].bias[:] = torch.eye(2), 0.0
        ...     model[1].weight, model[1].bias[:] = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), 0.0
        >>> batch = torch.tensor([[3.0, 0.0], [-0.5, 1.0], [0.0, 1.0]]), torch.tensor([0, 1, 0])
        >>> found = gramcert.certify(model, [batch], [0.25, 1.0])
        >>> print(f"{found.clean:.3f} {found.certified[0.25]:.3f} {found.certified[1.0]:.3f}")
        0.667 0.667 0.333
    """
    call = "certify"
    if not isinstance(model, nn.Module):
        raise TypeError(f"{call}(model): expected a torch.nn.Module, got {type(model).__name__}")
    radii = checked_radii(f"{call}(radii)", radii)
    if not isinstance(loader, Iterable):
        raise TypeError(f"{call}(loader): expected batches of inputs and labels, got {type(loader).__name__}")
    classifier: _Classifier | None = None
    labels, predictions, found, largest = [], [], [], 0.0
    with checked_arithmetic(call):  # weights as the layers give them alone, whatever autocast is around
        source = Source.of(call, frozen_copy(call, unwrapped(call, model)))
    for batch in loader:
        with checked_arithmetic(call):  # not around the loader, which may need gradients
            if classifier is None:
                classifier = _Classifier(call, source, batch, report)
            truth, winner, certified, error = classifier(batch)
        labels.append(truth)
        predictions.append(winner)
        found.append(torch.where(winner == truth, certified, 0.0))
        largest = max(largest, error)
        report("inputs", sum(map(len, labels)), None)
    if classifier is None:
        raise ValueError(f"{call}(loader): expected at least one batch")
    every_label, every_prediction, every_radius = torch.cat(labels), torch.cat(predictions), torch.cat(found)
    return CertifiedAccuracy(
        clean=float((every_prediction == every_label).double().mean()),
        certified={radius: _share_beyond(every_radius, radius) for radius in radii},
        lipschitz=classifier.network.lipschitz,
        labels=every_label,
        predictions=every_prediction,
        radii=every_radius,
        error=largest,
        assumptions=classifier.network.assumptions,
    )


class _Classifier:
    """A network made ready for inputs of the shape of a first batch."""

    def __init__(self, call: str, source: Source, batch: Any, report: Report) -> None:
        self.call = call
        first, _ = _checked(call, batch)
        self.shape = tuple(first.shape[1:])
        self.network = CertifiedNetwork(call, source.graph(call, self.shape, "loader"), report)

    def __call__(self, batch: Any) -> tuple[Tensor, Tensor, Tensor, float]:
        """Labels, predictions, certified radii of the predictions, and the largest error of the features."""
        call = self.call
        x, truth = _checked(call, batch, self.network.classes)
        if tuple(x.shape[1:]) != self.shape:
            raise ValueError(f"{call}(loader): expected inputs of shape {self.shape}, got {tuple(x.shape[1:])}")
        logits, certified, distance = self.network(x)
        require_finite(call, "logits", logits)
        return truth, _winner(logits), certified, float(distance.nan_to_num(math.inf, math.inf).max())


def _share_beyond(found: Tensor, radius: float) -> float:
    """Share of the certified radii above one, which may be an int that float64 does not hold."""
    return float((found > float_up(Fraction(radius))).double().mean())


def _checked(call: str, batch: Any, classes: int | None = None) -> tuple[Tensor, Tensor]:
    """Inputs, copied into float64, which holds every narrower type exactly, and labels."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
        raise TypeError(f"{call}(loader): expected pairs of tensors, inputs and labels, got {type(batch).__name__}")
    inputs, truth = batch
    if not inputs.is_floating_point() or inputs.dim() < 2 or not len(inputs):
        raise ValueError(
            f"{call}(loader): expected floating-point inputs (batch, ...), got {inputs.dtype} of shape "
            f"{tuple(inputs.shape)}"
        )
    if truth.shape != inputs.shape[:1] or truth.is_floating_point() or truth.is_complex():
        raise ValueError(
            f"{call}(loader): expected {len(inputs)} integer labels, got {truth.dtype} of shape {tuple(truth.shape)}"
        )
    truth = truth.to("cpu", torch.int64, copy=True)  # a loader may fill the same tensor again
    if classes is not None and not 0 <= int(truth.min()) <= int(truth.max()) < classes:
        raise ValueError(
            f"{call}(loader): expected labels from 0 to {classes - 1}, got {int(truth.min())} to {int(truth.max())}"
        )
    require_finite(call, "inputs", inputs)
    # A copy: the first layer may overwrite its input.
    return inputs.detach().to("cpu", torch.float64, copy=True), truth


def _winner(logits: Tensor) -> Tensor:
    """The class of the largest logit, or -1 if several are largest."""
    top, winner = logits.max(1)
    return torch.where((logits == top[:, None]).sum(1) == 1, winner, -1)
