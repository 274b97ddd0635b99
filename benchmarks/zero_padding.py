"""Zero padding at one input size: how near, how fast, how large: python benchmarks/zero_padding.py [--with-svd].

``--with-svd`` also takes the dense SVD of a 16384 by 16384 matrix: several GiB and many minutes.
"""

import statistics
import sys
import time

import torch
from rich.console import Console
from rich.table import Table

from gramcert import Convolution, norm2_toep, spectral_norm
from gramcert.certified.tapwise import dense_matrix
from gramcert.geometry.axis import layer_axes
from side_by_side import high_water_mark


def layer(channels):
    kernel = torch.randn(channels, channels, 3, 3, generator=torch.Generator().manual_seed(channels))
    return Convolution(kernel, padding=1)


def timed(work, repeats=3):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        value = work()
        times.append(time.perf_counter() - start)
    return value, statistics.median(times)


def distances(console):
    table = Table(title="distance above the truth at n = 32, zero padding, k = 3 (asked: 50× nearer)")
    for heading in ("channels", "truth", "spectral_norm, tol 1e-4", "time", "norm2_toep, t = 6", "time", "nearer"):
        table.add_column(heading, justify="right")
    for channels in (4, 8, 16):
        case = layer(channels)
        truth = spectral_norm(case, 32, tol=1e-9)
        ours, our_time = timed(lambda case=case: spectral_norm(case, 32, tol=1e-4))
        theirs, their_time = timed(lambda case=case: norm2_toep(case.kernel.double(), 6).item(), 1)
        near, far = ours.upper - truth.lower, theirs - truth.upper
        table.add_row(
            str(channels),
            str(truth),
            f"+{near:.2e}",
            f"{our_time:.2f} s",
            f"+{far:.2e}",
            f"{their_time:.2f} s",
            f"{far / near:.0f}×",
        )
    console.print(table)


def large(console):
    case = layer(16)
    before = high_water_mark()
    norm, seconds = timed(lambda: spectral_norm(case, 512, tol=1e-3))
    peak = (high_water_mark() - before) / 2**30
    console.print(f"n = 512, 16 channels, tol 1e-3: {norm}, {seconds:.2f} s, peak {peak:.2f} GiB (asked: 5 s, 1 GiB)")


def against_svd(console):
    case = layer(16)
    norm, ours = timed(lambda: spectral_norm(case, 32, tol=1e-6))
    console.print(f"n = 32, 16 channels, tol 1e-6: {norm}, {ours:.2f} s, by {norm.method}")
    if "--with-svd" not in sys.argv:
        return
    matrix = dense_matrix(case.kernel.double(), layer_axes(case, (32, 32)))
    truth, theirs = timed(lambda: torch.linalg.svdvals(matrix)[0].item(), 1)
    console.print(f"dense SVD: {truth:.12g}, {theirs:.0f} s; {theirs / ours:.0f}× faster (asked: 50×)")
    assert norm.lower <= truth * (1 + 1e-12)
    assert truth * (1 - 1e-12) <= norm.upper


if __name__ == "__main__":
    output = Console(width=140)
    large(output)
    distances(output)
    against_svd(output)
