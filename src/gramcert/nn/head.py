"""The last layer of a classifier, and the radius that its margins certify."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gramcert.arguments import widened
from gramcert.bounds.powers import positive
from gramcert.certified.margins import radii
from gramcert.exact import exact, float_up
from gramcert.nn.layer import names_itself


class UnitRows(nn.Module):
    """W ↦ W with rows of length 1, zero rows left alone; a parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        """Each row divided by its length."""
        full = widened(weight)
        # Divided by the largest entry first: squares neither overflow nor vanish.
        full = full / positive(full.detach().abs().amax(1, keepdim=True))
        return (full / positive(torch.linalg.vector_norm(full, dim=1, keepdim=True))).to(weight.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What is assigned is the weight before normalisation."""
        return weight


@names_itself
class NormalizedLinear(nn.Linear):
    r"""A linear layer with rows of length 1: each output is 1-Lipschitz, and f_i - f_j is ‖w_i - w_j‖-Lipschitz.

    As a whole its norm may reach √outputs; :func:`gramcert.lipschitz_bound` says what it is. A certificate of a class
    needs only the differences, :meth:`radius`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        parametrize.register_parametrization(self, "weight", UnitRows())

    def radius(self, logits: Tensor, lipschitz: float = 1.0) -> Tensor:
        """How far an input may move, in the l2 norm, before its predicted class can change; 0 for ties.

        min over i ≠ y of (f_y - f_i)/(L·‖w_y - w_i‖), with the weights as they are and every rounding downward. The
        logits are taken as they come: what rounding did to them is not in it.

        Args:
            logits: outputs of this layer, shape (batch, outputs).
            lipschitz: certified constant L of what comes before this layer.

        Returns:
            float64, shape (batch,).

        Example:
            >>> import torch
            >>> from gramcert.nn import NormalizedLinear
            >>> head = NormalizedLinear(2, 2, bias=False)
            >>> head.weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
            >>> head.radius(head(torch.tensor([[3.0, 4.0], [0.0, 1.0]])))
            tensor([3.0000, 0.0000], dtype=torch.float64)
        """
        if logits.dim() != 2 or logits.shape[1] != self.out_features:
            raise ValueError(
                f"NormalizedLinear.radius(logits): expected shape (batch, {self.out_features}), got "
                f"{tuple(logits.shape)}"
            )
        lipschitz = float_up(exact("NormalizedLinear.radius(lipschitz)", lipschitz))
        if not lipschitz > 0:
            raise ValueError(f"NormalizedLinear.radius(lipschitz={lipschitz}): expected a positive number")
        if self.out_features < 2:
            raise ValueError("NormalizedLinear.radius: expected at least two outputs")
        values = logits.detach().cpu().double()
        if not bool(torch.isfinite(values).all()):
            raise ValueError("NormalizedLinear.radius(logits): expected finite logits")
        unrounded = values.new_zeros(len(values))
        return radii(self.weight, values, lipschitz, unrounded, unrounded).to(logits.device)
