"""Records that pydantic checks, with errors in one sentence: the call, what was expected and what came."""

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ConfigDict, ValidationError

# No text for a number, no number for a truth value, no NaN, and no key that nobody reads.
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@contextmanager
def one_sentence(kind: Any) -> Iterator[None]:
    """The first thing that pydantic finds wrong with a record of that kind; also a decorator, of its ``__init__``."""
    try:
        yield
    except ValidationError as found:
        # A name that is unknown before one that is missing: it may be the same one, misspelt.
        unknown = "unexpected_keyword_argument"
        error = min(found.errors(include_url=False), key=lambda error: error["type"] != unknown)
        name = ".".join(map(str, error["loc"]))
        place = f"({name}={reprlib.repr(error['input'])})" if name else ""
        message = error["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1)
        if error["type"] == "missing":
            place, message = "", f"{name!r} is missing"
        if error["type"] == unknown:
            inner = kind
            for part in error["loc"][:-1]:
                inner = inner.__dataclass_fields__[part].type
            place, message = "", f"unknown field {name!r}, expected one of {', '.join(inner.__dataclass_fields__)}"
        raise ValueError(f"{kind.__name__}{place}: {message}") from None
