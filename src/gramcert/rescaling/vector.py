r"""Spectral rescaling: positive factors R, one per channel, such that the layer with rescaled channels has norm <= 1.

With G = W*W and G_t = G^(2^(t-1)), R_i = (Σ_j |G_t|_ij q_j/q_i)^(-2^-t) gives W*W ⪯ R^-2 for every q > 0 (Theorem 7 of
the paper with one numbering of t; t = 1 is AOL). A convolution has such a G at each frequency; the two forms differ in
how one R serves all of them, see :mod:`gramcert.rescaling.spatial` and :mod:`gramcert.rescaling.frequency`.

What the geometry adds:

* stride: a convolution of stride 1 on the phases of the input. R of an input channel is the smallest of its phases;
* groups: each has its own G;
* padding that repeats pixels: R is divided by the norm of the padding map;
* a grid for every size (``frequency``): R is divided by the sampling factor of the kernel. The theorem on the grid
  gives σ(ER) <= 1 there, hence at most the factor at all frequencies.
"""

import math
import sys
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gramcert.arguments import (
    Sizes,
    axis_sizes,
    can_be_read,
    checked_iterations,
    require_finite,
    values_to_check,
)
from gramcert.bounds.autograd import full_precision
from gramcert.bounds.gram_filter import gram_filter, joined, row_lengths
from gramcert.bounds.powers import positive
from gramcert.bounds.transfer import every_size_grid
from gramcert.geometry.axis import layer_axes
from gramcert.geometry.convolution import Convolution, as_convolution
from gramcert.geometry.reduction import every_size_square, grouped_kernels, one_size_bound, reduced_kernels
from gramcert.geometry.symbol import FrequencyGrid
from gramcert.rescaling.frequency import largest_row_sums
from gramcert.rescaling.matrices import tall_row_sums, wide_row_sums
from gramcert.rescaling.spatial import filter_sums

Form = Literal["spatial", "frequency"]
Side = Literal["input", "output"]

# Grid frequencies per tap interval for every size at once: the sampling factor is then 1/cos(π/16) = 1.0196 per axis.
OVERSAMPLING = 8

# q is taken between 1 and this; what is smaller, relative to the largest, is taken for 1, which is as valid. So no
# product of a q with a sum that counts (see below) underflows, and none overflows.
LARGEST_Q = {torch.float32: 2.0**60, torch.float64: 2.0**400}

# Weights whose largest entry is up to this, or its inverse, are taken as they are: 2^16 in squares is far from 2^100.
MODERATE = 2.0**8

# Sums below this, in units of the largest ones, are taken for it: R is then smaller than it might be, which is sound,
# and its gradient stays finite.
SMALLEST_SUM = {torch.float32: 2.0**-100, torch.float64: 2.0**-900}


def rescaling_vector(
    layer: nn.Module | Convolution | Tensor,
    iterations: int = 3,
    *,
    q: Tensor | None = None,
    form: Form = "spatial",
    input_size: Sizes | None = None,
    side: Side = "input",
) -> Tensor:
    r"""The factors R, one per channel: the layer whose channels are multiplied by R has a spectral norm of at most 1.

    In exact arithmetic, differentiable; :func:`gramcert.lipschitz_bound` certifies what came out. Channels whose
    weights are all zero get R = 0, as do those below about 1e-20 of the others in float32. Sums below 2^-100 of the
    largest (2^-900 in float64) count as that, so R of channels that meet no other may be smaller than by the formula
    when t is large: diag(3, 0.5) has R = (0.33, 2) up to t = 5, (0.33, 0.44) at t = 8.

    Args:
        layer: a matrix (outputs, inputs), ``nn.Linear``, a convolution layer of torch or a :class:`Convolution`.
        iterations: t, at least 1; 1 is AOL. With ``"spatial"`` time and memory grow as 2^t per axis.
        q: positive weights, one per channel of the side; any choice is valid. ``None`` is 1. Those below 1e-18 of the
            largest (1e-120 in float64) count as that.
        form: ``"spatial"`` (the paper) or ``"frequency"``, which is tighter at the same t.
        input_size: ``None`` serves every size. A size makes R larger where it can be, and is then needed to be right:
            ``"frequency"`` uses the frequencies of that size, and padding that repeats pixels its repetitions there.
        side: which channels R multiplies, ``"input"`` or ``"output"``.

    Returns:
        Tensor of shape (channels,) in the layer's own type; float32 for half precision.

    Example:
        >>> import torch
        >>> from gramcert.rescaling import rescaling_vector
        >>> matrix = torch.tensor([[3.0, 0.0], [0.0, 0.5]])
        >>> rescaling_vector(matrix)
        tensor([0.3333, 2.0000])
        >>> layer = torch.nn.Conv1d(1, 1, 3, padding=1)
        >>> _ = torch.nn.init.ones_(layer.weight)
        >>> [rescaling_vector(layer, form=form, input_size=4).detach() for form in ("spatial", "frequency")]
        [tensor([0.3333]), tensor([0.3820])]

    References:
        Delattre et al., Spectral Norm of Convolutional Layers with Circular and Zero Paddings, Theorem 7 (corrected);
        Prach and Lampert, Almost-Orthogonal Layers for Efficient General-Purpose Lipschitz Networks, 2022.
    """
    call = "rescaling_vector"
    description = as_convolution(call, layer, verb="rescale")
    kernel, scale = moderate(call, description.kernel)
    lifted = description.with_kernel(kernel)
    factors = convolution_rescaling(lifted, iterations, q=q, form=form, input_size=input_size, side=side, call=call)
    return factors if scale is None else _finite_quotient(factors, scale)


