"""Standard output as it is: one that knows ASCII alone, a full device, a pipe whose reader has left."""

import codecs
import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gramcert.cli.codes import BAD_INPUT

# What our texts use beyond ASCII, in letters that every terminal has.
_PLAIN = {
    "‖": "||",
    "≤": "<=",
    "≥": ">=",
    "±": "+/-",
    "×": "x",
    "·": "*",
    "−": "-",
    "–": "-",
    "—": "-",
    "→": "->",
    "…": "...",
    "∞": "inf",
    "√": "sqrt",
    "σ": "sigma",
    "ω": "omega",
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
    "█": "#",
    "━": "-",
    "─": "-",
    "│": "|",
}
_HANDLER = "gramcert.plain"


def _plain(error: UnicodeError) -> tuple[str, int]:
    """What a codec calls for characters that it does not know."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(_letter, error.object[error.start : error.end])), error.end


def _letter(character: str) -> str:
    parts = unicodedata.normalize("NFKD", character)  # superscripts to digits, é to e and an accent
    power = "^" if unicodedata.decomposition(character).startswith("<super>") else ""
    known = "".join(_PLAIN.get(part, part if part.isascii() else "") for part in parts)
    return power + known if known else "?"


@contextmanager
def safe_streams() -> Iterator[None]:
    """Nothing that is printed can end in a traceback: letters are replaced, a lost stream is one sentence."""
    codecs.register_error(_HANDLER, _plain)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_HANDLER)
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # a full device may show only now
                sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        _drop_output()
        raise SystemExit(1) from None
    except OSError as error:
        _drop_output()
        with suppress(OSError):
            print(f"error: the output cannot be written ({error.strerror})", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None


def _drop_output() -> None:
    """So that Python does not try again at its end, and complain."""
    with suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
