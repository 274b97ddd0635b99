"""How this package calls its autograd functions."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """Autocast off: a bound computed in bfloat16 is none."""
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)


def run(function: type[torch.autograd.Function], tensor: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Apply an autograd function that returns a tuple of tensors, in the precision of the first."""
    with full_precision(tensor):
        outputs: tuple[Tensor, ...] = function.apply(tensor, *arguments)
    return outputs


def run_on_each(
    function: type[torch.autograd.Function], in_dims: tuple[int | None, ...], *arguments: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The rule for vmap of a function that takes no batches itself: one call per element."""
    is_batched = [isinstance(value, Tensor) and dim is not None for value, dim in zip(arguments, in_dims, strict=True)]
    columns = [v.unbind(dim) if b else v for v, dim, b in zip(arguments, in_dims, is_batched, strict=True)]
    size = next(len(column) for column, batched in zip(columns, is_batched, strict=True) if batched)
    results = [
        run(function, *(column[i] if batched else column for column, batched in zip(columns, is_batched, strict=True)))
        for i in range(size)
    ]
    outputs = tuple(torch.stack(column) for column in zip(*results, strict=True))
    return outputs, (0,) * len(outputs)
