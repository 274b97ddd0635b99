"""From the operators of ONNX to the graph, one small rule for each."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gramcert.auditing import onnx_functions, onnx_indexing, onnx_layers, onnx_transforms, onnx_windows
from gramcert.auditing.onnx_call import Call, Context, Result, Rule, Value, bounded
from gramcert.auditing.onnx_file import OnnxModel, OnnxNode
from gramcert.auditing.onnx_folding import folded
from gramcert.auditing.onnx_moves import MOVES
from gramcert.auditing.readable import shown_text
from gramcert.operators import rules
from gramcert.operators.graph import CONSEQUENCE, MOST_ENTRIES, BadModel, Graph, Variable
from gramcert.operators.linear import Shape
from gramcert.operators.rules import CHOICE, EMBEDDING, REAL, Consequence, Unknown, reason_of

_NAMES = {
    "Relu": "relu",
    "Sigmoid": "sigmoid",
    "HardSwish": "hardswish",
    "Tanh": "tanh",
    "Softplus": "softplus",
    "Softsign": "softsign",
    "Erf": "erf",
    "Mish": "mish",
    "Abs": "abs",
    "Sin": "sin",
    "Cos": "cos",
    "Atan": "atan",
    "Asinh": "asinh",
    "Exp": "exp",
    "Tan": "tan",
    "Floor": "floor",
    "Ceil": "ceil",
    "Round": "round",
}
_REASONS = {
    "Hardmax": "it jumps",
    "ArgMax": "an index jumps",
    "ArgMin": "an index jumps",
    "NonZero": "an index jumps",
    "IsNaN": "a comparison jumps",
    "IsInf": "a comparison jumps",
    "Not": "a comparison jumps",
    "Attention": "attention has no Lipschitz constant on all inputs",
    "LpNormalization": "it jumps where all entries are 0",
    "QuantizeLinear": "rounding jumps",
    "DynamicQuantizeLinear": "rounding jumps",
}
# What may be done to integers, which wrap around and are divided by truncation.
_OF_INTEGERS = {*MOVES, "Cast", "CastLike", "Shape", "Size", "Concat"}

RULES: dict[str, Rule] = {
    **onnx_layers.RULES,
    **onnx_indexing.RULES,
    **onnx_windows.RULES,
    **onnx_transforms.RULES,
    **onnx_functions.RULES,
}


def graph_of(model: OnnxModel, shapes: dict[str, Shape]) -> Graph:
    """The graph of a model.

    Args:
        model: from :func:`gramcert.auditing.onnx_file.read_onnx`.
        shapes: of each input, the batch included.
    """
    for name, declared in model.inputs.items():
        shape = shapes.get(name)
        fits = shape is not None and len(shape) == len(declared) and min(shape, default=1) >= 1
        if not fits or any(known not in (None, size) for known, size in zip(declared, shape or (), strict=True)):
            shown = tuple("?" if size is None else size for size in declared)
            raise BadModel(f"the input {shown_text(name)} has the shape {shown}, got {shape}")
    if extra := shapes.keys() - model.inputs.keys():
        raise BadModel(f"expected the inputs {sorted(model.inputs)}, got also {sorted(extra)}")
    return Translator(model).run({name: shapes[name] for name in model.inputs})


class Translator(Context):
    """Walks through a model."""

    def __init__(self, model: OnnxModel) -> None:
        super().__init__()
        self.model = model
        self._values: dict[str, Value] = dict(model.tensors)
        self._inputs: tuple[Variable, ...] = ()
        self._shapeless: set[str] = set()  # names of nodes whose shape is not known
        self._told: set[str] = set()  # and of those whose shape only the file tells, with all that is made of them

    def run(self, shapes: dict[str, Shape]) -> Graph:
        """The graph for inputs of these shapes."""
        for name, shape in shapes.items():
            self._values[name] = x = self.b.input(name, shape)
            self._inputs += (x,)
            self.types[x.name] = self.model.types[name]
        for node in self.model.nodes:
            self._follow(node)
        for name in self.model.outputs:
            value = self._values[name]
            if isinstance(value, Variable) and value.name in self._told:
                # Of another shape, what was left out or multiplied by 0 might not have been.
                self.b.at(shown_text(name), "output", [])
                value = self.b.unbounded((value,), value.shape, str(Consequence()), CONSEQUENCE)
            self.b.output(name, value)
        return self.b.graph

    def _follow(self, node: OnnxNode) -> None:
        c = Call(node, [self._values[name] if name else None for name in node.inputs], self.model.opset)
        label = shown_text(node.name or next(filter(None, node.outputs), node.op_type))
        self.b.at(label, f"{node.domain}::{node.op_type}".removeprefix("::"), _constants(c))
        variables = tuple(value for value in c.values if isinstance(value, Variable))
        variables = self._inputs if node.has_subgraph else variables
        try:
            results = self._results(c, variables)
        except Exception as error:  # a hostile file can make an operator raise anything
            reason = f"{shown_text(node.op_type)}: {shown_text(reason_of(error))}"
            kind = CONSEQUENCE if isinstance(error, Consequence) else ""
            results = [self._lost(name, variables, reason, kind) for name in node.outputs]
        for place, name in enumerate(node.outputs):
            if name and place >= len(results):
                results.append(self._lost(name, variables, f"{node.op_type}: its output {place + 1} is not followed"))
            if name:
                self._values[name] = results[place]

    def _lost(self, output: str, variables: tuple[Variable, ...], reason: str, kind: str = "") -> Variable:
        """A value of which nothing is known but, where the file says it, its shape.

        Without inputs it may still be random, or use others in its subgraph.
        """
        shape = self.model.shapes.get(output)
        shape = shape if shape is not None and math.prod(shape) <= MOST_ENTRIES else None
        result = self.b.unbounded(variables or self._inputs, shape or (), reason, kind)
        self.types[result.name] = torch.float32
        (self._shapeless if shape is None else self._told).add(result.name)
        return result

    def _results(self, c: Call, variables: tuple[Variable, ...]) -> list[Value]:
        if c.op in ("Loop", "Scan") and not c.node.domain:
            raise Unknown("a loop, which is not followed")
        if c.op == "If" and not c.node.domain:
            return self._taken_branch(c)
        if c.node.has_subgraph:
            raise Unknown("a graph of its own, which is not followed")
        if c.node.domain:
            raise Unknown(f"an operator of the domain {c.node.domain}, of which nothing is known")
        if any(x.name in self._shapeless for x in variables):
            raise Consequence
        if any(self.type_of(x) not in (*REAL, torch.bool) for x in variables) and c.op not in _OF_INTEGERS:
            raise Unknown("integers that depend on the input may wrap around")
        result = self._translated(c) if variables else folded(c)
        results: list[Value] = [_plain(part) for part in (result if isinstance(result, list) else [result])]
        self.count(sum(part.numel() for part in results if isinstance(part, Tensor)))
        if not self._told.isdisjoint(x.name for x in variables):
            if any(isinstance(part, Tensor) for part in results):  # sizes
                raise Consequence
            self._told.update(part.name for part in results if isinstance(part, Variable))
        for part in results:
            if isinstance(part, Variable) and variables and part.name not in self.types:
                self.types[part.name] = self.type_of(variables[0])
        return results

    def _taken_branch(self, c: Call) -> list[Value]:
        """What the branch of an ``If`` gives that a constant condition takes; its names are its own."""
        condition = c.get(0)
        if isinstance(condition, Variable):
            raise Unknown("control flow that depends on the input")
        if condition is None or condition.dtype != torch.bool or condition.numel() != 1:
            raise Unknown("control flow without one truth value that decides it")
        branch = c.node.branches.get("then_branch" if bool(condition) else "else_branch")
        if branch is None or len(branch.outputs) != len(c.node.outputs) or self._values.keys() & branch.tensors.keys():
            raise Unknown("control flow whose branches are not as the format has them")
        outside = self._values
        self._values = {**outside, **branch.tensors}
        try:
            for node in branch.nodes:
                if self._values.keys() & set(node.outputs):
                    raise Unknown("a branch that makes a value twice")
                if set(node.inputs) - {""} - self._values.keys():
                    raise Unknown("a branch that uses a value before it is made")
                self._follow(node)
            if set(branch.outputs) - self._values.keys():
                raise Unknown("a branch that does not make its results")
            return [self._values[name] for name in branch.outputs]
        finally:
            self._values = outside

    def _translated(self, c: Call) -> Result:
        if c.op in MOVES:
            return self._moved(c)
        if c.op in RULES:
            return RULES[c.op](self, c)
        if c.op in _NAMES:
            return rules.activation(self.b, c.x(), _NAMES[c.op])
        raise Unknown(_REASONS.get(c.op, "no rule is known for this operator"))

    def _moved(self, c: Call) -> Result:
        """By what the operator does to a tensor of places."""
        if c.op.startswith("Gather") and not isinstance(c.get(0), Variable):
            raise Unknown(EMBEDDING)
        if c.op.startswith("Gather") and isinstance(c.get(1), Variable):
            raise Unknown(CHOICE)
        x, do, name = c.x(), MOVES[c.op], c.op.lower()
        if c.op == "Identity":
            return self.b.same(x)
        places = torch.arange(1, math.prod(bounded(x.shape)) + 1).reshape(x.shape)
        moved = do(places, c)
        parts = moved if isinstance(moved, list) else [moved]
        return [self.moved(x, lambda _, part=part: part, name) for part in parts]  # type: ignore[misc]


def _plain(value: Value) -> Value:
    """Constants with an entry of memory for each of theirs."""
    if isinstance(value, Tensor):
        return value.clone(memory_format=torch.contiguous_format) if value.numel() == 1 else value.contiguous()
    return value


def _constants(c: Call) -> Iterator[object]:
    """Everything constant that a node is made with."""
    for name in sorted(c.node.attributes):
        value = c.node.attributes[name]
        yield name
        yield from value if isinstance(value, list) else [value]
    for place, value in enumerate(c.values):
        if isinstance(value, Tensor):
            yield place
            yield value
