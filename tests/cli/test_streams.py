"""What is printed reaches any standard output, or one sentence says why not."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gramcert
from gramcert.cli import main

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.is_char_device(), reason="needs a device that is always full")

QUICK = ["--search-seconds", "0", "--lower-steps", "5", "--no-cache"]


@pytest.fixture
def words(ones, exported):
    """Commands that need little time."""
    return {
        "norm": ["norm", str(ones), "--input-size", "16", "--padding", "1"],
        "spectrum": ["spectrum", str(ones), "--input-size", "8"],
        "audit": ["audit", str(exported[0]), *QUICK],
        "verify": ["verify", "no.json"],
        "show": ["train", "digits", "--show"],
        "version": ["--version"],
        "help": ["audit", "--help"],
    }


@pytest.fixture
def printed(monkeypatch, words):
    """Run a command in this process: the exit code, and what is on standard error."""

    def run(command, output, encoding="utf-8", more=()):
        errors = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding=encoding))
        monkeypatch.setattr(sys, "stderr", errors)
        monkeypatch.setattr(sys, "argv", ["gramcert", *words[command], *more])
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit, match=r"^\d$") as left:
            main()
        with contextlib.suppress(OSError):
            sys.stdout.close()
        return left.value.code, errors.buffer.getvalue().decode(encoding)

    return run


class Kept(io.BytesIO):
    """Stays open when its wrapper is gone."""

    def close(self):
        pass


@needs_full
@pytest.mark.parametrize("command", ["norm", "audit", "show", "version", "help"])
def test_a_full_device_is_one_sentence(printed, command):
    code, errors = printed(command, FULL.open("wb"))
    assert code == 2
    (line,) = errors.splitlines()
    assert line.startswith("error: ")
    assert "No space left on device" in line


@pytest.mark.parametrize("command", ["norm", "spectrum", "audit", "help"])
def test_a_terminal_that_knows_ascii_alone_is_told_in_ascii(printed, command):
    output = Kept()
    assert printed(command, output, "ascii") == (0, "")
    shown = output.getvalue().decode("ascii")
    assert "?" not in shown
    assert {"audit": "||f(x) - f(y)|| <= ", "norm": " +/- "}.get(command, "") in shown


def test_errors_are_told_in_ascii_too(printed, words):
    words["verify"][1] = "größe×名.json"
    assert printed("verify", Kept(), "ascii", ["model.onnx"]) == (2, "error: gro?ex?.json: no such file\n")


def test_a_terminal_that_knows_more_is_told_more(printed):
    output = Kept()
    assert printed("audit", output) == (0, "")
    assert "‖f(x) - f(y)‖ ≤" in output.getvalue().decode()


@pytest.mark.parametrize("command", ["norm", "show", "help"])
def test_a_reader_that_leaves_is_no_error(printed, command):
    reading, writing = os.pipe()
    os.close(reading)
    assert printed(command, os.fdopen(writing, "wb")) == (1, "")


@needs_full
@pytest.mark.parametrize("option", ["--html", "--certificate"])
def test_a_report_on_a_full_device_does_not_lose_the_result(printed, option):
    output = Kept()
    said = f"error: {option} /dev/full: cannot be written (No space left on device)\n"
    assert printed("audit", output, more=[option, str(FULL)]) == (2, said)
    assert "‖f(x) - f(y)‖ ≤" in output.getvalue().decode()
    assert b"gramcert verify" not in output.getvalue()
    assert FULL.is_char_device()


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
)
def test_a_process_of_its_own(words, environment):
    path = str(Path(gramcert.__file__).parents[1])
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LC_", "LANG"))}
    command = [sys.executable, "-m", "gramcert", *words["norm"]]
    found = subprocess.run(command, capture_output=True, check=False, env=plain | {"PYTHONPATH": path} | environment)
    assert (found.returncode, found.stderr) == (0, b"")
    assert b" +/- " in found.stdout
