"""Spectral rescaling against the literal loop, its other form and orthogonium: python benchmarks/rescaling.py.

orthogonium is optional (`pip install --no-deps orthogonium`); without it its rows are left out.
"""

import importlib.util
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

import gramcert.nn as gnn
from gramcert.parametrizations import almost_orthogonal, spectral_rescaling
from gramcert.rescaling import rescaling_vector

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tests")]
from reference import literal_rescaling  # noqa: E402
from side_by_side import Question, Work, main  # noqa: E402

CHANNELS = 64


def convolution() -> nn.Conv2d:
    torch.manual_seed(0)
    layer = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
    nn.init.normal_(layer.weight)
    return layer


class Literal(nn.Module):
    """The paper's loop with torch's convolution, on the input channels."""

    def __init__(self, iterations: int) -> None:
        super().__init__()
        self.iterations = iterations

    def forward(self, weight):
        return weight / literal_rescaling(weight.transpose(0, 1), self.iterations)[:, None, None]


def literal() -> nn.Module:
    layer = convolution()
    nn.utils.parametrize.register_parametrization(layer, "weight", Literal(3))
    return layer


def weight_and_gradient(layer: nn.Module) -> Work:
    cotangent = torch.randn_like(layer.weight)

    def work() -> None:
        layer.zero_grad()
        with torch.no_grad():  # as a step of training would write: otherwise the weight is not computed again
            for parameter in layer.parameters():
                parameter.mul_(1)
        layer.weight.backward(cotangent)

    return work


def output_and_gradient(layer: nn.Module, batch: int = 16) -> Work:
    x = torch.randn(batch, CHANNELS, 32, 32)

    def work() -> None:
        layer.zero_grad()
        layer(x).sum().backward()

    return work


def orthogonium(name: str, iterations: int = 1) -> nn.Module:
    from orthogonium.layers.conv.AOL.aol import AOLReparametrizer, MultiStepAOLReparametrizer
    from orthogonium.layers.conv.SLL.sll_layer import SDPBasedLipschitzResBlock

    if name == "SLL":
        return SDPBasedLipschitzResBlock(CHANNELS, 1, 3)
    layer = convolution()
    map_ = AOLReparametrizer(CHANNELS, 1) if name == "AOL" else MultiStepAOLReparametrizer(CHANNELS, 1, iterations)
    nn.utils.parametrize.register_parametrization(layer, "weight", map_)
    return layer


BLOCKS = 4


class Unconstrained(nn.Module):
    """The same shape without rescaling: x - Vφ(Wx + b)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.outer = nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)

    def forward(self, x):
        return x - self.outer(torch.relu(self.inner(x)))


def network(block) -> nn.Module:
    return nn.Sequential(
        gnn.PadChannels(CHANNELS),
        *(block() for _ in range(BLOCKS)),
        gnn.ScaledAvgPool(4),
        nn.Flatten(),
        nn.Linear(CHANNELS * 64, 10),
    )


def training_step(block) -> Work:
    torch.manual_seed(0)
    model = network(block)
    x, y = torch.randn(128, 3, 32, 32), torch.randint(10, (128,))
    steps = torch.optim.Adam(model.parameters())
    loss = gnn.OffsetCrossEntropy()

    def work() -> None:
        steps.zero_grad()
        loss(model(x), y).backward()
        steps.step()

    return work


def rescaled_block(**options):
    return lambda: gnn.SLLConv2d(CHANNELS, CHANNELS, 3, **options)


def share_of_a_step(**options) -> float:
    """Time of all rescalings, forward and backward, over that of the whole step; alternating."""
    step = training_step(rescaled_block(**options))
    blocks = [rescaled_block(**options)() for _ in range(BLOCKS)]
    cotangents = [torch.randn_like(block.weight) for block in blocks]
    times: tuple[list[float], list[float]] = ([], [])

    def rescalings() -> None:
        for block, cotangent in zip(blocks, cotangents, strict=True):
            block.outer_weight().backward(cotangent)

    for _ in range(6):
        for work, record in zip((rescalings, step), times, strict=True):
            start = time.perf_counter()
            work()
            record.append(time.perf_counter() - start)
    return statistics.median(times[0][1:]) / statistics.median(times[1][1:])


def mean_singular_value(iterations: int, form: str) -> float:
    """Mean over a grid of 16×16 frequencies of the singular values of the rescaled Gaussian kernel."""
    layer = convolution()
    with torch.no_grad():
        weight = layer.weight * rescaling_vector(layer, iterations, form=form)[:, None, None]
    symbols = torch.fft.fft2(weight.double(), s=(16, 16)).permute(2, 3, 0, 1)
    return float(torch.linalg.svdvals(symbols).mean())


QUESTIONS = [
    Question(
        "SR spatial, t = 3, forward and backward",
        "autograd through the literal loop",
        lambda: weight_and_gradient(literal()),
        lambda: weight_and_gradient(spectral_rescaling(convolution(), form="spatial")),
        "3× (4×)",
    ),
    Question(
        "SR frequency, every size, t = 2",
        "SR spatial, t = 3",
        lambda: weight_and_gradient(spectral_rescaling(convolution(), form="spatial")),
        lambda: weight_and_gradient(spectral_rescaling(convolution(), iterations=2, form="frequency")),
        "1.5×",
    ),
    Question(
        "training step, 4 SLL blocks, batch 128, 32×32",
        "the same without rescaling",
        lambda: training_step(Unconstrained),
        lambda: training_step(rescaled_block()),
        "peak 1.5×",
        rounds=3,
        calls=2,
    ),
]
if importlib.util.find_spec("orthogonium"):
    QUESTIONS += [
        Question(
            "AOL",
            "orthogonium AOL",
            lambda: weight_and_gradient(orthogonium("AOL")),
            lambda: weight_and_gradient(almost_orthogonal(convolution())),
            "faster",
        ),
        *(
            Question(
                f"SR spatial, t = {t}",
                f"orthogonium multi-step AOL, {t} steps",
                lambda t=t: weight_and_gradient(orthogonium("multi-step", t)),
                lambda t=t: weight_and_gradient(spectral_rescaling(convolution(), iterations=t, form="spatial")),
                "faster",
            )
            for t in (2, 3, 4)
        ),
        Question(
            "SLL block with AOL, batch 16, 32×32",
            "orthogonium SLL block",
            lambda: output_and_gradient(orthogonium("SLL")),
            lambda: output_and_gradient(gnn.SLLConv2d(CHANNELS, CHANNELS, 3, rescaling="aol")),
            "faster",
        ),
    ]


if __name__ == "__main__":
    main(__file__, QUESTIONS)
    if "--peak" not in sys.argv:
        for name, options in {
            "SR spatial, t = 3": {},
            "SR frequency, t = 2": {"form": "frequency", "iterations": 2},
        }.items():
            print(f"share of a training step, {name}: {100 * share_of_a_step(**options):.1f} % (asked: under 15 %)")
        for t, form in ((1, "spatial"), (1, "frequency"), (2, "frequency"), (3, "spatial")):
            print(f"mean singular value, {form}, t = {t}: {mean_singular_value(t, form):.4f}")
