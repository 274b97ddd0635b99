"""Configurations: every choice of a training run in one immutable record, some of them with names."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from gramcert.training.augmentation import Augmentation, increasing
from gramcert.training.strict import STRICT, one_sentence

# More blocks are a mistake, or a file that wants to take all memory.
MOST_BLOCKS = 1000

# More are mistakes: sums of so many iterations are the same to the last bit, no kernel is so large, and torch has no
# steps beyond the range of float32.
MOST_ITERATIONS, LARGEST_KERNEL, LARGEST_RATE = 100, 999, 1e38

# Torch's generators take 64 bits, some of its functions 63.
LARGEST_SEED = 2**63 - 1

Positive = Annotated[int, Field(gt=0)]
AtLeastZero = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def _odd(number: int) -> int:
    if number % 2 == 0:
        raise ValueError("expected an odd number")
    return number


# The colours of the published SLL recipe.
_PUBLISHED_AUGMENTATION = Augmentation(4, True, (0.9, 1.1), (0.5, 2.0), (0.3, 2.0), 0.02)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Configuration:
    """A network, its data and its training. A field is overridden on the command line by ``--set field=value``.

    The network: the channel means are subtracted; ``unshuffle``×``unshuffle`` pixels become channels; then for each
    stage channels of zeros are appended up to its width and its residual convolution blocks follow, with another 2×2
    unshuffle between stages; window sums of ``pool``×``pool`` places divided by ``pool``; residual dense blocks; a head
    with normalised rows.

    Attributes:
        name: what the configuration is called.
        dataset: ``digits``, ``cifar10``, ``cifar100`` or ``folder``.
        images: how many of the training images are used; all of them if ``None``.
        holdout: take the test images from the end of the training set, for choices that must not see the test set.
        unshuffle: pixels per axis that become channels at the input.
        widths: channels of each stage.
        blocks: residual convolution blocks of each stage.
        inner: inner channels of the blocks of each stage.
        kernel: taps of the convolutions per axis.
        pool: places per axis that are summed before the dense part.
        dense_blocks: residual dense blocks.
        dense_inner: their inner width.
        activation: of the residual blocks.
        rescaling: ``sr``, ``aol`` or ``sn``.
        form: of the rescaling of convolutions, ``spatial`` or, for ``sr``, ``frequency``.
        iterations: of the rescaling; its own default if ``None``.
        start: how weights are drawn, ``gaussian`` or ``orthogonal`` (dense weights, and the middle tap of kernels).
        loss: ``offset`` (cross-entropy with an offset) or ``annealing``.
        offset: what the true logit must be ahead by.
        temperature: of the loss.
        epochs: passes over the training images.
        batch: images per step, in all processes together.
        lr: highest learning rate.
        final_lr: learning rate at the second knot.
        knots: shares of all steps at which ``lr`` and ``final_lr`` are reached, linearly, before the end at 0.
        betas: of Adam.
        augmentation: what is done to training images; a field of it is ``augmentation.crop`` and so on.
        precision: ``float32``, or ``bfloat16`` for the products (weights and rescaling stay in float32).
        evaluate_every: epochs between evaluations on the test images; the last epoch always has one.
        seed: of everything random.
    """

    name: str
    dataset: Literal["digits", "cifar10", "cifar100", "folder"]
    images: Positive | None = None
    holdout: AtLeastZero = 0
    unshuffle: Positive = 1
    widths: Annotated[tuple[Positive, ...], Field(min_length=1)]
    blocks: tuple[AtLeastZero, ...]
    inner: tuple[Positive, ...]
    kernel: Annotated[int, Field(gt=0, le=LARGEST_KERNEL), AfterValidator(_odd)] = 3
    pool: Positive = 4
    dense_blocks: Annotated[int, Field(ge=0, le=MOST_BLOCKS)]
    dense_inner: Positive
    activation: Literal["relu", "leaky_relu"] = "relu"
    rescaling: Literal["sr", "aol", "sn"] = "sr"
    form: Literal["spatial", "frequency"] = "frequency"
    iterations: Annotated[int, Field(gt=0, le=MOST_ITERATIONS)] | None = None
    start: Literal["gaussian", "orthogonal"] = "gaussian"
    loss: Literal["offset", "annealing"] = "offset"
    offset: float = 1.5 * math.sqrt(2)
    temperature: Annotated[float, Field(gt=0)] = 0.25
    epochs: Positive
    batch: Positive = 256
    lr: Annotated[float, Field(gt=0, le=LARGEST_RATE)] = 0.01
    final_lr: Annotated[float, Field(ge=0, le=LARGEST_RATE)] = 0.0005
    knots: Annotated[tuple[Share, Share], AfterValidator(increasing)] = (0.4, 0.8)
    betas: tuple[Beta, Beta] = (0.5, 0.9)
    augmentation: Augmentation = Augmentation()
    precision: Literal["float32", "bfloat16"] = "float32"
    evaluate_every: Positive = 1
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 0

    def __post_init__(self) -> None:
        """What no field says alone."""
        stages = f"{len(self.widths)} numbers, as widths has"
        for name, fine, wanted in (
            ("blocks", len(self.blocks) == len(self.widths), stages),
            ("blocks", sum(self.blocks) <= MOST_BLOCKS, f"0 to {MOST_BLOCKS} in all"),
            ("inner", len(self.inner) == len(self.widths), stages),
            ("form", self.rescaling == "sr" or self.form == "spatial", f"spatial, the only form of {self.rescaling}"),
            ("iterations", self.rescaling != "aol" or self.iterations in (None, 1), "1, which is what aol is"),
        ):
            if not fine:
                raise ValueError(f"{name}={getattr(self, name)}, expected {wanted}")

    def to_json(self) -> str:
        """As text, from which :func:`from_json` makes the same record."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def with_fields(self, changes: dict[str, str]) -> "Configuration":
        """A copy with fields replaced by what is written, such as ``{"epochs": "3", "augmentation.crop": "2"}``."""
        fields = dataclasses.asdict(self)
        if "rescaling" in changes:  # another rescaling has another number of iterations, and but one has two forms
            fields |= {"iterations": None} | ({} if changes["rescaling"] == "sr" else {"form": "spatial"})
        for name, text in changes.items():
            key = name.removeprefix("augmentation.")
            part: dict[str, Any] = fields if key == name else fields["augmentation"]
            several = isinstance(part.get(key), tuple)
            part[key] = text.split(",") if several else None if text.lower() == "none" else text
        with one_sentence(Configuration):
            return _RECORDS.validate_python(fields, strict=False)  # texts stand for numbers


