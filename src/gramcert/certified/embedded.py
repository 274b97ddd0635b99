r"""The norm at one input size with zero padding: a circulant that contains the layer, but for a few of its vectors.

Let C be the matrix of a circulant of which the layer's matrix T is a part: T = P C Q*, where P and Q keep the places of
the layer's outputs and inputs, those *inside*. For s > 0 let

    A = [ s·I   -C  ]        so that  ‖T‖ <= s + η  if and only if  v*Av >= -η‖v‖²  for every vector v inside.
        [ -C*   s·I ]

C alone proves ‖T‖ <= ‖C‖ (no σ(C) is above s, A is positive). But a few p of the singular values of C, plane waves that
cannot live on the inside, are larger than ‖T‖. Let Z be p vectors on the whole circulant, and N = -Z*AZ positive.

**Claim.** If at most p singular values of C are above s, R are the rows of AZ inside, and R*R <= ηN, then ‖T‖ <= s + η.
Proof. A has at most p negative eigenvalues, one for each σ(C) > s, and is negative on the span of Z, of dimension p. So
u*Au >= 0 for all u with Z*Au = 0: otherwise A were negative on p + 1 dimensions. For v inside, Z*Av = R*v. Let
α = -N⁻¹R*v and u = v - Zα. Then Z*Au = R*v + Nα = 0, and v*Av = u*Au - α*Nα >= -(R*v)*N⁻¹(R*v) >= -η‖v‖². ∎

Such Z exist whenever ‖T‖ < s: from each pair w of singular vectors of C with σ > s take z = w + x, x inside, such that
Az = 0 inside. This is a linear system with the matrix of A inside, which is positive, and its solution makes z*Az even
smaller than w*Aw. An approximate solution is enough, as η is quadratic in what remains: see
:mod:`gramcert.certified.deflation`, which may be as inexact as it likes. What is proved is the number of singular
values, by Cholesky factors of s²I - G(ω) + VV* with p(ω) columns V at each frequency of the circulant, and R*R <= ηN,
by products of the taps in float64.
"""

import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramcert.certified.deflation import BLOCK, REMEMBERED, Deflation, TooLowError
from gramcert.certified.embedding import EMBEDDED, Embedding, embeddings
from gramcert.certified.frequencies import Frequencies, all_combinations
from gramcert.certified.gram_symbol import GramSymbol, crude_norm
from gramcert.certified.lifted import LiftedLayer
from gramcert.certified.tapwise import TapwiseLayer
from gramcert.certified.work import OutOfBudgetError, Work
from gramcert.geometry.axis import Axis
from gramcert.geometry.convolution import Convolution
from gramcert.rounding import cholesky_error, diagonal_error, down, gamma, norm_up, scaled_down, underflow, up

# Of eigenvalue routines, on numbers that have overflowed.
_NotConvergedError: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]

# Singular values above the level past which another method is better.
MOST_VECTORS = 512

# Tolerances from which vectors are searched for in float32.
COARSE = 3e-4

# How far above the norm a bound may be that is told and not searched for: one after the other.
TOLD = (1e-2, 1e-3, 1e-4, 1e-6)

# Operations for each frequency of the circulant, in units of the cube of the order: a guess for limits of time.
OPERATIONS = 40.0

# Shares of the tolerance: between which the level lies above the lower bound, and what the residuals may add.
LEVELS, RESIDUAL = (0.6, 0.75), 0.2


