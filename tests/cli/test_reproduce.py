import csv
import json
import pickle

import numpy as np
import pytest

TINY = [
    *("--set", "widths=12", "--set", "blocks=1", "--set", "inner=4", "--set", "pool=8", "--set", "dense_blocks=1"),
    *("--set", "dense_inner=8", "--set", "epochs=1", "--set", "batch=32", "--set", "augmentation.crop=1"),
]


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """CIFAR-10 in its standard layout, with 20 random images per batch."""
    folder = tmp_path_factory.mktemp("data") / "cifar-10-batches-py"
    folder.mkdir()
    random = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        data = random.integers(0, 256, (20, 3072), dtype=np.uint8)
        batch = {b"data": data, b"labels": [int(label) for label in random.integers(0, 10, 20)]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": [b"c%d" % i for i in range(10)]}, protocol=2))
    return folder.parent


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


def test_figure_1_writes_data_and_plot(run, tmp_path):
    result = run("reproduce", "figure-1", "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["rows"] == json.loads((tmp_path / "figure-1.json").read_text())["rows"]
    assert is_png(tmp_path / "figure-1.png")
    again = run("reproduce", "figure-1", "--out", tmp_path)
    assert "sampling factor" in again.stdout
    assert len(json.loads((tmp_path / "figure-1.json").read_text())["rows"]) == len(printed["rows"])


def test_figure_2_sets_every_method_beside_the_proven_truth_and_goes_on_where_it_stopped(run, tmp_path):
    first = run("reproduce", "figure-2", "--out", tmp_path, "--channels", "1", "--seeds", "0", "--json")
    assert first.exit_code == 0, first.output
    rows = json.loads(first.stdout)["rows"]
    errors = {row["method"]: row["relative error"] for row in rows}
    assert 0 <= errors["spectral_norm"] <= 1e-3
    assert errors["norm2_toep (inf)"] > 0 > errors["power iteration"]
    assert all("Cholesky" in row["truth by"] for row in rows)
    more = run("reproduce", "figure-2", "--out", tmp_path, "--channels", "1,2", "--seeds", "0", "--json")
    assert json.loads(more.stdout)["rows"][: len(rows)] == rows  # times and all: they were not run again
    assert is_png(tmp_path / "figure-2.png")
    with (tmp_path / "figure-2.csv").open() as file:
        assert {row["channels"] for row in csv.DictReader(file)} == {"1", "2"}


def test_table_1_trains_certifies_and_goes_on_where_it_stopped(run, refused, tmp_path, archive):
    words = ["reproduce", "table-1", "--data", archive, "--out", tmp_path, *TINY]
    first = run(*words, "--seeds", "0", "--json")
    assert first.exit_code == 0, first.output
    summary = {line["rescaling"]: line for line in json.loads(first.stdout)["summary"]}
    assert list(summary) == ["AOL", "SR, t = 3", "frequency SR, t = 1", "frequency SR, t = 2"]
    for line in summary.values():
        assert 100 >= line["clean"] >= line["36/255"] >= line["72/255"] >= line["108/255"] >= line["255/255"] >= 0
    before = json.loads((tmp_path / "table-1.json").read_text())["rows"]
    assert {row["steps"] for row in before} == {100 // 32}
    second = run(*words, "--seeds", "0,1", "--no-keep-runs")
    assert second.exit_code == 0, second.output
    rows = json.loads((tmp_path / "table-1.json").read_text())["rows"]
    assert rows[:4] == before
    assert [row["seed"] for row in rows] == [0] * 4 + [1] * 4
    assert "paper S: SR, t = 3" in second.stdout
    assert "72.44" in second.stdout
    assert is_png(tmp_path / "table-1.png")
    assert (tmp_path / "runs" / "table-1" / "aol-0").exists()
    assert not (tmp_path / "runs" / "table-1" / "aol-1").exists()
    assert "holds rows of other settings" in refused(*words, "--set", "lr=0.5")


def test_table_2_is_of_cifar_100(run, tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    random = np.random.default_rng(0)
    for name, count in (("train", 64), ("test", 20)):
        data = random.integers(0, 256, (count, 3072), dtype=np.uint8)
        batch = {b"data": data, b"fine_labels": [int(label) for label in random.integers(0, 100, count)]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    meta = {b"fine_label_names": [b"c%d" % i for i in range(100)]}
    (folder / "meta").write_bytes(pickle.dumps(meta, protocol=2))
    result = run("reproduce", "table-2", "--data", folder, "--out", tmp_path / "out", *TINY, "--seeds", "0")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "out" / "table-2.json").read_text())["rows"]
    assert [row["steps"] for row in rows] == [2] * 4
    assert all(1 <= row["lipschitz"] < 1 + 1e-4 for row in rows)
    assert "47.5" in result.stdout  # the paper's, of its medium network
    assert "surely shares" in " ".join(result.stdout.split())
    assert is_png(tmp_path / "out" / "table-2.png")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["figure-2", "--channels", "0"], "--channels '0': expected different integers of at least 1"),
        (["figure-2", "--seeds", "a"], "--seeds 'a': expected integers like 0,1,2"),
        (["table-1", "--seeds", "1,1"], "--seeds '1,1': expected different integers of at least 0"),
        (["table-1", "--size", "XXL"], "--size 'XXL': expected nano, S or M"),
        (["table-1", "--set", "colour=3"], "unknown field 'colour'"),
        (["table-1", "--set", "rescaling=sn"], "--set rescaling: the table itself sets it"),
        (["table-1", "--set", "dataset=digits"], "--set dataset: the table itself sets it"),
        (["table-2"], "cifar100: the path of its images is needed"),
    ],
)
def test_bad_input_is_one_line(refused, tmp_path, monkeypatch, words, expected):
    monkeypatch.delenv("GRAMCERT_DATA", raising=False)
    assert expected in refused("reproduce", *words, "--out", tmp_path / "out")
