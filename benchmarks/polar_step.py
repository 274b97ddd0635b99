"""Steps of a small CNN by `polar_step`, by Muon's flattening and by Adam: python benchmarks/polar_step.py [--data DIR].

First the operator norms of both kinds of steps for one gradient. Then training: the convolutions' weights go by one of
the three optimisers, biases and the last layer by Adam with one rate in all of them. The rate of each is the best of a
grid on held-out training images; then three seeds with all training images, and the accuracy on the test images. Digits
come with scikit-learn; --data is the python archive of CIFAR-10, or the folder it was unpacked to, of which a tenth is
used. One thread: about 10 minutes.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

import gramcert
from gramcert.projecting.polar import polar
from gramcert.training.images import load_images

MOMENTUM, REST_RATE, SEEDS = 0.9, 3e-3, (1, 2, 3)
RATES = {
    "polar_step": (0.02, 0.05, 0.1, 0.2, 0.4),
    "flattened": (0.01, 0.025, 0.05, 0.1, 0.2),
    "Adam": (1e-3, 3e-3, 1e-2, 2e-2, 5e-2),
}


def flattened_step(layer: nn.Module, gradient: Tensor, norm: float = 1.0) -> Tensor:
    """The polar factor of the gradient as a matrix (out, in·taps), whatever norm it has as a convolution."""
    matrix = gradient.flatten(1)
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    found = polar(tall, 5)
    return norm * (found if tall is matrix else found.T).reshape(gradient.shape)


class Spectral(torch.optim.Optimizer):
    """Momentum of Nesterov's kind, and a step of the given kind along it."""

    def __init__(self, layers: list[nn.Conv2d], lr: float, step) -> None:
        super().__init__([layer.weight for layer in layers], {"lr": lr})
        self.layers, self.kind = layers, step

    @torch.no_grad()
    def step(self) -> None:
        lr = self.param_groups[0]["lr"]
        for layer in self.layers:
            buffer = self.state[layer.weight].setdefault("momentum", torch.zeros_like(layer.weight))
            buffer.mul_(MOMENTUM).add_(layer.weight.grad)
            layer.weight -= lr * self.kind(layer, layer.weight.grad + MOMENTUM * buffer)


def network(channels: int, size: int, first_stride: int) -> nn.Sequential:
    side = -(-size // (2 * first_stride))
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1, stride=first_stride),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (side // 2) ** 2, 10),
    )


def trained(kind: str, rate: float, seed: int, train, test, epochs: int, batch: int) -> float:
    """Accuracy on the second set after training on the first."""
    torch.manual_seed(seed)
    images, labels = train
    stride = 2 if images.shape[-1] > 16 else 1
    model = network(images.shape[1], images.shape[-1], stride)
    layers = [layer for layer in model if isinstance(layer, nn.Conv2d)]
    weights = {id(layer.weight) for layer in layers}
    optimizers = [torch.optim.Adam([p for p in model.parameters() if id(p) not in weights], lr=REST_RATE)]
    if kind == "Adam":
        optimizers.append(torch.optim.Adam([layer.weight for layer in layers], lr=rate))
    else:
        optimizers.append(Spectral(layers, rate, gramcert.polar_step if kind == "polar_step" else flattened_step))
    total = epochs * -(-len(images) // batch)
    falls = [torch.optim.lr_scheduler.LambdaLR(o, lambda done: max(0.0, 1 - done / total)) for o in optimizers]
    for _ in range(epochs):
        for some in torch.randperm(len(images)).split(batch):
            model.zero_grad()
            nn.functional.cross_entropy(model(images[some]), labels[some]).backward()
            for optimizer, fall in zip(optimizers, falls, strict=True):
                optimizer.step()
                fall.step()
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).float().mean())


def compared(name: str, train, test, epochs: int, batch: int) -> None:
    held = len(train[0]) // 5
    part, rest = [values[held:] for values in train], [values[:held] for values in train]
    print(f"\n{name}: {len(train[0])} training images, {len(test[0])} test images, {epochs} epochs")
    for kind, rates in RATES.items():
        start = time.perf_counter()
        tried = {rate: trained(kind, rate, 0, part, rest, epochs, batch) for rate in rates}
        rate = max(tried, key=tried.get)
        found = [trained(kind, rate, seed, train, test, epochs, batch) for seed in SEEDS]
        seconds = (time.perf_counter() - start) / (len(rates) + len(SEEDS))
        grid = ", ".join(f"{rate:g}: {100 * accuracy:.1f}" for rate, accuracy in tried.items())
        mean, low, high = 100 * statistics.mean(found), 100 * min(found), 100 * max(found)
        edge = "" if rate not in (rates[0], rates[-1]) else " AT THE EDGE OF THE GRID"
        print(
            f"  {kind:10} rate {rate:g}{edge}: test {mean:.2f} % ({low:.2f} to {high:.2f}), {seconds:.1f} s a run; "
            f"held out {grid}",
            flush=True,
        )


def norms() -> None:
    """Operator norms, and what steps of equal norm gain: their inner product with the gradient."""
    print("operator norms of steps (certified, tol 1e-2), and their gain at equal norm")
    for channels, kind in ((64, "Gaussian"), (64, "equal taps"), (512, "Gaussian")):
        torch.manual_seed(0)
        gradient = torch.randn(channels, channels, 3, 3)
        if kind == "equal taps":
            gradient = gradient.mean((2, 3), keepdim=True).expand_as(gradient).contiguous()
        sizes = {}
        for name, step in (("flattened", flattened_step), ("polar_step", gramcert.polar_step)):
            start = time.perf_counter()
            found = step(gramcert.Convolution(gradient, padding=1), gradient)
            seconds = time.perf_counter() - start
            norm = gramcert.spectral_norm(gramcert.Convolution(found, padding=1), tol=1e-2)
            sizes[name] = norm, float((gradient * found).sum()) / norm.upper, seconds
        for name, (norm, gain, seconds) in sizes.items():
            ratio = gain / sizes["flattened"][1]
            print(f"  {channels:3} channels, {kind}, {name:10} norm {norm}, gain {ratio:.2f}, {seconds:.2f} s")


def cifar(path: str):
    images = load_images("cifar10", path)
    picked = torch.arange(0, 50000, 10)
    return [tensors(images.train, picked), tensors(images.test, torch.arange(0, 10000, 2))]


def tensors(labelled, indices):
    return (labelled.images[indices].float() / labelled.white - 0.5) * 4, labelled.labels[indices]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="the python archive of CIFAR-10, or its unpacked folder")
    data = parser.parse_args().data
    norms()
    torch.manual_seed(0)
    digits = load_images("digits")
    sets = [tensors(part, torch.randperm(len(part))) for part in (digits.train, digits.test)]
    compared("digits", *sets, epochs=8, batch=64)
    if data is None:
        print("\nCIFAR-10 left out: --data was not given")
    else:
        compared("CIFAR-10, every tenth image", *cifar(data), epochs=4, batch=125)


if __name__ == "__main__":
    main()