Configuration.__init__ = one_sentence(Configuration)(Configuration.__init__)  # type: ignore[method-assign]
_RECORDS = TypeAdapter(Configuration)


def from_json(text: str) -> Configuration:
    """The record that :meth:`Configuration.to_json` wrote; unknown, missing or ill-typed fields are errors."""
    with one_sentence(Configuration):
        return _RECORDS.validate_json(text)


def from_file(path: Path) -> Configuration:
    """The same from a file, which errors name."""
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: cannot be read as JSON (it is not text)") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _published(size: str, dataset: Literal["cifar10", "cifar100"]) -> Configuration:
    """The SLL networks of Araujo et al. (2023), with the paper's rescaling."""
    conv, dense, width = {"S": (20, 7, 45), "M": (30, 10, 60), "L": (50, 10, 90), "XL": (70, 15, 120)}[size]
    return Configuration(
        name=f"{dataset}-{size}",
        dataset=dataset,
        widths=(width,),
        blocks=(conv,),
        inner=(5,),
        dense_blocks=dense,
        dense_inner=2048,
        epochs=1000,
        iterations=3,
        form="spatial",
        augmentation=_PUBLISHED_AUGMENTATION,
        evaluate_every=10,
    )


_DIGITS = Configuration(
    name="digits",
    dataset="digits",
    widths=(16,),
    blocks=(4,),
    inner=(32,),
    pool=2,
    dense_blocks=1,
    dense_inner=128,
    iterations=2,
    offset=0.5,  # margins that images of 64 pixels allow
    temperature=0.1,
    epochs=15,
    batch=64,
)

# What did best of what docs/results tells about, at this cost.
_NANO = Configuration(
    name="nano",
    dataset="cifar10",
    unshuffle=2,
    widths=(32,),
    blocks=(8,),
    inner=(16,),
    pool=2,
    dense_blocks=16,
    dense_inner=128,
    iterations=2,
    offset=1.5,
    temperature=0.35,
    epochs=3,
    batch=128,
    augmentation=Augmentation(crop=2, flip=True),
)

_SIZES = ("S", "M", "L", "XL")
_CIFAR: tuple[Literal["cifar10", "cifar100"], ...] = ("cifar10", "cifar100")

CONFIGURATIONS = {
    configuration.name: configuration
    for configuration in (
        _DIGITS,
        _NANO,
        dataclasses.replace(_NANO, name="nano-cifar100", dataset="cifar100"),
        *(_published(size, dataset) for dataset in _CIFAR for size in _SIZES),
    )
}


def named(name: str) -> Configuration:
    """One of :data:`CONFIGURATIONS`."""
    try:
        return CONFIGURATIONS[name]
    except KeyError:
        known = ", ".join(CONFIGURATIONS)
        raise ValueError(f"configuration {name!r}: expected one of {known}, or a JSON file") from None
