"""Wide layers against an earlier checkout and against plain products: python benchmarks/wide.py --before CHECKOUT.

CHECKOUT is a clone of this repository at the commit to compare with (issue 18 asks for feaf35c). Both versions run in
processes of their own, in alternating rounds, and time the second of two calls. Products of matrices are timed between
the calls of the new version, in the same process; so is torch's own norm for the last row.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parents[1]

MEASURE = """
import json, sys, time, torch
from gramcert import Convolution, spectral_norm
kernel = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(0))
layer, size, tol, other = eval(sys.argv[1])
def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
spectral_norm(layer, size, tol=tol)
beside = other and timed(other) and timed(other)
found = []
seconds = timed(lambda: found.append(spectral_norm(layer, size, tol=tol)))
print(json.dumps([seconds, beside, found[0].tol_reached]))
"""

PRODUCTS = "(lambda a: lambda: a @ a)(torch.randn(24, 512, 512, dtype=torch.complex128))"

LINEAR = """(lambda layer: (layer, None, 1e-3, lambda: torch.linalg.matrix_norm(layer.weight.detach().double(), 2)))(
    torch.nn.Linear(4096, 4096))"""

CASES = [
    ("512×512×3×3, every size, tol 1e-2", f"Convolution(kernel(512, 512, 3, 3), padding=1), None, 1e-2, {PRODUCTS}"),
    ("512×512×3×3, every size, tol 1e-3", f"Convolution(kernel(512, 512, 3, 3), padding=1), None, 1e-3, {PRODUCTS}"),
    ("64×64×3×3, every size, tol 1e-3", "Convolution(kernel(64, 64, 3, 3), padding=1), None, 1e-3, None"),
    ("figure 2: 32 channels, 32×32 zeros, tol 1e-3", "Convolution(kernel(32, 32, 3, 3), padding=1), 32, 1e-3, None"),
    ("128 channels, 28×28 zeros, tol 1e-3", "Convolution(kernel(128, 128, 3, 3), padding=1), 28, 1e-3, None"),
]


def run(checkout, case):
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    command = [sys.executable, "-c", MEASURE, case]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(CASES))))
    arguments = parser.parse_args()
    table = Table(title="medians")
    for heading in ("work", "before", "now", "faster", "24 products of order 512, complex128", "now, in these"):
        table.add_column(heading, justify="left" if heading == "work" else "right")
    for number in arguments.cases:
        name, case = CASES[number]
        rounds = [(run(arguments.before, case), run(HERE, case)) for _ in range(arguments.rounds)]
        before, now = (statistics.median(each[side][0] for each in rounds) for side in (0, 1))
        assert all(each[1][2] for each in rounds)
        beside = [each[1][1] for each in rounds if each[1][1]]
        products = statistics.median(beside) if beside else None
        cells = ("", "") if products is None else (f"{products:.3f} s", f"{now / products:.1f}")
        table.add_row(name, f"{before:.3f} s", f"{now:.3f} s", f"{before / now:.1f}×", *cells)
        print(name, before, now, before / now, products, flush=True)
    found = [run(HERE, LINEAR) for _ in range(arguments.rounds)]
    ours, theirs = (statistics.median(each[place] for each in found) for place in (0, 1))
    name = "Linear(4096, 4096), tol 1e-3; before: torch.linalg.matrix_norm(ord=2) in float64"
    table.add_row(name, f"{theirs:.2f} s", f"{ours:.2f} s", f"{theirs / ours:.1f}×", "", "")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
