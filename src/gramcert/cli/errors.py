"""Bad input ends in one line on stderr and exit code 2, never in a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from gramcert.cli.codes import BAD_INPUT


class BadInput(ValueError):  # noqa: N818 - it names what the caller gave, not a failure of the program
    """What the user gave cannot be used, for the reason in the message."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what the library says about its arguments, and a lack of memory, into one line and exit code 2."""
    try:
        yield
    except BrokenPipeError:  # the reader of our output has left
        raise
    except OSError as error:
        # Without the number of the error, which says nothing to people.
        where = f"{error.filename}: " if error.filename is not None else ""
        _leave(f"{where}{error.strerror}" if error.strerror else str(error))
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        _leave(str(error) or "not enough memory")
    except RuntimeError as error:
        if "allocate memory" not in str(error):  # torch has no class of its own for it
            raise
        _leave("not enough memory for these sizes")


# Of a message, which may quote a file that somebody made to flood or to steer a terminal.
_LONGEST = 2000


def _leave(message: str) -> NoReturn:
    line = " ".join(message[: 2 * _LONGEST].split())
    shown = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line)
    # Not by typer, which writes UTF-8 where a stream says that it knows ASCII alone.
    print("error: " + (shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."), file=sys.stderr)
    raise typer.Exit(BAD_INPUT)
