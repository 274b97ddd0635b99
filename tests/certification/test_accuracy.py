"""``certify`` against closed forms, exact logits and attempts to change the class."""

import copy
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

import gramcert.nn as gnn
from certification.exact import exact_batch, fractions
from gramcert import CertifiedAccuracy, certify, lipschitz_bound

EPS = torch.finfo(torch.float64).eps


def labels_of(model, x):
    """The classes that a network gives."""
    with torch.no_grad():
        return gnn.export(model).double()(x.double()).argmax(1)


def certified_radii(model, x):
    """The radius of each input, with the class that it has as its label."""
    return certify(model, [(x, labels_of(model, x))], []).radii


def square_reach(model, sample, matrix):
    """The squared distance to the decision boundary of x ↦ head(Ax + a), as an exact number."""
    head, winner, logits = fractions(model[-1].weight), None, exact_batch(model, sample[None])[0]
    winner = max(range(len(logits)), key=lambda i: logits[i])
    found = []
    for i in set(range(len(logits))) - {winner}:
        direction = (head[winner] - head[i]) @ matrix
        found.append((logits[winner] - logits[i]) ** 2 / (direction @ direction))
    return min(found)


def small_network(seed=0, dtype=torch.float32):
    """Convolutions, pooling and dense blocks for 1×4×4 images and three classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(
            gnn.Shift([-0.5]),
            gnn.PadChannels(3),
            gnn.SLLConv2d(3, 4, 3),
            gnn.ScaledAvgPool(2),
            nn.Flatten(),
            gnn.SLLLinear(12, 8, nn.LeakyReLU(0.125)),
            gnn.NormalizedLinear(12, 3),
        )
    return network.to(dtype)


class TestClosedForms:
    """Linear networks, whose distance to the boundary is known."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("head", [nn.Linear, gnn.NormalizedLinear])
    def test_a_last_layer_alone(self, dtype, head):
        model, x = nn.Sequential(head(5, 4)).to(dtype), torch.randn(20, 5)
        for sample, radius in zip(x, certified_radii(model, x).tolist(), strict=True):
            exact = square_reach(model, sample, fractions(torch.eye(5)))
            assert Fraction(radius) ** 2 <= exact <= (Fraction(radius) * (1 + Fraction(1e-9))) ** 2

    def test_behind_isometries(self):
        """Shifts, shuffles and signed permutations: the constant is 1, and nothing is given away."""
        turn = nn.Linear(8, 8)
        with torch.no_grad():
            turn.weight.copy_(torch.eye(8)[torch.randperm(8)] * torch.tensor([1, -1] * 4)[:, None])
        layers = [gnn.Shift([0.25, -0.3]), nn.PixelUnshuffle(2), nn.Flatten(), turn, gnn.NormalizedLinear(8, 3)]
        model, x = nn.Sequential(*layers), torch.rand(20, 2, 2, 2)
        order = nn.PixelUnshuffle(2)(torch.arange(8.0).reshape(1, 2, 2, 2)).flatten().long()
        matrix = fractions(turn.weight) @ fractions(torch.eye(8)[order])
        for sample, radius in zip(x, certified_radii(model, x).tolist(), strict=True):
            exact = square_reach(model, sample, matrix)
            assert Fraction(radius) ** 2 <= exact <= (Fraction(radius) * (1 + Fraction(1e-9))) ** 2

    def test_behind_any_matrix(self):
        for _ in range(5):
            model, x = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), torch.randn(10, 4)
            for sample, radius in zip(x, certified_radii(model, x).tolist(), strict=True):
                assert Fraction(radius) ** 2 <= square_reach(model, sample, fractions(model[0].weight))

    def test_a_network_that_ignores_its_input(self):
        """Its constant is 0: no change of the input changes anything."""
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        with torch.no_grad():
            model[0].weight.zero_()
        found = certify(model, [(torch.rand(4, 3), labels_of(model, torch.rand(4, 3)))], [1e9])
        assert found.lipschitz == 0
        assert found.certified[1e9] == 1
        assert bool(torch.isfinite(found.radii).all())

    def test_a_constant_that_overflows_certifies_nothing(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double()
        nn.init.constant_(model[0].weight, 1.5e308)
        found = certify(model, [(torch.full((3, 2), 1e-308, dtype=torch.float64), torch.tensor([0, 1, 0]))], [0.0])
        assert found.lipschitz == math.inf
        assert found.certified[0.0] == 0
        assert found.radii.tolist() == [0, 0, 0]

    def test_an_error_that_overflows_certifies_nothing(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)).double()
        nn.init.constant_(model[0].weight, 1e200)
        nn.init.zeros_(model[1].weight)
        found = certify(model, [(torch.ones(3, 2), torch.tensor([0, 1, 0]))], [0.0])
        assert found.error == math.inf
        assert found.certified[0.0] == 0
        assert found.radii.tolist() == [0, 0, 0]