class EmbeddedLayer:
    """The proof for one group's kernel (out, in, *taps) and its reduction to stride 1, on one circulant."""

    def __init__(self, kernel: Tensor, reduced: Tensor, symbol: GramSymbol, embedding: Embedding, work: Work) -> None:
        self._kernel, self._reduced, self._symbol, self._work = kernel, reduced, symbol, work
        self.embedding, self._grid = embedding, embedding.grid
        work.require_operations(EMBEDDED, OPERATIONS * len(self._grid) * symbol.order**3)
        work.require_bytes(EMBEDDED, symbol.bytes + 64 * len(self._grid) * len(embedding.axes))
        # All of the half grid, also along axes on which the symbol is constant: each frequency is counted.
        points = all_combinations([torch.arange(size) for size in self._grid.shape])
        sizes = self._grid.sizes
        self._frequencies = Frequencies(points[:, symbol.axes], tuple(sizes[axis] for axis in symbol.axes))
        self.count = 0  # of the vectors that were needed

    def bound(self, lower: float, tol: float) -> float:
        """A proved upper bound of the norm, within the tolerance of a lower bound, or infinity.

        Raises:
            TooLowError: if the lower bound is too far from the norm.
        """
        try:
            return self._bound(lower, tol)
        except (_NotConvergedError, np.linalg.LinAlgError):
            return math.inf

    def _bound(self, lower: float, tol: float) -> float:
        first = up(lower * (1 + LEVELS[0] * tol))
        eigenpairs = self._failing(first)
        last = max(first, lower * (1 + LEVELS[1] * tol))
        level = _apart(first, last, [values.sqrt() for values, _ in eigenpairs.values()])
        found = self._above(level, eigenpairs)
        if not found:
            return math.inf if found is None else level
        times = self._grid.multiplicity(torch.device("cpu")).tolist()
        self.count = sum(int(times[index]) * len(values) for index, (values, _) in found.items())
        if self.count > MOST_VECTORS:
            raise OutOfBudgetError(f"{EMBEDDED}: {self.count} vectors, more than {MOST_VECTORS}")
        vectors = self._vectors(level, found, tol)
        return math.inf if vectors is None else self._verify(level, *vectors, tol)

    def is_below(self, norm: float, tol: float) -> bool:
        """Whether this norm was proved, if about ``tol`` of it is left."""
        try:
            return self.bound(down(norm / (1 + tol)), tol) <= norm
        except TooLowError:
            return False

    def _failing(self, level: float) -> dict[int, tuple[Tensor, Tensor]]:
        """The eigenpairs of G with σ > level, at each frequency at which σ <= level was not proved."""
        square, passed = down(level * level), []
        step = self._symbol.batch(torch.float64)
        for start in range(0, len(self._frequencies), step):
            self._work.tick(EMBEDDED, start / len(self._frequencies))
            passed.append(self._symbol.all_below(self._at(start, step), square, torch.float64))
        failing = (~torch.cat(passed)).nonzero()[:, 0].tolist()
        return {index: self._eigenpairs(index, square) for index in failing}

    def _eigenpairs(self, index: int, least: float) -> tuple[Tensor, Tensor]:
        """Those above a value; real vectors where a frequency is its own opposite: there G is real, up to rounding."""
        matrix = self._symbol.evaluate(self._at(index), torch.float64)[0]
        if matrix.is_complex() and float(matrix.imag.abs().max()) <= 1e-12 * float(matrix.real.abs().max()):
            matrix = matrix.real
        from scipy.linalg import eigh  # which takes long to import

        # LAPACK's routine for a few of them, which torch does not have, takes less than half the time.
        limits = [least, math.inf]
        values, vectors = eigh(matrix.numpy(), subset_by_value=limits, driver="evx", check_finite=False)
        return torch.from_numpy(values), torch.from_numpy(vectors)

    def _at(self, start: int, count: int = 1) -> Frequencies:
        return self._frequencies[slice(start, start + count)]

    def _above(
        self, level: float, eigenpairs: dict[int, tuple[Tensor, Tensor]]
    ) -> dict[int, tuple[Tensor, Tensor]] | None:
        """Those pairs with σ > level, after proving that there are no others; ``None`` if that fails."""
        square, result = down(level * level), {}
        for index, (values, vectors) in eigenpairs.items():
            chosen = values > square
            values, vectors = values[chosen], vectors[:, chosen]
            lifted = vectors * (2 * (values - square)).sqrt()
            if not bool(self._symbol.all_below(self._at(index), square, torch.float64, lifted=lifted)):
                return None
            if len(values):
                result[index] = values, vectors
        return result

    def _vectors(
        self, level: float, found: dict[int, tuple[Tensor, Tensor]], tol: float
    ) -> tuple[Tensor, Tensor] | None:
        """Z on the circulant's inputs and outputs, (1, channels, *places, count)."""
        dtype = torch.float32 if tol >= COARSE else torch.float64
        self._require_memory(dtype)
        search = Deflation(self._reduced, self.embedding, dtype, self._work)
        search.precondition(level, found)
        waves, sizes = [], []
        for index, (values, vectors) in found.items():
            opposite = search.opposite(index)
            if opposite is None or opposite >= index:  # once for a pair
                waves.append(search.waves(index, vectors))
                sizes.append(values.sqrt().repeat(waves[-1].shape[-1] // len(values)))
        together = torch.cat(sizes)
        if len(together) != self.count:  # opposite frequencies that disagree about a value at the level
            return None
        small, large = search.solve(torch.cat(waves, -1), together, level, RESIDUAL / 3 * tol * level)
        y, x = (small, large) if search.small_is_output else (large, small)
        sides = [side.movedim(-2, 0)[None].double() for side in (search.from_phases(x), y)]
        # Any basis of their span will do. One of length 1 keeps rounding small where s is close to the norm.
        shapes = [side.shape for side in sides]
        basis = torch.linalg.qr(torch.cat([side.flatten(0, -2) for side in sides]))[0]
        parts = basis.split([math.prod(shape[:-1]) for shape in shapes])
        x, y = (part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
        return x, y

    def _require_memory(self, dtype: torch.dtype) -> None:
        numbers = math.prod(self._grid.sizes) * sum(self._reduced.shape[:2]) * (max(self.count, BLOCK) + 1)
        past = 2 * math.prod(self._grid.sizes) * self._symbol.order * max(REMEMBERED, 2 * self.count)
        needed = Deflation.bytes_for(self._reduced, self.embedding, dtype) + dtype.itemsize * (12 * numbers + past)
        # What is verified comes beside what the search took: allocators keep freed memory in pieces that do not fit.
        self._work.require_bytes(EMBEDDED, max(needed + 24 * numbers, 48 * numbers) + 8 * self._kernel.numel())

    def _verify(self, level: float, x: Tensor, y: Tensor, tol: float) -> float:
        """The claim for vectors (1, channels, *places, count) of the circulant's inputs and outputs.

        Errors, with L the length of the longest vector and I that of the longest image, or sL if that is more: images
        are within ε; entries of N are sums of four terms, whose parts have an absolute sum of at most LI, rounded about
        n times, besides 2Lε from the images; rows of R are within δ, and R*R <= 2R̂*R̂ + 2Δ*Δ for R = R̂ + Δ, where
        ‖Δ‖² <= pδ².
        """
        # The vectors side by side are an axis on which the circulant has one tap: one product for each of its taps.
        count = x.shape[-1]
        aside = Axis(count, count, 0, 1, 1, 1, "zeros")
        circulant = TapwiseLayer(self._kernel[None, ..., None], (*self.embedding.axes, aside))
        length = max(norm_up(vector) for vectors in (x, y) for vector in vectors.movedim(-1, 0))
        terms = max(circulant.terms, circulant.adjoint_terms)
        image, back = circulant.apply(x), circulant.adjoint(y)
        error = up(gamma(terms) * up(circulant.absolute_norm * length))
        error = up(error + underflow(2 * terms * max(image.numel(), back.numel())))
        longest_image = max(norm_up(vector) for vectors in (image, back) for vector in vectors.movedim(-1, 0))
        reach = max(up(level * length), longest_image)
        x_rows, y_rows = x.flatten(0, -2).T, y.flatten(0, -2).T
        coupling = y_rows @ image.flatten(0, -2)
        negative = coupling + coupling.T - level * (x_rows @ x_rows.T + y_rows @ y_rows.T)
        residual = torch.cat(
            [
                _part(level * x - back, self.embedding.inputs).flatten(0, -2),
                _part(level * y - image, self.embedding.outputs).flatten(0, -2),
            ]
        ).T
        squares = residual @ residual.T
        numbers = x_rows.shape[1] + y_rows.shape[1]
        rounded = up(gamma(numbers + 8) * up(4 * up(length * reach)))
        n_error = up(count * up(up(up(2 * length) * error) + up(rounded + underflow(8 * numbers))))
        delta = up(2 * up(error + up(gamma(4) * up(2 * reach))))
        longest = max(norm_up(row) for row in residual)
        q_error = up(count * up(up(gamma(numbers) * up(longest * longest)) + underflow(2 * numbers)))
        fixed = up(2 * up(q_error + up(count * up(delta * delta))))
        factor, failed = torch.linalg.cholesky_ex(negative)
        if int(failed):
            return math.inf
        inverse = torch.linalg.solve_triangular(factor, torch.eye(count, dtype=torch.float64), upper=False)
        # Twice the quotient, and what the errors add where N is smallest.
        smallest = float(torch.linalg.eigvalsh(negative)[0])
        eta = 2.1 * float(torch.linalg.eigvalsh(inverse @ squares @ inverse.T)[-1]) + 2 * fixed / max(smallest, 1e-300)
        eta = max(eta, 1e-14 * level)
        while eta <= (1 - LEVELS[1]) * tol * level:
            matrix = eta * negative - 2 * squares
            stored = up(count * up(gamma(4) * up(eta * float(negative.abs().max()) + 2 * float(squares.abs().max()))))
            trace = up(count * float(matrix.diagonal().abs().max()))
            shift = up(up(up(eta * n_error) + fixed) + up(stored + diagonal_error(2 * trace, torch.float64)))
            shift = up(shift + cholesky_error(count, trace, torch.float64, is_complex=False))
            matrix.diagonal().sub_(shift)
            if not int(torch.linalg.cholesky_ex(matrix)[1]):
                return up(level + eta)
            eta *= 4
        return math.inf


def proves_below(layer: Convolution, axes: tuple[Axis, ...], norm: float, work: Work) -> bool:
    """Whether a layer at one input size was proved to have at most that norm, which is told and not searched for."""
    lifted = LiftedLayer.of(layer, axes)
    if lifted.is_zero:
        return True
    assert lifted.axes is not None
    target = down(scaled_down(norm, -lifted.exponent) - lifted.lost)
    if target <= 0:
        return False
    parts = embeddings(lifted.axes, work)
    for kernel, reduced in zip(lifted.kernels, lifted.reduced, strict=True):
        if crude_norm(kernel) <= target:
            continue
        symbol = GramSymbol.within(EMBEDDED, reduced, work)
        for part in parts:
            proof = EmbeddedLayer(kernel, reduced, symbol, part, work)
            if not any(proof.is_below(target, tol) for tol in TOLD):
                return False
    return True


def _part(vectors: Tensor, places: tuple[slice, ...]) -> Tensor:
    """Vectors (1, channels, *places, count) at some of the places."""
    index: Any = (..., *places, slice(None))
    return vectors[index]


def _apart(least: float, most: float, values: list[Tensor]) -> float:
    """The number in an interval that is farthest from given ones."""
    inside = [value for value in torch.cat(values or [torch.zeros(0)]).tolist() if least < value < most]
    marks = sorted([least, most, *inside])
    _, middle = max((right - left, (left + right) / 2) for left, right in itertools.pairwise(marks))
    return middle if inside else most
