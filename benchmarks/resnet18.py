"""All convolutions of a ResNet-18 with random weights, every size at once: python benchmarks/resnet18.py.

Random weights are the hard case: their symbols are flat, so that few frequencies can be left out. The other side is the
per-frequency SVD in float64 on a 32×17 half grid with the sampling factor of that grid, which is not certified.
"""

import time

import torch
from rich.console import Console
from rich.table import Table

from gramcert import sampling_factor, spectral_norm
from gramcert.baselines import frequency_svd
from gramcert.geometry.reduction import grouped_kernels, reduced_kernels
from resnets import convolutions
from side_by_side import high_water_mark

GRID = (32, 32)
TOL = 1e-2


def sampled_svd(layer):
    """The largest singular value on the grid, times what the grid can miss; a 1×1 kernel has one symbol only."""
    kernel = reduced_kernels(grouped_kernels(layer), layer.stride, layer.dilation)[0].double()
    taps = tuple(kernel.shape[2:])
    grid = tuple(n if k > 1 else 1 for n, k in zip(GRID, taps, strict=True))
    return frequency_svd(kernel, grid).item() * sampling_factor(taps, grid)


def timed(work):
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def main():
    table = Table(
        title=f"ResNet-18, every size, tol {TOL:g}; torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    for heading in ("layer", "kernel", "stride", "enclosure", "ours", "sampled SVD", "theirs", "faster"):
        table.add_column(heading, justify="left" if heading in ("layer", "kernel") else "right")
    totals = [0.0, 0.0]
    layers = [(name, layer) for name, layer, _ in convolutions("resnet18")]
    spectral_norm(layers[1][1], tol=TOL)  # the first call loads libraries
    before = high_water_mark()
    answers = [timed(lambda layer=layer: spectral_norm(layer, tol=TOL)) for _, layer in layers]
    peak = (high_water_mark() - before) / 2**30
    for (name, layer), (norm, ours) in zip(layers, answers, strict=True):
        sampled, theirs = timed(lambda layer=layer: sampled_svd(layer))
        assert norm.tol_reached
        assert norm.lower <= sampled * (1 + 1e-9)
        totals[0] += ours
        totals[1] += theirs
        shape = "×".join(map(str, layer.kernel.shape))
        cells = (
            str(layer.stride[0]),
            str(norm),
            f"{ours:.2f} s",
            f"{sampled:.5g}",
            f"{theirs:.2f} s",
            f"{theirs / ours:.1f}×",
        )
        table.add_row(name, shape, *cells)
        print(name, shape, *cells, flush=True)
    table.add_row("all", "", "", "", f"{totals[0]:.1f} s", "", f"{totals[1]:.1f} s", f"{totals[1] / totals[0]:.1f}×")
    console = Console(width=140)
    console.print(table)
    console.print(f"Ours grew the process by {peak:.2f} GiB at its peak.")


if __name__ == "__main__":
    main()
