"""The cache and processes: the same numbers, kept as soon as they are known."""

import json
import math

import pytest
import torch
from torch import nn

import gramcert
from auditing_networks import residual_network
from gramcert import Convolution
from gramcert.auditing.architectures import Denoiser
from gramcert.auditing.cache import Cache, pack, unpack
from gramcert.auditing.running import measure_all
from gramcert.operators.linear import AxisMatrix, Convolve, Move, Scale
from gramcert.operators.measurement import Measured, Norm

SHAPE = (3, 8, 8)


def test_a_second_audit_measures_nothing(tmp_path):
    first = gramcert.audit(residual_network(), SHAPE, cache=tmp_path)
    second = gramcert.audit(residual_network(), SHAPE, cache=tmp_path)
    assert second.upper == first.upper
    assert [row.cached for row in first.rows if row.lower] == [False] * 3
    assert [row.cached for row in second.rows if row.lower] == [True] * 3
    assert second.certificate == first.certificate
    other = gramcert.audit(residual_network(), SHAPE, cache=tmp_path, tol=1e-2)
    assert not any(row.cached for row in other.rows)


def test_each_map_is_hashed_once(tmp_path, monkeypatch):
    """Keys, the cache, look-ups and the certificate share one digest; finite."""
    hashed = []
    for kind in (Move, Scale, AxisMatrix, Convolve):
        parts = kind._parts
        monkeypatch.setattr(kind, "_parts", lambda self, parts=parts: hashed.append(self) or parts(self))
    assert math.isfinite(gramcert.audit(residual_network(), SHAPE, cache=tmp_path).upper)
    assert len(hashed) >= 4
    assert len({id(linear) for linear in hashed}) == len(hashed)


def test_a_changed_weight_is_measured_again(tmp_path):
    model = residual_network()
    gramcert.audit(model, SHAPE, cache=tmp_path)
    with torch.no_grad():
        model.linear.weight[0, 0] += 1
    rows = gramcert.audit(model, SHAPE, cache=tmp_path).rows
    assert [row.cached for row in rows if row.lower] == [True, True, False]


def test_damaged_files_are_measured_again(tmp_path):
    expected = gramcert.audit(residual_network(), SHAPE, cache=tmp_path).upper
    for number, path in enumerate(sorted(tmp_path.rglob("*.json"))):
        content = path.read_text()
        path.write_text(["", content.replace("upper", "upp"), content.replace("1", "0")][number % 3])
    found = gramcert.audit(residual_network(), SHAPE, cache=tmp_path)
    assert found.upper == expected
    assert not any(row.cached for row in found.rows)


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path):
    (tmp_path / "file").write_text("")
    found = gramcert.audit(nn.Linear(3, 2), (3,), cache=tmp_path / "file" / "below")
    assert math.isfinite(found.upper)


def test_an_interrupted_audit_keeps_what_was_measured(tmp_path):
    def interrupt(done, total, name):
        if done == 2:
            raise KeyboardInterrupt("after two")

    with pytest.raises(KeyboardInterrupt, match="after two"):
        gramcert.audit(residual_network(), SHAPE, cache=tmp_path, report=interrupt)
    rows = gramcert.audit(residual_network(), SHAPE, cache=tmp_path).rows
    assert [row.cached for row in rows if row.lower] == [True, True, False]


def test_processes_find_the_same_numbers(tmp_path):
    told = []
    one = gramcert.audit(residual_network(), SHAPE)
    two = gramcert.audit(residual_network(), SHAPE, jobs=2, report=lambda done, total, name: told.append((done, total)))
    assert one.upper == pytest.approx(two.upper, rel=1e-9)
    assert told[0] == (0, 3)
    assert told[-1] == (3, 3)


def test_the_same_map_is_measured_once(monkeypatch):
    measured = []
    run = Norm.run
    monkeypatch.setattr(Norm, "run", lambda self, *rest: measured.append(self) or run(self, *rest))
    layer = nn.Linear(6, 6)
    found = gramcert.audit(nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), layer), (6,))
    assert len(measured) == 1
    assert len(found.rows) == 3


def test_results_survive_the_cache_exactly(tmp_path):
    cache = Cache(tmp_path)
    found = Norm(Convolve((1, 2, 6, 6), Convolution(torch.randn(3, 2, 3, 3, dtype=torch.float64), padding=1))).run(1e-3)
    cache.put("ab" * 32, found)
    again = cache.get("ab" * 32)
    assert (again.lower, again.upper, again.witnessed, again.profile) == (
        found.lower,
        found.upper,
        found.witnessed,
        found.profile,
    )
    assert torch.equal(again.witness, found.witness)
    assert again.cached
    assert cache.get("cd" * 32) is None
    assert Cache(None).get("ab" * 32) is None


def test_witnesses_prove_nearly_the_lower_bound():
    layer = Convolution(torch.randn(4, 4, 3, 3, dtype=torch.float64), padding=1)
    found = Norm(Convolve((1, 4, 12, 12), layer)).run(1e-3)
    assert 0.98 * found.lower <= found.witnessed <= found.upper
    assert torch.equal(unpack(pack(found.witness)), found.witness)


def test_a_bomb_in_place_of_a_witness_is_refused():
    with pytest.raises(ValueError, match="shorter witness"):
        unpack(pack(torch.zeros(2**22, dtype=torch.int8)))


def test_limits_are_notes_not_errors():
    layer = Convolution(torch.randn(16, 16, 3, 3, dtype=torch.float64), padding=1)
    found = Norm(Convolve((1, 16, 24, 24), layer)).run(1e-9, 0.0)
    assert found.lower <= found.upper
    assert found.notes


def test_measurements_of_matrices_are_exact_where_rows_share_no_place():
    found = measure_all([Norm(AxisMatrix((4,), torch.ones(1, 4, dtype=torch.float64), 0))], 1e-3, Cache(None))
    (only,) = found.values()
    assert isinstance(only, Measured)
    assert only.upper == pytest.approx(2.0, rel=1e-15)


def test_json_has_no_infinity():
    found = gramcert.audit(nn.Hardshrink(), (3,))
    content = json.loads(found.to_json())
    assert content["upper"] == "unbounded"
    assert content["rows"][0]["upper"] == "unbounded"
    assert "certificate" not in content


def test_a_file_of_weights_is_not_traced_again(tmp_path, monkeypatch):
    torch.manual_seed(0)
    torch.save(Denoiser(1, 4, 3).state_dict(), tmp_path / "weights.pth")
    options = {"architecture": "dncnn", "cache": tmp_path / "cache"}
    first = gramcert.audit(tmp_path / "weights.pth", (1, 8, 8), **options)
    monkeypatch.setattr(torch.export, "export", None)
    again = gramcert.audit(tmp_path / "weights.pth", (1, 8, 8), **options)
    assert again.upper == first.upper
    assert again.certificate == first.certificate
    assert [row.cached for row in again.rows] == [row.lower is not None for row in first.rows]
    assert again.to_html()
    assert json.loads(again.to_json()).keys() == json.loads(first.to_json()).keys()
    # Another shape is traced, which fails here.
    assert "torch.export cannot follow" in gramcert.audit(tmp_path / "weights.pth", (1, 9, 8), **options).reasons[0]
