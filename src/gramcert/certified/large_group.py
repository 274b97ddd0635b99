"""The smallest singular value of a group whose matrix is too large to be written out: a vector, and a banded proof."""

import math

import torch
from torch import Tensor

from gramcert.certified.banded import BandedGram, band_bytes
from gramcert.certified.lanczos import conjugate_gradients, top_vector
from gramcert.certified.one_size import BANDED, MOST_TAPS
from gramcert.certified.sides import Side
from gramcert.certified.tapwise import TapwiseLayer
from gramcert.certified.torus import ROUNDING
from gramcert.certified.work import OutOfBudgetError, Work
from gramcert.geometry.axis import Axis
from gramcert.rounding import down, up

INVERSE = "inverse iteration"
NOT_NEAR = "inverse iteration came not near enough to the smallest singular value"

# Lanczos steps with the inverse; without it, rounds of inverse iteration with steps of conjugate gradients in each.
KRYLOV_STEPS, ROUNDS, SOLVING_STEPS = 30, 6, 400

# Levels that are tried for the proof after those of the tolerance, in parts of what a vector attains.
LESS = (0.9, 0.7, 0.4, 0.1)


class LargeGroup:
    """One group's kernel (out, in, *taps) at one input size, on its smaller side.

    ``lower`` and ``upper`` hold at any time; ``missed`` says why they did not come nearer.
    """

    def __init__(self, kernel: Tensor, axes: tuple[Axis, ...], side: Side, tol: float, work: Work) -> None:
        work.require_bytes(INVERSE, 2 * TapwiseLayer.bytes_for(kernel[None], axes))
        self.layer, self.side, self.tol, self.work = TapwiseLayer(kernel[None], axes), side, tol, work
        self.lower, self.upper, self.missed, self._ceiling = 0.0, math.inf, "", math.inf
        self._kernel, self._axes = kernel, axes
        self._shape = self.layer.input_shape if side == "input" else self.layer.output_shape

    @property
    def is_near(self) -> bool:
        """Whether the tolerance is reached."""
        best = min(self.upper, self._ceiling)
        return best - self.lower <= self.tol * best

    def enclose(self, lower: float, ceiling: float, start: Tensor | None) -> None:
        """Look for a vector and prove what it suggests.

        Args:
            lower: a bound from below that is known.
            ceiling: what another group attains, so that more need not be proved of this one.
            start: an input to start with, if there is one.
        """
        self.lower, self._ceiling = lower, ceiling
        try:
            gram = self._banded()
            self._iterate(gram, start)
            if not self.is_near and gram is not None:
                self._prove(gram)
        except OutOfBudgetError as error:
            self.missed = str(error)
        if math.isinf(self.upper):
            self._use(self._start(start))
        if self.is_near:
            self.missed = ""

    def _banded(self) -> BandedGram | None:
        """The Gram matrix of that side, if it can be factorised with these limits."""
        most = max(axis.taps for axis in self._axes)
        if most > MOST_TAPS:
            self.missed = f"{BANDED}: made for up to {MOST_TAPS} taps on an axis, got {most}"
            return None
        try:
            self.work.require_bytes(BANDED, 8 * self._kernel.numel() + band_bytes(self._axes))
            gram = BandedGram(self._kernel, self._axes, self.side)
            self.work.require_bytes(BANDED, band_bytes(self._axes) // 2 + gram.kept + gram.window_bytes)
            self.work.require_operations(BANDED, gram.flops)
        except OutOfBudgetError as error:
            self.missed = str(error)
            return None
        return gram

    def _iterate(self, gram: BandedGram | None, start: Tensor | None) -> None:
        vector = self._start(start)
        needed = 0 if gram is None else gram.factor_bytes + gram.window_bytes + 8 * KRYLOV_STEPS * vector.numel()
        if gram is not None and needed < self.work.available:
            solve = gram.inverse(self.work)
            if solve is not None:
                found = top_vector(
                    lambda x: solve(x.reshape(self._shape[1:])).flatten(), vector.flatten(), KRYLOV_STEPS, self.tol / 50
                )[1]
                found = found.reshape(self._shape)
                self._use(found)
                self._use(solve(found[0])[None])  # once more: of singular matrices it is far better
                return
        for _ in range(ROUNDS):
            before = self.upper
            vector = conjugate_gradients(self._gram, vector / vector.norm(), SOLVING_STEPS)
            self._use(vector)
            if before - self.upper <= self.tol / 20 * self.upper or self.is_near:
                break

    def _start(self, start: Tensor | None) -> Tensor:
        """A little of everything, and most of what there is to start with, on this side."""
        noise = torch.randn(self._shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        if start is None or not bool(start.any()):
            return noise
        wave = start if self.side == "input" else self.layer.apply(start)
        noise /= 1e3 * noise.norm()
        return noise.add_(wave / wave.norm().clamp_min(1e-300))

    def _gram(self, x: Tensor) -> Tensor:
        self.work.tick(INVERSE, 0.0)
        if self.side == "input":
            return self.layer.adjoint(self.layer.apply(x))
        return self.layer.apply(self.layer.adjoint(x))

    def _use(self, vector: Tensor) -> None:
        gain = self.layer.gain(vector) if self.side == "input" else self.layer.adjoint_gain(vector)
        self.upper = min(self.upper, gain[1])

    def _prove(self, gram: BandedGram) -> None:
        self.missed = NOT_NEAR
        for share in (1 - self.tol / 2, 1 - self.tol, *LESS):
            level = down(share * min(self.upper, self._ceiling))
            if level <= self.lower:
                break
            if level * level <= gram.error_above:
                self.missed = ROUNDING
                break
            self.work.require_operations(BANDED, gram.flops)
            if gram.proves_above(up(level * level), self.work):
                self.lower = level
                break
