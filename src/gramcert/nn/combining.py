"""Layers of layers, with the constant that follows from their parts."""

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from gramcert.exact import exact, float_up
from gramcert.geometry.recognition import require_known
from gramcert.nn.layer import Layer
from gramcert.nn.outline import Outline
from gramcert.nn.pooling import root_float32
from gramcert.operators.graph import Variable


class Residual(Layer):
    """(1 - w)·x + w·f(x), with the constant (1 - w) + w·L: 1-Lipschitz if f is; or x + f(x), with the constant 1 + L.

    Args:
        module: f; its output has the shape of its input.
        weight: w between 0 and 1, or ``None`` for the plain sum.

    Example:
        >>> import torch, gramcert
        >>> block = gramcert.nn.Residual(torch.nn.Sequential(gramcert.nn.SRLinear(8, 8), torch.nn.ReLU()))
        >>> gramcert.lipschitz_bound(block) <= 1 + 1e-6
        True
        >>> gramcert.lipschitz_bound(gramcert.nn.Residual(torch.nn.Tanh(), weight=None))
        2.0
    """

    def __init__(self, module: nn.Module, weight: float | None = 0.5) -> None:
        super().__init__()
        if weight is not None and not 0 <= weight <= 1:
            raise ValueError(f"Residual(weight={weight}): expected a number from 0 to 1, or None")
        if not isinstance(module, nn.Module):
            raise TypeError(f"Residual(module): expected a torch.nn.Module, got {module!r}")
        _require_no_overwriting("Residual", module)
        self.module = module
        # As float32, and so exact in every type that a model may have but half precision.
        self.weight = None if weight is None else float(torch.tensor(weight, dtype=torch.float32))
        self.keep = 1.0 if self.weight is None else float(torch.tensor(1 - self.weight, dtype=torch.float32))

    def compute(self, x: Tensor) -> Tensor:
        """The weighted sum."""
        y: Tensor = self.module(x)
        if not isinstance(y, torch.fx.Proxy) and y.shape != x.shape:
            raise ValueError(f"Residual(module): expected an output of shape {tuple(x.shape)}, got {tuple(y.shape)}")
        y = y.reshape_as(x)  # so that a traced copy refuses other shapes too, where a sum would repeat entries
        return x + y if self.weight is None else self.keep * x + self.weight * y

    def outlined(self, outline: Outline, x: Variable) -> Variable:
        """Triangle inequality."""
        _require_no_overwriting(f"{outline.call}(Residual)", self.module)
        y = outline.module(x, self.module)
        if self.weight is not None:
            x, y = (
                outline.b.scaled(value, _size(f"{outline.call}(Residual.weight)", factor))
                for value, factor in ((x, self.keep), (y, self.weight))
            )
        return outline.b.sum([(x, 1), (y, 1)])

    def extra_repr(self) -> str:
        """For printing."""
        return f"weight={self.weight}"


class Concatenation(Layer):
    """(f_1(x), ..., f_m(x))/√m along the channels, with the constant √(ΣL²/m): 1-Lipschitz if all parts are.

    Args:
        modules: f_1 to f_m.
        normalized: whether to divide by √m; otherwise the constant is √(ΣL²).
    """

    def __init__(self, *modules: nn.Module, normalized: bool = True) -> None:
        super().__init__()
        if not modules:
            raise ValueError("Concatenation(): expected at least one module")
        for module in modules:
            if not isinstance(module, nn.Module):
                raise TypeError(f"Concatenation(*modules): expected torch.nn.Modules, got {module!r}")
            _require_no_overwriting("Concatenation", module)
        self.parts = nn.ModuleList(modules)
        self.factor = root_float32(Fraction(1, len(modules))) if normalized else 1.0

    def compute(self, x: Tensor) -> Tensor:
        """The parts side by side."""
        return self.factor * torch.cat([part(x) for part in self.parts], 1)

    def outlined(self, outline: Outline, x: Variable) -> Variable:
        """The root of the sum of squares."""
        require_known(outline.call, self.parts, nn.ModuleList)
        for part in self.parts:
            _require_no_overwriting(f"{outline.call}(Concatenation)", part)
        parts = [outline.module(x, part) for part in self.parts]
        together = outline.b.joint(parts, "concatenate", x.shape, lambda values: torch.cat(values, 1))
        return outline.b.scaled(together, _size(f"{outline.call}(Concatenation.factor)", self.factor))

    def extra_repr(self) -> str:
        """For printing."""
        return f"factor={self.factor:.6g}"


def _size(name: str, factor: Any) -> float:
    """The absolute value of a factor of any type, rounded up; what is not finite is an error."""
    number = exact(name, factor)
    if isinstance(number, float):
        raise ValueError(f"{name}: expected a finite number, got {factor!r}")
    return float_up(max(number, -number))


def _require_no_overwriting(call: str, module: nn.Module) -> None:
    """Refuse parts that may overwrite an input that is used again."""
    for part in module.modules():
        if getattr(part, "inplace", False):
            raise ValueError(f"{call}: {type(part).__name__}(inplace=True) may overwrite the input; set inplace=False")
