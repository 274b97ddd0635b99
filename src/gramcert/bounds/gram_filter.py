"""The filter of the Gram matrix G(ω) = E(ω)E(ω)* of a kernel: the correlation of its rows with each other."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gramcert.arguments import can_be_read
from gramcert.bounds.autograd import full_precision, run, run_on_each
from gramcert.bounds.powers import positive
from gramcert.bounds.symmetric import product, symmetric_product
from gramcert.geometry.symbol import FilterSymbol, FrequencyGrid, InverseTransform, kept_table

# Pairs of rows and taps up to this number are multiplied in one product: two operations, no loop.
MOST_ENTRIES = 2**18

# Kernels with at most so many taps are correlated tap by tap, whatever their size: 10 of the 16 products of 2×2 taps,
# all real, where the smallest grid of frequencies would have 6 complex ones, four times the work each.
FEW_TAPS = 4

# Kernels with up to so many entries each are put together.
MOST_COPIED = 2**15


def gram_filter(*kernels: Tensor) -> Tensor:
    r"""Γ[x]_ij = Σ_{c,a} K_ic[a + x]·K_jc[a], a row per lag x = 1-k, ..., k-1 per axis: (lags, groups, rows, rows).

    Args:
        kernels: of shape (groups, rows, columns, \*taps); the groups of several follow one another.
    """
    return run(_GramFilter, *kernels)[0]


def unit_rows(kernels: Tensor) -> tuple[Tensor, Tensor]:
    """The kernels of each group divided by the length of their longest row; and the lengths, (groups, rows), constants.

    G is then moderate, and the mean over all frequencies of its largest diagonal entry at least 1.
    """
    lengths = row_lengths(kernels)
    return kernels / positive(lengths.amax(1)).reshape(-1, *(1,) * (kernels.dim() - 1)), lengths


def row_lengths(kernels: Tensor) -> Tensor:
    """The length of each row of each group, a constant."""
    lengths: Tensor = torch.linalg.vector_norm(kernels.detach().flatten(2), dim=2)
    return lengths


def lags(taps: Sequence[int]) -> list[range]:
    """The lags of a filter, per axis."""
    return [range(1 - size, size) for size in taps]


def absolute_sums(kernels: Tensor) -> Tensor:
    """A_ij = Σ_x |Γ[x]_ij|, shape (groups, rows, rows)."""
    return run(_AbsoluteSums, kernels)[0]


class _GramFilter(torch.autograd.Function):
    """Its adjoint applies the filter D[x] + D[-x]ᵀ to the kernel, because Γ[-x] = Γ[x]ᵀ: half of torch's own work."""

    @staticmethod
    def forward(*kernels: Tensor) -> tuple[Tensor]:
        return (joined([_correlate(each) for each in _together(kernels)], 1),)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        kernels: tuple[Tensor, ...] = ctx.saved_tensors
        parts = _together(kernels)
        with full_precision(grad):
            both = (grad + (grad.flip(0) if len(grad) > 1 else grad).mT).split([len(part) for part in parts], 1)
            gradients = tuple(_apply(filters, part) for filters, part in zip(both, parts, strict=True))
        return gradients if len(parts) == len(kernels) else gradients[0].split([len(each) for each in kernels])

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


def joined(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Side by side along an axis; one alone is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), axis)


def _together(kernels: Sequence[Tensor]) -> list[Tensor]:
    """Small ones as the groups of one, as calls take longer than a copy; large ones as they are."""
    return [joined(kernels)] if kernels[0].numel() <= MOST_COPIED else list(kernels)


def _correlate(kernels: Tensor) -> Tensor:
    if math.prod(kernels.shape[3:]) == 1:
        matrices = kernels.flatten(2)
        return symmetric_product(matrices, matrices.mT)[None]
    if _is_small(kernels):
        return _correlate_at_once(kernels)
    return (_correlate_taps if _has_few_taps(kernels) else _correlate_frequencies)(kernels)


def _apply(filters: Tensor, kernels: Tensor) -> Tensor:
    """Σ_b S[a - b]·K[b] for each tap a, for filters with S[-x] = S[x]ᵀ."""
    if len(filters) == 1:
        return product(filters[0], kernels.flatten(2)).reshape(kernels.shape)
    by_taps = _is_small(kernels) or _has_few_taps(kernels)
    return (_apply_taps if by_taps else _apply_frequencies)(filters, kernels)


def _is_small(kernels: Tensor) -> bool:
    return (kernels.shape[1] * math.prod(kernels.shape[3:])) ** 2 <= MOST_ENTRIES


def _has_few_taps(kernels: Tensor) -> bool:
    return math.prod(kernels.shape[3:]) <= FEW_TAPS


def _correlate_at_once(kernels: Tensor) -> Tensor:
    """All pairs of taps in one product, and sums of those with the same lag."""
    groups, rows, _, *taps = kernels.shape
    count, matrices = math.prod(taps), _stacked_taps(kernels)
    products = product(matrices, matrices.mT).reshape(groups, count, rows, count, rows).permute(1, 3, 0, 2, 4)
    result = kernels.new_zeros(math.prod([2 * size - 1 for size in taps]), groups, rows, rows)
    return result.index_add(0, _lags_of_pairs(kernels).flatten(), products.flatten(0, 1))


def _correlate_taps(kernels: Tensor) -> Tensor:
    """A tap with those from it on, as products with the others are transposes of these."""
    groups, rows, _, *taps = kernels.shape
    matrices, places = _stacked_taps(kernels), _places_of_pairs(tuple(taps))
    result = kernels.new_zeros(math.prod([2 * size - 1 for size in taps]), groups, rows, rows)
    for tap in range(len(places)):
        products = product(matrices[:, tap * rows :], matrices[:, tap * rows : (tap + 1) * rows].mT)
        for other, part in enumerate(products.split(rows, 1), tap):
            result[places[other][tap]] += part
            if other > tap:
                result[places[tap][other]] += part.mT
    return result


def _apply_taps(filters: Tensor, kernels: Tensor) -> Tensor:
    """One product with the matrix of the blocks S[a - b]."""
    groups, rows, columns, *taps = kernels.shape
    count = math.prod(taps)
    blocks = filters[_lags_of_pairs(kernels)]
    operator = blocks.permute(2, 0, 3, 1, 4).reshape(groups, count * rows, count * rows)
    products = product(operator, _stacked_taps(kernels)).reshape(groups, count, rows, columns)
    return products.permute(0, 2, 3, 1).reshape(kernels.shape)


def _stacked_taps(kernels: Tensor) -> Tensor:
    """The matrices of the taps one above the other: (groups, taps·rows, columns)."""
    return kernels.flatten(3).permute(0, 3, 1, 2).reshape(kernels.shape[0], -1, kernels.shape[2])


def _lags_of_pairs(kernels: Tensor) -> Tensor:
    taps = tuple(kernels.shape[3:])
    return kept_table(_lag_table, kernels, math.prod(taps), taps)


def _lag_table(_: int, taps: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(_places_of_pairs(taps), device=device)


def _places_of_pairs(taps: tuple[int, ...]) -> list[list[int]]:
    """The row of a filter that has the lag a - b, for each tap a and each b."""
    steps = [math.prod([2 * size - 1 for size in taps[axis + 1 :]]) for axis in range(len(taps))]
    places = list(itertools.product(*map(range, taps)))
    return [
        [sum((x - y + k - 1) * step for x, y, k, step in zip(a, b, taps, steps, strict=True)) for b in places]
        for a in places
    ]


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
