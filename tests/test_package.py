import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gramcert


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_public_names_load_no_extra_and_nothing_of_the_command_line():
    heavy = ["matplotlib", "safetensors", "scipy", "typer", "rich", "hypothesis", "pydantic", "foolbox"]
    loaded = run(
        f"import sys, torch; before = set(sys.modules); import gramcert; "
        f"[getattr(gramcert, name) for name in gramcert.__all__ if name != 'train']; "
        f"print([name for name in {heavy} if name in sys.modules and name not in before])"
    )
    assert loaded == "[]"


def test_names_are_loaded_with_their_first_use_and_torch_with_them():
    code = "import sys, gramcert; print('torch' in sys.modules, gramcert.norm2, 'norm2' in vars(gramcert), gramcert.nn)"
    assert run(code).startswith("False <function norm2 at ")
    assert "True <module 'gramcert.nn'" in run(code)


def test_threads_may_ask_for_the_first_names_at_once():
    names = ["nn", "audit", "train", "certify", "parametrizations", "spectral_norm", "project", "attack"]
    code = (
        f"import threading, gramcert; names = {names}; gate, found = threading.Barrier(len(names)), []\n"
        "def ask(name):\n    gate.wait()\n    found.append(getattr(gramcert, name))\n"
        "threads = [threading.Thread(target=ask, args=(name,)) for name in names]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]; print(len(found))"
    )
    assert run(code) == str(len(names))


@pytest.mark.parametrize("start", [["-m", "gramcert"], ["-c", "from gramcert.cli import main; main()"]])
def test_the_version_is_told_without_torch(start):
    said = subprocess.run(
        [sys.executable, "-X", "importtime", *start, "--version"], check=True, capture_output=True, text=True
    )
    assert said.stdout == f"gramcert {gramcert.__version__}\n"
    loaded = {line.rpartition("|")[2].strip() for line in said.stderr.splitlines()}
    assert "gramcert.cli" in loaded
    assert not loaded & {"torch", "numpy", "typer"}


def test_checkers_of_types_see_the_names_where_they_are_loaded_from():
    (block,) = (node for node in ast.parse(Path(gramcert.__file__).read_text()).body if isinstance(node, ast.If))
    seen = {alias.asname: (node.module, alias.name) for node in block.body for alias in node.names}
    homes = {name: (f"gramcert.{home}".rstrip("."), name) for name, home in gramcert._HOMES.items()}
    assert seen == homes


def test_names_are_found_inside_of_compiled_functions():
    code = (
        "import torch, gramcert\n"
        "function = torch.compile(lambda kernel: gramcert.norm2_toep(kernel), backend='eager', fullgraph=True)\n"
        "print(float(function(torch.ones(1, 1, 3, 3))))"
    )
    assert float(run(code)) == pytest.approx(9)


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
