"""Sets of labelled images: what they are, and where they come from."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from gramcert.training.cifar import read_cifar
from gramcert.training.folder import read_folder

DATASETS = ("digits", "cifar10", "cifar100", "folder")

# Of scikit-learn's 1797 digits, the last ones are the test set: they are by other writers.
_DIGITS_TEST = 397


@dataclass(frozen=True)
class Labelled:
    """Images as bytes, shape (count, channels, height, width), whose value is byte/``white``, and their classes."""

    images: Tensor
    labels: Tensor
    white: int = 255

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | slice) -> "Labelled":
        return replace(self, images=self.images[index], labels=self.labels[index])

    def batches(self, size: int) -> Iterator["Labelled"]:
        """Parts of that many, the last one as long as it is."""
        return (self[slice(start, start + size)] for start in range(0, len(self), size))

    def loader(self, size: int = 250) -> Iterator[tuple[Tensor, Tensor]]:
        """Values and labels, in batches that certification has memory for."""
        return ((part.values(), part.labels) for part in self.batches(size))

    def digest(self) -> str:
        """Of all bytes and labels, to know them again by."""
        digest = hashlib.sha256(repr((tuple(self.images.shape), self.white)).encode())
        for tensor in (self.images, self.labels):
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """In [0, 1]; the quotient is rounded once."""
        return self.images.to(dtype) / self.white


@dataclass(frozen=True)
class Images:
    """Training and test images, and the names of their classes."""

    train: Labelled
    test: Labelled
    classes: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    def digest(self) -> str:
        """Of all images, labels and names, to know them again by."""
        parts = (self.train.digest(), self.test.digest(), self.classes)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def channel_means(self) -> list[float]:
        """Of the training images, exact but for one rounding: bytes are summed as integers."""
        pixels = self.train.images.transpose(0, 1).flatten(1)
        return [float(total) / (pixels.shape[1] * self.train.white) for total in pixels.sum(1, dtype=torch.int64)]

    def limited(self, images: int | None, holdout: int) -> "Images":
        """The first training images; with ``holdout``, the last so many of them are the test set."""
        train, test = self.train, self.test
        if holdout:
            if not 0 < holdout < len(train):
                raise ValueError(
                    f"Configuration(holdout={holdout}): expected less than the {len(train)} training images"
                )
            train, test = train[: len(train) - holdout], train[len(train) - holdout :]
        if images is not None:
            if not 0 < images <= len(train):
                raise ValueError(f"Configuration(images={images}): expected at most the {len(train)} training images")
            train = train[:images]
        return replace(self, train=train, test=test)


def load_images(dataset: str, path: str | Path | None = None) -> Images:
    """The set of that name; all but ``digits`` are read from a path.

    Args:
        dataset: ``digits`` (embedded in scikit-learn), ``cifar10`` or ``cifar100`` (the standard python archive, as
            ``.tar.gz`` or unpacked), or ``folder`` (``train/CLASS/*.png`` and ``test/CLASS/*.png``).
        path: where it is.
    """
    if dataset == "digits":
        return _digits()
    if dataset not in DATASETS:
        raise ValueError(f"load_images(dataset={dataset!r}): expected one of {', '.join(DATASETS)}")
    if path is None:
        raise ValueError(f"{dataset}: the path of its images is needed (--data, or GRAMCERT_DATA in the environment)")
    path = Path(path)
    train, test, classes = read_folder(path) if dataset == "folder" else read_cifar(path, dataset)
    return Images(Labelled(*train), Labelled(*test), classes)


def _digits() -> Images:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("load_images('digits'): needs scikit-learn (pip install 'gramcert[train]')") from None
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.uint8)[:, None]
    labels = torch.tensor(data.target)
    whole = Labelled(images, labels, white=16)
    cut = len(whole) - _DIGITS_TEST
    assert math.isclose(float(images.max()), whole.white)
    return Images(whole[:cut], whole[cut:], tuple(str(name) for name in data.target_names))
