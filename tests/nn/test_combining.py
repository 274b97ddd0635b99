"""Residual sums and concatenations: what they refuse, and their constants when something was changed afterwards."""

import math

import pytest
import torch
from torch import nn

import gramcert.nn as gnn
from gramcert import lipschitz_bound
from reference import jacobian_norm

ROUNDING = 100 * torch.finfo(torch.float32).eps


def test_residual_sums_do_not_repeat_entries():
    """A module with one output would be added to each of many: a constant of 2.5 where 1 was said."""
    for module, x in ((nn.Linear(16, 1), torch.ones(1, 16)), (nn.Conv2d(8, 1, 1), torch.ones(1, 8, 4, 4))):
        block = gnn.Residual(module)
        with pytest.raises(ValueError, match=r"Residual\(module\): expected an output of shape .*, got"):
            block(x)
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            gnn.export(block)(x)


def test_parts_that_overwrite_their_input_are_refused():
    for make in (gnn.Residual, gnn.Concatenation):
        with pytest.raises(ValueError, match=r"LeakyReLU\(inplace=True\) may overwrite the input"):
            make(nn.Sequential(nn.LeakyReLU(3.0, inplace=True)))
        block = make(nn.LeakyReLU(3.0))
        block.get_submodule("module" if make is gnn.Residual else "parts.0").inplace = True
        with pytest.raises(ValueError, match=r"lipschitz_bound\(.*may overwrite the input"):
            lipschitz_bound(block)


def test_residual_whose_weight_was_taken_away_is_a_plain_sum():
    block = gnn.Residual(nn.Identity())
    block.weight = None
    assert lipschitz_bound(block) == 2


@pytest.mark.parametrize(
    ("make", "name", "value", "constant"),
    [
        (
            lambda: gnn.Concatenation(nn.Identity(), nn.Identity()),
            "parts",
            nn.ModuleList([nn.Identity()] * 3),
            1.5**0.5,
        ),
        (lambda: gnn.Concatenation(*[nn.Identity()] * 2), "factor", -2.0, math.sqrt(8)),
        (lambda: gnn.Residual(gnn.Abs()), "weight", -3.0, 3.5),
    ],
    ids=["parts", "factor", "weight"],
)
def test_changes_after_construction(make, name, value, constant):
    block = make()
    setattr(block, name, value)
    assert lipschitz_bound(block) == pytest.approx(constant, rel=ROUNDING)
    reached = jacobian_norm(block, -torch.ones(1, 2))
    assert constant * (1 - ROUNDING) <= reached <= lipschitz_bound(block)


def test_what_is_no_module_is_refused():
    for call, message in (
        (lambda: gnn.Residual(3), r"Residual\(module\): expected a torch.nn.Module, got 3"),
        (lambda: gnn.Concatenation([nn.ReLU()]), r"Concatenation\(\*modules\): expected torch.nn.Modules"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