def convolution_rescaling(
    layer: Convolution,
    iterations: int,
    *,
    q: Tensor | None,
    form: Form,
    input_size: Sizes | None,
    side: Side,
    call: str,
) -> Tensor:
    """:func:`rescaling_vector` of a description with moderate entries, with the name of the public function for errors.

    The rescaled layer does not depend on the scale of its weights, which may be near the ends of the range of numbers:
    callers use :func:`moderate` first.
    """
    weights = None if q is None else [q]
    return rescaling_of_all([layer], iterations, q=weights, form=form, input_size=input_size, side=side, call=call)[0]


def rescaling_of_all(
    layers: Sequence[Convolution],
    iterations: int,
    *,
    q: Sequence[Tensor] | None,
    form: Form,
    input_size: Sizes | None,
    side: Side,
    call: str,
) -> list[Tensor]:
    """The same of several layers of one shape and geometry: their Gram matrices are those of groups."""
    layer = layers[0]
    iterations = checked_iterations(call, iterations, at_least=1)
    check_choice(call, "form", form, get_args(Form))
    check_choice(call, "side", side, get_args(Side))
    kernels = [reduced_kernels(grouped_kernels(each), each.stride, each.dilation) for each in layers]
    channels = layer.in_channels if side == "input" else layer.out_channels
    if (side == "input") != layer.transposed:
        kernels = [each.transpose(1, 2) for each in kernels]
    phases = kernels[0].shape[1] * layer.groups // channels
    weights = None
    if q is not None:
        weights = _weights(call, q, channels, kernels[0]).reshape(len(layers) * layer.groups, -1)
        weights = weights.repeat_interleave(phases, 1) if phases > 1 else weights
    grid, factor = _frequencies(call, layer, tuple(kernels[0].shape[3:]), form, input_size)
    with full_precision(kernels[0]):
        roots = _root_sums(kernels, weights, grid, iterations, call) * factor
        largest = roots.reshape(-1, phases).amax(1) if phases > 1 else roots.flatten()
        # Where 1/x would overflow, a smaller R.
        factors = torch.where(largest == 0, 0.0, 1 / positive(largest).clamp_min(torch.finfo(largest.dtype).tiny))
    return list(factors.split(channels)) if len(layers) > 1 else [factors]


