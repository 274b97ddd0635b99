"""How far a long call is, told to whoever shows it: one signature for all of them."""

from collections.abc import Callable

# What is being done, how many of its parts are done, and of how many (``None`` if that is not known).
Report = Callable[[str, int, int | None], None]


def silent(what: str, done: int, total: int | None) -> None:
    """Tells nobody."""
