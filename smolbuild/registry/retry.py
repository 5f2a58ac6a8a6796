"""How long the transport waits, how often it tries again, and how it is stopped."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Protocol

from smolbuild.core.clock import Clock
from smolbuild.core.errors import RegistryError

__all__ = [
    "PROGRESS_BYTES",
    "RETRYABLE",
    "CutError",
    "RetryPolicy",
    "Stop",
    "StoppedError",
    "Timeouts",
    "backoff",
    "pause",
    "retry_after",
]

RETRYABLE = frozenset({429, 500, 502, 503, 504})
"""Answers after which the same request may succeed."""

PROGRESS_BYTES = 1024 * 1024
"""A transfer that got this much further since its last failure starts counting failures anew."""

_SLICE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Limits in seconds for one exchange; together they bound every wait."""

    connect: float = 10.0
    read: float = 60.0
    """Longest silence while sending or receiving; an answer's head may take twice as long."""
    floor: int = 16 * 1024
    """Bytes per second that a body must average, counted after the first ``read`` seconds."""

    def body(self, size: int) -> float:
        """Return the longest time that a body of ``size`` bytes may take."""
        return self.read + size / self.floor


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential back-off with full jitter; times in seconds."""

    attempts: int = 5
    """Tries in all, the first one included."""
    base: float = 0.5
    cap: float = 15.0
    patience: float = 60.0
    """The longest ``Retry-After`` that is obeyed; a registry that asks for more is an error."""


class CutError(Exception):
    """One exchange did not end in an answer; never leaves this package.

    ``reason`` completes the sentence "… did not work: ". It holds no URL and no header, for both
    may carry credentials.
    """

    def __init__(self, reason: str, *, status: int = 0, after: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        """The registry's answer, when it was one that may change; else 0."""
        self.after = after
        """Seconds that the registry asked to wait, if it did."""


class StoppedError(RegistryError):
    """A transfer was given up because another one of the same set failed, or on a signal."""

    default_code = "stopped"


class _Abortable(Protocol):
    def abort(self) -> None:
        """Break the exchange that is under way in another thread."""


class Stop:
    """Tells a set of concurrent transfers to end; safe to use from any thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._watched: list[_Abortable] = []

    def watch(self, session: _Abortable) -> None:
        """Have ``session`` aborted when the stop comes (at once, if it already came)."""
        with self._lock:
            self._watched.append(session)
        if self._event.is_set():
            session.abort()

    def unwatch(self, session: _Abortable) -> None:
        """Forget ``session``."""
        with self._lock:
            self._watched.remove(session)

    def set(self) -> None:
        """Stop: break what is under way and let nothing new begin. Idempotent."""
        self._event.set()
        with self._lock:
            watched = tuple(self._watched)
        for session in watched:
            session.abort()

    def check(self) -> None:
        """Return unless stopped.

        Raises:
            StoppedError: ``set`` was called.

        """
        if self._event.is_set():
            raise StoppedError("the transfer was stopped")


def backoff(policy: RetryPolicy, *, failures: int, fraction: float, after: float | None) -> float:
    """Return the seconds to wait after the given number of failures (1 for the first).

    ``fraction`` is a random number in [0, 1); ``after`` is what the registry asked for, which is
    waited in any case, with the jitter on top.
    """
    jitter = fraction * min(policy.cap, policy.base * 2.0 ** (failures - 1))
    return jitter + (after or 0.0)


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Return the seconds that a ``Retry-After`` header asks for; None without a usable one.

    ``now`` is the time since the epoch, which the header's date form is compared with.
    """
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, date.timestamp() - now)


def pause(clock: Clock, seconds: float, stop: Stop | None) -> None:
    """Wait ``seconds``, looking for a stop several times a second.

    Raises:
        StoppedError: ``stop`` was set.

    """
    left = seconds
    while left > 0:
        if stop is not None:
            stop.check()
        step = min(_SLICE, left) if stop is not None else left
        clock.sleep(step)
        left -= step
    if stop is not None:
        stop.check()
