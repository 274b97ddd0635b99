"""Lower bounds of constants by two inputs: never above the truth, and near it where that is known."""

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

import gramcert
from gramcert.auditing.reading import Source
from gramcert.operators import pairs
from gramcert.operators.evaluation import NotEvaluatedError
from gramcert.operators.network import Network
from gramcert.operators.pairs import lower_by_pairs
from tiny_onnx import Tiny

pytestmark = pytest.mark.usefixtures("whole_searches")


def network(model, shape):
    return Network("test", Source.of("test", model.eval()).graph("test", shape))


def lower(model, shape, steps=100):
    found = network(model, shape)
    return lower_by_pairs(found.plan, found.measure, steps)


def seeded(model):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model().eval()


@pytest.mark.parametrize("bias", [False, True])
def test_of_a_linear_network_it_is_the_norm(bias):
    model = seeded(lambda: nn.Sequential(nn.Linear(30, 20, bias=bias), nn.Linear(20, 10, bias=bias)))
    matrix = (model[1].weight.double() @ model[0].weight.double()).detach()
    truth = float(torch.linalg.matrix_norm(matrix, 2))
    assert truth * (1 - 1e-6) <= lower(model, (30,)) <= truth * (1 + 1e-14)


def test_of_an_isometry_it_is_below_1_by_rounding_alone():
    """The quotient of every pair is exactly 1, so whatever is not taken off for rounding would show."""
    turn = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(turn)
        model[1].weight.copy_(turn.T)
    upper = gramcert.audit(model, torch.zeros(1, 16, dtype=torch.float64)).upper
    assert 1 - 1e-10 <= lower(model, (16,)) <= upper
    assert lower(nn.Identity(), (16,)) <= 1


@pytest.mark.parametrize("name", ["ReLU", "Tanh", "GELU", "Softplus"])
def test_of_a_network_it_is_a_gain_that_its_jacobian_has(name):
    """About the largest gain at many random inputs or more, and at most the constant."""
    made = getattr(nn, name)
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 24), made(), nn.Linear(24, 24), made(), nn.Linear(24, 4)))
    points = torch.randn(200, 6, generator=torch.Generator().manual_seed(1))
    jacobians = torch.func.vmap(torch.func.jacrev(model))(points)
    gain = float(torch.linalg.matrix_norm(jacobians, 2).max().detach())
    found = gramcert.audit(model, (6,), search_seconds=0)
    assert 0.95 * gain <= found.lower <= found.upper


def test_a_convolutional_network_with_pooling_branches_and_several_outputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x):
            y = torch.relu(self.one(x))
            z = y + torch.tanh(self.two(y))
            return nn.functional.max_pool2d(z, 2), z.flatten(1).mean(1), z

    found = gramcert.audit(seeded(Two), (2, 6, 6), search_seconds=0)
    alone = gramcert.audit(seeded(Two), (2, 6, 6), search_seconds=0, output="1")
    assert 0.1 * found.upper <= found.lower <= found.upper
    assert 0 < alone.lower <= min(alone.upper, found.lower)


def test_an_output_that_is_returned_twice_counts_once():
    class Twice(nn.Module):
        def forward(self, x):
            y = 3 * x
            return y, y

    found = gramcert.audit(Twice(), (4,))
    assert 3 - 1e-9 <= found.lower <= found.upper


def test_it_is_the_same_each_time_and_for_each_file(tmp_path):
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)))
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model, (torch.zeros(1, 5),)), path)
    torch.manual_seed(1)
    first = lower(model, (5,))
    torch.manual_seed(2)
    assert lower(model, (5,)) == first == gramcert.audit(path, search_seconds=0).lower
    found = network(model, (5,))
    assert lower_by_pairs(found.plan, found.measure, 100, seed=1) != first


def test_onnx_files_have_one(tmp_path):
    matrix = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    Tiny(tmp_path, [("MatMul", ["x", matrix.T.contiguous()], {}), ("Relu", ["v0"], {})], (1, 2))
    found = gramcert.audit(tmp_path / "tiny.onnx")
    assert 4 - 1e-6 <= found.lower <= found.upper <= 4 + 1e-6


