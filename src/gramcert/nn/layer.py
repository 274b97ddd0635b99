"""What the layers of this package share: a check of the input, a computation that can be traced, a description."""

import abc
import functools
import re
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gramcert.nn.outline import Outline
from gramcert.operators.graph import Variable

T = TypeVar("T")


class Layer(nn.Module, abc.ABC):
    """A 1-Lipschitz layer without weights, or with weights that it may use as they are.

    Subclasses say what they :meth:`compute` by operations that torch can trace, whatever the number of axes;
    :meth:`check` refuses inputs that it is not made for. A subclass whose constant is not exactly 1 has its own
    :meth:`outlined`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Check and compute."""
        self.check(x)
        return self.compute(x)

    def check(self, x: Tensor) -> None:
        """Refuse what the layer cannot take."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes that its tensors have; one that was replaced by a larger one might be repeated along the input."""
        return {}

    def require_shapes(self, call: str) -> None:
        """Refuse tensors of other shapes than the layer was made for."""
        for name, shape in self.shapes().items():
            found = tuple(getattr(self, name).shape)
            if found != shape:
                raise ValueError(f"{call}({type(self).__name__}.{name}): expected shape {shape}, got {found}")

    @abc.abstractmethod
    def compute(self, x: Tensor) -> Tensor:
        """The layer itself."""

    def describe_operators(self, outline: Outline, x: Variable) -> Variable:
        """What it is at every input size, after a look at its tensors."""
        self.require_shapes(outline.call)
        return self.outlined(outline, x)

    def outlined(self, outline: Outline, x: Variable) -> Variable:
        """The layer as a part of a graph without shapes."""
        return outline.constant(x, 1.0, type(self).__name__)

    def plain(self) -> nn.Module:
        """The same function without this package: a graph of torch's operations."""
        tracer = _Tracer()
        graph = tracer.trace(self)
        graph._tracer_cls = torch.fx.Tracer  # what a saved module is traced with again when it is loaded
        return torch.fx.GraphModule(tracer.root, graph, type(self).__name__)


class _Tracer(torch.fx.Tracer):
    traced_func_name = "compute"


def names_itself(kind: type[T]) -> type[T]:
    """For a class of layers: errors about its arguments begin with its name, also those that Python or torch raise."""
    made = kind.__init__

    @functools.wraps(made)
    def init(self: T, *arguments: Any, **options: Any) -> None:
        try:
            made(self, *arguments, **options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise _with_name(type(self).__name__, error) from None

    kind.__init__ = init  # type: ignore[assignment]
    return kind


def _with_name(name: str, error: Exception) -> Exception:
    # What Python finds, it says of the class where the function was written, which may be a private one.
    said = re.sub(r"^\w+(?=\.__init__\(\))", name, str(error))
    return type(error)(said if said.startswith(name) else f"{name}: {said}")


def expected(layer: nn.Module, what: str, x: Any) -> ValueError:
    """The error of a layer that was given something else than it expected."""
    shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
    return ValueError(f"{type(layer).__name__}(x): expected {what}, got shape {shape}")
