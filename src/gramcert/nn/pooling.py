"""1-Lipschitz pooling, for one to three spatial axes."""

import math
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gramcert.arguments import Sizes, axis_sizes
from gramcert.nn.layer import Layer, expected, names_itself
from gramcert.nn.outline import Outline
from gramcert.operators.graph import Variable
from gramcert.operators.windows import windows_per_place
from gramcert.rounding import root_up

_MEAN: tuple[Any, ...] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


@names_itself
class _Pool(Layer):
    """Windows of ``kernel_size`` taps at steps of ``stride``, without padding; one int per axis."""

    def __init__(self, kernel_size: Sizes, stride: Sizes | None = None, *, axes: int = 2) -> None:
        super().__init__()
        name = type(self).__name__
        self.axes = _checked_axes(name, axes)
        self.kernel_size = axis_sizes(name, "kernel_size", kernel_size, self.axes, what=name)
        self.stride = self.kernel_size
        if stride is not None:
            self.stride = axis_sizes(name, "stride", stride, self.axes, what=name)
        # A window sum has norm √taps, and √m more where a place is in m windows.
        self.factor = root_float32(Fraction(math.prod(self.kernel_size), self.overlap))

    @property
    def overlap(self) -> int:
        """In how many windows a place can be."""
        return math.prod(windows_per_place(*axis) for axis in zip(self.kernel_size, self.stride, strict=True))

    def check(self, x: Tensor) -> None:
        """A window must fit."""
        sizes = x.shape[2:]
        if len(sizes) != self.axes or any(n < k for n, k in zip(sizes, self.kernel_size, strict=True)):
            raise expected(self, f"(batch, channels, {self.axes} sizes of at least {self.kernel_size})", x)

    def means(self, x: Tensor) -> Tensor:
        """The mean of each window. Not the sum: ONNX knows no other divisor, and its exporter drops one silently."""
        result: Tensor = _MEAN[self.axes - 1](x, self.kernel_size, self.stride)
        return result

    def outlined(self, outline: Outline, x: Variable) -> Variable:
        """At most 1, because the factor is rounded down, for the windows that it was made for."""
        square = Fraction(self.factor) ** 2 * Fraction(self.overlap, math.prod(self.kernel_size))
        constant = 1.0 if square <= 1 else root_up(math.nextafter(float(square), math.inf))
        return outline.constant(x, constant, type(self).__name__)

    def extra_repr(self) -> str:
        """For printing."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}"


class ScaledAvgPool(_Pool):
    """The sum of each window divided by √taps: the largest 1-Lipschitz multiple of the average.

    A window sum has norm √taps; where a place is in m windows on an axis, √m more. A mean, as torch's pooling takes it,
    would shrink its input by √taps.

    Args:
        kernel_size: int or one per axis.
        stride: int or one per axis; that of the kernel if ``None``.
        axes: number of spatial axes.

    Example:
        >>> import torch
        >>> from gramcert.nn import ScaledAvgPool
        >>> ScaledAvgPool(2)(torch.ones(1, 1, 4, 4))
        tensor([[[[2., 2.],
                  [2., 2.]]]])
    """

    def compute(self, x: Tensor) -> Tensor:
        """Means times √(taps/overlap)."""
        return self.means(x) * self.factor


class ScaledL2NormPool(_Pool):
    """The Euclidean length of each window, divided by √m where places are in m windows. Its gradient at 0 is 0.

    Args:
        kernel_size: int or one per axis.
        stride: int or one per axis; that of the kernel if ``None``.
        axes: number of spatial axes.
    """

    def compute(self, x: Tensor) -> Tensor:
        """√(mean of squares), times √(taps/overlap)."""
        squares = self.means(x * x)
        lengths = torch.where(squares == 0, 0.0, torch.sqrt(torch.where(squares == 0, 1.0, squares)))
        return lengths * self.factor


class Subsample(Layer):
    """Every ``stride``-th place of each spatial axis.

    Args:
        stride: int or one per axis.
        axes: number of spatial axes.
    """

    def __init__(self, stride: Sizes, *, axes: int = 2) -> None:
        super().__init__()
        self.axes = _checked_axes("Subsample", axes)
        self.stride = axis_sizes("Subsample", "stride", stride, self.axes, what="Subsample")

    def check(self, x: Tensor) -> None:
        """The number of axes."""
        if x.dim() != self.axes + 2:
            raise expected(self, f"(batch, channels, {self.axes} sizes)", x)

    def compute(self, x: Tensor) -> Tensor:
        """A slice."""
        return x[(slice(None), slice(None), *(slice(None, None, step) for step in self.stride))]

    def extra_repr(self) -> str:
        """For printing."""
        return f"stride={self.stride}"


def _checked_axes(name: str, axes: int) -> int:
    count = axis_sizes(name, "axes", axes, 1)[0]
    if count > 3:
        raise ValueError(f"{name}(axes={count}): expected 1 to 3")
    return count


def root_float32(square: Fraction) -> float:
    """The largest float32 that is at most the square root: exact in every wider type, so that norms stay at most 1."""
    value = torch.tensor(math.sqrt(square), dtype=torch.float32, device="cpu")
    while Fraction(float(value)) ** 2 > square:
        value = torch.nextafter(value, torch.zeros_like(value))
    return float(value)
