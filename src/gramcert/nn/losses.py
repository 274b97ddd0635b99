"""Losses that ask a 1-Lipschitz classifier for margins. Logits have the shape (batch, classes)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class OffsetCrossEntropy(nn.Module):
    """Cross-entropy after the true logit has lost an offset, at a temperature: τ·CE((f - offset·e_y)/τ, y).

    The defaults are those of the SLL recipe (Araujo et al., 2023, after Prach and Lampert, 2022): an offset of 3√2/2
    asks for a radius of 1.5 in a head with orthonormal rows.

    Args:
        offset: what the true logit must be ahead by.
        temperature: τ; small makes the loss a hinge.
    """

    def __init__(self, offset: float = 1.5 * math.sqrt(2), temperature: float = 0.25) -> None:
        super().__init__()
        self.offset = _number(self, "offset", offset)
        self.temperature = _positive(self, "temperature", temperature)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over the batch."""
        shifted = _without_offset(logits, labels, self.offset) / self.temperature
        return F.cross_entropy(shifted, labels) * self.temperature

    def extra_repr(self) -> str:
        """For printing."""
        return f"offset={self.offset:.6g}, temperature={self.temperature:.6g}"


class HingeMargin(nn.Module):
    """max(0, margin - (f_y - max over i ≠ y of f_i)), the mean over the batch.

    Args:
        margin: what the true logit must be ahead by.
    """

    def __init__(self, margin: float = 1.0) -> None:
        super().__init__()
        self.margin = _positive(self, "margin", margin)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over the batch."""
        return F.relu(self.margin - margins(logits, labels)).mean()

    def extra_repr(self) -> str:
        """For printing."""
        return f"margin={self.margin:.6g}"


class LogitAnnealing(nn.Module):
    """-τ·(1 - p_y)^β·log p_y with p the softmax of (f - offset·e_y)/τ (Lai et al., 2025).

    The factor (1 - p)^β lets go of samples whose margin is large enough, so that capacity goes to the others.

    Args:
        offset: what the true logit must be ahead by.
        temperature: τ.
        power: β.
    """

    def __init__(self, offset: float = 1.5 * math.sqrt(2), temperature: float = 0.25, power: float = 5.0) -> None:
        super().__init__()
        self.offset = _number(self, "offset", offset)
        self.temperature = _positive(self, "temperature", temperature)
        self.power = _number(self, "power", power)
        if power < 0:
            raise ValueError(f"LogitAnnealing(power={power}): expected a number that is not negative")

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over the batch."""
        shifted = _without_offset(logits, labels, self.offset) / self.temperature
        logs = F.log_softmax(shifted, 1).gather(1, labels[:, None])[:, 0]
        rest = -torch.expm1(logs)  # 1 - p without cancellation
        annealed = torch.where(rest > 0, rest, 1.0) ** self.power * (rest > 0) if self.power else 1.0
        return -self.temperature * (annealed * logs).mean()

    def extra_repr(self) -> str:
        """For printing."""
        return f"offset={self.offset:.6g}, temperature={self.temperature:.6g}, power={self.power:.6g}"


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """f_y - max over i ≠ y of f_i for each sample; negative where the prediction is wrong."""
    _check(logits, labels)
    true = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -math.inf)
    return true[:, 0] - others.amax(1)


def _without_offset(logits: Tensor, labels: Tensor, offset: float) -> Tensor:
    _check(logits, labels)
    return logits - offset * F.one_hot(labels, logits.shape[1]).to(logits.dtype)


def _check(logits: Tensor, labels: Tensor) -> None:
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"loss(logits, labels): expected (batch, classes) and (batch,), got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}"
        )


def _number(loss: nn.Module, name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{type(loss).__name__}({name}={value!r}): expected a finite number")
    return value


def _positive(loss: nn.Module, name: str, value: float) -> float:
    if not _number(loss, name, value) > 0:
        raise ValueError(f"{type(loss).__name__}({name}={value}): expected a positive number")
    return value
