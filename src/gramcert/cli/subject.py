"""What `certify` and `attack` are about: a network with labelled inputs, of our own training or anybody's."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from gramcert.auditing.reading import require_model
from gramcert.cli.data import images_of
from gramcert.cli.errors import BadInput
from gramcert.files import BadFile, read_npz
from gramcert.training.checkpoints import Trained, is_trained

SUBJECT = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="A folder of `gramcert train`, or ONNX, .pt2 or weights together with --data FILE.npz."
    ),
]
IMAGES, LABELS, INPUTS = "images", "labels", ".npz"

# Inputs that are certified at once.
_BATCH = 250


@dataclass(frozen=True)
class Subject:
    """A network and the inputs to test it with.

    Attributes:
        name: for people.
        model: a module, or a file.
        inputs: (count, *shape), floating-point.
        labels: their classes.
        classes: names of classes.
        beside: the folder in which pictures go.
        facts: about the network, for JSON.
    """

    name: str
    model: nn.Module | Path
    inputs: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    beside: Path
    facts: dict[str, Any]

    def loader(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches."""
        return zip(self.inputs.split(_BATCH), self.labels.split(_BATCH), strict=True)

    @classmethod
    def of(cls, model: Path, data: Path | None, count: int | None) -> "Subject":
        """From a model and its data; ``count`` takes the first so many inputs only."""
        if not model.exists():
            raise BadInput(f"{model}: no such file or folder")
        if not model.is_dir() and not is_trained(model):
            require_model(model)
        given = None if data is None or data.suffix.lower() != INPUTS else _read(data, count)
        if is_trained(model) or (model.is_dir() and given is None):
            trained = Trained(model)
            beside = model if model.is_dir() else model.parent
            facts = {"configuration": json.loads(trained.configuration.to_json())}
            name, classes = trained.configuration.name, trained.classes
            if given is None:
                test = images_to_test(trained, data, count)
                given = test.values(), test.labels
            return cls(name, trained.model, *given, classes, beside, facts)
        if given is None:
            came = "none" if data is None else str(data)
            raise BadInput(f"--data: {model.name} needs inputs, a .npz file with {IMAGES!r} and {LABELS!r}; got {came}")
        inputs, labels = given
        classes = tuple(map(str, range(int(labels.max()) + 1)))
        return cls(model.name, model, inputs, labels, classes, model.parent, {"model": model.name})


def images_to_test(trained: Trained, data: Path | None, count: int | None) -> Any:
    """The test images of a network's own set, which must be the ones that it was made for."""
    configuration = trained.configuration
    found = images_of(configuration.dataset, data)
    found = found.limited(configuration.images, configuration.holdout)
    if found.shape != trained.shape or found.classes != trained.classes:
        expected = f"{len(trained.classes)} classes of images of shape {trained.shape}"
        raise BadInput(f"--data: the network was made for {expected}, got {len(found.classes)} of {found.shape}")
    if count is not None and not 0 < count <= len(found.test):
        raise BadInput(f"--images {count}: expected 1 to {len(found.test)}")
    return found.test if count is None else found.test[slice(0, count)]


def _read(path: Path, count: int | None) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a file, with everything wrong in it said at once."""
    try:
        found = read_npz(path)
    except FileNotFoundError:
        raise BadInput(f"--data {path}: no such file") from None
    except (BadFile, OSError) as error:
        raise BadInput(f"--data {path}: {error}") from None
    if IMAGES not in found or LABELS not in found:
        raise BadInput(f"--data {path}: expected arrays {IMAGES!r} and {LABELS!r}, got {', '.join(found) or 'none'}")
    images, labels = found[IMAGES], found[LABELS]
    if not images.is_floating_point() or images.dim() < 2 or not len(images):
        got = f"{images.dtype} of shape {tuple(images.shape)}"
        hint = "; divide bytes by 255 as the model expects them" if images.dtype == torch.uint8 else ""
        raise BadInput(f"--data {path}: expected floating-point {IMAGES} (count, ...), got {got}{hint}")
    if labels.shape != images.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
        got = f"{labels.dtype} of shape {tuple(labels.shape)}"
        raise BadInput(f"--data {path}: expected {len(images)} integer {LABELS}, got {got}")
    labels = labels.long()
    if int(labels.min()) < 0 or int(labels.max()) >= 2**16:
        raise BadInput(f"--data {path}: expected {LABELS} from 0 on, got {int(labels.min())} to {int(labels.max())}")
    if count is not None and not 0 < count <= len(images):
        raise BadInput(f"--images {count}: expected 1 to {len(images)}")
    return images[:count], labels[:count]
