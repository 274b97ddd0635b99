"""What a convolution layer is: an immutable description that can be applied, transposed and written as a matrix."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

import torch
from torch import Tensor, nn

from gramcert.arguments import Sizes, axis_sizes, checked_kernel, checked_matrix, kernel_hint, require_dense, widened
from gramcert.geometry.padding import PaddingMode, Pairs, pad, pad_adjoint, pad_with_zeros
from gramcert.geometry.recognition import require_known, require_plain_tensor

Padding = str | int | Sequence[int] | Sequence[tuple[int, int]]

# A dense matrix larger than this is refused.
DENSE_BYTES = 2**31

_CONVOLVE = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)
_TRANSPOSE = (
    torch.nn.functional.conv_transpose1d,
    torch.nn.functional.conv_transpose2d,
    torch.nn.functional.conv_transpose3d,
)
LAYERS: tuple[type[Any], ...] = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Convolution:
    r"""The linear part of a convolution layer, in torch's own layout and conventions.

    Args:
        kernel: real, (out, in/groups, \*sizes), or transposed (in, out/groups, \*sizes), one to three sizes; half
            precision is kept in float32, exactly.
        stride: int or one per axis.
        padding: int, one int per axis, one (before, after) pair per axis, ``"same"`` or ``"valid"``; kept as pairs.
        padding_mode: ``"zeros"``, ``"circular"``, ``"reflect"`` or ``"replicate"``. Circular padding wraps as often as
            needed, where torch stops at once around.
        dilation: int or one per axis.
        groups: number of channel groups.
        transposed: whether it is the transposed convolution (zeros only); padding then crops, as in torch.
        output_padding: int or one per axis, for transposed convolutions.

    Example:
        >>> import torch, gramcert
        >>> layer = gramcert.Convolution(torch.ones(1, 1, 3), padding="same", padding_mode="circular")
        >>> layer.apply(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
        tensor([[7., 6., 9., 8.]])
        >>> layer.to_dense(4)
        tensor([[1., 1., 0., 1.],
                [1., 1., 1., 0.],
                [0., 1., 1., 1.],
                [1., 0., 1., 1.]])
    """

    kernel: Tensor
    stride: tuple[int, ...]
    padding: Pairs
    padding_mode: PaddingMode
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    output_padding: tuple[int, ...]

    def __init__(
        self,
        kernel: Tensor,
        stride: Sizes = 1,
        padding: Padding = 0,
        padding_mode: PaddingMode = "zeros",
        dilation: Sizes = 1,
        groups: int = 1,
        transposed: bool = False,
        output_padding: Sizes = 0,
    ) -> None:
        kernel = checked_kernel("Convolution", kernel, with_values=False)
        if padding_mode not in get_args(PaddingMode):
            raise ValueError(
                f"Convolution(padding_mode={padding_mode!r}): expected one of {', '.join(get_args(PaddingMode))}"
            )
        if isinstance(groups, Sequence):
            raise TypeError(f"Convolution(groups): expected an int, got {groups!r}")
        groups = axis_sizes("Convolution", "groups", groups, 1)[0]
        if kernel.shape[0] % groups:
            raise ValueError(
                f"Convolution(groups={groups}): expected a divisor of the kernel's {kernel.shape[0]} channels"
            )
        if not isinstance(transposed, bool):
            raise TypeError(f"Convolution(transposed): expected a bool, got {transposed!r}")
        if transposed and padding_mode != "zeros":
            raise ValueError(
                f"Convolution(padding_mode={padding_mode!r}): a transposed convolution has zero padding only"
            )
        axes = kernel.dim() - 2
        normal: dict[str, Any] = {
            "kernel": kernel,
            "stride": axis_sizes("Convolution", "stride", stride, axes),
            "padding_mode": padding_mode,
            "dilation": axis_sizes("Convolution", "dilation", dilation, axes),
            "groups": groups,
            "transposed": transposed,
            "output_padding": axis_sizes("Convolution", "output_padding", output_padding, axes, at_least=0),
        }
        for name, value in normal.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "padding", self._pairs(padding))
        for extra, step, spread in zip(self.output_padding, self.stride, self.dilation, strict=True):
            if extra and not transposed:
                raise ValueError(f"Convolution(output_padding={self.output_padding}): for transposed convolutions only")
            if extra and extra >= max(step, spread):
                raise ValueError(
                    f"Convolution(output_padding={self.output_padding}): expected less than stride or dilation, "
                    f"got stride {self.stride} and dilation {self.dilation}"
                )

    def __repr__(self) -> str:
        kernel = f"{'×'.join(map(str, self.kernel.shape))} {str(self.kernel.dtype).removeprefix('torch.')}"
        rest = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self)[1:]]
        return f"Convolution(<{kernel}>, {', '.join(rest)})"

    def _pairs(self, padding: Padding) -> Pairs:
        spans = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        if isinstance(padding, str):
            if padding == "valid":
                return ((0, 0),) * self.axes
            if padding != "same":
                raise ValueError(f"Convolution(padding={padding!r}): expected ints, pairs, 'same' or 'valid'")
            if self.transposed or any(step != 1 for step in self.stride):
                raise ValueError("Convolution(padding='same'): expected stride 1 and no transposition")
            return tuple((span // 2, span - span // 2) for span in spans)
        if isinstance(padding, Sequence) and all(isinstance(pair, Sequence) for pair in padding) and padding:
            if len(padding) != self.axes:
                raise ValueError(
                    f"Convolution(padding={padding}): the kernel needs {self.axes} pairs, got {len(padding)}"
                )
            return tuple(
                _pair(axis_sizes("Convolution", "padding", pair, 2, at_least=0, what="an axis"))  # type: ignore[arg-type]
                for pair in padding
            )
        sides = axis_sizes("Convolution", "padding", padding, self.axes, at_least=0)  # type: ignore[arg-type]
        return tuple((side, side) for side in sides)

    @classmethod
    def of(cls, layer: "nn.Module | Convolution", *, call: str = "Convolution.of") -> "Convolution":
        """Describe a torch convolution layer; parametrised layers with their effective weight, differentiably.

        Half-precision weights come in float32, which holds them exactly.

        Args:
            layer: ``nn.Conv1d/2d/3d`` or ``nn.ConvTranspose1d/2d/3d``.
            call: what errors name.
        """
        if isinstance(layer, Convolution):
            return layer
        base = next((kind for kind in LAYERS if isinstance(layer, kind)), None)
        name = type(layer).__name__
        if base is None:
            raise TypeError(f"{call}({name}): expected a torch.nn.Conv or ConvTranspose layer, 1-D to 3-D")
        assert isinstance(layer, nn.Module)
        weight = checked_kernel(call, effective_weight(call, layer, base), with_values=False)
        result = cls(
            weight,
            layer.stride,  # type: ignore[arg-type]
            layer.padding,  # type: ignore[arg-type]
            layer.padding_mode,  # type: ignore[arg-type]
            layer.dilation,  # type: ignore[arg-type]
            layer.groups,  # type: ignore[arg-type]
            bool(layer.transposed),
            layer.output_padding,  # type: ignore[arg-type]
        )
        # For all modes but zeros torch pads by an attribute that was computed from the padding at construction.
        padded = [amount for pair in reversed(result.padding) for amount in pair]
        if result.padding_mode != "zeros" and list(vars(layer)["_reversed_padding_repeated_twice"]) != padded:
            raise TypeError(f"{call}({name}): its padding was changed after construction, which torch ignores")
        return result

    def with_kernel(self, kernel: Tensor) -> "Convolution":
        """The same layer with another kernel of the same shape."""
        result = object.__new__(Convolution)
        for name in vars(self):
            object.__setattr__(result, name, getattr(self, name))
        object.__setattr__(result, "kernel", kernel)
        return result

    @property
    def axes(self) -> int:
        """Number of spatial axes, 1 to 3."""
        return self.kernel.dim() - 2

    @property
    def kernel_size(self) -> tuple[int, ...]:
        """Number of taps per axis, dilation not counted."""
        return tuple(self.kernel.shape[2:])

    @property
    def in_channels(self) -> int:
        """Channels of the input."""
        return self.kernel.shape[0] if self.transposed else self.kernel.shape[1] * self.groups

    @property
    def out_channels(self) -> int:
        """Channels of the output."""
        return self.kernel.shape[1] * self.groups if self.transposed else self.kernel.shape[0]

    def output_size(self, input_size: Sizes, *, call: str = "Convolution.output_size") -> tuple[int, ...]:
        """Spatial size of the output for one input size; an impossible input size is an error that names the call."""
        sizes = axis_sizes(call, "input_size", input_size, self.axes)
        result = []
        for axis, size in enumerate(sizes):
            (before, after), span = self.padding[axis], self._span(axis)
            if self.padding_mode == "reflect" and max(before, after) >= size:
                raise ValueError(
                    f"{call}(input_size={sizes}): reflect padding {(before, after)} needs more than "
                    f"{max(before, after)} places, got {size}"
                )
            if self.transposed:
                out = (size - 1) * self.stride[axis] + span - before - after + self.output_padding[axis]
            else:
                out = (size + before + after - span) // self.stride[axis] + 1
            if out < 1:
                raise ValueError(
                    f"{call}(input_size={sizes}): the output would be empty; kernel "
                    f"{self.kernel_size} with dilation {self.dilation} and padding {self.padding} does not fit"
                )
            result.append(out)
        return tuple(result)

    def apply(self, x: Tensor) -> Tensor:
        """The layer without its bias, on inputs (batch, channels, *sizes) or (channels, *sizes)."""
        batch = self._batched("apply", "x", x, self.in_channels)
        self.output_size(tuple(batch.shape[2:]))
        if self.transposed:
            y = pad_with_zeros(self._transpose(batch), self._cropping())
        else:
            y = self._convolve(pad(batch, self.padding, self.padding_mode))
        return y if x.dim() == batch.dim() else y[0]

    def adjoint(self, y: Tensor, input_size: Sizes | None = None) -> Tensor:
        """The adjoint of the layer, on outputs (batch, channels, *sizes) or (channels, *sizes).

        Args:
            y: an output of the layer.
            input_size: size of the input; needed where a stride makes several sizes possible.
        """
        batch = self._batched("adjoint", "y", y, self.out_channels)
        sizes = self._input_size(tuple(batch.shape[2:]), input_size)
        if self.transposed:
            x = self._convolve(pad_with_zeros(batch, tuple((-before, -after) for before, after in self._cropping())))
        else:
            padded = [size + before + after for size, (before, after) in zip(sizes, self.padding, strict=True)]
            x = self._transpose(batch)
            # Places at the end that no output reaches.
            x = pad_with_zeros(x, tuple((0, n - m) for n, m in zip(padded, x.shape[2:], strict=True)))
            x = pad_adjoint(x, sizes, self.padding, self.padding_mode)
        return x if y.dim() == batch.dim() else x[0]

    def to_dense(self, input_size: Sizes) -> Tensor:
        """The matrix of the layer on flattened inputs (channels, *sizes) of one size."""
        sizes = axis_sizes("Convolution.to_dense", "input_size", input_size, self.axes)
        columns = self.in_channels * math.prod(sizes)
        rows = self.out_channels * math.prod(self.output_size(sizes))
        needed = rows * columns * self.kernel.element_size()
        if needed > DENSE_BYTES:
            raise ValueError(
                f"Convolution.to_dense(input_size={sizes}): the {rows} by {columns} matrix would take "
                f"{needed / 2**30:.1f} GiB, more than {DENSE_BYTES / 2**30:.0f}"
            )
        basis = torch.eye(columns, dtype=self.kernel.dtype, device=self.kernel.device)
        with torch.autocast(basis.device.type, enabled=False):
            return self.apply(basis.reshape(columns, self.in_channels, *sizes)).reshape(columns, rows).T

    def _span(self, axis: int) -> int:
        return self.dilation[axis] * (self.kernel_size[axis] - 1) + 1

    def _cropping(self) -> Pairs:
        """What a transposed convolution adds to its full output: padding crops, output padding extends the end."""
        return tuple((-b, extra - a) for (b, a), extra in zip(self.padding, self.output_padding, strict=True))

    def _convolve(self, x: Tensor) -> Tensor:
        y: Tensor = _CONVOLVE[self.axes - 1](
            x, self.kernel, stride=self.stride, dilation=self.dilation, groups=self.groups
        )
        return y

    def _transpose(self, y: Tensor) -> Tensor:
        x: Tensor = _TRANSPOSE[self.axes - 1](
            y, self.kernel, stride=self.stride, dilation=self.dilation, groups=self.groups
        )
        return x

    def _batched(self, call: str, name: str, x: Tensor, channels: int) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError(f"Convolution.{call}({name}): expected a torch.Tensor, got {type(x).__name__}")
        if x.dim() not in (self.axes + 1, self.axes + 2) or x.shape[-self.axes - 1] != channels:
            raise ValueError(
                f"Convolution.{call}({name}): expected shape ([batch,] {channels}, {self.axes} sizes), "
                f"got {tuple(x.shape)}"
            )
        if x.dtype != self.kernel.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"Convolution.{call}({name}): expected the kernel's {self.kernel.dtype}, got {x.dtype}")
        return x if x.dim() == self.axes + 2 else x[None]

    def _input_size(self, output_size: tuple[int, ...], input_size: Sizes | None) -> tuple[int, ...]:
        if input_size is not None:
            sizes = axis_sizes("Convolution.adjoint", "input_size", input_size, self.axes)
        elif self.transposed:
            full = [
                out + before + after - extra - self._span(axis)
                for axis, (out, (before, after), extra) in enumerate(
                    zip(output_size, self.padding, self.output_padding, strict=True)
                )
            ]
            sizes = tuple(rest // step + 1 for rest, step in zip(full, self.stride, strict=True))
        elif any(step != 1 for step in self.stride):
            raise ValueError(f"Convolution.adjoint(input_size=None): stride {self.stride} allows several input sizes")
        else:
            sizes = tuple(
                out + self._span(axis) - 1 - before - after
                for axis, (out, (before, after)) in enumerate(zip(output_size, self.padding, strict=True))
            )
        if any(size < 1 for size in sizes) or self.output_size(sizes) != output_size:
            raise ValueError(f"Convolution.adjoint(y): no input of size {sizes} gives an output of size {output_size}")
        return sizes


def as_convolution(
    call: str,
    layer: nn.Module | Convolution | Tensor,
    *,
    verb: str = "bound",
    matrices: bool = True,
    complex_too: bool = False,
) -> Convolution:
    """Any layer as a convolution, differentiably: matrices and linear layers as one with a single tap on one axis.

    Half-precision weights come in float32, which holds them exactly.

    Args:
        call: name of the public function, for errors.
        layer: ``nn.Linear``, a convolution layer of torch, a :class:`Convolution` or a matrix.
        verb: what the function does to layers, for errors.
        matrices: whether it takes matrices.
        complex_too: whether complex ones, as the real matrix of twice the size with the same norm.
    """
    if isinstance(layer, nn.Linear):
        return _of_matrix(call, effective_weight(call, layer, nn.Linear), complex_too)
    if isinstance(layer, Tensor) and matrices:
        require_dense(call, "layer", layer)
        return _of_matrix(call, layer, complex_too)
    if isinstance(layer, Tensor) or not isinstance(layer, (Convolution, *LAYERS)):
        *others, last = ["Linear", "a Conv or ConvTranspose layer", "a gramcert.Convolution", *["a matrix"] * matrices]
        expected = f"{', '.join(others)} or {last}{kernel_hint(layer)}"
        raise TypeError(f"{call}(layer): cannot {verb} {type(layer).__name__}; expected {expected}")
    return Convolution.of(layer, call=call)


def _of_matrix(call: str, matrix: Tensor, complex_too: bool) -> Convolution:
    matrix = checked_matrix(call, matrix)
    if matrix.is_complex():
        if not complex_too:
            raise TypeError(f"{call}(layer): expected a real matrix, got {matrix.dtype}")
        matrix = torch.cat([torch.cat([matrix.real, -matrix.imag], 1), torch.cat([matrix.imag, matrix.real], 1)])
    return Convolution(matrix[:, :, None])


def effective_weight(call: str, layer: nn.Module, base: type[nn.Module]) -> Tensor:
    """The weight that a layer uses, if it computes what its class ``base`` does with it and nothing else.

    Half-precision weights come in float32, which holds them exactly.
    """
    require_known(call, layer, base)
    weight = layer.weight
    assert isinstance(weight, Tensor)
    require_plain_tensor(f"{call}({type(layer).__name__}.weight)", weight)
    return widened(weight)


def _pair(sizes: tuple[int, ...]) -> tuple[int, int]:
    return sizes[0], sizes[1]
