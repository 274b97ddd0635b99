"""norm2_toep and norm2_circ against the literal algorithms of the paper: python benchmarks/bounds.py."""

import sys
from pathlib import Path

import torch

from gramcert import norm2_circ, norm2_toep

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tests")]
from reference import literal_circular, literal_toeplitz  # noqa: E402
from side_by_side import Question, Work, main  # noqa: E402


def kernel(channels: int, *, gradient: bool = False) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(channels, channels, 3, 3, requires_grad=gradient)


def forward(function, channels, *arguments) -> Work:
    weights = kernel(channels)
    return lambda: function(weights, *arguments)


def forward_and_backward(function, channels, *arguments) -> Work:
    weights = kernel(channels, gradient=True)
    return lambda: torch.autograd.grad(function(weights, *arguments), weights)


QUESTIONS = [
    Question(
        "norm2_toep forward, 64×64×3×3, t = 3",
        "literal conv2d loop",
        lambda: forward(literal_toeplitz, 64, 3),
        lambda: forward(norm2_toep, 64, 3),
        "2.5×",
    ),
    Question(
        "norm2_toep forward and backward, 64×64×3×3, t = 3",
        "autograd through the loop",
        lambda: forward_and_backward(literal_toeplitz, 64, 3),
        lambda: forward_and_backward(norm2_toep, 64, 3),
        "3× (4×)",
    ),
    Question(
        "norm2_toep forward, 16×16×3×3, t = 6",
        "literal conv2d loop",
        lambda: forward(literal_toeplitz, 16, 6),
        lambda: forward(norm2_toep, 16, 6),
        "20×, under 1 GiB",
        rounds=1,
        calls=2,
    ),
    Question(
        "norm2_circ forward and backward, 64×64×3×3, n = 32, t = 6",
        "autograd through rfft2 and bmm",
        lambda: forward_and_backward(literal_circular, 64, (32, 32), 6),
        lambda: forward_and_backward(norm2_circ, 64, 32, 6),
        "2×, half the peak",
        rounds=5,
    ),
]

if __name__ == "__main__":
    main(__file__, QUESTIONS)
