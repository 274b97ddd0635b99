"""What one training step costs: python benchmarks/training_step.py [--sizes nano S M] [--before CHECKOUT].

Seconds of a step and of the rescaling alone (forward and backward), and floating-point operations, from which
docs/scale.md reckons the cost of whole trainings. The rescalings are timed in turn within each round; seconds are
medians over the rounds, ratios medians of the ratios within each round, which a machine that slows down leaves alone.
The published networks are built anew every time, as four of them would not fit into memory. With a checkout of an older
commit, one rescaling (--rescaling) is timed by both in turn, each in a process of its own; --only-r leaves out the
steps, whose activations take about 14 GB for S by the reckoning of docs/scale.md.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

import gramcert
from gramcert.experiments.tables import RESCALINGS
from gramcert.nn import OffsetCrossEntropy, SLLConv2d, SLLLinear
from gramcert.training.configuration import named
from gramcert.training.networks import build

# Images per step: nano's own, and that of the published recipe.
BATCH = {"nano": 128, "S": 256, "M": 256, "L": 256, "XL": 256}


def configuration(size, rescaling):
    name = size if size == "nano" else f"cifar10-{size}"
    return dataclasses.replace(named(name), **rescaling.fields)


# Equal layers at once, which older commits do not have.
together = getattr(gramcert.nn, "together", lambda model: contextlib.nullcontext())


class Trained:
    """A network on random images."""

    def __init__(self, size, rescaling, only_r=False):
        self.only_r = only_r
        self.model = build(configuration(size, rescaling), (3, 32, 32), 10)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)
        self.images, self.labels = torch.rand(BATCH[size], 3, 32, 32), torch.randint(10, (BATCH[size],))
        if not only_r:
            self.step()  # the first warms up

    def step(self):
        """Forward, backward, Adam."""
        self.optimizer.zero_grad()
        with together(self.model):
            logits = self.model(self.images)
        OffsetCrossEntropy()(logits, self.labels).backward()
        self.optimizer.step()

    def rescale(self):
        """The outer weights of all residual layers, and their gradients."""
        layers = [layer for layer in self.model.modules() if isinstance(layer, SLLConv2d | SLLLinear)]
        if not hasattr(gramcert.nn, "together"):
            for layer in layers:
                layer.outer_weight().sum().backward()
            return
        with together(self.model):
            weights = [layer._negative_outer_weight() for layer in layers]
        torch.autograd.backward(weights, [weight.new_ones(()).expand_as(weight) for weight in weights])

    def times(self):
        return timed(self.rescale if self.only_r else self.step), timed(self.rescale)


def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Elsewhere:
    """The steps of a checkout, in a process that makes one when it is told to."""

    def __init__(self, checkout, size, rescaling, only_r):
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
        command = [sys.executable, __file__, "--serve", size, rescaling, *(["r"] if only_r else [])]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def times(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def serve(size, name, *only_r):
    network = Trained(size, next(r for r in RESCALINGS if r.name == name), bool(only_r))
    network.times()
    for _ in sys.stdin:
        print(json.dumps(network.times()), flush=True)


def compare(size, rescaling, rounds, before, only_r):
    """Both commits in turn."""
    checkouts = {"before": before, "now": Path(gramcert.__file__).parents[2]}
    sides = {name: Elsewhere(path, size, rescaling, only_r) for name, path in checkouts.items()}
    found = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            found[name].append(side.times())
    for side in sides.values():
        side.close()
    table = Table(title=f"{size}, {rescaling}, {torch.get_num_threads()} threads", title_justify="left")
    for heading in ("", "s/step", "R alone, s", "R of a step"):
        table.add_column(heading, justify="right")
    for name, times in found.items():
        steps, alone = (statistics.median(column) for column in zip(*times, strict=True))
        share = statistics.median(r / step for step, r in times)
        table.add_row(name, f"{steps:.3f}", f"{alone:.3f}", f"{100 * share:.0f} %")
    ratios = [
        statistics.median(a[place] / b[place] for a, b in zip(found["before"], found["now"], strict=True))
        for place in (0, 1)
    ]
    table.add_row("faster", *(f"{ratio:.2f}×" for ratio in ratios), "")
    Console().print(table)


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
    if "--serve" in sys.argv:
        serve(*sys.argv[sys.argv.index("--serve") + 1 :])
        sys.exit()
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="*", default=["nano"], choices=list(BATCH))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--before", type=Path, help="a checkout of an older commit")
    parser.add_argument("--only-r", action="store_true", help="R alone, in both columns")
    parser.add_argument("--rescaling", default="frequency SR, t = 2", choices=[r.name for r in RESCALINGS])
    arguments = parser.parse_args()
    for size in arguments.sizes:
        if arguments.before:
            compare(size, arguments.rescaling, arguments.rounds, arguments.before, arguments.only_r)
            continue
        show(size, measure(size, arguments.rounds))
