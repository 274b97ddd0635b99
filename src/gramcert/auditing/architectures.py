"""Networks with a name, for files that hold weights alone.

A file of weights does not say in which order its layers are applied, with which strides, or what is between them. These
are the published architectures that gramcert can build itself; anything else comes as a module, ``.pt2`` or ONNX.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

Weights = dict[str, Tensor]


class _Block(nn.Module):
    """Two 3×3 convolutions with batch normalisation, and a shortcut without weights (option A of He et al., 2016)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride, self.missing = stride, width - channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.missing:  # every second place, and channels of zeros on both sides
            before = self.missing // 2
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.missing - before))
        return F.relu(y + x)


class CifarResNet(nn.Module):
    """The residual network for CIFAR-10 of He et al. (2016), section 4.2, with 6n + 2 layers."""

    def __init__(self, blocks: int, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, blocks, 1)
        self.layer2 = self._stage(16, 32, blocks, 2)
        self.layer3 = self._stage(32, 64, blocks, 2)
        self.linear = nn.Linear(64, classes)

    @staticmethod
    def _stage(channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
        first = _Block(channels, width, stride)
        return nn.Sequential(first, *(_Block(width, width, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


class Denoiser(nn.Module):
    """DnCNN of Zhang et al. (2017): x minus the noise that 3×3 convolutions with ReLU find in it."""

    def __init__(self, channels: int, width: int, layers: int) -> None:
        super().__init__()
        parts: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        for _ in range(layers - 2):
            parts += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        self.model = nn.Sequential(*parts, nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        """The denoised image."""
        clean: Tensor = x - self.model(x)
        return clean


def _denoiser(weights: Weights) -> nn.Module:
    kernels = [weight for name, weight in weights.items() if name.endswith("weight")]
    width, channels = kernels[0].shape[:2]
    return Denoiser(channels, width, len(kernels))


def _two_and_two(stride: int, padding: int) -> Callable[[Weights], nn.Module]:
    """Two convolutions and two linear layers with ReLU between them, sizes from the weights."""

    def build(weights: Weights) -> nn.Module:
        layers: list[nn.Module] = []
        for name in ("0", "2"):
            outputs, inputs, *taps = weights[f"{name}.weight"].shape
            layers += [nn.Conv2d(inputs, outputs, (taps[0], taps[1]), stride, padding), nn.ReLU()]
        layers.append(nn.Flatten())
        for name in ("5", "7"):
            outputs, inputs = weights[f"{name}.weight"].shape
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    return build


ARCHITECTURES: dict[str, Callable[[Weights], nn.Module]] = {
    "resnet20": lambda _: CifarResNet(3),
    "resnet32": lambda _: CifarResNet(5),
    "resnet44": lambda _: CifarResNet(7),
    "resnet56": lambda _: CifarResNet(9),
    "resnet110": lambda _: CifarResNet(18),
    "dncnn": _denoiser,
    # Wong and Kolter (2018): 4×4 kernels, stride 2, padding 1; and the same order with 3×3 kernels, stride 1.
    "kw-small": _two_and_two(2, 1),
    "2c2f": _two_and_two(1, 0),
}


def build(name: str, weights: Weights) -> nn.Module:
    """The named network with these weights, in evaluation mode; every weight must have its place."""
    if name not in ARCHITECTURES:
        raise ValueError(f"architecture {name!r}: expected one of {', '.join(ARCHITECTURES)}")
    try:
        model = ARCHITECTURES[name](weights)
        wrong = model.load_state_dict(weights, strict=False)
    except (KeyError, IndexError, ValueError, RuntimeError, TypeError) as error:
        first = str(error).strip().splitlines()[-1].strip()
        raise ValueError(f"architecture {name!r}: the weights do not fit ({first})") from None
    missing = [key for key in wrong.missing_keys if not key.endswith("num_batches_tracked")]  # counts nothing uses
    if missing or wrong.unexpected_keys:
        listed = ", ".join([*missing, *wrong.unexpected_keys][:6])
        raise ValueError(f"architecture {name!r}: the weights do not fit: missing or left over are {listed}")
    return model.eval()
