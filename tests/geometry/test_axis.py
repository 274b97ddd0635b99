import dataclasses
import math

from hypothesis import given

from cases import layers
from gramcert.certified.tapwise import dense_matrix
from gramcert.geometry.axis import Axis, layer_axes
from gramcert.geometry.reduction import grouped_kernels


@given(layers())
def test_outputs_inside_read_what_they_read_in_the_whole_layer(case):
    layer, size = case
    axes = layer_axes(layer, size)
    kernel = grouped_kernels(layer)[0]
    whole = dense_matrix(kernel, axes).reshape(len(kernel), -1, kernel.shape[1] * math.prod(axis.size for axis in axes))
    inside = tuple(axis.inside() for axis in axes)
    part = dense_matrix(kernel, inside).reshape(len(kernel), -1, whole.shape[2])
    assert {axis.mode for axis in inside} == {"zeros"}
    rows = whole.transpose(0, 1).flatten(1)
    for row in part.transpose(0, 1).flatten(1):
        assert not row.any() or (rows == row).all(1).any()


def test_where_every_output_reads_padding_nothing_is_inside():
    axis = Axis(size=10, outputs=10, before=2, taps=5, stride=1, dilation=1, mode="reflect")
    assert axis.inside() == dataclasses.replace(axis, outputs=6, before=0, mode="zeros")
    short = Axis(size=3, outputs=3, before=2, taps=5, stride=1, dilation=1, mode="circular")
    assert set(short.inside().padded().tolist()) == {3}
