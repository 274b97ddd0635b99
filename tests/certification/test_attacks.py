"""Attacks are beyond the certified radii, and what they find is real."""

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

import gramcert
import gramcert.nn as gnn
from gramcert import attack, certify
from gramcert.certification import attacks
from gramcert.certification.attacks import ATTACKS
from gramcert.networks.bound import Forms

pytest.importorskip("foolbox", reason="foolbox is not installed")

STEPS = 15
RADII = [0.0, 0.1, 0.3]


def small_network(dtype=torch.float32):
    """For 1×4×4 images and three classes."""
    torch.manual_seed(0)
    layers = [gnn.Shift([-0.5]), gnn.PadChannels(2), gnn.SLLConv2d(2, 4, 3), nn.Flatten(), gnn.SLLLinear(32, 16)]
    return nn.Sequential(*layers, gnn.NormalizedLinear(32, 3)).to(dtype)


def images(model, count=12):
    """Images in [0, 1] with their classes, every fourth of them wrong."""
    x = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    labels = attacks.plain_in_float64(model)(x)
    labels[::4] = (labels[::4] + 1) % 3
    return x, labels


@pytest.fixture
def seen(monkeypatch):
    """Every input that was shown to the network in float64, with its class."""
    shown = []
    make = attacks.plain_in_float64

    def recorded(model):
        classes = make(model)

        def remember(x):
            found = classes(x)
            shown.extend(zip(x.cpu().double(), found.tolist(), strict=True))
            return found

        return remember

    monkeypatch.setattr(attacks, "plain_in_float64", recorded)
    return shown


def square_distance(one, other):
    """Exactly."""
    pairs = zip(one.flatten().tolist(), other.double().flatten().tolist(), strict=True)
    return sum((Fraction(a) - Fraction(b)) ** 2 for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_found_changes_are_real_and_outside_the_certified_radius(dtype, seen):
    model = small_network(dtype)
    x, labels = images(model)
    seen.clear()
    found = attack(model, zip(x.split(5), labels.split(5), strict=True), RADII, steps=STEPS)
    certified = certify(model, [(x, labels)], RADII)
    assert found.distances.dtype == torch.float64
    assert not bool((found.distances < certified.radii).any())
    wrong = certified.predictions != labels
    assert int(wrong.sum()) == 3
    assert not found.distances[wrong].any()
    assert [found.by[place] for place in wrong.nonzero().flatten()] == ["", "", ""]
    assert torch.equal(found.labels, labels)
    assert found.clean == certified.clean == 0.75
    assert bool(torch.isfinite(found.distances).all())
    norms = (found.changed - x.double()).flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, found.distances)
    for sample, label, distance in zip(x[~wrong], labels[~wrong], found.distances[~wrong].tolist(), strict=True):
        changed = [other for other, kind in seen if kind != int(label)]
        assert all(float(other.min()) >= 0 and float(other.max()) <= 1 for other in changed)
        nearest = min(square_distance(other, sample) for other in changed)
        assert nearest <= Fraction(distance) ** 2 <= nearest * (1 + Fraction(1e-12))
    for radius in RADII:
        share = float((found.distances > radius).double().mean())
        assert certified.certified[radius] <= found.attacked[radius] == found.at(radius) == share <= certified.clean
    assert found.at(10.0) == 0


def ordinary_networks():
    """Without a layer of ours: what forms gain over norms is all in the composition."""
    torch.manual_seed(0)
    yield nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3))
    convolutions = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.LeakyReLU()]
    yield nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(24, 3))


@pytest.mark.parametrize("model", list(ordinary_networks()), ids=["dense", "convolutions"])
def test_radii_by_forms_and_by_minorants_are_larger_and_withstand_attacks(model, monkeypatch):
    x, labels = images(model.eval())
    found = attack(model, [(x, labels)], RADII, steps=50)
    radii = certify(model, [(x, labels)], RADII, search_steps=0).radii
    by_minorants = certify(model, [(x, labels)], RADII, largest=True)
    assert not bool((found.distances < by_minorants.radii).any())
    monkeypatch.setattr("gramcert.certification.network.bound_by_forms", lambda *_, **__: Forms())
    by_norms = certify(model, [(x, labels)], RADII, search_steps=0).radii
    right = by_norms > 0
    assert int(right.sum()) == 9
    assert bool((radii[right] > 1.2 * by_norms[right]).all())
    assert bool((by_minorants.radii[right] > radii[right]).all())
    assert by_minorants.by.count("minorant") == 9


