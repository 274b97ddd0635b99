"""Parts of one value count once; the larger and the smaller of the same two values are a sorting of both."""

import math

import pytest
import torch
from torch import nn

import gramcert
from auditing_cases import assert_constant, function
from auditing_networks import Function


def extrema(x, join):
    first, second = x.chunk(2, 1)
    return join(torch.maximum(first, second), torch.minimum(second, first))


def interleaved(x):
    first, second = x[:, ::2], x[:, 1::2]
    return torch.stack([torch.maximum(first, second), torch.minimum(first, second)], 2).flatten(1, 2)


def along_axis(x, join):
    pairs = x.unflatten(1, (2, 2))
    return join(pairs.max(2).values, pairs.min(2).values)


def amax(x):
    pairs = x.unflatten(1, (2, 2))
    return torch.cat([pairs.amin(2), pairs.amax(2, keepdim=True).flatten(1, 2)], 1)


ONE = {
    "chunks side by side": lambda x: extrema(x, lambda a, b: torch.cat([a, b], 1)),
    "smaller first": lambda x: extrema(x, lambda a, b: torch.cat([b, a], 1)),
    "chunks stacked": lambda x: extrema(x, lambda a, b: torch.stack([a, b], 1)),
    "interleaved": interleaved,
    "along an axis": lambda x: along_axis(x, lambda a, b: torch.stack([a, b], 2).flatten(1, 2)),
    "by amax": amax,
    "largest and smallest of all": lambda x: torch.stack([x.amax(1), x.amin(1)], 1),
    "the larger alone": lambda x: torch.maximum(x[:, ::2], x[:, 1::2]),
    "written into slices": lambda x: torch.slice_scatter(
        torch.slice_scatter(torch.zeros_like(x), extrema(x, lambda a, b: a), 1, 0, 4, 2),
        extrema(x, lambda a, b: b), 1, 1, 4, 2,
    ),
    "parts in another order": lambda x: torch.cat([x[:, 2:].reshape(1, 2, 6), x.transpose(1, 2)[:, :, :2].mT], 1),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE)
def test_sorted_pairs_and_parts_have_constant_one(name):
    """Finite."""
    found = assert_constant(function(ONE[name]), (4, 6), 1.0, reached=1 - 1e-12)
    assert found.upper == 1


TWO = {
    "with another value between": lambda x: extrema(x, lambda a, b: torch.cat([a, torch.tanh(x), b], 1)),
    "parts around another value": lambda x: torch.cat([x[:, :2], torch.tanh(x), x[:, 2:]], 1),
    "the larger twice": lambda x: extrema(x, lambda a, b: torch.cat([a, a], 1)),
    "of one entry": lambda x: torch.cat([x[:, :1].amax(1), x[:, :1].amin(1)], 1),
}


@pytest.mark.parametrize("name", TWO)
def test_what_occurs_twice_counts_twice(name):
    """Finite: √2."""
    assert_constant(function(TWO[name]), (4, 6), math.sqrt(2), scale=1e-4, reached=1 - 1e-6)


def test_extrema_of_two_values():
    """Finite: √(1² + 1²) for each, which their sorting keeps."""

    def both(x):
        first, second = torch.relu(x), torch.tanh(x)
        return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], 1)

    assert_constant(function(both), (4, 6), math.sqrt(2), scale=1e-2, reached=1 - 1e-3)


class Parts(nn.Module):
    """Returns parts of a linear layer."""

    def __init__(self, take):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.take = nn.Linear(6, 6, dtype=torch.float64), take

    def forward(self, x):
        return self.take(self.layer(x))


def norm(matrix):
    return float(torch.linalg.matrix_norm(matrix.detach(), 2))


def test_outputs_that_are_parts_of_one_value_count_once():
    """Finite: the norm of the whole layer, not √3 times that of its parts."""
    model = Parts(lambda y: tuple(y.chunk(3, 1))).eval()
    found, truth = gramcert.audit(model, (6,)), norm(model.layer.weight)
    assert truth <= found.upper <= truth * (1 + 1e-2)
    assert len(found.outputs) == 3
    for rows, constant in zip(model.layer.weight.chunk(3), found.outputs.values(), strict=True):
        assert norm(rows) <= constant <= norm(rows) * (1 + 1e-2)
    assert gramcert.verify(found.certificate, model).holds


def test_outputs_with_common_entries_count_them_as_often():
    """Finite."""
    model = Parts(lambda y: (y[:, :4], torch.relu(y), y[:, 2:])).eval()
    found, weight = gramcert.audit(model, (6,)), model.layer.weight
    # Active everywhere, the ReLU repeats all entries once more.
    truth = norm(torch.cat([weight[:4], weight, weight[2:]]))
    assert truth <= found.upper <= math.sqrt(3) * norm(weight) * (1 + 1e-2)
    assert gramcert.verify(found.certificate, model).holds


def test_an_unbounded_part_is_unbounded():
    found = gramcert.audit(Function(lambda x: tuple(x.exp().chunk(2, 1))), (4,))
    assert found.upper == math.inf
