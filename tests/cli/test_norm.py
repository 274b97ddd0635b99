import json
import math

import numpy as np
import pytest
import torch

import gramcert
from gramcert import Convolution


def answer(run, *words, code=0):
    result = run("norm", *words, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_table_says_what_the_number_is_and_which_geometry_was_used(run, ones):
    result = run("norm", ones, "--padding", "1:2,0:1")
    assert result.exit_code == 0
    for text in (
        "9.00",
        "certified, rounding included; tolerance 0.001 reached",
        "adaptive search of all frequencies",
        "ones.npy: 1×1×3×3, float64",
        "1:2, 0:1 (before:after), zeros",
        "every size at once",
    ):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("words", "arguments", "size"),
    [
        ([], {}, None),
        (["--padding", "same", "--input-size", "16"], {"padding": "same"}, 16),
        (["--padding", "valid", "--input-size", "16,9"], {"padding": "valid"}, (16, 9)),
        (["--padding", "1,2", "--stride", "2,1", "--input-size", "9"], {"padding": (1, 2), "stride": (2, 1)}, 9),
        (["--padding", "1:2,1", "--input-size", "9"], {"padding": [(1, 2), (1, 1)]}, 9),
        (["--dilation", "2", "--input-size", "9"], {"dilation": 2}, 9),
        (
            ["--padding", "1", "--padding-mode", "reflect", "--input-size", "8"],
            {"padding": 1, "padding_mode": "reflect"},
            8,
        ),
        (
            ["--transposed", "--stride", "2", "--output-padding", "1", "--input-size", "5"],
            {"transposed": True, "stride": 2, "output_padding": 1},
            5,
        ),
    ],
)
def test_options_are_the_layer(run, ones, words, arguments, size):
    layer = Convolution(torch.ones(1, 1, 3, 3, dtype=torch.float64), **arguments)
    result = answer(run, ones, *words, "--tol", 1e-6)
    expected = gramcert.spectral_norm(layer, size, tol=1e-6)
    assert (result["lower"], result["upper"]) == (expected.lower, expected.upper)
    assert result["tol_reached"]
    assert result["relative_width"] <= result["tol"] == 1e-6
    assert result["method"] == expected.method
    assert [step["name"] for step in result["steps"]] == [step.name for step in expected.steps]
    assert result["geometry"]["padding"] == [list(pair) for pair in layer.padding]
    assert result["geometry"]["stride"] == list(layer.stride)
    assert result["geometry"]["transposed"] == layer.transposed


def test_groups(run, tmp_path):
    np.save(tmp_path / "groups.npy", np.full((8, 1, 3, 3), 0.5 / 9))
    words = ("--groups", 8, "--padding", 1, "--input-size", 8)
    result = answer(run, tmp_path / "groups.npy", *words)
    truth = (1 + 2 * math.cos(math.pi / 9)) ** 2 / 18
    assert result["lower"] <= truth * (1 + 1e-15)
    assert truth * (1 - 1e-15) <= result["upper"] <= 0.4612


def test_zero_kernel_has_norm_zero(run, tmp_path):
    np.save(tmp_path / "zero.npy", np.zeros((2, 2, 3)))
    result = answer(run, tmp_path / "zero.npy")
    assert (result["lower"], result["upper"]) == (0, 0)


def test_explain(run, ones):
    result = run("norm", ones, "--padding", 1, "--input-size", 8, "--explain")
    assert result.exit_code == 0
    for text in ("dense Cholesky proof", "tried, ", "Lanczos iteration on the layer", "assumed", "IEEE 754"):
        assert text in result.stdout


def test_a_missed_tolerance_is_a_negative_answer(run, ones):
    words = (ones, "--padding", 1, "--padding-mode", "reflect")
    result = answer(run, *words, code=1)
    assert not result["tol_reached"]
    assert result["lower"] <= 9 <= result["upper"]
    assert "cannot close" in result["notes"][0]
    shown = run("norm", *words)
    assert shown.exit_code == 1
    assert "NOT reached" in shown.stdout


def test_limits(run, ones):
    words = (ones, "--padding", 1, "--input-size", 40, "--tol", 1e-8)
    assert "max_bytes=1000" in json.dumps(answer(run, *words, "--max-bytes", 1000, code=1)["notes"])
    assert "max_seconds" in json.dumps(answer(run, *words, "--max-seconds", 0, code=1)["notes"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stride", "x"], "--stride 'x': expected an integer or integers like 32,16"),
        (["--stride", "1,2,3"], "the kernel needs 2 sizes, got 3"),
        (["--padding", "1:x"], "--padding '1:x': expected"),
        (["--padding", "1:2:3,0"], "--padding '1:2:3,0': expected"),
        (["--padding", "same", "--stride", "2"], "padding='same'): expected stride 1"),
        (["--padding-mode", "mirror"], "expected one of zeros, circular, reflect, replicate"),
        (["--input-size", "2"], "the output would be empty"),
        (["--input-size", "9" * 30], "expected integers up to"),
        (["--tol", "2"], "norm(tol=2.0): expected 0 < tol < 1"),
        (["--max-seconds", "-1"], "norm(max_seconds=-1.0): expected None or a number"),
        (["--max-bytes", "0"], "norm(max_bytes=0): expected a positive int"),
        (["--groups", "2"], "groups=2): expected a divisor"),
        (["--output-padding", "1"], "for transposed convolutions only"),
        (["--key", "weight"], "it holds one tensor without a name"),
    ],
)
def test_bad_options(refused, ones, words, message):
    assert message in refused("norm", ones, *words)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite(refused, tmp_path, value):
    np.save(tmp_path / "bad.npy", np.full((1, 1, 3), value))
    assert "expected finite values, got 3 NaN or infinite of 3" in refused("norm", tmp_path / "bad.npy")


def test_overflow(run, tmp_path):
    """float32 weights whose norm is beyond float32 are no trouble, a norm beyond float64 has no upper bound."""
    path = tmp_path / "large.npy"
    np.save(path, np.full((1, 1, 3), 3e38, dtype=np.float32))
    assert answer(run, path)["upper"] >= 9e38 * (1 - 1e-6)
    result = run("compare", path, "--input-size", 4, "--iterations", 1, "--json")
    assert result.exit_code == 0
    compared = json.loads(result.stdout)
    assert compared["truth"] > 3e38
    assert "left out: the value overflows" in {row["note"] for row in compared["rows"]}
    np.save(path, np.full((1, 1, 3), 1e308))
    assert answer(run, path, code=1)["upper"] is None


def test_lack_of_memory(refused, ones, monkeypatch):
    def exhausted(*arguments):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")

    monkeypatch.setattr("gramcert.cli.norm.enclose", exhausted)
    assert "not enough memory" in refused("norm", ones)


def test_unknown_words_are_usage_errors(run):
    assert run("norm").exit_code == 2
    assert run("nonsense").exit_code == 2
    assert run("norm", "x.npy", "--groups", "many").exit_code == 2


def test_version_and_help(run):
    assert run("--version").stdout.strip() == f"gramcert {gramcert.__version__}"
    for words in ([], ["norm"], ["compare"]):
        assert run(*words, "--help").exit_code == 0
