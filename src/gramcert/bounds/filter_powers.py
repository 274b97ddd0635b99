r"""The filters of Gram powers: K_(t+1), whose symbol is G_t = G^(2^(t-1)), and the sums of its absolute values.

K_(t+1) has N = 2^t(k-1)+1 taps per axis, so on a grid of N frequencies per axis the powers of G are small matrix
products without aliasing, and one inverse transform gives the filter. A_ij = Σ_x |K_(t+1)[i,j,x]| is never below
|G_t(ω)|_ij, whatever ω, so the row sums of A serve every frequency at once.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gramcert.bounds.gram_filter import lags
from gramcert.bounds.powers import Powers
from gramcert.geometry.symbol import CHUNK_BYTES, COMPLEX, FilterSymbol, FrequencyGrid, InverseTransform

# Spectra of the filter in memory at a time; past it the powers are computed again for more of its rows.
SPECTRA_BYTES = 3 * 2**27

# Rows are taken in so many blocks, to use the symmetry; fewer rows at a time make products slow.
BLOCKS, LEAST_ROWS = 4, 12

_SMALLEST_WEIGHT = {torch.float32: 2.0**-100, torch.float64: 2.0**-900}


def filter_grid(taps: Sequence[int], iterations: int) -> FrequencyGrid:
    """The grid on which the filter K_(t+1) of a kernel with these taps does not wrap."""
    return FrequencyGrid.unshifted(tuple(2**iterations * (size - 1) + 1 for size in taps))


class FilterPowers:
    """The powers of G on the grid of its filter K_(t+1), t >= 2, chunk of frequencies by chunk.

    Args:
        gram: the filter of G, shape (lags, groups, rows, rows), of a kernel whose longest row has length 1.
        taps: of the kernel, per axis.
        iterations: t.
        hold: whether all powers are held; otherwise they are computed again at every pass.
        stored: :attr:`tensors` of an earlier one.
    """

    def __init__(
        self, gram: Tensor, taps: tuple[int, ...], iterations: int, *, hold: bool, stored: Sequence[Tensor] = ()
    ) -> None:
        self.iterations, self.grid = iterations, filter_grid(taps, iterations)
        self.symbol, self.inverse = FilterSymbol(gram, self.grid, lags(taps)), InverseTransform(self.grid, gram)
        self.gram = gram
        self.blocks = [block for blocks in self._passes() for block in blocks]
        self._held: list[Powers] = []
        if stored:
            each = len(stored) // len(self.symbol.chunks)
            parts = [list(stored[start : start + each]) for start in range(0, len(stored), each)]
            self._held = [Powers.stored(iterations, part) for part in parts]
        elif hold:
            self._held = [self._powers(chunk, keep=True) for chunk in self.symbol.chunks]

    @property
    def tensors(self) -> list[Tensor]:
        """All that is held, in one list."""
        return [tensor for powers in self._held for tensor in powers.tensors]

    def each(self, *, keep: bool = True) -> Iterator[tuple[slice, Powers]]:
        """Each chunk of frequencies and its powers, all of them or the last alone."""
        for number, chunk in enumerate(self.symbol.chunks):
            yield chunk, self._held[number] if self._held else self._powers(chunk, keep=keep)

    def _powers(self, chunk: slice, *, keep: bool) -> Powers:
        return Powers.of(self.symbol(chunk), self.iterations, keep=keep)

    def weights(self, logs: Tensor) -> Tensor:
        """exp(2^t(h - max h)), which restores the proportions of G_t between frequencies.

        The smallest are 0, as subnormal numbers are slow to compute with. Where anything was scaled Ĝ_t has entries up
        to r, being the square of a matrix with entries up to 1, so all of these frequencies together could add at most
        the smallest weight times r to |K_(t+1)[i,j,x]|.
        """
        weights = torch.exp(2.0**self.iterations * (logs - logs.amax(0)))
        return weights.masked_fill(weights < _SMALLEST_WEIGHT[self.gram.dtype], 0)

    def sums(self, *, with_signs: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """A = exp(2^t·max h)·Â as Â of shape (groups, rows, rows) and h of each frequency and group.

        K_(t+1)[j,i,x] = K_(t+1)[i,j,-x], so a block of rows needs only the columns from its first row on. A pass over
        the powers takes as many blocks as fit into memory. The signs of K_(t+1) are those of ``blocks``, one after the
        other, a row for each tap.
        """
        groups, order = self.gram.shape[1:3]
        logs, dtype = self.gram.new_empty(len(self.grid), groups), COMPLEX[self.gram.dtype]
        sums, signs = logs.new_empty(groups, order, order), []
        panel = max(1, CHUNK_BYTES // (len(self.grid) * dtype.itemsize))
        for blocks in self._passes():
            shapes = [(len(self.grid), groups, last - first, order - first) for first, last in blocks]
            # Filled in place: small results kept between large temporaries would fragment the memory without bound.
            spectra = [self.gram.new_empty(shape, dtype=dtype) for shape in shapes]
            for chunk, powers in self.each(keep=False):
                gram, logs[chunk] = powers.iterates[-1], powers.log
                for (first, last), spectrum in zip(blocks, spectra, strict=True):
                    spectrum[chunk] = gram[..., first:last, :] @ gram[..., first:]
            weights = self.weights(logs)
            for (first, last), spectrum in zip(blocks, spectra, strict=True):
                if self.iterations > 2:  # before that nothing is scaled
                    torch.view_as_real(spectrum).mul_(weights[..., None, None, None])
                found = []
                for columns in spectrum.flatten(1).split(panel, 1):
                    values = self.inverse(columns)
                    signs += [values.sign().to(torch.int8)] if with_signs else []
                    found.append(values.abs_().sum(0))
                block = torch.cat(found).reshape(groups, last - first, -1)
                sums[:, first:last, first:] = block
                sums[:, first:, first:last] = block.mT
        if self.iterations > 2:  # what the frequencies without weight could have added
            sums += _SMALLEST_WEIGHT[self.gram.dtype] * self.inverse.points * order
        return sums, logs, torch.cat(signs, 1) if with_signs else torch.empty(0)

    def _passes(self) -> list[list[tuple[int, int]]]:
        """Blocks of rows, from the first to before the last: those of each pass over the powers."""
        groups, order = self.gram.shape[1:3]
        rows = max(1, SPECTRA_BYTES // (len(self.grid) * groups * order * COMPLEX[self.gram.dtype].itemsize))
        each = max(LEAST_ROWS, -(-min(rows, order) // BLOCKS))
        return [
            [(first, min(first + each, start + rows, order)) for first in range(start, min(start + rows, order), each)]
            for start in range(0, order, rows)
        ]
