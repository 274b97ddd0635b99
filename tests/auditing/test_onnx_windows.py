"""Pooling, reducing and resizing in ONNX, against its own reference and torch."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tiny_onnx import IMAGE, ROUNDING, Tiny, check_function, one, same_matrix, tensor

LINEAR = {
    "average": (one("AveragePool", kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1]), IMAGE),
    "average padded": (one("AveragePool", kernel_shape=[3, 2], pads=[1, 0, 1, 1], count_include_pad=1), IMAGE),
    "average ceil": (one("AveragePool", kernel_shape=[2, 3], strides=[2, 2], ceil_mode=1), IMAGE),
    "average same": (one("AveragePool", kernel_shape=[2, 3], strides=[2, 1], auto_pad="SAME_UPPER"), IMAGE),
    "global average": (one("GlobalAveragePool"), IMAGE),
    "reduce mean": (one("ReduceMean", tensor(1, -1), keepdims=0), (2, 3, 2)),
    "reduce sum": (one("ReduceSum"), (2, 3)),
    "reduce nothing": (one("ReduceSum", noop_with_empty_axes=1), (2, 3)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear(name, tmp_path):
    step, shape = LINEAR[name]
    same_matrix(Tiny(tmp_path, [step], shape))


OLDER = {
    "reduce mean": (one("ReduceMean", axes=[1], keepdims=0), (2, 3), 11),
    "reduce sum": (one("ReduceSum", axes=[-1]), (2, 3), 11),
}


@pytest.mark.parametrize("name", OLDER)
def test_operators_of_older_versions(name, tmp_path):
    step, shape, opset = OLDER[name]
    same_matrix(Tiny(tmp_path, [step], shape, opset))


FAR = torch.tensor([9.0, 0.0, -9.0, 1.0, 5.0, 2.0], dtype=torch.float64)
VECTORS = {
    "max pool": (one("MaxPool", kernel_shape=[3], strides=[1], pads=[1, 1]), (1, 1, 6), 21, torch.eye(6)[2] * 9),
    "max pool apart": (one("MaxPool", kernel_shape=[2], strides=[2], ceil_mode=1), (1, 1, 5), 21, FAR[:5]),
    "max pool dilated": (one("MaxPool", kernel_shape=[2], dilations=[2]), (1, 1, 6), 21, torch.eye(6)[2] * 9),
    "max pool same": (one("MaxPool", kernel_shape=[3], auto_pad="SAME_LOWER"), (1, 1, 6), 21, torch.eye(6)[2] * 9),
    "l2 pool": (one("LpPool", kernel_shape=[3]), (1, 1, 6), 21, torch.eye(6)[2] * 9),
    "global max": (one("GlobalMaxPool"), (1, 2, 3), 21, FAR),
    "global l2": (one("GlobalLpPool"), (1, 2, 3), 21, FAR),
    "reduce l2": (one("ReduceL2", tensor(1), keepdims=0), (2, 3), 21, FAR),
    "reduce l1": (one("ReduceL1", tensor(1)), (2, 3), 21, FAR + 10),
    "reduce max": (one("ReduceMax", tensor(0)), (2, 3), 21, FAR),
    "reduce min": (one("ReduceMin", tensor(0), keepdims=0), (2, 3), 21, FAR),
    "log sum exp": (one("ReduceLogSumExp", tensor(1)), (2, 3), 21, 9 * FAR),
    "top k": (one("TopK", tensor(2)), (2, 3), 21, FAR),
}
# Where ONNX's own reference is incomplete or wrong.
TRUTH = {
    "max pool": lambda x: F.max_pool1d(x, 3, 1, 1),
    "max pool same": lambda x: F.max_pool1d(x, 3, 1, 1),
    "global max": lambda x: x.amax(2),
    "global l2": lambda x: torch.linalg.vector_norm(x, dim=2),
}


@pytest.mark.parametrize("name", VECTORS)
def test_functions_of_several_entries(name, tmp_path):
    step, shape, opset, point = VECTORS[name]
    outputs = ("y", "z") if step[0] == "TopK" else ("y",)
    check_function(Tiny(tmp_path, [step], shape, opset, outputs, TRUTH.get(name)), point)


@pytest.mark.parametrize(
    ("step", "opset", "shape", "factors"),
    [
        (one("Resize", torch.tensor([1.0, 2.0])), 10, (2, 3), (1, 2)),
        (one("Upsample", torch.tensor([1.0, 1.0, 2.0, 3.0])), 9, (1, 1, 2, 3), (1, 1, 2, 3)),
        (one("Upsample", scales=[1.0, 1.0, 2.0, 3.0]), 7, (1, 1, 2, 3), (1, 1, 2, 3)),
    ],
    ids=["resize", "upsample", "upsample by an attribute"],
)
def test_resizing_of_older_versions(step, opset, shape, factors, tmp_path):
    """ONNX has no reference for these."""
    places = torch.arange(math.prod(shape), dtype=torch.float64)
    rows = places.reshape(shape)
    for axis, factor in enumerate(factors):
        rows = rows.repeat_interleave(factor, axis)
    assert torch.equal(Tiny(tmp_path, [step], shape, opset).matrix() @ places, rows.flatten())


SCALES, SIZES = torch.tensor([1.0, 1.0, 2.0, 0.625]), tensor(1, 1, 7, 3)
RESIZED = [
    *(
        {"mode": mode, "coordinate_transformation_mode": place}
        for mode in ("linear", "cubic", "nearest")
        for place in ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners")
    ),
    {"mode": "linear", "coordinate_transformation_mode": "half_pixel_symmetric"},
    {"mode": "cubic", "cubic_coeff_a": -0.5},
    *({"mode": "nearest", "nearest_mode": mode} for mode in ("round_prefer_ceil", "floor", "ceil")),
]


@pytest.mark.parametrize("attributes", RESIZED, ids=lambda attributes: " ".join(map(str, attributes.values())))
def test_resizing(attributes, tmp_path):
    tolerance = 16 * torch.finfo(torch.float32).eps if attributes["mode"] == "cubic" else ROUNDING  # of the reference
    same_matrix(Tiny(tmp_path, [one("Resize", "", "", SIZES, **attributes)], (1, 1, 4, 5)), tolerance)
    if attributes.get("coordinate_transformation_mode") != "align_corners":
        same_matrix(Tiny(tmp_path, [one("Resize", "", SCALES, **attributes)], (1, 1, 3, 5)), tolerance)
    on_one_axis = one("Resize", "", "", tensor(4), axes=[2], **attributes)
    same_matrix(Tiny(tmp_path, [on_one_axis], (1, 2, 3)), tolerance)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_resizing_as_torch_does(mode, align, tmp_path):
    place = "align_corners" if align else "pytorch_half_pixel"
    step = one("Resize", "", "", SIZES, mode=mode, coordinate_transformation_mode=place)

    def truth(x):
        return F.interpolate(x, (7, 3), mode=f"bi{mode}", align_corners=align)

    same_matrix(Tiny(tmp_path, [step], (1, 1, 4, 5), truth=truth))


def nearest(place, **attributes):
    return {"coordinate_transformation_mode": place, **attributes}


UNSETTLED = {
    "a place beside a whole number": (23, 1.6666666, nearest("asymmetric", nearest_mode="ceil"), 21, "nearest place"),
    "a place and a size": (24, 1.6666666, nearest("asymmetric", nearest_mode="ceil"), 21, "39 or 40"),
    "a place beside the middle": (22, 0.2, nearest("half_pixel", nearest_mode="floor"), 19, "nearest place"),
    "the centre of a cut size": (12, 4, nearest("half_pixel_symmetric", nearest_mode="floor"), 19, "nearest place"),
    "a ratio of sizes": (42, 14, nearest("half_pixel", nearest_mode="floor"), 19, None),
    "a size below a whole number": (22, 0.8181818, {"mode": "linear"}, 21, "the new size depends .*: 17 or 18"),
    "a scale that leaves the size": (6, 1.1, {"mode": "linear"}, 21, "leaves 6 places"),
    "nearly 1": (6, 1.0000001, nearest("asymmetric"), 21, "leaves 6 places"),
    "corners": (5, 1.5, {"mode": "linear", **nearest("align_corners")}, 21, "corners"),
    "an older version that shrinks": (10, 0.4, {}, 10, "nearest place"),
    "an older version that halves": (10, 0.5, {}, 10, None),
    "an older version that grows by a fraction": (28, 1.6, {}, 10, "nearest place"),
    "by seven": (30, 7.0, nearest("asymmetric", nearest_mode="floor"), 21, None),
}


@pytest.mark.parametrize("name", UNSETTLED)
def test_resizing_has_no_constant_where_the_arithmetic_decides(name, tmp_path):
    size, change, attributes, opset, reason = UNSETTLED[name]
    if isinstance(change, int):
        step = one("Resize", "", "", tensor(1, 1, change), **attributes)
    else:
        step = one("Resize", *[""] * (opset > 10), torch.tensor([1.0, 1.0, change]), **attributes)
    tiny = Tiny(tmp_path, [step], (1, 1, size), opset)
    if reason is None:
        assert tiny.reasons() == []
        assert math.isfinite(tiny.bound())
        if opset > 10:
            same_matrix(tiny)
    else:
        assert re.search(reason, tiny.reasons()[0])


_PLACES = {
    "asymmetric": lambda i, scale, size, out: i / scale,
    "half_pixel": lambda i, scale, size, out: (i + np.float32(0.5)) / scale - np.float32(0.5),
    "align_corners": lambda i, scale, size, out: i * np.float32(size - 1) / np.float32(max(1, out - 1)),
}


_NEAREST = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round_prefer_floor": lambda x: np.ceil(x - np.float32(0.5)),
    "round_prefer_ceil": lambda x: np.floor(x + np.float32(0.5)),
}


@given(
    size=st.integers(1, 40),
    ratio=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    ulps=st.integers(-1, 1),
    place=st.sampled_from(sorted(_PLACES)),
    rounding=st.sampled_from(sorted(_NEAREST)),
)
def test_the_nearest_place_is_that_of_runtimes_in_float32(tmp_path_factory, size, ratio, ulps, place, rounding):
    scale = np.float32(ratio[0] / ratio[1])
    scale = np.nextafter(scale, np.float32(ulps * np.inf)) if ulps else scale
    scales = torch.tensor([1.0, 1.0, float(scale)])
    step = one("Resize", "", scales, coordinate_transformation_mode=place, nearest_mode=rounding)
    tiny = Tiny(tmp_path_factory.getbasetemp(), [step], (1, 1, size))
    if tiny.reasons():
        return
    out = int(np.float32(size) * scale)
    places = _PLACES[place](np.arange(out, dtype=np.float32), scale, size, out)
    taken = _NEAREST[rounding](places).clip(0, size - 1).astype(int)
    assert torch.equal(tiny.matrix(), torch.eye(size, dtype=torch.float64)[taken])


def test_strides_that_leave_out_places_are_not_padded_to_the_same_size(tmp_path):
    tiny = Tiny(tmp_path, [one("AveragePool", kernel_shape=[1], strides=[6], auto_pad="SAME_UPPER")], (1, 1, 9))
    assert "leave out places" in tiny.reasons()[0]


def test_second_outputs_are_not_followed(tmp_path):
    step = [one("MaxPool", kernel_shape=[2])]
    tiny = Tiny(tmp_path, step, (1, 1, 4), outputs=("y", "z"))
    assert tiny.bound("y") < math.inf == tiny.bound("z")
    assert tiny.reasons() == ["MaxPool: its output 2 is not followed"]
