"""A certificate as somebody wrote it: the strict reading of what ``verify`` cannot compute from the model."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gramcert.auditing.asked import Asked
from gramcert.auditing.certificate import FORMAT, Claim, FormClaim
from gramcert.auditing.findings import UNBOUNDED
from gramcert.operators.graph import MOST_ENTRIES

FIELDS = (
    *("format", "input_shape", "asked", "weights", "graph", "claims", "forms", "outputs"),
    *("product", "upper", "reasons", "assumptions", "unverified", "seal"),
)
CLAIM_FIELDS = ("nodes", "kind", "geometry", "upper", "lower", "witness", "norms")
UNVERIFIED_FIELDS = ("model", "tol", "versions")
VERSIONS = ("gramcert", "torch", "numpy", "scipy", "python")


class BadCertificate(ValueError):  # noqa: N818 - it names what the caller gave, not a failure of the program
    """A file that is not a certificate, for the reason in the message."""


@dataclass(frozen=True)
class Written:
    """The parts that a certificate can be written anew from, together with the model."""

    input_shape: tuple[int, ...]
    asked: Asked
    claims: list[Claim]
    forms: FormClaim | None
    unverified: dict[str, Any]

    @classmethod
    def of(cls, content: dict[str, Any]) -> "Written":
        """From strict JSON of the known format."""
        written = content.get("format")
        if written != FORMAT:
            again = "; audit the model again" if str(written).startswith(FORMAT.rstrip("0123456789")) else ""
            raise BadCertificate(f"format: expected {FORMAT!r}, got {str(written)[:80]!r}{again}")
        _require_fields("certificate", content, FIELDS)
        shape = _items("input_shape", content["input_shape"], _size)
        if math.prod(shape) > MOST_ENTRIES:
            raise BadCertificate(f"input_shape: expected at most {MOST_ENTRIES} entries, got {math.prod(shape)}")
        _items("graph", content["graph"], _anything)
        _unverified(content["unverified"])
        claims = _items("claims", content["claims"], _claim)
        return cls(tuple(shape), _asked(content["asked"]), claims, _forms(content["forms"]), content["unverified"])


def _asked(value: Any) -> Asked:
    _require_fields("asked", value, ("output", "functional"))
    output, weights = value["output"], value["functional"]
    output = None if output is None else _text("asked.output", output)
    if weights is None:
        return Asked(output)
    pairs = _items("asked.functional", weights, _weight)
    places = [place for place, _ in pairs]
    if places != sorted(set(places)):
        raise BadCertificate("asked.functional: expected places in their order, each once")
    return Asked(output, tuple(pairs))


def _weight(where: str, value: Any) -> tuple[int, float]:
    is_pair = isinstance(value, list) and len(value) == 2 and type(value[0]) is int and value[0] >= 0
    if not is_pair or type(value[1]) is not float or not math.isfinite(value[1]):
        raise _unexpected(where, "a place and a weight", value)
    return value[0], value[1]


def _forms(value: Any) -> FormClaim | None:
    if value is None:
        return None
    _require_fields("forms", value, ("multipliers", "shifts"))
    parts = _items("forms.multipliers", value["multipliers"], lambda where, part: tuple(_items(where, part, _bound)))
    if not parts or len(parts[0]) != 1:
        raise BadCertificate("forms.multipliers: expected the square of a constant first")
    return FormClaim(tuple(parts), tuple(_items("forms.shifts", value["shifts"], _flag)))


def _claim(where: str, value: Any) -> Claim:
    _require_fields(where, value, CLAIM_FIELDS)
    upper, lower, witness, norms = (value[name] for name in ("upper", "lower", "witness", "norms"))
    if norms is not None:
        norms = tuple(_items(f"{where}.norms", norms, _bound))
        if len(norms) != 2:
            raise BadCertificate(f"{where}.norms: expected two numbers, got {len(norms)}")
    return Claim(
        math.inf if upper == UNBOUNDED else _bound(f"{where}.upper", upper),
        None if lower is None else _bound(f"{where}.lower", lower),
        None if witness is None else _text(f"{where}.witness", witness),
        norms,
    )


def _unverified(value: Any) -> None:
    """Nothing is known of what it says, but it says nothing else."""
    _require_fields("unverified", value, UNVERIFIED_FIELDS)
    _text("unverified.model", value["model"])
    if not 0 < _bound("unverified.tol", value["tol"]) < 1:
        raise BadCertificate(f"unverified.tol: expected 0 < tol < 1, got {value['tol']!r}")
    _require_fields("unverified.versions", value["versions"], VERSIONS)
    for name, version in value["versions"].items():
        _text(f"unverified.versions.{name}", version)


def _require_fields(where: str, value: Any, names: tuple[str, ...]) -> None:
    if not isinstance(value, dict):
        raise _unexpected(where, "an object", value)
    for name in names:
        if name not in value:
            raise BadCertificate(f"{where}: it has no {name!r}")
    for name in value:
        if name not in names:
            raise BadCertificate(f"{where}: expected nothing else, got {name[:80]!r}")


def _items(where: str, value: Any, item: Callable[[str, Any], Any]) -> list[Any]:
    if not isinstance(value, list):
        raise _unexpected(where, "a list", value)
    return [item(f"{where}[{number}]", one) for number, one in enumerate(value)]


def _anything(where: str, value: Any) -> Any:
    return value


def _size(where: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise _unexpected(where, "a positive integer", value)
    return value


def _bound(where: str, value: Any) -> float:
    """Not negative, which -0.0 looks like."""
    if type(value) is not float or not 0 <= value < math.inf or math.copysign(1.0, value) < 0:
        raise _unexpected(where, "a number with a decimal point or an exponent that is not negative", value)
    return value


def _flag(where: str, value: Any) -> bool:
    if type(value) is not bool:
        raise _unexpected(where, "true or false", value)
    return value


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _unexpected(where, "text", value)
    return value


def _unexpected(where: str, what: str, value: Any) -> BadCertificate:
    return BadCertificate(f"{where}: expected {what}, got {str(value)[:80]!r}")
