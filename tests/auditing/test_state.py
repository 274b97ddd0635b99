"""Models that are no function of their input alone, and those that only look so."""

import functools
import itertools
import random
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramcert
from auditing_networks import expect
from gramcert.auditing.state import kept
from gramcert.geometry.recognition import random_state
from reference import sigma

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.export


class Model(nn.Module):
    """A function of the module itself and the input, with attributes."""

    count, table = 0, {"calls": 0}

    def __init__(self, function, **attributes):
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.function(self, x)


def count(self, x):
    self.n += 1
    return x * self.n


def count_late(self, x):
    self.n += 1
    return x if self.n < 100 else 9 * x


def count_in_list(self, x):
    self.n.append(1)
    return x * len(self.n)


def count_in_dict(self, x):
    self.n["calls"] += 1
    return x * self.n["calls"]


def count_in_object(self, x):
    self.n.calls += 1
    return x * self.n.calls


def count_by_iterator(self, x):
    return x * next(self.n)


def count_in_class(self, x):
    Model.count += 1
    return x * Model.count


def count_in_table_of_class(self, x):
    Model.table["calls"] += 1
    return x


def count_around():
    calls = 0

    def function(self, x):
        nonlocal calls
        calls += 1
        return x * calls

    return function


def differ_at_the_second_call(self, x):
    y = x if self.n else 9 * x
    self.n = True
    return y


def add_what_was_given_before(self, x):
    y = x + self.n
    self.n = x
    return y


def add_what_was_given_before_if_any(self, x):
    y = x if self.n is None else x + self.n
    self.n = x
    return y


def draw_a_branch(self, x):
    return 9 * x if random.random() < 0.5 else x


def draw_by_numpy(self, x):
    return x * float(np.random.rand())  # noqa: NPY002 - the generator that all share


CALLS = 0


class Counting(nn.Module):
    def forward(self, x):
        global CALLS
        CALLS += 1
        return x * CALLS


class Holder:
    calls = 0


class ByDefault(nn.Module):
    def forward(self, x, calls=[0]):  # noqa: B006
        calls[0] += 1
        return x


class ByProperty(nn.Module):
    @property
    def factor(self):
        global CALLS
        CALLS += 1
        return 1.0

    def forward(self, x):
        return x * self.factor


def decorated(function):
    @functools.wraps(function)
    def inner(*arguments):
        global CALLS
        CALLS += 1
        return function(*arguments)

    return inner


class ByDecorator(nn.Module):
    @decorated
    def forward(self, x):
        return x


CHANGING = {
    "default": (ByDefault, ": __defaults__ of ByDefault.forward"),
    "property": (ByProperty, ": the variable CALLS of "),
    "decorator": (ByDecorator, ": the variable CALLS of "),
    "attribute": (lambda: Model(count, n=0), "what it keeps when it is called: n"),
    "attribute of a part": (lambda: nn.Sequential(nn.Identity(), nn.Sequential(Model(count, n=0))), ": 1.0.n"),
    "attribute that counts later": (lambda: Model(count_late, n=0), ": n"),
    "list": (lambda: Model(count_in_list, n=[]), ": n"),
    "dict": (lambda: Model(count_in_dict, n={"calls": 0}), ": n"),
    "object": (lambda: Model(count_in_object, n=Holder()), ": n"),
    "iterator": (lambda: Model(count_by_iterator, n=itertools.count()), ": n"),
    "class": (lambda: Model(count_in_class), ": Model.count"),
    "dict of a class": (lambda: Model(count_in_table_of_class), ": Model.table"),
    "global variable": (Counting, ": the variable CALLS of "),
    "closure": (lambda: Model(count_around()), ": function"),
    "second call": (lambda: Model(differ_at_the_second_call, n=False), "something else when it is called again"),
    "earlier input": (
        lambda: Model(add_what_was_given_before, n=torch.zeros(1, 4)),
        "something else when it is called again",
    ),
    "earlier input, if any": (
        lambda: Model(add_what_was_given_before_if_any, n=None),
        "something else when it is called again",
    ),
    "random numbers of Python": (lambda: Model(lambda self, x: x * random.random()), "random numbers"),
    "random branches": (lambda: Model(draw_a_branch), "random numbers"),
    "random numbers of NumPy": (lambda: Model(draw_by_numpy), "random numbers"),
    "own random numbers": (lambda: Model(lambda self, x: x * self.n.random(), n=random.Random(0)), ": n"),
    "time": (lambda: Model(lambda self, x: x * (time.perf_counter_ns() % 2**24)), "something else"),
}


