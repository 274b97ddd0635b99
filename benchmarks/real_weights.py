"""Every convolution of real trained networks, enclosed for every size.

python benchmarks/real_weights.py > docs/real-weights.md. The files are those that tests/real_layers.py looks for.
"""

import sys
import time
from itertools import groupby
from pathlib import Path

from gramcert import spectral_norm

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from real_layers import MODELS, real_layers

TOL = 1e-3

HEAD = f"""# Convolutions of real networks

Enclosures for every input size at once, tol {TOL:g}, of the weights as stored, with zero padding. Strides that a file
of weights does not tell are in `tests/real_layers.py`. Command:
`python benchmarks/real_weights.py > docs/real-weights.md`."""

COLUMNS = """| weight | kernel | stride | dilation | groups | norm | time |
|---|---|---|---|---|---|---|"""


def main():
    if not MODELS.is_dir():
        sys.exit(f"{MODELS}: the trained weights are not at hand")
    print(HEAD)
    for file, layers in groupby(real_layers(), key=lambda item: item[0]):
        print(f"\n## {file}\n\n{COLUMNS}")
        for _, name, layer in layers:
            start = time.perf_counter()
            norm = spectral_norm(layer, tol=TOL)
            seconds = time.perf_counter() - start
            assert norm.tol_reached
            kind = "transposed " * layer.transposed + "×".join(map(str, layer.kernel.shape))
            cells = (kind, _short(layer.stride), _short(layer.dilation), layer.groups, norm, f"{1e3 * seconds:.0f} ms")
            print(f"| {name} |", " | ".join(map(str, cells)), "|")


def _short(values):
    return values[0] if len(set(values)) == 1 else ", ".join(map(str, values))


if __name__ == "__main__":
    main()
