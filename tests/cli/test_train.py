import json
import pickle

import numpy as np
import pytest

from gramcert.training.checkpoints import METRICS, MODEL, Trained
from gramcert.training.configuration import CONFIGURATIONS, from_json, named

TINY = ("widths=4", "blocks=1", "inner=4", "dense_blocks=1", "dense_inner=8", "epochs=2", "images=128", "batch=64")


def options(*changes):
    return [word for change in changes for word in ("--set", change)]


@pytest.fixture
def archive(tmp_path):
    """CIFAR-10 in the standard layout, with two images per file."""
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        data = random.integers(0, 256, (2, 3072), dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({b"data": data, b"labels": [3, 7]}, protocol=2))
    names = {b"label_names": [f"class {i}".encode() for i in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(names, protocol=2))
    return folder.parent


def test_show_prints_the_configuration_and_does_nothing(run, tmp_path):
    for name in CONFIGURATIONS:
        result = run("train", name, "--show")
        assert result.exit_code == 0, result.output
        assert from_json(result.stdout) == named(name)
    assert not (tmp_path / "run").exists()


def test_show_with_changes(run, tmp_path):
    changes = ("epochs=7", "augmentation.crop=3", "knots=0.1,0.9", "images=none", "epochs=8")
    result = run("train", "nano", "--out", tmp_path / "run", *options(*changes), "--show")
    expected = {"epochs": "8", "augmentation.crop": "3", "knots": "0.1,0.9", "images": "none"}
    assert from_json(result.stdout) == named("nano").with_fields(expected)


def test_what_was_shown_is_a_configuration(run, tmp_path):
    file = tmp_path / "own.json"
    file.write_text(run("train", "digits", "--out", tmp_path, *options("name=own", *TINY), "--show").stdout)
    result = run("train", file, "--out", tmp_path / "run", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["configuration"] == "own"
    assert Trained(tmp_path / "run").configuration == from_json(file.read_text())


def test_json_is_the_last_record_and_nothing_else(run, tmp_path):
    words = ("train", "digits", "--out", tmp_path / "run", *options(*TINY), "--json")
    result = run(*words)
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    assert len(records) == 2
    expected = {"out": str(tmp_path / "run"), "configuration": "digits"} | records[-1]
    assert json.loads(result.stdout) == expected
    # One line per epoch, however long, beside it.
    for line, record in zip(result.stderr.splitlines(), records, strict=True):
        shares = "  ".join(f"{n}/255 {100 * record[f'estimated_{n}']:4.1f}" for n in (36, 72, 108, 255))
        start = f"epoch {record['epoch']}/2  loss {record['loss']:.4f}  clean {100 * record['clean']:4.1f}"
        assert line == f"{start}  {shares}"
    again = run(*words)
    assert json.loads(again.stdout) == expected
    assert again.stderr == f"the run in {tmp_path / 'run'} finished already\n"


def test_the_table_says_what_the_shares_are(run, tmp_path):
    result = run("train", "digits", "--out", tmp_path / "run", *options(*TINY))
    assert result.exit_code == 0, result.output
    last = json.loads((tmp_path / "run" / METRICS).read_text().splitlines()[-1])
    shown = " ".join(result.stdout.split())
    assert f"clean {100 * last['clean']:.1f} % 36/255 {100 * last['estimated_36']:.1f} % 72/255" in shown
    assert "The shares at radii are estimates; to certify: gramcert certify" in shown


def test_cifar(run, archive, tmp_path, monkeypatch):
    changes = ("widths=12", "blocks=1", "inner=4", "dense_blocks=0", "epochs=1", "batch=5", "pool=8")
    words = ("train", "nano", *options(*changes), "--json")
    result = run(*words, "--out", tmp_path / "run", "--data", archive)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["step"] == 2
    assert Trained(tmp_path / "run").classes == tuple(f"class {i}" for i in range(10))
    monkeypatch.setenv("GRAMCERT_DATA", str(archive / "cifar-10-batches-py"))
    other = run(*words, "--out", tmp_path / "other")
    assert other.exit_code == 0, other.output
    assert (tmp_path / "other" / MODEL).stat().st_size > 0
    assert json.loads(other.stdout) | {"out": ""} == json.loads(result.stdout) | {"out": ""}


def test_a_hostile_archive(refused, archive, tmp_path):
    (archive / "cifar-10-batches-py" / "data_batch_3").write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    said = refused("train", "nano", "--out", tmp_path / "run", "--data", archive)
    assert "data_batch_3: refused, not a batch of images (it asks for os.system" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["cifar10-S", "cifar100-XL", "nano"])
def test_missing_data(refused, tmp_path, monkeypatch, name):
    monkeypatch.delenv("GRAMCERT_DATA", raising=False)
    said = refused("train", name, "--out", tmp_path / "run")
    assert "the path of its images is needed (--data, or GRAMCERT_DATA in the environment)" in said
    said = refused("train", name, "--out", tmp_path / "run", "--data", tmp_path / "nowhere")
    assert "nowhere: expected the folder cifar-10" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "epochs"], "--set 'epochs': expected FIELD=VALUE"),
        (["--set", "=3"], "--set '=3': expected FIELD=VALUE"),
        (["--set", ""], "--set '': expected FIELD=VALUE"),
        (["--set", "epoch=3"], "Configuration: unknown field 'epoch', expected one of name"),
        (["--set", "augmentation.zoom=3"], "Configuration: unknown field 'augmentation.zoom'"),
        (["--set", "epochs=many"], "Configuration(epochs='many'): expected a valid integer"),
        (["--set", "epochs=0"], "Configuration(epochs='0'): expected greater than 0"),
        (["--set", "lr=1" + "0" * 400], "expected a finite number"),
        (["--set", "seed=-1"], "Configuration(seed='-1'): expected greater than or equal to 0"),
        (["--set", "batch=1401"], "train(batch=1401): more than the 1400 training images"),
        (["--set", "images=2000"], "Configuration(images=2000): expected at most the 1400 training images"),
        (["--set", "augmentation.crop=8"], "train(augmentation.crop=8): expected less than the 8 pixels"),
        (["--set", "unshuffle=3"], "network digits: 8×8 places cannot be unshuffled by 3"),
        (["--set", "widths=1000000", "--set", "inner=1000000"], "not enough memory"),
    ],
)
def test_bad_changes(refused, tmp_path, words, message):
    assert message in refused("train", "digits", "--out", tmp_path / "run", *words)
    assert not (tmp_path / "run").exists()


