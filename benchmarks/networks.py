"""How far proved constants of whole networks are above the truth: python benchmarks/networks.py --networks DIR.

Each network is audited with closed-form multipliers and with a search, its certificate is verified, and a lower bound
is searched for: the largest difference quotient that an ascent on Jacobians finds (steepest.py), at inputs anywhere, as
the constants hold anywhere. Beside it is what free slopes reach, below which no bound from slopes alone can be: the
rest of the way down needs more than forms. The networks are public and not ours to copy; what is missing is named and
left out.

DIR holds clones of
  github.com/ppauli/GLipSDP        as DIR/GLipSDP: perceptrons for 8×8 digits, with constants by LipSDP and Mosek beside
                                   them, and convolutional networks for MNIST, as weights and as ONNX
  github.com/stanleybak/vnncomp2021  as DIR/vnncomp2021: the benchmarks mnistfc and cifar10_resnet of VNN-COMP 2021
and the folder ../shared/models beside this repository holds
  cifar_resnet/resnet20-12fca82f.th                       github.com/akamaster/pytorch_resnet_cifar10
  auto_lirpa/cifar_2c2f.pth, auto_lirpa/kw_mnist.pth      github.com/Verified-Intelligence/auto_LiRPA
  convex_adversarial/models_scaled_l2__cifar_small_36px.pth   github.com/locuslab/convex_adversarial, the first network
                                                              of its cascade
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import gramcert
from gramcert.auditing.reading import Source
from steepest import steepest, steepest_slopes

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from real_layers import MODELS

TRAINED = "GLipSDP/Scalability/exported_mnist_models"
DIGITS = "GLipSDP/Comparison/exports"
VNNCOMP = "vnncomp2021/benchmarks"


@dataclass
class Figures:
    """What one run found about one network; times in seconds."""

    product: float
    closed: float
    closed_time: float
    upper: float
    upper_time: float
    verify_time: float
    verified: bool
    lower: float
    slopes: float

    def violations(self) -> list[str]:
        """What must never be, as long as forms know nothing but slopes."""
        rounded = 1 + 1e-8  # the quotient is computed in float64
        wrong = {
            "the certificate does not hold": not self.verified,
            "the proved constant is below a difference quotient": not self.lower <= self.upper * rounded,
            "the closed form is below a difference quotient": not self.lower <= self.closed * rounded,
            "the proved constant is below what slopes reach": not self.slopes <= self.upper * rounded,
            "the closed form is below what slopes reach": not self.slopes <= self.closed * rounded,
            "the proved constant is above the product": not self.upper <= self.product,
            "the closed form is above the product": not self.closed <= self.product,
        }
        return [what for what, is_so in wrong.items() if is_so]


@dataclass
class Network:
    """A public network, what is known of its constant, and what was asked for.

    Attributes:
        files: what it is read from.
        read: a module, or the path of an ONNX file.
        goals: each in words, with the question whether it is reached.
        starts: of the ascent on Jacobians, fewer for what is slow.
        limit: the seconds that an audit may take, half of them for its search.
    """

    name: str
    files: list[Path]
    read: Callable[[], nn.Module | Path]
    shape: tuple[int, ...]
    anchor: str
    goals: dict[str, Callable[[Figures], bool]]
    starts: int = 64
    limit: float = math.inf

    def missing(self) -> str | None:
        absent = [file for file in self.files if not file.is_file()]
        return f"{absent[0]} is not at hand" if absent else None

    def answers(self, found: Figures) -> dict[str, bool]:
        """Each goal, and whether it is reached."""
        answers = {goal: reached(found) for goal, reached in self.goals.items()}
        if self.limit < math.inf:
            answers[f"within {self.limit:g} s"] = found.upper_time <= self.limit
        return answers | {"verify faster than audit": found.verify_time < found.upper_time}


def networks(folder: Path, seeds: int) -> list[Network]:
    """All of them, in the order of the table."""
    resnet = Network(
        "ResNet-20, 32×32",
        *weights("cifar_resnet/resnet20-12fca82f.th", "resnet20"),
        (3, 32, 32),
        "product at tol 1e-2: 1.99e10,\nprototype: 4.2e7",
        {"≤ 5e7": lambda found: found.upper <= 5e7, "closed form ≤ 8.5e7": lambda found: found.closed <= 8.5e7},
        starts=32,
        limit=120,
    )
    digits = [digit_network(folder, kind, seed) for kind in ("fnn2", "fnn3") for seed in range(seeds)]
    chains = [
        chain(folder, channels, depth, f"GLipSDP: {anchor}", at_most)
        for channels, depth, anchor, at_most in (
            (8, 8, "274.0,\nprototype: 79.4", 80),
            (8, 16, "11,324,\nprototype: 1,292", 1300),
            (32, 8, "261.3", 200),
        )
    ]
    mnist = [
        onnx_network(
            *(folder / TRAINED / f"cnn_{name}.onnx", (1, 28, 28), f"product at tol 1e-2: {today:g}"),
            *(below_norms(today, times), starts, ".data"),
        )
        for name, today, times, starts in (("C9_CH8", 28378, 8, 64), ("C17_CH8", 7.9e8, 100, 32))
    ]
    robust = [
        Network(
            name,
            *weights(file, architecture, prefix),
            shape,
            f"product at tol 1e-2: {today}",
            below_norms(today, 2.5),
        )
        for name, file, architecture, prefix, shape, today in (
            ("2c2f, CIFAR", "auto_lirpa/cifar_2c2f.pth", "2c2f", None, (3, 32, 32), 21.5),
            ("Wong–Kolter, MNIST", "auto_lirpa/kw_mnist.pth", "kw-small", None, (1, 28, 28), 445),
            (
                "Wong–Kolter, CIFAR l2",
                "convex_adversarial/models_scaled_l2__cifar_small_36px.pth",
                "kw-small",
                "state_dict.0.",
                (3, 32, 32),
                20.1,
            ),
        )
    ]
    competition = [
        onnx_network(
            *(folder / VNNCOMP / file, shape, f"product: {today} × sampled"),
            *(near_sampled(within, today), starts),
        )
        for file, shape, today, within, starts in (
            ("mnistfc/mnist-net_256x2.onnx", (784, 1), 86, 8, 512),
            ("mnistfc/mnist-net_256x4.onnx", (784, 1), 3200, 40, 512),
            ("cifar10_resnet/onnx/resnet_2b.onnx", (3, 32, 32), 690, 30, 64),
        )
    ]
    return [resnet, *digits, *chains, *mnist, *robust, *competition]


def below_norms(today: float, times: float):
    """Than the product of norms was when the goal was set."""
    return {f"≤ {today:g} / {times:g}": lambda found: times * found.upper <= today}


def near_sampled(within: float, today: float):
    """Also by the lower bound that was known when the goal was set: the product was ``today`` times as large."""
    return {
        f"≤ {within:g} × sampled": lambda found: found.upper <= within * found.lower,
        f"≤ {within:g} × product / {today:g}": lambda found: found.upper <= within * found.product / today,
    }


def weights(file, architecture, prefix=None):
    path = MODELS / file
    return [path], lambda: Source.of("networks", path, architecture, prefix).module


def digit_network(folder: Path, kind: str, seed: int) -> Network:
    """Linear layers with ReLU for 8×8 digits.

    The published constants are those of output 7 alone, row 8 of the last layer in MATLAB; weights are transposed.
    The convolutional networks of the same folder are no anchors: the comparison unrolls their images column by column,
    and torch flattens row by row.
    """
    path = folder / DIGITS / f"{kind}_seed{seed}_weights.mat"
    summary = folder / DIGITS / "lipschitz_summary_all_models.mat"
    known = math.nan
    if summary.is_file():
        known = float(matlab(summary)["all_results"][kind]["individual"]["Lip_LipSDP"][seed])

    def read():
        content, layers = matlab(path), []
        depth = sum(name.startswith("fc") and name.endswith("weight") for name in content)
        for i in range(1, depth + 1):
            rows = slice(7, 8) if i == depth else slice(None)
            layers += [linear(content[f"fc{i}_weight"].T[rows], content[f"fc{i}_bias"].reshape(-1)[rows]), nn.ReLU()]
        return nn.Sequential(*layers[:-1]).eval()

    return Network(
        f"digits {kind}, seed {seed}",
        [path, summary],
        read,
        (64,),
        f"LipSDP: {known:.8f}",
        {"≤ LipSDP × (1 + 1e-5)": lambda found: found.upper <= known * (1 + 1e-5)},
        starts=256,
        limit=10,
    )


def chain(folder: Path, channels: int, depth: int, anchor: str, at_most: float) -> Network:
    """The second to the last convolution of a trained network at 14×14, with slopes in [0, 1] between them.

    Stored are the kernels that spectral normalisation divided; the factor 2 that the network multiplies with is not in
    them, nor in the anchor, nor are biases.
    """
    path = folder / TRAINED / f"cnn_C{depth + 1}_CH{channels}.mat"

    def read():
        content, layers = matlab(path)["params"], []
        for i in range(1, depth + 1):
            layer = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
            layer.weight.data = torch.tensor(content[f"conv_{i}_weight"])
            layers += [layer, nn.ReLU()]
        return nn.Sequential(*layers[:-1]).eval()

    return Network(
        f"convolutions, {channels} channels, depth {depth}",
        [path],
        read,
        (channels, 14, 14),
        anchor,
        {f"≤ {at_most:,g}": lambda found: found.upper <= at_most},
        starts=64 if channels * depth <= 64 else 32,
        limit=120,
    )


def onnx_network(path: Path, shape, anchor, goals, starts, data=None) -> Network:
    """``data`` ends the name of a file beside it that holds its weights."""
    files = [path] if data is None else [path, path.with_name(path.name + data)]
    return Network(path.stem, files, lambda: path, shape, anchor, goals, starts)


def linear(weight, bias) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data, layer.bias.data = torch.tensor(weight), torch.tensor(bias)
    return layer


def matlab(path: Path):
    from scipy.io import loadmat

    return loadmat(path, simplify_cells=True)


class OnnxInTorch(nn.Module):
    """The few operators of these files as torch computes them: what is sampled shares no code with what is audited."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        import onnx

        graph = onnx.load(path).graph
        self.numbers = {}  # names in ONNX, of buffers here, which follow .double()
        for i, tensor in enumerate(graph.initializer):
            self.numbers[tensor.name] = f"constant{i}"
            self.register_buffer(f"constant{i}", torch.tensor(onnx.numpy_helper.to_array(tensor)))
        self.nodes = [
            (
                node.op_type,
                list(node.input),
                node.output[0],
                {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute},
            )
            for node in graph.node
        ]
        (self.source,) = (value.name for value in graph.input if value.name not in self.numbers)
        self.result = graph.output[0].name

    def forward(self, x):
        values = {name: getattr(self, buffer) for name, buffer in self.numbers.items()} | {self.source: x}
        for kind, names, output, options in self.nodes:
            values[output] = OPERATORS[kind](options, *(values[name] for name in names))
        return values[self.result]


