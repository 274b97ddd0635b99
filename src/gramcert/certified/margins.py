"""How far an input may move before its class can change, from the logits and the last layer."""

import torch
from torch import Tensor

from gramcert.rounding import next_down, next_up, row_norms_up


def radii_of_pairs(
    weight: Tensor,
    logits: Tensor,
    lipschitz: float,
    logit_error: Tensor,
    feature_error: Tensor,
    differences: Tensor | None = None,
) -> Tensor:
    r"""(f_y - f_i)/(L·‖w_y - w_i‖) for the predicted class y and each class i, rounded down; 0 for ties, inf for i = y.

    The logits are f̂ = W·h + b plus rounding, where h is within ``feature_error`` of the exact features; so the exact
    margin is at least f̂_y - f̂_i - 2·``logit_error`` - ‖w_y - w_i‖·``feature_error``. An input that moves by less than
    the radius moves the features by less than L times it, and the margin stays positive.

    Args:
        weight: of the last layer, (classes, features).
        logits: (batch, classes), finite.
        lipschitz: certified constant L of what comes before the last layer.
        logit_error: bound of the rounding of each logit in the last layer, (batch,).
        feature_error: bound of the distance of its input from the exact one, (batch,).
        differences: certified constants of f_y - f_i, (classes, classes), which are used where they are smaller.

    Returns:
        float64, (batch, classes). The least of a row is the radius of the sample.
    """
    values = logits.detach().cpu().double()
    top, winner = values.max(1)
    rows = weight.detach().cpu().double()
    # Differences are rounded once: the next float away from zero is beyond the exact one.
    distances = torch.stack([row_norms_up(next_up((rows - row).abs())) for row in rows])[winner]
    margins = next_down(next_down(top[:, None] - values) - next_up(2 * logit_error)[:, None])
    margins = next_down(margins - next_up(distances * feature_error[:, None]))
    constants = next_up(distances * lipschitz)
    if differences is not None:
        constants = torch.minimum(constants, differences[winner])
    found = next_down(margins / constants)
    # A margin that is not positive certifies nothing, and neither does one that overflow made of infinities.
    return torch.where(margins > 0, found, 0.0).clamp_min(0).scatter(1, winner[:, None], float("inf"))


def radii(weight: Tensor, logits: Tensor, lipschitz: float, logit_error: Tensor, feature_error: Tensor) -> Tensor:
    """The least of the radii of all pairs of a sample, (batch,)."""
    return radii_of_pairs(weight, logits, lipschitz, logit_error, feature_error).amin(1)
