"""Linear maps that sum products: a matrix along one axis, a convolution."""

import functools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gramcert.certified.gram_symbol import crude_norm
from gramcert.certified.tapwise import TapwiseLayer, dense_matrix
from gramcert.geometry.axis import Axis, layer_axes
from gramcert.geometry.convolution import Convolution
from gramcert.operators.batches import BatchedConvolution
from gramcert.operators.linear import LinearMap, Shape, bytes_of
from gramcert.rounding import (
    absolute_sums,
    down,
    gamma,
    lift,
    norm_down,
    norm_up,
    root_up,
    scaled_down,
    scaled_up,
    total_up,
    up,
)


@dataclass(frozen=True, eq=False)
class AxisMatrix(LinearMap):
    """A matrix (outputs, inputs) along one axis: linear layers, means, pooling and interpolation axis by axis.

    Attributes:
        matrix: float64.
        axis: which, counted from the first.
        distance: of the matrix from the true one, in operator norm.
        name: what people call it.
    """

    matrix: Tensor
    axis: int
    distance: float = 0.0
    name: str = "matrix"

    @property
    def target(self) -> Shape:
        """Shape of the result."""
        return (*self.source[: self.axis], self.matrix.shape[0], *self.source[self.axis + 1 :])

    @property
    def error(self) -> float:
        """That of the matrix."""
        return self.distance

    @functools.cached_property
    def size(self) -> float:
        """√(‖·‖₁‖·‖_∞), or the Frobenius norm."""
        if not self.matrix.numel():
            return 0.0
        rows, columns = absolute_sums(self.matrix)
        return min(root_up(up(rows * columns)), norm_up(self.matrix))

    @property
    def terms(self) -> int:
        """The longer side."""
        return max(self.matrix.shape)

    def apply(self, x: Tensor) -> Tensor:
        """A matrix product along the axis."""
        return (x.movedim(self.axis + 1, -1) @ self.matrix.mT).movedim(-1, self.axis + 1)

    def adjoint(self, y: Tensor) -> Tensor:
        """The product with the transposed matrix."""
        return (y.movedim(self.axis + 1, -1) @ self.matrix).movedim(-1, self.axis + 1)

    def dense(self) -> Tensor:
        """Blocks of it."""
        before, after = math.prod(self.source[: self.axis]), math.prod(self.source[self.axis + 1 :])
        return torch.kron(_eye(before), torch.kron(self.matrix.contiguous(), _eye(after)))

    @functools.cached_property
    def disjoint_norm(self) -> tuple[float, float] | None:
        """Bounds of the norm where rows or columns share no place: the largest of their lengths."""
        used = self.matrix != 0
        if not bool(used.any()):
            return 0.0, 0.0
        scaled, lost, exponent = lift(self.matrix)
        for lines, others in ((scaled, used.sum(0)), (scaled.T, used.sum(1))):
            if int(others.max()) <= 1:
                upper = up(root_up(total_up(lines.square())) + lost * lines.shape[1])
                lower = down(norm_down(lines[lines.square().sum(1).argmax()]) - lost * lines.shape[1])
                return scaled_down(max(0.0, lower), exponent), scaled_up(upper, exponent)
        return None

    @property
    def kind(self) -> str:
        """Such as ``mean``."""
        return self.name

    @property
    def geometry(self) -> str:
        """Inputs and outputs."""
        outputs, inputs = self.matrix.shape
        return f"{inputs} → {outputs}"

    def _parts(self) -> list[bytes]:
        return [repr((self.axis, tuple(self.matrix.shape))).encode(), bytes_of(self.matrix)]


