import numpy as np
import pytest
from typer.testing import CliRunner

from certification.trained import trained_copy
from gramcert.cli import app


@pytest.fixture
def run():
    """Run the command line with the given words."""
    runner = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"})
    return lambda *words: runner.invoke(app, [str(word) for word in words])


@pytest.fixture
def ones(tmp_path):
    """A file with the all-ones 3×3 kernel in float64."""
    path = tmp_path / "ones.npy"
    np.save(path, np.ones((1, 1, 3, 3)))
    return path


@pytest.fixture
def refused(run):
    """Run the command line and expect one line about bad input, which is returned."""

    def check(*words):
        result = run(*words)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        lines = result.stderr.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("error: ")
        return lines[0]

    return check


@pytest.fixture
def folder(tmp_path):
    """A folder of its own with a small network of digits."""
    return trained_copy(tmp_path / "run")
