"""Linear maps in float32, by whatever routine is fastest: for searches, and for points that need no proof."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gramcert.operators.linear import LinearMap, Move, Scale, Shift
from gramcert.operators.matrices import AxisMatrix, Convolve

DTYPE = torch.float32


@dataclass(frozen=True)
class Quick:
    """A map on batches, and its adjoint."""

    apply: Callable[[Tensor], Tensor]
    adjoint: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, operation: LinearMap) -> "Quick":
        """Convolutions are torch's own."""
        if isinstance(operation, Shift):
            return cls(lambda x: x, lambda y: y)
        if isinstance(operation, Convolve):
            layer, sizes = operation.layer.with_kernel(operation.layer.kernel.to(DTYPE)), operation.input_size
            inputs, outputs = operation.source[-layer.axes - 1 :], operation.target[-layer.axes - 1 :]
            return cls(
                lambda x: layer.apply(x.reshape(-1, *inputs)).reshape(-1, *operation.target),
                lambda y: layer.adjoint(y.reshape(-1, *outputs), sizes).reshape(-1, *operation.source),
            )
        if isinstance(operation, AxisMatrix):
            narrow = AxisMatrix(operation.source, operation.matrix.to(DTYPE), operation.axis)
            return cls(narrow.apply, narrow.adjoint)
        if isinstance(operation, Move):
            return cls(operation.apply, operation.adjoint)
        assert isinstance(operation, Scale)
        factors = operation.factors.to(DTYPE)
        return cls(lambda x: x * factors, lambda y: y * factors)


def there_and_back(maps: Sequence[Quick], x: Tensor) -> tuple[Tensor, Tensor]:
    """Ax and AᵀAx for maps one after the other."""
    for part in maps:
        x = part.apply(x)
    image = x
    for part in reversed(maps):
        x = part.adjoint(x)
    return image, x
