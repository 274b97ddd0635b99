"""Images from folders: ``train/CLASS/*.png`` and ``test/CLASS/*.png``."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gramcert.training.randomness import generator

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}

# Pillow would otherwise look into files for dozens of formats, one of which it hands to another program.
_FORMATS = ("PNG", "JPEG", "BMP", "WEBP")

# Modes of Pillow; of others, such as I;16, the conversion would clip what is above 255.
_GREY, _COLOURED = ("1", "L"), ("RGB", "P", "PA", "LA", "RGBA", "CMYK", "YCbCr")

# Pixels of one image; more is a mistake or a decompression bomb.
LARGEST_IMAGE = 2**22


def read_folder(path: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[str, ...]]:
    """Training part, test part and class names; classes are the subfolders of ``train``, in alphabetical order."""
    for part in ("train", "test"):
        if not (path / part).is_dir():
            raise ValueError(f"{path}: expected the folders train/CLASS and test/CLASS with images")
    classes = tuple(sorted(folder.name for folder in (path / "train").iterdir() if folder.is_dir()))
    if len(classes) < 2:
        raise ValueError(f"{path / 'train'}: expected at least two folders, one for each class, got {len(classes)}")
    train = _part(path / "train", classes)
    return train, _part(path / "test", classes, like=train[0]), classes


def _part(folder: Path, classes: tuple[str, ...], like: Tensor | None = None) -> tuple[Tensor, Tensor]:
    images: list[Tensor] = []
    labels: list[int] = []
    unknown = {child.name for child in folder.iterdir() if child.is_dir()} - set(classes)
    if unknown:
        raise ValueError(f"{folder}: class {min(unknown)!r} is not among the training images")
    shape = None if like is None else like.shape[1:]
    for label, name in enumerate(classes):
        files = sorted(file for file in (folder / name).glob("*") if file.suffix.lower() in _SUFFIXES)
        if not files and like is None:  # such as .ipynb_checkpoints, which is no class
            raise ValueError(f"{folder / name}: no images ({', '.join(sorted(_SUFFIXES))})")
        for file in files:
            image = _image(file)
            shape = image.shape if shape is None else shape
            if image.shape != shape:
                raise ValueError(f"{file}: expected the size of the others, {tuple(shape)}, got {tuple(image.shape)}")
            images.append(image)
            labels.append(label)
    if not images:
        raise ValueError(f"{folder}: no images ({', '.join(sorted(_SUFFIXES))}) in its folders")
    # Mixed, always in the same way: whoever takes the first images gets some of every class.
    order = torch.randperm(len(images), generator=generator(0, "folder"))
    return torch.stack(images)[order], torch.tensor(labels)[order]


def _image(file: Path) -> Tensor:
    image_module = _pillow()
    try:
        if not file.is_file():  # also not a pipe, which might never end
            raise ValueError("expected a file")
        with warnings.catch_warnings(), image_module.open(file, formats=_FORMATS) as image:
            warnings.simplefilter("error")
            if image.width * image.height > LARGEST_IMAGE:
                raise ValueError(f"expected at most {LARGEST_IMAGE} pixels, got {image.width}×{image.height}")
            if image.mode not in _GREY + _COLOURED:
                raise ValueError(f"expected 8 bits per channel, got Pillow's mode {image.mode}")
            pixels = image.convert("L" if image.mode in _GREY else "RGB")
            channels = len(pixels.getbands())
            flat = torch.frombuffer(bytearray(pixels.tobytes()), dtype=torch.uint8)
            return flat.reshape(image.height, image.width, channels).permute(2, 0, 1).contiguous()
    except Exception as error:  # the decoders of a dozen formats raise what they like
        raise ValueError(f"{file}: cannot be read as an image ({error})") from None


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("read_folder: needs Pillow (pip install 'gramcert[train]')") from None
    return Image
