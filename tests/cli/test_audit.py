import datetime
import hashlib
import html
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gramcert
from auditing_networks import residual_network
from gramcert.cli.audit import EMBEDDED


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAMCERT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(residual_network(), (torch.zeros(1, 3, 8, 8),)), path)
    return path


pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporter


def test_the_table_says_what_the_library_says(run, model):
    result = run("audit", model, "--input-shape", "3,8,8")
    assert result.exit_code == 0, result.output
    for word in ("conv1 + bn1", "conv2 + bn2", "for all inputs of shape 3×8×8", "2 × relu"):
        assert word in result.stdout
    assert "cached" not in result.stdout
    assert "cached" in run("audit", model, "--input-shape", "3,8,8").stdout
    assert "cached" not in run("audit", model, "--input-shape", "3,8,8", "--no-cache").stdout


def test_json_is_one_object(run, model):
    result = run("audit", model, "--input-shape", "3,8,8", "--json")
    content = json.loads(result.stdout)
    assert content["upper"] == gramcert.audit(model, (3, 8, 8)).upper
    assert content["model"] == "model.pt2"
    assert [row["kind"] for row in content["rows"]] == ["convolution", "convolution", "sum", "matrix"]


def test_certificate_and_page_are_written_and_the_certificate_holds(run, model, tmp_path):
    page, certificate = tmp_path / "report.html", tmp_path / "certificate.json"
    result = run("audit", model, "--input-shape", "3,8,8", "--html", page, "--certificate", certificate)
    assert result.exit_code == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    checked = run("verify", certificate, model)
    assert checked.exit_code == 0
    said = " ".join(checked.stdout.split())
    assert "the certificate holds: L ≤" in said
    assert "for model.pt2 and all inputs of shape 3×8×8 4 claims proved anew" in said
    assert "not checked: the name, tolerance and versions" in said
    assert json.loads(run("verify", certificate, model, "--json").stdout)["holds"]
    content = json.loads(certificate.read_text())
    content["claims"][0]["upper"] /= 2
    certificate.write_text(json.dumps(content))
    refused = run("verify", certificate, model)
    assert refused.exit_code == 1
    assert "does NOT hold" in refused.stdout
    assert "conv1 + bn1: its claim" in " ".join(refused.stdout.split())


def test_a_file_that_fixes_its_shape_needs_no_option(run, model):
    content = json.loads(run("audit", model, "--json").stdout)
    assert content["input_shape"] == [3, 8, 8]
    assert 0 < content["upper"] < math.inf


def test_a_certificate_of_another_shape_is_refused_by_exit_code_1(run, model, tmp_path):
    other = tmp_path / "other.pt2"
    torch.export.save(torch.export.export(nn.Flatten(), (torch.zeros(1, 3, 9, 9),)), other)
    run("audit", model, "--certificate", tmp_path / "certificate.json")
    result = run("verify", tmp_path / "certificate.json", other)
    assert result.exit_code == 1
    assert "has the shape 1,3,9,9" in " ".join(result.stdout.split())


def test_without_a_model_the_embedded_network_is_audited(run, tmp_path):
    certificate = tmp_path / "certificate.json"
    result = run("audit", "--certificate", certificate, "--json")
    content = json.loads(result.stdout)
    assert content["model"] == EMBEDDED
    assert content["input_shape"] == [1, 8, 8]
    assert 1 < content["upper"] < 2
    assert run("verify", certificate).exit_code == 0


def test_an_unbounded_model_ends_in_exit_code_1(run, tmp_path):
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(nn.Sequential(nn.Hardshrink()), (torch.zeros(1, 4),)), path)
    result = run("audit", path, "--input-shape", "4")
    assert result.exit_code == 1
    assert "it jumps" in result.stdout


