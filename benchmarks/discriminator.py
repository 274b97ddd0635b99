"""GAN discriminators against torch's spectral_norm: python benchmarks/discriminator.py [--before CHECKOUT].

CPU time, which two threads that wait for each other do not hide. The sides take turns; seconds are medians over the
rounds, ratios medians of those within each round. With a checkout of an older commit, its parametrisations are timed in
processes of their own, in the same rounds. Below: how tight the defaults are, at random weights.
"""

import argparse
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
from torch import nn
from torch.nn.functional import softplus

from gramcert import parametrizations
from gramcert.geometry.convolution import Convolution
from gramcert.geometry.reduction import grouped_kernels, reduced_kernels

SIDES = {
    "plain": lambda layer: layer,
    "torch spectral_norm": nn.utils.parametrizations.spectral_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "spectral_rescaling": parametrizations.spectral_rescaling,
}
OURS = ("spectral_norm", "spectral_rescaling")


def small_gan(wrap, batch=64):
    """A step of training: the discriminator on real and generated images, then the generator."""
    torch.manual_seed(0)
    layers = [wrap(nn.Conv2d(1, 32, 4, 2, 1)), nn.LeakyReLU(0.2), wrap(nn.Conv2d(32, 64, 4, 2, 1)), nn.LeakyReLU(0.2)]
    critic = nn.Sequential(*layers, nn.Flatten(), wrap(nn.Linear(256, 1)))
    maker = nn.Sequential(
        *(nn.Linear(16, 256), nn.ReLU(), nn.Unflatten(1, (64, 2, 2)), nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU()),
        *(nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Tanh()),
    )
    steps = [torch.optim.Adam(model.parameters(), 1e-3) for model in (critic, maker)]
    real = torch.rand(batch, 1, 8, 8)

    def step():
        made = maker(torch.randn(batch, 16))
        steps[0].zero_grad()
        (softplus(-critic(real)).mean() + softplus(critic(made.detach())).mean()).backward()
        steps[0].step()
        steps[1].zero_grad()
        softplus(-critic(made)).mean().backward()
        steps[1].step()

    return step


def dcgan(widths, size):
    """Forward and backward of the discriminator, batch 64, with new weights each time."""

    def make(wrap, batch=64):
        torch.manual_seed(0)
        layers = []
        for before, after in zip((3, *widths), widths, strict=False):
            layers += [wrap(nn.Conv2d(before, after, 4, 2, 1)), nn.LeakyReLU(0.2)]
        model = nn.Sequential(*layers, wrap(nn.Conv2d(widths[-1], 1, 4)))
        descent, x = torch.optim.SGD(model.parameters(), 1e-6), torch.randn(batch, 3, size, size)

        def step():
            descent.zero_grad()
            model(x).sum().backward()
            descent.step()

        return step

    return make


# What is made, and how many steps a round times.
WORKS = {
    "GAN on 8×8 images, a training step": (small_gan, 20),
    "DCGAN discriminator, 32×32 images": (dcgan((64, 128, 256), 32), 1),
    "DCGAN discriminator, 64×64 images": (dcgan((64, 128, 256, 512), 64), 1),
}


def seconds(step, times):
    """CPU seconds of a step."""
    start = time.process_time()
    for _ in range(times):
        step()
    return (time.process_time() - start) / times


class Elsewhere:
    """The same work by another checkout, in a process that makes steps when it is told to."""

    def __init__(self, checkout, work, side):
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
        command = [sys.executable, __file__, "--serve", work, side]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def seconds(self, times):
        self.process.stdin.write(f"{times}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def serve(work, side):
    step = WORKS[work][0](SIDES[side])
    step()
    for line in sys.stdin:
        print(json.dumps(seconds(step, int(line))), flush=True)


def measure(work, rounds, before):
    make, times = WORKS[work]
    steps = {name: make(wrap) for name, wrap in SIDES.items()}
    for step in steps.values():
        step()
    others = {name: Elsewhere(before, work, name) for name in OURS} if before else {}
    found = []
    for _ in range(rounds):
        row = {name: seconds(step, times) for name, step in steps.items()}
        row |= {f"{name}, before": other.seconds(max(1, times // 10)) for name, other in others.items()}
        found.append(row)
    for other in others.values():
        other.close()
    return found


def show(work, found):
    table = Table(title=f"{work}; {torch.get_num_threads()} threads, CPU time", title_justify="left")
    for heading in ("weights", "ms", "to torch's"):
        table.add_column(heading, justify="left" if heading == "weights" else "right")
    for name in found[0]:
        ratio = statistics.median(row[name] / row["torch spectral_norm"] for row in found)
        table.add_row(name, f"{1e3 * statistics.median(row[name] for row in found):.1f}", f"{ratio:.2f}×")
    Console().print(table)


def singular_values(layer, points=16):
    """The largest and the mean over a grid of frequencies."""
    description = Convolution.of(layer)
    with torch.no_grad():
        kernel = reduced_kernels(grouped_kernels(description), description.stride, description.dilation)[0].double()
    values = torch.linalg.svdvals(torch.fft.fft2(kernel, s=(points, points)).permute(2, 3, 0, 1))
    return float(values.max()), float(values.mean())


def tightness():
    ours = parametrizations
    maps = {
        "spectral_rescaling": ours.spectral_rescaling,
        "the paper's (spatial, t = 3, input)": lambda layer: ours.spectral_rescaling(layer, form="spatial"),
        "spectral_norm": ours.spectral_norm,
        "spectral_norm, 6 iterations": lambda layer: ours.spectral_norm(layer, iterations=6),
    }
    table = Table(title="largest and mean singular value, default initialisation", title_justify="left")
    shapes = [(1, 32, 4, 2), (32, 64, 4, 2), (64, 128, 4, 2), (128, 256, 4, 2), (64, 64, 3, 1), (16, 32, 3, 1)]
    for heading in ("weights", *(f"{i}→{o}, {k}×{k}, stride {s}" for i, o, k, s in shapes)):
        table.add_column(heading)
    for name, wrap in maps.items():
        cells = []
        for i, o, k, s in shapes:
            torch.manual_seed(0)
            layer = wrap(nn.Conv2d(i, o, k, s, 1))
            cells.append("{:.3f}, {:.3f}".format(*singular_values(layer, 16 if o < 256 else 6)))
        table.add_row(name, *cells)
    Console(width=180).print(table)


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve(*sys.argv[sys.argv.index("--serve") + 1 :])
        sys.exit()
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--before", type=Path, help="a checkout of an older commit")
    arguments = parser.parse_args()
    for work in WORKS:
        show(work, measure(work, arguments.rounds, arguments.before))
    tightness()
