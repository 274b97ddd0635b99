"""All convolutions of ResNets at their real sizes, zero padding: python benchmarks/real_sizes.py [--help]."""

import argparse
import time

import torch
from rich.console import Console
from rich.table import Table

from gramcert import spectral_norm
from resnets import BLOCKS, convolutions
from side_by_side import high_water_mark

# Seconds that were asked for, of all layers together.
ASKED = {("resnet18", 1e-2): 60, ("resnet18", 1e-3): 200, ("resnet50", 1e-2): 120}


def measure(network, tol, console):
    title = f"{network}, tol {tol:g}; torch {torch.__version__}, {torch.get_num_threads()} threads"
    table = Table(title=title, title_justify="left")
    for heading in ("layer", "kernel", "stride", "input", "enclosure", "by", "time"):
        table.add_column(heading, justify="right" if heading in ("stride", "input", "time") else "left")
    before, total, missed = high_water_mark(), 0.0, 0
    layers = list(convolutions(network))
    for name, layer, size in layers:
        start = time.perf_counter()
        norm = spectral_norm(layer, size, tol=tol)
        seconds = time.perf_counter() - start
        total, missed = total + seconds, missed + (not norm.tol_reached)
        shape = "×".join(map(str, layer.kernel.shape))
        table.add_row(name, shape, str(layer.stride[0]), str(size), str(norm), norm.method, f"{seconds:.2f} s")
    console.print(table)
    asked = ASKED.get((network, tol))
    peak = (high_water_mark() - before) / 2**30
    console.print(
        f"{len(layers)} layers, {total:.1f} s" + (f" (asked: {asked} s)" if asked else "") + f"; {missed} missed the "
        f"tolerance; the process grew by {peak:.2f} GiB\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="*", default=list(BLOCKS), choices=list(BLOCKS))
    parser.add_argument("--tol", nargs="*", type=float, default=[1e-2, 1e-3])
    arguments = parser.parse_args()
    for network in arguments.networks:
        for tol in arguments.tol:
            measure(network, tol, Console(width=140))
