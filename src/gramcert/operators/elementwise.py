r"""Functions of each entry alone: between which numbers their slopes lie, on all reals, or why there is no bound.

A new one is one entry of :data:`TABLE`. Readers of files and of modules find it there by its name, which is that of
torch's operator, and hand over the parameters that it has; the same operator evaluates it in float64.

Slopes of x·g(x) with g a sigmoid, erf or the like do not depend on the scale k in x·g(kx): with t = kx the slope is
g(t) + t·g'(t). The numbers are the extrema of these, rounded outward; ``tests/operators/test_elementwise.py`` computes
them again with ball arithmetic.
"""

import builtins
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramcert.exact import exact
from gramcert.operators.rounded import Compute, Rounded, exactly, norms
from gramcert.rounding import gamma, next_up, root_up, underflow, up

Slopes = tuple[float, float]
Number = float | Tensor  # a tensor where there is one for each channel

SILU: Slopes = (-0.09983932012886695, 1.0998393201288673)
GELU: Slopes = (-0.12890414518515484, 1.1289041451851552)  # exact at t = ±1: (1 + erf 1)/2 + 1/(e·√π)
GELU_TANH: Slopes = (-0.12899306865877183, 1.1289930686587722)
# The same with numbers that are off by a few digits: see polynomials.py.
GELU_BY_TANH: Slopes = (-0.1289935, 1.1289935)
MISH: Slopes = (-0.1125261223894626, 1.0884981612517283)
ERF: Slopes = (0.0, 1.128379167095513)  # 2/√π
# Torch takes 1/6 rounded to float32, which is above it, whatever the type of the input.
SIXTH = 0.1666666716337204
HARDSWISH: Slopes = (-3 * SIXTH, 9 * SIXTH)  # x·(x + 3)/6 at -3 and 3; both products are exact
# Torch's numbers for SELU.
SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805

_UNIT: Slopes = (0.0, 1.0)
_SIGNED: Slopes = (-1.0, 1.0)


@dataclass(frozen=True)
class Pieces:
    """A continuous function that is slopes[k]·x + offsets[k] between breaks[k - 1] and breaks[k], to the last bit."""

    breaks: tuple[float, ...]
    slopes: tuple[Number, ...]
    offsets: tuple[float, ...]


@dataclass(frozen=True)
class Curvature:
    """Between which numbers the slopes of the slope lie; the slope itself does not jump."""

    least: float
    most: float


# What is known of a function near a point: that it is one of some piecewise linear ones, or how it bends.
Local = tuple[Pieces, ...] | Curvature | None

_SOFTPLUS = (
    "softplus is taken as log(1 + e^x); torch's switch to the identity above its threshold, at least 20, changes "
    "values by less than 5e-9 and counts as rounding"
)


@dataclass(frozen=True)
class Function:
    """What is known of a function of each entry.

    Attributes:
        slopes: between which its slopes lie, or why there is no bound; where it has parameters, a function of them.
        module: torch's layer.
        parameters: names, which are those of torch's layer and operator, and defaults.
        assumed: what its slopes rest on.
        compute: its values, where that is not torch's operator of its name with its parameters.
        is_exact: whether it only selects, negates or drops numbers, and so rounds nothing.
        local: what is known of it near a point; where it has parameters, a function of them.
    """

    slopes: Slopes | str | Callable[..., Slopes | str]
    module: type[nn.Module] | None = None
    parameters: Mapping[str, Number] = field(default_factory=dict)
    assumed: str = ""
    compute: Callable[..., Tensor] | None = None
    is_exact: bool = False
    local: "Local | Callable[..., Local]" = None

    def local_for(self, parameters: Mapping[str, Number]) -> Local:
        """What is known near a point, for parameters or for their defaults."""
        return self.local(**{**self.parameters, **parameters}) if callable(self.local) else self.local

    def slopes_for(self, parameters: Mapping[str, Number]) -> Slopes | str:
        """The slopes for parameters, or for their defaults."""
        if not callable(self.slopes):
            return self.slopes
        given = {**self.parameters, **parameters}
        if not all(map(_is_finite, given.values())):  # which min and max would not show
            return "a parameter that is not finite"
        slopes = self.slopes(**given)
        return slopes if isinstance(slopes, str) or all(map(math.isfinite, slopes)) else "its slopes are too large"


def leaky(negative_slope: float) -> Slopes:
    """max(x, 0) + slope·min(x, 0); the slope may be rounded to float32 where the input is."""
    both = (negative_slope, _float32(negative_slope))
    return min(1.0, *both), max(1.0, *both)


