"""Bad input ends in one line on stderr and exit code 2, never in a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

NEGATIVE_ANSWER, BAD_INPUT = 1, 2


class BadInput(ValueError):  # noqa: N818 - it names what the caller gave, not a failure of the program
    """What the user gave cannot be used, for the reason in the message."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what the library says about its arguments, and a lack of memory, into one line and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, MemoryError, OSError) as error:
        _leave(str(error) or "not enough memory")
    except RuntimeError as error:
        if "allocate memory" not in str(error):  # torch has no class of its own for it
            raise
        _leave("not enough memory for these sizes")


# Of a message, which may quote a file that somebody made to flood or to steer a terminal.
_LONGEST = 2000


def _leave(message: str) -> None:
    line = " ".join(message[: 2 * _LONGEST].split())
    shown = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line)
    typer.echo("error: " + (shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."), err=True)
    raise typer.Exit(BAD_INPUT)
