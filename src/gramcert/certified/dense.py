"""The norm at one input size of a small layer, proved by a dense Cholesky factorisation of the Gram matrix."""

import math

import torch
from torch import Tensor

from gramcert.bounds.symmetric import symmetric_product
from gramcert.certified.tapwise import dense_matrix
from gramcert.certified.work import Work
from gramcert.geometry.axis import Axis
from gramcert.rounding import absolute_sums, cholesky_error, diagonal_error, down, gamma, underflow, up


class DenseGram:
    """TᵀT or TTᵀ, whichever is smaller, of one group's kernel (out, in, *taps) in float64."""

    def __init__(self, kernel: Tensor, axes: tuple[Axis, ...]) -> None:
        matrix = dense_matrix(kernel, axes)
        matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        self._gram = symmetric_product(matrix[None], matrix.T[None])[0]
        self.order = len(self._gram)
        # An entry is a sum over the longer side of products of sums of weights (where pixels repeat).
        terms = matrix.shape[1] + 2 * math.prod(kernel.shape[2:]) + 4
        rows, columns = absolute_sums(kernel)
        columns = up(columns * math.prod(axis.repetition for axis in axes))
        self._storing = up(up(gamma(terms) * up(rows * columns)) + underflow(8 * terms * self.order))

    @property
    def description(self) -> str:
        """What is factorised."""
        return f"order {self.order}"

    def proves_below(self, level: float, work: Work) -> bool:
        """Whether λ_max <= level was proved, rounding included; False says nothing."""
        work.tick("dense Cholesky proof", 0.0)
        trace = up(self.order * level)  # the Gram matrix only makes it smaller
        error = cholesky_error(self.order, up(trace + self._storing), torch.float64, is_complex=False)
        error = up(error + up(self._storing + diagonal_error(2 * level, torch.float64)))
        shifted = down(level - error)
        if shifted <= 0:
            return False
        matrix = -self._gram
        matrix.diagonal().add_(shifted)
        return not int(torch.linalg.cholesky_ex(matrix)[1])
