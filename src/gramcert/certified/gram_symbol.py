r"""The Gram symbol G(ω) = E(ω)E(ω)* of a stride-1 kernel, and proofs about it with all rounding included.

With the matrices K_b of the taps, p by q with p <= q (transposed if need be: the singular values stay),

    G(ω) = Σ_a C_a e^(-ia·ω),   C_a = Σ_b K_(b+a) K_bᵀ,   C_(-a) = C_aᵀ,

so the lags a of one half space suffice: Re G = C_0 + Σ cos(a·ω)(C_a + C_aᵀ), Im G = -Σ sin(a·ω)(C_a - C_aᵀ). A batch
of frequencies is then one real matrix product, several times cheaper than products of symbols.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.certified.frequencies import Frequencies, all_combinations
from gramcert.rounding import (
    TWIDDLE_ERROR,
    absolute_sums,
    cholesky_error,
    complex_gamma,
    diagonal_error,
    down,
    gamma,
    norm_down,
    norm_up,
    root_up,
    total_up,
    underflow,
    up,
)

# Bytes of matrices worked on at a time: they are read several times while in the cache.
BATCH_BYTES = 2**23

# Large matrices: so many frequencies at least, within so many bytes, share one pass over the coefficients.
SHARED, LARGE_BATCH_BYTES = 16, 2**27


@dataclass(frozen=True)
class Table:
    """Coefficients of the cosines and sines in one precision, and the norm of all that rounding does to G."""

    rows: Tensor
    error: float


class GramSymbol:
    """G(ω) of one kernel (out, in, *taps) in float64. Axes with one tap are left out: G is constant along them."""

    def __init__(self, kernel: Tensor) -> None:
        self.axes = [axis for axis, size in enumerate(kernel.shape[2:]) if size > 1]
        self._transposed = kernel.shape[0] > kernel.shape[1]
        kernel = kernel.transpose(0, 1) if self._transposed else kernel
        sizes = [kernel.shape[2 + axis] for axis in self.axes]
        self.kernel = kernel.reshape(*kernel.shape[:2], *sizes)
        self._flat = self.kernel.reshape(*kernel.shape[:2], -1)  # (p, q, taps)
        self.order = kernel.shape[0]
        self.degrees = [(size - 1) / 2 for size in sizes]
        self._amounts = self._flat.abs().sum(-1)
        # A bound of every λ_max(G), and of Σ_a of the absolute sums that C_a is made of.
        self.crude = up(crude_norm(kernel) ** 2)
        self.places = all_combinations([torch.arange(size) for size in sizes])
        lags = all_combinations([torch.arange(1 - size, size) for size in sizes])
        self.lags = lags[len(lags) // 2 :]  # in lexicographic order 0 is in the middle
        self.correlations = self._correlate()
        self._tables: dict[torch.dtype, Table] = {}

    @staticmethod
    def bytes_for(kernel: Tensor) -> int:
        """Memory that the tables and a batch take for a kernel."""
        order, sizes = min(kernel.shape[:2]), kernel.shape[2:]
        lags = math.prod(2 * size - 1 for size in sizes)
        if lags == 1:  # real, one matrix: stored twice in both precisions, shifted and factorised
            return order**2 * 48
        return order**2 * 16 * (2 * lags + 8) + 3 * max(BATCH_BYTES, min(LARGE_BATCH_BYTES, 16 * SHARED * order**2))

    def _correlate(self) -> Tensor:
        sizes = self.kernel.shape[2:]
        result = self.kernel.new_empty(len(self.lags), self.order, self.order)
        for index, lag in enumerate(self.lags.tolist()):
            later = tuple(slice(max(0, a), size + min(0, a)) for a, size in zip(lag, sizes, strict=True))
            earlier = tuple(slice(max(0, -a), size - max(0, a)) for a, size in zip(lag, sizes, strict=True))
            left = self.kernel[(slice(None), slice(None), *later)].flatten(1)
            right = self.kernel[(slice(None), slice(None), *earlier)].flatten(1)
            torch.mm(left, right.T, out=result[index])
        return result

    @property
    def is_complex(self) -> bool:
        """Whether G depends on ω; a constant G is real."""
        return bool(self.axes)

    def table(self, dtype: torch.dtype) -> Table:
        """The coefficients in one precision."""
        if dtype not in self._tables:
            constant, others = self.correlations[:1], self.correlations[1:]
            even, odd = others + others.mT, others.mT - others
            rows = constant
            if self.is_complex:
                cosines, zeros = torch.cat([constant, even]), torch.zeros_like(odd)
                rows = torch.cat([torch.stack([cosines, torch.zeros_like(cosines)], -1), torch.stack([zeros, odd], -1)])
            rows = rows.reshape(len(rows), -1).to(dtype)
            amounts = constant[0].abs() + even.abs().sum(0) + odd.abs().sum(0)
            size = up(total_up(amounts) * (1 + 4 * gamma(len(rows) + 2)))
            # Storing the coefficient, storing and computing the twiddle, and the sum over the rows.
            relative = up(gamma(len(rows) + 4, dtype) + TWIDDLE_ERROR)
            correlation_terms = self.kernel[0].numel() + 2
            error = up(up(relative * size) + up(gamma(correlation_terms) * self.crude))
            lost = underflow(self.order * (len(rows) + 4), dtype) + underflow(self.order * correlation_terms)
            self._tables[dtype] = Table(rows, up(error + lost))
        return self._tables[dtype]

    def evaluate(self, frequencies: Frequencies, dtype: torch.dtype) -> Tensor:
        """G at each frequency, within ``table(dtype).error`` in norm."""
        rows = self.table(dtype).rows
        if not self.is_complex:
            return rows.reshape(1, self.order, self.order).repeat(len(frequencies), 1, 1)
        angles = frequencies.angles(self.lags)
        values = torch.cat([angles.cos(), angles[:, 1:].sin()], 1).to(dtype) @ rows
        return torch.view_as_complex(values.reshape(-1, self.order, self.order, 2))

    def batch(self, dtype: torch.dtype) -> int:
        """How many frequencies to work on at a time."""
        each = self.order**2 * torch.finfo(dtype).bits // 4
        return max(1, BATCH_BYTES // each, min(SHARED, LARGE_BATCH_BYTES // each))

    def all_below(self, frequencies: Frequencies, level: float, dtype: torch.dtype, sign: int = 1) -> Tensor:
        """For each frequency whether λ_max(sign·G) <= level was proved, for the G of real numbers.

        The proof is a Cholesky factor of (level - error)·I - sign·G, where the error is that of storing this matrix and
        of factorising it.
        """
        matrices = self.evaluate(frequencies, dtype)
        if sign > 0:
            matrices.neg_()
        diagonal = matrices.diagonal(dim1=-2, dim2=-1)
        real = diagonal.real if self.is_complex else diagonal
        size = float(real.abs().max()) + abs(level)
        stored = up(self.table(dtype).error + diagonal_error(size, dtype))
        trace = float(real.double().sum(-1).max()) + self.order * level
        trace = up(up(max(0.0, trace) * (1 + 2 * gamma(self.order))) + self.order * diagonal_error(size, dtype))
        error = up(stored + cholesky_error(self.order, trace, dtype, is_complex=self.is_complex))
        diagonal.add_(level - error)
        passed: Tensor = torch.linalg.cholesky_ex(matrices)[1] == 0
        return passed

    def rounding(self, level: float, dtype: torch.dtype) -> float:
        """About what :meth:`all_below` loses to rounding at this level."""
        trace = max(0.0, self.order * level - float(self.correlations[0].trace()))  # at the mean over all frequencies
        return cholesky_error(self.order, trace, dtype, is_complex=self.is_complex) + self.table(dtype).error

    def norm_below(self, frequency: Frequencies, vector: Tensor) -> float:
        """A lower bound of σ(E) at one frequency: ‖E*v‖/‖v‖ for a vector of p entries, rounding included."""
        image = self._adjoint(frequency, vector)
        amount = up(norm_up(self._amounts.T @ vector.abs().double()) * (1 + 4 * gamma(self.kernel[0].numel() + 4)))
        # Each part of the image is a sum over p and the taps; the moduli of the two parts add at most a factor √2.
        relative = up(2 * complex_gamma(self.order + len(self.places) + 8) + 2 * TWIDDLE_ERROR)
        lost = underflow(8 * self.kernel.numel())
        norm = down(norm_down(image) - up(up(relative * amount) + lost))
        size = norm_up(vector)
        return max(0.0, down(norm / size)) if size > 0 else 0.0

    def right_vector(self, frequency: Frequencies, vector: Tensor) -> Tensor:
        """The input of the kernel as it was given, before transposing, that belongs to an eigenvector of G."""
        return vector.conj().to(torch.complex128) if self._transposed else self._adjoint(frequency, vector)

    def _adjoint(self, frequency: Frequencies, vector: Tensor) -> Tensor:
        """E*v in complex128."""
        angles = frequency.angles(self.places)[0]
        twiddles = torch.complex(angles.cos(), angles.sin())
        parts = torch.view_as_real(vector.to(torch.complex128)).contiguous()
        products = torch.view_as_complex((self._flat.permute(1, 2, 0) @ parts).contiguous())
        return products @ twiddles


def crude_norm(kernel: Tensor) -> float:
    """√(‖S‖₁‖S‖_∞) with S = Σ_b |K_b|: above every σ(E), and above the layer at every size without repeated pixels."""
    rows, columns = absolute_sums(kernel)
    return root_up(up(rows * columns))
