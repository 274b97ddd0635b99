"""``lipschitz_bound``: the certified constant of a module, from its weights as they are."""

from collections.abc import Sequence

from torch import Tensor, nn

from gramcert.arguments import Sizes, axis_sizes
from gramcert.auditing.reading import Source, shape_of_example
from gramcert.certified.choose import certified_convolution
from gramcert.geometry.convolution import LAYERS
from gramcert.geometry.recognition import unwrapped
from gramcert.nn.outline import Outline
from gramcert.operators.graph import Builder, Graph
from gramcert.operators.measurement import LayerNorm
from gramcert.operators.network import Network

# Of an input whose channels no layer tells: MaxMin, sorting and shuffling can take so many.
ANY_CHANNELS = 12

# Under which layers keep how many channels they take; other layers than convolutions come first in many networks.
_CHANNELS = ("in_channels", "channels", "num_features", "num_channels")


def lipschitz_bound(
    module: nn.Module, input_size: Sizes | None = None, *, input_shape: Sequence[int] | Tensor | None = None
) -> float:
    """Certified Lipschitz constant, in the l2 norm, of a module, rounded up.

    It is computed from the weights that the module uses now, with their rounding, and never assumed: a layer made to be
    1-Lipschitz has a constant such as 0.98 or 1 + 3e-8. It is about the module as a function of real numbers with these
    weights; the rounding of the evaluation itself is not in it.

    Without a size it holds at every input size, for layers of :mod:`gramcert.nn`, torch's layers and Sequentials of
    such, and is the product of their constants. With a size or a shape it is that of :func:`gramcert.audit`, for
    whatever torch can trace.

    Args:
        module: a layer or a network, parametrised or not. What has no constant is an error that says why.
        input_size: spatial size of the input, one int per axis or one for all; ``None`` is every size.
        input_shape: shape of one example without the batch, or an example with it; not together with ``input_size``.

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
    if input_size is not None and input_shape is not None:
        raise ValueError(f"{call}(input_size, input_shape): expected one of them, got both")
    network = Network(call, _graph(call, module, input_size, input_shape))
    network.require_bounded(f"{call}({type(module).__name__})")
    return network.follow().upper


def _graph(call: str, module: nn.Module, size: Sizes | None, shape: Sequence[int] | Tensor | None) -> Graph:
    if shape is not None:
        return Source.of(call, module).graph(call, shape_of_example(call, shape))
    if size is None:
        return Outline.of(call, module)
    kind = type(module).__name__
    axes = _axes(module)
    if axes is None:
        raise ValueError(f"{call}(input_size={size}): {kind} has no spatial size, expected None")
    sizes = axis_sizes(call, "input_size", size, axes, what=kind)
    inner = unwrapped(call, module)
    if isinstance(inner, LAYERS):  # tracing one layer would take longer than its norm
        layer = certified_convolution(call, inner)
        layer.output_size(sizes, call=call)
        b = Builder()
        x = b.input("input", ())
        b.at(type(inner).__name__, "layer", [])
        b.output("output", b.layer(x, LayerNorm(layer, sizes)))
        return b.graph
    return Source.of(call, module).graph(call, (_channels(module), *sizes), "input_size")


def _axes(module: nn.Module) -> int | None:
    """Number of spatial axes that the first layer with a fixed number of them takes."""
    for part in module.modules():
        if isinstance(part, LAYERS):
            return len(part.kernel_size)
        axes = getattr(part, "axes", None)
        if isinstance(axes, int):
            return axes
    return None


def _channels(module: nn.Module) -> int:
    """How many channels the first layer takes that says so."""
    for part in module.modules():
        for name in _CHANNELS:
            if isinstance(found := getattr(part, name, None), int):
                return found
        weight = getattr(part, "weight", None)
        if hasattr(part, "axes") and isinstance(weight, Tensor):  # a residual layer
            return weight.shape[1]
    return ANY_CHANNELS
