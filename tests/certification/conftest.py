import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def without_rounding(monkeypatch):
    """Error terms and directed rounding of the evaluation taken out, for tests that must fail then."""

    def take_out():
        for module in ("rounded", "forward"):
            for name in ("gamma", "underflow"):
                monkeypatch.setattr(f"gramcert.certification.{module}.{name}", lambda *_: 0.0, raising=False)
            for name in ("next_up", "up"):
                monkeypatch.setattr(f"gramcert.certification.{module}.{name}", lambda value: value, raising=False)

    return take_out
