"""Between which numbers the slopes of elementwise activations of torch lie."""

import math

import numpy as np
import torch
from torch import nn

from gramcert.exact import exact

# Slopes exactly in [0, 1], attained or approached. Softplus is missing: torch replaces it by the identity above a
# threshold, where it jumps by 2e-9.
_UNIT = (
    nn.Identity,
    nn.ReLU,
    nn.ReLU6,
    nn.Tanh,
    nn.Softsign,
    nn.LogSigmoid,
    nn.Hardtanh,
    nn.Softshrink,
    nn.Tanhshrink,
)


def slopes(activation: nn.Module) -> tuple[float, float] | None:
    """Least and largest slope of an elementwise activation, or ``None`` for anything else.

    Only exact classes count: a subclass may compute something else.
    """
    kind, options = type(activation), vars(activation)
    numbers = [value for value in options.values() if isinstance(value, (float, np.floating, torch.Tensor))]
    if not all(math.isfinite(number) for number in numbers):
        return None
    if kind in _UNIT:
        return 0.0, 1.0
    if kind is nn.Sigmoid:
        return 0.0, 0.25
    if kind is nn.Hardsigmoid:
        return 0.0, float(torch.tensor(1 / 6, dtype=torch.float32))  # above 1/6
    if kind is nn.LeakyReLU:
        # The slope is rounded to float32 where the input is.
        slope = float(exact("negative_slope", options["negative_slope"]))
        rounded = float(torch.tensor(slope, dtype=torch.float32))
        return min(1.0, slope, rounded), max(1.0, slope, rounded)
    if kind is nn.ELU and options["alpha"] >= 0:  # slope α·e^x below 0
        alpha = float(exact("alpha", options["alpha"]))
        return 0.0, max(1.0, alpha, float(torch.tensor(alpha, dtype=torch.float32)))
    return None
