r"""The residual layer of Corollary 1 (SLL, Araujo et al., 2023): x ↦ x - 2WR²φ(Wᵀx + b), φ with slopes in [0, 1].

R rescales the inner channels, so that R·WᵀW·R ⪯ I. Then I - 2WR²DWᵀ with 0 <= D <= I has its eigenvalues between -1 and
1. With the absolute value, or with activations that exchange channels, the layer is not 1-Lipschitz: they are refused.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramcert.arguments import Sizes, axis_sizes, can_be_read, checked_iterations, require_finite, widened
from gramcert.bounds.layer import norm2
from gramcert.bounds.powers import positive
from gramcert.geometry.convolution import Convolution
from gramcert.geometry.recognition import require_known
from gramcert.nn.layer import expected, names_itself
from gramcert.nn.outline import Outline
from gramcert.operators import elementwise
from gramcert.operators.graph import Variable
from gramcert.operators.measurement import ResidualLayer
from gramcert.rescaling.vector import Form, check_choice, is_recorded, moderate, rescaling_of_all

Rescaling = Literal["sr", "aol", "sn"]

# exp of more would be out of the range of float32 after a product; any positive q is valid.
LARGEST_LOG_Q = 30.0

# Gram matrices up to so many entries are computed at once: larger ones gain nothing, and would all be in memory.
MOST_TOGETHER = 2**20


@dataclass(frozen=True)
class _Prepared:
    """-2R²Wᵀ of a layer, and the state of what it was made from."""

    weight: Tensor
    sources: tuple[tuple[Tensor, int, int, bool], ...]

    @classmethod
    def of(cls, layer: "_Residual", weight: Tensor) -> "_Prepared":
        """With the parameters of the layer as they are."""
        return cls(weight, tuple(_state(each) for each in layer.sources()))

    def is_of(self, layer: "_Residual") -> bool:
        """Whether a layer may use it: with these very parameters, not written to, and with a graph to those trained."""
        if self.weight.is_inference() and not torch.is_inference_mode_enabled():
            return False
        return all(
            source is kept and state == other and trained <= covered
            for (source, *state, trained), (kept, *other, covered) in zip(
                map(_state, layer.sources()), self.sources, strict=True
            )
        )


def _state(parameter: Tensor) -> tuple[Tensor, int, int, bool]:
    if parameter.is_inference() or not can_be_read(parameter):  # without these numbers
        return parameter, 0, 0, torch.is_grad_enabled()
    return parameter, parameter._version, parameter.data_ptr(), torch.is_grad_enabled() and parameter.requires_grad


class _Inside(threading.local):
    """What :func:`together` has computed for the layers inside it: each thread its own, as each has its own graph."""

    def __init__(self) -> None:
        self.layers: WeakKeyDictionary[nn.Module, _Prepared] = WeakKeyDictionary()


_INSIDE = _Inside()

_CONVOLVE = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSE = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_CONV: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONV_TRANSPOSE: tuple[type[nn.Module], ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class _Residual(nn.Module):
    """What the dense and the convolutional layer share: the inner weight (hidden, channels, *taps), b, q and R."""

    def __init__(
        self,
        shape: tuple[int, ...],
        padding: tuple[int, ...],
        activation: nn.Module | None,
        rescaling: Rescaling,
        iterations: int | None,
        form: Form,
        input_size: tuple[int, ...] | None,
        device: torch.device | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_choice(name, "rescaling", rescaling, get_args(Rescaling))
        check_choice(name, "form", form, get_args(Form))
        if rescaling == "aol" and iterations not in (None, 1):
            raise ValueError(f"{name}(iterations={iterations}): rescaling='aol' is one iteration; use 'sr' for more")
        default = {"sr": 3, "aol": 1, "sn": 6}[rescaling]
        self.iterations = checked_iterations(name, default if iterations is None else iterations, at_least=1)
        self.rescaling, self.form, self.padding, self.input_size = rescaling, form, padding, input_size
        self.activation = nn.ReLU() if activation is None else _checked(name, activation)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype))
        # q = exp(log_q) acts on the sums of R, and is trained with the weight; a norm has no use for it.
        self.log_q: nn.Parameter | None = None
        if rescaling != "sn":
            self.log_q = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gaussian weights (their size does not matter, R removes it), uniform biases, q = 1."""
        nn.init.xavier_normal_(self.weight)
        bound = 1 / math.sqrt(self.weight[0].numel())
        nn.init.uniform_(self.bias, -bound, bound)
        if self.log_q is not None:
            nn.init.zeros_(self.log_q)

    def outer_weight(self) -> Tensor:
        """2R²Wᵀ, the weight that leads back to the channels, in the layout of the inner one."""
        return -_negative_outer_weights([self])[0]

    def _negative_outer_weight(self) -> Tensor:
        """-2R²Wᵀ: a sum with it spares the negative of a whole batch in the backward pass."""
        if not (torch.compiler.is_compiling() or is_recorded()):
            prepared = _INSIDE.layers.get(self)
            if prepared is not None and prepared.is_of(self):
                return prepared.weight
        return _negative_outer_weights([self])[0]

    def sources(self) -> list[Tensor]:
        """What R depends on."""
        return [self.weight] if self.log_q is None else [self.weight, self.log_q]

    def likeness(self) -> tuple[object, ...]:
        """What layers have in common whose weights can be computed at once."""
        kind = (type(self), self.weight.shape, self.weight.dtype, self.weight.device)
        return *kind, self.padding, self.rescaling, self.iterations, self.form, self.input_size

    def _convolution(self, weight: Tensor) -> Convolution:
        """A weight as a convolution from the channels to the hidden ones."""
        return Convolution(weight, padding=self.padding) if self.padding else Convolution(weight[:, :, None])

    def describe_operators(self, outline: Outline, x: Variable) -> Variable:
        """The theorem of the residual layer, with the weights as they are."""
        call = outline.call
        require_known(call, self.activation, type(self.activation))
        _checked(call, self.activation)
        with torch.no_grad():
            inner = self._convolution(widened(self.weight.detach()))
            outer = widened(self.outer_weight()).reshape(inner.kernel.shape)
        for weight in (inner.kernel, outer):
            require_finite(call, type(self).__name__, weight)
        return outline.layer(x, ResidualLayer(inner, outer, None))

    def extra_repr(self) -> str:
        """For printing."""
        hidden, channels, *taps = self.weight.shape
        shape = f"{channels}, hidden={hidden}" + (f", kernel_size={tuple(taps)}" if taps else "")
        size = "" if self.input_size is None else f", input_size={self.input_size}"
        return f"{shape}, rescaling={self.rescaling!r}, iterations={self.iterations}, form={self.form!r}{size}"


