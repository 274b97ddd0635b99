"""Time of spectral_norm against channels, input size, tolerance and taps: python benchmarks/growth.py --plot FILE.

Gaussian kernels, medians of three calls (one where a call takes longer than five seconds). The slope of a curve is that
of a straight line through the second half of its points in logarithms.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import torch

from gramcert import Convolution, spectral_norm

SLOW = 5.0


def gaussian(channels, taps=3):
    kernel = torch.randn(channels, channels, taps, taps, generator=torch.Generator().manual_seed(channels))
    return Convolution(kernel, padding=taps // 2)


CHANNELS = [8, 16, 32, 64, 128, 256, 512, 1024]
SIZES = [8, 16, 32, 64, 128, 256, 512]
TOLERANCES = [10.0**-exponent for exponent in range(1, 7)]
TAPS = [1, 3, 5, 7, 11, 15, 23, 31]

PANELS = {
    "channels": {
        "every size, tol 1e-2": (CHANNELS, lambda c: (gaussian(c), None, 1e-2)),
        "every size, tol 1e-3": (CHANNELS[:-1], lambda c: (gaussian(c), None, 1e-3)),
        "14×14 zeros, tol 1e-3": (CHANNELS[:-1], lambda c: (gaussian(c), 14, 1e-3)),
    },
    "input size": {
        "16 channels, tol 1e-3": (SIZES, lambda n: (gaussian(16), n, 1e-3)),
        "64 channels, tol 1e-3": (SIZES, lambda n: (gaussian(64), n, 1e-3)),
    },
    "1/tol": {
        "64 channels, every size": (TOLERANCES, lambda tol: (gaussian(64), None, tol)),
        "16 channels, 32×32 zeros": (TOLERANCES, lambda tol: (gaussian(16), 32, tol)),
    },
    "taps per axis": {
        "8 channels, every size, tol 1e-2": (TAPS, lambda k: (gaussian(8, k), None, 1e-2)),
        "8 channels, 32×32 zeros, tol 1e-2": (TAPS, lambda k: (gaussian(8, k), 32, 1e-2)),
    },
}


def seconds(layer, size, tol):
    times = []
    while len(times) < 3 and not (times and times[0] > SLOW):
        start = time.perf_counter()
        norm = spectral_norm(layer, size, tol=tol)
        times.append(time.perf_counter() - start)
    return statistics.median(times), norm.tol_reached


def slope(points):
    points = [(math.log(x), math.log(y)) for x, y in points[len(points) // 2 :]]
    mean_x, mean_y = (statistics.mean(column) for column in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def measure():
    found = {}
    for panel, curves in PANELS.items():
        for name, (values, case) in curves.items():
            points = []
            for value in values:
                taken, reached = seconds(*case(value))
                points.append((1 / value if panel == "1/tol" else value, taken))
                print(f"{panel} {value:g}, {name}: {taken:.3f} s{'' if reached else ', tolerance missed'}", flush=True)
            found.setdefault(panel, {})[name] = points
            print(f"{panel}, {name}: slope {slope(points):.2f}", flush=True)
    return found


def draw(found, path):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7.5), layout="constrained")
    for axis, (panel, curves) in zip(axes.flat, found.items(), strict=True):
        for name, points in curves.items():
            axis.loglog(*zip(*points, strict=True), marker="o", label=f"{name}: slope {round(slope(points), 1) + 0.0}")
        places = sorted({x for points in curves.values() for x, _ in points})
        axis.set_xticks(places, [f"{x:g}" for x in places])
        axis.minorticks_off()
        seconds_taken = [y for points in curves.values() for _, y in points]
        axis.set_ylim(
            *(
                10.0**end
                for end in (math.floor(math.log10(min(seconds_taken))), math.ceil(math.log10(max(seconds_taken))))
            )
        )
        axis.set_xlabel(panel)
        axis.set_ylabel("seconds")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(f"spectral_norm, Gaussian kernels, {torch.get_num_threads()} threads")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    result = measure()
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    if arguments.plot:
        draw(result, arguments.plot)
