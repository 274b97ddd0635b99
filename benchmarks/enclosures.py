"""spectral_norm for every size at once against Algorithm 2, and on flat symbols: python benchmarks/enclosures.py."""

import functools
import sys
from pathlib import Path

import torch

from gramcert import Convolution, spectral_norm

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tests")]
from reference import literal_circular  # noqa: E402
from side_by_side import Question, Work, main  # noqa: E402

# Relative size of what disturbs the orthogonal kernel.
NOISE = 1e-4


@functools.cache
def random_kernel() -> torch.Tensor:
    return torch.randn(64, 64, 3, 3, generator=torch.Generator().manual_seed(0))


@functools.cache
def orthogonal_like() -> torch.Tensor:
    """A product of orthogonal 2×1 and 1×2 convolutions, slightly disturbed, divided by its norm."""
    generator = torch.Generator().manual_seed(1)
    kernel = torch.linalg.qr(torch.randn(64, 64, generator=generator, dtype=torch.float64))[0][:, :, None, None]
    for axis in (2, 3, 2, 3):
        basis = torch.linalg.qr(torch.randn(64, 64, generator=generator, dtype=torch.float64))[0][:, :32]
        projection = basis @ basis.T
        stay = torch.einsum("ij,jkxy->ikxy", torch.eye(64) - projection, kernel)
        move = torch.einsum("ij,jkxy->ikxy", projection, kernel)
        pads = [(0, 0, 0, 1), (0, 0, 1, 0)] if axis == 2 else [(0, 1, 0, 0), (1, 0, 0, 0)]
        kernel = sum(torch.nn.functional.pad(part, pad) for part, pad in zip((stay, move), pads, strict=True))
    kernel += NOISE * kernel.std() * torch.randn(kernel.shape, generator=generator, dtype=torch.float64)
    return (kernel / spectral_norm(Convolution(kernel), tol=1e-6).upper).float()


def ours(kernel, tol) -> Work:
    layer = Convolution(kernel(), padding=1)
    return lambda: spectral_norm(layer, tol=tol)


def literal(size) -> Work:
    kernel = random_kernel()
    return lambda: literal_circular(kernel, (size, size), 6)


def question(tol, size, asked, rounds, calls):
    return Question(
        f"spectral_norm, 64×64×3×3, every size, tol {tol:g}",
        f"Algorithm 2, n = {size}, t = 6, float32",
        lambda: literal(size),
        lambda: ours(random_kernel, tol),
        asked,
        rounds=rounds,
        calls=calls,
    )


QUESTIONS = [
    question(1e-2, 224, "150×", 1, 2),
    question(1e-3, 224, "50×", 1, 2),
    question(1e-2, 32, "2×", 5, 5),
    question(1e-3, 32, "8×", 5, 5),
    Question(
        "spectral_norm, orthogonal-like 64×64×3×3, tol 1e-4",
        "spectral_norm, random kernel, tol 1e-2",
        lambda: ours(random_kernel, 1e-2),
        lambda: ours(orthogonal_like, 1e-4),
        "1×",
    ),
]

if __name__ == "__main__":
    main(__file__, QUESTIONS)
