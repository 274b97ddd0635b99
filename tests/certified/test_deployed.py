"""Constants of layers as deployed: refined where they may be 1, never by the clock, and never loose in silence."""

import math

import pytest
import torch
from torch import nn

import gramcert.nn as gnn
from gramcert import lipschitz_bound, spectral_norm
from gramcert.auditing.entry import audit
from gramcert.certified import deployed, work
from gramcert.certified.deployed import refined
from gramcert.certified.work import Work
from gramcert.nn import export
from gramcert.operators import measurement
from reference import supremum


def test_a_slow_machine_certifies_the_same(monkeypatch):
    """A clock on which every look takes an hour changes no constant."""
    torch.manual_seed(0)
    layers = [gnn.SLLConv2d(4, 4, 3), gnn.SRConv2d(4, 4, 3), nn.Conv2d(4, 4, 3, padding=1)]
    before = [lipschitz_bound(layer, 8) for layer in layers]
    hours = iter(range(10**9))
    monkeypatch.setattr(work.time, "perf_counter", lambda: 3600.0 * next(hours))
    assert [lipschitz_bound(layer, 8) for layer in layers] == before
    assert all(0 < bound < 2 for bound in before)


def test_bounds_that_memory_left_loose_are_said_aloud(monkeypatch):
    torch.manual_seed(0)
    layer = nn.Conv2d(16, 16, 3, padding=1)
    monkeypatch.setattr(measurement, "MAX_BYTES", 2**20)
    with pytest.warns(
        UserWarning, match=r"lipschitz_bound\(Conv2d\): its norm is only known to be .*max_bytes=1048576"
    ):
        bound = lipschitz_bound(layer, 64)
    truth = float(supremum(layer.weight.detach()))  # that of every size, nearly reached at 64
    assert 0.99 * truth <= bound <= 1.01 * truth


def test_residual_layers_warn_too(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(measurement, "MAX_BYTES", 2**16)
    with pytest.warns(UserWarning, match=r"lipschitz_bound\(.*\): its norm is only known to be"):
        bound = lipschitz_bound(gnn.SLLConv2d(4, 8, 3), 32)
    assert 1 <= bound < math.inf


def test_refining_is_limited_by_operations_not_by_time(monkeypatch):
    layer = gnn.SRConv2d(8, 8, 3, padding=1)
    full = refined("test", layer, 16, 1e-3, Work(2**31, None))
    monkeypatch.setattr(deployed, "WORTH", 1.0)
    rough = refined("test", layer, 16, 1e-3, Work(2**31, None))
    assert rough.tol_reached
    assert not rough.notes
    assert full.lower <= rough.upper
    assert full.upper <= rough.upper


def sll():
    torch.manual_seed(0)
    return export(nn.Sequential(gnn.SLLConv2d(3, 4, 3))).eval()


def test_audits_of_residual_layers_heed_time_and_tolerance(tmp_path):
    model = sll()
    hurried = audit(model, (3, 8, 8), max_seconds=0, cache=tmp_path)
    full = audit(model, (3, 8, 8), cache=tmp_path)
    (row,) = [row for row in hurried.rows if row.kind == "residual layer"]
    assert any("max_seconds=0" in note for note in row.notes)
    assert 1 <= full.upper < 1 + 1e-5 < hurried.upper
    assert not any(row.cached for row in full.rows)
    assert not [note for row in full.rows for note in row.notes]
    assert [row.cached for row in audit(model, (3, 8, 8), cache=tmp_path).rows] == [True]


def test_what_ran_out_of_time_is_not_kept(tmp_path):
    """Also where the tolerance was reached, but not the finer one that a norm near 1 deserves."""
    torch.manual_seed(0)
    model = nn.Sequential(export(gnn.SRConv2d(4, 4, 3, padding=1))).eval()
    for seconds in (0, 1e-9):
        assert audit(model, (4, 8, 8), max_seconds=seconds, cache=tmp_path).rows[0].notes
    full = audit(model, (4, 8, 8), cache=tmp_path)
    assert not full.rows[0].cached
    assert full.upper <= spectral_norm(model[0], 8, tol=1e-6).upper * (1 + 1e-3)
