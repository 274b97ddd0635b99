"""1-Lipschitz activations that keep gradients: sorting, reflecting, folding."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gramcert.arguments import require_finite
from gramcert.nn.head import UnitRows
from gramcert.nn.layer import Layer, expected, names_itself
from gramcert.nn.outline import Outline
from gramcert.operators.graph import Variable
from gramcert.operators.reflection import constant_of


class MaxMin(Layer):
    """The larger and the smaller of channels i and i + c/2 (Anil, Lucas and Grosse, 2019), a permutation of its input.

    Example:
        >>> import torch
        >>> from gramcert.nn import MaxMin
        >>> MaxMin()(torch.tensor([[1.0, 5.0, 3.0, 2.0]]))
        tensor([[3., 5., 1., 2.]])
    """

    def check(self, x: Tensor) -> None:
        """An even number of channels."""
        if x.dim() < 2 or x.shape[1] % 2:
            raise expected(self, "(batch, an even number of channels, ...)", x)

    def compute(self, x: Tensor) -> Tensor:
        """Maxima, then minima."""
        first, second = x.chunk(2, 1)
        return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], 1)


class GroupSort(Layer):
    """Sorts groups of neighbouring channels (Anil, Lucas and Grosse, 2019).

    Args:
        group_size: channels per group; their number must divide the channels.
    """

    def __init__(self, group_size: int = 2) -> None:
        super().__init__()
        if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
            raise ValueError(f"GroupSort(group_size={group_size!r}): expected a positive int")
        self.group_size = group_size

    def check(self, x: Tensor) -> None:
        """Whole groups."""
        if x.dim() < 2 or x.shape[1] % self.group_size:
            raise expected(self, f"(batch, a multiple of {self.group_size} channels, ...)", x)

    def compute(self, x: Tensor) -> Tensor:
        """Each group in ascending order."""
        groups: Tensor = x.unflatten(1, (-1, self.group_size))
        return groups.sort(dim=2).values.flatten(1, 2)

    def extra_repr(self) -> str:
        """For printing."""
        return f"group_size={self.group_size}"


class Abs(Layer):
    """The absolute value."""

    def compute(self, x: Tensor) -> Tensor:
        """|x|."""
        return x.abs()


@names_itself
class Householder(Layer):
    """Reflects pairs of channels (i, i + c/2) to one side of a trainable line (Singla, Singla and Feizi, 2022).

    With a unit vector v per pair, z ↦ z - 2·min(vᵀz, 0)·v. Written so, it is continuous for every v, and its constant
    is max(1, 2‖v‖² - 1) for the v that rounding leaves: the theorem of the residual layer with one column.

    Args:
        channels: number of channels, even.
    """

    def __init__(self, channels: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if isinstance(channels, bool) or not isinstance(channels, int) or channels < 2 or channels % 2:
            raise ValueError(f"Householder(channels={channels!r}): expected a positive even number")
        self.channels = channels
        # v = (1, -1)/√2 exchanges the pair where the second is larger: MaxMin.
        self.normals = nn.Parameter(torch.tensor([1.0, -1.0], device=device, dtype=dtype).repeat(channels // 2, 1))
        parametrize.register_parametrization(self, "normals", UnitRows())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """One normal per pair."""
        return {"normals": (self.channels // 2, 2)}

    def check(self, x: Tensor) -> None:
        """The number of channels."""
        if x.dim() < 2 or x.shape[1] != self.channels:
            raise expected(self, f"(batch, {self.channels}, ...)", x)

    def compute(self, x: Tensor) -> Tensor:
        """The pairs z as z - 2·min(vᵀz, 0)·v."""
        pairs: Tensor = x.movedim(1, -1).unflatten(-1, (2, -1))
        normals = self.normals.mT
        depth = (pairs * normals).sum(-2, keepdim=True).clamp(max=0)
        return (pairs - 2 * depth * normals).flatten(-2).movedim(-1, 1)

    def outlined(self, outline: Outline, x: Variable) -> Variable:
        """See :func:`gramcert.operators.reflection.constant_of`."""
        normals = self.normals.detach().cpu().double()
        require_finite(outline.call, "Householder.normals", normals)
        return outline.constant(x, constant_of(normals), "reflection")

    def extra_repr(self) -> str:
        """For printing."""
        return f"channels={self.channels}"
