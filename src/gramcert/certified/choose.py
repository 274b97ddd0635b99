"""``spectral_norm``: picks among the methods, and can say why."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from gramcert.arguments import REAL_TYPES, Sizes, axis_sizes, require_values
from gramcert.certified.every_size import supremum
from gramcert.certified.gram_symbol import crude_norm
from gramcert.certified.lifted import LiftedLayer
from gramcert.certified.one_size import OneSize
from gramcert.certified.work import OutOfBudgetError, Work
from gramcert.enclosure import Enclosure
from gramcert.geometry.axis import Axis, layer_axes
from gramcert.geometry.convolution import LAYERS, Convolution, as_convolution
from gramcert.geometry.recognition import require_plain_tensor, require_steady
from gramcert.geometry.reduction import every_size_square
from gramcert.rounding import checked_arithmetic, largest_exponent, root_up, scaled_up, up

# Part of the tolerance kept back for the last roundings.
RESERVE = 2.0**-20

# Finer tolerances are asked for in vain, and only make the search longer.
FINEST = 1e-15


class Found(NamedTuple):
    """What a search proved, by what, and why it did not come nearer."""

    lower: float
    upper: float
    method: str
    notes: list[str]


def spectral_norm(
    layer: nn.Module | Convolution | Tensor,
    input_size: Sizes | None = None,
    *,
    tol: float = 1e-3,
    max_bytes: int = 2**31,
    max_seconds: float | None = None,
) -> Enclosure:
    """Enclose the spectral norm of a layer: lower <= norm <= upper, all rounding included.

    The guarantee is about the weights as stored. Its assumptions are in ``docs/what-is-certified.md``, and
    :meth:`Enclosure.explain` lists them with what was tried.

    Args:
        layer: ``nn.Linear``, ``nn.Conv1d/2d/3d``, ``nn.ConvTranspose1d/2d/3d``, a :class:`Convolution` or a matrix.
        input_size: spatial size of the input, one int per axis or one for all. ``None`` encloses the smallest number
            that bounds the norm at every size; with reflect and replicate padding, and some circular ones, only its
            upper end holds for every size and the enclosure cannot close.
        tol: relative width to reach.
        max_bytes: most memory to take beside the weights themselves. A matrix with a smaller side of p takes about
            20·p² bytes; where that is too much, ``lower`` is from Lanczos iteration and ``upper`` from sums of absolute
            or squared weights. Where it is not even enough for copies in float64 of the weights of a convolution, its
            ``lower`` is 0.
        max_seconds: when to stop; checked between batches, so it may be passed by one of them.

    Returns:
        The enclosure. If the tolerance could not be reached, it is the best one found, ``tol_reached`` is false and
        ``explain()`` gives the reason.

    Example:
        >>> import torch, gramcert
        >>> layer = torch.nn.Conv2d(1, 1, 3, padding=1, bias=False)
        >>> _ = torch.nn.init.ones_(layer.weight)
        >>> norm = gramcert.spectral_norm(layer, 16, tol=1e-9)
        >>> print(norm)
        8.796836860 ± 2.5e-9
        >>> gramcert.spectral_norm(layer, 16) < 9 in gramcert.spectral_norm(layer)
        True
    """
    return enclose("spectral_norm", layer, input_size, tol, Work(max_bytes, max_seconds, call="spectral_norm"))


def enclose(
    call: str, layer: nn.Module | Convolution | Tensor, input_size: Sizes | None, tol: float, work: Work
) -> Enclosure:
    """:func:`spectral_norm` with limits and progress from the caller."""
    return enclosed(call, layer, input_size, tol, work, _largest)


def enclosed(
    call: str,
    layer: nn.Module | Convolution | Tensor,
    input_size: Sizes | None,
    tol: float,
    work: Work,
    search: Callable[[LiftedLayer, float, Work], Found],
) -> Enclosure:
    """An extremal singular value of a layer.

    Args:
        call: name of the public function, for errors.
        layer: as the user gave it.
        input_size: of its input, or ``None`` for every size.
        tol: relative width to reach.
        work: limits.
        search: finds it for the weights scaled to moderate size.
    """
    if isinstance(tol, bool) or not isinstance(tol, (int, float)):
        raise TypeError(f"{call}(tol): expected a number, got {tol!r}")
    if not 0 < tol < 1:
        raise ValueError(f"{call}(tol={tol!r}): expected 0 < tol < 1")
    description = certified_convolution(call, layer)
    axes = None
    if input_size is not None:
        if not is_spatial(layer):
            raise ValueError(f"{call}(input_size={input_size}): {_name(layer)} has no spatial size, expected None")
        sizes = axis_sizes(call, "input_size", input_size, description.axes, what=_name(layer))
        axes = layer_axes(description, sizes, call)
    description = description.with_kernel(require_values(call, "layer", description.kernel))
    with checked_arithmetic(call):
        work.held, work.stopped = _copied(layer, description), ""
        try:
            if axes is not None:  # taps that are not read are set to zero in a copy
                work.require_bytes("weights in float64", LiftedLayer.bytes_for(description))
            lifted = LiftedLayer.of(description, axes)
            if lifted.is_zero:
                return Enclosure(0.0, 0.0, "no output depends on the input")
            found = search(lifted, max(tol * (1 - RESERVE), FINEST), work)
        except OutOfBudgetError as error:  # not even the weights fit
            return _absolute_sums(description, axes, str(error))
    notes = found.notes
    if found.upper - found.lower <= tol * found.upper:
        notes = []  # if the tolerance is missed now, then by scaling back
    elif not notes:
        notes = ["none of the methods came near enough"]
    lower, upper = lifted.bounds(found.lower, found.upper)
    steps = []
    for step in work.steps:
        low, high = lifted.bounds(step.lower, step.upper)
        steps.append(dataclasses.replace(step, lower=low, upper=high))
    result = Enclosure(lower, upper, found.method, steps=tuple(steps))
    if result.relative_width <= tol:
        return result
    notes = notes or [_about_scale(upper)]
    return dataclasses.replace(result, tol_reached=False, notes=tuple(dict.fromkeys(notes)))


def _largest(lifted: LiftedLayer, tol: float, work: Work) -> Found:
    if lifted.axes is None:
        return _every_size(lifted, tol, work)
    lifted.lift(work)
    search = OneSize(lifted, tol, work)
    search.run()
    return Found(search.lower, search.upper, search.method, search.reasons)


def _about_scale(upper: float) -> str:
    """Why an enclosure that was narrow enough is not, once the weights have their own scale again."""
    if math.isinf(upper):
        return "the norm may be beyond the largest float, so that no finite float is certainly above it"
    return "the norm is so small that floats next to it differ by more than the tolerance"


def _absolute_sums(layer: Convolution, axes: tuple[Axis, ...] | None, reason: str) -> Enclosure:
    """The bound that takes no memory: sums of absolute weights, times the norm of the padding map."""
    method, kernel = "sums of absolute weights", layer.kernel.detach()
    square = every_size_square(layer) if axes is None else math.prod(axis.repetition for axis in axes)
    exponent = largest_exponent(kernel)
    groups = kernel.reshape(layer.groups, -1, *kernel.shape[1:])
    size = max(crude_norm(group, -exponent) for group in groups) if bool(kernel.count_nonzero()) else 0.0
    if not size:
        return Enclosure(0.0, 0.0, "no output depends on the input")
    return Enclosure(0.0, scaled_up(up(size * root_up(square)), exponent), method, tol_reached=False, notes=(reason,))


def _every_size(lifted: LiftedLayer, tol: float, work: Work) -> Found:
    if lifted.is_matrix:
        found = supremum(lifted.weights.stored, tol, work, -lifted.exponent)
    else:
        lifted.lift(work)
        found = supremum(lifted.reduced, tol, work)
    square = lifted.square
    notes = [found.missed] if found.missed else []
    if square == 1:
        return Found(found.lower, found.upper, found.method, notes)
    notes.append(
        f"{lifted.layer.padding_mode} padding repeats pixels, so the upper bound for every size has the norm of the "
        f"padding map, √{square}, as a factor and the enclosure cannot close; at a given input_size it can"
    )
    upper = up(found.upper * root_up(square))
    return Found(found.lower, upper, f"{found.method}, times √{square} for the padding", notes)


def certified_convolution(call: str, layer: nn.Module | Convolution | Tensor) -> Convolution:
    """:func:`as_convolution` of what can be proved about: plain tensors, and layers that are the same next time."""
    if isinstance(layer, Tensor):
        require_plain_tensor(f"{call}(layer)", layer)
    if isinstance(layer, nn.Module):
        require_steady(call, layer)
    description = as_convolution(call, layer, complex_too=True)
    require_plain_tensor(f"{call}(layer)", description.kernel)
    return description


def _copied(layer: nn.Module | Convolution | Tensor, description: Convolution) -> int:
    """Bytes of weights that are not the layer's own: those of half precision are widened, complex ones written out."""
    weights = [layer] if isinstance(layer, Tensor) else layer.parameters() if isinstance(layer, nn.Module) else []
    return 0 if all(each.dtype in REAL_TYPES for each in weights) else description.kernel.nbytes


def is_spatial(layer: Any) -> bool:
    """Whether a layer acts on inputs with a spatial size."""
    return isinstance(layer, (Convolution, *LAYERS))


def _name(layer: Any) -> str:
    return "a matrix" if isinstance(layer, Tensor) else type(layer).__name__
