"""``smallest_singular_value`` and ``condition_number``: the other end of the spectrum, by the same proofs."""

import dataclasses

from torch import Tensor, nn

from gramcert.arguments import Sizes
from gramcert.certified.choose import Found, enclosed, spectral_norm
from gramcert.certified.condition import condition_of
from gramcert.certified.least import least_at_every_size, least_at_one_size
from gramcert.certified.lifted import LiftedLayer
from gramcert.certified.work import Work
from gramcert.enclosure import Enclosure
from gramcert.geometry.convolution import Convolution


def smallest_singular_value(
    layer: nn.Module | Convolution | Tensor,
    input_size: Sizes | None = None,
    tol: float = 1e-3,
    *,
    max_bytes: int = 2**31,
    max_seconds: float | None = None,
) -> Enclosure:
    """Enclose the smallest singular value of a layer, all rounding included.

    That is the last of min(inputs, outputs) singular values: with not more inputs than outputs the least ‖Tx‖/‖x‖ over
    all inputs x, else the least ‖Tᵀy‖/‖y‖ over all outputs y; ``method`` says which. A positive lower bound proves that
    the layer loses nothing on that side: that it is injective, or onto.

    Without a size it is the largest number below the smallest singular value at every size. That is known where the
    symbols decide (circular padding that keeps the size; "full" zero padding for more outputs than inputs, none for
    fewer). With other paddings only the upper end is near, as borders may lose what the inside keeps, and the lower
    end comes from a tap that outweighs all others, if there is one. An error says so where the smaller side depends on
    the size.

    Args:
        layer: ``nn.Linear``, ``nn.Conv1d/2d/3d``, ``nn.ConvTranspose1d/2d/3d``, a :class:`Convolution` or a matrix.
        input_size: spatial size of the input, one int per axis or one for all; ``None`` for every size.
        tol: relative width to reach. Values below about 1e-7 times the norm, of large matrices, or below 1e-13 times
            it, of small ones, are lost in rounding: their lower bound is 0.
        max_bytes: most memory to take beside the weights themselves.
        max_seconds: when to stop; checked between batches, so it may be passed by one of them.

    Returns:
        The enclosure. If the tolerance could not be reached, it is the best one found, ``tol_reached`` is false and
        ``explain()`` gives the reason.

    Example:
        >>> import torch, gramcert
        >>> kernel = torch.tensor([[[0.25, 1.0, 0.25]]])
        >>> layer = gramcert.Convolution(kernel, padding=1, padding_mode="circular")
        >>> 0.5 in gramcert.smallest_singular_value(layer)
        True
        >>> gramcert.smallest_singular_value(layer, 5) > 0.59
        True
    """
    call = "smallest_singular_value"
    work = Work(max_bytes, max_seconds, call=call)
    return enclosed(call, layer, input_size, tol, work, _smallest)


def condition_number(
    layer: nn.Module | Convolution | Tensor,
    input_size: Sizes | None = None,
    tol: float = 1e-3,
    *,
    max_bytes: int = 2**31,
    max_seconds: float | None = None,
) -> Enclosure:
    """Enclose the largest over the smallest singular value of a layer, all rounding included.

    Args:
        layer: as for :func:`smallest_singular_value`.
        input_size: likewise; ``None`` encloses the supremum over all sizes of what bounds the quotient.
        tol: relative width to reach.
        max_bytes: most memory to take beside the weights themselves.
        max_seconds: when to stop each of the two searches.

    Returns:
        The enclosure. Its upper end is infinite where the smallest singular value may be 0.

    Example:
        >>> import torch, gramcert
        >>> print(f"{gramcert.condition_number(torch.diag(torch.tensor([3.0, -2.0]))):.9f}")
        [1.499999999, 1.500000001]
    """
    call = "condition_number"
    work = Work(max_bytes, max_seconds, call=call)
    share = tol / 2 if isinstance(tol, (int, float)) and 0 < tol < 1 else tol  # an error says what is wrong with it
    least = enclosed(call, layer, input_size, share, work, _smallest)
    norm = spectral_norm(layer, input_size, tol=share, max_bytes=max_bytes, max_seconds=max_seconds)
    notes = tuple(dict.fromkeys((*least.notes, *norm.notes)))
    if not least.upper:
        notes = (*notes, f"the smallest singular value is 0: {least.method}")
    quotient = condition_of(norm, least)
    return dataclasses.replace(
        quotient,
        method=f"{norm.method}; {least.method}",
        tol_reached=quotient.relative_width <= tol,
        steps=least.steps + norm.steps,
        notes=notes,
    )


def _smallest(lifted: LiftedLayer, tol: float, work: Work) -> Found:
    lifted.lift(work)
    if lifted.axes is None:
        return least_at_every_size(work.call, lifted, tol, work)
    return least_at_one_size(lifted, tol, work)
