"""How this package calls its autograd functions."""

from typing import Any

import torch
from torch import Tensor


def full_precision(tensor: Tensor) -> torch.autocast:
    """Autocast off: a bound computed in bfloat16 is none."""
    return torch.autocast(tensor.device.type, enabled=False)


def run(function: type[torch.autograd.Function], tensor: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Apply an autograd function of one tensor that returns a tuple of tensors."""
    with full_precision(tensor):
        outputs: tuple[Tensor, ...] = function.apply(tensor, *arguments)
    return outputs


def run_on_each(
    function: type[torch.autograd.Function], batch_dim: int, batch: Tensor, *rest: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The rule for vmap of a function of one tensor that takes no batches itself: one call per element."""
    results = [run(function, element, *rest) for element in batch.unbind(batch_dim)]
    outputs = tuple(torch.stack(column) for column in zip(*results, strict=True))
    return outputs, (0,) * len(outputs)