@names_itself
class SLLLinear(_Residual):
    r"""x ↦ x - 2WR²φ(Wᵀx + b) on vectors.

    Args:
        features: inputs and outputs.
        hidden: inner width.
        activation: φ, elementwise with slopes in [0, 1]: ReLU (the default), Tanh, Sigmoid and the like; others are
            refused.
        rescaling: ``"sr"``, ``"aol"`` (one iteration) or ``"sn"``, R = 1/‖W‖, which is the CPL layer of Meunier et al.
            (2022).
        iterations: t of the rescaling, 3 for ``"sr"``; number of Gram products for ``"sn"``, 6.
        device: where the parameters are.
        dtype: their type.

    Example:
        >>> import torch, gramcert
        >>> layer = gramcert.nn.SLLLinear(16, 32)
        >>> layer(torch.ones(2, 16)).shape
        torch.Size([2, 16])
        >>> 1 <= gramcert.lipschitz_bound(layer) <= 1 + 1e-6
        True
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        activation: nn.Module | None = None,
        *,
        rescaling: Rescaling = "sr",
        iterations: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = axis_sizes("SLLLinear", "hidden, features", (hidden, features), 2)
        super().__init__(shape, (), activation, rescaling, iterations, "spatial", None, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """On inputs (..., features)."""
        if x.shape[-1] != self.weight.shape[1]:
            raise expected(self, f"(..., {self.weight.shape[1]})", x)
        hidden = self.activation(F.linear(x, self.weight, self.bias))
        return x + F.linear(hidden, self._negative_outer_weight().mT)

    def plain(self) -> nn.Module:
        """Torch's own layers with the weights as they are."""
        hidden, features = self.weight.shape
        options = {"device": self.weight.device, "dtype": self.weight.dtype}
        inner = nn.utils.skip_init(nn.Linear, features, hidden, **options)
        outer = nn.utils.skip_init(nn.Linear, hidden, features, bias=False, **options)
        return _plain(self, inner, outer, self.outer_weight().mT)


