"""``inverse_bound`` and ``invert``: the constant of the inverse of a network, and inverses with their error."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from gramcert.arguments import Sizes, require_finite
from gramcert.auditing.reading import shape_of_example
from gramcert.certification.bound import graph_of
from gramcert.certification.steps_back import NotInvertible, Step, steps_back
from gramcert.operators.evaluation import Evaluation, NotEvaluatedError
from gramcert.operators.graph import Graph
from gramcert.operators.network import Network
from gramcert.operators.rounded import norms, rounding
from gramcert.progress import Report, silent
from gramcert.rounding import checked_arithmetic, next_up, product_up


def inverse_bound(
    module: nn.Module, input_size: Sizes | None = None, *, input_shape: Sequence[int] | Tensor | None = None
) -> float:
    """Certified Lipschitz constant, in the l2 norm, of the inverse of a module, rounded up.

    A result proves that the module, as a function of real numbers with the weights as they are, is a bijection f with
    ‖f⁻¹(y) - f⁻¹(y')‖ <= constant·‖y - y'‖. Known are linear layers with as many outputs as inputs (1 over the smallest
    singular value), functions of each entry whose slopes stay away from 0, sums Ax + h(x) where the constant L of h is
    below the smallest singular value s of A (1/(s - L); for residual blocks 1/(1 - L)), and chains of such. Anything
    else, and whatever is not proved to be invertible, is a ``TypeError`` that says which layer and why. As everywhere,
    examples of a batch are taken to have nothing to do with each other (``docs/audit.md``).

    Args:
        module: a layer or a network.
        input_size: spatial size of the input, one int per axis or one for all; ``None`` is every size.
        input_shape: shape of one example without the batch, or an example with it; not together with ``input_size``.
            A module with a ``forward`` of its own needs it.

    Example:
        >>> import torch, gramcert
        >>> conv = torch.nn.Conv2d(3, 3, 3, padding=1)
        >>> with torch.no_grad():
        ...     _ = conv.weight.mul_(0.5 / gramcert.spectral_norm(conv).upper)
        >>> block = gramcert.nn.Residual(torch.nn.Sequential(conv, torch.nn.Tanh()), weight=None)  # x + tanh(conv(x))
        >>> 1.99 <= gramcert.inverse_bound(block) <= 2.001
        True
    """
    call = "inverse_bound"
    graph = graph_of(call, module, input_size, input_shape)
    with checked_arithmetic(call):
        return _constant(_steps(call, module, graph))


@dataclass(frozen=True)
class Inverse:
    """Inputs that a network maps to given outputs, nearly.

    Attributes:
        x: float64, one for each output.
        error: for each of them a certified bound of the distance from the one input that is mapped to that output.
        constant: that of the inverse.
    """

    x: Tensor
    error: Tensor
    constant: float


def invert(
    module: nn.Module, y: Tensor, *, input_shape: Sequence[int] | None = None, report: Report = silent
) -> Inverse:
    """The inputs that an invertible network maps to these outputs, each with a certified error.

    Steps are undone one after the other in float64: linear ones by solving, residual blocks by iterating
    x = y - h(x). However the x was found, with f(x) evaluated in float64 and its rounding bounded,
    ‖x - f⁻¹(y)‖ <= constant·‖f(x) - y‖ is proved, with the constant of :func:`inverse_bound`.

    Args:
        module: what :func:`inverse_bound` takes.
        y: a batch of outputs.
        input_shape: of one input without the batch, if it is not that of an output.
        report: told how many steps are undone, and of how many.

    Example:
        >>> import torch, gramcert
        >>> layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LeakyReLU(0.5))
        >>> with torch.no_grad():
        ...     _ = layer[0].weight.copy_(torch.eye(4) + 0.1)
        >>> x = torch.randn(2, 4)
        >>> found = gramcert.invert(layer, layer(x))
        >>> bool(((found.x - x).norm(dim=1) < 1e-5).all()), bool((found.error < 1e-12).all())
        (True, True)
    """
    call = "invert"
    if not isinstance(y, Tensor) or not y.is_floating_point() or y.dim() < 2:
        given = f"shape {tuple(y.shape)} of {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
        raise TypeError(f"{call}(y): expected a batch of outputs of floating point, got {given}")
    require_finite(call, "y", y)
    shape = tuple(y.shape[1:]) if input_shape is None else shape_of_example(call, input_shape)
    graph = graph_of(call, module, None, shape)
    with checked_arithmetic(call):
        steps = _steps(call, module, graph)
        constant = _constant(steps)
        network = Network(call, graph)
        (name,) = graph.outputs.values()
        expected = graph.nodes[name].shape[1:]
        if tuple(y.shape[1:]) != expected:
            raise ValueError(f"{call}(y): expected outputs of shape {expected}, got {tuple(y.shape[1:])}")
        try:
            evaluation = Evaluation(network.plan, network.measure)
        except NotEvaluatedError as error:
            raise TypeError(f"{call}(module): {error}") from None
        wanted = y.detach().cpu().double()[:, None]
        x = wanted
        for done, step in enumerate(steps):
            report("steps", done, len(steps))
            x = step.undo(x)
        report("steps", len(steps), len(steps))
        value, distance = evaluation(x, name)
        left = value - wanted
        size = norms(left)
        # The differences are rounded too.
        total = next_up(next_up(size + rounding(1, size, left)) + distance)
        return Inverse(x[:, 0], next_up(total * constant), constant)


def _steps(call: str, module: nn.Module, graph: Graph) -> list[Step]:
    try:
        return steps_back(f"{call}({type(module).__name__})", graph)
    except NotInvertible as error:
        raise TypeError(str(error)) from None


def _constant(steps: list[Step]) -> float:
    constant = 1.0
    for step in steps:
        constant = product_up(constant, step.inverse)
    return constant
