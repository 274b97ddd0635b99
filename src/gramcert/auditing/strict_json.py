"""JSON taken to the letter, so that what a program reads from a text is what a person reads in it.

Python's parser takes the last of two equal names, ``NaN``, numbers without end that round to others, and ``1e999`` for
infinity; and in Python ``1 == 1.0 == True``. Here all of that is refused, and values are compared by their text.
"""

import json
from typing import Any


def parse(text: str) -> Any:
    """The value of a text; a ``ValueError`` or ``RecursionError`` if it is not strictly JSON."""
    return json.loads(text, object_pairs_hook=_object, parse_int=_integer, parse_float=_real, parse_constant=_constant)


def canonical(value: Any) -> str:
    """The one text of a value; a ``ValueError`` or ``TypeError`` if it has none."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name[:80]!r} occurs twice in one object")
        found[name] = value
    return found


def _integer(text: str) -> Any:
    return _as_written(text, int(text))


def _real(text: str) -> Any:
    return _as_written(text, float(text))


def _as_written(text: str, value: Any) -> Any:
    """A number that Python writes in the same way: no other text has the same value."""
    if repr(value) != text:
        raise ValueError(f"expected a number as Python writes it, {value!r}, got {text[:80]}")
    return value


def _constant(text: str) -> float:
    raise ValueError(f"expected a finite number, got {text}")
