"""``Audit``: the constant of a model and the rows that it is made of."""

import dataclasses
import json
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
class Audit:
    """The certified l2 Lipschitz constant of a model, and where it comes from.

    Attributes:
        upper: certified constant from the input to all outputs together; ``inf`` if unbounded.
        reasons: why it is unbounded, each with the name of a node; empty if it is bounded.
        rows: every step that is not exactly 1 by its nature.
        trivial: how often each kind of step with the constant 1 by its nature occurs, such as ``{"relu": 19}``.
        outputs: the constant of each output alone.
        model: what was audited, for people.
        input_shape: without the batch.
        tol: relative width asked of each measurement.
        assumptions: what the guarantee rests on.
        seconds: of the whole audit.
        profiles: spectra for the report.
        certificate: see :mod:`gramcert.auditing.certificate`.
    """

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

    def __str__(self) -> str:
        """The constant, or why there is none."""
        shape = "×".join(map(str, self.input_shape))
        if self.reasons:
            return f"{self.model} at {shape}: unbounded ({'; '.join(self.reasons)})"
        return f"{self.model} at {shape}: L <= {self.upper!r}"

    def to_json(self) -> str:
        """Everything but the certificate, as one JSON object; an infinite constant is ``"unbounded"``."""
        content = dataclasses.asdict(self)
        del content["certificate"]
        for row, written in zip(self.rows, content["rows"], strict=True):
            written["relative_width"] = row.relative_width
        return json.dumps(_finite(content), allow_nan=False)

    def for_cache(self) -> dict[str, Any]:
        """Everything, as JSON that :meth:`from_cache` reads back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_cache(cls, content: dict[str, Any], seconds: float) -> "Audit":
        """The audit that was kept, every row marked as known before, with the time that it took now."""
        rows = tuple(
            Row(**row | {"notes": tuple(row["notes"]), "cached": row["lower"] is not None}) for row in content["rows"]
        )
        profiles = tuple(Profile(profile["name"], tuple(profile["values"])) for profile in content["profiles"])
        listed = {name: tuple(content[name]) for name in ("reasons", "input_shape", "assumptions")}
        return cls(**content | listed | {"rows": rows, "profiles": profiles, "seconds": seconds})

    def to_html(self) -> str:
        """One self-contained page for people."""
        from gramcert.auditing.page import to_html  # which is about this class

        return to_html(self)


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return UNBOUNDED if value == math.inf else value
