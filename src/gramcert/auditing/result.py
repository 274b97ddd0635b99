"""``Audit``: what was found, and its forms for people and programs."""

import dataclasses
import datetime
import json
import math
from dataclasses import dataclass
from typing import Any

from gramcert.auditing.findings import UNBOUNDED, Findings, FormBlock, Profile
from gramcert.auditing.page import to_html
from gramcert.operators.propagation import Row


@dataclass(frozen=True)
class Audit(Findings):
    """The certified l2 Lipschitz constant of a model, and where it comes from.

    Attributes:
        upper: the best certified constant from the input to all outputs together; ``inf`` if unbounded.
        lower: certified lower bound of every such constant, by the difference quotient of two inputs; ``None`` where it
            was not asked for, or the model cannot be evaluated here.
        product: certified constant by norms, multiplied and added along the graph; ``upper`` is below it where forms
            gain something.
        reasons: why it is unbounded, each with the name of a node; empty if it is bounded.
        rows: every step that is not exactly 1 by its nature.
        trivial: how often each kind of step with the constant 1 by its nature occurs, such as ``{"relu": 19}``.
        outputs: the constant of each output alone.
        model: what was audited, for people.
        input_shape: without the batch.
        tol: relative width asked of each measurement.
        assumptions: what the guarantee rests on.
        seconds: of the whole audit.
        blocks: where forms gained, from the input to the output; empty if they did not.
        forms: why forms did not gain; empty if they did.
        date: of the audit, in ISO 8601, UTC.
        version: of gramcert.
        sha256: digest of the file, but not of external data beside it; ``None`` for what is in memory.
        profiles: spectra for the report.
        certificate: see :mod:`gramcert.auditing.certificate`.
        notes: what else a reader should know, such as that a search was cut off.
    """

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
        blocks = tuple(FormBlock(**block) for block in content["blocks"])
        listed = {name: tuple(content[name]) for name in ("reasons", "input_shape", "assumptions", "notes")}
        new = {"rows": rows, "profiles": profiles, "blocks": blocks, "seconds": seconds, "date": now()}
        return cls(**content | listed | new)

    def to_html(self, verify: str = "") -> str:
        """One self-contained page for people; ``verify`` is the command that checks the certificate, if any."""
        return to_html(self, verify)


def now() -> str:
    """For ``date``."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return UNBOUNDED if value == math.inf else value
