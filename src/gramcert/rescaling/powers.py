r"""The squarings G_1 = G, G_(s+1) = G_s², so that G_t = G^(2^(t-1)), and the adjoint of the map G → G_t.

From the second on each iterate is divided by its largest diagonal entry. A positive semidefinite matrix of order r
whose largest diagonal entry is 1 has λ1 between 1 and r, so no power overflows or vanishes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.rescaling.hermitian import square, square_adjoint_


@dataclass(frozen=True)
class Powers:
    """Ĝ_1, ..., Ĝ_t with G_s = exp(2^s·h_s)·Ĝ_s; Ĝ_s = scale_s·Ĝ_(s-1)² for 1 < s < t, and Ĝ_t = Ĝ_(t-1)².

    Attributes:
        iterates: shape (parts, frequencies, groups, rows, rows) each; the last is Ĝ_t.
        scales: of the iterates between the first and the last, shape (frequencies, groups) each.
        log: h_t, shape (frequencies, groups).
    """

    iterates: list[Tensor]
    scales: list[Tensor]
    log: Tensor

    @classmethod
    def of(cls, first: Tensor, iterations: int) -> "Powers":
        """The powers of G_1; without gradients they are computed in place."""
        iterates, scales = [first], []
        log = torch.zeros_like(first[0, ..., 0, 0])
        for step in range(2, iterations + 1):
            product = square(iterates[-1])
            if step < iterations:
                largest = largest_diagonal(product[0])
                scales.append(1 / largest)
                product *= scales[-1][..., None, None]
                log = log + 2.0**-step * torch.log(largest)
            iterates.append(product)
        return cls(iterates, scales, log)

    def weights(self, iterations: int, log: Tensor) -> Tensor:
        """exp(2^t(h_t - log)): what makes Ĝ_t of all frequencies comparable."""
        return torch.exp(2.0**iterations * (self.log - log))

    def pull_back_(self, cotangent: Tensor) -> None:
        """From a Hermitian cotangent of Ĝ_t to that of G_1, in its place. The scales are constants."""
        for step in range(len(self.iterates) - 1, 0, -1):
            square_adjoint_(cotangent, self.iterates[step - 1])
            if step > 1:
                cotangent *= self.scales[step - 2][..., None, None]


def largest_diagonal(matrix: Tensor) -> Tensor:
    """The largest diagonal entry, a constant; 1 where rounding left nothing of the matrix, or a negative entry."""
    largest = matrix.detach().diagonal(dim1=-2, dim2=-1).amax(-1)
    return torch.where(largest < torch.finfo(largest.dtype).tiny, 1.0, largest)
