"""Products with constants, in all the forms that torch has for them; a finite constant is expected of every LINEAR."""

import math

import pytest
import torch

import gramcert
from auditing_cases import assert_exact, assert_same_from_file, function
from auditing_networks import Function


def random(*shape):
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


IMAGE, ROWS = (3, 4, 6), (4, 6)
LINEAR = {
    "a matrix": (lambda x, w: torch.einsum("bij,jk->bik", x, w), ROWS, random(6, 3)),
    "a matrix from the left": (lambda x, w: torch.einsum("ki,bij->bkj", w, x), ROWS, random(3, 4)),
    "a matrix for each row": (lambda x, w: torch.einsum("bij,ijk->bik", x, w), ROWS, random(4, 6, 3)),
    "two axes": (lambda x, w: torch.einsum("bij,kij->bk", x, w), ROWS, random(3, 4, 6)),
    "all axes": (lambda x, w: torch.einsum("bij,ij->b", x, w), ROWS, random(4, 6)),
    "factors": (lambda x, w: torch.einsum("bij,i->bji", x, w), ROWS, random(4)),
    "factors and sums": (lambda x, w: torch.einsum("bij,i->bi", x, w), ROWS, random(4)),
    "a sum": (lambda x: torch.einsum("bij->b", x), ROWS),
    "a diagonal": (lambda x: torch.einsum("bii->bi", x), (5, 5)),
    "a trace": (lambda x: torch.einsum("bii->b", x), (5, 5)),
    "axes in their order": (lambda x: torch.einsum("kij", x), ROWS),
    "two matrices": (lambda x, w, v: torch.einsum("bij,jk,kl->bil", x, w, v), ROWS, random(6, 3), random(3, 5)),
    "an axis of the constant": (lambda x, w: torch.einsum("bij,jkq->bk", x, w), ROWS, random(6, 3, 2)),
    "dots": (lambda x, w: torch.einsum("...j,jk->...k", x, w), ROWS, random(6, 3)),
    "dots on both": (lambda x, w: torch.einsum("...ij,...jk->...ik", x, w), IMAGE, random(3, 6, 2)),
    "an axis of one place": (lambda x, w: torch.einsum("bij,jk->bik", x[:, :, :1], w), ROWS, random(6, 3)),
    "the diagonal of a constant": (lambda x, w: torch.einsum("bij,jj->bij", x, w), ROWS, random(6, 6)),
    "matrices": (lambda x, w: x @ w, IMAGE, random(3, 6, 2)),
    "one input, many matrices": (lambda x, w: x @ w, ROWS, random(3, 6, 2)),
    "matrices from the left": (lambda x, w: w @ x, IMAGE, random(3, 2, 4)),
    "a vector": (lambda x, w: x @ w, ROWS, random(6)),
    "bmm": (lambda x, w: torch.bmm(x[0], w), IMAGE, random(3, 6, 2)),
    "bmm of one": (lambda x, w: torch.bmm(x, w), ROWS, random(1, 6, 2)),
    "baddbmm": (
        lambda x, w, c: torch.baddbmm(c, x[0], w, alpha=0.5, beta=2),
        IMAGE,
        random(3, 6, 2),
        random(3, 4, 2),
    ),
    "baddbmm to a value": (
        lambda x, w, c: torch.baddbmm(x[0], c, w, alpha=0.5, beta=2),
        IMAGE,
        random(3, 5, 6),
        random(3, 4, 5),
    ),
    "addbmm": (lambda x, w, c: torch.addbmm(c, x[0], w), IMAGE, random(3, 6, 2), random(4, 2)),
    "addmm": (lambda x, w, c: torch.addmm(c, x[0], w, beta=0), ROWS, random(6, 2), random(4, 2)),
    "addmv": (lambda x, c, w: torch.addmv(c, x[0], w), ROWS, random(4), random(6)),
    "addr": (lambda x, c, w: torch.addr(c, x[0], w), (6,), random(6, 5), random(5)),
    "mv": (lambda x, w: torch.mv(x[0], w), ROWS, random(6)),
    "mv of a vector": (lambda x, w: torch.mv(w, x[0]), (6,), random(3, 6)),
    "dot": (lambda x, w: torch.dot(x[0], w), (6,), random(6)),
    "outer": (lambda x, w: torch.outer(x[0], w), (6,), random(5)),
    "kron": (lambda x, w: torch.kron(x, w), ROWS, random(2, 3)),
    "kron from the left": (lambda x, w: torch.kron(w, x[0]), ROWS, random(2, 3)),
    "inner": (lambda x, w: torch.inner(x, w), ROWS, random(3, 6)),
    "tensordot": (lambda x, w: torch.tensordot(x, w, ([2, 1], [0, 2])), ROWS, random(6, 3, 4)),
    "cumsum": (lambda x: x.cumsum(2), ROWS),
    "lerp": (lambda x, c: torch.lerp(x, c, 0.3), ROWS, random(4, 6)),
    "lerp by weights": (lambda x, c: torch.lerp(c, x, c), ROWS, random(4, 6)),
    "addcmul": (lambda x, c, d: torch.addcmul(c, x, d, value=0.7), ROWS, random(4, 6), random(6)),
    "addcmul of constants": (lambda x, c, d: torch.addcmul(2 * x, c, d), ROWS, random(4, 6), random(6)),
    "addcdiv": (lambda x, c, d: torch.addcdiv(c, x, d.exp(), value=0.7), ROWS, random(4, 6), random(4, 6)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_product_with_constants_has_its_true_norm(name):
    action, shape, *constants = LINEAR[name]
    assert_exact(function(action, *constants), shape)


@pytest.mark.parametrize("name", ["a matrix for each row", "two matrices", "matrices", "baddbmm", "cumsum", "lerp"])
def test_a_file_has_the_constant_of_the_module(name, tmp_path):
    action, shape, *constants = LINEAR[name]
    assert_same_from_file(function(action, *constants), shape, tmp_path / "model.pt2")


def test_a_mix_of_two_values_counts_both():
    """Finite: 0.7·1 + 0.3·1."""
    found = gramcert.audit(function(lambda x: torch.lerp(x, torch.relu(x), 0.3)), (4,))
    assert 1 - 1e-12 <= found.upper <= 1 + 1e-12


UNBOUNDED = {
    "of two values": (lambda x: torch.einsum("bij,bkj->bik", x, x), "both depend on the input"),
    "by a weight": (lambda x: torch.lerp(x, 2 * x, torch.sigmoid(x)), "weight that depends"),
    "by itself": (lambda x: torch.addcmul(x, x, x), "square"),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_products_of_values_are_unbounded(name):
    action, reason = UNBOUNDED[name]
    found = gramcert.audit(Function(action), (2, 3))
    assert found.upper == math.inf
    assert reason in " ".join(found.reasons)


def test_a_view_by_einsum_shares_memory():
    """Unbounded: what is written through the result of an einsum without factors is written into its operand."""

    def overwritten(x):
        y = x * 1
        torch.einsum("bij->bji", y).mul_(3)
        return y

    found = gramcert.audit(Function(overwritten), (2, 3))
    assert found.upper == math.inf
