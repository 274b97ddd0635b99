"""What one training step costs: python benchmarks/training_step.py [--sizes S M].

The nano networks of table 1 in turn, round after round, so that the ratios are of one run; and for the published sizes
seconds and floating-point operations per step, from which docs/scale.md reckons the cost of whole trainings.
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
from gramcert.nn import OffsetCrossEntropy
from gramcert.training.configuration import named
from gramcert.training.networks import build

BATCH = 256


def step_of(configuration):
    """One step on random images: forward, backward, Adam."""
    model = build(configuration, (3, 32, 32), 10)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loss = OffsetCrossEntropy()
    images, labels = torch.rand(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))

    def step():
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()

    return step


def with_rescaling(name, rescaling):
    return dataclasses.replace(named(name), **rescaling.fields)


def timed(step):
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def operations(configuration):
    """Floating-point operations of a forward and a backward pass, counted without making them."""
    with torch.device("meta"):
        model, images = build(configuration, (3, 32, 32), 10), torch.rand(BATCH, 3, 32, 32)
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    return counter.get_total_flops()


def nano(rounds):
    """Median seconds and operations per step of each rescaling, in turn."""
    configurations = {r.name: with_rescaling("nano", r) for r in RESCALINGS}
    steps = {name: step_of(configuration) for name, configuration in configurations.items()}
    times = {name: [] for name in steps}
    for round_number in range(rounds + 1):
        for name, step in steps.items():
            seconds = timed(step)
            if round_number:  # the first warms up
                times[name].append(seconds)
    return {name: (statistics.median(times[name]), operations(c)) for name, c in configurations.items()}


def published(size):
    """The second step of each network; one after the other, as four of them would not fit into memory."""
    found = {}
    for rescaling in RESCALINGS:
        configuration = with_rescaling(f"cifar10-{size}", rescaling)
        step = step_of(configuration)
        step()
        found[rescaling.name] = timed(step), operations(configuration)
    return found


def show(title, found):
    table = Table(title=title, title_justify="left")
    for heading in ("rescaling", "seconds per step", "against AOL", "GFLOP per step"):
        table.add_column(heading, justify="right" if heading != "rescaling" else "left")
    first = next(iter(found.values()))[0]
    for name, (seconds, flops) in found.items():
        table.add_row(name, f"{seconds:.3f}", f"{seconds / first:.2f}×", f"{flops / 1e9:.0f}")
    Console().print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="*", default=[], choices=["S", "M", "L", "XL"])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    threads = torch.get_num_threads()
    show(f"nano, batch {BATCH}, {threads} threads", nano(arguments.rounds))
    for size in arguments.sizes:
        show(f"{size}, batch {BATCH}, {threads} threads", published(size))