def random_leaky(lower: float, upper: float) -> Slopes:
    """In evaluation mode, the mean of both."""
    return leaky((lower + upper) / 2)


def prelu(weight: Number) -> Slopes:
    """One slope for all channels or one for each, of the type that the model runs in."""
    weight = torch.as_tensor(weight, dtype=torch.float64)
    return min(1.0, float(weight.min())), max(1.0, float(weight.max()))


def elu(alpha: float, scale: float, input_scale: float) -> Slopes | str:
    """scale·x above 0, scale·α(e^(βx) - 1) below: slopes scale, and between 0 and scale·α·β."""
    if input_scale < 0:
        return "its slope grows"
    below = _product(_product(alpha, scale), input_scale)
    return min(0.0, scale, _float32(scale), below), max(0.0, scale, _float32(scale), below)


def celu(alpha: float) -> Slopes | str:
    """Slope e^(x/α) below 0."""
    return _UNIT if alpha > 0 else "its alpha is not positive"


def softplus(beta: float, threshold: float) -> Slopes | str:
    """log(1 + e^(βx))/β; torch takes x itself where βx is above the threshold: a jump by log(1 + e^-threshold)/β."""
    if beta <= 0:
        return "its beta is not positive"
    if threshold < 20 or beta < 0.5:  # from there on it is below 5e-9, and counts as rounding
        return f"it jumps at its threshold {threshold:g} with beta {beta:g}"
    return _UNIT


def threshold(threshold: float, value: float) -> Slopes | str:
    """The value itself above the threshold, a number elsewhere."""
    return _UNIT if threshold == value else "it jumps"


def hard_sigmoid(alpha: float, beta: float = 0.5) -> Slopes:
    """clamp(αx + β, 0, 1)."""
    return min(0.0, alpha), max(0.0, alpha)


def gated_clamp(shift: float, min: float, max: float) -> Slopes | str:
    r"""x·clamp(kx + s, a, b), which is 6·hardswish for s = 3, a = 0, b = 6.

    With t = kx the slope is a, b, or 2t + s between t = a - s and b - s. The shift may be off by a few roundings.
    """
    if min > max:
        return "limits in the wrong order"
    slopes = (min, max, 2 * min - shift, 2 * max - shift)
    off = up(2.0**-48 * sum(map(abs, (shift, min, max))))
    return builtins.min(slopes) - off, builtins.max(slopes) + off


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def bent(*points: tuple[float, Number], offset: float = 0.0) -> tuple[Pieces, ...]:
    """One function by the slope before its first break, (-inf, slope), and the slope behind each break."""
    (_, first), *others = points
    offsets, slopes = [offset], [first]
    for place, slope in others:
        # Slopes are 0 and 1, or the break is at 0: nothing here is rounded.
        offsets.append(offsets[-1] + float(slopes[-1] - slope) * place if place else offsets[-1])
        slopes.append(slope)
    return (Pieces(tuple(place for place, _ in others), tuple(slopes), tuple(offsets)),)


def bent_leaky(negative_slope: float) -> Local:
    """With the slope as it is written, and as it is in float32."""
    both = dict.fromkeys((negative_slope, _float32(negative_slope)))
    return tuple(piece for slope in both for piece in bent((-math.inf, slope), (0.0, 1.0)))


def bent_clamp(min: float = -math.inf, max: float = math.inf) -> Local:
    """Between two limits, of which one may be missing."""
    if not min <= max or min == math.inf or max == -math.inf:
        return None
    if any(_float32(limit) != limit for limit in (min, max)):  # which a model may round
        return None
    rising = [(min, 1.0)] if math.isfinite(min) else []
    level = [(max, 0.0)] if math.isfinite(max) else []
    points = [(-math.inf, 0.0 if rising else 1.0), *rising, *level]
    return bent(*points, offset=min if rising else 0.0)


def bent_elu(alpha: float, scale: float, input_scale: float) -> Local:
    """e^x - 1 below 0; with other numbers its slope jumps at 0."""
    return Curvature(0.0, 1.0) if alpha == scale == input_scale == 1 else None


def bent_celu(alpha: float) -> Local:
    """α(e^(x/α) - 1) below 0."""
    return Curvature(0.0, up(1 / alpha)) if _float32(alpha) == alpha else None


def bent_softplus(beta: float, threshold: float) -> Local:
    """Its slope is a sigmoid."""
    return Curvature(0.0, beta / 4) if _float32(beta) == beta else None


# Torch's elementwise operators in float64: |computed - true| <= γ_ULPS·g·(1 + |x| + |f(x)|) in each entry, where g is
# the product of 1 + |p| over the parameters. So far does f move by a parameter, too: |Δf| <= 4g·|Δp|·(1 + |x|).
ULPS = 64
ELEMENTARY = (
    "elementary functions of torch in float64 (exp, tanh, erf and the like) are within 64 unit roundoffs of "
    "1 + |x| + |f(x)|"
)