def test_large_networks_get_fewer_steps_and_pairs(monkeypatch):
    tried = []
    search = pairs._search

    def counted(graph, outputs, shape, steps, count, seed):
        tried.append((steps, count))
        return search(graph, outputs, shape, steps, count, seed)

    monkeypatch.setattr(pairs, "_search", counted)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    lower(model, (8,))
    lower(model, (8,), 10**20)
    monkeypatch.setattr(pairs, "CALL", 1)
    for work in (64 * 1000, 1):
        monkeypatch.setattr(pairs, "WORK", work)
        assert lower(model, (8,)) > 0
    assert tried[:1] + tried[2:] == [(100, 16), (100, 1), (3, 1)]
    assert 1000 < tried[1][0] < 4000  # each of which takes a millisecond or so
    assert tried[1][1] == 16


def test_inside_of_inference_mode_and_without_gradients():
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)))
    expected = gramcert.audit(model, (5,), search_seconds=0).lower
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert gramcert.audit(model, (5,), search_seconds=0).lower == expected
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_has_none():
    assert gramcert.audit(nn.ReLU(), (3,), lower_steps=0).lower is None
    assert gramcert.audit(nn.Hardshrink(), (3,)).lower is None
    assert lower(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), (3,), 1) > 0
    zero = nn.Linear(3, 2)
    nn.init.zeros_(zero.weight)
    assert gramcert.audit(zero, (3,)).lower == 0


def test_a_graph_that_cannot_be_evaluated(monkeypatch):
    def refuse(*arguments):
        raise NotEvaluatedError("no")

    monkeypatch.setattr("gramcert.auditing.entry.lower_by_pairs", refuse)
    assert gramcert.audit(nn.ReLU(), (3,)).lower is None


def test_a_refuted_constant_is_a_bug_and_no_answer(monkeypatch):
    monkeypatch.setattr("gramcert.auditing.entry.lower_by_pairs", lambda *arguments: 1.5)
    with pytest.raises(RuntimeError, match=r"so that the constant 1\.0 is refuted; this is a bug in gramcert"):
        gramcert.audit(nn.ReLU(), (3,))


def test_it_is_kept(monkeypatch, tmp_path):
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)))
    first = gramcert.audit(model, (5,), search_seconds=0, cache=tmp_path).lower
    monkeypatch.setattr("gramcert.auditing.entry.lower_by_pairs", lambda *arguments: math.nan)
    assert gramcert.audit(model, (5,), search_seconds=0, cache=tmp_path).lower == first


@pytest.mark.parametrize("steps", [-1, 1.0, True, None])
def test_bad_steps(steps):
    with pytest.raises(ValueError, match=r"audit\(lower_steps=.*\): expected an int that is not negative"):
        gramcert.audit(nn.ReLU(), (3,), lower_steps=steps)


def test_a_quotient_is_below_the_exact_one_whatever_its_values_are_off_by():
    """In fractions: ends, values that are off by no more than said, and a quotient of their exact squares."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        ends, one, two = (torch.randn(2, n, generator=generator, dtype=torch.float64) for n in (5, 3, 4))
        off = [torch.rand(2, generator=generator, dtype=torch.float64) / 10 for _ in range(2)]
        found = pairs._quotient(ends, [(one, off[0]), (two, off[1])], 0, 1)
        apart = [
            math.dist(*values.tolist()) - float(distances.sum())
            for values, distances in zip((one, two), off, strict=True)
        ]
        expected = math.hypot(*(max(0.0, part) for part in apart)) / math.dist(*ends.tolist())
        assert expected * (1 - 1e-12) <= found <= expected * (1 + 1e-12)
        exact = pairs._quotient(ends, [(one, torch.zeros(2)), (two, torch.zeros(2))], 0, 1)
        square = squared(one) + squared(two)
        below = Fraction(exact) ** 2 * squared(ends)
        assert below <= square <= below * (1 + Fraction(1, 10**12))


def squared(both):
    """The exact square of a distance."""
    return sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(*both.tolist(), strict=True))


def test_ends_that_are_one_point_prove_nothing():
    ends, values = torch.zeros(2, 3, dtype=torch.float64), torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    assert pairs._quotient(ends, [(values, torch.tensor([0.5, 0.5]))], 0, 1) == 0
    infinite = torch.tensor([[math.inf], [1.0]], dtype=torch.float64)
    apart = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    assert pairs._quotient(apart, [(infinite, torch.zeros(2))], 0, 1) == 0