class TestRounding:
    """Logits in exact arithmetic: what rounding did to them is in the radius."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_exact_margins_bear_the_radius(self, dtype, monkeypatch):
        monkeypatch.setattr("gramcert.certification.network.WORTH_PAIRS", 0)  # by the constant of all together
        model, x = small_network(1, dtype), torch.rand(6, 1, 4, 4)
        found = certify(model, [(x, labels_of(model, x))], [])
        assert bool((found.radii > 0).any())
        for logits, radius in zip(exact_batch(model, x), found.radii.tolist(), strict=True):
            assert is_borne(model, logits, radius, found.lipschitz)

    def test_where_rounding_decides_the_class(self, without_rounding):
        """Logits brought within a few units of a tie: nothing is certified. Without the terms for rounding some are."""
        cases = list(near_ties())
        assert all(not certify(*case, []).radii.any() for case in cases)
        without_rounding()
        wrong = 0
        for model, loader in cases:
            found = certify(model, loader, [])
            logits = exact_batch(model, loader[0][0])[0]
            wrong += not is_borne(model, logits, float(found.radii), found.lipschitz)
        assert wrong >= 5

    def test_errors_are_small(self):
        found = certify(small_network(), [(torch.rand(4, 1, 4, 4), torch.zeros(4).long())], [])
        assert 0 < found.error < 1e4 * EPS


def is_borne(model, logits, radius, lipschitz):
    """Whether the exact margins are at least L·‖w_y - w_i‖·radius for some class y."""
    if radius == 0:
        return True
    rows = fractions(model[-1].weight)
    winner = max(range(len(logits)), key=lambda i: logits[i])
    for i in set(range(len(logits))) - {winner}:
        margin, direction = logits[winner] - logits[i], rows[winner] - rows[i]
        if margin <= 0 or direction @ direction * (Fraction(radius) * Fraction(lipschitz)) ** 2 > margin**2:
            return False
    return True


def near_ties():
    """Networks in float64 whose two logits differ by a few units in the last place, and an input."""
    for seed in range(20):
        torch.manual_seed(seed)
        model = nn.Sequential(gnn.SLLLinear(6, 8), nn.Linear(6, 2)).double()
        x = torch.randn(1, 6, dtype=torch.float64)
        with torch.no_grad():
            logits = model(x)[0]
            model[1].bias[1] += logits[0] - logits[1] + (2 * (seed % 2) - 1) * EPS * logits[0].abs()
        yield model, [(x, torch.tensor([seed % 2]))]


class TestAttempts:
    """No change within the radius gives another class."""

    @settings(max_examples=settings.default.max_examples // 8)
    @given(st.integers(0, 2**31 - 1))
    def test_changes_within_the_radius(self, seed):
        generator = torch.Generator().manual_seed(seed)
        model = small_network(seed)
        x = torch.rand(8, 1, 4, 4, generator=generator)
        radii, labels = certified_radii(model, x), labels_of(model, x)
        plain = gnn.export(model).double()
        for _ in range(20):
            change = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            assert torch.equal(plain(moved(x, change, radii)).argmax(1), labels)
        # Uphill for the class that is next.
        for target in range(3):
            current = x.double().requires_grad_()
            for _ in range(5):
                logits = plain(current)
                (slope,) = torch.autograd.grad(
                    (logits[:, target] - logits.gather(1, labels[:, None])[:, 0]).sum(), current
                )
                assert torch.equal(plain(moved(x, slope, radii)).argmax(1), labels)
                current = moved(x, slope, radii).detach().requires_grad_()

    def test_changes_just_beyond_the_radius_of_a_linear_network(self):
        model, x = nn.Sequential(gnn.NormalizedLinear(5, 2)), torch.randn(20, 5)
        radii, labels = certified_radii(model, x), labels_of(model, x)
        weight = model[0].weight.detach().double()
        direction = (weight[1 - labels] - weight[labels]).double()
        plain = gnn.export(model).double()
        assert torch.equal(plain(moved(x, direction, radii * (1 - 1e-9))).argmax(1), labels)
        assert torch.equal(plain(moved(x, direction, radii * (1 + 1e-9))).argmax(1), 1 - labels)


def moved(x, direction, radii):
    """X moved by the radius of each input."""
    sizes = direction.flatten(1).norm(dim=1).clamp_min(1e-300)
    return x.double() + direction * (radii * (1 - 4 * EPS) / sizes).reshape(-1, *(1,) * (x.dim() - 1))


class TestAccuracy:
    """Shares, per radius and per class."""

    def test_monotone_in_the_radius(self):
        x = torch.rand(40, 1, 4, 4)
        model = small_network()
        labels = labels_of(model, x)
        labels[::4] = (labels[::4] + 1) % 3  # wrong predictions
        radii = [k / 50 for k in range(60)]
        found = certify(model, [(x[:30], labels[:30]), (x[30:], labels[30:])], radii)
        shares = [found.certified[radius] for radius in radii]
        assert shares == sorted(shares, reverse=True)
        assert found.clean == 0.75
        assert shares[0] == 0.75  # at radius 0 every right prediction with a margin
        assert shares[-1] < shares[1]
        assert not found.radii[::4].any()
        assert found.predictions.shape == found.labels.shape == found.radii.shape == (40,)
        assert found.radii.dtype == torch.float64
        assert found.lipschitz >= 1
        assert found.lipschitz <= math.prod(lipschitz_bound(layer) for layer in model[:-1]) * (1 + 1e-6)
        for radius in radii:
            assert found.at(radius) == found.certified[radius]
            parts = [found.at(radius, label) * int((labels == label).sum()) for label in range(3)]
            assert sum(parts) == pytest.approx(40 * found.at(radius))
        assert sum(found.clean_of(k) * int((labels == k).sum()) for k in range(3)) == pytest.approx(40 * found.clean)

    def test_an_input_at_its_radius_is_not_counted(self):
        """Radii are compared strictly: at the radius itself the next class may be as large."""
        model = nn.Sequential(nn.Linear(1, 2, bias=False, dtype=torch.float64))
        with torch.no_grad():
            model[0].weight.copy_(torch.tensor([[0.5], [-0.5]]))
        found = certify(model, [(torch.ones(1, 1), torch.zeros(1).long())], [1.0, 1 - 1e-9])
        assert found.certified == {1.0: 0, 1 - 1e-9: 1}

    def test_ties_count_as_wrong(self):
        model = nn.Sequential(nn.Linear(2, 3, bias=False))
        with torch.no_grad():
            model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
        x = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [-1.0, -1.0]])
        found = certify(model, [(x, torch.tensor([0, 0, 0, 2]))], [0.0])
        assert found.predictions.tolist() == [-1, 0, -1, 2]
        assert found.clean == 0.5
        assert found.certified[0.0] == 0.5
        assert found.radii.tolist()[::2] == [0, 0]

    def test_progress_is_reported(self):
        seen = []
        batches = [(torch.rand(2, 1, 4, 4), torch.zeros(2).long()) for _ in range(2)]
        certify(small_network(), batches, [], report=lambda *done: seen.append(done))
        assert seen[:4] == [("layers", k, 4) for k in range(1, 5)]
        assert seen[4] == ("pairs of classes", 0, 3)
        assert seen[-2:] == [("inputs", 2, None), ("inputs", 4, None)]

    def test_loaders_of_torch(self):
        x, labels = torch.rand(5, 1, 4, 4), torch.tensor([0, 1, 2, 0, 1])
        model = small_network()
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, labels), batch_size=2)
        whole = certify(model, [(x, labels)], [0.1])
        torch.testing.assert_close(certify(model, loader, [0.1]).radii, whole.radii)
        torch.testing.assert_close(certify(model, iter(loader), (0.1,)).labels, whole.labels)


class TestWhatIsCertified:
    """The network as it is, and nothing changed by looking."""

    def test_inputs_are_left_alone(self):
        """A first layer that overwrites its input would change what the caller passed."""
        model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2))
        x = torch.randn(4, 3, dtype=torch.float64)
        before = x.clone()
        certify(model, [(x, torch.zeros(4).long())], [])
        assert torch.equal(x, before)

    def test_weights_that_change_each_time_are_refused(self):
        """Constants and logits would be of different ones. The model itself is left alone."""

        class Counted(nn.Module):
            count = 0

            def forward(self, weight):
                self.count += 1
                return weight * 2.0**self.count

        counter = Counted()
        layer = parametrize.register_parametrization(nn.Linear(3, 4, bias=False), "weight", counter, unsafe=True)
        counter.count = 0
        batch = torch.randn(3, 3), torch.zeros(3).long()
        with pytest.raises(ValueError, match=r"its parametrisation of weight gives another one each time"):
            certify(nn.Sequential(layer, nn.Linear(4, 2)), [batch], [])
        assert counter.count == 0

    def test_copies_of_a_layer_have_weights_of_their_own(self):
        """Torch's cache of parametrised weights takes a layer and its deep copies for one."""
        first = gnn.SRLinear(2, 2, bias=False)
        second = copy.deepcopy(first)
        with torch.no_grad():
            first.weight, second.weight = torch.eye(2), torch.eye(2).flip(0)
        head = nn.Linear(2, 2, bias=False)
        nn.init.eye_(head.weight)
        x = torch.tensor([[1.0, 0.0]])
        model = nn.Sequential(first, second, head)
        with parametrize.cached():
            found = [certify(model, [(x, torch.tensor([label]))], [0.5]).certified[0.5] for label in (0, 1)]
        assert found == [0, 1]

        small = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2, bias=False))
        large = copy.deepcopy(small)
        with torch.no_grad():
            small.weight, large.weight = 0.001 * torch.eye(2), 1000 * torch.eye(2)
        for layers in ([small, large], [large, small]):
            constant = certify(nn.Sequential(*layers, head), [(x, torch.tensor([0]))], []).lipschitz
            assert constant == pytest.approx(1)

        reflection = gnn.Householder(2)
        other = copy.deepcopy(reflection)
        with torch.no_grad():
            reflection.normals, other.normals = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        model = nn.Sequential(reflection, other, head)
        x = torch.tensor([[-1.0, -2.0], [-2.0, -1.0]])
        assert certify(model, [(x, torch.tensor([1, 0]))], []).clean == 1

    def test_autocast_around_it_changes_nothing(self):
        """A parametrisation of torch by matrix products gives weights of half precision there."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 2))
        x = torch.randn(6, 4)
        batch = x, labels_of(model, x)
        expected = certify(model, [batch], [])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = certify(model, [batch], [])
        assert found.lipschitz == expected.lipschitz
        assert torch.equal(found.radii, expected.radii)

    def test_loaders_run_as_they_would_alone(self):
        """With gradients, and without changing what a block with torch's cache keeps."""
        model = small_network()

        def loader():
            x = X.clone().requires_grad_()
            model(x).sum().backward()
            yield X + 0 * x.grad, Y

        certify(model, loader(), [])
        model.zero_grad()
        with parametrize.cached():
            certify(model, [(X, Y)], [])
            model(X).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    def test_parametrisations_of_torch(self):
        x = torch.randn(6, 4)
        model = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 2))
        found = certify(model, [(x, labels_of(model, x))], [])
        assert 1 - 1e-6 < found.lipschitz < 1 + 1e-6

    def test_gradients_and_modes_are_left_alone(self):
        model = small_network().train()
        x = torch.rand(2, 1, 4, 4, requires_grad=True)
        found = certify(model, [(x, torch.zeros(2).long())], [])
        assert not found.radii.requires_grad
        assert model.training
        assert torch.is_grad_enabled()

    def test_inputs_in_half_precision_are_widened(self):
        model, x = small_network(), torch.rand(3, 1, 4, 4).bfloat16()
        labels = torch.tensor([0, 1, 2])
        narrow, wide = (certify(model, [(inputs, labels)], []).radii for inputs in (x, x.double()))
        assert torch.equal(narrow, wide)


