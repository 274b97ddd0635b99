r"""Between which numbers the slopes of elementwise functions lie, on all reals; ``None`` where there is no bound.

Those of x·g(x) with g a sigmoid, erf or the like do not depend on the scale k in x·g(kx): with t = kx the slope is
g(t) + t·g'(t). The numbers are the extrema of these, rounded outward; ``tests/auditing/test_activations.py`` computes
them again with ball arithmetic.
"""

import math

import torch

from gramcert.rounding import up

Slopes = tuple[float, float]

SILU: Slopes = (-0.09983932012886695, 1.0998393201288673)
GELU: Slopes = (-0.12890414518515484, 1.1289041451851552)  # exact at t = ±1: (1 + erf 1)/2 + 1/(e·√π)
GELU_TANH: Slopes = (-0.12899306865877183, 1.1289930686587722)
MISH: Slopes = (-0.1125261223894626, 1.0884981612517283)
ERF: Slopes = (0.0, 1.128379167095513)  # 2/√π
# Torch takes 1/6 rounded to float32, which is above it, whatever the type of the input.
SIXTH = 0.1666666716337204
HARDSWISH: Slopes = (-3 * SIXTH, 9 * SIXTH)  # x·(x + 3)/6 at -3 and 3; both products are exact

_UNIT: Slopes = (0.0, 1.0)
_SIGNED: Slopes = (-1.0, 1.0)

# Functions without parameters.
PLAIN: dict[str, Slopes] = {
    "identity": _UNIT,
    "relu": _UNIT,
    "relu6": _UNIT,
    "clamp": _UNIT,
    "tanh": _UNIT,
    "softsign": _UNIT,
    "log_sigmoid": _UNIT,
    "softshrink": _UNIT,
    "tanhshrink": _UNIT,
    "softplus": _UNIT,
    "atan": _UNIT,
    "asinh": _UNIT,
    "sigmoid": (0.0, 0.25),
    "hardsigmoid": (0.0, SIXTH),
    "hardswish": HARDSWISH,
    "silu": SILU,
    "gelu": GELU,
    "gelu_tanh": GELU_TANH,
    "mish": MISH,
    "erf": ERF,
    "abs": _SIGNED,
    "sin": _SIGNED,
    "cos": _SIGNED,
}

# Why others have none.
WITHOUT: dict[str, str] = {
    "exp": "its slope e^x is unbounded",
    "log": "its slope 1/x is unbounded near 0",
    "sqrt": "its slope is unbounded near 0",
    "rsqrt": "its slope is unbounded near 0",
    "reciprocal": "its slope is unbounded near 0",
    "pow": "powers have unbounded slopes",
    "tan": "its slope is unbounded",
    "sign": "it jumps",
    "floor": "it jumps",
    "ceil": "it jumps",
    "round": "it jumps",
    "hardshrink": "it jumps",
    "threshold": "it jumps",
}


def leaky(slope: float) -> Slopes:
    """max(x, 0) + slope·min(x, 0); the slope may be rounded to float32 where the input is."""
    both = (slope, _float32(slope))
    if not all(map(math.isfinite, both)):  # which min and max would not show
        return math.nan, math.nan
    return min(1.0, *both), max(1.0, *both)


def elu(alpha: float, scale: float = 1.0, input_scale: float = 1.0) -> Slopes | None:
    """scale·x above 0, scale·α(e^(βx) - 1) below: slopes scale, and between 0 and scale·α·β."""
    if input_scale < 0:
        return None
    below = _product(_product(alpha, scale), input_scale)
    return min(0.0, scale, _float32(scale), below), max(0.0, scale, _float32(scale), below)


def celu(alpha: float) -> Slopes | None:
    """Slope e^(x/α) below 0."""
    return _UNIT if alpha > 0 else None


def softplus(beta: float, threshold: float) -> Slopes | str:
    """log(1 + e^(βx))/β; torch takes x itself where βx is above the threshold: a jump by log(1 + e^-threshold)/β."""
    if beta <= 0:
        return "softplus with a beta that is not positive"
    if threshold < 20 or beta < 0.5:  # from there on it is below 5e-9, and counts as rounding
        return f"softplus jumps at its threshold {threshold:g} with beta {beta:g}"
    return _UNIT


def hard_sigmoid(alpha: float) -> Slopes:
    """clamp(αx + β, 0, 1)."""
    return (min(0.0, alpha), max(0.0, alpha)) if math.isfinite(alpha) else (math.nan, math.nan)


def _product(first: float, second: float) -> float:
    """Away from zero, and as large as that of the factors rounded to float32."""
    exact = max(abs(first), abs(_float32(first))) * max(abs(second), abs(_float32(second)))
    return math.copysign(up(exact), first * second) if first not in (1.0, 0.0) or second not in (1.0, 0.0) else exact


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
