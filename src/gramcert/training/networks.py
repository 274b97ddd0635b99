"""The network that a configuration describes."""

import torch
from torch import nn

from gramcert.nn.head import NormalizedLinear
from gramcert.nn.pooling import ScaledAvgPool
from gramcert.nn.residual import SLLConv2d, SLLLinear
from gramcert.nn.shaping import PadChannels, Shift
from gramcert.training.configuration import Configuration

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "leaky_relu": nn.LeakyReLU}


def build(
    configuration: Configuration, shape: tuple[int, int, int], classes: int, means: list[float] | None = None
) -> nn.Sequential:
    """A ``Sequential`` of 1-Lipschitz layers, the head last; its weights depend on the configuration's seed alone.

    Args:
        configuration: see :class:`~gramcert.training.configuration.Configuration`.
        shape: channels, height and width of the images.
        classes: number of outputs.
        means: what is subtracted from each channel; zeros if ``None``, for a network whose weights will be loaded.
    """
    if min(shape) < 1 or classes < 2:
        raise ValueError(f"network {configuration.name}: images of shape {shape} in {classes} classes")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(configuration.seed)
        return _built(configuration, shape, classes, means)


def _built(c: Configuration, shape: tuple[int, int, int], classes: int, means: list[float] | None) -> nn.Sequential:
    channels, height, width = shape
    activation = _ACTIVATIONS[c.activation]
    # Of zeros no list is made: a hostile file may ask for any number of channels.
    layers: list[nn.Module] = [Shift(torch.zeros(channels) if means is None else [-mean for mean in means])]
    shrinking = [c.unshuffle, *[2] * (len(c.widths) - 1)]
    for stage, (factor, wanted, blocks, inner) in enumerate(zip(shrinking, c.widths, c.blocks, c.inner, strict=True)):
        if height % factor or width % factor:
            raise ValueError(f"network {c.name}: {height}×{width} places cannot be unshuffled by {factor}")
        if factor > 1:
            layers.append(nn.PixelUnshuffle(factor))
            channels, height, width = channels * factor**2, height // factor, width // factor
        if channels > wanted:
            raise ValueError(f"network {c.name}: stage {stage} has {channels} channels, but a width of {wanted}")
        if channels < wanted:
            layers.append(PadChannels(wanted))
            channels = wanted
        layers += [
            SLLConv2d(
                channels, inner, c.kernel, activation(), rescaling=c.rescaling, iterations=c.iterations, form=c.form
            )
            for _ in range(blocks)
        ]
    if c.pool > 1:
        if height % c.pool or width % c.pool:
            raise ValueError(f"network {c.name}: {height}×{width} places cannot be pooled by {c.pool}")
        layers.append(ScaledAvgPool(c.pool))
        height, width = height // c.pool, width // c.pool
    layers.append(nn.Flatten())
    features = channels * height * width
    layers += [
        SLLLinear(features, c.dense_inner, activation(), rescaling=c.rescaling, iterations=c.iterations)
        for _ in range(c.dense_blocks)
    ]
    layers.append(NormalizedLinear(features, classes))
    network = nn.Sequential(*layers)
    if c.start == "orthogonal":
        _start_orthogonal(network)
    return network


def _start_orthogonal(network: nn.Sequential) -> None:
    """Residual weights with orthonormal rows or columns; of kernels the middle tap, the others 0."""
    with torch.no_grad():
        for layer in network:
            if isinstance(layer, SLLLinear):
                nn.init.orthogonal_(layer.weight)
            elif isinstance(layer, SLLConv2d):
                row, column = (taps // 2 for taps in layer.weight.shape[2:])
                layer.weight.zero_()
                layer.weight[:, :, row, column] = nn.init.orthogonal_(torch.empty(layer.weight.shape[:2]))