@names_itself
class _ResidualConv(_Residual):
    """x ↦ x - 2WR²φ(Wᵀx + b) on images; zero padding, stride 1."""

    axes = 0

    def __init__(
        self,
        channels: int,
        hidden: int,
        kernel_size: Sizes,
        activation: nn.Module | None = None,
        *,
        rescaling: Rescaling = "sr",
        iterations: int | None = None,
        form: Form = "spatial",
        input_size: Sizes | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        width = axis_sizes(name, "hidden, channels", (hidden, channels), 2)
        taps = axis_sizes(name, "kernel_size", kernel_size, self.axes, what=name)
        size = None if input_size is None else axis_sizes(name, "input_size", input_size, self.axes, what=name)
        padding = tuple(k // 2 for k in taps)
        super().__init__((*width, *taps), padding, activation, rescaling, iterations, form, size, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """On inputs (batch, channels, *sizes)."""
        if x.dim() != self.axes + 2 or x.shape[1] != self.weight.shape[1]:
            raise expected(self, f"(batch, {self.weight.shape[1]}, {self.axes} sizes)", x)
        if self.input_size is not None and tuple(x.shape[2:]) != self.input_size:
            raise expected(self, f"the input_size {self.input_size} that it was made for", x)
        convolve, transpose = _CONVOLVE[self.axes - 1], _TRANSPOSE[self.axes - 1]
        hidden = self.activation(convolve(x, self.weight, self.bias, padding=self.padding))
        result: Tensor = x + transpose(hidden, self._negative_outer_weight(), padding=self.padding)
        return result

    def plain(self) -> nn.Module:
        """Torch's own layers with the weights as they are."""
        hidden, channels, *taps = self.weight.shape
        options = {"padding": self.padding, "device": self.weight.device, "dtype": self.weight.dtype}
        inner = nn.utils.skip_init(_CONV[self.axes - 1], channels, hidden, tuple(taps), **options)
        outer = nn.utils.skip_init(_CONV_TRANSPOSE[self.axes - 1], hidden, channels, tuple(taps), bias=False, **options)
        return _plain(self, inner, outer, self.outer_weight())


class SLLConv1d(_ResidualConv):
    """The layer of :class:`SLLConv2d` on sequences."""

    axes = 1


class SLLConv2d(_ResidualConv):
    r"""x ↦ x - 2WR²φ(Wᵀx + b) on images, zero padding, stride 1.

    Args:
        channels: of input and output.
        hidden: inner channels, on which R and the trainable q act.
        kernel_size: int or one per axis; odd sizes keep the size of the image inside, even ones add one place.
        activation: φ, elementwise with slopes in [0, 1]: ReLU (the default), Tanh, Sigmoid and the like; others are
            refused.
        rescaling: ``"sr"``, ``"aol"`` (one iteration) or ``"sn"``, R = 1/‖W‖, which is the CPL layer of Meunier et al.
            (2022).
        iterations: t of the rescaling, 3 for ``"sr"``; number of Gram products for ``"sn"``, 6.
        form: ``"spatial"`` or ``"frequency"``; see :func:`gramcert.rescaling.rescaling_vector`.
        input_size: the one size the layer will be used at, or ``None`` for every size.
        device: where the parameters are.
        dtype: their type.

    Example:
        >>> import torch, gramcert
        >>> layer = gramcert.nn.SLLConv2d(8, 16, 3, form="frequency", iterations=2)
        >>> layer(torch.ones(1, 8, 6, 6)).shape
        torch.Size([1, 8, 6, 6])
        >>> 1 <= gramcert.lipschitz_bound(layer) <= 1 + 1e-6
        True
    """

    axes = 2


class SLLConv3d(_ResidualConv):
    """The layer of :class:`SLLConv2d` on volumes."""

    axes = 3


@contextmanager
def together(model: nn.Module) -> Iterator[None]:
    """Within it the residual layers of a model use weights computed at its beginning, those of equal layers at once.

    R of many small layers costs little more than that of one, so a step of training is faster inside; the backward pass
    may come later, but if parts of the model are checkpoints, which run again. One backward pass: several need
    ``retain_graph=True``, as in torch's ``parametrize.cached``. Layers whose parameters are replaced or written to
    inside compute their weights again; what is written to ``parameter.data`` is not seen. Other threads are outside.

    Example:
        >>> import torch, gramcert
        >>> model = torch.nn.Sequential(*(gramcert.nn.SLLLinear(16, 32) for _ in range(3)))
        >>> x = torch.ones(2, 16)
        >>> with gramcert.nn.together(model):
        ...     y = model(x)
        >>> torch.allclose(y, model(x), atol=1e-6)
        True
    """
    inside = _INSIDE.layers
    families: dict[tuple[object, ...], list[_Residual]] = {}
    for layer in model.modules():
        if isinstance(layer, _Residual):
            before = inside.get(layer)
            if before is None or not before.is_of(layer):
                families.setdefault(layer.likeness(), []).append(layer)
    entered = [(layer, inside.get(layer)) for layers in families.values() for layer in layers]
    try:
        for layers in families.values():
            each = max(1, MOST_TOGETHER // layers[0].weight.shape[0] ** 2)
            for some in (layers[start : start + each] for start in range(0, len(layers), each)):
                for layer, weight in zip(some, _negative_outer_weights(some), strict=True):
                    inside[layer] = _Prepared.of(layer, weight)
        yield
    finally:
        for layer, before in entered:
            inside.pop(layer, None)
            if before is not None:
                inside[layer] = before


def _negative_outer_weights(layers: Sequence[_Residual]) -> list[Tensor]:
    """-2R²Wᵀ of layers of one likeness.

    R of W/s is s·R, whatever the scale s. Computed so, nothing overflows: R² alone might.
    """
    name = type(layers[0]).__name__
    weights, scales = zip(*(moderate(name, widened(layer.weight)) for layer in layers), strict=True)
    results = []
    for layer, weight, scale, factors in zip(layers, weights, scales, _factors(layers, weights), strict=True):
        outer = (-2 * factors.square()).reshape(-1, *(1,) * (weight.dim() - 1)) * weight
        results.append((outer if scale is None else outer / scale).to(layer.weight.dtype))
    return results


def _factors(layers: Sequence[_Residual], weights: Sequence[Tensor]) -> list[Tensor]:
    """R of the weights of layers of one likeness, one factor per hidden channel, in float32 or better."""
    first = layers[0]
    alike = first._convolution(weights[0])
    inner = [alike.with_kernel(weight.reshape(alike.kernel.shape)) for weight in weights]
    if first.rescaling == "sn":
        norms = [norm2(each, first.input_size, first.iterations) for each in inner]
        return [torch.where(norm == 0, 0.0, 1 / positive(norm)).expand(len(first.bias)) for norm in norms]
    logs = torch.stack([widened(layer.log_q) for layer in layers if layer.log_q is not None])
    return rescaling_of_all(
        inner,
        first.iterations,
        q=torch.exp(logs.clamp(-LARGEST_LOG_Q, LARGEST_LOG_Q)).unbind(),
        form=first.form,
        input_size=first.input_size,
        side="output",
        call=type(first).__name__,
    )


def _checked(name: str, activation: nn.Module) -> nn.Module:
    if not isinstance(activation, nn.Module):
        raise TypeError(f"{name}(activation): expected a torch.nn.Module, got {activation!r}")
    bounds = elementwise.of_module(activation)
    # Slopes that are trained may leave [0, 1], and torch's Softplus jumps at its threshold.
    changes = isinstance(activation, (nn.PReLU, nn.Softplus))
    if changes or bounds is None or isinstance(bounds, str) or bounds[0] < 0 or bounds[1] > 1:
        raise ValueError(
            f"{name}(activation={activation}): the residual layer is 1-Lipschitz only for elementwise activations with "
            f"slopes in [0, 1], such as ReLU, LeakyReLU, Tanh or Sigmoid"
        )
    return activation


def _plain(layer: _Residual, inner: nn.Module, outer: nn.Module, outer_weight: Tensor) -> nn.Module:
    """inner, activation, outer and the difference, as a graph of torch's layers."""
    with torch.no_grad():
        inner.weight.copy_(layer.weight)  # type: ignore[operator]
        inner.bias.copy_(layer.bias)  # type: ignore[operator]
        outer.weight.copy_(outer_weight)  # type: ignore[operator]
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    hidden = graph.call_module("activation", (graph.call_module("inner", (x,)),))
    graph.output(graph.call_function(torch.sub, (x, graph.call_module("outer", (hidden,)))))
    parts = {"inner": inner, "activation": layer.activation, "outer": outer}
    return torch.fx.GraphModule(parts, graph, type(layer).__name__)
