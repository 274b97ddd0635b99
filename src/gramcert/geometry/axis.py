"""One spatial axis of a layer at one input size: which place of the input each output reads with each tap."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.geometry.convolution import Convolution
from gramcert.geometry.padding import PaddingMode, largest_repetition, source_indices


@dataclass(frozen=True)
class Axis:
    """y[o] = Σ_a K[a] x̃[stride·o + dilation·a - before] for 0 <= o < outputs, x̃ the input of ``size`` places, padded.

    ``before`` is negative where the first places are never read.
    """

    size: int
    outputs: int
    before: int
    taps: int
    stride: int
    dilation: int
    mode: PaddingMode

    @property
    def used(self) -> int:
        """How many places of the padded axis are in reach, counted from the first."""
        return (self.outputs - 1) * self.stride + self.dilation * (self.taps - 1) + 1

    @property
    def is_circulant(self) -> bool:
        """Whether the axis consists of rows of circulants (see :mod:`gramcert.geometry.reduction`)."""
        fits = self.size % self.stride == 0 and self.outputs * self.stride <= self.size
        return self.mode == "circular" and fits

    @property
    def is_whole_circulant(self) -> bool:
        """Whether all rows of the circulants are there."""
        return self.is_circulant and self.outputs * self.stride == self.size

    @property
    def repetition(self) -> int:
        """How often the most repeated place occurs among the used ones."""
        return 1 if self.mode == "zeros" else largest_repetition(self.size, self.before, self.used, self.mode)

    def padded(self) -> Tensor:
        """For each used place of the padded axis the place of the input that it repeats; ``size`` stands for a zero."""
        if self.mode == "zeros":
            places = torch.arange(self.used) - self.before
            return torch.where((places >= 0) & (places < self.size), places, self.size)
        after = max(0, self.used - self.size - self.before)
        return source_indices(self.size, self.before, after, self.mode)[: self.used]

    def sources(self) -> Tensor:
        """The place that each output (row) reads with each tap (column); ``size`` stands for a zero."""
        outputs, taps = torch.arange(self.outputs)[:, None], torch.arange(self.taps)
        return self.padded()[self.stride * outputs + self.dilation * taps]

    def reads(self) -> Tensor:
        """For each tap whether any output reads a place of the input with it."""
        if self.mode != "zeros":
            return torch.ones(self.taps, dtype=torch.bool)
        reached = [self.dilation * tap - self.before for tap in range(self.taps)]  # by output 0
        first = [max(0, -(place // self.stride)) for place in reached]  # the first output at a place >= 0
        return torch.tensor(
            [
                output < self.outputs and place + self.stride * output < self.size
                for place, output in zip(reached, first, strict=True)
            ]
        )

    def read_by(self, tap: int) -> slice:
        """The padded places that the outputs read with one tap."""
        first = self.dilation * tap
        return slice(first, first + self.stride * (self.outputs - 1) + 1, self.stride)

    def first_places(self, size: int) -> "Axis":
        """With zero padding: the first places of the input and the outputs that read them."""
        outputs = min(self.outputs, max(1, (size + self.before - 1) // self.stride + 1))
        return dataclasses.replace(self, size=size, outputs=outputs)

    def without_idle_ends(self) -> "Axis":
        """With zero padding: without the outputs at both ends that read nothing but zeros, if any others are left."""
        if self.mode != "zeros":
            return self
        first = max(0, -(-(self.before - self.dilation * (self.taps - 1)) // self.stride))
        last = min(self.outputs - 1, (self.size - 1 + self.before) // self.stride)
        if first > last:
            return self
        return dataclasses.replace(self, outputs=last - first + 1, before=self.before - self.stride * first)

    def inside(self) -> "Axis":
        """The outputs that read no padding, as an axis with zero padding; the axis itself if its padding is zeros.

        Where every output reads some, one that reads nothing but zeros stands for them.
        """
        if self.mode == "zeros":
            return self
        first = max(0, -(-self.before // self.stride))
        before = self.before - self.stride * first
        last = (self.size - 1 + self.before - self.dilation * (self.taps - 1)) // self.stride
        outputs = min(last, self.outputs - 1) - first + 1
        if outputs < 1:
            outputs, before = 1, -self.size
        return dataclasses.replace(self, outputs=outputs, before=before, mode="zeros")

    def without_taps(self, first: int, last: int) -> "Axis":
        """The same axis if that many taps at the beginning and at the end are zero."""
        return dataclasses.replace(self, before=self.before - self.dilation * first, taps=self.taps - first - last)


def layer_axes(
    layer: Convolution, input_size: tuple[int, ...], call: str = "Convolution.output_size"
) -> tuple[Axis, ...]:
    """The axes of a layer; of a transposed one, those of its adjoint, which has the same norm."""
    output_size = layer.output_size(input_size, call=call)
    inputs, outputs = (output_size, input_size) if layer.transposed else (input_size, output_size)
    return tuple(
        Axis(n, n_out, before, taps, stride, dilation, layer.padding_mode)
        for n, n_out, (before, _), taps, stride, dilation in zip(
            inputs, outputs, layer.padding, layer.kernel_size, layer.stride, layer.dilation, strict=True
        )
    )
