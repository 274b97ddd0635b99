"""Each tensor that a module returns is an output with a name, however the module packs it."""

import dataclasses
import math
import typing
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import gramcert
from auditing_networks import Function


@dataclasses.dataclass
class Plain:
    logits: torch.Tensor
    states: typing.Any = None
    loss: typing.Any = None


class Pair(typing.NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class ModelOutput(OrderedDict):
    """As HuggingFace has it: a mapping whose entries are the fields of a dataclass that are not ``None``."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                super().__setitem__(field.name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclasses.dataclass
class Classified(ModelOutput):
    """Of which torch knows nothing."""

    loss: typing.Any = None
    logits: typing.Any = None
    hidden_states: typing.Any = None


@dataclasses.dataclass
class Registered(ModelOutput):
    """Which is registered as a tree, as HuggingFace does for each of its classes."""

    logits: typing.Any = None
    hidden_states: typing.Any = None


pytree.register_pytree_node(
    Registered,
    lambda output: (list(output.values()), list(output)),
    lambda values, names: Registered(**dict(zip(names, values, strict=True))),
    serialized_type_name="test_outputs.Registered",
)


class Held:
    """An object that holds a tensor and says nothing about it."""

    def __init__(self, tensor):
        self.tensor = tensor


class Tree(Held):
    """The same, registered."""


pytree.register_pytree_node(Tree, lambda tree: ([tree.tensor], None), lambda values, _: Tree(values[0]))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: Plain(2 * x, [x, (3 * x,)]), {"logits": 2, "states.0": 1, "states.1.0": 3}),
        (lambda x: Plain(2 * x, Plain(x), 1.0), {"logits": 2, "states.logits": 1}),
        (lambda x: Pair(2 * x, x), {"first": 2, "second": 1}),
        (lambda x: {"a": 2 * x, "b": {"c": x, 5: 3 * x}}, {"a": 2, "b.c": 1, "b.5": 3}),
        (lambda x: [[2 * x], [x, [3 * x]]], {"0.0": 2, "1.0": 1, "1.1.0": 3}),
        (lambda x: (2 * x, None, "name", 3, x), {"0": 2, "4": 1}),
        (
            lambda x: Classified(logits=2 * x, hidden_states=(x, 3 * x)),
            {"logits": 2, "hidden_states.0": 1, "hidden_states.1": 3},
        ),
        (lambda x: Registered(logits=2 * x, hidden_states=(x,)), {"logits": 2, "hidden_states.0": 1}),
        (lambda x: {"a": Tree(2 * x)}, {"a.0": 2}),
        (lambda x: {"a.b": 2 * x, "a": {"b": x}}, {"a.b": 2, "a.b #2": 1}),
    ],
)
def test_tensors_have_finite_constants_under_their_names(function, expected):
    model = Function(function)
    found = gramcert.audit(model, (4,))
    assert found.reasons == ()
    assert found.outputs.keys() == expected.keys()
    for name, constant in expected.items():
        assert constant <= found.outputs[name] <= constant * (1 + torch.finfo(torch.float32).eps)
    together = math.sqrt(sum(constant**2 for constant in expected.values()))
    assert together <= found.upper <= together * (1 + torch.finfo(torch.float32).eps)
    assert gramcert.verify(found.certificate, model).holds


def test_one_tensor_keeps_the_name_of_its_node():
    assert list(gramcert.audit(Function(torch.relu), (4,)).outputs) == ["relu"]


def test_labels_are_those_of_the_parts():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x):
            return Plain(self.first(x), self.second(x))

    assert [row.name for row in gramcert.audit(Two(), (4,)).rows][:2] == ["first", "second"]


def test_one_unbounded_output_leaves_the_others_their_constants():
    found = gramcert.audit(Function(lambda x: Plain(2 * x, x * x)), (4,), measure=True)
    assert found.upper == math.inf
    assert found.outputs["logits"] < 2.001
    assert found.outputs["states"] == math.inf


def test_numbers_that_depend_on_the_input_are_unbounded_outputs():
    found = gramcert.audit(Function(lambda x: Plain(2 * x, x.sum().item())), (4,), measure=True)
    assert found.upper == math.inf
    assert found.outputs["states"] == math.inf
    assert found.outputs["logits"] < 2.001


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (Held, "Held, which is not looked into"),
        (
            lambda x: {"a": [Held(x)]},
            "Held as a.0, which is not looked into",
        ),
        (lambda x: {"a": {x}}, "set as a, which is not looked into"),
    ],
)
def test_objects_that_hold_tensors_are_unbounded(function, reason):
    assert gramcert.audit(Function(function), (4,)).reasons == (
        f"Function: it returns an object of the class {reason}",
    )


def test_results_without_an_end_are_unbounded():
    def endless(x):
        result = [x]
        result.append(result)
        return result

    assert gramcert.audit(Function(endless), (4,)).reasons == (
        "Function: it returns more than 32 lists or objects in each other",
    )
