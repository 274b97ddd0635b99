"""Certified accuracy of ordinary classifiers, beside attacks: python benchmarks/certify.py --networks DIR.

DIR is a clone of the public repository thomasdeltort/SDP-CROWN, whose ``models`` and ``datasets/sdp`` have the weights,
images and radii of Chiu, Chen, Zhang and Zhang, *SDP-CROWN* (ICML 2025). The published figures below are of that paper,
on a V100. Radii count before normalisation. Networks whose weights are missing are left out, and said.
"""

import argparse
import itertools
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import gramcert
from gramcert.certification.accuracy import METHODS
from gramcert.files import read_torch

MEAN, SPREAD = np.array([125.3, 123.0, 113.9], dtype=np.float32) / 255, 0.225


class Normalised(nn.Module):
    """Images from 0 to 1 in, so that radii count before normalisation."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(MEAN).reshape(1, 3, 1, 1))

    def forward(self, x):
        return self.model((x - self.mean) / SPREAD)


def convolutional(channels, padding, *widths):
    """Convolutions with kernel 4 and stride 2, then linear layers, ReLU between all of them."""
    layers = []
    for one, two in itertools.pairwise(channels):
        layers += [nn.Conv2d(one, two, 4, stride=2, padding=padding), nn.ReLU()]
    return nn.Sequential(*layers, *dense(*widths))


def dense(*widths):
    layers = [nn.Flatten()]
    for one, two in itertools.pairwise(widths):
        layers += [nn.Linear(one, two), nn.ReLU()]
    return layers[:-1]


def deep():
    layers = [nn.Conv2d(3, 8, 4, stride=2, padding=1), nn.ReLU()]
    layers += [part for _ in range(2) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers, nn.Conv2d(8, 8, 4, stride=2, padding=1), nn.ReLU(), *dense(512, 100, 10))


# Network, radius, and what is published: attack, SDP-CROWN, LipSDP, in %; and seconds of SDP-CROWN an image.
NETWORKS = {
    "mnist_mlp": (lambda: nn.Sequential(*dense(784, 100, 100, 10)), 1.0, (54, 32.5, 30.5, 2.5)),
    "mnist_convsmall": (lambda: convolutional((1, 16, 32), 1, 1568, 100, 10), 0.3, (84.5, 81.5, 78.5, 12)),
    "cifar10_cnn_a": (lambda: convolutional((3, 16, 32), 1, 2048, 100, 10), 24 / 255, (55.5, 49, 39, 12)),
    "cifar10_convsmall": (lambda: convolutional((3, 16, 32), 0, 1152, 100, 10), 24 / 255, (52.5, 43.5, 33.5, 9)),
    "cifar10_cnn_c": (lambda: convolutional((3, 8, 16), 0, 576, 128, 64, 10), 24 / 255, None),
    "cifar10_convdeep": (deep, 24 / 255, None),
}


def images_of(folder, name):
    data = folder / "datasets" / "sdp" / ("mnist" if name.startswith("mnist") else "cifar")
    images, labels = (np.load(data / f"{part}_sdp.npy", allow_pickle=False) for part in "Xy")
    return torch.tensor(images).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels).long()


def network_of(folder, name, build):
    """The weights have names of their own, but come in the order of the layers."""
    model = build()
    found = read_torch(folder / "models" / f"{name}.pth")
    model.load_state_dict(dict(zip(model.state_dict(), found.values(), strict=True)))
    return (model if name.startswith("mnist") else Normalised(model)).eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=Path, required=True)
    parser.add_argument("--attack", action="store_true", help="also attack, which takes minutes")
    parser.add_argument("--forms", action="store_true", help="also without minorants, which takes minutes")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=list(NETWORKS))
    options = parser.parse_args()
    for name in options.only:
        build, radius, published = NETWORKS[name]
        if not (options.networks / "models" / f"{name}.pth").is_file():
            print(f"{name}: no weights", flush=True)
            continue
        model, (images, labels) = network_of(options.networks, name, build), images_of(options.networks, name)
        loader = list(zip(images.split(100), labels.split(100), strict=True))
        for steps in (0, 160) if options.forms else (160,):
            start = time.perf_counter()
            found = gramcert.certify(model, loader, [radius], search_steps=steps, jobs=options.jobs)
            seconds = (time.perf_counter() - start) / len(images)
            by = ", ".join(f"{method} {count}" for method in METHODS if (count := found.by.count(method)))
            text = (
                f"{name} at {radius:.4g}: clean {100 * found.clean:.1f}, certified {100 * found.certified[radius]:.1f}"
            )
            print(f"{text}, {seconds:.3f} s an image, {by}", flush=True)
        if published:
            print("  published: attack {}, SDP-CROWN {}, LipSDP {}; {} s an image".format(*published), flush=True)
        if options.attack:
            # Certified balls are not clipped to what images can be, so attacks may use all of them.
            bounds = float(images.min()) - radius, float(images.max()) + radius
            attacked = gramcert.attack(model, [(images, labels)], [radius], bounds=bounds)
            inside = int((attacked.distances < found.radii).sum())
            share = 100 * attacked.attacked[radius]
            print(f"  attacked {share:.1f}, {inside} attacks succeeded inside a certified radius", flush=True)


if __name__ == "__main__":
    main()
