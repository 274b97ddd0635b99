"""``lipschitz_bound``: the certified constant of a module, from its weights as they are."""

from collections.abc import Sequence

from torch import Tensor, nn

from gramcert.arguments import Sizes, axis_sizes
from gramcert.auditing.reading import Source, shape_of_example
from gramcert.certification.network import constant_of
from gramcert.certified.choose import certified_convolution
from gramcert.geometry.convolution import LAYERS
from gramcert.geometry.recognition import unwrapped
from gramcert.nn.activations import Abs, GroupSort, MaxMin
from gramcert.nn.combining import Concatenation, Residual
from gramcert.nn.outline import Outline
from gramcert.nn.pooling import ScaledAvgPool, ScaledL2NormPool, Subsample
from gramcert.operators import elementwise
from gramcert.operators.graph import Builder, Graph
from gramcert.operators.measurement import NormOfLayer
from gramcert.operators.network import Network
from gramcert.parametrizations import meant_norm
from gramcert.rounding import checked_arithmetic

# Of an input whose channels no layer fixes: so many can be paired and sorted.
EVEN_CHANNELS = 12

# Layers that act on each channel alone, or sort them: their constant is the same for any number of channels.
_ANY_CHANNELS = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.Linear),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(Abs, GroupSort, MaxMin, ScaledAvgPool, ScaledL2NormPool, Subsample),
)


def lipschitz_bound(
    module: nn.Module, input_size: Sizes | None = None, *, input_shape: Sequence[int] | Tensor | None = None
) -> float:
    """Certified Lipschitz constant, in the l2 norm, of a module, rounded up.

    It is computed from the weights that the module uses now, with their rounding, and never assumed: a layer made to be
    1-Lipschitz has a constant such as 0.98 or 1 + 3e-8. It is about the module as a function of real numbers with these
    weights; the rounding of the evaluation itself is not in it.

    Without a size it holds at every input size, for layers of :mod:`gramcert.nn`, torch's layers and Sequentials of
    such, and is the product of their constants. With a size or a shape it is that of :func:`gramcert.audit`, with a
    short search for multipliers that depends on no clock, for whatever torch can trace.

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
    network = Network(call, graph_of(call, module, input_size, input_shape))
    network.require_bounded(f"{call}({type(module).__name__})")
    product = network.follow().upper
    if input_size is None and input_shape is None:  # forms need shapes
        return product
    with checked_arithmetic(call):
        return constant_of(network, product)


def graph_of(call: str, module: nn.Module, size: Sizes | None, shape: Sequence[int] | Tensor | None) -> Graph:
    """What a module computes, at one size, for inputs of one shape, or without shapes."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{call}(module): expected a torch.nn.Module, got {type(module).__name__}")
    if size is not None and shape is not None:
        raise ValueError(f"{call}(input_size, input_shape): expected one of them, got both")
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
        b.output("output", b.layer(x, NormOfLayer(layer, sizes, meant_norm(inner))))
        return b.graph
    return Source.of(call, module).graph(call, (_channels(call, module), *sizes), "input_size")


def _axes(module: nn.Module) -> int | None:
    """Number of spatial axes that the first layer with a fixed number of them takes."""
    for part in module.modules():
        if isinstance(part, LAYERS):
            return len(part.kernel_size)
        axes = getattr(part, "axes", None)
        if isinstance(axes, int):
            return axes
    return None


def _channels(call: str, module: nn.Module) -> int:
    """How many channels the first layer takes that fixes them; those before it take any number, with one constant."""
    waiting = [module]
    while waiting:
        part = unwrapped(call, waiting.pop(0))
        if isinstance(part, nn.Sequential):
            waiting = [*part, *waiting]
        elif isinstance(part, Residual):
            waiting = [part.module, *waiting]
        elif isinstance(part, Concatenation):
            waiting = [part.parts[0]]
        elif (found := _taken(part)) is not None:
            return found
        elif not isinstance(part, _ANY_CHANNELS) and elementwise.of_module(part) is None:
            kind = f"{type(part).__name__} does not say how many channels it takes"
            raise ValueError(f"{call}(input_size): {kind}; give input_shape, the shape of one example, instead")
    return EVEN_CHANNELS


def _taken(part: nn.Module) -> int | None:
    """How many channels a layer takes."""
    for name in ("in_channels", "channels", "num_features", "num_channels"):
        if isinstance(found := getattr(part, name, None), int):
            return found
    weight = getattr(part, "weight", None)
    is_residual = hasattr(part, "axes") and isinstance(weight, Tensor)
    return weight.shape[1] if is_residual else None  # type: ignore[union-attr]
