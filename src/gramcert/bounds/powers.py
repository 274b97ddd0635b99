r"""Powers of Hermitian matrices by repeated squaring, G_1 = G, G_(s+1) = G_s², up to G_t = G^(2^(t-1)); their adjoint.

The one home of the iteration, for matrices, for symbols on a grid and for filters. Every other iterate, G_(t-1),
G_(t-3), ..., is divided by its largest diagonal entry. That of a positive semidefinite matrix of order r is between
λ1/r and λ1, so divided iterates have λ1 between 1 and r, their squares up to r², and nothing overflows or vanishes; of
G_1 only moderate numbers are asked. The divisors are constants for derivatives, as no result depends on them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Powers:
    """Ĝ_1, ..., Ĝ_(t-1) with G_s = exp(2^s·h_s)·Ĝ_s, from which Ĝ_t = Ĝ_(t-1)² is made as it is needed.

    Attributes:
        iterations: t.
        iterates: shape (..., rows, rows) each, or the last alone; G_1 for t = 1 too.
        scales: 1/d for each division, shape (...).
        log: h_t = h_(t-1), shape (...).
        square: how matrices are squared that are in another form than their own.
    """

    iterations: int
    iterates: list[Tensor]
    scales: list[Tensor]
    log: Tensor
    square: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def of(
        cls, gram: Tensor, iterations: int, *, keep: bool = True, square: Callable[[Tensor], Tensor] | None = None
    ) -> "Powers":
        """The powers of G_1, all of them or the last one alone."""
        iterates, scales, log = [gram], [], torch.zeros_like(torch.real(gram.detach()[..., 0, 0]))
        for step in range(2, iterations):
            gram = gram @ gram if square is None else square(gram)
            if (iterations - step) % 2:
                gram, largest = divided(gram)
                scales.append(1 / largest)
                log = log + 2.0**-step * torch.log(largest)
            iterates = [*iterates, gram] if keep else [gram]
        return cls(iterations, iterates, scales, log, square)

    @classmethod
    def stored(cls, iterations: int, tensors: list[Tensor]) -> "Powers":
        """From :attr:`tensors`."""
        count = max(1, iterations - 1)
        return cls(iterations, tensors[:count], tensors[count:-1], tensors[-1])

    @property
    def tensors(self) -> list[Tensor]:
        """All of them in one list."""
        return [*self.iterates, *self.scales, self.log]

    def times(self, right: Tensor) -> Tensor:
        """Ĝ_t·right."""
        gram = self.iterates[-1]
        return gram @ right if self.iterations == 1 else gram @ (gram @ right)

    def last(self) -> Tensor:
        """Ĝ_t."""
        gram = self.iterates[-1]
        if self.iterations == 1:
            return gram
        return gram @ gram if self.square is None else self.square(gram)

    def weights(self, log: Tensor) -> Tensor:
        """exp(2^t(h_t - log)): what makes Ĝ_t of several matrices comparable."""
        return torch.exp(2.0**self.iterations * (self.log - log))

    def pull_back(self, cotangent: Tensor) -> Tensor:
        """From a Hermitian cotangent of Ĝ_t to X, where :attr:`growth` times the Hermitian part of X is that of G_1.

        Whatever follows sees the Hermitian part alone, as G_1 is Hermitian: a transpose is spared.
        """
        return _undo(self._squarings(), cotangent)

    def pull_back_pair(self, left: Tensor, right: Tensor, factor: Tensor | None = None) -> Tensor:
        r"""The same of the cotangent left·right* + right·left*; or X·F + X*·F if a matrix F is given.

        As a sum of pairs xy* + yx* the number of pairs doubles at each squaring: (x, G_s y) and (G_s x, y). That is
        cheaper than dense products while the pairs number at most half the order.
        """
        squarings = self._squarings()
        while squarings and 2 * left.shape[-1] <= left.shape[-2]:
            gram, scale = squarings.pop(0)
            left, right = torch.cat([left, gram @ left], -1), torch.cat([gram @ right, right], -1)
            right = right if scale is None else scale_by(right, scale)
        if not squarings:
            if factor is None:
                return left @ right.mH
            return torch.cat([left, right], -1) @ (torch.cat([right, left], -1).mH @ factor)
        half = left @ right.mH
        half = _undo(squarings, half + half.mH)
        return half if factor is None else (half + half.mH) @ factor

    @property
    def growth(self) -> float:
        """2 and, for each scale, 4: derivatives grow by 2 with each squaring, and must not overflow on the way."""
        return 2 * 4.0 ** len(self.scales)

    def _squarings(self) -> list[tuple[Tensor, Tensor | None]]:
        """Ĝ_s, and the scale of Ĝ_(s+1) = scale·Ĝ_s² over 4, for s = t-1, ..., 1."""
        scales = iter(reversed(self.scales))
        grams = reversed(self.iterates[: self.iterations - 1])
        return [(gram, next(scales) / 4 if distance % 2 else None) for distance, gram in enumerate(grams)]


def _undo(squarings: list[tuple[Tensor, Tensor | None]], cotangent: Tensor) -> Tensor:
    """Undoing one squaring maps a Hermitian C to scale·(CG + GC) = X + X*; of the last one X alone is returned."""
    half = cotangent / 2 if not squarings else cotangent
    for number, (gram, scale) in enumerate(squarings):
        half = (half + half.mH if number else half) @ gram
        half = half if scale is None else scale_by(half, scale)
    return half


def divided(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A positive semidefinite matrix divided by its largest diagonal entry; and that entry, a constant.

    1 where rounding left nothing of the matrix, or a negative entry.
    """
    largest = torch.real(matrix.detach().diagonal(dim1=-2, dim2=-1)).amax(-1)
    largest = torch.where(largest < torch.finfo(largest.dtype).tiny, 1.0, largest)
    if torch.is_grad_enabled():
        return scale_by(matrix, 1 / largest), largest
    real_view(matrix).mul_((1 / largest)[..., None, None, None])  # fresh memory costs more than the products
    return matrix, largest


def scale_by(matrix: Tensor, factor: Tensor) -> Tensor:
    """The matrices times real factors, one each. On the real view, to spare a complex product per entry."""
    scaled = real_view(matrix) * factor[..., None, None, None]
    return torch.view_as_complex(scaled) if matrix.is_complex() else scaled[..., 0]


def positive(size: Tensor) -> Tensor:
    """The sizes with 1 in place of 0, for divisions and logarithms whose result does not matter there."""
    return torch.where(size == 0, torch.ones_like(size), size)


def real_view(matrix: Tensor) -> Tensor:
    """Real and imaginary part on a last axis of their own; one part if the matrix is real."""
    return torch.view_as_real(matrix.resolve_conj()) if matrix.is_complex() else matrix[..., None]
