"""Measurements that are kept: the same numbers again, or measured again."""

import functools
import io
import itertools
import json
import math

import pytest
import torch
from rich.console import Console
from torch import nn

import gramcert
from auditing_networks import residual_network
from gramcert import Convolution
from gramcert.auditing.architectures import Denoiser
from gramcert.auditing.cache import Cache, pack, unpack
from gramcert.cli.audit_table import audit_table
from gramcert.networks.search import Budget
from gramcert.operators.linear import Move, Scale
from gramcert.operators.matrices import AxisMatrix, Convolve
from gramcert.operators.measurement import Norm

SHAPE = (3, 8, 8)


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
    assert torch.equal(unpack(pack(found.witness)), found.witness)
    assert again.cached
    assert cache.get("cd" * 32) is None
    assert Cache(None).get("ab" * 32) is None


def test_a_bomb_in_place_of_a_witness_is_refused():
    with pytest.raises(ValueError, match="shorter witness"):
        unpack(pack(torch.zeros(2**22, dtype=torch.int8)))


def test_a_second_audit_measures_nothing(tmp_path):
    first = gramcert.audit(residual_network(), SHAPE, cache=tmp_path)
    second = gramcert.audit(residual_network(), SHAPE, cache=tmp_path)
    assert second.upper == first.upper < math.inf
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
    assert found.upper == expected < math.inf
    assert not any(row.cached for row in found.rows)


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path):
    (tmp_path / "file").write_text("")
    found = gramcert.audit(nn.Linear(3, 2), (3,), cache=tmp_path / "file" / "below")
    assert math.isfinite(found.upper)


def test_what_ran_out_of_time_is_not_kept(tmp_path):
    torch.manual_seed(0)
    model = nn.Conv2d(8, 8, 5)
    rough = gramcert.audit(model, (8, 16, 16), tol=1e-6, max_seconds=0, cache=tmp_path)
    fine = gramcert.audit(model, (8, 16, 16), tol=1e-2, cache=tmp_path)
    again = gramcert.audit(model, (8, 16, 16), tol=1e-6, cache=tmp_path, max_seconds=1e9)
    assert again.upper < fine.upper < rough.upper < math.inf


@pytest.fixture
def weights(tmp_path):
    """A file whose audits are kept as a whole."""
    torch.manual_seed(0)
    torch.save(Denoiser(1, 4, 3).state_dict(), tmp_path / "weights.pth")
    return tmp_path / "weights.pth"


def test_a_search_that_the_clock_cut_off_is_said_and_not_kept(weights, tmp_path, monkeypatch, whole_searches):
    """And the next one goes on from where it stopped."""
    options = {"architecture": "dncnn", "cache": tmp_path / "cache"}
    ticks = itertools.count()
    with monkeypatch.context() as patch:  # a second passes with each look at the clock
        patch.setattr("gramcert.auditing.entry.Budget", functools.partial(Budget, clock=lambda: float(next(ticks))))
        patch.setattr("gramcert.auditing.entry.KEPT_EVERY", 0.0)
        cut = gramcert.audit(weights, (1, 8, 8), search_seconds=20, **options)
        assert "search_seconds=20" in cut.notes[0]
        assert "Note: the search for multipliers was cut off" in cut.to_html()
        assert "cut off by search_seconds" in json.loads(cut.to_json())["notes"][0]
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(audit_table(cut))
        assert "Note: the search for multipliers was cut off by search_seconds=20" in console.export_text()
        again = gramcert.audit(weights, (1, 8, 8), search_seconds=20, **options)
        assert again.upper < cut.upper < math.inf
    whole = gramcert.audit(weights, (1, 8, 8), search_seconds=1e9, **options)
    assert whole.upper <= again.upper
    assert whole.notes == ()
    closed = gramcert.audit(weights, (1, 8, 8), search_seconds=0, architecture="dncnn")
    assert closed.upper > cut.upper
    assert closed.notes == ()  # nothing was cut off
    monkeypatch.setattr(torch.export, "export", None)
    assert gramcert.audit(weights, (1, 8, 8), search_seconds=1e9, **options).upper == whole.upper


def test_a_file_of_weights_is_not_traced_again(weights, tmp_path, monkeypatch):
    options = {"architecture": "dncnn", "cache": tmp_path / "cache"}
    first = gramcert.audit(weights, (1, 8, 8), **options)
    monkeypatch.setattr(torch.export, "export", None)
    again = gramcert.audit(weights, (1, 8, 8), **options)
    assert again.upper == first.upper < math.inf
    assert again.certificate == first.certificate
    assert [row.cached for row in again.rows] == [row.lower is not None for row in first.rows]
    assert again.to_html()
    assert json.loads(again.to_json()).keys() == json.loads(first.to_json()).keys()
    # Another shape is traced, which fails here.
    assert "torch.export cannot follow" in gramcert.audit(weights, (1, 9, 8), **options).reasons[0]
