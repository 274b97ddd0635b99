"""How near `project` comes, and what it costs: python benchmarks/projection.py [--real | --hook].

Three ways to bring a 64×64×3×3 layer to norm 1, in one run: the weights divided by their norm; one pass of clipping on
the grid of a 32×32 input and truncation to the taps (Sedghi, Gupta & Long 2019), whose norm is then above; ours.
`least` is a lower bound of the distance of every kernel with norm 1, by duality: a long search on a finer grid. It
says how near to the optimum a distance is, and what ratio to scaling there can be at all. With --real the same for
convolutions of trained networks, where tests/real_layers.py finds them, at a half and at 1/1.15 of their norms. With
--hook the times of `projection` after steps that move the weights by 2 %, one layer of each width.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import gramcert
from gramcert.geometry.symbol import FrequencyGrid
from gramcert.projecting.nearest import excess
from gramcert.projecting.project import constraint, search
from gramcert.projecting.sampled import Places, Sampling

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from real_layers import MODELS, real_layers

CHANNELS, ROUNDS = 64, 3


def drawn(norm: float | None, **options: object) -> gramcert.Convolution:
    """Torch's own initialisation, or Gaussian weights scaled to a norm."""
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False, **options)
    if norm is not None:
        torch.nn.init.normal_(layer.weight)
        layer.weight.data *= norm / gramcert.spectral_norm(layer, tol=1e-6).upper
    return gramcert.Convolution.of(layer).with_kernel(layer.weight.detach())


def clipped_once(layer: gramcert.Convolution, target: float) -> torch.Tensor:
    """Singular values of the symbols at 32×32 clipped, and what remains truncated to the taps."""
    places = Places(layer)
    matrices = places.gather(layer.kernel / target)
    sampling = Sampling.on(FrequencyGrid.unshifted((32,) * layer.axes), places.taps, matrices)
    symbols = sampling.symbols(matrices)
    kept = sampling.adjoint(symbols - excess(symbols, 1.0, None)[0])
    return places.scatter(kept * target, layer.kernel)


def least_distance(layer: gramcert.Convolution, target: float) -> float:
    _, level = constraint(layer, None, target)
    sizes = tuple(max(1, 12 * (size - 1)) for size in Places(layer).taps)
    grid = FrequencyGrid(sizes, (*(0.0,) * (len(sizes) - 1), 0.5 * (sizes[-1] > 1)))
    return search(layer, None, grid, level, 150, 1e-4, fine=False)[1].lower * level


def row(name: str, layer: gramcert.Convolution, target: float) -> tuple[str, ...]:
    norm = gramcert.spectral_norm(layer, tol=1e-4).upper
    weight = layer.kernel
    scaling = float(weight.norm()) * (1 - target / norm)
    passed = clipped_once(layer, target)
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        ours = gramcert.project(layer, target)
        times.append(time.perf_counter() - start)
    distance, least = float(torch.dist(ours, weight)), least_distance(layer, target)
    once = gramcert.spectral_norm(layer.with_kernel(passed), tol=1e-4)
    inside = passed * min(1.0, target / once.upper)
    upper = gramcert.spectral_norm(layer.with_kernel(ours)).upper
    assert upper <= target
    return (
        name,
        f"{norm / target:.3f}",
        f"{scaling:.4f}",
        f"{once.upper / target:.3f}",
        f"{float(torch.dist(inside, weight)):.4f}",
        f"{distance:.4f}",
        f"{least:.4f}",
        f"{scaling / distance:.2f} of {scaling / least:.2f}",
        f"{100 * (distance / least - 1):.1f} %",
        f"{1 - upper / target:.0e}",
        f"{statistics.median(times):.2f} s",
    )


def hook_times() -> None:
    for channels in (16, 64, 128):
        torch.manual_seed(0)
        layer = torch.nn.Conv2d(channels, channels, 3, padding=1)
        optimizer = torch.optim.SGD([layer.weight], lr=1.0)
        gramcert.projection(optimizer, [layer])
        times = []
        for _ in range(8):
            layer.weight.grad = torch.randn_like(layer.weight)
            layer.weight.grad *= 0.02 * layer.weight.detach().norm() / layer.weight.grad.norm()
            start = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - start)
        print(f"{channels:3} channels: {min(times):.2f} to {max(times):.2f} s, median {statistics.median(times):.2f} s")


def main() -> None:
    if "--hook" in sys.argv:
        return hook_times()
    table = Table(
        title=f"torch {torch.__version__}, {torch.get_num_threads()} threads; distances in the Frobenius norm"
    )
    headings = ("layer", "norm/target", "scaling", "1 pass: norm", "then scaled", "ours", "least", "nearer, at most")
    for heading in (*headings, "above least", "1 - upper/target", "time"):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    if "--real" in sys.argv:
        if not MODELS.is_dir():
            sys.exit(f"{MODELS}: the trained weights are not at hand")
        chosen = {}
        for file, name, layer in real_layers():
            if layer.groups == 1 and 16 <= min(layer.kernel.shape[:2]) <= 64 and max(layer.kernel_size) == 3:
                chosen.setdefault(file.split("/")[0], []).append((name, layer))
        for family, layers in chosen.items():
            name, layer = layers[len(layers) // 2]
            layer = layer.with_kernel(layer.kernel.float())
            norm = gramcert.spectral_norm(layer).upper
            label = f"{family} {name} {'×'.join(map(str, layer.kernel.shape))}"
            for part in (1 / 1.15, 0.5):
                table.add_row(*row(label, layer, part * norm))
    else:
        table.add_row(*row("torch's init, zeros", drawn(None), 1.0))
        for norm in (1.3, 1.5, 2.0):
            table.add_row(*row("Gaussian, zeros", drawn(norm), 1.0))
        table.add_row(*row("Gaussian, circular", drawn(1.3, padding_mode="circular"), 1.0))
        for norm in (1.3, 2.0):
            table.add_row(*row("Gaussian, stride 2", drawn(norm, stride=2), 1.0))
    return Console(width=170).print(table)


if __name__ == "__main__":
    main()
