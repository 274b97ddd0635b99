"""Configurations: every choice of a training run in one immutable record, some of them with names."""

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from gramcert.training.augmentation import Augmentation

# More blocks are a mistake, or a file that wants to take all memory.
MOST_BLOCKS = 1000

# More are mistakes: sums of so many iterations are the same to the last bit, no kernel is so large, and torch has no
# steps beyond the range of float32.
MOST_ITERATIONS, LARGEST_KERNEL, LARGEST_RATE = 100, 999, 1e38

# Torch's generators take 64 bits, some of its functions 63.
LARGEST_SEED = 2**63 - 1

# The colours of the published SLL recipe.
_PUBLISHED_AUGMENTATION = Augmentation(4, True, (0.9, 1.1), (0.5, 2.0), (0.3, 2.0), 0.02)


@dataclass(frozen=True, kw_only=True)
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
    images: int | None = None
    holdout: int = 0
    unshuffle: int = 1
    widths: tuple[int, ...]
    blocks: tuple[int, ...]
    inner: tuple[int, ...]
    kernel: int = 3
    pool: int = 4
    dense_blocks: int
    dense_inner: int
    activation: Literal["relu", "leaky_relu"] = "relu"
    rescaling: Literal["sr", "aol", "sn"] = "sr"
    form: Literal["spatial", "frequency"] = "frequency"
    iterations: int | None = None
    start: Literal["gaussian", "orthogonal"] = "gaussian"
    loss: Literal["offset", "annealing"] = "offset"
    offset: float = 1.5 * math.sqrt(2)
    temperature: float = 0.25
    epochs: int
    batch: int = 256
    lr: float = 0.01
    final_lr: float = 0.0005
    knots: tuple[float, float] = (0.4, 0.8)
    betas: tuple[float, float] = (0.5, 0.9)
    augmentation: Augmentation = field(default_factory=Augmentation)
    precision: Literal["float32", "bfloat16"] = "float32"
    evaluate_every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self)

    def to_json(self) -> str:
        """As text, from which :func:`from_json` makes the same record."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def with_fields(self, changes: dict[str, str]) -> "Configuration":
        """A copy with fields replaced by what is written, such as ``{"epochs": "3", "augmentation.crop": "2"}``."""
        own: dict[str, Any] = {}
        augmentation: dict[str, Any] = {}
        if "rescaling" in changes:  # another rescaling has another number of iterations, and but one has two forms
            own = {"iterations": None} | ({} if changes["rescaling"] == "sr" else {"form": "spatial"})
        for name, text in changes.items():
            outer, _, inner = name.partition(".")
            if inner and outer == "augmentation":
                augmentation[inner] = _parsed(Augmentation, inner, text, name)
            else:
                own[name] = _parsed(Configuration, name, text, name)
        return dataclasses.replace(self, augmentation=dataclasses.replace(self.augmentation, **augmentation), **own)


def from_json(text: str) -> Configuration:
    """The record that :meth:`Configuration.to_json` wrote; unknown, missing or ill-typed fields are errors."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"configuration: not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError("configuration: expected a JSON object")
    augmentation = fields.pop("augmentation", {})
    if not isinstance(augmentation, dict):
        raise ValueError("configuration(augmentation): expected a JSON object")
    values = _typed(Configuration, fields) | {"augmentation": Augmentation(**_typed(Augmentation, augmentation))}
    missing = {f.name for f in dataclasses.fields(Configuration) if _is_required(f)} - values.keys()
    if missing:
        raise ValueError(f"configuration: {min(missing)!r} is missing")
    return Configuration(**values)


