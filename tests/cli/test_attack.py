import dataclasses
import json

import pytest
from safetensors.torch import load_file

import gramcert
from gramcert.certification.attacks import ATTACKS
from gramcert.training.checkpoints import Trained
from gramcert.training.images import load_images

pytest.importorskip("foolbox", reason="foolbox is not installed")

PNG = b"\x89PNG\r\n\x1a\n"
QUICK = ("--images", 24, "--steps", 6, "--radii", "36/255,0.5")


@pytest.fixture
def wrong_certificates(monkeypatch):
    """Certified radii ten times too large."""

    def enlarged(*arguments, **options):
        found = gramcert.certify(*arguments, **options)
        return dataclasses.replace(found, radii=10 * found.radii)

    monkeypatch.setattr("gramcert.cli.attack.certify", enlarged)


def test_certified_is_below_attacked_is_below_clean(run, folder):
    result = run("attack", folder, *QUICK, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    found = json.loads(result.stdout)
    assert list(found["radii"]) == ["36/255", "0.5"]
    for row in found["radii"].values():
        assert 0 <= row["certified"] <= row["attacked"] <= row["clean"] <= 1
    assert found["radii"]["36/255"]["certified"] > 0
    assert found["radii"]["0.5"]["attacked"] < found["radii"]["0.5"]["clean"]
    assert found["inside_certified_radius"] == []
    assert set(found["best"]) == set(ATTACKS)
    assert sum(found["best"].values()) <= found["images"] == 24
    assert found["steps"] == 6
    assert 1 <= found["lipschitz"] < 1 + 1e-5
    assert found["lipschitz_of"] == "from the input to what the last linear layer is given"
    assert "No attack succeeded inside a certified radius (24 images)." in result.stderr
    assert (folder / "attacked.png").read_bytes().startswith(PNG)


def test_table(run, folder):
    result = run("attack", folder, *QUICK)
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    assert [row[0] for row in rows] == ["36/255", "0.5"]
    for row in rows:
        certified, attacked, clean = map(float, row[1:])
        assert certified <= attacked <= clean
    assert "24 images, 6 steps. Radii by: " in result.stdout
    assert "Smallest change found by: DDN" in " ".join(result.stdout.split())


def test_the_same_seed_finds_the_same(run, folder):
    one, other = (run("attack", folder, *QUICK, "--seed", 3, "--json").stdout for _ in range(2))
    assert one == other


def test_a_wrong_certificate_is_refuted(run, folder, wrong_certificates):
    result = run("attack", folder, *QUICK, "--json")
    assert result.exit_code == 1
    inside = json.loads(result.stdout)["inside_certified_radius"]
    assert 0 < len(inside) <= 24
    message = f"REFUTED: an attack succeeded inside the certified radius of {len(inside)} images, the first of them"
    assert f"{message} {inside[0]}." in result.stderr
    assert "No attack succeeded" not in result.stderr
    evidence = load_file(folder / "refuted.safetensors")
    assert evidence["index"].tolist() == inside
    labels = load_images("digits", None).test.labels[inside]
    assert bool((Trained(folder).model.double()(evidence["changed"]).argmax(1) != labels).all())


def test_a_plot_that_cannot_be_written_does_not_hide_it(run, folder, wrong_certificates):
    (folder / "attacked.png").mkdir()
    result = run("attack", folder, *QUICK)
    assert result.exit_code != 0
    assert "REFUTED" in result.stderr
    assert "the plot cannot be written" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "--steps 0: expected a positive number"),
        (["--radii", "a lot"], "--radii 'a lot': expected numbers or fractions"),
        (["--images", "0"], "--images 0: expected 1 to 397"),
        (["--images", "1000"], "--images 1000: expected 1 to 397"),
    ],
)
def test_bad_options(refused, folder, words, message):
    assert message in refused("attack", folder, *words)


def test_missing_and_broken_networks(refused, folder, tmp_path):
    assert "no such file or folder" in refused("attack", tmp_path / "missing")
    (folder / "model.safetensors").write_bytes(b"nonsense")
    assert "cannot be read as safetensors" in refused("attack", folder)


def test_any_model_with_inputs_of_its_own(run, exported):
    """Not all images are between 0 and 1."""
    model, data = exported
    result = run("attack", model, "--data", data, "--radii", "0.02,3", "--steps", 5, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    row = found["radii"]["0.02"]
    assert 0 < row["certified"] <= row["attacked"] <= row["clean"] == 1
    assert found["by"]["minorant"] > 0
    assert found["inside_certified_radius"] == []
