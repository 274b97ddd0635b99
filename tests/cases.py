"""The layer zoo: strategies that draw kernels and whole layers, small enough for a dense matrix."""

import torch
from hypothesis import assume
from hypothesis import strategies as st

from gramcert import Convolution

MODES = ("zeros", "circular", "reflect", "replicate")


@st.composite
def tensors(draw, shape, dtype=torch.float64):
    """Gaussian, all ones, small integers, rank one or a single entry, from a drawn seed."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    kind = draw(st.sampled_from(["gauss", "ones", "integers", "rank one", "single"]))
    if kind == "ones":
        return torch.ones(shape, dtype=dtype)
    if kind == "integers":
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)
    if kind == "rank one":
        left = torch.randn(shape[0], generator=generator, dtype=dtype)
        rest = torch.randn(shape[1:], generator=generator, dtype=dtype)
        return torch.tensordot(left, rest, 0)
    gauss = torch.randn(shape, generator=generator, dtype=dtype)
    if kind == "single":
        mask = torch.zeros_like(gauss).flatten()
        mask[0] = 1
        return gauss * mask.reshape(shape)
    return gauss


@st.composite
def kernels(draw, dtype=torch.float64):
    """Stride-1 kernels in one to three dimensions, with an input size."""
    axes = draw(st.integers(1, 3))
    most = (9, 5, 3)[axes - 1]
    taps = [draw(st.integers(1, (6, 4, 3)[axes - 1])) for _ in range(axes)]
    sizes = [draw(st.integers(1, most)) for _ in range(axes)]
    channels = [draw(st.integers(1, 3)) for _ in range(2)]
    return draw(tensors((*channels, *taps), dtype)), tuple(sizes)


@st.composite
def layers(draw, dtype=torch.float64):
    """Any geometry in one to three dimensions, with an input size that it accepts."""
    axes = draw(st.integers(1, 3))
    transposed = draw(st.booleans())
    mode = "zeros" if transposed else draw(st.sampled_from(MODES))
    groups = draw(st.sampled_from([1, 1, 2]))
    first, second = (groups * draw(st.integers(1, 2)) for _ in range(2))

    def per_axis(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(axes))

    taps, stride, dilation = per_axis(1, 4 - axes // 3), per_axis(1, 4), per_axis(1, 4)
    padding = tuple(zip(per_axis(0, 4), per_axis(0, 4), strict=True))
    extra = [draw(st.integers(0, max(s, d) - 1)) if transposed else 0 for s, d in zip(stride, dilation, strict=True)]
    sizes = per_axis(1, (9, 6, 4)[axes - 1])
    kernel = draw(tensors((first, second // groups, *taps), dtype))
    layer = Convolution(kernel, stride, padding, mode, dilation, groups, transposed, extra)
    try:
        layer.output_size(sizes)
    except ValueError:
        assume(False)
    return layer, sizes


@st.composite
def modules(draw, dtype=torch.float32):
    """Torch's own layers with any geometry, with an input that they accept."""
    if draw(st.integers(0, 5)) == 0:
        linear = torch.nn.Linear(draw(st.integers(1, 6)), draw(st.integers(1, 6)), dtype=dtype)
        _fill(linear, draw)
        return linear, torch.zeros(1, linear.in_features, dtype=dtype)
    axes = draw(st.integers(1, 3))
    transposed = draw(st.booleans())
    groups = draw(st.sampled_from([1, 1, 2]))
    channels = [groups * draw(st.integers(1, 3)) for _ in range(2)]

    def per_axis(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(axes))

    sizes = per_axis(1, (9, 6, 4)[axes - 1])
    options = {"stride": per_axis(1, 3), "dilation": per_axis(1, 2), "padding": per_axis(0, 2), "groups": groups}
    if transposed:
        kind = (torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d)[axes - 1]
    else:
        kind = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)[axes - 1]
        options["padding_mode"] = draw(st.sampled_from(MODES))
    layer = kind(*channels, per_axis(1, 4 - axes // 3), **options, dtype=dtype)
    _fill(layer, draw)
    x = torch.zeros(1, channels[0], *sizes, dtype=dtype)
    try:
        assume(layer(x).numel() > 0)
    except (RuntimeError, ValueError):
        assume(False)
    return layer, x


def _fill(layer, draw):
    with torch.no_grad():
        layer.weight.copy_(draw(tensors(tuple(layer.weight.shape), layer.weight.dtype)))