def test_unknown_configurations(refused, tmp_path):
    out = ("--out", tmp_path / "run")
    said = refused("train", "cifar10", *out)
    assert "configuration 'cifar10': expected one of digits, nano" in said
    assert "no.json: cannot be read (No such file or directory)" in refused("train", tmp_path / "no.json", *out)
    (tmp_path / "folder.json").mkdir()
    assert "folder.json: cannot be read (Is a directory)" in refused("train", tmp_path / "folder.json", *out)
    for content, message in (
        (b"{", "bad.json: Configuration: Invalid JSON"),
        (b"[]", "Configuration: expected an object"),
        (b"{}", "is missing"),
        (b'{"depth": 3}', "unknown field 'depth'"),
        (b"[" * 100_000, "bad.json: Configuration: Invalid JSON"),
        (b"\xff\xfe", "it is not text"),
    ):
        (tmp_path / "bad.json").write_bytes(content)
        assert message in refused("train", tmp_path / "bad.json", *out)
    assert not (tmp_path / "run").exists()


def test_folders_that_cannot_be_used(refused, run, tmp_path):
    words = ("train", "digits", *options(*TINY, "epochs=1", "images=64"))
    assert run(*words, "--out", tmp_path / "run").exit_code == 0
    said = refused(*words, "--set", "seed=1", "--out", tmp_path / "run")
    assert "run): it holds a run of another configuration, seed=0; choose another folder" in said
    assert "expected an empty folder" in refused(*words, "--out", tmp_path)
    (tmp_path / "run" / METRICS).unlink()
    gone = run(*words, "--out", tmp_path / "run")
    assert gone.exit_code == 2
    assert "run: the run is finished, but its records are gone" in gone.stderr
    (tmp_path / "file").touch()
    assert "not a folder that can be written" in refused(*words, "--out", tmp_path / "file")


def test_unknown_words_are_usage_errors(run, tmp_path):
    assert run("train").exit_code == 2
    assert run("train", "digits").exit_code == 2
    assert run("train", "digits", "--out", tmp_path, "--fast").exit_code == 2
    assert run("train", "digits", "--out", tmp_path, "--checkpoint-seconds", "often").exit_code == 2
    assert run("train", "--help").exit_code == 0


def test_images_that_are_not_asked_for(refused, run, tmp_path, monkeypatch):
    line = refused("train", "digits", "--out", tmp_path / "run", "--data", "/nowhere")
    assert "--data /nowhere: the digits are embedded" in line
    monkeypatch.setenv("GRAMCERT_DATA", "/nowhere")
    words = ("train", "digits", *options(*TINY, "epochs=1", "images=64"))
    assert run(*words, "--out", tmp_path / "run").exit_code == 0


def test_folders_with_brackets_are_folders(run, tmp_path):
    words = ("train", "digits", *options(*TINY, "epochs=1", "images=64"), "--out", tmp_path / "m[/b]")
    for _ in range(2):
        result = run(*words)
        assert result.exit_code == 0, result.output
    assert "m[/b] finished already" in " ".join(result.stderr.split())
