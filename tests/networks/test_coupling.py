"""Where components end, and what their elimination costs."""

import pytest
import torch
from torch import nn

import gramcert
from gramcert.auditing.reading import Source
from gramcert.networks import increments
from gramcert.networks.bound import Costs, bound_by_forms
from gramcert.networks.pattern import Pattern
from gramcert.networks.search import Budget
from networks.drawn import Block
from networks.frozen import Slope, largest_gain

ROUNDING = 1e4 * torch.finfo(torch.float64).eps


@pytest.fixture(autouse=True)
def images(monkeypatch):
    monkeypatch.setattr(increments, "SMALL_NETWORK", 0)


def graph_of(model, shape):
    return Source.of("audit", model.double().eval()).graph("audit", shape).needed()


def components(model, shape, most):
    found = increments.program_of(graph_of(model, shape), most)
    return [[found.order(v) for v in component.variables] for component in found.components]


def residual(channels=4):
    def inner():
        return nn.Sequential(nn.Conv2d(channels, 2, 1), Slope("relu"), nn.Conv2d(2, channels, 3, padding=1))

    torch.manual_seed(0)
    return nn.Sequential(*(Block(inner(), nn.Identity(), Slope("relu"), 1) for _ in range(3)))


class TestComponentsEnd:
    def test_between_blocks_and_not_within_them(self):
        assert components(residual(), (4, 6, 6), 1e12) == [[4, 2, 4, 2, 4, 2, 4]]
        assert components(residual(), (4, 6, 6), 0.0) == [[4, 2, 4]] * 3

    def test_not_before_what_begins_another_one_anyway(self):
        model = nn.Sequential(
            *(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4), nn.ReLU(), nn.Linear(4, 2)),
        )
        assert components(model, (1, 6, 6), 0.0) == [[1, 2], [2, 2], [18, 4]]

    def test_once_for_all_that_read_a_value_with_a_stride(self, monkeypatch):
        """The block and its shortcut read the same phases."""
        monkeypatch.setattr("gramcert.networks.coupling.WORTH_COUPLING", 0.0)
        inner = nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1))
        model = nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), Block(inner, nn.Conv2d(2, 3, 1, stride=2), nn.ReLU(), 1)
        )
        assert components(model, (1, 8, 8), 1e12) == [[1, 2], [8, 3, 3]]

    def test_of_values_that_are_read_much_later(self):
        """As in a U: what is kept for the way back is cut off once."""

        class Back(nn.Module):
            def __init__(self):
                super().__init__()
                self.down, self.low = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
                self.up, self.end = nn.ConvTranspose2d(2, 2, 2, stride=2), nn.Conv2d(4, 1, 3, padding=1)
                self.slopes = nn.ModuleList(Slope("relu") for _ in range(2))
                self.pool = nn.AvgPool2d(2)

            def forward(self, x):
                first = self.slopes[0](self.down(x))
                low = self.slopes[1](self.low(self.pool(first)))
                return self.end(torch.cat([self.up(low), first], 1))

        torch.manual_seed(0)
        model = Back()
        for most in (1e12, 0.0):
            found = increments.program_of(graph_of(model, (1, 8, 8)), most)
            assert len(found.components) == (1 if most else 2)
        truth = largest_gain(model, (1, 8, 8))
        for most in (1e12, 0.0):
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr("gramcert.networks.bound.MOST_COUPLED", most)
                found = bound_by_forms(graph_of(model, (1, 8, 8)), Budget(passes=20)).upper
            assert truth <= found * (1 + ROUNDING) < 4 * truth


