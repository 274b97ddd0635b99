"""Augmentation of whole batches, in torch: shifted crops, flips and colours.

Each image has its own random numbers, all drawn from one generator for the whole batch, so that a part of the batch
(that of one process) is changed exactly as it would be in the whole.
"""

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from gramcert.training.strict import STRICT, one_sentence

# Weights of red, green and blue in what counts as grey (ITU-R BT.601).
_GREY = (0.299, 0.587, 0.114)

_NUMBERS = 7  # drawn per image: two places of the crop, the flip, four colours


def increasing(pair: tuple[float, float]) -> tuple[float, float]:
    """The same two numbers, if the second is not below the first."""
    if pair[0] > pair[1]:
        raise ValueError("expected two increasing numbers")
    return pair


# Lowest and highest.
Factor = Annotated[float, Field(ge=0)]
Factors = Annotated[tuple[Factor, Factor], AfterValidator(increasing)]


@dataclass(frozen=True, config=STRICT)
class Augmentation:
    """What is done to training images, in this order; the defaults do nothing, and grey images have no colours.

    Args:
        crop: pixels of reflected border, from which a window of the original size is cut.
        flip: whether half of the images are mirrored.
        brightness: factors of the image, lowest and highest.
        contrast: factors of the difference from the image's mean grey.
        saturation: factors of the difference from each pixel's grey.
        hue: largest turn of the hue either way, in parts of the full circle.
    """

    crop: Annotated[int, Field(ge=0)] = 0
    flip: bool = False
    brightness: Factors = (1.0, 1.0)
    contrast: Factors = (1.0, 1.0)
    saturation: Factors = (1.0, 1.0)
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0

    def __call__(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Images in [0, 1], shape (batch, channels, height, width); numbers from :func:`draw`, one row per image."""
        if self.crop:
            images = _cropped(images, self.crop, numbers[:, 0], numbers[:, 1])
        if self.flip:
            images = torch.where(_per_image(numbers[:, 2]) < 0.5, images.flip(3), images)
        if images.shape[1] != 3:
            return images
        if self.brightness != (1, 1):
            images = (images * _between(self.brightness, numbers[:, 3])).clamp(0, 1)
        if self.contrast != (1, 1):
            mean = _grey(images).mean((1, 2, 3), keepdim=True)
            images = torch.lerp(mean, images, _between(self.contrast, numbers[:, 4])).clamp(0, 1)
        if self.saturation != (1, 1):
            images = torch.lerp(_grey(images), images, _between(self.saturation, numbers[:, 5])).clamp(0, 1)
        if self.hue:
            images = _turned(images, _between((-self.hue, self.hue), numbers[:, 6]))
        return images


Augmentation.__init__ = one_sentence(Augmentation)(Augmentation.__init__)  # type: ignore[method-assign]


def draw(count: int, generator: torch.Generator) -> Tensor:
    """Uniform numbers in [0, 1) for a batch of ``count`` images."""
    return torch.rand(count, _NUMBERS, generator=generator)


def _per_image(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def _between(limits: tuple[float, float], numbers: Tensor) -> Tensor:
    low, high = limits
    return _per_image(low + (high - low) * numbers)


def _cropped(images: Tensor, border: int, down: Tensor, right: Tensor) -> Tensor:
    """Windows of the original size out of the image with a reflected border."""
    height, width = images.shape[2:]
    padded = F.pad(images, (border,) * 4, mode="reflect")
    top, left = ((share * (2 * border + 1)).long() for share in (down, right))
    rows = top[:, None] + torch.arange(height, device=images.device)
    columns = left[:, None] + torch.arange(width, device=images.device)
    batch = torch.arange(len(images), device=images.device)[:, None, None]
    # Indices around the slice put the channels last.
    return padded[batch, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def _grey(images: Tensor) -> Tensor:
    weights = torch.tensor(_GREY, dtype=images.dtype, device=images.device)
    return torch.einsum("bchw,c->bhw", images, weights)[:, None]


def _turned(images: Tensor, turn: Tensor) -> Tensor:
    """Hue turned by a share of the full circle, with value and chroma of each pixel kept.

    With hue H in sixths, value V and chroma C, each channel is V - C·clamp(min(k, 4 - k), 0, 1) at k = (n + H) mod 6,
    n = 5, 3, 1 for red, green and blue.
    """
    value, lead = images.max(1)
    chroma = value - images.amin(1)
    red, green, blue = images.unbind(1)
    choices = torch.stack([green - blue, blue - red, red - green], 1)
    leaning = choices.gather(1, lead[:, None])[:, 0] / torch.where(chroma == 0, 1, chroma)
    hue = leaning + 2 * lead + 6 * turn[:, 0]
    offsets = torch.tensor([5.0, 3.0, 1.0], dtype=images.dtype, device=images.device)[:, None, None]
    place = (offsets + hue[:, None]).remainder(6)
    return value[:, None] - chroma[:, None] * torch.minimum(place, 4 - place).clamp(0, 1)
