"""Every method that applies to a layer, with what its value is for that layer's padding."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gramcert.baselines.density import sampled_density
from gramcert.baselines.per_frequency import frequency_svd
from gramcert.baselines.power import power_iteration
from gramcert.baselines.reshaped_kernel import reshaped_kernel_norm
from gramcert.baselines.reshapes import four_reshapes
from gramcert.baselines.tensor import tensor_norm
from gramcert.bounds.circular import norm2_circ
from gramcert.bounds.layer import norm2
from gramcert.bounds.toeplitz import ToeplitzNorm, norm2_toep
from gramcert.bounds.transfer import norm2_sampled, theorem_5_as_printed, theorem_5_corrected
from gramcert.certified.choose import spectral_norm
from gramcert.enclosure import Enclosure
from gramcert.geometry.convolution import Convolution

Kind = Literal["enclosure", "upper bound", "lower bound", "exact", "estimate", "not a bound"]

# Real multiplications above which norm2_toep is left out: minutes on one core.
TOEPLITZ_WORK = 10**12


@dataclass(frozen=True)
class Method:
    """One way to a number: who published it, what the number is, and how to get it.

    ``run`` raises ValueError where the method does not apply, with the reason. An enclosure's number is its upper end.
    """

    name: str
    source: str
    kind: Kind
    note: str
    run: Callable[[], Tensor | Enclosure]


def applicable_methods(
    layer: Convolution, input_size: tuple[int, ...], iterations: int, seed: int, tol: float = 1e-3
) -> tuple[Method, ...]:
    """The methods for a stride-1 layer with same padding, zeros or circular."""
    kernel = layer.kernel
    circular = layer.padding_mode == "circular"
    taps = layer.kernel_size
    fits = all(n >= k for n, k in zip(input_size, taps, strict=True))
    grid = tuple(max(n, k) for n, k in zip(input_size, taps, strict=True))
    fine_grid = tuple(max(n, 4 * k) for n, k in zip(input_size, taps, strict=True))
    # A zero-padded layer is a part of a larger circulant, not of the one of its own size.
    same_size = "this padding" if circular else "circular padding of this size; says nothing certain about zeros"
    everywhere = "every size and both paddings"

    def from_seed() -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    ours = [
        Method(
            "spectral_norm",
            "gramcert",
            "enclosure",
            "certified: this padding and size, rounding included",
            lambda: spectral_norm(layer, input_size, tol=tol),
        ),
        Method(
            "spectral_norm, any n",
            "gramcert",
            "upper bound",
            "certified: this padding, every size, rounding included",
            lambda: torch.tensor(spectral_norm(layer, tol=tol).upper, dtype=torch.float64),
        ),
        Method(
            "norm2 (this size)",
            "gramcert",
            "upper bound",
            "this padding and size",
            lambda: norm2(layer, input_size, iterations),
        ),
        Method(
            "norm2 (every size)",
            "gramcert",
            "upper bound",
            "this padding, every size",
            lambda: norm2(layer, None, iterations),
        ),
        Method(
            "norm2_sampled",
            "gramcert",
            "upper bound",
            f"{everywhere}, from {_times(fine_grid)} frequencies",
            lambda: norm2_sampled(kernel, fine_grid, iterations),
        ),
        Method(
            "norm2_circ",
            "Algorithm 2",
            "upper bound" if circular else "estimate",
            same_size,
            lambda: norm2_circ(kernel, input_size, iterations),
        ),
        *(_toeplitz(kernel, iterations, norm) for norm in ("inf", "fro")),
        Method(
            "Theorem 5/6 corrected",
            "Theorems 5, 6",
            "upper bound",
            f"{everywhere}, from {_times(grid)} frequencies",
            lambda: theorem_5_corrected(kernel, grid, iterations),
        ),
        Method(
            "Theorem 5/6 as printed",
            "Theorems 5, 6",
            "not a bound",
            "has counterexamples",
            lambda: theorem_5_as_printed(kernel, grid, iterations),
        ),
    ]
    others = [
        Method(
            "frequency SVD",
            "Sedghi 2019",
            "exact" if circular else "estimate",
            same_size,
            lambda: frequency_svd(kernel, input_size),
        ),
        Method(
            "power iteration",
            "Ryu, Farnia 2019",
            "lower bound",
            "this padding and size, 100 iterations",
            lambda: power_iteration(layer, input_size, generator=from_seed()),
        ),
        Method(
            "reshaped kernel",
            "Miyato 2018",
            "lower bound" if fits else "estimate",
            "what torch's spectral_norm divides by; never an upper bound",
            lambda: reshaped_kernel_norm(kernel),
        ),
        Method(
            "four reshapes",
            "Singla, Feizi 2021",
            "upper bound",
            everywhere,
            lambda: four_reshapes(kernel),
        ),
        Method(
            "sampled density",
            "Araujo 2021",
            "upper bound",
            f"{everywhere}, with the sampling factor",
            lambda: sampled_density(kernel),
        ),
        Method(
            "tensor norm",
            "Grishina 2024",
            "estimate",
            "an upper bound approached from below",
            lambda: tensor_norm(kernel, generator=from_seed()),
        ),
    ]
    return (*ours, *others)


def _toeplitz(kernel: Tensor, iterations: int, norm: ToeplitzNorm) -> Method:
    return Method(
        f"norm2_toep ({norm})",
        "Algorithm 3" if norm == "inf" else "Theorem 4",
        "upper bound",
        "every size and both paddings",
        functools.partial(_toeplitz_within_reason, kernel, iterations, norm),
    )


def _toeplitz_within_reason(kernel: Tensor, iterations: int, norm: ToeplitzNorm) -> Tensor:
    sizes = [2**iterations * (k - 1) + 1 for k in kernel.shape[2:]]
    work = 4 * iterations * math.prod(sizes) * min(kernel.shape[:2]) ** 2 * max(kernel.shape[:2])
    if work > TOEPLITZ_WORK:
        raise ValueError(f"{iterations} iterations are {_times(sizes)} frequencies, about {work:.0e} multiplications")
    return norm2_toep(kernel, iterations, norm=norm)


def _times(sizes: Sequence[int]) -> str:
    return "×".join(str(size) for size in sizes)
