"""What an audit found: the constant of a model and the rows that it is made of."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from gramcert.operators.propagation import Row

# Written as a string in JSON, which has no infinity.
UNBOUNDED = "unbounded"


@dataclass(frozen=True)
class Profile:
    """The largest singular values of a convolution on its frequencies, descending: an estimate, for a picture."""

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class FormBlock:
    """A part of the model whose constant is bounded by forms as one.

    Attributes:
        name: the step that it begins with.
        product: what the norms of its steps multiply to; ``None`` where that is not known.
        factor: its part of the constant by forms.
        lattice: the frequencies of the proof, for people.
    """

    name: str
    product: float | None
    factor: float
    lattice: str


@dataclass(frozen=True)
class Findings:
    """The record of an audit; see :class:`gramcert.Audit` for what each part means."""

    upper: float
    lower: float | None
    product: float
    reasons: tuple[str, ...]
    rows: tuple[Row, ...]
    trivial: dict[str, int]
    outputs: dict[str, float]
    model: str
    input_shape: tuple[int, ...]
    tol: float
    assumptions: tuple[str, ...]
    seconds: float
    blocks: tuple[FormBlock, ...]
    forms: str
    date: str
    version: str
    sha256: str | None
    profiles: tuple[Profile, ...] = dataclasses.field(repr=False)
    certificate: dict[str, Any] = dataclasses.field(repr=False)
    notes: tuple[str, ...] = ()
