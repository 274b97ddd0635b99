"""Constants of torch's own layers without weights: reshaping, pooling, elementwise activations."""

import math
from typing import Any

from torch import nn

from gramcert.operators import elementwise
from gramcert.rounding import root_up

Size = tuple[int, ...] | None

_POOLING: tuple[type[Any], ...] = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def torch_constant(call: str, module: nn.Module, size: Size) -> tuple[float, Size]:
    """The constant and the output size of a layer of torch that has no weights; what is not known is an error."""
    name = type(module).__name__
    if type(module) in _DROPOUT:
        if module.training:
            raise ValueError(f"{call}({name}): in training mode dropout is random; call .eval() first")
        return 1.0, size
    if type(module) is nn.Flatten:
        return 1.0, None if size is None else ()
    if type(module) in (nn.PixelShuffle, nn.PixelUnshuffle):
        if size is not None and len(size) != 2:
            raise ValueError(f"{call}({name}): expected 2 spatial sizes, got {size}")
        return 1.0, _shuffled(module, size)
    if type(module) in _POOLING:
        return _pooled(call, module, size)
    bounds = elementwise.of_module(module)
    if isinstance(bounds, str):
        raise TypeError(f"{call}({name}): it has no constant: {bounds}")
    if bounds is None:
        raise TypeError(
            f"{call}({name}): its constant is not known; expected a layer of gramcert.nn, Linear, a Conv or "
            f"ConvTranspose layer, an elementwise activation, pooling, Flatten or a Sequential of such"
        )
    return max(abs(bounds[0]), abs(bounds[1])), size


def windows_per_place(taps: int, stride: int, dilation: int = 1) -> int:
    """In how many windows one place of an axis can be: taps a with stride·o + dilation·a = place."""
    return -(-taps // (stride // math.gcd(stride, dilation)))


def pooled_size(size: Size, taps: tuple[int, ...], stride: tuple[int, ...]) -> Size:
    """Size after pooling without padding."""
    if size is None:
        return None
    return tuple((n - k) // s + 1 for n, k, s in zip(size, taps, stride, strict=True))


def _windows(size: int, taps: int, stride: int, padding: int, dilation: int, *, round_up: bool) -> int:
    """How many windows torch's pooling takes: rounded up, but none that begins beyond the input."""
    room = size + 2 * padding - dilation * (taps - 1) - 1
    count = (-(-room // stride) if round_up else room // stride) + 1
    return count - 1 if round_up and (count - 1) * stride >= size + padding else count


def _shuffled(module: nn.Module, size: Size) -> Size:
    if size is None:
        return None
    if isinstance(module, nn.PixelShuffle):
        return tuple(n * module.upscale_factor for n in size)
    assert isinstance(module, nn.PixelUnshuffle)
    return tuple(n // module.downscale_factor for n in size)


def _pooled(call: str, module: Any, size: Size) -> tuple[float, Size]:
    """Of a maximum: the root of how many windows share a place. Of an average: √(rows·columns) of absolute sums."""
    name = type(module).__name__
    axes = int(name[-2])

    def per_axis(value: Any) -> tuple[int, ...]:
        values = (value,) if isinstance(value, int) else tuple(value)
        return values * axes if len(values) == 1 else values

    taps, stride, padding = per_axis(module.kernel_size), per_axis(module.stride), per_axis(module.padding)
    is_average = isinstance(module, (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d))
    dilation = (1,) * axes if is_average else per_axis(module.dilation)
    overlap = math.prod(windows_per_place(*axis) for axis in zip(taps, stride, dilation, strict=True))
    sizes: Size = None
    if size is not None:
        if len(size) != axes:
            raise ValueError(f"{call}({name}): expected {axes} spatial sizes, got {size}")
        steps = zip(size, taps, stride, padding, dilation, strict=True)
        sizes = tuple(_windows(*step, round_up=module.ceil_mode) for step in steps)
    if not is_average:
        if module.return_indices:
            raise TypeError(f"{call}({name}): with return_indices it has two outputs")
        return root_up(overlap) if overlap > 1 else 1.0, sizes
    if module.ceil_mode or (any(padding) and not module.count_include_pad) or getattr(module, "divisor_override", None):
        raise TypeError(f"{call}({name}): ceil_mode, divisor_override or windows counted without padding are not known")
    # Each output is a mean, and each place is in at most `overlap` windows, with the weight 1/taps.
    return root_up(math.nextafter(overlap / math.prod(taps), math.inf)), sizes
