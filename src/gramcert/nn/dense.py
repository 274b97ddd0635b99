"""Layers of Corollary 1: x ↦ W·R·x + b."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gramcert.arguments import Sizes
from gramcert.nn.layer import names_itself
from gramcert.parametrizations import register_rescaling
from gramcert.rescaling.vector import Form


@names_itself
class SRLinear(nn.Linear):
    """``nn.Linear`` whose weight is rescaled to a norm of at most 1.

    Args:
        in_features: inputs.
        out_features: outputs.
        bias: whether there is one.
        device: where the parameters are.
        dtype: their type.
        iterations: t of the rescaling; 1 is AOL.

    Example:
        >>> import torch, gramcert
        >>> layer = gramcert.nn.SRLinear(64, 32)
        >>> layer(torch.ones(1, 64)).shape
        torch.Size([1, 32])
        >>> 0.5 < gramcert.lipschitz_bound(layer) <= 1 + 1e-6
        True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        iterations: int = 3,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        register_rescaling(type(self).__name__, self, "weight", iterations, "spatial", None, "input")

    def reset_parameters(self) -> None:
        """An orthogonal weight; with at least as many outputs as inputs rescaling leaves it as it is."""
        super().reset_parameters()
        delta_orthogonal_(_original(self))


@names_itself
class _SRConv(nn.modules.conv._ConvNd):
    """What the three convolutions share: the arguments of torch's layer, and those of the rescaling by name."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        iterations: int = 3,
        form: Form = "spatial",
        input_size: Sizes | None = None,
    ) -> None:
        geometry: Any = (kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype)
        super().__init__(in_channels, out_channels, *geometry)
        register_rescaling(type(self).__name__, self, "weight", iterations, form, input_size, "input")

    def reset_parameters(self) -> None:
        """An orthogonal matrix at the central tap of each group.

        With at least as many outputs as inputs in each, rescaling leaves it as it is.
        """
        super().reset_parameters()
        delta_orthogonal_(_original(self), self.groups)


class SRConv1d(_SRConv, nn.Conv1d):
    """``nn.Conv1d`` whose weight is rescaled to a norm of at most 1; see :class:`SRConv2d`."""


class SRConv2d(_SRConv, nn.Conv2d):
    """``nn.Conv2d`` whose weight is rescaled to a norm of at most 1.

    All arguments of ``nn.Conv2d`` (stride, padding, padding mode, dilation, groups), and by name ``iterations=3``,
    ``form="spatial"`` and ``input_size=None`` of :func:`gramcert.parametrizations.spectral_rescaling`.

    Example:
        >>> import torch, gramcert
        >>> layer = gramcert.nn.SRConv2d(3, 16, 3, stride=2, padding=1, form="frequency")
        >>> layer(torch.ones(1, 3, 8, 8)).shape
        torch.Size([1, 16, 4, 4])
        >>> 0.5 < gramcert.lipschitz_bound(layer) <= 1 + 1e-6
        True
    """


class SRConv3d(_SRConv, nn.Conv3d):
    """``nn.Conv3d`` whose weight is rescaled to a norm of at most 1; see :class:`SRConv2d`."""


def delta_orthogonal_(weight: Tensor, groups: int = 1) -> None:
    """Zero but for an orthogonal matrix at the central tap (Xiao et al., 2018), for each group."""
    with torch.no_grad():
        weight.zero_()
        flat = weight.movedim((0, 1), (-2, -1))  # a view: the taps first
        for size in weight.shape[2:]:
            flat = flat[size // 2]
        rows = len(weight) // groups
        for first in range(0, len(weight), rows):
            matrix = nn.init.orthogonal_(torch.empty(rows, weight.shape[1], device=weight.device))
            flat[first : first + rows] = matrix.to(weight.dtype)


def _original(layer: nn.Module) -> Tensor:
    """The weight that is trained: of a parametrised layer the one before rescaling."""
    weight = layer.weight
    if parametrize.is_parametrized(layer, "weight"):
        parametrizations: Any = layer.parametrizations
        weight = parametrizations.weight.original
    assert isinstance(weight, Tensor)
    return weight