def _convolved(options, x, weight, bias):
    (top, left, bottom, right), given = options["pads"], (options["strides"], 0, options["dilations"], options["group"])
    return F.conv2d(F.pad(x, (left, right, top, bottom)), weight, bias, *given)


OPERATORS = {
    "Add": lambda _, x, y: x + y,
    "Concat": lambda options, *parts: torch.cat(parts, options["axis"]),
    "Conv": _convolved,
    "Flatten": lambda options, x: x.flatten(options["axis"]),
    "Gemm": lambda options, x, weight, bias: x @ (weight.T if options["transB"] else weight) + bias,
    "LeakyRelu": lambda options, x: F.leaky_relu(x, options["alpha"]),
    "Mul": lambda _, x, y: x * y,
    "ReduceMean": lambda options, x, axes: x.mean(axes.tolist(), keepdim=bool(options["keepdims"])),
    "Relu": lambda _, x: F.relu(x),
    "Reshape": lambda _, x, shape: x.reshape(shape.tolist()),
    "Shape": lambda options, x: torch.tensor(x.shape[options.get("start", 0) : options.get("end")]),
}


def measured(network: Network, search_seconds: float, report) -> Figures:
    source = network.read()
    search_seconds = min(search_seconds, network.limit / 2)
    closed_time, closed = timed(
        lambda: gramcert.audit(source, network.shape, search_seconds=0, report=report("closed form"))
    )
    upper_time, audit = timed(
        lambda: gramcert.audit(source, network.shape, search_seconds=search_seconds, report=report("search"))
    )
    verify_time, verified = timed(lambda: gramcert.verify(audit.certificate, source, report=report("verify")))
    sampled = source if isinstance(source, nn.Module) else OnnxInTorch(source)
    lower = steepest(sampled, network.shape, starts=network.starts, report=report("steepest"))
    slopes = steepest_slopes(sampled, network.shape, report=report("slopes"))
    return Figures(
        *(audit.product, closed.upper, closed_time, audit.upper, upper_time),
        *(verify_time, verified.holds, lower, slopes),
    )


