"""Upper bounds of the constants of layers as they are deployed: weights rounded to their type, nothing assumed.

A layer that was built to have norm 1, or another one, has with its weights rounded a norm near that: the bounds here
are refined until they are at most that, or as near as the arithmetic allows.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gramcert.arguments import Sizes
from gramcert.certified.choose import certified_convolution, enclose
from gramcert.certified.gram_symbol import crude_norm
from gramcert.certified.work import Work
from gramcert.enclosure import Enclosure
from gramcert.geometry.convolution import Convolution
from gramcert.rounding import gamma, underflow, up

# Tolerances tried one after the other, while the norm may be what it was made for.
TOLERANCES = (1e-3, 1e-5, 1e-7, 1e-9)

# A norm that is certainly above so many times what it may be meant to be was not, and needs no finer tolerance.
NEAR_ONE = 1 + 1e-4

# The norm of rounding errors need not be known better than this.
COARSE = 0.1

# In place of factors that are 0.
TINY_FACTOR = 2.0**-400

# What knowing such a norm better is worth: half a minute or so, counted in operations, so that what is certified does
# not depend on how busy the machine is.
WORTH = 1e12


def refined(
    call: str,
    layer: nn.Module | Convolution | Tensor,
    input_size: Sizes | None,
    tol: float,
    work: Work,
    meant: float = 1.0,
) -> Enclosure:
    """An enclosure as tight as ``tol``, and much tighter where the norm may be meant; its notes say what stopped it."""
    description = certified_convolution(call, layer)  # once: a parametrisation may give other weights the next time
    found = enclose(call, description, input_size, tol, work)
    lower, upper = found.lower, found.upper
    work.max_operations, used = WORTH, tol
    for finer in (value for value in TOLERANCES if value < tol):
        if upper <= meant or upper * (1 - used) > meant * NEAR_ONE or (work.stopped and not found.tol_reached):
            break
        found, before, used = enclose(call, description, input_size, finer, work), upper, finer
        lower, upper = max(lower, found.lower), min(upper, found.upper)
        if upper == before and not found.tol_reached:  # rounding leaves no room
            break
    work.max_operations = float("inf")
    best = Enclosure(lower, upper, found.method)
    reached = best.relative_width <= tol
    # With more time it might be known better, even if it is known well enough.
    in_haste = work.max_seconds is not None and not found.tol_reached
    return dataclasses.replace(best, tol_reached=reached, notes=() if reached and not in_haste else found.notes)


@dataclass(frozen=True)
class ResidualParts:
    r"""x ↦ x - Vᵀφ(Wx + b) for φ elementwise with slopes in [0, 1], V = 2R²W + Δ, as two maps that can be measured.

    The Jacobian is

        I - VᵀDW = (I - 2WᵀR²DW) - ΔᵀDW,    0 <= D <= I diagonal.

    The first part is symmetric with eigenvalues between 1 - 2‖RW‖² and 1, and the second is at most ‖R^-1Δ‖·‖RW‖. Any
    positive R is valid; it should be near the one that V was made with.

    Attributes:
        scaled: RW.
        spread: R^-1·Δ.
        scaled_rounding: distance of the stored RW from the true one, in norm.
        spread_rounding: that of R^-1·Δ.
    """

    scaled: Convolution
    spread: Convolution
    scaled_rounding: float
    spread_rounding: float

    @classmethod
    def of(cls, layer: Convolution, outer: Tensor, factors: Tensor) -> "ResidualParts":
        """From the convolution W (stride 1, zero padding), V in the same layout, and R of its output channels."""
        weight, outer, factors = (tensor.detach().cpu().double() for tensor in (layer.kernel, outer, factors))
        # A row that was given up, R = 0, has V = 0: a tiny R makes both terms of it tiny.
        factors = torch.where(factors > TINY_FACTOR, factors, TINY_FACTOR).reshape(-1, *(1,) * (weight.dim() - 1))
        scaled, quotient = weight * factors, outer / factors
        spread = quotient - 2 * scaled
        return cls(
            Convolution(scaled, padding=layer.padding),
            Convolution(spread, padding=layer.padding),
            _rounding(scaled),
            _rounding(quotient.abs() + 4 * scaled.abs()),
        )

    def constant(self, scaled: float, spread: float) -> float:
        """The constant of the layer, from upper bounds of the norms of the two stored maps."""
        inner, error = up(scaled + self.scaled_rounding), up(spread + self.spread_rounding)
        return up(max(1.0, up(up(2 * up(inner * inner)) - 1)) + up(error * inner))


def residual_norms(
    call: str, parts: ResidualParts, input_size: Sizes | None, tol: float, work: Work
) -> tuple[Enclosure, Enclosure]:
    """Enclosures of the norms of the two maps of a residual layer, that of the rounding errors only roughly."""
    scaled = refined(call, parts.scaled, input_size, tol, work)
    stopped = work.stopped
    spread = enclose(call, parts.spread, input_size, COARSE, work)
    work.stopped = work.stopped or stopped
    return scaled, spread


def _rounding(kernel: Tensor) -> float:
    """Bounds the norm of what up to three roundings of each entry, relative to it, can change."""
    return up(up(gamma(4) * crude_norm(kernel)) + underflow(4 * kernel.numel()))
