"""What the live display shows: lines that are finished, and lines of what is going on."""

from dataclasses import dataclass
from enum import Enum, auto

from smolbuild.cli.render.words import last_drawing, line
from smolbuild.core.events import (
    Event,
    Message,
    Output,
    PhaseFinished,
    PhaseStarted,
    StepFinished,
    StepStarted,
    Transfer,
)

__all__ = ["Board", "Line", "Mark"]

_KEPT = 4096
"""Bytes kept of an output line that has no end yet."""


class Mark(Enum):
    """How the thing of a line is doing."""

    RUNNING = auto()
    DONE = auto()
    CACHED = auto()
    FAILED = auto()
    NOTE = auto()
    WARNING = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line for the screen, in parts; ``more`` is what may be cut first."""

    mark: Mark
    text: str
    seconds: float | None = None
    more: str = ""


@dataclass(slots=True, kw_only=True)
class _Row:
    """A phase or a step that is going on."""

    phase: str = ""
    step: str = ""
    text: str
    began: float
    said: str = ""
    moved: str = ""

    def as_line(self, mark: Mark, now: float) -> Line:
        more = "  ".join(part for part in (self.moved, self.said) if part)
        return Line(mark=mark, text=self.text, seconds=now - self.began, more=more)


class Board:
    """Takes events, in order; ``now`` is the time of an event on any clock, in seconds."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        self._finished: list[Line] = []
        self._partial: dict[str, bytes] = {}

    def apply(self, event: Event, now: float) -> None:
        """Change the board as ``event`` says."""
        match event:
            case PhaseStarted():
                self._rows.append(_Row(phase=event.phase, text=line(event), began=now))
            case StepStarted(cached=True):
                self._finished.append(Line(mark=Mark.CACHED, text=line(event), more="cached"))
            case StepStarted():
                self._rows.append(_Row(step=event.name, text=line(event), began=now))
            case PhaseFinished():
                self._end_phase(event)
            case StepFinished():
                self._end_step(event)
            case Transfer():
                self._moved(event)
            case Output():
                self._said(event)
            case Message():
                mark = Mark.WARNING if event.level == "warning" else Mark.NOTE
                self._finished.append(Line(mark=mark, text=line(event)))

    def take_finished(self) -> list[Line]:
        """Return the lines that stay, each once."""
        finished, self._finished = self._finished, []
        return finished

    def running(self, now: float) -> list[Line]:
        """Return the lines of what is going on, oldest first."""
        # The line of the step says all that the line of the phase around it would.
        covered = any(row.step for row in self._rows)
        return [
            row.as_line(Mark.RUNNING, now)
            for row in self._rows
            if not (covered and row.phase == "steps")
        ]

    def fail(self, now: float) -> None:
        """Finish what is going on as failed: the innermost of it, which is where it failed."""
        if self._rows:
            row = self._rows[-1]
            self._finished.append(Line(mark=Mark.FAILED, text=row.text, seconds=now - row.began))
        self._rows.clear()

    def _end_phase(self, event: PhaseFinished) -> None:
        rows = [row for row in self._rows if row.phase == event.phase]
        if not rows:
            return
        self._rows.remove(rows[-1])
        if len(rows) == 1:  # else it is a part of the phase of the same name
            text = rows[-1].text
            self._finished.append(Line(mark=Mark.DONE, text=text, seconds=event.seconds))

    def _end_step(self, event: StepFinished) -> None:
        row = next((row for row in self._rows if row.step == event.name), None)
        if row is None:
            return
        self._rows.remove(row)
        self._partial.pop(event.name, None)
        mark, more = Mark.DONE, row.moved
        if event.status:
            mark, more = Mark.FAILED, f"status {event.status}"
        self._finished.append(Line(mark=mark, text=row.text, seconds=event.seconds, more=more))

    def _moved(self, event: Transfer) -> None:
        if self._rows:
            self._rows[-1].moved = line(event)

    def _said(self, event: Output) -> None:
        data = self._partial.get(event.source, b"") + event.data
        *whole, rest = data.split(b"\n")
        self._partial[event.source] = rest[-_KEPT:]
        shown = next((part for part in (rest, *reversed(whole)) if part.strip()), b"")
        row = next((row for row in self._rows if row.step == event.source), None)
        if row is None and self._rows:
            row = self._rows[-1]
        if row is not None and shown:
            row.said = " ".join(last_drawing(shown[-_KEPT:]).split())
