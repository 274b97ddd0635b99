"""``certify`` of ordinary networks: minorants around each input, whatever the model came from and however it is run."""

import math
import warnings

import pytest
import torch
from torch import nn

from gramcert import certify
from gramcert.minorants.search import _Ascent

EPS = torch.finfo(torch.float64).eps

# Steps of searches here, which are about everything else.
STEPS = 40


@pytest.fixture(autouse=True)
def without_forms(monkeypatch):
    """Forms of differences are tested elsewhere, and take long."""
    monkeypatch.setattr("gramcert.certification.network.WORTH_PAIRS", 0)


def data(shape, count=60):
    """Clouds of points around three centres."""
    generator = torch.Generator().manual_seed(7)
    centres = 1.2 * torch.randn(3, *shape, generator=generator)
    labels = torch.arange(count) % 3
    return centres[labels] + 0.4 * torch.randn(count, *shape, generator=generator), labels


def trained(model, shape):
    """A few dozen steps; the first inputs with their labels."""
    x, labels = data(shape)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    return model.eval().requires_grad_(False), [(x[:6], labels[:6]), (x[6:10], labels[6:10])]


@pytest.fixture(scope="module")
def dense():
    torch.manual_seed(0)
    layers = [nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)]
    return trained(nn.Sequential(*layers), (6,))


@pytest.fixture(scope="module")
def images():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.LeakyReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2), nn.ReLU()]
    return trained(nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3)), (1, 6, 6))


def searched(model, batches, **options):
    return certify(model, batches, [0.1, 0.2], **{"largest": True, "search_steps": STEPS} | options)


@pytest.fixture
def found(dense, without_forms):
    return searched(*dense)


def refuse(*_):
    raise AssertionError("a search")