def test_bad_input_ends_in_one_line(refused, model, tmp_path):
    torch.save(residual_network().state_dict(), tmp_path / "weights.pth")
    assert "name their architecture" in refused("audit", tmp_path / "weights.pth")
    open_size = ({1: torch.export.Dim("n", min=2)},)
    exported = torch.export.export(nn.ReLU(), (torch.zeros(1, 3),), dynamic_shapes=open_size)
    torch.export.save(exported, tmp_path / "open.pt2")
    assert "--input-shape 3,32,32" in refused("audit", tmp_path / "open.pt2")
    assert "expected another file" in refused("audit", model, "--certificate", model)
    assert "expected another file" in refused("audit", model, "--html", "x.html", "--certificate", "x.html")
    assert "not a folder" in refused("audit", model, "--cache", model)
    assert "got another folder" in refused("audit", tmp_path, "--input-shape", "3")
    assert "no such file" in refused("audit", tmp_path / "no.onnx", "--input-shape", "3")
    assert "no such file" in refused("audit", tmp_path / "no.onnx")
    assert "--html" in refused("audit", model, "--input-shape", "3,8,8", "--html", tmp_path / "no" / "page.html")
    assert "expected 0 < tol < 1" in refused("audit", model, "--input-shape", "3,8,8", "--tol", "3")
    assert "no such file" in refused("verify", tmp_path / "no.json", model)
    assert "it is not text" in refused("verify", model, model)
    (tmp_path / "list.json").write_text("[]")
    assert "expected a JSON object" in refused("verify", tmp_path / "list.json", model)
    (tmp_path / "other.json").write_text('{"model": "x"}')
    assert "MODEL: expected the file" in refused("verify", tmp_path / "other.json")
    assert "--architecture" in refused("audit", model, "--input-shape", "3,8,8", "--architecture", "resnet20")


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs signals of a Unix system")
def test_an_interrupted_audit_ends_quietly_and_goes_on(run, model, tmp_path):
    code = (
        "import sys, gramcert.cli.audit as command\n"
        "from gramcert.operators.measurement import Norm\n"
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have told its jobs to ignore it\n"
        "run, made = Norm.run, []\n"
        "def interrupted(self, *rest):\n"
        "    made.append(1)\n"
        "    if len(made) == 3: signal.raise_signal(signal.SIGINT)\n"
        "    return run(self, *rest)\n"
        "Norm.run = interrupted\n"
        "from gramcert.cli import main\n"
        "main()\n"
    )
    words = [sys.executable, "-c", code, "audit", str(model), "--input-shape", "3,8,8"]
    result = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode != 0
    assert result.stderr.startswith("interrupted; what was measured is in the cache")
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 2
    rows = json.loads(run("audit", model, "--json").stdout)["rows"]
    assert [row["cached"] for row in rows if row["kind"] != "sum"] == [True, True, False]


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs signals of a Unix system")
def test_an_interrupted_search_goes_on_from_the_cache(run, model, tmp_path):
    """Every state of the search is kept here, and the fifth step is interrupted."""
    code = (
        "import signal, gramcert.auditing.entry as entry\n"
        "from gramcert.networks.search import _Descent\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "entry.KEPT_EVERY = 0.0\n"
        "value, made = _Descent.value, []\n"
        "def interrupted(self, *rest):\n"
        "    made.append(1)\n"
        "    if len(made) == 6: signal.raise_signal(signal.SIGINT)\n"
        "    return value(self, *rest)\n"
        "_Descent.value = interrupted\n"
        "from gramcert.cli import main\n"
        "main()\n"
    )
    asked = ["audit", str(model), "--input-shape", "3,8,8", "--json", "--search-seconds"]
    words = [sys.executable, "-c", code, *asked, "60"]
    result = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode != 0
    assert result.stderr.startswith("interrupted; what was measured is in the cache")
    closed = json.loads(run(*asked, "0", "--no-cache").stdout)
    gone_on = json.loads(run(*asked, "0").stdout)
    assert gone_on["upper"] < closed["upper"] < closed["product"]
    assert gone_on["product"] == closed["product"]


@pytest.mark.parametrize(
    ("limit", "code", "said"), [("1e9", 0, "within the limit of 1e+09"), ("0.001", 3, "NOT within")]
)
def test_a_limit_has_an_exit_code_of_its_own(run, model, limit, code, said):
    quick = ("--search-seconds", "0", "--lower-steps", "0", "--fail-above", limit)
    result = run("audit", model, *quick)
    assert result.exit_code == code, result.output
    assert said in result.stdout
    assert ("NOT" in result.stdout) == (code == 3)
    again = run("audit", model, *quick, "--json")
    assert again.exit_code == code
    assert json.loads(again.stdout)["upper"] > 0


