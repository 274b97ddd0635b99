"""Entries read and written by constant indices; a finite constant is expected of every LINEAR."""

import math

import pytest
import torch
import torch.nn.functional as F

import gramcert
from auditing_cases import assert_exact, assert_same_from_file, function
from auditing_networks import Function

ROWS = (4, 6)
RANDOM = torch.Generator().manual_seed(0)
BELOW_SIX = torch.randint(0, 6, (4, 9), generator=RANDOM)
BELOW_THREE = torch.randint(0, 3, (1, 4, 6), generator=RANDOM)
MASK = torch.rand(4, 6, generator=RANDOM) > 0.5
ORDER = torch.tensor([3, 0, 5, 1])
LINEAR = {
    "gather": (lambda x, i: x.gather(2, i[None]), ROWS, BELOW_SIX),
    "take": (lambda x, i: torch.take(x, i), ROWS, BELOW_SIX),
    "take along an axis": (lambda x, i: torch.take_along_dim(x, i[None], 2), ROWS, BELOW_SIX),
    "a mask": (lambda x, m: x[:, m], ROWS, MASK),
    "a mask of one axis": (lambda x, m: x[:, :, m], ROWS, MASK[0]),
    "masked select": (lambda x, m: torch.masked_select(x, m), ROWS, MASK),
    "masked scatter": (lambda x, m: torch.zeros_like(x).masked_scatter(m[None], x), ROWS, MASK),
    "fold": (lambda x: F.fold(x, (5, 4), (2, 3), padding=(1, 0), stride=(2, 1)), (12, 6)),
    "fold with holes": (lambda x: F.fold(x, (5, 5), 2, dilation=2, stride=2), (8, 4)),
    "unfold and fold": (lambda x: F.fold(F.unfold(x, 3, padding=1), (5, 5), 3, padding=1), (2, 5, 5)),
    "scatter add": (lambda x, i, c: c.scatter_add(2, i, x), ROWS, BELOW_THREE, torch.ones(1, 4, 3)),
    "scatter add to a value": (lambda x, i, c: x.scatter_add(2, i, c), ROWS, BELOW_THREE, torch.ones(1, 4, 6)),
    "index add": (lambda x, i, c: c.index_add(1, i, x, alpha=2), ROWS, ORDER[[0, 1, 1, 3]], torch.ones(1, 4, 6)),
    "index copy": (lambda x, i, c: c.index_copy(1, i, x), ROWS, ORDER, torch.ones(1, 6, 6)),
    "scatter": (lambda x, i: x.scatter(2, i, x.flip(1)[:, :, 2:]), ROWS, ORDER.expand(1, 4, 4).clone()),
    "scatter a number": (lambda x, i: x.scatter(2, i, 3.0), ROWS, ORDER.expand(1, 4, 4).clone()),
    "written slice": (lambda x: torch.slice_scatter(x, x[:, :, :2], 2, 4, 6), ROWS),
    "written row": (lambda x: torch.select_scatter(x, x[:, 0], 1, 3), ROWS),
    "written diagonal": (lambda x: torch.diagonal_scatter(x, x[:, 0, :4], 0, 1, 2), ROWS),
}


@pytest.mark.parametrize("name", LINEAR)
def test_moved_and_summed_entries_have_their_true_norm(name):
    action, shape, *constants = LINEAR[name]
    assert_exact(function(action, *constants), shape)


@pytest.mark.parametrize("name", ["gather", "a mask", "masked select", "scatter add", "fold"])
def test_a_file_has_the_constant_of_the_module(name, tmp_path):
    action, shape, *constants = LINEAR[name]
    assert_same_from_file(function(action, *constants), shape, tmp_path / "model.pt2")


def test_what_is_written_in_place_is_followed():
    """Finite: two of three columns are written over, the third is kept."""

    def rewritten(x, i):
        y = 2 * x
        y[:, :, i] = x[:, :, :2]
        return y

    assert_exact(function(rewritten, torch.tensor([2, 0])), (4, 3))


UNBOUNDED = {
    "an index of the input": (lambda x: x.gather(1, x.argsort(1)), "an index jumps|depend on the input|nothing"),
    "written twice": (lambda x: x.scatter(1, torch.tensor([[0, 0]]), x[:, :2]), "occur twice"),
    "a mask of the input": (lambda x: x.masked_fill(x > 0, 0.0), "a comparison jumps"),
    "another reduction": (lambda x: x.scatter(1, torch.tensor([[0, 1]]), x[:, :2], reduce="multiply"), "reduction"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNBOUNDED)
def test_what_depends_on_the_input_otherwise_is_unbounded(name):
    action, reason = UNBOUNDED[name]
    found = gramcert.audit(Function(action), (4,))
    assert found.upper == math.inf
    assert any(part in " ".join(found.reasons) for part in reason.split("|")), found.reasons
