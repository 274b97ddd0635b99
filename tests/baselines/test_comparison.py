import dataclasses
import math
import subprocess
import sys

import pytest
import torch

from gramcert import Convolution
from gramcert.baselines import compare_methods

METHODS = {
    "spectral_norm",
    "spectral_norm, any n",
    "norm2 (this size)",
    "norm2 (every size)",
    "norm2_sampled",
    "norm2_circ",
    "norm2_toep (inf)",
    "norm2_toep (fro)",
    "Theorem 5/6 corrected",
    "Theorem 5/6 as printed",
    "frequency SVD",
    "power iteration",
    "reshaped kernel",
    "four reshapes",
    "sampled density",
    "tensor norm",
}


def same(kernel, mode="zeros"):
    return Convolution(kernel, padding="same", padding_mode=mode)


def rows_of(layer, size, iterations=3):
    return {row.name: row for row in compare_methods(layer, size, iterations, repeats=1).rows}


@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("size", [2, 7])
def test_every_value_keeps_its_promise(kernel, mode, size):
    comparison = compare_methods(same(kernel, mode), size, 3, repeats=1)
    assert {row.name for row in comparison.rows} == METHODS
    assert comparison.all_respected
    for row in comparison.rows:
        assert (row.value is None) == (row.seconds is None) == row.note.startswith("left out")
        if row.value is not None:
            expected = (row.value - comparison.truth) / comparison.truth
            assert row.relative_error == expected
            assert row.seconds > 0


def test_kinds_depend_on_the_padding():
    kernel = torch.ones(1, 1, 3, 3)
    zeros, circular = rows_of(same(kernel), 8), rows_of(same(kernel, "circular"), 8)
    assert [zeros[name].kind for name in ("frequency SVD", "norm2_circ")] == ["estimate", "estimate"]
    assert [circular[name].kind for name in ("frequency SVD", "norm2_circ")] == ["exact", "upper bound"]
    assert zeros["frequency SVD"].respected is None
    assert circular["frequency SVD"].respected is True
    assert zeros["reshaped kernel"].kind == "lower bound"
    assert rows_of(same(kernel), 2)["reshaped kernel"].kind == "estimate"


def test_methods_are_left_out_with_their_reason():
    rows = rows_of(same(torch.ones(1, 1, 3, 3)), 32, 6)
    for name in ("Theorem 5/6 corrected", "Theorem 5/6 as printed"):
        assert rows[name].value is None
        assert "frequencies" in rows[name].note
    assert "only after a Gram product" in rows_of(same(torch.ones(1, 1, 3)), 8, 0)["norm2_toep (inf)"].note
    assert "multiplications" in rows_of(same(torch.ones(1, 1, 3, 3)), 8, 40)["norm2_toep (inf)"].note


def test_the_printed_theorem_can_fail():
    e = torch.tensor([-1.0, 1.0, -1.0], dtype=torch.float64)
    comparison = compare_methods(same(torch.einsum("a,b,c->abc", e, e, e)[None, None]), 3, 0, repeats=1)
    rows = {row.name: row for row in comparison.rows}
    assert comparison.truth == pytest.approx((1 + math.sqrt(2)) ** 3, rel=64 * torch.finfo(torch.float64).eps)
    printed = rows["Theorem 5/6 as printed"]
    assert (printed.kind, printed.respected) == ("not a bound", None)
    assert printed.value < comparison.truth
    assert rows["frequency SVD"].value < comparison.truth
    assert comparison.all_respected


@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_zero_kernel(mode):
    comparison = compare_methods(same(torch.zeros(2, 1, 3, 3), mode), 6, repeats=1)
    assert comparison.truth == 0
    assert comparison.all_respected
    assert {row.value for row in comparison.rows} <= {0.0, None}
    assert {row.relative_error for row in comparison.rows} <= {0.0, None}


def test_a_value_on_the_wrong_side_is_reported(monkeypatch):
    monkeypatch.setattr("gramcert.baselines.methods.four_reshapes", lambda kernel: torch.tensor(1.0))
    comparison = compare_methods(same(torch.ones(1, 1, 3)), 8, 1, repeats=1)
    assert not comparison.all_respected
    assert [row.name for row in comparison.rows if row.respected is False] == ["four reshapes"]


def test_results_are_frozen_and_reproducible():
    layer = same(torch.ones(2, 2, 3))
    first, second = compare_methods(layer, 8, 1, repeats=1, seed=3), compare_methods(layer, 8, 1, repeats=2, seed=3)
    assert [row.value for row in first.rows] == [row.value for row in second.rows]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign"):
        first.rows[0].value = 0.0


def test_progress_is_reported():
    steps = []
    compare_methods(same(torch.ones(1, 1, 3)), 8, 1, repeats=1, report=lambda *step: steps.append(step))
    total = len(METHODS) + 1
    assert [done for _, done, _ in steps] == list(range(total + 1))
    assert {count for _, _, count in steps} == {total}
    assert steps[0][0] == "the truth"


def test_bad_input():
    kernel = torch.ones(2, 2, 3)
    with pytest.raises(ValueError, match=r"compare_methods\(layer\): expected stride 1, .* got stride \(2,\)"):
        compare_methods(Convolution(kernel, stride=2, padding=1), 8)
    with pytest.raises(ValueError, match=r"compare_methods\(layer\): expected stride 1, .* groups 2"):
        compare_methods(Convolution(kernel, groups=2, padding=1), 8)
    with pytest.raises(ValueError, match=r"keeps the size \(8,\), got zeros padding \(\(0, 0\),\)"):
        compare_methods(Convolution(kernel), 8)
    with pytest.raises(ValueError, match=r"expected zero or circular padding .* got reflect"):
        compare_methods(same(kernel, "reflect"), 8)
    with pytest.raises(ValueError, match=r"compare_methods\(layer\): expected finite values"):
        compare_methods(same(kernel * torch.nan), 8)
    with pytest.raises(ValueError, match=r"compare_methods\(iterations=-1\)"):
        compare_methods(same(kernel), 8, -1)
    with pytest.raises(ValueError, match=r"compare_methods\(repeats=\(0,\)\)"):
        compare_methods(same(kernel), 8, repeats=0)
    with pytest.raises(ValueError, match=r"compare_methods\(input_size=\(8, 8\)\): the kernel needs 1 sizes"):
        compare_methods(same(kernel), (8, 8))


def test_importing_is_cheap():
    code = (
        "import sys, gramcert, gramcert.baselines\n"
        "print([name for name in ('scipy', 'typer', 'rich', 'matplotlib', 'safetensors') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