class TestPaddings:
    """A torus of circular padding is no other one."""

    def model(self, *modes):
        torch.manual_seed(1)
        layers = [(nn.Conv2d(2, 2, 3, padding=1, padding_mode=mode), Slope("relu")) for mode in modes]
        return nn.Sequential(*(part for pair in layers for part in pair))

    def test_of_different_kinds_begin_components(self):
        found = increments.program_of(graph_of(self.model("circular", "zeros", "zeros", "circular"), (2, 6, 6)))
        assert [(part.sizes, part.is_circular) for part in found.components] == [
            ((6, 6), True),
            ((7, 7), False),
            ((6, 6), True),
        ]

    @pytest.mark.parametrize("modes", [("circular", "zeros"), ("zeros", "circular", "reflect", "circular")])
    @pytest.mark.parametrize("is_residual", [False, True])
    def test_are_bounded_together(self, modes, is_residual):
        """Also where a shortcut couples both: then circular padding goes by its norm."""
        model = self.model(*modes)
        model = Block(model, nn.Identity(), nn.Identity(), 1) if is_residual else model
        found = bound_by_forms(graph_of(model, (2, 5, 5)), Budget(passes=40)).upper
        truth = largest_gain(model, (2, 5, 5))
        assert truth <= found * (1 + ROUNDING) < 12 * truth


class TestManyFrequencies:
    """More than are looked at one by one."""

    def test_cells_hold_at_every_size(self):
        """The same multipliers, whose cells know nothing of the size."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), Slope("relu"), nn.Conv1d(2, 1, 3, padding=1)).double()
        with torch.no_grad():
            for part in (model[0], model[2]):
                part.weight.abs_()  # all slopes 1 is the worst
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("gramcert.networks.program.MANY_FREQUENCIES", 0)
            small, large = (bound_by_forms(graph_of(model, (1, n)), Budget(passes=60)).upper for n in (4, 60))
        truth = largest_gain(model, (1, 60))
        assert truth <= small < 1.02 * truth
        assert truth <= large < 1.02 * truth

    def test_large_images_have_cells(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 1, 3, padding=1))
        graph = graph_of(model, (1, 200, 200))
        (component,) = increments.program_of(graph).components
        assert component.has_cells
        small = bound_by_forms(graph_of(model, (1, 60, 60)), Budget(passes=20)).upper
        assert small * 0.98 < bound_by_forms(graph, Budget(passes=20)).upper < small * 1.05

    @pytest.mark.parametrize(
        ("model", "shape"),
        [
            (nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv3d(2, 1, 3, padding=1)), (1, 26, 26, 26)),
            (
                nn.Sequential(
                    nn.Conv2d(1, 2, 3, padding=6, dilation=6), nn.ReLU(), nn.Conv2d(2, 1, 3, padding=6, dilation=6)
                ),
                (1, 130, 130),
            ),
        ],
        ids=["three axes", "long lags"],
    )
    def test_are_listed_where_cells_would_be_more(self, model, shape):
        graph = graph_of(model, shape)
        (component,) = increments.program_of(graph).components
        assert component.count > 8192
        assert not component.has_cells
        assert bound_by_forms(graph, Budget(passes=0)).upper < float("inf")


def test_lags_are_those_of_the_taps():
    torch.manual_seed(0)
    layers = [
        *(nn.Conv2d(1, 2, (5, 3), padding=(2, 0)), nn.ReLU(), nn.Conv2d(2, 2, 3, stride=(2, 3), padding=1), nn.ReLU()),
        *(nn.ConvTranspose2d(2, 1, 4, stride=2, padding=1), nn.ReLU(), nn.Conv2d(1, 1, 2, dilation=2)),
    ]
    found = increments.program_of(graph_of(nn.Sequential(*layers), (1, 12, 18)))
    (component,) = found.components
    largest = [1, 1]
    for v, variable in enumerate(found.variables):
        for term in variable.relation.terms:
            ranges = found.taps(term).ranges
            assert [(r.start, r.stop - 1) for r in ranges] == term.filter.lags(
                tuple(
                    t if term.filter.adjoint else t // s
                    for t, s in zip(component.phases[term.variable], term.filter.stride, strict=True)
                )
            )
            largest = [max(n, -r.start, r.stop - 1) for n, r in zip(largest, ranges, strict=True)]
        assert v in component.variables
    assert all(a >= b for a, b in zip(component.degrees, largest, strict=True))


def test_branches_that_begin_with_zeros():
    """Their variables do not occur."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 3, padding=1, bias=False))
    nn.init.zeros_(inner[2].weight)
    model = nn.Sequential(Block(inner, nn.Identity(), nn.Identity(), 1), nn.Conv2d(2, 2, 1), nn.ReLU())
    found = bound_by_forms(graph_of(model, (2, 5, 5)), Budget(passes=20)).upper
    truth = float(torch.linalg.matrix_norm(model[1].weight.detach().flatten(1), 2))
    assert truth <= found * (1 + ROUNDING) <= 1.01 * truth


