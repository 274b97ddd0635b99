"""``certify``: clean and certified accuracy of a network on labelled inputs, rounding included."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gramcert.arguments import checked_radii, require_finite
from gramcert.auditing.radii import CertifiedInputs, is_about_radii, write_radii
from gramcert.auditing.reading import Source
from gramcert.certification.local import LocalBounds
from gramcert.certification.network import CertifiedNetwork
from gramcert.exact import float_up
from gramcert.geometry.recognition import unwrapped
from gramcert.minorants.backward import Multipliers, Pairs
from gramcert.nn.baking import frozen_copy
from gramcert.progress import Report, silent
from gramcert.rounding import ASSUMPTIONS, checked_arithmetic

# Steps of the search for a minorant.
STEPS = 160

# Up to this constant a network was made to be 1-Lipschitz, and constants go further than what was asked for.
NEAR_ONE = 1.01

# What proved a radius: the constant of the network, quadratic forms of differences of logits, or a minorant around the
# input; nothing where the prediction is wrong.
NOTHING = ""
METHODS = CONSTANT, FORMS, MINORANT = "constant", "forms", "minorant"


@dataclass(frozen=True)
class CertifiedAccuracy:
    """What is known about a network on a set of labelled inputs.

    Attributes:
        clean: share of inputs whose class is right.
        certified: for each radius, the share of inputs whose class is right and stays so for every change of l2 norm up
            to that radius.
        lipschitz: certified constant, in the l2 norm, of everything before the last layer if that is linear, otherwise
            of all; ``lipschitz_of`` says which. The constant of the whole network is :func:`gramcert.audit`'s.
        labels: the true classes.
        predictions: the computed classes; -1 for ties.
        radii: certified radius of each input, 0 where the prediction is wrong.
        error: largest bound of the distance between computed and exact features.
        assumptions: what all this rests on, besides the program itself.
        by: what proved the radius of each input: ``constant``, ``forms`` or ``minorant``; empty where it is 0.
        notes: why a method was not tried.
        lipschitz_of: what the constant is about: "from the input to what the last linear layer is given", or "from the
            input to the logits".
    """

    clean: float
    certified: dict[float, float]
    lipschitz: float
    labels: Tensor
    predictions: Tensor
    radii: Tensor
    error: float
    assumptions: tuple[str, ...] = ASSUMPTIONS
    by: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lipschitz_of: str = ""

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
    model: nn.Module | torch.export.ExportedProgram | str | Path,
    loader: Iterable[tuple[Tensor, Tensor]],
    radii: Sequence[float],
    *,
    largest: bool = False,
    search_steps: int = STEPS,
    jobs: int = 1,
    resume: str | Path | None = None,
    certificate: str | Path | None = None,
    architecture: str | None = None,
    prefix: str | None = None,
    report: Report = silent,
) -> CertifiedAccuracy:
    """Clean accuracy, and accuracy certified against every change of an input up to each radius, in the l2 norm.

    The claim is about the network over the real numbers with its weights as stored. The radius of an input is the best
    of three: by the certified constant of the network, by those of the differences of two logits, and, where these do
    not reach the largest radius that is asked for, by a quadratic function below each margin around that very input
    (``docs/certify.md``). All rounding is included: constants are certified, logits are computed in float64 together
    with a bound of their rounding, which is taken off the margins. Ties certify nothing.

    Args:
        model: a module, a program of torch.export, or a file, as for :func:`gramcert.audit`; its output is a vector of
            logits, or of their softmax.
        loader: batches of inputs and labels; all inputs have one shape.
        radii: at which certified accuracy is given.
        largest: look for the largest radius of each input, not only for those up to the largest of ``radii``.
        search_steps: of the search around each input; 0 leaves it out.
        jobs: searches at once, each with its share of the cores.
        resume: folder in which finished searches are kept. A call that was interrupted goes on from there; what is
            found in it is proved again.
        certificate: file, ending in ``.npz``, for what :func:`gramcert.verify` needs to check every radius.
        architecture: of a file that holds weights alone.
        prefix: of the names of the weights to be used, where a file holds several networks.
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
    radii = checked_radii(f"{call}(radii)", radii)
    if not isinstance(loader, Iterable):
        raise TypeError(f"{call}(loader): expected batches of inputs and labels, got {type(loader).__name__}")
    for name, count, least in (("search_steps", search_steps, 0), ("jobs", jobs, 1)):
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise ValueError(f"{call}({name}={count!r}): expected an int that is at least {least}")
    if certificate is not None and (not is_about_radii(certificate) or not search_steps):
        raise ValueError(f"{call}(certificate={str(certificate)!r}): expected a file ending in .npz, and search steps")
    if certificate is not None and not Path(certificate).parent.is_dir():
        raise ValueError(f"{call}(certificate={str(certificate)!r}): there is no such folder")
    with checked_arithmetic(call):  # weights as the layers give them alone, whatever autocast is around
        source = Source.of(call, model, architecture, prefix)
        if source.module is not None:
            source = replace(source, module=frozen_copy(call, unwrapped(call, source.module)))
    enough = math.inf if largest else max((float_up(Fraction(radius)) for radius in radii), default=0.0)
    folder = None if resume is None else Path(resume)
    options = _Options(enough, largest, search_steps, jobs, folder, certificate is not None)
    classifier: _Classifier | None = None
    found: list[_Batch] = []
    done = 0
    for batch in loader:
        with checked_arithmetic(call):  # not around the loader, which may need gradients
            if classifier is None:
                classifier = _Classifier(call, source, batch, options, report)
            found.append(classifier(batch, report))
        done += len(found[-1].labels)
        report("inputs", done, None)
    if classifier is None:
        raise ValueError(f"{call}(loader): expected at least one batch")
    labels, predictions = (torch.cat([getattr(part, name) for part in found]) for name in ("labels", "predictions"))
    every_radius = torch.cat([part.radii for part in found])
    notes = classifier.notes
    if certificate is not None:
        missing = int((every_radius > 0).sum()) - classifier.write(Path(certificate))
        if missing:
            notes += (f"{missing} inputs have a radius by constants alone and are not in the certificate",)
    return CertifiedAccuracy(
        clean=float((predictions == labels).double().mean()),
        certified={radius: _share_beyond(every_radius, radius) for radius in radii},
        lipschitz=classifier.network.lipschitz,
        lipschitz_of=classifier.network.lipschitz_of,
        labels=labels,
        predictions=predictions,
        radii=every_radius,
        by=tuple(name for part in found for name in part.by),
        error=max(part.error for part in found),
        notes=notes,
        assumptions=classifier.network.assumptions,
    )


