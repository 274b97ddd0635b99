"""Modules as a graph without shapes: what :func:`gramcert.lipschitz_bound` knows of a model at every input size.

Each of our layers describes itself, torch's own are in :mod:`~gramcert.nn.torch_layers`. Values have no shape here, so
that an operation is known by its constant or by the layer that has to be measured; sums, values side by side and chains
are those of every other graph, and propagated by the same code.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import nn

from gramcert.arguments import require_finite
from gramcert.certified.choose import certified_convolution
from gramcert.geometry.convolution import LAYERS
from gramcert.geometry.recognition import require_known, require_steady, unwrapped
from gramcert.nn.torch_layers import describe_torch_layer
from gramcert.operators.graph import Builder, Graph, Nonlinear, Variable
from gramcert.operators.measurement import Measurement, NormOfLayer
from gramcert.parametrizations import meant_norm


class Outline:
    """A graph without shapes, as modules describe themselves.

    Attributes:
        call: the function that errors name.
        b: what appends to the graph.
    """

    def __init__(self, call: str) -> None:
        self.call, self.b = call, Builder()

    @classmethod
    def of(cls, call: str, module: nn.Module) -> Graph:
        """The graph of a module."""
        outline = cls(call)
        outline.b.output("output", outline.module(outline.b.input("input", ()), module))
        return outline.b.graph

    def module(self, x: Variable, module: nn.Module) -> Variable:
        """What a module makes of a value; one that is not known is an error."""
        call = self.call
        module = unwrapped(call, module)
        require_steady(call, module)
        name = type(module).__name__
        self.b.at(name, name, [])
        if isinstance(module, torch.fx.GraphModule):
            raise TypeError(f"{call}({name}): a traced graph is not known as a layer{HINT}")
        kinds = [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module)]
        owner = next((kind for kind in kinds if "describe_operators" in vars(kind)), None)
        if isinstance(module, Described) and owner is not None:  # what an instance says of itself is not enough
            require_known(call, module, owner, "; a class of your own may have a describe_operators(outline, x)")
            return module.describe_operators(self, x)
        if isinstance(module, nn.Sequential):
            require_known(call, module, nn.Sequential)
            for part in module:
                x = self.module(x, part)
            return x
        if isinstance(module, (nn.Linear, *LAYERS)):
            layer = certified_convolution(call, module)
            require_finite(call, f"{name}.weight", layer.kernel)
            return self.b.layer(x, NormOfLayer(layer, meant=meant_norm(module)))
        require_known(call, module, type(module))
        return describe_torch_layer(call, self.b, x, module)

    def constant(self, x: Variable, constant: float, name: str) -> Variable:
        """A function with a known constant."""
        return self.b.nonlinear(x, Nonlinear(constant, name))

    def layer(self, x: Variable, measurement: Measurement) -> Variable:
        """A layer whose constant has to be measured."""
        return self.b.layer(x, measurement)


@runtime_checkable
class Described(Protocol):
    """A layer that says what it does."""

    def describe_operators(self, outline: Outline, x: Variable) -> Variable:
        """Append what it makes of a value."""


HINT = "; with input_shape=(3, 32, 32), the shape of one example, whatever torch can trace is followed"
