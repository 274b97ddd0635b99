"""Operators that only give entries other places, against ONNX's own reference."""

import pytest
import torch

from tiny_onnx import Tiny, one, same_matrix, tensor

LINEAR = {
    "identity": (one("Identity"), (3,)),
    "split": (one("Split", tensor(1, 3), axis=1), (2, 4)),
    "slice": (one("Slice", tensor(-1, 1), tensor(-9, 9), tensor(0, -1), tensor(-2, 2)), (4, 5)),
    "gather": (one("Gather", tensor([0, -1], [2, 2]), axis=1), (2, 3, 2)),
    "gather number": (one("Gather", torch.tensor(1)), (2, 3)),
    "gather elements": (one("GatherElements", tensor([0, -1], [1, 1]), axis=1), (2, 3)),
    "gather nd": (one("GatherND", tensor([0, 1], [1, -1])), (2, 3, 2)),
    "reshape": (one("Reshape", tensor(0, -1, 2)), (3, 4, 2)),
    "flatten": (one("Flatten", axis=2), (2, 3, 4)),
    "flatten all": (one("Flatten", axis=0), (2, 3)),
    "transpose": (one("Transpose", perm=[2, 0, 1]), (2, 3, 4)),
    "transpose all": (one("Transpose"), (2, 3, 4)),
    "squeeze": (one("Squeeze", tensor(-1)), (2, 1, 3, 1)),
    "squeeze all": (one("Squeeze"), (2, 1, 3, 1)),
    "unsqueeze": (one("Unsqueeze", tensor(0, -1)), (2, 3)),
    "expand": (one("Expand", tensor(2, 1, 3)), (2, 1)),
    "tile": (one("Tile", tensor(2, 3)), (2, 2)),
    "trilu": (one("Trilu", torch.tensor(1), upper=0), (3, 4)),
    "depth to space": (one("DepthToSpace", blocksize=2), (1, 8, 2, 3)),
    "depth to space crd": (one("DepthToSpace", blocksize=2, mode="CRD"), (1, 8, 2, 3)),
    "space to depth": (one("SpaceToDepth", blocksize=2), (1, 2, 4, 6)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear(name, tmp_path):
    step, shape = LINEAR[name]
    same_matrix(Tiny(tmp_path, [step], shape, outputs=("y", "z") if step[0] == "Split" else ("y",)))


OLDER = {
    "slice": (one("Slice", starts=[1], ends=[9], axes=[1]), (2, 4), 9),
    "squeeze": (one("Squeeze", axes=[1]), (2, 1, 3), 11),
    "unsqueeze": (one("Unsqueeze", axes=[0, 3]), (2, 3), 11),
    "split": (one("Split", split=[1, 3], axis=1), (2, 4), 11),
    "split evenly": (one("Split", axis=1), (2, 4), 11),
    "split unevenly": (one("Split", axis=1, num_outputs=2), (2, 5), 18),
}


@pytest.mark.parametrize("name", OLDER)
def test_operators_of_older_versions(name, tmp_path):
    step, shape, opset = OLDER[name]
    same_matrix(Tiny(tmp_path, [step], shape, opset, outputs=("y", "z") if step[0] == "Split" else ("y",)))