def _root_sums(
    kernels: Sequence[Tensor], q: Tensor | None, grid: FrequencyGrid | None, iterations: int, call: str
) -> Tensor:
    """1/R for the rows of each group, 0 where all weights of a row are 0; a grid of ``None`` is the spatial form."""
    rows, columns, *taps = kernels[0].shape[1:]
    if rows == math.prod(taps) == 1:  # G is a number, the root of its powers
        iterations = 1
    if math.prod(taps) == 1 and rows > columns:
        lengths = joined([row_lengths(each) for each in kernels])
        longest = lengths.amax(1)
        scales = positive(longest).split(kernels[0].shape[0])
        scaled = [each.flatten(2) / scale[:, None, None] for each, scale in zip(kernels, scales, strict=True)]
        sums, log = tall_row_sums(joined(scaled), q, iterations)
    else:
        gram = gram_filter(*kernels)
        # On the diagonal without lag are the squared lengths of the rows.
        lengths = gram.detach()[len(gram) // 2].diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt()
        longest = lengths.amax(1)
        # G in units of the longest row, not the kernel, which has more entries: then it is moderate.
        gram = gram * positive(longest).pow(-2)[:, None, None]
        if math.prod(taps) == 1:  # the same at all frequencies
            sums, log = wide_row_sums(gram[0], q, iterations)
        elif grid is None:
            sizes, log = filter_sums(gram, tuple(taps), iterations, call)
            sums = sizes.sum(-1) if q is None else (sizes @ q[..., None])[..., 0] / q
        else:
            q = torch.ones_like(lengths) if q is None else q
            sums, log = largest_row_sums(gram, q, grid, tuple(taps), iterations)
    is_zero = lengths == 0  # and so are the sums, whose roots have no second derivative
    roots = torch.where(is_zero, 1.0, sums.clamp_min(SMALLEST_SUM[sums.dtype])) ** (2.0**-iterations)
    return torch.where(is_zero, 0.0, roots * (longest * torch.exp(log))[:, None])


def _frequencies(
    call: str, layer: Convolution, taps: tuple[int, ...], form: Form, input_size: Sizes | None
) -> tuple[FrequencyGrid | None, float]:
    """The grid of the frequency form, and what R is divided by."""
    if input_size is not None:
        sizes = axis_sizes(call, "input_size", input_size, layer.axes)
        bound = one_size_bound(layer_axes(layer, sizes, call))
        return (bound.grids[-1] if form == "frequency" else None), bound.factor
    factor = math.sqrt(every_size_square(layer))
    if form == "spatial":
        return None, factor
    grid, missed = every_size_grid(taps, OVERSAMPLING, shifted=True)
    return grid, factor * missed


def smaller_side(layer: Convolution) -> Side:
    """The side with the smaller Gram matrices, which counts the phases of strides; the input if they are equal."""
    outputs, inputs = reduced_kernels(grouped_kernels(layer), layer.stride, layer.dilation).shape[1:3]
    if layer.transposed:  # whose kernel is that of its adjoint
        outputs, inputs = inputs, outputs
    return "output" if outputs < inputs else "input"


def _finite_quotient(factors: Tensor, scale: Tensor) -> Tensor:
    """R of a layer from that of the layer divided by its largest entry; smaller where it would be out of range."""
    limits = torch.finfo(factors.dtype)
    quotient = (factors / scale).clamp_max(limits.max)
    value = quotient.detach()
    # Subnormal numbers round more coarsely than the slack of R allows: downward.
    below = torch.nextafter(value, torch.zeros_like(value)) - value
    return quotient + torch.where(value < limits.tiny, below, 0.0)


def _weights(call: str, q: Sequence[Tensor], channels: int, like: Tensor) -> Tensor:
    """The weights of several layers, a row for each."""
    for each in q:
        if not isinstance(each, Tensor) or each.shape != (channels,):
            shape = tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__
            raise ValueError(f"{call}(q): expected a tensor of shape ({channels},), got {shape}")
    together = torch.stack(list(q))
    require_finite(call, "q", together)
    values = values_to_check(together)
    if can_be_read(values) and not bool((values > 0).all()):
        raise ValueError(f"{call}(q): expected positive weights, got {float(values.detach().min())}")
    # Only ratios matter: in units of the largest they neither overflow nor vanish all together.
    ratios = together.double() / together.detach().double().amax(1, keepdim=True)
    return (ratios * LARGEST_Q[like.dtype]).clamp_min(1.0).to(like.dtype)


def moderate(call: str, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """A weight with entries of moderate size, and what it was divided by, a constant; what is not finite is an error.

    That is its largest absolute entry, or 1 if all are 0. Where this is moderate already nothing is divided, which is a
    pass over the memory each time, and ``None`` is returned.
    """
    if is_recorded():
        raise RuntimeError(
            f"{call}: its weight is computed anew in each call, which ONNX and TorchScript cannot record; "
            "use gramcert.nn.export(model) first"
        )
    length = torch.linalg.vector_norm(weight.detach()) if can_be_read(weight) else weight
    if can_be_read(length):  # not if a mode that has no values took the weight
        # The largest entry is between it and its quotient by the root of the number of entries.
        if math.sqrt(weight.numel()) / MODERATE <= float(length) <= MODERATE:
            return weight, None
        value = float(torch.stack(torch.aminmax(weight.detach())).abs().amax())
        if 1 / MODERATE <= value <= MODERATE:
            return weight, None
    largest = weight.detach().abs().amax()
    found = values_to_check(largest)
    if can_be_read(found) and not bool(torch.isfinite(found).all()):
        require_finite(call, "layer", weight)
    return weight / positive(largest), positive(largest)


def is_recorded() -> bool:
    """Whether torch.jit.trace or torch.onnx.export is at work.

    Not by ``torch.onnx.is_in_onnx_export``, which imports all of the exporter, and is false while torch.compile traces.
    """
    exporter = sys.modules.get("torch.onnx._internal.exporter._flags")
    if torch.compiler.is_compiling():
        return getattr(exporter, "_is_onnx_exporting", False)
    return torch._C._get_tracing_state() is not None


def check_choice(call: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """One of a few words."""
    if value not in choices:
        raise ValueError(f"{call}({name}={value!r}): expected one of {', '.join(choices)}")