@dataclass(frozen=True)
class _Options:
    """Of one call."""

    enough: float
    largest: bool
    steps: int
    jobs: int
    folder: Path | None
    is_written: bool


@dataclass(frozen=True)
class _Batch:
    """What was found for some inputs."""

    labels: Tensor
    predictions: Tensor
    radii: Tensor
    by: list[str]
    error: float


class _Classifier:
    """A network made ready for inputs of the shape of a first batch."""

    def __init__(self, call: str, source: Source, batch: Any, options: _Options, report: Report) -> None:
        self.call, self.options, self.name = call, options, source.name
        first, _ = checked_batch(call, batch)
        self.shape = tuple(first.shape[1:])
        self.network = CertifiedNetwork(call, source.graph(call, self.shape, "loader"), report)
        self._local: LocalBounds | None = None
        self._certificate: list[CertifiedInputs] = []

    def __call__(self, batch: Any, report: Report) -> _Batch:
        """Labels, predictions, and certified radii of the right ones."""
        call = self.call
        x, truth = checked_batch(call, batch, self.network.classes)
        if tuple(x.shape[1:]) != self.shape:
            raise ValueError(f"{call}(loader): expected inputs of shape {self.shape}, got {tuple(x.shape[1:])}")
        margins = self.network(x)
        require_finite(call, "logits", margins.logits)
        winner = _winner(margins.logits)
        is_right = winner == truth
        radii = self._searched(x, is_right, winner, margins.by_constant, report)
        by_forms = self.network.by_forms(margins) if self._asks_for_forms else margins.by_constant
        radii = torch.maximum(radii, by_forms)
        found, by_forms, by_constant = (part.amin(1) for part in (radii, by_forms, margins.by_constant))
        names = [
            NOTHING if not right or not best else MINORANT if best > forms else FORMS if forms > constant else CONSTANT
            for right, best, forms, constant in zip(
                *(part.tolist() for part in (is_right, found, by_forms, by_constant)), strict=True
            )
        ]
        error = float(margins.error.nan_to_num(math.inf, math.inf).max())
        return _Batch(truth, winner, torch.where(is_right, found, 0.0), names, error)

    def _searched(self, x: Tensor, is_right: Tensor, winner: Tensor, known: Tensor, report: Report) -> Tensor:
        """Radii of all pairs, with minorants where they are asked for."""
        is_open = (known <= self.options.enough) | self.options.is_written
        is_open &= is_right[:, None] & (torch.arange(known.shape[1]) != winner[:, None])
        samples, others = torch.where(is_open)
        if not len(samples) or not self.options.steps:
            return known
        if self._local is None:
            self._local = LocalBounds.of(
                self.call,
                self.network.graph,
                self.network.network,
                report,
                steps=self.options.steps,
                jobs=self.options.jobs,
                folder=self.options.folder,
                is_written=self.options.is_written,
            )
        radii = known.clone()
        pairs = Pairs(samples, winner[samples], others)
        portions = self._local(x, pairs, known[samples, others], self.options.enough, report)
        for part in portions:
            places = part.pairs.samples, part.pairs.others
            radii[places] = torch.maximum(radii[places], part.radii)
        if self.options.is_written:
            if not portions:
                raise ValueError(f"{self.call}(certificate): {self._local.note}")
            tensors = [part.multipliers.tensors() for part in portions]
            together = {name: torch.cat([part[name] for part in tensors]) for name in tensors[0]}
            found = torch.cat([part.radii for part in portions])
            self._certificate.append(CertifiedInputs.of(x, winner, pairs, found, Multipliers.of_tensors(together)))
        return radii

    @property
    def _asks_for_forms(self) -> bool:
        """Forms of all pairs of classes take long, and seldom prove more than minorants that gain something."""
        options, network = self.options, self.network
        is_searched = options.steps and options.enough and not options.largest and not self.notes
        return not is_searched or network.lipschitz <= NEAR_ONE or network.is_quick

    @property
    def notes(self) -> tuple[str, ...]:
        """Why a method was not tried."""
        return (self._local.note,) if self._local is not None and self._local.note else ()

    def write(self, path: Path) -> int:
        """The certificate of all inputs so far, and how many are in it; of none there is no certificate."""
        parts = [part for part in self._certificate if len(part.radii)]
        if parts and self._local is not None:
            write_radii(path, self._local.network, self.name, self.shape, parts)
        return sum(len(part.radii) for part in parts)


def _share_beyond(found: Tensor, radius: float) -> float:
    """Share of the certified radii above one, which may be an int that float64 does not hold."""
    return float((found > float_up(Fraction(radius))).double().mean())


def checked_batch(call: str, batch: Any, classes: int | None = None) -> tuple[Tensor, Tensor]:
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
