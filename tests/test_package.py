import subprocess
import sys

import pytest

import gramcert


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_loads_no_extra_and_nothing_of_the_command_line():
    heavy = ["matplotlib", "safetensors", "scipy", "typer", "rich", "hypothesis", "pydantic"]
    loaded = run(
        f"import sys, torch; before = set(sys.modules); import gramcert; "
        f"print([name for name in {heavy} if name in sys.modules and name not in before])"
    )
    assert loaded == "[]"


def test_public_names_are_what_the_package_says():
    assert sorted(gramcert.__all__) == gramcert.__all__
    for name in gramcert.__all__:
        assert getattr(gramcert, name).__doc__


def test_training_is_loaded_with_its_first_use():
    assert "train" in dir(gramcert)
    said = run("import sys, gramcert; print('gramcert.training' in sys.modules, gramcert.train)")
    assert said.startswith("False <function train at ")
    with pytest.raises(AttributeError, match="module 'gramcert' has no attribute 'trian'"):
        _ = gramcert.trian