def _is_required(item: "dataclasses.Field[Any]") -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _typed(kind: type, fields: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    for name in fields:
        if name not in hints:
            raise ValueError(f"configuration: unknown field {name!r}, expected one of {', '.join(hints)}")
    return {name: _converted(name, value, hints[name]) for name, value in fields.items()}


def _parsed(kind: type, field_name: str, text: str, shown: str) -> Any:
    """A value as it is written on a command line; several are separated by commas."""
    hints = typing.get_type_hints(kind)
    if field_name not in hints or field_name == "augmentation":
        known = [name for name in hints if name != "augmentation"]
        if kind is Configuration:
            known += [f"augmentation.{part.name}" for part in dataclasses.fields(Augmentation)]
        raise ValueError(f"configuration: unknown field {shown!r}, expected one of {', '.join(known)}")
    hint = hints[field_name]
    if hint is str:
        return text
    values: list[Any] = [_scalar(part) for part in text.split(",")]
    is_tuple = typing.get_origin(hint) is tuple
    return _converted(shown, values if is_tuple else values[0] if len(values) == 1 else text, hint)


def _scalar(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def _converted(name: str, value: Any, hint: Any) -> Any:
    """A value of the type that the field has; a wrong one is an error."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"configuration({name}={value!r}): expected one of {', '.join(map(str, arguments))}")
        return value
    if origin is types.UnionType:
        return None if value is None else _converted(name, value, arguments[0])
    if origin is tuple:
        if not isinstance(value, (list, tuple)) or (arguments[-1] is not ... and len(value) != len(arguments)):
            wanted = "numbers" if arguments[-1] is ... else f"{len(arguments)} numbers"
            raise ValueError(f"configuration({name}={value!r}): expected {wanted}, separated by commas")
        return tuple(_converted(name, part, arguments[0]) for part in value)
    if hint is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"configuration({name}): expected a number in the range of float64") from None
    if type(value) is not hint:
        raise ValueError(f"configuration({name}={value!r}): expected {hint.__name__}, got {type(value).__name__}")
    return value


def _check(c: Configuration) -> None:
    """Ranges that types do not say."""

    def require(name: str, fine: bool, wanted: str) -> None:
        if not fine:
            value: Any = c
            for part in name.split("."):
                value = getattr(value, part)
            raise ValueError(f"configuration({name}={value}): expected {wanted}")

    stages = len(c.widths)
    for name in ("blocks", "inner"):
        require(name, len(getattr(c, name)) == stages, f"{stages} numbers, as widths has")
    require("widths", stages > 0 and min(c.widths) > 0, "at least one positive number")
    require("blocks", min(c.blocks) >= 0 and sum(c.blocks) <= MOST_BLOCKS, f"0 to {MOST_BLOCKS} in all")
    require("dense_blocks", 0 <= c.dense_blocks <= MOST_BLOCKS, f"0 to {MOST_BLOCKS}")
    require("inner", min(c.inner) > 0, "positive numbers")
    require("kernel", 0 < c.kernel <= LARGEST_KERNEL and c.kernel % 2 == 1, f"an odd number up to {LARGEST_KERNEL}")
    for name in ("unshuffle", "pool", "dense_inner", "epochs", "batch", "evaluate_every"):
        require(name, getattr(c, name) > 0, "a positive number")
    require("holdout", c.holdout >= 0, "a number of at least 0")
    require("seed", 0 <= c.seed <= LARGEST_SEED, f"0 to {LARGEST_SEED}")
    require("images", c.images is None or c.images > 0, "a positive number")
    fine = c.iterations is None or 0 < c.iterations <= MOST_ITERATIONS
    require("iterations", fine, f"a positive number up to {MOST_ITERATIONS}")
    require("form", c.rescaling == "sr" or c.form == "spatial", f"spatial, the only form of {c.rescaling}")
    require("iterations", c.rescaling != "aol" or c.iterations in (None, 1), "1, which is what aol is; use sr for more")
    require("temperature", 0 < c.temperature < math.inf, "a positive number")
    require("lr", 0 < c.lr <= LARGEST_RATE, f"a positive number up to {LARGEST_RATE:g}")
    require("final_lr", 0 <= c.final_lr <= LARGEST_RATE, f"a number from 0 to {LARGEST_RATE:g}")
    require("offset", math.isfinite(c.offset), "a finite number")
    require("knots", 0 < c.knots[0] <= c.knots[1] < 1, "two increasing shares between 0 and 1")
    require("betas", all(0 <= beta < 1 for beta in c.betas), "two numbers of at least 0 and below 1")
    require("augmentation.crop", c.augmentation.crop >= 0, "a number of at least 0")
    require("augmentation.hue", 0 <= c.augmentation.hue <= 0.5, "a share of the circle from 0 to 0.5")
    for name in ("brightness", "contrast", "saturation"):
        low, high = getattr(c.augmentation, name)
        require(f"augmentation.{name}", 0 <= low <= high < math.inf, "two increasing numbers of at least 0")


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