def test_attacks_come_near_the_boundary_of_a_linear_network():
    """Where the certified radius is the distance to the boundary, the smallest change that is found is hardly more."""
    model = nn.Sequential(gnn.NormalizedLinear(6, 3, bias=False))
    x = 0.5 + 0.05 * torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    labels = attacks.plain_in_float64(model)(x)
    radii = certify(model, [(x, labels)], []).radii
    found = attack(model, [(x, labels)], [], steps=50)
    assert bool((radii > 0).all())
    assert bool((found.distances >= radii).all())
    assert bool((found.distances <= 1.1 * radii).all())


def test_projected_gradient_tries_each_radius_on_what_withstood(monkeypatch):
    """With the other attacks finding nothing, every distance is within the least radius that allows a change."""
    model = small_network()
    x, labels = images(model)
    radii = certify(model, [(x, labels)], []).radii
    nearest, calls = attacks._nearest, []

    def only_projected(exact, inputs, changed, truth):
        calls.append(len(inputs))
        lengths, inputs = nearest(exact, inputs, changed, truth)
        return (lengths if len(calls) > 2 else torch.full_like(lengths, math.inf)), inputs

    monkeypatch.setattr(attacks, "_nearest", only_projected)
    found = attack(model, [(x, labels)], [3.0, 0.05, 1.0], steps=STEPS)
    assert calls[:3] == [9, 9, 9]
    assert calls == sorted(calls, reverse=True)
    assert set(found.by) == {"", "projected gradient"}
    assert bool((found.distances >= radii).all())
    assert float(found.distances.max()) <= 3.0 * (1 + 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_and_the_model_are_left_alone(dtype):
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3, dtype=dtype)).train()
    x, labels = torch.rand(3, 1, 4, 4, dtype=dtype), torch.tensor([0, 1, 2])
    before, weight = x.clone(), model[1].weight.detach().clone()
    state = torch.get_rng_state()
    attack(model, [(x, labels)], [0.1], steps=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, before)
    assert torch.equal(model[1].weight, weight)
    assert model.training
    assert model[1].weight.requires_grad
    assert model[1].weight.grad is None


def test_progress_is_reported():
    calls = []
    model = small_network()
    x, labels = images(model, 4)
    loader = [(x[:3], labels[:3]), (x[3:], labels[3:])]
    attack(model, loader, [0.1], steps=2, report=lambda *done: calls.append(done))
    assert calls == [(name, done, None) for start, end in ((0, 3), (3, 4)) for name in ATTACKS for done in (start, end)]


X, Y = torch.zeros(2, 1, 4, 4), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        ([(X, Y[:1])], {}, r"attack\(loader\): expected 2 integer labels, got torch.int64 of shape \(1,\)"),
        ([(X[:0], Y[:0])], {}, r"attack\(loader\): expected floating-point inputs \(batch, ...\), got"),
        ([], {}, r"attack\(loader\): expected at least one batch"),
        (X[0, 0, 0, 0].item(), {}, r"attack\(loader\): expected batches of inputs and labels, got float"),
        ([X], {}, r"attack\(loader\): expected pairs of tensors, inputs and labels, got Tensor"),
        ([(X.tolist(), Y)], {}, r"attack\(loader\): expected pairs of tensors"),
        ([(X, Y.float())], {}, r"attack\(loader\): expected 2 integer labels, got torch.float32"),
        ([(X - 0.1, Y)], {}, r"attack\(loader\): expected inputs from 0 to 1, the bounds, got -0.1 to -0.1"),
        ([(X + 1.5, Y)], {}, r"attack\(loader\): expected inputs from 0 to 1, the bounds, got 1.5 to 1.5"),
        ([(X + math.nan, Y)], {}, r"attack.*inputs.*finite"),
        ([(X, Y + 2)], {}, r"attack\(loader\): expected labels from 0 to 2, got 2 to 3"),
        ([(X, Y - 1)], {}, r"attack\(loader\): expected labels from 0 to 2, got -1 to 0"),
        ([(X[..., :3], Y)], {}, r"attack\(loader\): the model does not take shape \(2, 1, 4, 3\) \(.*\)"),
        ([(X, Y), (X[..., :3], Y)], {}, r"attack\(loader\): expected inputs of shape \(1, 4, 4\), got \(1, 4, 3\)"),
        ([(X, Y)], {"radii": [-1.0]}, r"attack\(radii\): expected finite numbers of at least 0, got -1.0"),
        ([(X, Y)], {"radii": [math.nan]}, r"attack\(radii\): expected finite numbers of at least 0, got nan"),
        ([(X, Y)], {"radii": ["a"]}, r"attack\(radii\): expected finite numbers of at least 0, got 'a'"),
        ([(X, Y)], {"radii": 0.1}, r"attack\(radii\): expected a sequence of numbers, got 0.1"),
        ([(X, Y)], {"steps": 0}, r"attack\(steps=0\): expected a positive int"),
        ([(X, Y)], {"steps": 2.5}, r"attack\(steps=2.5\): expected a positive int"),
        ([(X, Y)], {"seed": "a"}, r"attack\(seed='a'\): expected an int"),
        ([(X, Y)], {"bounds": (1, 0)}, r"attack\(bounds=\(1, 0\)\): expected two numbers, the smaller one first"),
        ([(X, Y)], {"bounds": 1.0}, r"attack\(bounds=1.0\): expected two numbers"),
        ([(X, Y)], {"bounds": (0.0, math.nan)}, r"attack\(bounds=\(0.0, nan\)\): expected two numbers"),
    ],
)
def test_bad_input(loader, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        attack(small_network(), loader, options.pop("radii", []), **options)


def test_models_that_are_not_classifiers():
    for model, shape in (
        (nn.Identity(), r"\(1, 1, 4, 4\)"),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 1)), r"\(1, 1\)"),
    ):
        with pytest.raises(ValueError, match=rf"attack\(model\): expected an output .*, got {shape}"):
            attack(model, [(X, Y)], [])


