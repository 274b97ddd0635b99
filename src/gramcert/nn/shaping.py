"""Layers that pad, shift and centre: isometries and projections."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramcert.arguments import axis_sizes, can_be_read
from gramcert.nn.layer import Layer, expected, names_itself
from gramcert.nn.outline import Outline
from gramcert.operators.graph import Variable

_OF_BATCH = "in training mode it depends on the batch; call .eval() first"


class PadChannels(Layer):
    """Appends channels of zeros.

    Args:
        channels: how many there are afterwards.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = axis_sizes("PadChannels", "channels", channels, 1)[0]

    def check(self, x: Tensor) -> None:
        """Not more channels than there shall be."""
        if x.dim() < 2 or x.shape[1] > self.channels:
            raise expected(self, f"(batch, at most {self.channels} channels, ...)", x)

    def compute(self, x: Tensor) -> Tensor:
        """Zeros at the end of axis 1."""
        return F.pad(x.movedim(1, -1), (0, self.channels - x.shape[1])).movedim(-1, 1)

    def extra_repr(self) -> str:
        """For printing."""
        return f"channels={self.channels}"


@names_itself
class Shift(Layer):
    """Adds a constant to each channel, such as minus the mean of the data; nothing is divided.

    Args:
        values: one number per channel.
    """

    values: Tensor

    def __init__(self, values: Sequence[float] | Tensor) -> None:
        super().__init__()
        tensor = torch.as_tensor(values, dtype=torch.get_default_dtype()).detach().clone()
        if tensor.dim() != 1 or (can_be_read(tensor) and not bool(torch.isfinite(tensor).all())):
            raise ValueError(f"Shift(values): expected a sequence of finite numbers, got {values}")
        self.register_buffer("values", tensor)

    @property
    def channels(self) -> int:
        """How many it takes."""
        return self.values.numel()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """A vector."""
        return {"values": (self.values.numel(),)}

    def check(self, x: Tensor) -> None:
        """One channel per number."""
        if x.dim() < 2 or x.shape[1] != len(self.values):
            raise expected(self, f"(batch, {len(self.values)}, ...)", x)

    def compute(self, x: Tensor) -> Tensor:
        """The sum."""
        return (x.movedim(1, -1) + self.values).movedim(-1, 1)

    def extra_repr(self) -> str:
        """For printing."""
        return ", ".join(f"{value:.4g}" for value in self.values.tolist())


@names_itself
class LayerCentering(Layer):
    """Subtracts from each channel its mean over the places of the image, and adds a trainable bias: a projection.

    What layer normalisation is without the division, which has no bounded constant.

    Args:
        channels: number of channels.
    """

    def __init__(self, channels: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.channels = axis_sizes("LayerCentering", "channels", channels, 1)[0]
        self.bias = nn.Parameter(torch.zeros(self.channels, device=device, dtype=dtype))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """One bias per channel."""
        return {"bias": (self.channels,)}

    def check(self, x: Tensor) -> None:
        """Channels and at least one spatial axis."""
        if x.dim() < 3 or x.shape[1] != self.channels:
            raise expected(self, f"(batch, {self.channels}, sizes)", x)

    def compute(self, x: Tensor) -> Tensor:
        """The difference from the mean, and the bias."""
        flat = x.flatten(2)
        return (flat - flat.mean(2, keepdim=True) + self.bias[:, None]).reshape_as(x)

    def extra_repr(self) -> str:
        """For printing."""
        return f"channels={self.channels}"


@names_itself
class BatchCentering(Layer):
    """Subtracts from each channel its mean over the batch, in evaluation a running mean, and adds a trainable bias.

    Batch normalisation without the division. In training mode an output depends on the whole batch, so the guarantee is
    for evaluation mode.

    Args:
        channels: number of channels.
        momentum: weight of a new batch in the running mean.
    """

    running_mean: Tensor

    def __init__(
        self,
        channels: int,
        momentum: float = 0.1,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(momentum, (int, float)) or not 0 < momentum <= 1:
            raise ValueError(f"BatchCentering(momentum={momentum}): expected 0 < momentum <= 1")
        self.channels = axis_sizes("BatchCentering", "channels", channels, 1)[0]
        self.momentum = momentum
        self.bias = nn.Parameter(torch.zeros(self.channels, device=device, dtype=dtype))
        self.register_buffer("running_mean", torch.zeros(self.channels, device=device, dtype=dtype))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """One bias and one mean per channel."""
        return dict.fromkeys(("bias", "running_mean"), (self.channels,))

    def check(self, x: Tensor) -> None:
        """The number of channels."""
        if x.dim() < 2 or x.shape[1] != self.channels:
            raise expected(self, f"(batch, {self.channels}, ...)", x)

    def compute(self, x: Tensor) -> Tensor:
        """The difference from the mean, and the bias."""
        mean = self.running_mean
        if self.training and x.numel():
            mean = x.transpose(0, 1).flatten(1).mean(1)
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        # One after the other: what is computed of the two alone would be rounded before anybody could bound it.
        return (x.movedim(1, -1) - mean + self.bias).movedim(-1, 1)

    def outlined(self, outline: Outline, x: Variable) -> Variable:
        """A shift, in evaluation mode."""
        if self.training:
            raise ValueError(f"{outline.call}(BatchCentering): {_OF_BATCH}")
        return super().outlined(outline, x)

    def extra_repr(self) -> str:
        """For printing."""
        return f"channels={self.channels}, momentum={self.momentum}"

    def plain(self) -> nn.Module:
        """In evaluation mode."""
        if self.training:
            raise ValueError(_OF_BATCH)
        return super().plain()
