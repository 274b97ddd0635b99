r"""A convolution of many samples at once, as products of matrices: no convolution routine has to be trusted.

What the outputs of one sample read is a matrix with a row for each channel and tap, and k^D copies of the sample. Here
only the taps of the last axes are laid out so, k^(D-1) copies. On the first axis tap a reads the same matrix from
another place on, which BLAS takes as it lies:

    y = Σ_a K_a · columns[:, places of a],    K_a with a column for each channel and tap of the other axes.

An entry of y is the conventional sum of its products, in some order, of which some factors are the zeros of the
padding. Samples are taken a few at a time, so that their columns stay in the cache of a core.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramcert.geometry.axis import Axis

# Entries of the columns that are worked on at a time: 4 MiB.
PORTION = 2**19


@dataclass(frozen=True, eq=False)
class BatchedConvolution:
    """Kernels (groups, out, in, *taps) on samples (samples, groups, in, *sizes), without sums over samples.

    Attributes:
        kernels: in the type of the samples.
        axes: their geometry.
    """

    kernels: Tensor
    axes: tuple[Axis, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """(samples, groups, out, *outputs)."""
        groups, outputs, inputs = self.kernels.shape[:3]
        columns = groups * inputs * math.prod(axis.taps * axis.outputs for axis in self.axes[1:]) * self.axes[0].used
        parts = [self._run(few) for few in x.split(max(1, PORTION // max(1, columns)))]
        y = torch.cat(parts) if len(parts) > 1 else parts[0]
        return y.reshape(len(x), groups, outputs, *(axis.outputs for axis in self.axes))

    def _run(self, x: Tensor) -> Tensor:
        """(samples·groups, out, places)."""
        first, *rest = self.axes
        columns = self._columns(self._padded(x))
        row = math.prod(axis.outputs for axis in rest)
        y: Tensor | None = None
        for tap, matrices in enumerate(self._matrices):
            if first.stride == 1:
                read = columns.narrow(-1, first.dilation * tap * row, first.outputs * row)
            else:
                read = columns.unflatten(-1, (first.used, row))[..., first.read_by(tap), :].flatten(-2)
            # One kernel for all samples, without a copy where there is one group.
            kernel = matrices.expand(len(x), *matrices.shape).flatten(0, 1)
            y = torch.bmm(kernel, read) if y is None else y.baddbmm_(kernel, read)
        assert y is not None
        return y

    def _padded(self, x: Tensor) -> Tensor:
        sides = [(axis.before, axis.used - axis.size - axis.before) for axis in self.axes]
        # torch crops before it pads, which must leave something.
        cropped = [min(0, before) + min(0, after) for before, after in sides]
        if all(axis.mode == "zeros" and axis.size + cut >= 0 for axis, cut in zip(self.axes, cropped, strict=True)):
            pads = [side for both in sides[::-1] for side in both]
            return torch.nn.functional.pad(x, pads) if any(pads) else x
        x = torch.nn.functional.pad(x, (0, 1) * len(self.axes))  # the place that stands for a zero
        for dim, axis in enumerate(self.axes, 3):
            x = x.index_select(dim, axis.padded())
        return x

    def _columns(self, padded: Tensor) -> Tensor:
        """(samples·groups, taps of the last axes and channels, places of the first axis and outputs of the last)."""
        places: Iterable[tuple[Any, ...]]
        places = itertools.product(*(map(axis.read_by, range(axis.taps)) for axis in self.axes[1:]))
        read = [padded[(..., *slices)] for slices in places]
        columns = torch.stack(read, 2).flatten(2, 3) if len(read) > 1 else read[0]
        return columns.flatten(3).flatten(0, 1)

    @functools.cached_property
    def _matrices(self) -> list[Tensor]:
        """For each tap of the first axis (groups, out, taps of the last axes and channels)."""
        groups, outputs = self.kernels.shape[:2]
        taps = self.kernels.movedim(2, -1).reshape(groups, outputs, self.axes[0].taps, -1)
        return list(taps.movedim(2, 0).contiguous())

    @property
    def can_be_turned(self) -> bool:
        """Whether its adjoint is such a layer."""
        return all(axis.mode == "zeros" and axis.stride == 1 for axis in self.axes)

    @functools.cached_property
    def adjoint(self) -> "BatchedConvolution":
        """x[i] = Σ_a Kᵀ_a y[i - d·a + p], so taps in reverse, and d(k - 1) - p zeros before."""
        assert self.can_be_turned
        kernels = self.kernels.transpose(1, 2).flip(*range(3, self.kernels.dim()))
        axes = tuple(
            dataclasses.replace(
                axis, size=axis.outputs, outputs=axis.size, before=axis.dilation * (axis.taps - 1) - axis.before
            )
            for axis in self.axes
        )
        return BatchedConvolution(kernels, axes)
