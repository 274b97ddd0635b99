"""A function of parameters, computed once as long as they have the same values: once per step, not once per forward.

What is kept is known by its values, compared entry by entry: versions do not see what is written to ``parameter.data``,
and a comparison is one pass over the memory. Gradients pass through one node for all uses, so that a backward pass
through several of them computes them once. That node keeps the graph of the computation for itself, and so may be
passed again, as after computations that are not shared. Whoever uses the result gets a copy, which may be overwritten.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gramcert.arguments import can_be_read
from gramcert.rescaling.vector import is_recorded

Compute = Callable[..., Tensor]


@dataclass(frozen=True)
class _Kept:
    """The inputs, their values as they were, and the result."""

    inputs: list[weakref.ref[Tensor]]
    versions: list[int]
    values: list[Tensor]
    result: Tensor

    def is_of(self, inputs: tuple[Tensor, ...], *, with_graph: bool) -> bool:
        """Whether it is the result for these inputs; its graph leads to the very tensors that it was made from.

        Autograd holds on to versions, even if the same values were written.
        """
        if with_graph:
            same = all(kept() is given for kept, given in zip(self.inputs, inputs, strict=True))
            if not self.result.requires_grad or not same or self.versions != _versions(inputs):
                return False
        return all(_are_equal(kept, given.detach()) for kept, given in zip(self.values, inputs, strict=True))


class Once:
    """The place where the last result is kept. Copies of it, in memory or in files, are empty."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def __call__(self, compute: Compute, *inputs: Tensor) -> Tensor:
        """``compute(*inputs)``, or a copy of what it was for the same values."""
        if _is_watched() or not all(_may_be_kept(each) for each in inputs):
            return compute(*inputs)
        with_graph = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
        kept = self._kept
        if kept is None or not kept.is_of(inputs, with_graph=with_graph):
            if torch.is_inference_mode_enabled():  # such results cannot be trained with later
                return compute(*inputs)
            result = _shared(compute, *inputs) if with_graph else compute(*inputs)
            values = [each.detach().clone() for each in inputs]
            kept = self._kept = _Kept([weakref.ref(each) for each in inputs], _versions(inputs), values, result)
        return kept.result.clone() if with_graph else kept.result.detach().clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Once":
        return Once()

    def __reduce__(self) -> tuple[type["Once"], tuple[()]]:
        return Once, ()


class _Shared(torch.autograd.Function):
    """The computation as one node of the graph, with a graph of its own inside."""

    @staticmethod
    def forward(ctx: Any, compute: Compute, *inputs: Tensor) -> Tensor:
        leaves = [each.detach().requires_grad_(each.requires_grad) for each in inputs]
        # Saved by nobody else's rules: a checkpoint would find less saved when it comes again, and nothing is computed.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            result = compute(*leaves)
        ctx.compute, ctx.leaves, ctx.result, ctx.inputs = compute, leaves, result, inputs
        ctx.versions = _versions(inputs)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.versions != _versions(ctx.inputs):
            raise RuntimeError("a weight was modified in place between the forward and the backward pass")
        result, leaves = ctx.result, ctx.leaves
        again = torch.is_grad_enabled()
        if again:  # a second derivative must see how the result depends on the inputs
            leaves = ctx.inputs
            result = ctx.compute(*leaves)
        wanted = [each for each in leaves if each.requires_grad]
        found = iter(torch.autograd.grad(result, wanted, grad, retain_graph=True, create_graph=again))
        return None, *(next(found) if each.requires_grad else None for each in leaves)


def _shared(compute: Compute, *inputs: Tensor) -> Tensor:
    result: Tensor = _Shared.apply(compute, *inputs)  # type: ignore[no-untyped-call]
    return result


def _is_watched() -> bool:
    """Whether somebody records or transforms what is computed, and must see all of it."""
    return torch.compiler.is_compiling() or is_recorded() or torch._C._functorch.peek_interpreter_stack() is not None


def _may_be_kept(tensor: Tensor) -> bool:
    """Plain tensors with values, of no class that does things its own way."""
    return type(tensor) in (Tensor, nn.Parameter) and can_be_read(tensor) and not tensor.is_inference()


def _versions(tensors: tuple[Tensor, ...]) -> list[int]:
    return [each._version for each in tensors]


def _are_equal(first: Tensor, second: Tensor) -> bool:
    same_kind = first.dtype == second.dtype and first.device == second.device
    return same_kind and torch.equal(first, second)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