def test_layers_that_overwrite_their_input():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 3))
    x = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    found = attack(model, [(x, attacks.plain_in_float64(model)(x))], iter(RADII), steps=STEPS)
    assert torch.equal(x, before)
    assert bool((found.distances > 0).all())
    assert model[0].inplace


def test_without_foolbox(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ValueError, match=r"attack: needs foolbox \(pip install 'gramcert\[attack\]'\)"):
        attack(small_network(), [(X, Y)], [])


def test_seeds():
    model = small_network()
    x, labels = images(model)
    one, again, other = (attack(model, [(x, labels)], [2.0], steps=1, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.changed, again.changed)
    assert not torch.equal(one.changed, other.changed)


class Own(nn.Module):
    """A forward of its own, with batch normalisation, a shortcut, and no linear layer at the end."""

    def __init__(self, last):
        super().__init__()
        self.one, self.norm, self.two = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
        self.last = last

    def forward(self, x):
        y = torch.relu(self.norm(self.one(x)))
        return self.last((y + torch.tanh(self.two(y))).flatten(1)[:, :12])


BEFORE_LAST, OF_LOGITS = "from the input to what the last linear layer is given", "from the input to the logits"


@pytest.mark.filterwarnings("ignore")  # of torch.onnx.export
@pytest.mark.parametrize("kind", ["module", "nn.export", "program", ".pt2", ".onnx"])
@pytest.mark.parametrize(
    ("last", "about"),
    [
        (nn.Linear(12, 3), BEFORE_LAST),
        (nn.Sequential(nn.Linear(12, 3), nn.Softmax(1)), BEFORE_LAST),
        (nn.Sequential(nn.Linear(12, 3), nn.Tanh()), OF_LOGITS),
    ],
    ids=["linear", "softmax", "tanh"],
)
def test_what_an_audit_reads_is_certified_and_attacked(kind, last, about, tmp_path):
    torch.manual_seed(0)
    module = Own(last)
    module(torch.randn(8, 1, 4, 4))  # statistics
    model = module.eval()
    x = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        labels = model(x).argmax(1)
    if kind == "nn.export":
        model = gnn.export(model)
    elif kind in ("program", ".pt2"):
        model = torch.export.export(model, (x[:1],))
        if kind == ".pt2":
            torch.export.save(model, tmp_path / "model.pt2")
            model = tmp_path / "model.pt2"
    elif kind == ".onnx":
        torch.onnx.export(model, (x[:1],), tmp_path / "model.onnx", dynamo=True, verbose=False)
        model = tmp_path / "model.onnx"
    certified = certify(model, [(x, labels)], [0.05])
    attacked = attack(model, [(x, labels)], [0.05], steps=20)
    assert certified.clean == attacked.clean == 1
    assert bool((certified.radii > 0).all())
    assert bool((certified.radii <= attacked.distances).all())
    assert certified.lipschitz_of == about
    # It is what it says: the constant of an audit of that part, or a little more where the search is short.
    part = Own(nn.Identity() if about == BEFORE_LAST else last)
    part.load_state_dict({name: v for name, v in module.state_dict().items() if name in part.state_dict()})
    known = gramcert.audit(part.eval(), (1, 4, 4), search_seconds=0)
    assert certified.lipschitz <= known.product * (1 + 1e-9)
    assert known.upper <= 1.5 * certified.lipschitz
