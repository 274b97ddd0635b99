"""The precision of float32 products is a setting of the whole process: full inside, and as it was afterwards."""

import itertools
import threading

import pytest
import torch

import gramcert
from gramcert.precision import full_float32_products
from gramcert.rounding import checked_arithmetic


def setting():
    return torch.backends.mkldnn.matmul.fp32_precision


def owners():
    """All libraries, and the products of one, which inherit from them."""
    return torch.backends, torch.backends.mkldnn.matmul


@pytest.fixture(autouse=True)
def _as_it_was():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
    for owner in owners():
        owner.fp32_precision = "none"


@pytest.mark.parametrize("values", list(itertools.product(["none", "ieee", "tf32"], repeat=2)), ids=" ".join)
def test_what_was_inherited_is_still_inherited(values):
    for owner, value in zip(owners(), values, strict=True):
        owner.fp32_precision = value
    before = [owner.fp32_precision for owner in owners()]
    with full_float32_products("test"):
        assert setting() in ("ieee", "none")
    assert [owner.fp32_precision for owner in owners()] == before
    # Who follows whom, when the others are changed.
    for owner, value in zip(owners(), values, strict=True):
        if value == "none":
            continue
        for other in ("ieee", "tf32"):
            owner.fp32_precision = other
            expected = ""
            for index, follower in enumerate(owners()):
                own = other if follower is owner else values[index]
                expected = own if own != "none" else expected or "none"
                assert follower.fp32_precision == expected
        owner.fp32_precision = value


def test_threads_agree():
    """The setting stays raised until the last one has left, whoever came first."""
    torch.set_float32_matmul_precision("medium")
    before = setting()
    entered, leave, seen = threading.Event(), threading.Event(), []

    def other():
        with full_float32_products("other"):
            entered.set()
            leave.wait()
            seen.append(setting())

    thread = threading.Thread(target=other)
    with full_float32_products("first"):
        thread.start()
        entered.wait()
    assert setting() != before
    leave.set()
    thread.join()
    assert seen[0] in ("ieee", "none")
    assert setting() == before
    assert torch.get_float32_matmul_precision() == "medium"


def test_a_change_in_the_meantime_is_an_error():
    with (
        pytest.raises(RuntimeError, match="test: the precision of float32 products was set to"),
        checked_arithmetic("test"),
    ):
        torch.set_float32_matmul_precision("medium")
    assert torch.get_float32_matmul_precision() == "medium"


def test_calls_leave_the_setting_alone():
    torch.set_float32_matmul_precision("high")
    assert 1 in gramcert.spectral_norm(torch.eye(3))
    assert torch.get_float32_matmul_precision() == "high"