X, Y = torch.zeros(2, 1, 4, 4), torch.tensor([0, 2])


def with_dropout():
    return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(16, 3))


def with_nan(model):
    with torch.no_grad():
        model[-1].bias[0] = math.nan
    return model


@pytest.mark.parametrize(
    ("model", "batches", "error", "message"),
    [
        (None, [], ValueError, r"certify\(loader\): expected at least one batch"),
        (None, [X], TypeError, r"certify\(loader\): expected pairs of tensors, inputs and labels, got Tensor"),
        (None, [(X, Y, Y)], TypeError, r"certify\(loader\): expected pairs of tensors, inputs and labels, got tuple"),
        (None, [(X, [0, 2])], TypeError, r"certify\(loader\): expected pairs of tensors, inputs and labels, got tuple"),
        (None, [(X, Y[:1])], ValueError, r"certify\(loader\): expected 2 integer labels, got .*int64 of shape \(1,\)"),
        (None, [(X, Y.float())], ValueError, r"certify\(loader\): expected 2 integer labels, got torch.float32 of"),
        (None, [(X, Y[:, None])], ValueError, r"expected 2 integer labels, got torch.int64 of shape \(2, 1\)"),
        (None, [(X, Y + 1)], ValueError, r"certify\(loader\): expected labels from 0 to 2, got 1 to 3"),
        (None, [(X, Y - 1)], ValueError, r"certify\(loader\): expected labels from 0 to 2, got -1 to 1"),
        (None, [(X.long(), Y)], ValueError, r"certify\(loader\): expected floating-point inputs \(batch, ...\), got"),
        (None, [(X[:0], Y[:0])], ValueError, r"expected floating-point inputs .*got torch.float32 of shape \(0, 1, 4"),
        (None, [(Y.double(), Y)], ValueError, r"expected floating-point inputs .*got torch.float64 of shape \(2,\)"),
        (None, [(X + math.nan, Y)], ValueError, r"certify\(inputs\): expected finite values, got 32 NaN"),
        (None, [(X + math.inf, Y)], ValueError, r"certify\(inputs\): expected finite values, got 32 NaN or infinite"),
        (None, [(X, Y), (X[..., 1:], Y)], ValueError, r"inputs of shape \(1, 4, 4\), got \(1, 4, 3\)"),
        (
            None,
            [(X.repeat(1, 2, 1, 1), Y)],
            ValueError,
            r"certify\(loader\): the model cannot take an input of shape \(2, 4, 4\): Shift\(x\): expected",
        ),
        (None, [(X[..., :3], Y)], ValueError, r"an input of shape \(1, 4, 3\): SLLLinear\(x\): expected \(..., 12\)"),
        (
            nn.ReLU(),
            [(X, Y)],
            ValueError,
            r"certify\(model\): expected logits of shape \(batch, classes\), got \(1, 1, 4",
        ),
        (nn.Linear(4, 3), [(X, Y)], ValueError, r"expected logits of shape \(batch, classes\), got \(1, 1, 4, 3\)"),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(16, 1)),
            [(X, Y)],
            ValueError,
            r"certify\(model\): expected at least two logits, got 1",
        ),
        (nn.Sequential(nn.Flatten(), nn.Linear(8, 3)), [(X, Y)], ValueError, r"the model cannot take .*1x16 and 8x3"),
        (
            nn.Sequential(nn.Flatten(), nn.Hardshrink(), nn.Linear(16, 3)),
            [(X, Y)],
            TypeError,
            r"certify\(model\): 1: hardshrink: it jumps",
        ),
        (nn.Sequential(nn.Flatten(0), nn.Linear(16, 3)), [(X, Y)], ValueError, r"expected logits .*got \(3,\) of one"),
        (
            nn.Sequential(nn.Conv2d(2, 1, 1), nn.Linear(4, 3)),
            [(X, Y)],
            ValueError,
            r"the model cannot take .*2 channels",
        ),
        (with_dropout(), [(X, Y)], TypeError, r"certify\(model\): 1: dropout: in training mode it is random"),
        (
            with_nan(nn.Sequential(nn.Flatten(), nn.Linear(16, 3))),
            [(X, Y)],
            TypeError,
            r"certify\(model\): 1: linear: its bias has entries that are not finite",
        ),
        (3, [(X, Y)], TypeError, r"certify\(model\): expected a torch.nn.Module or a file, got int"),
        ("network", [(X, Y)], ValueError, r"network: no such file"),
    ],
)
def test_bad_input(model, batches, error, message):
    with pytest.raises(error, match=message):
        certify(small_network() if model is None else model, batches, [0.1])


