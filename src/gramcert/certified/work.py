"""What one answer may cost, and the record of what was tried for it."""

import time
from collections.abc import Callable
from typing import NoReturn

from torch import Tensor

from gramcert.enclosure import Step

Progress = Callable[[str, float], None]


# Rate for the guess whether a method fits into the time that is left.
OPERATIONS_PER_SECOND = 2e10


class OutOfBudgetError(Exception):
    """The work would take more time or memory than allowed, for the reason in the message."""


class Work:
    """Limits of one call and its record.

    Args:
        max_bytes: most memory to take beside the layer itself.
        max_seconds: when to stop, checked between batches; ``None`` never.
        call: name of the public function, for errors.
        progress: told the name of the method and the share of it that is done.
    """

    def __init__(
        self, max_bytes: int, max_seconds: float | None, progress: Progress | None = None, *, call: str = "Work"
    ) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise ValueError(f"{call}(max_bytes={max_bytes!r}): expected a positive int")
        is_number = isinstance(max_seconds, (int, float)) and not isinstance(max_seconds, bool)
        if max_seconds is not None and not (is_number and max_seconds >= 0):
            raise ValueError(f"{call}(max_seconds={max_seconds!r}): expected None or a number that is not negative")
        self.call = call
        self.max_bytes = max_bytes
        self.held = 0  # bytes of what is kept while the methods run
        self.max_seconds = max_seconds
        self.max_operations = float("inf")  # of one step; unlike time the same on every machine
        self.stopped = ""  # by which limit the last method was stopped, if one was
        self.steps: list[Step] = []
        self.witness: Tensor | None = None  # the vector that proved the lower bound, if one did
        self._progress = progress
        self._start = self._step_start = time.perf_counter()

    @property
    def remaining(self) -> float:
        """Seconds left, infinite without a limit."""
        if self.max_seconds is None:
            return float("inf")
        return self.max_seconds - (time.perf_counter() - self._start)

    def require_seconds(self, name: str, guess: float) -> None:
        """Stop if a method would take longer than is left."""
        if self.remaining <= 0:
            self._stop(f"{name}: max_seconds={self.max_seconds} left no time for it")
        if guess > self.remaining:
            self._stop(f"{name}: about {guess:.1f} s, more than max_seconds={self.max_seconds} leaves")

    def require_operations(self, name: str, operations: float) -> None:
        """Stop if a method would take more operations than allowed, or longer than is left."""
        if operations > self.max_operations:
            self._stop(f"{name}: {operations:.1g} operations, more than the {self.max_operations:.1g} it is worth")
        self.require_seconds(name, operations / OPERATIONS_PER_SECOND)

    def tick(self, name: str, share: float) -> None:
        """Report progress, and stop if the time is up."""
        if self._progress is not None:
            self._progress(name, share)
        if self.remaining < 0:
            self._stop(f"{name}: max_seconds={self.max_seconds} is over")

    @property
    def available(self) -> int:
        """Bytes that a method may take."""
        return self.max_bytes - self.held

    def require_bytes(self, name: str, needed: int) -> None:
        """Stop if a method needs more memory than is left beside what is held."""
        needed += self.held
        if needed > self.max_bytes:
            self._stop(
                f"{name}: needs {needed / 2**30:.2g} GiB, more than max_bytes={self.max_bytes} "
                f"({self.max_bytes / 2**30:.2g} GiB)"
            )

    def _stop(self, reason: str) -> NoReturn:
        self.stopped = reason
        raise OutOfBudgetError(reason)

    def record(self, name: str, lower: float, upper: float, note: str = "", *, quantity: str = "the norm") -> None:
        """Note what a method proved, and of which quantity; its time runs from the previous record."""
        now = time.perf_counter()
        self.steps.append(Step(name, lower, upper, now - self._step_start, note, quantity))
        self._step_start = now
