import io
import json
import sys
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

import gramcert
from gramcert.cli.certify import _rounded_up, _table, percent
from gramcert.training.checkpoints import MODEL, Trained
from gramcert.training.images import load_images

PNG = b"\x89PNG\r\n\x1a\n"
RADII = {"36/255": 36 / 255, "72/255": 72 / 255, "108/255": 108 / 255, "255/255": 1.0}


def answer(run, *words):
    result = run("certify", *words, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def test_json_is_one_object_with_what_the_library_certifies(run, folder):
    found = answer(run, folder)
    test = load_images("digits", None).test
    expected = gramcert.certify(Trained(folder).model, [(test.values(), test.labels)], list(RADII.values()))
    assert found["clean"] == expected.clean
    assert found["certified"] == pytest.approx({text: expected.certified[radius] for text, radius in RADII.items()})
    assert found["lipschitz"] == expected.lipschitz >= 1
    assert found["lipschitz_of"] == "from the input to what the last linear layer is given"
    assert 0 < found["feature_error"] < 1e-9
    assert found["images"] == len(test) == 397
    assert list(found["certified"]) == list(RADII)
    assert 0.5 < found["clean"] <= 1
    assert found["clean"] >= found["certified"]["36/255"] >= found["certified"]["72/255"] > 0
    assert list(found["classes"]) == [str(digit) for digit in range(10)]
    assert sum(row["images"] for row in found["classes"].values()) == 397
    whole = sum(row["images"] * row["certified"]["36/255"] for row in found["classes"].values())
    assert whole / 397 == pytest.approx(found["certified"]["36/255"])
    assert found["configuration"]["name"] == "digits"
    assert "IEEE 754" in found["assumptions"][0]


def test_table_has_a_row_for_each_class(run, folder):
    result = run("certify", folder, "--radii", "0.1, 36/255", "--images", 60)
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    assert [row[0] for row in rows] == [*map(str, range(10)), "all"]
    assert sum(int(row[1]) for row in rows[:-1]) == int(rows[-1][1]) == 60
    for row in rows:
        clean, *certified = map(float, row[2:])
        assert 100 >= clean >= certified[0] >= certified[1] >= 0
    for text in ("digits: certified accuracy in %", "at 0.1", "at 36/255", "60 inputs of shape 1×8×8; radii by"):
        assert text in result.stdout
    said = " ".join(result.stdout.split())
    assert "Constant from the input to what the last linear layer is given: 1.0" in said


def test_the_curve_is_written_beside_the_network(run, folder):
    for words in ((folder,), (folder / MODEL,)):
        (folder / "certified.png").unlink(missing_ok=True)
        result = run("certify", *words, "--images", 20)
        assert result.exit_code == 0, result.output
        assert f"plot written to {folder / 'certified.png'}" in result.stderr
        assert (folder / "certified.png").read_bytes().startswith(PNG)


def test_the_curve_goes_where_it_is_wanted(run, folder, tmp_path):
    assert run("certify", folder, "--images", 20, "--plot", tmp_path / "curve.svg").exit_code == 0
    assert "<svg" in (tmp_path / "curve.svg").read_text()
    assert not (folder / "certified.png").exists()


def test_a_curve_that_cannot_be_written_does_not_cost_the_result(run, folder):
    (folder / "certified.png").mkdir()
    result = run("certify", folder, "--images", 20, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["images"] == 20
    assert result.stderr.startswith(f"error: {folder / 'certified.png'}: the plot cannot be written")


def test_without_matplotlib_there_is_no_curve(run, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("certify", folder, "--images", 20, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["images"] == 20
    assert not (folder / "certified.png").exists()


def test_radii_are_not_below_what_is_written(run, folder, monkeypatch):
    """36/255 as a float is below the fraction: accuracy is that at the next float."""
    asked = []

    def remember(model, batches, radii, **options):
        asked.extend(radii)
        return gramcert.certify(model, batches, radii, **options)

    monkeypatch.setattr("gramcert.cli.certify.run", remember)
    found = answer(run, folder, "--images", 20, "--radii", "36/255,0.1,0")
    assert list(found["certified"]) == ["36/255", "0.1", "0"]
    assert all(Fraction(radius) >= Fraction(text) for text, radius in zip(found["certified"], asked, strict=True))
    assert found["certified"]["0"] <= found["clean"]


def test_printed_shares_are_never_more_than_the_certified_ones():
    for count in (*range(1, 60), 397, 10000):
        for right in {0, 1, count // 3, 2 * count // 3, count - 1, count}:
            printed, exact = Fraction(percent(right / count)), Fraction(100 * right, count)
            assert exact - Fraction(1, 10) < printed <= exact
    assert percent(0.99999) == "99.9"
    assert percent(1.0) == "100.0"


def test_printed_constants_and_errors_are_never_less_than_the_certified_ones():
    for value in (1.0, 1 + 2**-52, 1.0000000004, 1.23456789012345, 3e-13, 0.0):
        assert Fraction(value) <= Fraction(_rounded_up(value, 10)) <= Fraction(value) * (1 + Fraction(1, 10**9))
    assert _rounded_up(8.85e-13, 2) == "8.9e-13"
    assert _rounded_up(1 + 2**-52, 10) == "1.000000001"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--radii", "x"], "--radii 'x': expected numbers or fractions like 36/255,0.5"),
        (["--radii", ""], "--radii '': expected numbers or fractions"),
        (["--radii", "1/0"], "--radii '1/0': expected numbers or fractions"),
        (["--radii", "nan"], "--radii 'nan': expected numbers or fractions"),
        (["--radii", "0.1,-0.5"], "--radii '0.1,-0.5': expected radii"),
        (["--radii", "1e40"], "--radii '1e40': expected radii from 0 to"),
        (["--radii", "1e999999999"], "--radii '1e999999999': expected numbers or fractions"),
        (["--images", "0"], "--images 0: expected 1 to 397"),
        (["--images", "-3"], "--images -3: expected 1 to 397"),
        (["--images", "398"], "--images 398: expected 1 to 397"),
        (["--plot", "curve.txt"], "--plot curve.txt: expected a file ending in .png, .svg, .pdf"),
        (["--plot", "missing/curve.png"], "--plot missing/curve.png: no such directory"),
    ],
)
def test_bad_options(refused, folder, words, message):
    assert message in refused("certify", folder, *words)


def test_missing_networks(refused, tmp_path):
    assert f"{tmp_path / 'missing'}: no such file or folder" in refused("certify", tmp_path / "missing")
    assert f"{tmp_path}: expected a folder of `gramcert train` with a finished {MODEL}" in refused("certify", tmp_path)


def test_files_that_are_no_networks(refused, folder):
    file = folder / MODEL
    whole = file.read_bytes()
    for content in (b"", b"nonsense", whole[:100], whole[:-100], whole[: len(whole) // 2]):
        file.write_bytes(content)
        assert f"{file}: cannot be read as safetensors" in refused("certify", folder)


def test_networks_that_were_tampered_with(refused, folder):
    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    file = folder / MODEL
    with safetensors.safe_open(file, "pt") as opened:
        metadata, weights = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    first = min(weights)

    def changed(tensor, **facts):
        save_file(weights | {first: tensor}, file, metadata | facts)
        return refused("certify", folder)

    assert "expected finite weights, got NaN or infinity" in changed(torch.full_like(weights[first], torch.nan))
    assert f"expected {first} of shape" in changed(torch.zeros(1, 2, 3))
    assert "expected 'gramcert network 1', got 'other'" in changed(weights[first], format="other")
    assert "its metadata cannot be used" in changed(weights[first], shape="[1, 2]")
    assert "the network was made for 10 classes" in changed(
        weights[first], classes=json.dumps(["zero", *map(str, range(1, 10))])
    )


def test_names_with_brackets_are_names(run, folder):
    """Not markup of the table's library, some of which would be an error."""
    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    file = folder / MODEL
    with safetensors.safe_open(file, "pt") as opened:
        metadata, weights = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    configuration = json.loads(metadata["configuration"]) | {"name": "[/digits]"}
    save_file(weights, file, metadata | {"configuration": json.dumps(configuration)})
    result = run("certify", folder, "--images", 20)
    assert result.exit_code == 0, result.output
    assert "[/digits]: certified accuracy in %" in result.stdout


def test_classes_with_brackets_are_classes():
    subject = SimpleNamespace(name="digits", classes=["[a]cat", "[/b]"])
    found = gramcert.CertifiedAccuracy(1.0, {}, 1.0, torch.tensor([0, 1]), torch.tensor([0, 1]), torch.ones(2), 0.0)
    console = Console(file=io.StringIO())
    console.print(_table(subject, found, {}))
    assert "[a]cat" in console.file.getvalue()
    assert "[/b]" in console.file.getvalue()


def test_any_model_with_inputs_of_its_own(run, exported, tmp_path):
    """Certified from its file, resumed, and verified; the model itself says the same."""
    model, data = exported
    certificate = tmp_path / "radii.npz"
    words = ("certify", model, "--data", data, "--radii", "0.02,3", "--resume", tmp_path / "kept", "--json")
    result = run(*words, "--certificate", certificate)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["clean"] == 1
    assert found["model"] == model.name
    assert found["by"].count("minorant") == sum(name != "" for name in found["by"]) == found["images"]
    assert list((tmp_path / "kept").glob("*.npz"))
    assert json.loads(run(*words, "--certificate", certificate).stdout) == found
    result = run("verify", certificate, model)
    assert result.exit_code == 0, result.output
    assert f"{found['images']} inputs keep their class within their radii" in result.stdout
    assert json.loads(run("verify", certificate, model, "--json").stdout)["inputs"] == found["images"]
    assert (model.parent / "certified.png").exists()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (None, "no such file"),
        ({"images": np.zeros((2, 2))}, "expected arrays 'images' and 'labels', got images"),
        ({"images": np.zeros((2, 2), np.uint8), "labels": np.zeros(2, int)}, "divide bytes by 255"),
        ({"images": np.zeros((2, 2)), "labels": np.zeros(3, int)}, "expected 2 integer labels"),
        ({"images": np.zeros((2, 2)), "labels": np.zeros(2)}, "expected 2 integer labels"),
        ({"images": np.zeros((2, 2)), "labels": np.array([0, -1])}, "expected labels from 0 on"),
        ({"images": np.array([None, {}]), "labels": np.zeros(2, int)}, "expected real numbers"),
        ({"images": np.full((2, 6), np.nan), "labels": np.zeros(2, int)}, "inputs"),
        ({"images": np.zeros((2, 5)), "labels": np.zeros(2, int)}, "shape"),
    ],
)
def test_inputs_that_cannot_be_used(refused, exported, tmp_path, arrays, message):
    data = tmp_path / "inputs.npz"
    if arrays is not None:
        np.savez(data, **arrays)
    assert message in refused("certify", exported[0], "--data", data)


def test_models_need_inputs(refused, exported, tmp_path):
    assert "needs inputs, a .npz file with 'images' and 'labels'; got none" in refused("certify", exported[0])
    junk = tmp_path / "junk.npz"
    junk.write_bytes(b"junk")
    assert "cannot be read as .npz" in refused("certify", exported[0], "--data", junk)