def timed(function):
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


COLUMNS = (
    *("network", "product", "closed form", "s", "proved", "s", "verify s", "sampled", "proved / sampled"),
    *("slopes", "proved / slopes", "anchor", "goals", "reached"),
)


def cells(network: Network, found: Figures) -> list[str]:
    answers = network.answers(found)
    return [
        network.name,
        f"{found.product:.5g}",
        f"{found.closed:.5g}",
        f"{found.closed_time:.1f}",
        f"{found.upper:.9g}",
        f"{found.upper_time:.1f}",
        f"{found.verify_time:.1f}",
        f"{found.lower:.5g}",
        f"{found.upper / found.lower:.4g}",
        f"{found.slopes:.5g}",
        f"{found.upper / found.slopes:.4g}",
        network.anchor,
        "\n".join(answers),
        "\n".join("yes" if is_so else "no" for is_so in answers.values()),
    ]


def shown_by(status, title):
    """Reports of each stage in the line that tells how far it is, where there is a terminal."""
    return lambda stage: lambda what, done, total: status.update(f"{title}, {stage}: {what} {done}/{total or '?'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=Path, required=True, metavar="DIR", help="folder of the clones")
    parser.add_argument("--search-seconds", type=float, default=60, help="of each audit (default: 60)")
    parser.add_argument("--seeds", type=int, default=1, choices=range(1, 11), help="of the digits (default: 1)")
    parser.add_argument("--only", default="", help="networks whose name contains this")
    options = parser.parse_args()
    wanted = [network for network in networks(options.networks, options.seeds) if options.only in network.name]
    if not wanted:
        parser.error(f"--only {options.only}: no network has that in its name")
    gramcert.audit(nn.Linear(2, 2), (2,))  # torch.export takes seconds to import
    progress = Console(stderr=True)
    table = Table(
        title=f"constants of networks, search of {options.search_seconds:g} s; torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads"
    )
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading in ("network", "anchor", "goals", "reached") else "right")
    skipped, violations = [], []
    for number, network in enumerate(wanted, 1):
        if reason := network.missing():
            skipped.append(f"{network.name}: left out, {reason}")
            continue
        title = f"{number}/{len(wanted)} {network.name}"
        with progress.status(title) as status:
            found = measured(network, options.search_seconds, shown_by(status, title))
        row = cells(network, found)
        table.add_row(*row, end_section=True)
        progress.print(title, *row[1:11], sep="; ", highlight=False, soft_wrap=True)
        violations += [f"{network.name}: {violation}" for violation in found.violations()]
    console = Console(width=240)
    console.print(table)
    for line in skipped:
        console.print(line, highlight=False)
    if violations:
        sys.exit("\n".join(violations))


if __name__ == "__main__":
    main()
