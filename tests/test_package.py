import subprocess
import sys

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