def test_a_limit_that_the_constant_has_is_kept(run, model):
    quick = ("--search-seconds", "0", "--lower-steps", "0")
    upper = json.loads(run("audit", model, *quick, "--json").stdout)["upper"]
    assert run("audit", model, *quick, "--fail-above", repr(upper)).exit_code == 0
    assert run("audit", model, *quick, "--fail-above", repr(math.nextafter(upper, 0))).exit_code == 3


def test_what_is_unbounded_is_above_every_limit(run, tmp_path):
    path = tmp_path / "hard.pt2"
    torch.export.save(torch.export.export(nn.Hardshrink(), (torch.zeros(1, 3),)), path)
    assert run("audit", path).exit_code == 1
    result = run("audit", path, "--fail-above", "1e300")
    assert result.exit_code == 3
    assert "NOT within the limit of 1e+300" in result.stdout


@pytest.mark.parametrize("limit", ["-1", "nan", "inf"])
def test_no_such_limit(refused, model, limit):
    assert "expected a finite number that is not negative" in refused("audit", model, "--fail-above", limit)


def test_the_lower_bound_the_digest_and_the_date_are_in_the_json(run, model):
    content = json.loads(run("audit", model, "--search-seconds", "0", "--json").stdout)
    assert 0.1 * content["upper"] < content["lower"] <= content["upper"]
    assert content["sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()
    assert content["version"] == gramcert.__version__
    written = datetime.datetime.fromisoformat(content["date"])
    assert abs(datetime.datetime.now(datetime.UTC) - written) < datetime.timedelta(hours=1)
    without = json.loads(run("audit", model, "--search-seconds", "0", "--lower-steps", "0", "--json").stdout)
    assert without["lower"] is None


def test_a_folder_has_the_digest_of_its_weights(run, folder):
    content = json.loads(run("audit", folder, "--search-seconds", "0", "--lower-steps", "0", "--json").stdout)
    assert content["sha256"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def shown_command(result, page):
    """The words of the command to verify, the same in the terminal and on the page."""
    flat = " ".join(result.stdout.split())
    if "To check" not in flat:
        assert "gramcert verify" not in result.stdout + page.read_text()
        return None
    command = html.unescape(re.search("<code>(.*)</code>", page.read_text())[1])
    assert "".join(command.split()) in "".join(result.stdout.split())
    first, *words = shlex.split(command)
    assert first == "gramcert"
    return words


def test_the_command_to_verify_works_as_it_is_printed(run, model, tmp_path):
    spaced = model.rename(tmp_path / "it's a model.pt2")
    page, certificate = tmp_path / "report.html", tmp_path / "my certificate.json"
    quick = ("--search-seconds", "0", "--lower-steps", "0", "--html", page)
    assert shown_command(run("audit", spaced, *quick), page) is None
    words = shown_command(run("audit", spaced, *quick, "--certificate", certificate), page)
    assert words[:3] == ["verify", str(certificate), str(spaced)]
    assert run(*words).exit_code == 0
    words = shown_command(run("audit", *quick, "--certificate", certificate), page)
    assert words == ["verify", str(certificate)]
    assert run(*words).exit_code == 0


def test_the_command_to_verify_repeats_what_was_fixed(run, tmp_path):
    class Scaled(nn.Module):
        def forward(self, x, s):
            return x * s

    path, page, certificate = tmp_path / "m.pt2", tmp_path / "r.html", tmp_path / "c.json"
    torch.export.save(torch.export.export(Scaled(), (torch.zeros(1, 3), torch.zeros(1, 1))), path)
    words = shown_command(run("audit", path, "--fix", "s=2", "--html", page, "--certificate", certificate), page)
    assert words[3:] == ["--fix", "s=2"]
    assert run(*words).exit_code == 0


def test_a_link_is_followed(run, exported, tmp_path):
    (tmp_path / "report.html").symlink_to(tmp_path / "target.html")
    run("audit", exported[0], "--search-seconds", "0", "--lower-steps", "0", "--html", tmp_path / "report.html")
    assert (tmp_path / "target.html").read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / "report.html").is_symlink()


@pytest.mark.skipif(not Path("/dev/null").is_char_device(), reason="needs a Unix system")
def test_a_link_to_a_device_stays_one(run, exported, tmp_path):
    link = tmp_path / "report.html"
    link.symlink_to("/dev/null")
    assert run("audit", exported[0], "--search-seconds", "0", "--lower-steps", "0", "--html", link).exit_code == 0
    assert link.is_symlink()
    assert link.is_char_device()
