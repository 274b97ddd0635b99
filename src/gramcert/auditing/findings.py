"""What an audit found: the constant of a model and the rows that it is made of."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

# Written as a string in JSON, which has no infinity.
UNBOUNDED = "unbounded"


@dataclass(frozen=True)
class Row:
    """One step from the input to the output.

    Attributes:
        name: the nodes of the model that it is about, joined by " + " where several were measured as one.
        kind: such as ``convolution``, ``matrix``, ``relu``, ``sum``, ``unbounded``.
        geometry: for people: ``3→16, 3×3, stride 1, padding 1, zeros, at 32×32``; empty where there is none.
        lower: certified lower bound of the norm of a linear map; ``None`` for anything else.
        upper: certified constant of the step; ``inf`` if there is none.
        constant: certified constant from the input of the model to the output of this step.
        share: its part of the size of log L, positive where it makes L larger; ``None`` off the path that dominates L,
            and where L is too near to 1. The shares add up to 1, or to -1 if L < 1.
        seconds: time spent on it; 0 for what is known in closed form.
        method: how ``upper`` was proved.
        notes: such as why a tolerance was missed.
        cached: whether the measurement came from the cache.
    """

    name: str
    kind: str
    geometry: str
    lower: float | None
    upper: float
    constant: float
    share: float | None
    seconds: float
    method: str
    notes: tuple[str, ...] = ()
    cached: bool = False

    @property
    def relative_width(self) -> float | None:
        """(upper - lower)/upper of a linear map."""
        if self.lower is None or not math.isfinite(self.upper):
            return None
        return (self.upper - self.lower) / self.upper if self.upper else 0.0


@dataclass(frozen=True)
class Profile:
    """The largest singular values of a convolution on its frequencies, descending: an estimate, for a picture."""

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Findings:
    """The record of an audit; see :class:`gramcert.Audit` for what each part means."""

    upper: float
    reasons: tuple[str, ...]
    rows: tuple[Row, ...]
    trivial: dict[str, int]
    outputs: dict[str, float]
    model: str
    input_shape: tuple[int, ...]
    tol: float
    assumptions: tuple[str, ...]
    seconds: float
    profiles: tuple[Profile, ...] = dataclasses.field(repr=False)
    certificate: dict[str, Any] = dataclasses.field(repr=False)
