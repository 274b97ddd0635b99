r"""Zero padding, every input size at once (Algorithm 3, Theorem 4 with its Frobenius factor corrected).

Let K_1 = K and K_(s+1) be the correlation of K_s with itself, summed over one channel index: the symbol of K_(t+1) is
G_t = G^(2^(t-1)) with G = EE*. Its spatial size is N = 2^t(k-1)+1 per axis, so on a grid of N frequencies per axis the
t correlations are small matrix products without aliasing, and one inverse transform gives the filter K_(t+1).

For every ω, and so for every size of zero-padded input,

* σ(E(ω))^(2^t) = ‖G_t(ω)‖ <= max_i Σ_{j,x} |K_(t+1)[i,j,x]|, the ``inf`` reading, because a row sum of |G_t(ω)| is at
  most the row sum over all taps;
* ‖G_t(ω)‖_F <= (ΠN Σ |K_(t+1)|²)^(1/2) by Cauchy-Schwarz over the ΠN taps, the ``fro`` reading. By Parseval it is
  (Σ_grid ‖G_t(ω)‖_F²)^(1/2): the ℓ^p norm over the grid, p = 2^(t+1), of the Gram bounds of Algorithm 2.

Both decrease to the supremum of σ(E) over all frequencies, not to the norm at one input size.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gramcert.arguments import checked_iterations, checked_kernel, require_finite
from gramcert.bounds.autograd import full_precision, run, run_on_each
from gramcert.bounds.circular import grid_norm, unit_scale
from gramcert.bounds.gram import positive, pull_back, scale_by, squarings
from gramcert.geometry.symbol import (
    CHUNK_BYTES,
    COMPLEX,
    FrequencyGrid,
    InverseTransform,
    symbols,
    symbols_adjoint,
    taps_first,
)

ToeplitzNorm = Literal["inf", "fro"]

# Iterates and spectra held for a second use; past it they are computed again.
KEPT_BYTES = 3 * 2**27

# More than these are refused: iterations, and bytes of one row of the last iterate.
MOST_ITERATIONS = 60
ROW_BYTES = 2**30


def norm2_toep(kernel: Tensor, iterations: int = 6, *, norm: ToeplitzNorm = "inf") -> Tensor:
    """Upper bound of the spectral norm of a zero-padded convolution with stride 1, for every input size at once.

    A bound in exact arithmetic, differentiable. It tends to the supremum of σ over all frequencies as ``iterations``
    grows; the norm at input size n lies below that by O(1/n²).

    Args:
        kernel: real, shape (channels out, channels in, *sizes) with one to three sizes.
        iterations: number t of Gram products, at least 1 for ``"inf"``. Time and memory grow as 2^t per axis.
        norm: how the last iterate is read, ``"inf"`` (Algorithm 3) or ``"fro"``.

    Returns:
        Tensor with one element.

    Example:
        >>> import torch, gramcert
        >>> kernel = torch.tensor([[[1.0, 0.0, -1.0]]])
        >>> [round(float(gramcert.norm2_toep(kernel, t)), 4) for t in (1, 3, 6)]
        [2.0, 2.0, 2.0]
        >>> round(float(gramcert.norm2_toep(kernel, 6, norm="fro")), 4)
        2.0348
    """
    kernel = checked_kernel("norm2_toep", kernel)
    if norm not in get_args(ToeplitzNorm):
        raise ValueError(f"norm2_toep(norm={norm!r}): expected one of {', '.join(get_args(ToeplitzNorm))}")
    iterations = checked_iterations("norm2_toep", iterations)
    if iterations > MOST_ITERATIONS:
        raise ValueError(
            f"norm2_toep(iterations={iterations}): expected at most {MOST_ITERATIONS}, the grid doubles at each"
        )
    sizes = tuple(2**iterations * (size - 1) + 1 for size in kernel.shape[2:])
    grid = FrequencyGrid.unshifted(sizes)
    needed = len(grid) * min(kernel.shape[:2]) * COMPLEX[kernel.dtype].itemsize
    if needed > ROW_BYTES:
        raise ValueError(
            f"norm2_toep(iterations={iterations}): one row of the iterate has {'×'.join(map(str, sizes))} taps per "
            f"channel and takes {needed / 2**30:.3g} GiB, more than {ROW_BYTES / 2**30:.0f}; use fewer iterations"
        )
    if norm == "fro":
        return grid_norm(kernel[None], grid, iterations, power=2.0 ** (iterations + 1), call="norm2_toep")
    reason = " for norm='inf', which bounds the spectral norm only after a Gram product"
    checked_iterations("norm2_toep", iterations, at_least=1, reason=reason)
    # The smaller Gram side, the output side when equal: exchanging the channels transposes every symbol.
    oriented = kernel if kernel.shape[0] <= kernel.shape[1] else kernel.transpose(0, 1)
    # The iterates are kept for a backward that may come; where torch does not say so they are computed again.
    keep = kernel.requires_grad and torch.is_grad_enabled()
    return run(_ToeplitzRowSum, oriented, grid, iterations, keep)[0]


class _ToeplitzRowSum(torch.autograd.Function):
    """The ``inf`` reading; its backward pulls back the single row that attains it."""

    @staticmethod
    def forward(kernel: Tensor, grid: FrequencyGrid, iterations: int, keep: bool) -> tuple[Tensor, ...]:
        require_finite("norm2_toep", "kernel", kernel)
        scaled, scale = unit_scale(kernel)
        chain = _Chain(scaled, grid, iterations, keep=keep)
        sums, log = _row_sums(chain)
        largest, row = sums.max(0)
        value = scale * torch.sqrt(chain.bound) * torch.exp(log + 2.0**-iterations * torch.log(largest))
        stored = [tensor for iterates, logs in chain.stored or [] for tensor in iterates + logs]
        return value, row, *stored

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        kernel, ctx.grid, ctx.iterations, _ = inputs
        value, row, *stored = output
        ctx.mark_non_differentiable(row, *stored)
        ctx.save_for_backward(kernel, value, row, *stored)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        kernel, value, row, *stored = ctx.saved_tensors
        scaled, scale = unit_scale(kernel)
        bound = value / positive(scale)
        # A second derivative must see how the iterates depend on the kernel: then they are computed again.
        with full_precision(kernel):
            chain = _Chain(scaled, ctx.grid, ctx.iterations, stored=[] if torch.is_grad_enabled() else stored)
            direction = _row_direction(chain, row)
            # Homogeneous of degree 1: the gradient is the multiple of the direction whose product with K is the value.
            inner = (direction * scaled).sum()
            return grad * bound / positive(inner) * direction, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, tuple[int, ...]]:
        return run_on_each(_ToeplitzRowSum, in_dims, *arguments)


Iterates = tuple[list[Tensor], list[Tensor]]


class _Chain:
    """The iterates G_1, ..., G_s of a kernel on the grid, s = max(1, t-1), as :func:`squarings` gives them.

    G_1 is divided by a bound of its norm. Iterates come chunk of frequencies by chunk: with ``keep`` all of them,
    stored where they fit into ``KEPT_BYTES``, otherwise computed again at every pass; without it the last one alone.

    The first correlation is made on its own small grid of 2k-1 frequencies per axis and carried to the large one as a
    filter, because products on the large grid are what costs.
    """

    def __init__(
        self, kernel: Tensor, grid: FrequencyGrid, iterations: int, *, keep: bool = True, stored: Sequence[Tensor] = ()
    ) -> None:
        self.kernel, self.grid, self.iterations, self.keep = kernel, grid, iterations, keep
        self.order, size = kernel.shape[0], kernel.shape[2:]
        self.steps = max(1, iterations - 1)
        self.taps, self.dtype = taps_first(kernel, len(size)), COMPLEX[kernel.dtype]
        self.chunks = grid.chunks(self.taps)
        self.places = [range(k) for k in size]
        # The transform leaves lag x at place x mod 2k-1.
        self.tables = grid.tables([[*range(k), *range(1 - k, 0)] for k in size], kernel)
        self.stored: list[Iterates] | None = None
        if stored:
            each = [stored[i : i + self.steps] for i in range(0, len(stored), self.steps)]
            self.stored = [(list(a), list(b)) for a, b in zip(each[::2], each[1::2], strict=True)]
            return
        self.gram, self.bound = self._first_gram()
        if keep and len(grid) * self.order**2 * self.dtype.itemsize * self.steps <= KEPT_BYTES:
            self.stored = [self._iterates(chunk) for chunk in self.chunks]

    def _first_gram(self) -> tuple[Tensor, Tensor]:
        """The filter of G_1 divided by a bound of ‖G_1(ω)‖ over all ω, and that bound."""
        small = FrequencyGrid.unshifted(tuple(2 * len(places) - 1 for places in self.places))
        indices = torch.arange(len(small), device=self.kernel.device)
        blocks = symbols(self.taps, small.twiddles(indices, small.tables(self.places, self.kernel)))
        gram = InverseTransform(small, self.kernel)((blocks @ blocks.mH).flatten(1))
        gram = gram.reshape(-1, self.order, self.order)
        bound = gram.detach().abs().sum((0, 2)).amax()
        return (gram / positive(bound)).to(self.dtype), bound

    def __iter__(self) -> Iterator[tuple[Tensor, Iterates]]:
        return zip(self.chunks, self.stored or map(self._iterates, self.chunks), strict=True)

    def _iterates(self, indices: Tensor) -> Iterates:
        twiddles = self.grid.twiddles(indices, self.tables)
        return squarings(symbols(self.gram, twiddles), self.steps, keep=self.keep)

    def weights(self, log: Tensor) -> Tensor:
        """exp(2^t(h - max h)) for all frequencies, which restores the proportions of G_t between them.

        Weights far below rounding are 0: they would make subnormal numbers, which are slow to compute with.
        """
        weights = torch.exp(2.0**self.iterations * (log - log.amax()))
        return weights.masked_fill(weights < torch.finfo(weights.dtype).eps ** 3, 0)


def _row_sums(chain: _Chain) -> tuple[Tensor, Tensor]:
    """Σ_{j,x} |K_(t+1)[i,j,x]| for each i, up to a factor with logarithm 2^t times the second result.

    K_(t+1)[j,i,x] = K_(t+1)[i,j,-x], so a block of rows needs only the columns from its first row on. A pass over the
    chain takes as many rows as fit into memory, in two blocks, to use that symmetry.
    """
    order = chain.order
    if chain.iterations == 1:
        return chain.gram.abs().sum((0, 2)), chain.kernel.new_zeros(())
    log = chain.kernel.new_empty(len(chain.grid))  # filled in place, for the reason given in _row_direction
    rows = max(1, KEPT_BYTES // (len(chain.grid) * order * chain.dtype.itemsize))
    sums, inverse = chain.kernel.new_zeros(order), InverseTransform(chain.grid, chain.kernel)
    panel = max(1, CHUNK_BYTES // (len(chain.grid) * chain.dtype.itemsize))
    for start in range(0, order, rows):
        stop = min(start + rows, order)
        middle = (start + stop + 1) // 2
        blocks = [block for block in ((start, middle), (middle, stop)) if block[0] < block[1]]
        spectra = [
            torch.empty(len(chain.grid), last - first, order - first, dtype=chain.dtype, device=sums.device)
            for first, last in blocks
        ]
        done = 0
        for indices, (iterates, scales) in chain:
            gram, here = iterates[-1], slice(done, done + len(indices))
            for (first, last), spectrum in zip(blocks, spectra, strict=True):
                torch.bmm(gram[:, first:last], gram[:, :, first:], out=spectrum[here])
            log[indices] = scales[-1]
            done += len(indices)
        weights = chain.weights(log)
        for (first, last), spectrum in zip(blocks, spectra, strict=True):
            if chain.steps > 2:  # before that no iterate is normalised
                torch.view_as_real(spectrum).mul_(weights[:, None, None, None])
            panels = spectrum.flatten(1).split(panel, 1)
            pairs = torch.cat([inverse(part).abs_().sum(0) for part in panels]).reshape(spectrum.shape[1:])
            sums[first:last] += pairs.sum(1)
            sums[last:] += pairs[:, last - first :].sum(0)
    return sums, log.amax()


def _row_direction(chain: _Chain, row: Tensor) -> Tensor:
    """A multiple of the gradient of row sum ``row`` of K_(t+1) with respect to the kernel.

    The derivative of the row sum is sgn(K_(t+1)[i,j,x]); in the Fourier domain C(ω) = e_i c(ω)ᵀ with c the transform of
    the signs. :func:`pull_back` carries it to G_1. What the scaling of each frequency left out of G_1···G_(t-1) is
    restored relative to the largest, so nothing overflows.
    """
    squared = chain.iterations > 1
    unit = (torch.arange(chain.order, device=row.device) == row).to(chain.dtype)[:, None]
    rows, log, exponent = unit[:0].expand(0, chain.order), chain.kernel.new_zeros(0), chain.kernel.new_zeros(0)
    for _, (iterates, scales) in chain:
        selected = unit.mT @ iterates[-1]
        selected = (selected @ iterates[-1] if squared else selected)[:, 0]
        # One growing tensor, not many: small results kept between large temporaries would fragment the memory.
        rows, log = torch.cat([rows, selected]), torch.cat([log, scales[-1]])
        summed = torch.stack([2.0**step * scale for step, scale in enumerate(scales, 1)]).sum(0)
        exponent = torch.cat([exponent, summed])
    inverse = InverseTransform(chain.grid, chain.kernel)
    row_filter = inverse(rows * chain.weights(log)[:, None])
    signs = torch.sgn(row_filter.detach()).reshape(*chain.grid.sizes, chain.order)
    spectrum = torch.fft.rfftn(signs, dim=tuple(range(signs.dim() - 1))).reshape(-1, chain.order)
    weights = chain.grid.multiplicity(row.device).to(exponent.dtype) * torch.exp(exponent - exponent.amax())
    direction, tables = torch.zeros_like(chain.kernel), chain.grid.tables(chain.places, chain.kernel)
    for indices, (iterates, _) in chain:
        twiddles = chain.grid.twiddles(indices, tables)
        right = (spectrum[indices].conj() * weights[indices, None])[..., None]
        left = unit.expand_as(right)
        blocks, missing = pull_back(iterates if squared else [], left, right, symbols(chain.taps, twiddles))
        if missing is not None:
            blocks = scale_by(blocks, torch.exp(missing))
        direction = direction + symbols_adjoint(blocks, twiddles, direction.shape)
    return direction
