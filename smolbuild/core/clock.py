"""Time as a parameter, so that retries and deadlines are testable without waiting."""

import time
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Clock", "Deadline", "SystemClock"]


class Clock(Protocol):
    """What code may know of time."""

    def now(self) -> float:
        """Return seconds since the Unix epoch."""

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes backwards."""

    def sleep(self, seconds: float) -> None:
        """Wait ``seconds``."""


class SystemClock:
    """The host's clock."""

    def now(self) -> float:
        """Return seconds since the Unix epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes backwards."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait ``seconds``; a negative value returns at once."""
        time.sleep(max(0.0, seconds))


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock by which something must have happened."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """Return the deadline ``seconds`` from now."""
        return cls(time.monotonic() + seconds)

    def left(self) -> float:
        """Return the seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())

    def passed(self) -> bool:
        """Return whether no time is left."""
        return self.left() <= 0.0
