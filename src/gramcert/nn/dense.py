"""Layers of Corollary 1: x ↦ W·R·x + b."""

from typing import Any

import torch
from torch import nn

from gramcert.arguments import Sizes
from gramcert.parametrizations import spectral_rescaling
from gramcert.rescaling.vector import Form


class SRLinear(nn.Linear):
    """``nn.Linear`` whose weight is rescaled to a norm of at most 1.

    Args:
        in_features: inputs.
        out_features: outputs.
        bias: whether there is one.
        iterations: t of the rescaling; 1 is AOL.
        device: where the parameters are.
        dtype: their type.

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
        iterations: int = 3,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        spectral_rescaling(self, iterations=iterations)

    def reset_parameters(self) -> None:
        """An orthogonal weight, which rescaling leaves as it is."""
        super().reset_parameters()
        delta_orthogonal_(self.weight)


class _SRConv(nn.modules.conv._ConvNd):
    """What the three convolutions share. All arguments of torch's layer, and those of the rescaling by name."""

    def __init__(
        self,
        *args: Any,
        iterations: int = 3,
        form: Form = "spatial",
        input_size: Sizes | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        spectral_rescaling(self, iterations=iterations, form=form, input_size=input_size)

    def reset_parameters(self) -> None:
        """An orthogonal matrix at the central tap of each group, which rescaling leaves as it is."""
        super().reset_parameters()
        for weight in self.weight.detach().chunk(self.groups):
            delta_orthogonal_(weight)


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


def delta_orthogonal_(weight: torch.Tensor) -> None:
    """Zero but for an orthogonal matrix at the central tap (Xiao et al., 2018)."""
    with torch.no_grad():
        flat = weight.flatten(2) if weight.dim() > 2 else weight[:, :, None]
        centre = 0
        for size in weight.shape[2:]:
            centre = centre * size + size // 2
        matrix = nn.init.orthogonal_(torch.empty(flat.shape[:2], device=weight.device))
        flat.zero_()
        flat[:, :, centre] = matrix
