"""What becomes of a graph: cases that a hostile reader found, and where values change their frame."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramcert
from gramcert.auditing.reading import Source
from gramcert.networks import filters, increments
from gramcert.networks.bound import Costs
from gramcert.networks.filters import Filter, NotDescribedError
from gramcert.networks.increments import program_of
from gramcert.operators.linear import Move
from reference import sigma


@pytest.fixture(autouse=True)
def images(monkeypatch):
    """Also small ones on the lattice."""
    monkeypatch.setattr(increments, "SMALL_NETWORK", 0)


class Of(nn.Module):
    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        self.layers = nn.ModuleDict(layers)

    def forward(self, x):
        return self.function(x, **self.layers)


def program(model, shape):
    return program_of(Source.of("audit", model).graph("audit", shape).needed())


def largest_jacobian(model, shape, points=5):
    torch.manual_seed(7)
    found = []
    for _ in range(points):
        x = torch.randn(1, *shape, dtype=torch.float64)
        found.append(sigma(torch.autograd.functional.jacobian(lambda x: model(x).flatten(), x).flatten(1)))
    return float(max(found))


def pooled_across():
    one, two = nn.Conv1d(1, 3, 1, bias=False), nn.Conv1d(3, 1, 1, bias=False)
    with torch.no_grad():
        one.weight.copy_(torch.tensor([0.0, 1.0, 0.0])[:, None, None])
        two.weight.copy_(torch.tensor([1.0, 0.0, 1.0])[None, :, None])
    return Of(lambda x, a, b: b(F.max_pool2d(a(x).unsqueeze(1), 3, 1, 1).squeeze(1)), a=one, b=two)


def opened_window():
    layer = nn.ConvTranspose1d(1, 1, 1, dilation=3, output_padding=2, bias=False)
    nn.init.ones_(layer.weight)
    last = nn.Conv1d(1, 1, 1, bias=False)
    nn.init.ones_(last.weight)
    return Of(lambda x, a, b: b(F.leaky_relu(a(x[:, :, :-2]) - 0.7 * x, 0.9)), a=layer, b=last)


HOSTILE = {
    "max pooling of channels": (pooled_across(), (1, 12)),
    "a window before a transposed filter": (opened_window(), (1, 12)),
    "a mean of differences": (
        Of(
            lambda x, a, b: b((torch.relu(a(x))[:, :, 1:] - torch.relu(a(x))[:, :, :-1]).mean(2)),
            a=nn.Conv1d(2, 2, 1),
            b=nn.Linear(2, 3),
        ),
        (2, 9),
    ),
    "a transposed filter, then a mean": (
        Of(
            lambda x, a, b, c: c(b(torch.relu(a(x))).mean(2)),
            a=nn.Conv1d(2, 2, 3, padding=1),
            b=nn.ConvTranspose1d(2, 2, 1),
            c=nn.Linear(2, 1),
        ),
        (2, 9),
    ),
    "a convolution, then a mean": (
        Of(lambda x, a, b: b(a(torch.relu(x)).mean((2, 3))), a=nn.Conv2d(2, 4, 3), b=nn.Linear(4, 3)),
        (2, 6, 6),
    ),
    "a second sum along an axis": (
        Of(
            lambda x, a, b: b(torch.relu(torch.relu(a(x)).mean(3, keepdim=True).sum(3, keepdim=True)).flatten(1)),
            a=nn.Conv2d(1, 2, 3, padding=1),
            b=nn.Linear(12, 3),
        ),
        (1, 6, 6),
    ),
    "a mean along one axis, then a convolution": (
        Of(
            lambda x, a, b: b(torch.relu(a(x)).mean(2, keepdim=True)),
            a=nn.Conv2d(1, 2, 3, padding=1),
            b=nn.Conv2d(2, 2, 3, padding=1),
        ),
        (1, 6, 6),
    ),
    "means of two layers": (
        Of(
            lambda x, a, b, c: c(torch.cat([a(x).mean((2, 3)), b(torch.relu(a(x))).mean((2, 3))], 1)),
            a=nn.Conv2d(1, 2, 3, padding=1),
            b=nn.Conv2d(2, 2, 3, stride=2),
            c=nn.Linear(4, 2),
        ),
        (1, 6, 6),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_the_bound_is_above_the_truth(name):
    torch.manual_seed(0)
    model, shape = HOSTILE[name]
    model = model.double().eval()
    found = gramcert.audit(model, shape)
    assert largest_jacobian(model, shape) <= found.upper * (1 + 1e-12)
    assert found.upper <= found.product


def test_the_torus_is_one_place_larger_than_the_image():
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1)).double()
    (component,) = program(model, (1, 8, 8)).components
    assert component.sizes == (9, 9)


def test_circular_padding_has_the_torus_of_its_size_and_no_shift():
    mode = {"padding": 1, "padding_mode": "circular"}
    model = nn.Sequential(nn.Conv2d(1, 2, 3, **mode), nn.ReLU(), nn.Conv2d(2, 2, 3, **mode)).double()
    found = program(model, (1, 8, 8))
    assert [component.sizes for component in found.components] == [(8, 8)]
    assert not found.shift([True])


def test_strides_make_phases_or_cuts(monkeypatch):
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 1)
    ).double()
    together = program(model, (1, 8, 8))
    assert [together.order(v) for v in together.components[0].variables] == [4, 8, 2]
    monkeypatch.setattr("gramcert.networks.coupling.WORTH_COUPLING", 0.0)
    assert len(program(model, (1, 8, 8)).components) == 2


def test_a_leaky_slope_is_kept_where_no_window_cuts():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.LeakyReLU(0.5), nn.Conv2d(2, 2, 3, padding=1), nn.LeakyReLU(0.5)
    ).double()
    slopes = [variable.relation.slopes for variable in program(model, (1, 4, 4)).variables]
    assert slopes == [None, (0.5, 1.0), (0.0, 1.0)]


class Shortcut(nn.Module):
    """An image that is also read as a vector, so that there are square matrices of all its entries."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.head = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(32, 3)

    def forward(self, x):
        x = x.permute(0, 2, 3, 1).flip(1).permute(0, 3, 1, 2)
        return self.head((x - F.relu(self.inner(x))).flatten(1))


@pytest.mark.parametrize("model", [Shortcut(), nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")])
@pytest.mark.parametrize("most", [1, 100, 400, 1023, 1024, 2000])
def test_filters_without_a_symbol_are_refused_while_the_network_is_read_and_no_others(model, most, monkeypatch):
    graph = Source.of("audit", model).graph("audit", (2, 4, 4)).needed()

    def reason():
        try:
            Costs.of(program_of(graph))
        except NotDescribedError as error:
            return str(error)
        return ""

    monkeypatch.setattr(filters, "MOST_TAPS", most)
    monkeypatch.setattr(increments, "MOST_TAPS", 10**9)
    late = reason()
    monkeypatch.setattr(increments, "MOST_TAPS", most)
    assert reason() == late
    if most == 1:
        with pytest.raises(NotDescribedError, match="too many taps"):
            program_of(graph)


def test_moves_of_matrices_are_moves_of_their_rows():
    torch.manual_seed(4)
    index = torch.tensor([[3, 0, 1], [3, 2, 5]])
    move, before = Move((5,), index), Filter(torch.randn(5, 4, dtype=torch.float64), (), (), 0.25)
    found = increments._Reader._applied(move, before)
    assert torch.equal(found.kernel, move.dense() @ before.kernel)
    assert found.error >= 0.25 * move.size
