import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from certification.trained import trained_copy
from gramcert.cli.app import app


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


@pytest.fixture
def exported(tmp_path):
    """An ordinary classifier as a .pt2 file, and inputs of its own with the classes that it gives them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
        inputs = 2 * torch.randn(12, 6)
    with torch.no_grad():
        logits = 4 * model(inputs)
        model[-1].weight *= 4
        model[-1].bias *= 4
    path, data = tmp_path / "model.pt2", tmp_path / "data.npz"
    torch.export.save(torch.export.export(model, (inputs[:1],)), path)
    np.savez(data, images=inputs.numpy(), labels=logits.argmax(1).numpy())
    return path, data
