"""The filter of the Gram matrix G(ω) = E(ω)E(ω)* of a kernel: the correlation of its rows with each other."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gramcert.arguments import can_be_read
from gramcert.bounds.autograd import full_precision, run, run_on_each
from gramcert.bounds.powers import positive
from gramcert.geometry.symbol import FilterSymbol, FrequencyGrid, InverseTransform

# Kernels with at most so many entries are correlated by torch's convolution, on a CPU: one operation. Others on a grid
# of frequencies: less work, and only matrix products, as a GPU may round the factors of a convolution to 10 bits.
MOST_ENTRIES = 2**16

_CONVOLVE = (F.conv1d, F.conv2d, F.conv3d)


def gram_filter(kernels: Tensor) -> Tensor:
    r"""Γ[x]_ij = Σ_{c,a} K_ic[a + x]·K_jc[a], a row per lag x = 1-k, ..., k-1 per axis: (lags, groups, rows, rows).

    Args:
        kernels: shape (groups, rows, columns, \*taps).
    """
    return run(_GramFilter, kernels)[0]


def unit_rows(kernels: Tensor) -> tuple[Tensor, Tensor]:
    """The kernels of each group divided by the length of their longest row; and the lengths, (groups, rows), constants.

    G is then moderate, and the mean over all frequencies of its largest diagonal entry at least 1.
    """
    lengths = kernels.detach().flatten(2).square().sum(2).sqrt()
    return kernels / positive(lengths.amax(1)).reshape(-1, *(1,) * (kernels.dim() - 1)), lengths


def lags(taps: Sequence[int]) -> list[range]:
    """The lags of a filter, per axis."""
    return [range(1 - size, size) for size in taps]


def absolute_sums(kernels: Tensor) -> Tensor:
    """A_ij = Σ_x |Γ[x]_ij|, shape (groups, rows, rows)."""
    return run(_AbsoluteSums, kernels)[0]


class _GramFilter(torch.autograd.Function):
    """Its adjoint applies the filter D[x] + D[-x]ᵀ to the kernel, because Γ[-x] = Γ[x]ᵀ: half of torch's own work."""

    @staticmethod
    def forward(kernels: Tensor) -> tuple[Tensor]:
        return (_correlate(kernels),)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (kernels,) = ctx.saved_tensors
        with full_precision(kernels):
            return _apply(grad + grad.flip(0).mT, kernels)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, tuple[int, ...]]:
        return run_on_each(_GramFilter, in_dims, *arguments)


class _AbsoluteSums(torch.autograd.Function):
    """The same of |Γ|, where sgn(Γ[x]) has the symmetry already."""

    @staticmethod
    def forward(kernels: Tensor) -> tuple[Tensor, Tensor]:
        gram = _correlate(kernels)
        return gram.abs().sum(0), gram

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> Tensor | None:
        if grad is None:
            return None
        kernels, gram = ctx.saved_tensors
        with full_precision(kernels):
            signs, both = torch.sign(gram), grad + grad.mT
            return _apply(signs.mul_(both) if can_be_read(both) else signs * both, kernels)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, tuple[int, ...]]:
        return run_on_each(_AbsoluteSums, in_dims, *arguments)


def _correlate(kernels: Tensor) -> Tensor:
    if math.prod(kernels.shape[3:]) == 1:
        matrices = kernels.flatten(2)
        return torch.matmul(matrices, matrices.mT)[None]
    return (_correlate_directly if _is_small(kernels) else _correlate_frequencies)(kernels)


def _apply(filters: Tensor, kernels: Tensor) -> Tensor:
    """Σ_b S[a - b]·K[b] for each tap a, for filters with S[-x] = S[x]ᵀ."""
    if len(filters) == 1:
        return torch.matmul(filters[0], kernels.flatten(2)).reshape(kernels.shape)
    return (_apply_directly if _is_small(kernels) else _apply_frequencies)(filters, kernels)


def _is_small(kernels: Tensor) -> bool:
    return kernels.device.type == "cpu" and kernels[0].numel() <= MOST_ENTRIES


def _correlate_directly(kernels: Tensor) -> Tensor:
    """A convolution of the rows, as a batch, with themselves, as output channels; place x is lag x - (k-1)."""
    groups, rows, _, *taps = kernels.shape
    batch, weight = kernels.transpose(0, 1).flatten(1, 2), kernels.flatten(0, 1)
    result: Tensor = _CONVOLVE[len(taps) - 1](batch, weight, padding=[size - 1 for size in taps], groups=groups)
    return result.reshape(rows, groups, rows, -1).permute(3, 1, 0, 2)


def _apply_directly(filters: Tensor, kernels: Tensor) -> Tensor:
    """A convolution of the columns, as a batch, with the reversed filter, which is the transposed one."""
    groups, rows, columns, *taps = kernels.shape
    batch = kernels.movedim(2, 0).flatten(1, 2)
    weight = filters.permute(1, 3, 2, 0).reshape(groups * rows, rows, *(2 * size - 1 for size in taps))
    result: Tensor = _CONVOLVE[len(taps) - 1](batch, weight, padding=[size - 1 for size in taps], groups=groups)
    return result.reshape(columns, groups, rows, *taps).movedim(0, 2)


def _correlate_frequencies(kernels: Tensor) -> Tensor:
    """EE* on the 2k-1 frequencies per axis that determine its filter, and back."""
    groups, rows, _, *taps = kernels.shape
    grid = _small_grid(taps)
    blocks = _symbols(kernels, grid)
    filters = InverseTransform(grid, kernels)((blocks @ blocks.mH).flatten(1))
    # The transform leaves lag x at place x mod 2k-1.
    places = filters.reshape(*grid.sizes, groups, rows, rows)
    return places.roll([size - 1 for size in taps], list(range(len(taps)))).flatten(0, len(taps) - 1)


def _apply_frequencies(filters: Tensor, kernels: Tensor) -> Tensor:
    """S(ω)·E(ω) on the same grid: what wraps around falls on places beyond the taps."""
    taps = kernels.shape[3:]
    grid = _small_grid(taps)
    operators = FilterSymbol(filters, grid, lags(taps))(slice(None))
    products = (operators @ _symbols(kernels, grid)).flatten(1)
    places = InverseTransform(grid, kernels)(products).reshape(*grid.sizes, *kernels.shape[:3])
    return places[tuple(slice(size) for size in taps)].flatten(0, len(taps) - 1).movedim(0, -1).reshape(kernels.shape)


def _small_grid(taps: Sequence[int]) -> FrequencyGrid:
    return FrequencyGrid.unshifted(tuple(2 * size - 1 for size in taps))


def _symbols(kernels: Tensor, grid: FrequencyGrid) -> Tensor:
    """E on the grid: (frequencies, groups, rows, columns)."""
    symbol = FilterSymbol(kernels.flatten(3).movedim(-1, 0), grid, [range(size) for size in kernels.shape[3:]])
    return symbol(slice(None))
