"""Tiny models of ONNX: read by the package, run by ONNX's own reference."""

import math

import pytest
import torch

from gramcert.auditing.onnx_file import read_onnx
from gramcert.auditing.onnx_nodes import graph_of
from gramcert.operators.graph import Input, Joint, Nonlinear, Sum, Unbounded
from gramcert.operators.linear import LinearMap

pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

EPS = torch.finfo(torch.float64).eps
ROUNDING = 1e5 * EPS  # sums of a few hundred products
DIFFERENCES = EPS**0.4  # of difference quotients
IMAGE = (1, 2, 5, 4)


def tensor(*values):
    return torch.tensor(values)


def random(*shape):
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


class Tiny:
    """A model with the input x, written to a file, read again, and run by ONNX's own reference."""

    def __init__(self, folder, steps, shape, opset=21, outputs=("y",), truth=None, kind=TensorProto.DOUBLE):
        self.shape, self.outputs, initializers, nodes = tuple(shape), outputs, [], []
        for index, (op, inputs, attributes) in enumerate(steps):
            names = []
            for value in inputs:
                if isinstance(value, torch.Tensor):
                    names.append(f"c{len(initializers)}")
                    initializers.append(numpy_helper.from_array(value.numpy(), names[-1]))
                else:
                    names.append(value)
            last = index == len(steps) - 1
            result = list(outputs) if last else [f"v{index}"]
            attributes = {
                key: numpy_helper.from_array(value.numpy()) if isinstance(value, torch.Tensor) else value
                for key, value in attributes.items()
            }
            nodes.append(helper.make_node(op, names, result, name=f"{op}_{index}", **attributes))
        inputs = [helper.make_tensor_value_info("x", kind, shape)]
        results = [helper.make_tensor_value_info(name, kind, None) for name in outputs]
        graph = helper.make_graph(nodes, "tiny", inputs, results, initializers)
        self.proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        path = folder / "tiny.onnx"
        path.write_bytes(self.proto.SerializeToString())
        self.model = read_onnx(path)
        self.graph = graph_of(self.model, dict(self.model.inputs))
        self._reference, self.truth = None, truth

    def __call__(self, x):
        if self.truth is not None:
            return self.truth(x.reshape(self.shape)).flatten()
        self._reference = self._reference or ReferenceEvaluator(self.proto)
        y = self._reference.run([self.outputs[0]], {"x": x.reshape(self.shape).numpy()})[0]
        return torch.tensor(y.copy(), dtype=torch.float64).flatten()

    def shape_of(self, name="y"):
        return self.graph.nodes[self.graph.outputs[name]].shape

    def matrix(self, name="y"):
        """That of the graph, of linear nodes only."""
        found = {}
        for node in self.graph.needed().nodes.values():
            if isinstance(node.operation, Input):
                found[node.name] = torch.eye(math.prod(node.shape), dtype=torch.float64)
            elif isinstance(node.operation, Sum):
                parts = zip(node.operation.signs, node.inputs, strict=True)
                found[node.name] = sum(sign * found[part] for sign, part in parts)
            else:
                assert isinstance(node.operation, LinearMap), node
                found[node.name] = node.operation.dense() @ found[node.inputs[0]]
        return found[self.graph.outputs[name]]

    def bound(self, name="y"):
        """The product of the constants on the way."""
        found = {}
        for node in self.graph.nodes.values():
            operation, before = node.operation, [found[part] for part in node.inputs]
            if isinstance(operation, Input):
                found[node.name] = 1.0
            elif isinstance(operation, LinearMap):
                found[node.name] = before[0] * float(torch.linalg.matrix_norm(operation.dense(), 2))
            elif isinstance(operation, Nonlinear):
                found[node.name] = before[0] * operation.constant
            else:
                joined = math.hypot(*before) if isinstance(operation, Joint) else sum(before)
                found[node.name] = math.inf if isinstance(operation, Unbounded) else joined
        return found[self.graph.outputs[name]]

    def slope(self, x):
        """The norm of the Jacobian, by central differences."""
        step = EPS ** (1 / 3)
        units = torch.eye(math.prod(self.shape), dtype=torch.float64) * step
        columns = [(self(x.flatten() + unit) - self(x.flatten() - unit)) / (2 * step) for unit in units]
        matrix = torch.stack(columns, 1)
        return float(torch.linalg.matrix_norm(matrix, 2)) if bool(matrix.isfinite().all()) else math.nan

    def reasons(self):
        nodes = self.graph.needed().nodes.values()
        return [node.operation.reason for node in nodes if isinstance(node.operation, Unbounded)]


def one(op, *inputs, **attributes):
    return (op, ("x", *inputs), attributes)


def same_matrix(tiny, tolerance=ROUNDING):
    zero = torch.zeros(math.prod(tiny.shape), dtype=torch.float64)
    start = tiny(zero)
    truth = torch.stack([tiny(unit) - start for unit in torch.eye(len(zero), dtype=torch.float64)], 1)
    assert math.prod(tiny.shape_of()) == len(start)
    assert torch.allclose(tiny.matrix(), truth, rtol=tolerance, atol=tolerance * float(truth.abs().max()))


def half():
    return torch.tensor(0.5, dtype=torch.float64)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def check_function(tiny, point, near=0.999):
    """The constant is finite, nowhere exceeded, and nearly reached at a point."""
    count = math.prod(tiny.shape)
    steepest = max(tiny.slope(3 * random(count, seed)[:, 0]) for seed in range(1, 9))
    assert steepest <= tiny.bound() * (1 + DIFFERENCES)
    assert near * tiny.bound() <= tiny.slope(point.double()) <= tiny.bound() * (1 + DIFFERENCES)
    assert math.prod(tiny.shape_of()) == len(tiny(point.double()))
