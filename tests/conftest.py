import os

# Before torch is imported, and for the processes that tests start: on layers as small as here a second thread does
# nothing but wait, and waits by turning in circles. What has to hold with several threads asks for `threads`.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from types import SimpleNamespace

import hypothesis
import pytest
import torch

# Nothing may depend on how busy the machine is: no deadlines, and no complaint that layers are drawn slowly.
AT_ANY_SPEED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}

# The usual run draws the same layers every time; `make test-slow` draws new ones.
hypothesis.settings.register_profile("usual", derandomize=True, max_examples=80, **AT_ANY_SPEED)
hypothesis.settings.register_profile("slow", max_examples=2000, print_blob=True, **AT_ANY_SPEED)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "usual"))


@pytest.fixture(params=[1, 2])
def threads(request):
    """For what has to hold however sums are shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def brief_searches(request, monkeypatch):
    """Few tests are about how far searches for multipliers, or for two inputs, go: they ask for `whole_searches`."""
    if "whole_searches" not in request.fixturenames:
        monkeypatch.setattr("gramcert.networks.search.LAST_SHARPNESS", 8.0)
        monkeypatch.setattr("gramcert.networks.search.MOST_STEPS", 2)
        monkeypatch.setattr("gramcert.networks.search.CLOSED_FORMS", ((0.25, 0.75),))
        monkeypatch.setattr("gramcert.operators.pairs.WORK", 1)


@pytest.fixture
def whole_searches():
    """Searches as users have them."""


@pytest.fixture
def clock(monkeypatch):
    """For the limits of certified answers: a second passes with each look at it, whatever the machine is doing."""

    def perf_counter():
        shown.looks += 1
        return float(shown.looks)

    shown = SimpleNamespace(looks=0, perf_counter=perf_counter)
    for module in ("work", "torus"):
        monkeypatch.setattr(f"gramcert.certified.{module}.time", shown)
    return shown


@pytest.fixture
def without_rounding(monkeypatch):
    """Error terms and directed rounding of the evaluation taken out, for tests that must fail then."""

    def take_out():
        for module in (
            "rounded",
            "linear",
            "graph",
            "rules",
            "patterns",
            "reflection",
            "elementwise",
            "evaluation",
            "written_out",
            "windows",
        ):
            for name in ("gamma", "underflow"):
                monkeypatch.setattr(f"gramcert.operators.{module}.{name}", lambda *_: 0.0, raising=False)
            for name in ("next_up", "up"):
                monkeypatch.setattr(f"gramcert.operators.{module}.{name}", lambda value: value, raising=False)

    return take_out
