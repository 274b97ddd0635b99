"""Imports run one way: the map of CONTRIBUTING.md, held."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import gramcert

ROOT = Path(gramcert.__file__).parent

# From the bottom to the top; an entry imports only from itself and from those before it. What is above "gramcert", the
# package itself, uses it as anybody would.
ORDER = (
    *("arguments", "exact", "files", "precision", "progress", "rounding", "enclosure", "geometry", "bounds"),
    *(
        "certified",
        "rescaling",
        "parametrizations",
        "projecting",
        "operators",
        "networks",
        "minorants",
        "nn",
        "training",
        "auditing",
        "certification",
        "gramcert",
    ),
    *("baselines", "experiments", "cli", "__main__"),
)


def modules():
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imported(name):
    """All that a module imports of this package, inside of functions and for the type checker too."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {other for other in found if other in MODULES and other != name}


def entry(name):
    return name.split(".")[1] if "." in name else name


def test_no_module_imports_itself_by_way_of_others():
    list(TopologicalSorter({name: imported(name) for name in MODULES}).static_order())


@pytest.mark.parametrize("place", range(len(ORDER)), ids=ORDER)
def test_each_entry_of_the_map_imports_only_from_those_before_it(place):
    names = [name for name in MODULES if entry(name) == ORDER[place]]
    assert names
    above = {(name, other) for name in names for other in imported(name) if entry(other) not in ORDER[: place + 1]}
    assert above == set()


def test_the_map_is_complete():
    assert {entry(name) for name in MODULES} - {"data"} == set(ORDER)


def test_the_package_loads_neither_training_nor_commands():
    code = "import sys; from gramcert import audit, certify, lipschitz_bound, nn, project; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    ours = {entry(name) for name in loaded if name.startswith("gramcert.")}
    assert "certification" in ours
    assert ours & {"training", "experiments", "baselines", "cli"} == set()
