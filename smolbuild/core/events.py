"""Typed events of long work.

Libraries never print: they call an ``Emit``, and ``cli`` renders what it receives (a live display
on a terminal, plain lines in CI, JSON lines with ``--progress json``).
"""

from collections.abc import Callable
from typing import Literal

from smolbuild.core.values import dataclass

__all__ = [
    "Emit",
    "Event",
    "Message",
    "Output",
    "PhaseFinished",
    "PhaseStarted",
    "StepFinished",
    "StepStarted",
    "Transfer",
    "silent",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStarted:
    """A phase of a command began (``base``, ``boot``, ``steps``, ``checkpoint`` …)."""

    phase: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFinished:
    """A phase ended well after ``seconds``; failures are raised as errors instead."""

    phase: str
    text: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStarted:
    """A build step begins to run, or is taken from the cache."""

    name: str
    number: int
    total: int
    cached: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished:
    """A build step ended after ``seconds`` with ``status``."""

    name: str
    seconds: float
    status: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Bytes that a step, service or tool wrote."""

    source: str
    stream: Literal["stdout", "stderr"]
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Bytes of one push, pull or pack so far; ``total`` is 0 while unknown."""

    what: str
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One line for the user."""

    level: Literal["info", "warning"]
    text: str


Event = PhaseStarted | PhaseFinished | StepStarted | StepFinished | Output | Transfer | Message
Emit = Callable[[Event], None]
"""Receives events; must be safe to call from any thread and must not raise."""


def silent(event: Event) -> None:
    """Drop ``event``: the ``Emit`` for callers that want no progress."""
    del event