@pytest.mark.parametrize("radius", [-0.1, math.inf, math.nan, 2**2000, "36/255", None])
def test_bad_radii(radius):
    with pytest.raises(ValueError, match=r"certify\(radii\): expected finite numbers of at least 0, got"):
        certify(small_network(), [(X, Y)], [0.1, radius])


def test_radii_that_can_be_read_once():
    found = certify(small_network(), [(X, Y)], (radius for radius in (0.0, 0.1)))
    assert list(found.certified) == [0.0, 0.1]
    with pytest.raises(TypeError, match=r"certify\(radii\): expected a sequence of numbers, got 0.1"):
        certify(small_network(), [(X, Y)], 0.1)


def test_shares_that_do_not_exist():
    found = certify(small_network(), [(X, torch.zeros(len(X)).long())], [])
    with pytest.raises(ValueError, match=r"CertifiedAccuracy.at: expected finite numbers of at least 0, got -1.0"):
        found.at(-1.0)
    with pytest.raises(ValueError, match=r"CertifiedAccuracy.at\(label=2\): there is no input of this class"):
        found.at(0.0, 2)
    with pytest.raises(ValueError, match=r"CertifiedAccuracy.clean_of\(label=2\): there is no input of this class"):
        found.clean_of(2)


def test_networks_without_a_last_linear_layer():
    """The differences of logits move by up to √2 times what the logits do together."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False), nn.Tanh())
    nn.init.orthogonal_(model[1].weight)
    x = torch.rand(4, 1, 4, 4)
    logits = model(x).double().sort(dim=1, descending=True).values
    expected = (logits[:, 0] - logits[:, 1]) / 2**0.5
    torch.testing.assert_close(certified_radii(model, x), expected, rtol=1e-3, atol=0)


def test_a_bias_whose_rounding_is_not_followed_certifies_nothing():
    class Scaled(nn.Linear):
        def forward(self, x):
            return torch.addmm(self.bias, x, self.weight.T, beta=0.1)

    with pytest.raises(TypeError, match=r"certify\(model\): .*a constant that is added was not kept"):
        certify(Scaled(4, 3), [(torch.rand(2, 4), Y)], [])


def test_complex_weights():
    """Their imaginary part would be dropped."""
    with pytest.raises(ValueError, match=r"certify\(loader\): the model cannot take an input .*ComplexFloat"):
        certify(nn.Sequential(nn.Identity(), nn.Linear(4, 3, dtype=torch.complex64)), [(torch.rand(2, 4), Y)], [])


def test_models_that_cannot_be_copied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].kept = torch.ones(1, requires_grad=True) * 2
    with pytest.raises(TypeError, match=r"certify\(model\): it cannot be copied \(Only Tensors created explicitly"):
        certify(model, [(torch.rand(2, 4), Y)], [])


def test_training_mode_matters_where_layers_depend_on_it():
    model = nn.Sequential(gnn.BatchCentering(4), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"certify\(BatchCentering\): in training mode it depends on the batch"):
        certify(model, [(torch.rand(2, 4), Y)], [])
    assert isinstance(certify(model.eval(), [(torch.rand(2, 4), Y)], []), CertifiedAccuracy)


def test_loaders_may_fill_the_same_tensors_again():
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
    inputs, labels = torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)

    def refilled():
        for label in (0, 1, 1):
            inputs[0], labels[0] = torch.eye(2)[label], label
            yield inputs, labels

    found = certify(model, refilled(), [0.1])
    assert found.labels.tolist() == [0, 1, 1]
    assert (found.clean_of(0), found.clean_of(1), found.at(0.1, label=0)) == (1, 1, 1)