class TestRadii:
    """What a search is worth, and that nothing is given away for it."""

    def test_a_search_only_adds(self, dense, found):
        plain = searched(*dense, search_steps=0)
        assert bool((found.radii >= plain.radii).all())
        assert float((found.radii > 1.2 * plain.radii).double().mean()) > 0.5
        assert found.clean == plain.clean > 0.5
        assert torch.equal(found.predictions, plain.predictions)
        assert set(plain.by) <= {"constant", "forms", ""}
        assert found.by.count("minorant") >= 6
        assert found.notes == plain.notes == ()

    def test_images(self, images):
        plain, found = searched(*images, search_steps=0), searched(*images, search_steps=3 * STEPS)
        assert bool((found.radii >= plain.radii).all())
        right = plain.radii > 0
        assert bool((found.radii > plain.radii)[right].double().mean() > 0.5)
        assert all((name == "") == (radius == 0) for name, radius in zip(found.by, found.radii.tolist(), strict=True))

    def test_no_step_downhill_within_a_radius_leads_to_another_class(self, images):
        model, batches = images
        found = searched(model, batches)
        x = torch.cat([part for part, _ in batches]).double()
        wide = nn.Sequential(*model).double()
        labels = wide(x).argmax(1)
        for target in range(3):
            current = x
            for _ in range(10):
                leaf = current.clone().requires_grad_()
                logits = wide(leaf)
                gain = logits[:, target] - logits.gather(1, labels[:, None])[:, 0]
                (slope,) = torch.autograd.grad(gain.sum(), leaf)
                sizes = slope.flatten(1).norm(dim=1).clamp_min(1e-300)
                step = slope * (found.radii * (1 - 4 * EPS) / sizes).reshape(-1, 1, 1, 1)
                current = x + step
                is_right = found.radii > 0
                assert torch.equal(wide(current).argmax(1)[is_right], labels[is_right])

    def test_not_further_than_it_is_asked(self, dense, found):
        """Pairs that are proved up to the largest radius are left alone."""
        short = certify(*dense, [0.05], search_steps=STEPS)
        assert bool(((short.radii > 0.05) == (found.radii > 0.05)).double().mean() > 0.8)
        assert float(short.radii.max()) <= float(found.radii.max())
        nothing = certify(*dense, [0.0], search_steps=STEPS)
        assert "minorant" not in nothing.by

    def test_wrong_predictions_have_none(self, dense, found):
        model, ((x, labels), _) = dense
        wrong = certify(model, [(x, (labels + 1) % 3)], [0.1], largest=True, search_steps=STEPS)
        is_right = found.radii[:6] > 0
        assert not wrong.radii[is_right].any()
        assert {wrong.by[place] for place in torch.where(is_right)[0].tolist()} == {""}

    def test_searches_in_vain_are_said(self):
        """A linear network has its radii from its constant: minorants cannot gain anything."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3))
        x = torch.randn(8, 4)
        with torch.no_grad():
            labels = model(x).argmax(1)
        found = certify(model, [(x, labels)], [0.1], largest=True, search_steps=5)
        assert len(found.notes) == 1
        assert "minorants gained too little around the first inputs" in found.notes[0]
        plain = certify(model, [(x, labels)], [0.1], search_steps=0)
        torch.testing.assert_close(found.radii, plain.radii, rtol=1e-2, atol=0)

    def test_a_first_search_without_hope_is_given_up_halfway_and_no_other(self, dense, found, monkeypatch):
        taken: list[int] = []
        step = _Ascent._step
        monkeypatch.setattr(_Ascent, "_step", lambda self, *given: taken.append(1) or step(self, *given))
        assert torch.equal(searched(*dense).radii, found.radii)  # minorants gain here, and nothing is given up
        usual = len(taken)
        taken.clear()
        monkeypatch.setattr("gramcert.certification.local.HOPELESS", 1e9)
        less = searched(*dense).radii
        assert STEPS / 2 <= usual - len(taken) <= STEPS / 2 + 10  # of the first search alone
        assert bool((less >= searched(*dense, search_steps=0).radii).all())

    def test_networks_that_are_too_large_are_said(self, dense, monkeypatch):
        monkeypatch.setattr("gramcert.certification.local.MOST_ENTRIES", 10)
        found = searched(*dense)
        assert len(found.notes) == 1
        assert "too many for a search around each input" in found.notes[0]
        assert torch.equal(found.radii, searched(*dense, search_steps=0).radii)


class TestTheSameAnswer:
    """From any source, in any number of portions and processes, at once or with an interruption."""

    def test_several_searches_at_once(self, dense, found, monkeypatch):
        monkeypatch.setattr("gramcert.certification.local.PORTION", 300)
        monkeypatch.setattr("gramcert.certification.local.TRIAL", 3)
        one, two = searched(*dense, jobs=1), searched(*dense, jobs=2)
        assert torch.equal(one.radii, two.radii)
        assert one.by == two.by
        torch.testing.assert_close(one.radii, found.radii, rtol=0.02, atol=0)  # sums of float32 in other orders

    def test_a_second_call_searches_nothing(self, dense, found, tmp_path, monkeypatch):
        first = searched(*dense, resume=tmp_path / "kept")
        assert torch.equal(first.radii, found.radii)
        assert list((tmp_path / "kept").glob("*.npz"))
        monkeypatch.setattr("gramcert.minorants.search.Search.__call__", refuse)
        again = searched(*dense, resume=str(tmp_path / "kept"))
        assert torch.equal(again.radii, found.radii)
        assert again.by == found.by
        with pytest.raises(AssertionError, match="a search"):
            searched(*dense, resume=tmp_path / "kept", search_steps=STEPS + 1)
        with pytest.raises(AssertionError, match="a search"):
            searched(*dense)

    @pytest.mark.parametrize("damage", ["cut", "empty", "junk", "other arrays", "hostile numbers"])
    def test_damaged_files_are_not_believed(self, dense, found, tmp_path, damage):
        """They are searched anew; numbers that are none prove nothing."""
        import numpy as np

        searched(*dense, resume=tmp_path)
        for path in tmp_path.glob("*.npz"):
            content = path.read_bytes()
            if damage == "other arrays":
                np.savez(path, room=np.ones(3))
            elif damage == "hostile numbers":
                with np.load(path) as archive:
                    arrays = {name: np.full_like(archive[name], np.inf) for name in archive.files}
                np.savez(path, **arrays)
            else:
                path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "junk": b"PK" * 99}[damage])
        again = searched(*dense, resume=tmp_path)
        if damage == "hostile numbers":
            assert bool((again.radii <= found.radii).all())
            assert "minorant" not in again.by
        else:
            assert torch.equal(again.radii, found.radii)

    @pytest.mark.parametrize("last", [nn.Softmax(1), nn.LogSoftmax(1)], ids=str)
    def test_probabilities_have_the_radii_of_their_logits(self, dense, found, last):
        model, batches = dense
        assert torch.equal(searched(nn.Sequential(*model, last), batches).radii, found.radii)

    def test_files_of_the_model(self, dense, found, tmp_path):
        model, batches = dense
        example = (torch.zeros(1, 6),)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.save(torch.export.export(model, example), tmp_path / "model.pt2")
            torch.onnx.export(model, example, tmp_path / "model.onnx", dynamo=True, verbose=False)
        for name in ("model.pt2", "model.onnx"):
            other = searched(tmp_path / name, batches)
            torch.testing.assert_close(other.radii, found.radii, rtol=1e-3, atol=0)
            assert torch.equal(other.predictions, found.predictions)
            assert other.by == found.by

    def test_progress(self, dense):
        seen = []
        searched(*dense, report=lambda *done: seen.append(done))
        pairs = [done for done in seen if done[0] == "pairs of inputs and classes"]
        assert pairs
        assert all(done <= total for _, done, total in pairs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search_steps": -1}, r"certify\(search_steps=-1\): expected an int that is at least 0"),
        ({"search_steps": 1.5}, r"certify\(search_steps=1.5\): expected an int that is at least 0"),
        ({"search_steps": True}, r"certify\(search_steps=True\): expected an int that is at least 0"),
        ({"jobs": 0}, r"certify\(jobs=0\): expected an int that is at least 1"),
        ({"jobs": None}, r"certify\(jobs=None\): expected an int that is at least 1"),
        ({"certificate": "radii.json"}, r"certify\(certificate='radii.json'\): expected a file ending in .npz"),
        ({"certificate": "a.npz", "search_steps": 0}, r"certify\(certificate='a.npz'\): .*search steps"),
        ({"architecture": "x"}, r"certify\(architecture, prefix\): for files of weights only"),
    ],
    ids=str,
)
def test_bad_arguments(dense, options, message):
    with pytest.raises(ValueError, match=message):
        certify(*dense, [0.1], **options)


def test_a_certificate_of_nothing_is_not_written(dense, tmp_path):
    model, ((x, _), _) = dense
    wrong = [(x, (model(x).argmax(1) + 1) % 3)]
    found = certify(model, wrong, [0.1], search_steps=2, certificate=tmp_path / "radii.npz")
    assert not found.radii.any()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"certify\(certificate=.*there is no such folder"):
        certify(model, wrong, [0.1], certificate=tmp_path / "nowhere" / "radii.npz")


def test_unknown_files_have_one_error(dense, tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        certify(tmp_path / "missing.onnx", dense[1], [0.1])
    assert math.isfinite(searched(*dense, search_steps=1).error)


def test_windows_that_read_nothing_but_padding():
    """Their value is minus infinity for every input, and nothing is said."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pool = nn.MaxPool1d(2, 1, 1, dilation=3)
        layers = [nn.Linear(3, 4), nn.Unflatten(1, (2, 2)), pool, nn.ReLU(), nn.Flatten(), nn.Linear(2, 3)]
        model, x = nn.Sequential(*layers).double(), torch.randn(2, 3)
    found = certify(model, [(x, model(x.double()).argmax(1))], [0.1], largest=True)
    assert found.by.count("minorant") == 0
