"""A function of a weight, computed once as long as that has the same values: once per step, not once per forward.

What is kept is known by its values, compared entry by entry: versions do not see what is written to ``parameter.data``,
and a comparison is one pass over the memory. It is computed from a copy of them, with a graph of its own that ends
there, so nothing that is kept leads to the parameter, or to what that was made from.

Gradients pass through one node for all uses, so that a backward pass through several of them computes them once, and
again as often as it is passed. The node lives as long as what was made with it. Whoever uses the result gets a copy,
which may be overwritten.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gramcert.arguments import can_be_read
from gramcert.rescaling.vector import is_recorded

Compute = Callable[..., Tensor]


@dataclass
class _Kept:
    """The computation, the values it is of, its result, and the node for all uses while there are any."""

    compute: Compute
    settings: tuple[Any, ...]
    leaf: Tensor
    result: Tensor
    shared: weakref.ref[Tensor] | None = None

    @classmethod
    def made(cls, compute: Compute, settings: tuple[Any, ...], weight: Tensor, *, with_graph: bool) -> "_Kept":
        """From a copy of the values."""
        leaf = weight.detach().clone().requires_grad_(with_graph)
        # Saved by nobody else's rules: a checkpoint would find less saved when it comes again, and nothing is computed.
        with _own_rules() if with_graph else nullcontext():
            return cls(compute, settings, leaf, compute(*settings, leaf))

    def is_of(self, compute: Compute, settings: tuple[Any, ...], weight: Tensor, *, with_graph: bool) -> bool:
        """Whether it is the result for this weight."""
        if self.compute is not compute or self.settings != settings or with_graph > self.result.requires_grad:
            return False
        same_kind = self.leaf.dtype == weight.dtype and self.leaf.device == weight.device
        return same_kind and torch.equal(self.leaf.detach(), weight.detach())

    def of(self, weight: Tensor) -> Tensor:
        """A copy of the result as a function of a weight with the values that it is of."""
        shared = None if self.shared is None else self.shared()
        node: Any = None if shared is None else shared.grad_fn
        if shared is None or node.weight is not weight or node.version != weight._version:
            shared = _run(_Shared, self, weight)
            self.shared = weakref.ref(shared)
        return _run(_Use, shared)


class Once:
    """The place where the last result is kept. Copies of it, in memory or in files, are empty."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def __call__(self, compute: Compute, settings: tuple[Any, ...], weight: Tensor) -> Tensor:
        """``compute(*settings, weight)``, or a copy of what it was for the same settings and values."""
        if _is_watched() or not _may_be_kept(weight):
            return compute(*settings, weight)
        with_graph = torch.is_grad_enabled() and weight.requires_grad
        kept = self._kept
        if kept is None or not kept.is_of(compute, settings, weight, with_graph=with_graph):
            if torch.is_inference_mode_enabled():  # such results cannot be trained with later
                return compute(*settings, weight)
            kept = self._kept = _Kept.made(compute, settings, weight, with_graph=with_graph)
        return kept.of(weight) if with_graph else kept.result.detach().clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Once":
        return Once()

    def __reduce__(self) -> tuple[type["Once"], tuple[()]]:
        return Once, ()


class _Shared(torch.autograd.Function):
    """The computation as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, kept: _Kept, weight: Tensor) -> Tensor:
        ctx.kept, ctx.weight, ctx.version = kept, weight, weight._version
        return kept.result.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        # What was saved is a copy, but autograd holds on to versions, and second derivatives need the weight itself.
        if ctx.version != ctx.weight._version:
            raise RuntimeError("a weight was modified in place between the forward and the backward pass")
        kept = ctx.kept
        if not torch.is_grad_enabled():
            return None, *torch.autograd.grad(kept.result, kept.leaf, grad, retain_graph=True)
        # A second derivative must see how the result depends on the weight; on one that was frozen since it does not.
        weight = ctx.weight if ctx.weight.requires_grad else ctx.weight.detach().requires_grad_()
        result = kept.compute(*kept.settings, weight)
        return None, *torch.autograd.grad(result, weight, grad, create_graph=True)


class _Use(torch.autograd.Function):
    """A copy that keeps the tensor it was made from, and so the node that others may share."""

    @staticmethod
    def forward(ctx: Any, shared: Tensor) -> Tensor:
        ctx.shared = shared
        return shared.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _run(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


def _own_rules() -> AbstractContextManager[Any]:
    """Tensors are saved as they are; where hooks are forbidden there are none."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)


def _is_watched() -> bool:
    """Whether somebody records or transforms what is computed, and must see all of it."""
    if torch.compiler.is_compiling() or is_recorded():
        return True
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    has_tangents = torch.autograd.forward_ad._current_level >= 0
    return is_transformed or has_tangents or torch._C._len_torch_dispatch_stack() > 0


def _may_be_kept(tensor: Tensor) -> bool:
    """Plain tensors with values, of no class that does things its own way."""
    return type(tensor) in (Tensor, nn.Parameter) and can_be_read(tensor) and not tensor.is_inference()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