class TestWideValues:
    def test_of_many_entries_have_forms(self):
        """More than a matrix of all of them could have."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20000, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
        found = gramcert.audit(model.double(), (20000,), search_seconds=1)
        chained = torch.linalg.multi_dot([model[i].weight.detach() for i in (4, 2, 0)])
        assert float(torch.linalg.matrix_norm(chained, 2)) <= found.upper < found.product

    def test_of_maps_that_are_too_large_their_norm_is_used(self, monkeypatch):
        """The norm that was measured, which the certificate claims too."""
        monkeypatch.setattr(increments, "MOST_MATRIX", 300)
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(72, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)),
        ).double()
        found = gramcert.audit(model, (1, 6, 6))
        assert found.upper < found.product
        assert gramcert.verify(found.certificate, model).holds
        without = bound_by_forms(graph_of(model, (1, 6, 6)), Budget(passes=40)).upper
        assert found.upper < without / 1.5


class TestPattern:
    def pattern(self, model, shape):
        found = increments.program_of(graph_of(model, shape))
        return Pattern(found, found.components[0])

    def test_wide_diagonals_go_first(self):
        """The ends of a block with a narrow inside never fill."""
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Conv2d(64, 2, 1), nn.ReLU(), nn.Conv2d(2, 64, 1))
        found = self.pattern(nn.Sequential(Block(inner, nn.Identity(), nn.ReLU(), 1)), (64, 4, 4))
        order, operations = found.elimination
        assert [found.orders[v] for v in order] == [64, 64, 2] or [found.orders[v] for v in order] == [64, 2, 64]
        assert operations < 64**2 < 64**3 / 3

    @pytest.mark.parametrize(("is_residual", "colours"), [(False, 2), (True, 3)])
    def test_colours(self, is_residual, colours):
        inner = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1))
        model = Block(inner, nn.Identity(), nn.ReLU(), 1) if is_residual else nn.Sequential(inner, nn.ReLU())
        assert self.pattern(model, (2, 5, 5)).colours() == colours

    def test_costs_are_those_of_the_proof(self):
        """Of a chain: a diagonal first, then the others."""
        model = nn.Sequential(nn.Linear(30, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1))
        costs = Costs.of(increments.program_of(graph_of(model, (30,))))
        assert costs.searched == [1]
        assert 2 * 30 * 10**2 < costs.of_proof < 2 * 30**3 / 3 + 4 * 10**3 * 2


def test_a_pass_at_all_frequencies_is_the_pass_of_the_search():
    """Component by component, a few frequencies at a time."""
    from gramcert.networks.search import closed_form

    costs = Costs.of(increments.program_of(graph_of(residual(), (4, 6, 6)), 0.0))
    elimination = costs.elimination()
    assert elimination.has_all
    parameters = closed_form(elimination).parameters
    with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
        patched.setattr("gramcert.networks.elimination.BATCH_ENTRIES", 100)
        one, two = elimination.run(parameters, float("inf")), elimination.settle(parameters, (0.0,))
    torch.testing.assert_close(one.logarithm, two.logarithm)
    for left, right in zip(one.multipliers, two.multipliers, strict=True):
        torch.testing.assert_close(left, right)
    assert one.gains == pytest.approx(two.gains)