@dataclass(frozen=True, eq=False)
class Convolve(LinearMap):
    """A convolution of tensors ([batch,] channels, *sizes).

    Attributes:
        layer: with a float64 kernel.
        distance: from the true map, in operator norm.
    """

    layer: Convolution
    distance: float = 0.0
    axes: tuple[Axis, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", layer_axes(self.layer, self.input_size, "audit"))

    @property
    def input_size(self) -> Shape:
        """Spatial size of the source."""
        return self.source[-self.layer.axes :]

    @property
    def target(self) -> Shape:
        """Shape of the result."""
        batch = self.source[: -self.layer.axes - 1]
        return (*batch, self.layer.out_channels, *self.layer.output_size(self.input_size, call="audit"))

    @property
    def error(self) -> float:
        """Given."""
        return self.distance

    @functools.cached_property
    def size(self) -> float:
        """The crude bound of the kernel, times the norm of the padding map."""
        kernels = self.layer.kernel.reshape(self.layer.groups, -1, *self.layer.kernel.shape[1:])
        repetition = math.prod(axis.repetition for axis in self.axes)
        crude = max(crude_norm(kernel) for kernel in kernels)
        return up(crude * root_up(repetition)) if repetition > 1 else crude

    @property
    def terms(self) -> int:
        """Channels times taps, and repeated pixels."""
        kernel = self.layer.kernel
        copies = math.prod(axis.repetition for axis in self.axes)
        return max(kernel.shape[:2]) * math.prod(kernel.shape[2:]) * copies + len(self.axes) + 1

    @property
    def is_pointwise(self) -> bool:
        """Whether it is a matrix along the channels."""
        layer = self.layer
        plain = not any(map(any, layer.padding)) and not any(layer.output_padding)
        return plain and set(layer.kernel_size) | set(layer.stride) == {1}

    def full_kernel(self) -> Tensor:
        """The kernel (out, in, *taps) of the same layer without groups; of a transposed layer (in, out, *taps)."""
        kernel, groups = self.layer.kernel, self.layer.groups
        if groups == 1:
            return kernel
        rows, columns = kernel.shape[0] // groups, kernel.shape[1]
        full = kernel.new_zeros(kernel.shape[0], groups * columns, *kernel.shape[2:])
        for group in range(groups):
            block = slice(group * rows, (group + 1) * rows)
            full[block, group * columns : (group + 1) * columns] = kernel[block]
        return full

    @property
    def dense_error(self) -> float:
        """Where pixels repeat, an entry is the sum of a few taps."""
        repeats = any(axis.repetition > 1 for axis in self.axes)
        return up(gamma(math.prod(self.layer.kernel_size) + 1) * self.size) if repeats else 0.0

    def apply(self, x: Tensor) -> Tensor:
        """Tap by tap, without any convolution routine; batches of the source are further samples."""
        return self._tapwise(x, is_adjoint=False).reshape(-1, *self.target)

    def adjoint(self, y: Tensor) -> Tensor:
        """In the same way."""
        return self._tapwise(y, is_adjoint=True).reshape(-1, *self.source)

    def _tapwise(self, x: Tensor, *, is_adjoint: bool) -> Tensor:
        is_turned = is_adjoint != self.layer.transposed
        shape = self._taps.output_shape if is_turned else self._taps.input_shape
        x, batched = x.reshape(-1, *shape), self._batched
        if not is_turned:
            return batched(x)
        return batched.adjoint(x) if batched.can_be_turned else self._taps.adjoint(x)

    @functools.cached_property
    def _taps(self) -> TapwiseLayer:
        kernel, groups = self.layer.kernel, self.layer.groups
        return TapwiseLayer(kernel.reshape(groups, -1, *kernel.shape[1:]), self.axes)

    @functools.cached_property
    def _batched(self) -> BatchedConvolution:
        return BatchedConvolution(self._taps.kernels, self.axes)

    def dense(self) -> Tensor:
        """Assembled tap by tap, without any convolution routine."""
        kernel = self.full_kernel()
        # A transposed layer is the adjoint of the one with this kernel, whose axes these are.
        matrix = dense_matrix(kernel, self.axes)
        matrix = matrix.T.contiguous() if self.layer.transposed else matrix
        batch = math.prod(self.source[: -self.layer.axes - 1])
        return matrix if batch == 1 else torch.kron(_eye(batch), matrix)

    @property
    def kind(self) -> str:
        """Of which sort."""
        return "transposed convolution" if self.layer.transposed else "convolution"

    @property
    def geometry(self) -> str:
        """Channels, taps, stride, padding, size."""
        layer = self.layer
        parts = [f"{layer.in_channels}→{layer.out_channels}", "×".join(map(str, layer.kernel_size))]
        if set(layer.stride) != {1}:
            parts.append(f"stride {_same(layer.stride)}")
        if any(map(any, layer.padding)):
            pads = {side for pair in layer.padding for side in pair}
            amount = str(*pads) if len(pads) == 1 else " ".join(f"{a}:{b}" for a, b in layer.padding)
            mode = "" if layer.padding_mode == "zeros" else f" {layer.padding_mode}"
            parts.append(f"padding {amount}{mode}")
        if set(layer.dilation) != {1}:
            parts.append(f"dilation {_same(layer.dilation)}")
        if layer.groups > 1:
            parts.append(f"{layer.groups} groups")
        return f"{', '.join(parts)}, at {'×'.join(map(str, self.input_size))}"

    def _parts(self) -> list[bytes]:
        layer = self.layer
        geometry = (layer.stride, layer.padding, layer.padding_mode, layer.dilation, layer.groups, layer.transposed)
        return [
            repr((geometry, layer.output_padding, tuple(layer.kernel.shape))).encode(),
            bytes_of(layer.kernel),
        ]


def _same(values: Shape) -> str:
    return str(values[0]) if len(set(values)) == 1 else "×".join(map(str, values))


def _eye(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)
