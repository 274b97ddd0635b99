"""Measurements in one process or several: each map once, kept as soon as its norm is known."""

import math

import pytest
import torch
from torch import nn

import gramcert
from auditing_networks import residual_network
from gramcert.auditing.cache import Cache
from gramcert.auditing.workers import measure_all
from gramcert.operators.matrices import AxisMatrix
from gramcert.operators.measurement import Measured, Norm

EPS = torch.finfo(torch.float64).eps

SHAPE = (3, 8, 8)


def test_an_interrupted_audit_keeps_what_was_measured(tmp_path):
    def interrupt(name, done, total):
        if done == 2:
            raise KeyboardInterrupt("after two")

    with pytest.raises(KeyboardInterrupt, match="after two"):
        gramcert.audit(residual_network(), SHAPE, cache=tmp_path, report=interrupt)
    rows = gramcert.audit(residual_network(), SHAPE, cache=tmp_path).rows
    assert [row.cached for row in rows if row.lower] == [True, True, False]


def test_processes_find_the_same_numbers(tmp_path):
    told = []
    one = gramcert.audit(residual_network(), SHAPE)
    two = gramcert.audit(residual_network(), SHAPE, jobs=2, report=lambda *step: told.append(step[1:]))
    assert math.isfinite(two.upper)
    assert one.upper == pytest.approx(two.upper, rel=1e-9)
    assert told[0] == (0, 3)
    assert (3, 3) in told  # then the search for multipliers


def test_the_same_map_is_measured_once(monkeypatch):
    measured = []
    run = Norm.run
    monkeypatch.setattr(Norm, "run", lambda self, *rest: measured.append(self) or run(self, *rest))
    layer = nn.Linear(6, 6)
    found = gramcert.audit(nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), layer), (6,))
    assert len(measured) == 1
    assert len(found.rows) == 3


def test_measurements_of_matrices_are_exact_where_rows_share_no_place():
    found = measure_all([Norm(AxisMatrix((4,), torch.ones(1, 4, dtype=torch.float64), 0))], 1e-3, Cache(None))
    (only,) = found.values()
    assert isinstance(only, Measured)
    assert only.upper == pytest.approx(2.0, rel=5 * EPS)
