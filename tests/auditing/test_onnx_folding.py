"""What a model computes from constants alone."""

import math

import torch

from tiny_onnx import Tiny, one, tensor


def test_sizes_that_a_model_computes_are_constants(tmp_path):
    steps = [
        one("Shape"),
        ("Gather", ("v0", torch.tensor(1)), {}),
        ("Mul", ("v1", torch.tensor(3)), {}),
        ("Div", ("v2", torch.tensor(-2)), {}),  # truncates: -9 / 2 = -4
        ("Neg", ("v3",), {}),
        ("Mod", ("v4", torch.tensor(3)), {}),  # 1
        ("Add", ("v5", torch.tensor(1)), {}),
        ("Unsqueeze", ("v6", tensor(0)), {}),
        ("Range", (torch.tensor(3), torch.tensor(0), torch.tensor(-3)), {}),
        ("Cast", ("v8",), {"to": 1}),
        ("Cast", ("v9",), {"to": 7}),
        ("Concat", ("v7", "v10"), {"axis": 0}),
        ("ConstantOfShape", (tensor(2),), {"value": tensor(-1)}),
        ("Equal", ("v11", "v12"), {}),
        ("Where", ("v13", "v12", "v11"), {}),
        ("ScatterND", ("v14", tensor([0]), tensor(2)), {}),
        ("Slice", ("v15", tensor(-1), tensor(-9), tensor(0), tensor(-1)), {}),
        ("ReduceProd", ("v16",), {"keepdims": 1}),
        ("Max", ("v17", tensor(1)), {}),
        ("Expand", ("v18", tensor(1)), {}),
        one("Reshape", "v19"),
    ]
    tiny = Tiny(tmp_path, steps, (2, 3))
    assert tiny.shape_of() == (6,)
    assert tiny.bound() == 1


def test_ranges_of_floats_are_known_where_no_runtime_rounds(tmp_path):
    for values, count in (((0.5, 3.0, 0.5), 5), ((0.0, 1.0, 0.1), None), ((0.0, 2.0**25, 2.0**24), None)):
        steps = [("Range", tuple(torch.tensor(value) for value in values), {}), ("Shape", ("v0",), {})]
        tiny = Tiny(tmp_path, [*steps, one("Expand", "v1")], (1,))
        if count is None:
            assert "depends on how a runtime rounds" in tiny.reasons()[0]
        else:
            assert tiny.shape_of() == (count,)


def test_the_smallest_integer_divided_by_minus_one_does_not_stop_the_process(tmp_path):
    for op, expected in (("Div", (["Gather: indices outside of 3 places"], math.inf)), ("Mod", ([], 2**0.5))):
        steps = [(op, (tensor(-(2**63), 7), tensor(-1, -1)), {}), one("Gather", "v0")]
        tiny = Tiny(tmp_path, steps, (3,))
        assert (tiny.reasons(), tiny.bound()) == expected
