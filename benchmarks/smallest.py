"""The smallest singular value beside the largest, in one run: python benchmarks/smallest.py [--rounds 7] [--slow].

Each row times `smallest_singular_value` and `spectral_norm` of the same layer at the same tolerance, in alternating
calls after one of each, and prints the medians and what was enclosed.
"""

import argparse
import functools
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from gramcert import Convolution, smallest_singular_value, spectral_norm


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def near_orthogonal(channels, noise):
    """Half of the channels of a rotation shifted one way, half another, and a little of everything."""
    basis = torch.linalg.qr(gaussian(channels, channels))[0]
    kernel = torch.zeros(channels, channels, 3, 3)
    kernel[:, : channels // 2, 0, 2] = basis[:, : channels // 2]
    kernel[:, channels // 2 :, 2, 1] = basis[:, channels // 2 :]
    return kernel + noise * gaussian(channels, channels, 3, 3, seed=1)


def circular(kernel, **geometry):
    return Convolution(kernel, padding=1, padding_mode="circular", **geometry)


ROWS = [
    *((f"64×64×3×3 orthogonal + {noise:g}·Gaussian", circular(near_orthogonal(64, noise)), None, 1e-3)
      for noise in (0.0, 1e-4, 1e-3, 5e-3)),
    ("256×256×3×3 orthogonal + 0.001·Gaussian", circular(near_orthogonal(256, 1e-3)), None, 1e-3),
    ("64→128 Gaussian, circular", circular(gaussian(128, 64, 3, 3)), None, 1e-3),
    ("128→64 Gaussian, no padding", Convolution(gaussian(64, 128, 3, 3)), None, 1e-3),
    ("64×64 Gaussian, circular, 32×32", circular(gaussian(64, 64, 3, 3)), 32, 1e-3),
    ("64→64 Gaussian, zeros, 8×8", Convolution(gaussian(64, 64, 3, 3), padding=1), 8, 1e-2),
    ("matrix 2048×1024", gaussian(2048, 1024), None, 1e-3),
]  # fmt: skip
SLOW = [("128→64 Gaussian, zeros, 16×16", Convolution(gaussian(64, 128, 3, 3), padding=1), 16, 1e-3)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slow", action="store_true")
    arguments = parser.parse_args()
    table = Table("layer", "size", "tol", "smallest", "time", "largest", "time", "ratio")
    for name, layer, size, tol in ROWS + SLOW * arguments.slow:
        works = [functools.partial(f, layer, size, tol=tol) for f in (smallest_singular_value, spectral_norm)]
        found = [work() for work in works]
        times = [[], []]
        for _ in range(arguments.rounds):
            for work, record in zip(works, times, strict=True):
                start = time.perf_counter()
                work()
                record.append(time.perf_counter() - start)
        least, most = map(statistics.median, times)
        missed = ["" if each.tol_reached else " (tolerance missed)" for each in found]
        table.add_row(
            name,
            "every" if size is None else str(size),
            f"{tol:g}",
            f"{found[0]}{missed[0]}",
            f"{1e3 * least:.0f} ms",
            f"{found[1]}{missed[1]}",
            f"{1e3 * most:.0f} ms",
            f"{least / most:.2f}",
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
