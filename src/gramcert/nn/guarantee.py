"""``lipschitz_bound``: the certified constant of a layer, from its weights as they are."""

from typing import Protocol, runtime_checkable

import torch
from torch import nn

from gramcert.arguments import Sizes, axis_sizes
from gramcert.certified.deployed import norm_upper
from gramcert.geometry.convolution import LAYERS, Convolution
from gramcert.geometry.recognition import require_known, require_steady, unwrapped
from gramcert.nn.layer import Layer
from gramcert.nn.torch_layers import Size, torch_constant
from gramcert.rounding import product_up


@runtime_checkable
class Guaranteed(Protocol):
    """A layer that knows its constant."""

    def guarantee(self, call: str, size: Size) -> tuple[float, Size]:
        """Its certified constant for inputs of a spatial size, or of every size; and the size of its output."""


def lipschitz_bound(module: nn.Module, input_size: Sizes | None = None) -> float:
    """Certified Lipschitz constant, in the l2 norm, of a layer or of a ``Sequential`` of layers, rounded up.

    It is computed from the weights that the layer uses now, with their rounding, and never assumed: a layer made to be
    1-Lipschitz has a constant such as 0.98 or 1 + 3e-8. It is about the layer as a function of real numbers with these
    weights; the rounding of the evaluation itself is not in it. A ``Sequential`` has the product of its layers.

    Args:
        module: a layer of :mod:`gramcert.nn`, ``nn.Linear``, a convolution of torch, parametrised or not, an
            elementwise activation, a pooling or reshaping layer of torch, or a ``Sequential`` of such. Anything else is
            an error.
        input_size: spatial size of the input, one int per axis or one for all; ``None`` is every size.

    Example:
        >>> import torch, gramcert
        >>> layer = torch.nn.Conv2d(1, 1, 3, padding=1, bias=False)
        >>> _ = torch.nn.init.ones_(layer.weight)
        >>> 9 <= gramcert.lipschitz_bound(layer) <= 9.01
        True
        >>> gramcert.lipschitz_bound(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Tanh()))
        1.0
    """
    call = "lipschitz_bound"
    if not isinstance(module, nn.Module):
        raise TypeError(f"{call}(module): expected a torch.nn.Module, got {type(module).__name__}")
    if input_size is None:
        return constant_and_size(call, module, None)[0]
    axes = _axes(module)
    if axes is None:
        raise ValueError(f"{call}(input_size={input_size}): {type(module).__name__} has no spatial size, expected None")
    return constant_and_size(
        call, module, axis_sizes(call, "input_size", input_size, axes, what=type(module).__name__)
    )[0]


def constant_and_size(call: str, module: nn.Module, size: Size) -> tuple[float, Size]:
    """The constant of a module and the spatial size of its output, from that of its input; ``None`` is every size."""
    module = unwrapped(call, module)
    require_steady(call, module)
    if isinstance(module, torch.fx.GraphModule):
        name = type(module).__name__
        raise TypeError(f"{call}({name}): a traced graph is not known as a layer; ask the model that it was made from")
    if isinstance(module, Guaranteed) and hasattr(type(module), "guarantee"):  # what an instance says is not enough
        _require_own_guarantee(call, module)
        if isinstance(module, Layer):
            module.require_shapes(call)
        return module.guarantee(call, size)
    if isinstance(module, nn.Sequential):
        require_known(call, module, nn.Sequential)
        return chain(call, list(module), size)
    if isinstance(module, nn.Linear):
        # It acts on the last axis, which it makes longer or shorter.
        return norm_upper(call, module, None), (*size[:-1], module.out_features) if size else size
    if isinstance(module, LAYERS):
        after = Convolution.of(module, call=call).output_size(size, call=call) if size else None
        return norm_upper(call, module, size), after
    require_known(call, module, type(module))
    return torch_constant(call, module, size)


def chain(call: str, modules: list[nn.Module], size: Size) -> tuple[float, Size]:
    """The product of the constants of layers that follow each other."""
    product = 1.0
    for module in modules:
        constant, size = constant_and_size(call, module, size)
        product = product_up(product, constant)
    return product, size


def _require_own_guarantee(call: str, module: nn.Module) -> None:
    """Refuse a layer that computes something else than the class that gives its guarantee."""
    owner = next(kind for kind in type(module).__mro__ if "guarantee" in vars(kind) and issubclass(kind, nn.Module))
    require_known(call, module, owner, "; a class of your own may have a guarantee(call, size)")


def _axes(module: nn.Module) -> int | None:
    """Number of spatial axes that the first layer with a fixed number of them takes."""
    for part in module.modules():
        if isinstance(part, LAYERS):
            return len(part.kernel_size)
        axes = getattr(part, "axes", None)
        if isinstance(axes, int):
            return axes
    return None
