r"""Singular values of a layer at one input size, with a certified error.

**Circulants.** The singular values are those of the symbols on the grid. **Otherwise** they are those of the matrix
itself, or its k largest (:mod:`~gramcert.certified.largest`).

Sums of singular values follow from the one error e that holds for each: k of them differ from the sum of the k computed
ones by at most k·e, and the root of the sum of all squares by at most √n·e.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from gramcert.arguments import Sizes, axis_sizes, require_values
from gramcert.certified.banded import band_bytes, smaller_grams
from gramcert.certified.choose import certified_convolution, is_spatial
from gramcert.certified.condition import condition_of
from gramcert.certified.decomposition import circulant_values, number_of_values, verified_values, written_out
from gramcert.certified.largest import largest_values
from gramcert.certified.lifted import LiftedLayer
from gramcert.enclosure import Enclosure
from gramcert.exact import exact, float_down, float_up
from gramcert.geometry.axis import Axis, layer_axes
from gramcert.geometry.convolution import Convolution
from gramcert.progress import Report, silent
from gramcert.rounding import (
    checked_arithmetic,
    down,
    lift,
    norm_down,
    norm_up,
    root_up,
    scaled_down,
    scaled_tensor,
    scaled_up,
    up,
)

# Smaller sides of matrices up to which all singular values are computed, and the k largest: a Gram matrix of this order
# takes half a GiB, and its proof about five times that.
DECOMPOSED, LARGEST_GRAM = 4096, 8192

# Entries of a matrix that is decomposed, bytes for the axes of a banded Gram matrix, and singular values of a
# circulant: each of them makes about 2 GiB of it.
MOST_ENTRIES, MOST_AXIS_BYTES, MOST_VALUES = 2**26, 2**31, 2**25

# Up to this order a decomposition is cheaper than a proof.
SMALL = 800


_LARGEST_FLOAT = math.nextafter(math.inf, 0.0)


class TooLargeError(ValueError):
    """More singular values than are computed; ``few_possible`` says whether some of the largest ones would be."""

    def __init__(self, message: str, *, few_possible: bool) -> None:
        super().__init__(message)
        self.few_possible = few_possible


@dataclass(frozen=True)
class Spectrum:
    """Singular values, descending, and an error that holds for each of them.

    What is computed from them is an :class:`Enclosure`, all rounding included. What needs all singular values is an
    error where only the largest are known.

    Attributes:
        values: float64.
        error: each true singular value differs from the one in its place by at most this, all rounding included.
        omitted: how many further singular values there are, none above the last of ``values`` in truth.

    Example:
        >>> import torch, gramcert
        >>> spectrum = gramcert.singular_values(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        >>> 7 in spectrum.nuclear, 5 in spectrum.frobenius, 4 in spectrum.ky_fan(1)
        (True, True, True)
        >>> f"{spectrum.condition:.9f}", spectrum.above(3.5)
        ('[1.333333333, 1.333333334]', (1, 1))
    """

    values: Tensor
    error: float
    omitted: int = 0

    @property
    def largest(self) -> Enclosure:
        """The largest singular value, the spectral norm."""
        return self._value(0)

    @property
    def smallest(self) -> Enclosure:
        """The smallest of all singular values."""
        self._require_all("smallest")
        return self._value(-1)

    @property
    def condition(self) -> Enclosure:
        """The largest over the smallest; not bounded from above where the smallest may be 0."""
        self._require_all("condition")
        return condition_of(self.largest, self.smallest)

    @property
    def nuclear(self) -> Enclosure:
        """The sum of all singular values, the nuclear norm."""
        self._require_all("nuclear")
        return self._sum(len(self.values))

    @property
    def frobenius(self) -> Enclosure:
        """The root of the sum of the squares of all singular values."""
        self._require_all("frobenius")
        if math.isinf(self.error):
            return Enclosure(0.0, math.inf)
        if not self.error and not float(self.values[0]):
            return Enclosure(0.0, 0.0)
        scaled, lost, exponent = lift(self.values)
        length = Enclosure(scaled_down(norm_down(scaled), exponent), scaled_up(norm_up(scaled), exponent))
        off = up(up(self.error + scaled_up(lost, exponent)) * root_up(len(scaled)))
        return Enclosure(max(0.0, (length - off).lower), (length + off).upper)

    def ky_fan(self, k: int) -> Enclosure:
        """The sum of the k largest singular values, the Ky Fan k-norm.

        Args:
            k: how many, at most as many as are known.

        Example:
            >>> import torch, gramcert
            >>> layer = gramcert.Convolution(torch.tensor([[[1.0, 2.0, 1.0]]]), padding=1, padding_mode="circular")
            >>> print(f"{gramcert.singular_values(layer, 4).ky_fan(2):.9f}")
            [5.999999999, 6.000000001]
        """
        count = _checked_count("Spectrum.ky_fan", k)
        if count > len(self.values):
            known = "are known" if self.omitted else "singular values"
            raise ValueError(f"Spectrum.ky_fan(k={k}): expected at most {len(self.values)}, as many as {known}")
        return self._sum(count)

    def above(self, level: float) -> tuple[int, int]:
        """At least and at most how many of all singular values are above a level.

        Args:
            level: any number.
        """
        bound = exact("Spectrum.above(level)", level)
        if bound != bound:
            raise ValueError(f"Spectrum.above(level={level!r}): expected a number")
        if math.isinf(self.error):
            return 0, len(self.values) + self.omitted
        doubt = Fraction(self.error)
        surely = int((self.values > float_up(bound + doubt)).sum())
        perhaps = int((self.values > float_down(bound - doubt)).sum())
        return surely, perhaps + (self.omitted if perhaps == len(self.values) else 0)

    def _require_all(self, what: str) -> None:
        if self.omitted:
            raise ValueError(
                f"Spectrum.{what}: needs all singular values, but only the {len(self.values)} largest of "
                f"{len(self.values) + self.omitted} are known; leave out k"
            )

    def _value(self, place: int) -> Enclosure:
        if math.isinf(self.error):
            return Enclosure(0.0, math.inf)
        value, doubt = Fraction(float(self.values[place])), Fraction(self.error)
        return Enclosure(max(0.0, float_down(value - doubt)), float_up(value + doubt))

    def _sum(self, count: int) -> Enclosure:
        if math.isinf(self.error):
            return Enclosure(0.0, math.inf)
        doubt = Fraction(self.error)
        # Those that may be 0 add nothing to the lower bound.
        positive = min(count, int((self.values > self.error).sum()))
        lower, upper = _sum_bounds(self.values[:count])
        if positive < count:
            lower = _sum_bounds(self.values[:positive])[0]
        least = float_down(Fraction(lower) - positive * doubt)
        return Enclosure(max(0.0, least), math.inf if math.isinf(upper) else float_up(Fraction(upper) + count * doubt))


def singular_values(
    layer: nn.Module | Convolution | Tensor,
    input_size: Sizes | None = None,
    k: int | None = None,
    *,
    report: Report = silent,
) -> Spectrum:
    """Singular values of a layer at one input size, with a certified error.

    Args:
        layer: ``nn.Conv1d/2d/3d``, ``nn.ConvTranspose1d/2d/3d``, a :class:`Convolution`, ``nn.Linear`` or a matrix.
        input_size: one int per axis, or one for all; ``None`` for ``nn.Linear`` and matrices.
        k: how many of the largest; ``None`` for all.
        report: told what is being decomposed (``frequencies``, ``matrices``), how many are done, and of how many.

    With circular padding that keeps the size (or divides it by the stride) any layer will do that has at most 2²⁵
    singular values. Otherwise the layer's matrix has to be small: its smaller side at most 4096 for all values, with at
    most 2²⁶ entries, and 8192 for the k largest.

    Example:
        >>> import torch, gramcert
        >>> layer = gramcert.Convolution(torch.tensor([[[1.0, 2.0, 1.0]]]), padding=1, padding_mode="circular")
        >>> spectrum = gramcert.singular_values(layer, 4)
        >>> spectrum.values.round(decimals=12), spectrum.error < 1e-13
        (tensor([4., 2., 2., 0.], dtype=torch.float64), True)
    """
    return spectrum_of("singular_values", layer, input_size, k, report)


def spectrum_of(
    call: str,
    layer: nn.Module | Convolution | Tensor,
    input_size: Sizes | None,
    k: int | None,
    report: Report = silent,
) -> Spectrum:
    """:func:`singular_values` under the name of the caller."""
    description = certified_convolution(call, layer)
    copies = 2 if isinstance(layer, Tensor) and layer.is_complex() else 1  # of each value, in the real matrix
    count = None if k is None else _checked_count(call, k)
    axes = _axes(call, layer, description, input_size)
    description = description.with_kernel(require_values(call, "layer", description.kernel))
    with checked_arithmetic(call):
        lifted = LiftedLayer.of(description, axes)
        if lifted.is_zero:
            values, error = torch.zeros(0, dtype=torch.float64), 0.0
        elif all(axis.is_whole_circulant for axis in axes):
            values, error = _of_circulant(call, lifted, report)
        else:
            values, error = _of_matrix(call, lifted, None if count is None else copies * count, report)
    outputs = description.kernel.shape[0] * math.prod(axis.outputs for axis in axes)
    inputs = description.kernel.shape[1] * description.groups * math.prod(axis.size for axis in axes)
    # Places of the input that no output reads, and the like, make further singular values of exactly zero.
    number = min(outputs, inputs)
    values = torch.nn.functional.pad(values.sort(descending=True).values, (0, number - len(values)))
    scaled, lost = scaled_tensor(values[::copies][:count], lifted.exponent)
    error = scaled_up(error + lifted.lost, lifted.exponent) + lost if scaled.isfinite().all() else math.inf
    error = up(up(error)) if error else 0.0  # up for each of the two sums
    return Spectrum(scaled, error, number // copies - len(scaled))


def _sum_bounds(values: Tensor) -> tuple[float, float]:
    """Below and above the sum of numbers that are not negative; fsum rounds once."""
    try:
        total = math.fsum(values.contiguous().numpy().data)
    except OverflowError:  # so the sum is beyond the largest float, but for a few units in its last place
        return _LARGEST_FLOAT / 2, math.inf
    return (down(total), up(total)) if total else (0.0, 0.0)


def _axes(call: str, layer: Any, description: Convolution, input_size: Sizes | None) -> tuple[Axis, ...]:
    if is_spatial(layer):
        if input_size is None:
            raise ValueError(f"{call}(input_size=None): {type(layer).__name__} needs an input size")
        sizes = axis_sizes(call, "input_size", input_size, description.axes, what=type(layer).__name__)
        return layer_axes(description, sizes, call)
    if input_size is not None:
        raise ValueError(f"{call}(input_size={input_size}): a matrix has no spatial size, expected None")
    return layer_axes(description, (1,))


def _checked_count(call: str, k: int) -> int:
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"{call}(k): expected an int, got {k!r}")
    if k < 1:
        raise ValueError(f"{call}(k={k}): expected at least 1")
    return k


def _of_circulant(call: str, lifted: LiftedLayer, report: Report) -> tuple[Tensor, float]:
    """Those of a circulant, if there are not too many."""
    number = number_of_values(lifted)
    if number > MOST_VALUES:
        raise TooLargeError(
            f"{call}: the layer may have at most {MOST_VALUES} singular values, got {number}; spectral_norm encloses "
            f"the largest one at any size",
            few_possible=False,
        )
    return circulant_values(lifted, report)


def _of_matrix(call: str, lifted: LiftedLayer, count: int | None, report: Report) -> tuple[Tensor, float]:
    """Those of the matrices of the groups: all of them, or of large matrices the largest ones."""
    kernels, axes = lifted.kernels, lifted.axes or ()
    rows = kernels.shape[1] * math.prod(axis.outputs for axis in axes)
    columns = kernels.shape[2] * math.prod(axis.size for axis in axes)
    order = min(rows, columns)
    by_band = count is not None and order > SMALL and count <= order // 8
    too_large = band_bytes(axes) > MOST_AXIS_BYTES if by_band else rows * columns > MOST_ENTRIES
    if too_large or order > (DECOMPOSED if count is None else LARGEST_GRAM):
        raise TooLargeError(
            f"{call}(k={count}): without circular padding that keeps the size, a group's matrix may have a smaller "
            f"side of at most {DECOMPOSED} for all singular values and {LARGEST_GRAM} for the k largest, and "
            f"{MOST_ENTRIES} entries where it is decomposed, got {rows} by {columns}; spectral_norm encloses the "
            f"largest one at any size",
            few_possible=count is None and order <= LARGEST_GRAM and band_bytes(axes) <= MOST_AXIS_BYTES,
        )
    values, errors = [], []
    report("matrices", 0, len(kernels))
    for done, kernel in enumerate(kernels):
        if by_band and count is not None:
            found, error = largest_values(smaller_grams(kernel[None], axes)[0], count)
        else:
            matrix, doubt = written_out(kernel, axes)
            (found,), error = verified_values(matrix[None], matrix.shape)
            error = up(error + doubt)
        values.append(found)
        errors.append(error)
        report("matrices", done + 1, len(kernels))
    return torch.cat(values), max(errors)
