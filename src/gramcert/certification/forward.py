r"""A network evaluated in float64, with a bound of how far the computed values are from the exact ones.

The exact network is f = f_m ∘ … ∘ f_1 over the real numbers, with the weights as stored. Let x̂ be what was computed
before layer i, e >= ‖x̂ - x‖ its distance from the exact value, and δ >= ‖f̂_i(x̂) - f_i(x̂)‖ what rounding does inside
the layer. Then

    ‖f̂_i(x̂) - f_i(x)‖ <= δ + L_i·e,

L_i being the certified constant of the layer. Where L_i ≈ 1, errors add up and are never amplified, so this simple
recursion is tight enough: 1e-12 or so where margins are 0.1. The δ of each layer is in
:mod:`gramcert.certification.rounded`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gramcert.certification.rounded import Linear, Rounded, error, norms, own_type, rule
from gramcert.geometry.convolution import LAYERS, Convolution
from gramcert.geometry.recognition import require_known, unwrapped
from gramcert.nn.combining import Concatenation, Residual
from gramcert.nn.guarantee import constant_and_size
from gramcert.nn.residual import SLLConv1d, SLLConv2d, SLLConv3d, SLLLinear
from gramcert.nn.torch_layers import Size
from gramcert.rounding import next_up, product_up


@dataclass(frozen=True)
class Step:
    """A layer made ready.

    Attributes:
        name: what errors call it.
        constant: its certified constant.
        rounded: its computation.
    """

    name: str
    constant: float
    rounded: Rounded


@dataclass(frozen=True)
class CertifiedForward:
    """A chain of layers, made ready for inputs of one size.

    Attributes:
        steps: the layers.
        lipschitz: certified constant of the whole.
        size: spatial size of the output.
    """

    steps: tuple[Step, ...]
    lipschitz: float
    size: Size

    @classmethod
    def of(
        cls,
        call: str,
        modules: list[nn.Module],
        size: Size,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> "CertifiedForward":
        """Certify each layer's constant at this spatial size, and take its weights.

        Args:
            call: the function that errors name.
            modules: layers that follow each other.
            size: spatial size of the input, ``()`` if it has none.
            report: told how many layers of how many are done.
        """
        layers = open_chain(call, modules)
        steps, product = [], 1.0
        for number, layer in enumerate(layers, 1):
            constant, after = constant_and_size(call, layer, size)
            steps.append(Step(f"{call}({own_type(layer).__name__})", constant, _rounded(call, layer, size)))
            product, size = product_up(product, constant), after
            report(number, len(layers))
        return cls(tuple(steps), product, size)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Values of a float64 batch, and for each sample a bound of their distance from the exact ones."""
        distance = x.new_zeros(len(x))
        for step in self.steps:
            shape = tuple(x.shape)
            try:
                x, local = step.rounded(x)
            except (RuntimeError, IndexError) as error:  # how layers of torch refuse a shape
                reason = str(error).splitlines()[0]
                raise ValueError(f"{step.name}: inputs of shape {shape} do not fit ({reason})") from None
            # Where nothing was lost before, an infinite constant makes nothing of it.
            passed = torch.where(distance == 0, 0.0, next_up(distance * step.constant))
            distance = next_up(passed + local)
        return x, distance


def open_chain(call: str, modules: list[nn.Module]) -> list[nn.Module]:
    """Sequentials opened, whatever torch wrapped them in."""
    result = []
    for wrapped in modules:
        module = unwrapped(call, wrapped)
        if isinstance(module, nn.Sequential):
            require_known(call, module, nn.Sequential)
            result += open_chain(call, list(module))
        else:
            result.append(module)
    return result


def _rounded(call: str, layer: nn.Module, size: Size) -> Rounded:
    """The computation of a layer whose constant is known; without a rule for its rounding it is an error."""
    if isinstance(layer, (nn.Linear, *LAYERS)):
        linear, bias = Linear.of(call, layer, size), layer.bias
        assert bias is None or isinstance(bias, Tensor)
        return lambda x: linear(x, bias)
    # Exact classes only: a subclass with a guarantee of its own may compute something else.
    kind = own_type(layer)
    if kind in (SLLLinear, SLLConv1d, SLLConv2d, SLLConv3d):
        return _residual_layer(call, layer, size)
    if kind is Residual:
        return _residual(call, layer, size)
    if kind is Concatenation:
        return _concatenation(call, layer, size)
    known = rule(layer)
    if known is None:
        raise TypeError(f"{call}({kind.__name__}): how it rounds is not known, so nothing can be certified")
    return known


def _residual_layer(call: str, layer: Any, size: Size) -> Rounded:
    """In x - Vᵀφ(Wx + b) what rounding did in Wx + b and in φ passes through Vᵀ; the difference rounds once more."""
    with torch.no_grad():
        inner, outer = layer.weight, layer.outer_weight()
    activation = _rounded(call, layer.activation, size)
    name = f"{call}({own_type(layer).__name__})"
    if isinstance(layer, SLLLinear):
        into, back = Linear(name, inner, None), Linear(name, outer.mT, None)
    else:
        assert size is not None
        convolution = Convolution(inner.double(), padding=layer.padding)
        into = Linear(name, convolution, size)
        transposed = Convolution(outer.double(), padding=layer.padding, transposed=True)
        back = Linear(name, transposed, convolution.output_size(size, call=call))

    def apply(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden, first = into(x, layer.bias)
        hidden, second = activation(hidden)
        step, third = back(hidden)
        y = x - step
        passed = next_up(next_up(first + second) * back.norm)
        return y, next_up(next_up(passed + third) + error(1, norms(y), y))

    return apply


def _residual(call: str, layer: Any, size: Size) -> Rounded:
    """keep·x + weight·f(x): two products and a sum, and what happens in f."""
    inner = CertifiedForward.of(call, [layer.module], size)
    keep, weight = (1.0, 1.0) if layer.weight is None else (layer.keep, layer.weight)

    def apply(x: Tensor) -> tuple[Tensor, Tensor]:
        value, distance = inner(x)
        if value.shape != x.shape:
            shapes = f"{tuple(x.shape)} into {tuple(value.shape)}"
            raise ValueError(f"{call}(Residual): its module turns shape {shapes}, so they cannot be added")
        y = keep * x + weight * value
        amount = next_up(next_up(norms(x) * abs(keep)) + next_up(norms(value) * abs(weight)))
        return y, next_up(next_up(distance * abs(weight)) + error(2, amount, y))

    return apply


def _concatenation(call: str, layer: Any, size: Size) -> Rounded:
    """Parts side by side times a factor; together their errors are at most as long as the sum of the lengths."""
    parts = [CertifiedForward.of(call, [part], size) for part in layer.parts]
    factor = layer.factor

    def apply(x: Tensor) -> tuple[Tensor, Tensor]:
        total, values = x.new_zeros(len(x)), []
        for part in parts:
            value, distance = part(x)
            values.append(value)
            total = next_up(total + distance)
        y = factor * torch.cat(values, 1)
        return y, next_up(next_up(total * abs(factor)) + error(1, norms(y), y))

    return apply
