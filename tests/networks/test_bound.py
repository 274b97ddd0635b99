"""Forms against networks whose slopes are chosen as badly as possible, and against constants that are known."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gramcert
from gramcert.auditing.reading import Source
from gramcert.networks import increments
from gramcert.networks.bound import Forms, bound_by_forms, is_proved_by
from gramcert.networks.search import Budget
from networks.drawn import dense_networks, image_networks
from networks.frozen import largest_gain

ROUNDING = 1e4 * torch.finfo(torch.float64).eps


def graph_of(model, shape):
    return Source.of("audit", model).graph("audit", shape).needed()


def forms_of(model, shape, passes=30):
    return bound_by_forms(graph_of(model, shape), Budget(passes=passes))


# Each is traced and audited, which takes a second; in seven tests, 5,250 with `make test-slow`.
EXAMPLES = 15 if settings.default.max_examples <= 80 else 750

# Ways that only large networks take, forced on small ones.
IMAGES = {"increments.SMALL_NETWORK": 0}
DESCRIBED = {
    "images": IMAGES,
    "cut at strides": IMAGES | {"coupling.WORTH_COUPLING": 0.0},
    "cut wherever it can be": IMAGES | {"bound.MOST_COUPLED": 0.0, "coupling.WORTH_COUPLING": 0.0},
    "cells": IMAGES | {"program.MANY_FREQUENCIES": 0, "program.MOST_CELLS": 2**40, "proof.MOST_CELLS": 2**15},
    "few frequencies, wide matrices": IMAGES
    | {"bound.SEARCHED": 3, "bound.LEAST_SEARCHED": 2, "elimination.WIDE": 0, "elimination.BATCH_ENTRIES": 50},
    "vectors": {},
}


def describe(patched, described):
    for name, value in DESCRIBED[described].items():
        patched.setattr(f"gramcert.networks.{name}", value)


class TestAreAboveTheTruth:
    @given(drawn=dense_networks())
    @settings(max_examples=EXAMPLES)
    def test_dense(self, drawn):
        model, shape = drawn
        found = gramcert.audit(model, shape)
        assert largest_gain(model, shape) <= found.upper * (1 + ROUNDING)
        assert found.upper <= found.product

    @pytest.mark.parametrize("described", sorted(DESCRIBED))
    @given(drawn=image_networks())
    @settings(max_examples=EXAMPLES)
    def test_images(self, described, drawn):
        model, shape = drawn
        with pytest.MonkeyPatch.context() as patched:
            describe(patched, described)
            found = gramcert.audit(model, shape, tol=1e-2)
        assert largest_gain(model, shape) <= found.upper * (1 + ROUNDING)
        assert found.upper <= found.product


@pytest.mark.usefixtures("whole_searches")
class TestAreTight:
    def test_of_two_directions_that_do_not_meet(self):
        """Norms see 2·3, but what one layer stretches the next one does not."""
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).double()
        with torch.no_grad():
            model[0].weight.copy_(torch.diag(torch.tensor([2.0, 0.5])))
            model[2].weight.copy_(torch.diag(torch.tensor([0.5, 3.0])))
        found = gramcert.audit(model, (2,))
        assert found.product == pytest.approx(6.0, rel=2e-3)
        assert 1.5 <= found.upper <= 1.5 * (1 + 1e-3)

    def test_of_one_hidden_layer(self):
        """Among all patterns of slopes 0 and 1 the worst is within a few per cent for a small network."""
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1)).double()
        one, two = model[0].weight.detach(), model[2].weight.detach()
        patterns = itertools.product((0.0, 1.0), repeat=6)
        truth = max(
            float(torch.linalg.matrix_norm(two * torch.tensor(p, dtype=torch.float64) @ one, 2)) for p in patterns
        )
        found = gramcert.audit(model, (4,))
        assert truth <= found.upper <= 1.05 * truth < found.product

    def test_the_optimum_is_reached(self):
        """Of diagonal layers the constant is the largest product along one unit."""
        torch.manual_seed(2)
        weights = torch.rand(3, 5, dtype=torch.float64) + 0.1
        layers = [nn.Linear(5, 5, bias=False) for _ in range(3)]
        model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).double()
        with torch.no_grad():
            for layer, row in zip(layers, weights, strict=True):
                layer.weight.copy_(torch.diag(row))
        truth = float(weights.prod(0).max())
        assert truth <= gramcert.audit(model, (5,)).upper <= truth * (1 + 1e-5)

    def test_a_residual_block_is_not_the_triangle_inequality(self):
        """x - relu(x)/2 has slopes between ½ and 1; norms see 3/2."""

        class Half(nn.Module):
            def forward(self, x):
                return x - 0.5 * torch.relu(x)

        found = gramcert.audit(Half(), (3,))
        assert found.product == pytest.approx(1.5)
        assert 1 <= found.upper <= 1 + 1e-4

    def test_linear_branches_of_one_value_are_one_map(self):
        class Centred(nn.Module):
            def forward(self, x):
                return x - 2 * x.mean(1, keepdim=True)

        found = gramcert.audit(Centred(), (4,))
        assert found.product == pytest.approx(3.0, rel=1e-3)
        assert 1 <= found.upper <= 1 + 1e-4


class TestWindows:
    """Zero padding on the lattice."""

    def test_a_leaky_slope_outside_of_the_window_would_be_wrong(self, monkeypatch):
        """The window cuts: with slopes [½, 1] also outside of it the bound would fall below the truth."""
        monkeypatch.setattr(increments, "SMALL_NETWORK", 0)
        torch.manual_seed(0)
        for seed in range(5):
            torch.manual_seed(seed)
            model = nn.Sequential(
                nn.Conv1d(1, 3, 3, padding=1), nn.LeakyReLU(0.9), nn.Conv1d(3, 3, 3, padding=1), nn.LeakyReLU(0.9)
            ).double()
            found = gramcert.audit(model, (1, 4))
            truth = float(torch.linalg.matrix_norm(_jacobian(nn.Sequential(model[0], model[2]), (1, 4)), 2))
            assert truth <= found.upper

    @pytest.mark.parametrize("size", [2, 3, 5])
    @pytest.mark.parametrize("padding", [0, 1, 2, 4])
    def test_nothing_comes_round_the_torus(self, monkeypatch, size, padding):
        monkeypatch.setattr(increments, "SMALL_NETWORK", 0)
        torch.manual_seed(size + padding)
        model = nn.Sequential(
            nn.Conv1d(2, 2, 3, padding=max(1, padding)), nn.ReLU(), nn.Conv1d(2, 2, 2, padding=padding)
        ).double()
        with torch.no_grad():
            for part in (model[0], model[2]):
                part.weight.abs_()  # all slopes 1 is the worst
        truth = float(torch.linalg.matrix_norm(_jacobian(nn.Sequential(model[0], model[2]), (2, size)), 2))
        assert truth <= gramcert.audit(model, (2, size)).upper


def _jacobian(model, shape):
    x = torch.zeros(1, *shape, dtype=torch.float64)
    return torch.autograd.functional.jacobian(lambda x: model(x).flatten(), x).flatten(1)


class TestProof:
    def network(self, seed=0):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).double()

    def test_exact_rationals_agree(self):
        """P with the multipliers as fractions is positive definite, by its minors."""
        model = self.network()
        forms = forms_of(model, (2,))
        rho, lam = (list(map(Fraction, part.tolist())) for part in forms.multipliers)
        one, two = ([list(map(Fraction, row)) for row in model[i].weight.tolist()] for i in (0, 2))
        rows = [[Fraction(0)] * 5 for _ in range(5)]
        for i in range(2):
            rows[i][i] += rho[0]
        for unit in range(3):
            rows[2 + unit][2 + unit] += 2 * lam[unit]
            for i in range(2):
                rows[2 + unit][i] -= lam[unit] * one[unit][i]
                rows[i][2 + unit] -= lam[unit] * one[unit][i]
            for other in range(3):
                rows[2 + unit][2 + other] -= sum(row[unit] * row[other] for row in two)
        assert all(_determinant([row[:n] for row in rows[:n]]) > 0 for n in range(1, 6))

    @pytest.mark.parametrize("part", [1e-3, 1e-6, 1e-9])
    def test_less_than_the_truth_is_never_proved(self, part):
        """A network of one unit: x ↦ 3·relu(2x), whose constant is 6."""
        model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)).double()
        with torch.no_grad():
            model[0].weight.fill_(2.0)
            model[2].weight.fill_(3.0)
        graph = graph_of(model, (1,))
        for weight in (4.5, 9.0, 9.0 * (1 + 1e-6), 18.0):
            multipliers = [torch.tensor([36.0 * (1 - part)], dtype=torch.float64), torch.tensor([weight]).double()]
            assert not is_proved_by(graph, multipliers, [False])

    @pytest.mark.parametrize(
        "change",
        [
            lambda m: [m[0] * 0.5, m[1]],
            lambda m: [m[0], m[1] * 0],
            lambda m: [m[0], -m[1]],
            lambda m: [m[0], m[1] * math.nan],
            lambda m: [m[0] * math.inf, m[1]],
            lambda m: [m[0], m[1][:2]],
            lambda m: [m[0]],
            lambda m: [m[0], m[1].float()],
            lambda m: [m[0] * 1e-300, m[1] * 1e-300],
        ],
    )
    def test_other_multipliers_prove_nothing(self, change):
        model = self.network()
        graph = graph_of(model, (2,))
        forms = bound_by_forms(graph, Budget(passes=5))
        assert is_proved_by(graph, list(forms.multipliers), list(forms.shifts))
        assert not is_proved_by(graph, change(list(forms.multipliers)), list(forms.shifts))

    @pytest.mark.parametrize(
        ("low", "high", "first", "last", "multipliers"),
        [
            (-1e-170, 1e-170, 1.0, 1e120, ([1e-120], [1e260], [1e241])),
            (0.0, 1e-20, 1e100, 1e-154, ([1e-168], [3e-308], [2e-308])),
        ],
        ids=["a product of slopes", "a slope times a multiplier"],
    )
    def test_what_underflow_makes_of_relations_proves_nothing(self, low, high, first, last, multipliers):
        """Their weights would be 0, and the relation would say that nothing comes out."""

        class Masked(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("mask", torch.tensor([low, high], dtype=torch.float64))
                self.one, self.two = (nn.Conv1d(1, 1, 1, bias=False).double() for _ in range(2))
                nn.init.constant_(self.one.weight, first)
                nn.init.constant_(self.two.weight, last)

            def forward(self, x):
                return self.two(torch.relu(self.mask * self.one(x)))

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(increments, "SMALL_NETWORK", 0)
            graph = graph_of(Masked(), (1, 2))
            program = increments.program_of(graph)
            assert [v.relation.multipliers for v in program.variables] == [1, 1, 1]
            given = [torch.tensor(part, dtype=torch.float64) for part in multipliers]
            assert not is_proved_by(graph, given, [False])

    def test_shifts_have_to_fit(self):
        model = self.network()
        graph = graph_of(model, (2,))
        forms = bound_by_forms(graph, Budget(passes=5))
        for shifts in ([True], [], [False, False]):
            assert not is_proved_by(graph, list(forms.multipliers), shifts)


def _determinant(rows):
    if not rows:
        return Fraction(1)
    total = Fraction(0)
    for column, value in enumerate(rows[0]):
        minor = [row[:column] + row[column + 1 :] for row in rows[1:]]
        total += (-1) ** column * value * _determinant(minor)
    return total


class TestRefusals:
    @pytest.mark.parametrize(
        ("model", "shape", "reason"),
        [
            (nn.Sequential(nn.Linear(3, 2)), (3,), "norms say all"),
            (nn.Sequential(nn.Linear(140000, 2), nn.ReLU(), nn.Linear(2, 2)), (140000,), "140000 entries"),
        ],
    )
    def test_say_why(self, model, shape, reason):
        found = forms_of(model.double(), shape)
        assert found.upper == math.inf
        assert reason in found.reason

    def test_nothing_is_said_that_is_not_below_the_product(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).double()
        found = bound_by_forms(graph_of(model, (2,)), Budget(passes=5), below=1e-9)
        assert found == Forms(reason="the product of norms is not larger") or found.upper == math.inf


class TestSearch:
    def test_goes_on_from_where_it_was(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).double()
        graph, kept = graph_of(model, (8,)), []
        first = bound_by_forms(graph, Budget(passes=10), keep=kept.append)
        again = bound_by_forms(graph, Budget(passes=10), start=lambda: kept[-1])
        fresh = bound_by_forms(graph, Budget(passes=0))
        assert again.upper <= first.upper * (1 + 1e-9) < fresh.upper

    def test_frequencies_that_the_search_did_not_see_are_proved_too(self, monkeypatch):
        """Far fewer than there are: multipliers grow until they hold at all of them."""
        monkeypatch.setattr(increments, "SMALL_NETWORK", 0)
        torch.manual_seed(0)
        layers = [part for _ in range(4) for part in (nn.Conv1d(3, 3, 3, padding=1), nn.ReLU())]
        model = nn.Sequential(*layers).double()
        whole = bound_by_forms(graph_of(model, (3, 40)), Budget(passes=60)).upper
        monkeypatch.setattr("gramcert.networks.bound.SEARCHED", 3)
        some = bound_by_forms(graph_of(model, (3, 40)), Budget(passes=60)).upper
        assert whole <= some * (1 + 1e-3) < 3 * whole

    def test_the_clock_ends_it(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
        ticks = itertools.count()
        budget = Budget(seconds=6, clock=lambda: float(next(ticks)))
        bound_by_forms(graph_of(model, (8,)), budget)
        assert budget.done <= 6

    def test_progress_is_told(self):
        told = []
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
        bound_by_forms(graph_of(model, (8,)), Budget(passes=5, report=lambda *facts: told.append(facts)))
        searched = [(done, total) for what, done, total in told if what.startswith("forms: ")]
        assert searched
        assert all(done <= total == 5 for done, total in searched)
        assert told[-1] == ("proof of the forms", 1, 1)

    @given(seed=st.integers(0, 100))
    @settings(max_examples=5)
    def test_a_longer_search_is_not_worse(self, seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).double()
        short, long = (forms_of(model, (4,), passes) for passes in (0, 40))
        assert long.upper <= short.upper * (1 + 1e-7)