@pytest.mark.parametrize("name", CHANGING)
def test_models_that_change_have_no_constant(name):
    build, reason = CHANGING[name]
    expect(gramcert.audit(build().eval(), (4,)), reason)


def remember_the_shape(self, x):
    self.shape, self.sides = x.shape, list(x.shape[1:])
    return 2 * x


def remember_the_device(self, x):
    self.n = {"device": x.device, "dtype": x.dtype}
    return 2 * x


def remember_the_input(self, x):
    self.seen, self.all_seen = x, [x]
    return 2 * x


def write_the_same(self, x):
    self.n = {"factor": 2, "nan": float("nan")}
    return self.n["factor"] * x


def compute_once(self, x):
    if self.n is None:
        self.n = 1 + 1
    return self.n * x


STEADY = {
    "shape": lambda: Model(remember_the_shape),
    "device": lambda: Model(remember_the_device),
    "input": lambda: Model(remember_the_input, seen=None, all_seen=[]),
    "same value": lambda: Model(write_the_same, n=None),
    "computed once": lambda: Model(compute_once, n=None),
    "itself": lambda: Model(lambda self, x: 2 * x, n=[Holder, Holder(), lambda: None, iter([1]), {1, 2}]),
}


@pytest.mark.parametrize("name", STEADY)
def test_models_that_only_remember_have_their_constant(name):
    model = STEADY[name]()
    found = gramcert.audit(model, (4,))
    expect(found, 2.0)
    assert gramcert.verify(found.certificate, model).holds


def test_the_model_itself_is_not_called():
    model = Model(count, n=0)
    before = kept(model, []), random_state()
    gramcert.audit(model, (4,))
    assert (kept(model, []), random_state()) == before
    assert model.n == 0


def test_what_contains_itself_is_looked_at_once():
    model = Model(count, n=[])
    model.n.append(model.n)
    before = kept(model, [])
    model.n.append(1)
    assert kept(model, [])["n"] != before["n"]


def test_models_that_cannot_be_called_twice_are_refused():
    def once(self, x):
        self.n.pop()
        return x

    expect(gramcert.audit(Model(once, n=[1]), (4,)), r"it cannot be called twice \(IndexError\)")


def test_what_is_shared_is_looked_at_once():
    """Of sixty lists, each of which holds the one before twice, there are 2⁶⁰ ways to the first."""
    shared = [0]
    for _ in range(60):
        shared = [shared, shared]
    model = Model(remember_the_shape, n=shared)
    before = kept(model, [])
    assert kept(model, []) == before
    while isinstance(shared[0], list):
        shared = shared[0]
    shared[0] = 1
    assert kept(model, []) != before


class Changing(nn.Module):
    """Its buffers are other ones after each call."""

    def __init__(self, way):
        super().__init__()
        self.register_buffer("a", torch.ones(4))
        self.register_buffer("b", self.a.view(4))
        self.way = way

    def forward(self, x):
        y = x * self.b
        if self.way == "in place":
            self.a.mul_(50.0)
        elif self.way == "through a view":
            self.a[:2].mul_(50.0)
        else:
            self.a = self.a * 50.0
        return y


@pytest.mark.parametrize("way", ["in place", "through a view", "assigned"])
def test_models_that_change_their_buffers_are_unbounded(way, tmp_path):
    torch.export.save(torch.export.export(Changing(way), (torch.zeros(1, 4),)), tmp_path / "model.pt2")
    for model in (Changing(way), tmp_path / "model.pt2"):
        expect(gramcert.audit(model, (4,)), "changes its own")


class RandomWeight(nn.Module):
    def forward(self, weight):
        return F.dropout(weight, 0.5, self.training)


def test_random_weights_are_unbounded():
    layer = nn.utils.parametrize.register_parametrization(nn.Linear(4, 4), "weight", RandomWeight())
    expect(gramcert.audit(layer.train(), (4,)), "its parametrisation of weight gives another one each time")
    expect(gramcert.audit(layer.eval(), (4,)), float(sigma(layer.weight.detach().double())), 1e-3)
