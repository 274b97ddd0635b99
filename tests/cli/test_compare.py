import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from gramcert.baselines.comparison import Comparison, Row
from gramcert.cli.compare_plot import save_plot
from gramcert.cli.compare_table import comparison_table, verdict
from gramcert.cli.labels import place_labels

SMALL = ("--random", "2,3,3,3", "--input-size", "6", "--iterations", "2")


def row(kind, error, respected=None):
    return Row("method", "someone", 1.0, None, error, 1e-3, kind, respected, "")


def test_table_of_the_embedded_kernel(run):
    result = run("compare", "--input-size", "8", "--iterations", "2")
    assert result.exit_code == 0, result.output
    assert "kernel.npy: 16×16×3×3, float32 · zero padding · input 8×8 · 2 iterations" in result.stdout
    lines = result.stdout.splitlines()
    assert next(line for line in lines if line.startswith(("truth", "norm2"))).startswith("truth, float64")
    for name in ("norm2 (this size)", "norm2_toep (inf)", "power iteration", "tensor norm"):
        assert any(line.startswith(name) for line in lines)
    assert "…" not in result.stdout
    assert any(line.startswith("Theorem 5/6 as printed left out: ") for line in lines)


def test_narrow_terminals_get_the_whole_table(monkeypatch):
    from typer.testing import CliRunner

    from gramcert.cli.app import app

    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["compare", *SMALL])
    assert result.exit_code == 0
    assert "…" not in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 80


def test_json_is_one_object_on_stdout(run):
    result = run("compare", *SMALL, "--json", "--padding-mode", "circular", "--seed", 5)
    assert result.exit_code == 0
    content = json.loads(result.stdout)
    assert content["kernel"]["shape"] == [2, 3, 3, 3]
    assert (content["padding_mode"], content["input_size"], content["seed"]) == ("circular", [6, 6], 5)
    assert content["all_respected"] is True
    rows = {row["name"]: row for row in content["rows"]}
    assert rows["frequency SVD"]["kind"] == "exact"
    assert rows["frequency SVD"]["value"] == pytest.approx(content["truth"], rel=64 * torch.finfo(torch.float32).eps)
    assert set(rows["tensor norm"]) == {
        "name", "source", "value", "lower", "relative_error", "seconds", "kind", "respected", "note"
    }  # fmt: skip


def test_random_kernels_follow_the_seed(run):
    truths = [json.loads(run("compare", *SMALL, "--json", "--seed", s).stdout)["truth"] for s in (1, 1, 2)]
    assert truths[0] == truths[1] != truths[2]


def test_a_zero_kernel_prints_zeros_and_valid_json(run, tmp_path):
    np.save(tmp_path / "zero.npy", np.zeros((2, 2, 3)))
    result = run("compare", tmp_path / "zero.npy", "--input-size", 5, "--iterations", 1, "--json")
    assert result.exit_code == 0
    assert {row["value"] for row in json.loads(result.stdout)["rows"]} <= {0.0, None}


def test_a_broken_promise_is_a_negative_answer(run, monkeypatch):
    monkeypatch.setattr("gramcert.baselines.methods.four_reshapes", lambda kernel: torch.tensor(0.1))
    result = run("compare", *SMALL)
    assert result.exit_code == 1
    assert "✗ WRONG" in result.stdout


def test_an_infinite_error_is_null_in_json(run, monkeypatch):
    monkeypatch.setattr(
        "gramcert.cli.compare.compare_methods",
        lambda *arguments, **options: Comparison(0.0, 1e-3, 1e-9, (row("upper bound", math.inf, True),)),
    )
    content = json.loads(run("compare", *SMALL, "--json").stdout)
    assert content["rows"][0]["relative_error"] is None


def test_marks():
    tolerance = 1e-6
    assert verdict(row("upper bound", 0.1, True), tolerance).plain == "✓"
    assert verdict(row("upper bound", -0.1, False), tolerance).plain == "✗ WRONG"
    assert verdict(row("estimate", 0.1), tolerance).plain == "!"
    assert verdict(row("estimate", -tolerance / 2), tolerance).plain == "!"
    assert verdict(row("not a bound", -0.1), tolerance).plain == "✗ too low"
    assert verdict(Row("m", "s", None, None, None, None, "upper bound", None, "left out: why"), tolerance).plain == "–"


def test_a_table_without_left_out_rows():
    table = comparison_table(Comparison(1.0, 2.0, 1e-6, (row("exact", 0.0, True),)), 80)
    assert table.row_count == 2


def test_plot_is_a_picture(run, tmp_path):
    path = tmp_path / "plot.png"
    result = run("compare", *SMALL, "--plot", path, "--json")
    assert result.exit_code == 0, result.output
    assert path.name in result.stderr.replace("\n", "")
    json.loads(result.stdout)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.size == (1350, 900)
        assert len(image.convert("RGB").getcolors(2**20)) > 100


def test_plots_of_unusual_comparisons(tmp_path):
    nothing = Comparison(0.0, 1e-3, 1e-9, (row("upper bound", math.inf, True),))
    alone = Comparison(1.0, 1e-3, 1e-9, (row("exact", 0.0, True),))
    for name, comparison in (("nothing.png", nothing), ("alone.svg", alone)):
        save_plot(comparison, "heading", tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000


def test_labels_do_not_overlap():
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=100)
    axes = figure.add_subplot()
    axes.set_xlim(0, 10)
    axes.set_ylim(-1, 1)
    points = [(5 + 0.1 * i, 0.0) for i in range(6)] + [(9.9, 0.9), (0.1, -0.9)]
    place_labels(axes, points, [f"a label {i}" for i in range(len(points))], "black", level=0.0)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
    assert len(boxes) == len(points)
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:index])
        assert not any(box.contains(*axes.transData.transform(point)) for point in points)
        assert axes.bbox.x0 <= box.x0
        assert box.x1 <= axes.bbox.x1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--random", "2,2"], "--random '2,2': expected channels out"),
        (["--random", "2,2,0"], "--random '2,2,0': expected channels out"),
        (["--random", "a"], "--random 'a': expected an integer"),
        (["--key", "weight"], "--key 'weight': needs a file"),
        (["--seed", "-1"], "--seed -1: expected"),
        (["--padding-mode", "reflect"], "expected zero or circular padding"),
        (["--input-size", "8,8,8"], "the kernel needs 2 sizes, got 3"),
        (["--iterations", "-1"], "iterations=-1"),
        (["--plot", "plot.doc"], "--plot plot.doc: expected a file ending in .png"),
        (["--plot", "no-such-folder/plot.png"], "no such directory"),
    ],
)
def test_bad_options(refused, words, message):
    assert message in refused("compare", *words)


def test_file_and_random_exclude_each_other(refused, ones):
    assert "expected either a file or a random kernel" in refused("compare", ones, "--random", "1,1,3")


def test_plotting_is_an_extra(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'gramcert[plot]'" in refused("compare", "--plot", "plot.png")


def test_as_a_module(tmp_path):
    command = [sys.executable, "-m", "gramcert"]
    result = subprocess.run([*command, "compare", *SMALL, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["all_respected"] is True
    assert result.stderr == ""
    missing = subprocess.run([*command, "norm", str(tmp_path / "none.npy")], capture_output=True, text=True)
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: ")
    assert "Traceback" not in missing.stderr
