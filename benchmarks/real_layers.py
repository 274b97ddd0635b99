"""Single layers of well-known architectures at their real sizes, default arguments: python benchmarks/real_layers.py.

With --before CHECKOUT, a clone of this repository at an earlier commit, each layer is enclosed by both versions, in
processes of their own, one after the other. The weights are torch's default initialisation.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parents[1]

# Of which network, the layer, its input size.
LAYERS = [
    ("MobileNetV2", "nn.Conv2d(144, 144, 3, padding=1, groups=144)", "56"),
    ("MobileNetV2, the first of a stage", "nn.Conv2d(96, 96, 3, 2, 1, groups=96)", "112"),
    ("EfficientNet-B0", "nn.Conv2d(240, 240, 5, padding=2, groups=240)", "28"),
    ("EfficientNet-B0, last stage", "nn.Conv2d(1152, 1152, 5, padding=2, groups=1152)", "7"),
    ("ConvNeXt-T, first stage", "nn.Conv2d(96, 96, 7, padding=3, groups=96)", "56"),
    ("ConvNeXt-T, third stage", "nn.Conv2d(384, 384, 7, padding=3, groups=384)", "14"),
    ("ConvNeXt-T, every size", "nn.Conv2d(384, 384, 7, padding=3, groups=384)", "None"),
    ("ResNeXt-50", "nn.Conv2d(128, 128, 3, padding=1, groups=32)", "56"),
    ("RegNet", "nn.Conv2d(928, 928, 3, padding=1, groups=58)", "14"),
    ("VGG-16", "nn.Conv2d(128, 128, 3, padding=1)", "112"),
    ("VGG-16", "nn.Conv2d(256, 256, 3, padding=1)", "56"),
    ("VGG-16", "nn.Conv2d(512, 512, 3, padding=1)", "14"),
    ("VGG-16, first dense layer", "nn.Linear(25088, 4096)", "None"),
    ("AlexNet", "nn.Conv2d(3, 64, 11, 4, 2)", "224"),
    ("Inception", "nn.Conv2d(192, 192, (1, 7), padding=(0, 3))", "17"),
    ("DCGAN", "nn.ConvTranspose2d(512, 256, 4, 2, 1)", "8"),
    ("EDSR", "nn.Conv2d(256, 256, 3, padding=1)", "48"),
    ("DeepLab", "nn.Conv2d(256, 256, 3, padding=12, dilation=12)", "33"),
    ("Whisper", "nn.Conv1d(384, 384, 3, 2, 1)", "3000"),
]

MEASURE = """
import json, sys, time, torch
from torch import nn
from gramcert import spectral_norm
torch.manual_seed(0)
layer, size = eval(sys.argv[1]), eval(sys.argv[2])
start = time.perf_counter()
norm = spectral_norm(layer, size)
print(json.dumps([time.perf_counter() - start, norm.relative_width, norm.method]))
"""


def measure(checkout, layer, size, limit):
    """Seconds, relative width and method, or ``None`` where it takes too long."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    command = [sys.executable, "-c", MEASURE, layer, size]
    try:
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="an earlier checkout")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds for one layer")
    arguments = parser.parse_args()
    table = Table(title="spectral_norm with default arguments (tol 1e-3)", title_justify="left")
    for heading in ("network", "layer", "size", "before", "width", "now", "width", "by"):
        table.add_column(heading, justify="right" if heading in ("size", "before", "now", "width") else "left")
    console = Console(width=190)
    for name, layer, size in LAYERS:
        row, method = [name, layer, size], ""
        for checkout in (arguments.before, HERE):
            found = checkout and measure(checkout, layer, size, arguments.limit)
            if found:
                row += [f"{found[0]:.2f} s", f"{found[1]:.1e}"]
                method = found[2]
            else:
                row += [f"> {arguments.limit:.0f} s" if checkout else "", ""]
        table.add_row(*row, method)
        console.print(*row, method)
    console.print(table)


if __name__ == "__main__":
    main()