TABLE: dict[str, Function] = {
    "identity": Function((1.0, 1.0), nn.Identity, compute=lambda x: x, is_exact=True, local=bent((-math.inf, 1.0))),
    "relu": Function(_UNIT, nn.ReLU, is_exact=True, local=bent_clamp(0.0)),
    "relu6": Function(_UNIT, nn.ReLU6, is_exact=True, local=bent_clamp(0.0, 6.0)),
    "hardtanh": Function(
        _UNIT,
        nn.Hardtanh,
        {"min_val": -1.0, "max_val": 1.0},
        is_exact=True,
        local=lambda min_val, max_val: bent_clamp(min_val, max_val),
    ),
    "clamp": Function(_UNIT, parameters={"min": -math.inf, "max": math.inf}, is_exact=True, local=bent_clamp),
    "gated clamp": Function(gated_clamp, parameters={"shift": 3.0, "min": 0.0, "max": 6.0}),
    "leaky_relu": Function(leaky, nn.LeakyReLU, {"negative_slope": 0.01}, local=bent_leaky),
    "rrelu": Function(
        random_leaky,
        nn.RReLU,
        {"lower": 1 / 8, "upper": 1 / 3},
        compute=lambda x, lower, upper: F.leaky_relu(x, (lower + upper) / 2),
    ),
    "prelu": Function(prelu, nn.PReLU, {"weight": 0.25}, local=lambda weight: bent((-math.inf, weight), (0.0, 1.0))),
    "threshold": Function(threshold, nn.Threshold, {"threshold": 0.0, "value": 0.0}),
    "elu": Function(elu, nn.ELU, {"alpha": 1.0, "scale": 1.0, "input_scale": 1.0}, local=bent_elu),
    "selu": Function(
        elu, nn.SELU, {"alpha": SELU_ALPHA, "scale": SELU_SCALE, "input_scale": 1.0}, compute=torch.ops.aten.elu
    ),
    "celu": Function(celu, nn.CELU, {"alpha": 1.0}, local=bent_celu),
    "softplus": Function(softplus, nn.Softplus, {"beta": 1.0, "threshold": 20.0}, _SOFTPLUS, local=bent_softplus),
    "tanh": Function(_UNIT, nn.Tanh, local=Curvature(-0.7698004, 0.7698004)),
    "softsign": Function(_UNIT, nn.Softsign, compute=F.softsign, local=Curvature(-2.0, 2.0)),
    "log_sigmoid": Function(_UNIT, nn.LogSigmoid, local=Curvature(-0.25, 0.0)),
    "softshrink": Function(_UNIT, nn.Softshrink, {"lambd": 0.5}),
    "tanhshrink": Function(_UNIT, nn.Tanhshrink, compute=F.tanhshrink, local=Curvature(-0.7698004, 0.7698004)),
    "sigmoid": Function((0.0, 0.25), nn.Sigmoid, local=Curvature(-0.0962251, 0.0962251)),
    "hardsigmoid": Function(
        hard_sigmoid, nn.Hardsigmoid, {"alpha": SIXTH}, compute=lambda x, alpha: (alpha * x + 0.5).clamp(0, 1)
    ),
    "hard sigmoid": Function(  # with another β than ½
        hard_sigmoid,
        parameters={"alpha": 0.2, "beta": 0.5},
        compute=lambda x, alpha, beta: (alpha * x + beta).clamp(0, 1),
    ),
    "hardswish": Function(HARDSWISH, nn.Hardswish),
    "silu": Function(SILU, nn.SiLU, local=Curvature(-0.03692, 0.5)),
    "gelu": Function(GELU, nn.GELU, local=Curvature(-0.10799, 0.79789)),
    "gelu_tanh": Function(
        GELU_TANH, compute=lambda x: F.gelu(x, approximate="tanh"), local=Curvature(-0.10799, 0.79789)
    ),
    "gelu by tanh": Function(GELU_BY_TANH),
    "mish": Function(MISH, nn.Mish, assumed=_SOFTPLUS, local=Curvature(-0.05904, 0.64421)),
    "erf": Function(ERF, local=Curvature(-0.96789, 0.96789)),
    "abs": Function(_SIGNED, is_exact=True, local=bent((-math.inf, -1.0), (0.0, 1.0))),
    "sin": Function(_SIGNED, local=Curvature(-1.0, 1.0)),
    "cos": Function(_SIGNED, local=Curvature(-1.0, 1.0)),
    "atan": Function(_UNIT, local=Curvature(-0.64952, 0.64952)),
    "asinh": Function(_UNIT, local=Curvature(-0.38491, 0.38491)),
    "exp": Function("its slope e^x is unbounded"),
    "log": Function("its slope 1/x is unbounded near 0"),
    "sqrt": Function("its slope is unbounded near 0"),
    "rsqrt": Function("its slope is unbounded near 0"),
    "reciprocal": Function("its slope is unbounded near 0"),
    "square": Function("its slope 2x is unbounded"),
    "pow": Function("powers have unbounded slopes"),
    "tan": Function("its slope is unbounded"),
    "sign": Function("it jumps"),
    "floor": Function("it jumps"),
    "ceil": Function("it jumps"),
    "round": Function("it jumps"),
    "hardshrink": Function("it jumps", nn.Hardshrink),
}


