import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def printed_by(name):
    script = EXAMPLES / name
    # One thread: the work is small, and other tests may be using the cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "error", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_example_has_a_test():
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == [
        "audit.py",
        "certify.py",
        "digits.py",
        "enclose.py",
        "invert.py",
        "project.py",
        "regularise.py",
    ]


def test_audit():
    """A bounded network and its certificate; the same one with a gate, and why it has no constant."""
    bounded, proved, unbounded = printed_by("audit.py")
    assert bounded.startswith("L = ")
    assert proved == "the certificate holds: True"
    assert "a product of two values" in unbounded


def test_certify():
    """Around each image at least twice as much is certified as by the product of norms."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    clean, product, found = (float(line.split()[-1]) for line in printed_by("certify.py"))
    assert clean > 0.9
    assert 0.2 < product <= 0.25
    assert 2 * product < found <= clean


def test_digits():
    """The network learns; certified accuracy is below clean accuracy and falls with the radius."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    constant, *accuracies = (float(line.split()[-1]) for line in printed_by("digits.py"))
    assert 1 <= constant < 1 + 1e-6
    assert accuracies[0] > 0.93
    assert accuracies[1] > 0.8
    assert accuracies == sorted(accuracies, reverse=True)


def test_enclose():
    """One line per layer with weights, and the product of their upper ends."""
    *layers, blank, constant = printed_by("enclose.py")
    assert len(layers) == 4
    assert not blank
    assert 1.0 < float(constant.split()[-1]) < 1.02


def test_project():
    """The network learns, and each layer is proved to be within norm 1."""
    accuracy, norms, constant = printed_by("project.py")
    assert float(accuracy.split()[-1]) > 0.9
    assert all(0.9 < float(norm.rstrip(",")) <= 1 for norm in norms.split()[1:])
    assert 0.5 < float(constant.split()[-1]) <= 1


def test_regularise():
    """The network learns, and stays within its constant."""
    accuracy, _, constant = printed_by("regularise.py")
    assert float(accuracy.split()[-1]) > 0.9
    assert float(constant.split()[-1]) < 1.1


def test_invert():
    """There and back: the certified error is far below what rounding the codes to float32 has done."""
    constant, inverse, error, distance = (float(line.split()[-1]) for line in printed_by("invert.py"))
    assert 1 < constant < inverse < 1e4
    assert error < 1e-6
    assert distance < 1e-3
