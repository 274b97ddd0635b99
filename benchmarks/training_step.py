"""What one training step costs: python benchmarks/training_step.py [--sizes nano S M].

Seconds of a step and of the rescaling alone (forward and backward), and floating-point operations, from which
docs/scale.md reckons the cost of whole trainings. The rescalings are timed in turn within each round; seconds are
medians over the rounds, ratios medians of the ratios within each round, which a machine that slows down leaves alone.
The published networks are built anew every time, as four of them would not fit into memory.
"""

import argparse
import dataclasses
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from gramcert.experiments.tables import RESCALINGS
from gramcert.nn import OffsetCrossEntropy, SLLConv2d, SLLLinear
from gramcert.training.configuration import named
from gramcert.training.networks import build

# Images per step: nano's own, and that of the published recipe.
BATCH = {"nano": 128, "S": 256, "M": 256, "L": 256, "XL": 256}


def configuration(size, rescaling):
    name = size if size == "nano" else f"cifar10-{size}"
    return dataclasses.replace(named(name), **rescaling.fields)


class Trained:
    """A network on random images."""

    def __init__(self, size, rescaling):
        self.model = build(configuration(size, rescaling), (3, 32, 32), 10)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)
        self.images, self.labels = torch.rand(BATCH[size], 3, 32, 32), torch.randint(10, (BATCH[size],))
        self.step()  # the first warms up

    def step(self):
        """Forward, backward, Adam."""
        self.optimizer.zero_grad()
        OffsetCrossEntropy()(self.model(self.images), self.labels).backward()
        self.optimizer.step()

    def rescale(self):
        """The outer weights of all residual layers, and their gradients."""
        for layer in self.model.modules():
            if isinstance(layer, SLLConv2d | SLLLinear):
                layer.outer_weight().sum().backward()

    def times(self):
        return timed(self.step), timed(self.rescale)


def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def operations(size, rescaling):
    """Floating-point operations of a forward and a backward pass, counted without making them."""
    with torch.device("meta"):
        model = build(configuration(size, rescaling), (3, 32, 32), 10)
        images = torch.rand(BATCH[size], 3, 32, 32)
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    return counter.get_total_flops()


def measure(size, rounds):
    """Seconds of a step and of R, for each rescaling and round."""
    kept = {r.name: Trained(size, r) for r in RESCALINGS} if size == "nano" else {}
    times = {r.name: [] for r in RESCALINGS}
    for _ in range(rounds):
        for rescaling in RESCALINGS:
            network = kept.get(rescaling.name) or Trained(size, rescaling)
            times[rescaling.name].append(network.times())
    return {name: tuple(zip(*pairs, strict=True)) for name, pairs in times.items()}


def show(size, found):
    title = f"{size}, batch {BATCH[size]}, {torch.get_num_threads()} threads"
    table = Table(title=title, title_justify="left")
    table.add_column("rescaling")
    for heading in ("s/step", "to AOL", "R alone, s", "to AOL", "GFLOP/step"):
        table.add_column(heading, justify="right")
    first = found[RESCALINGS[0].name]
    for rescaling in RESCALINGS:
        cells = []
        for times, reference in zip(found[rescaling.name], first, strict=True):
            ratio = statistics.median(time / other for time, other in zip(times, reference, strict=True))
            cells += [f"{statistics.median(times):.3f}", f"{ratio:.2f}×"]
        table.add_row(rescaling.name, *cells, f"{operations(size, rescaling) / 1e9:.0f}")
    Console().print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="*", default=["nano"], choices=list(BATCH))
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    for size in arguments.sizes:
        show(size, measure(size, arguments.rounds))