def computing(name: str, parameters: Mapping[str, Number]) -> Compute | None:
    """How a function of the table is evaluated; ``None`` where it is not known with numbers alone."""
    function = TABLE[name]
    given = {**function.parameters, **parameters}
    operator = function.compute or getattr(torch.ops.aten, name, None)
    if operator is None or any(isinstance(number, Tensor) for number in given.values()):
        return None
    numbers = [float(number) for number in given.values() if math.isfinite(number)]
    if name == "rrelu":  # whose slope is their mean
        numbers.append(sum(numbers) / 2)
    gain = up(math.prod(1 + abs(number) for number in numbers) * (1 + gamma(2 * len(numbers))))
    off = sum(map(_off, numbers))
    if name in ("hardswish", "hardsigmoid"):  # of which a network in float64 takes another sixth
        off += 6 * (SIXTH - 1 / 6)
    moved = up(up(4 * gain) * up(off)) if off else 0.0
    # Softplus is log(1 + e^x), and torch's switch to x at its threshold a jump away from it.
    if name == "softplus":
        moved = up(moved + 2 * math.exp(-float(given["threshold"])) / float(given["beta"]))
    return lambda x: evaluated(x, operator(x, **given), 0.0 if function.is_exact else gain, moved)


def evaluated(x: Tensor, y: Tensor, gain: float = 1.0, moved: float = 0.0) -> Rounded:
    """Values with γ·gain·(1 + |x| + |y|) for their rounding, and moved·(1 + |x|) for that of their parameters."""
    if not gain and not moved:
        return exactly(y)
    unit = up(gamma(ULPS) * gain) if gain else 0.0
    length = next_up(norms(x) + root_up(float(x[0].numel())))
    both = next_up(next_up(length * up(unit + moved)) + next_up(norms(y) * unit))
    return y, next_up(both + underflow(ULPS * x[0].numel()))


_MODULES = {function.module: name for name, function in TABLE.items() if function.module is not None}


def of_module(module: nn.Module) -> Slopes | str | None:
    """Slopes of a layer of torch, or why it has none; ``None`` for any other class, subclasses of these included."""
    kind, options = type(module), vars(module)
    if kind not in _MODULES:
        return None
    if kind is nn.RReLU and module.training:
        return "in training mode its slope is random"
    name = "gelu_tanh" if options.get("approximate") == "tanh" else _MODULES[kind]
    numbers = [value for value in options.values() if isinstance(value, (float, np.floating, torch.Tensor))]
    if not all(math.isfinite(number) for number in numbers):
        return "a parameter that is not finite"
    function = TABLE[name]
    # Only what the class itself is made with: anybody may hang a `scale` on an ELU, which does not use it.
    used = {*inspect.signature(kind).parameters, "weight"} & function.parameters.keys()
    return function.slopes_for({parameter: _number(parameter, getattr(module, parameter)) for parameter in used})


def _number(name: str, value: Any) -> Number:
    """A parameter of a module, of any numeric type."""
    return value.detach().double() if isinstance(value, Tensor) and value.dim() else float(exact(name, value))


def _is_finite(value: Number) -> bool:
    return bool(torch.isfinite(torch.as_tensor(value, dtype=torch.float64)).all())


def _product(first: float, second: float) -> float:
    """Away from zero, and as large as that of the factors rounded to float32."""
    largest = max(abs(first), abs(_float32(first))) * max(abs(second), abs(_float32(second)))
    exactly = first in (1.0, 0.0) and second in (1.0, 0.0)
    return largest if exactly else math.copysign(up(largest), first * second)


def _off(number: float) -> float:
    """How far a number is from itself in float32, which it may be rounded to where the network runs."""
    rounded = _float32(number)
    return up(abs(number - rounded)) if rounded != number else 0.0
