"""Events in words, safe for a terminal: a message may quote an image, a guest or a registry."""

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
from smolbuild.core.text import visible

__all__ = ["amount", "duration", "last_drawing", "line"]


def line(event: Event) -> str:
    """Return what ``event`` says, without anything that a terminal would obey."""
    return visible(_words(event))


def duration(seconds: float) -> str:
    """Return ``12.3 s``, ``2 min 05 s`` or ``1 h 02 min``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def amount(transfer: Transfer) -> str:
    """Return ``1.2 MB``, or ``1.2 of 3.4 MB`` where the whole is known."""
    whole = f" of {transfer.total / 1e6:.1f}" if transfer.total else ""
    return f"{transfer.done / 1e6:.1f}{whole} MB"


def last_drawing(data: bytes) -> str:
    """Return one line of output as text; of a line drawn over and over, the last drawing counts."""
    text = data.decode("utf-8", "backslashreplace").rstrip("\r").rpartition("\r")[2]
    return visible(text)


def _words(event: Event) -> str:
    match event:
        case PhaseStarted():
            return f"{event.phase}: {event.text}"
        case PhaseFinished():
            return f"{event.phase}: {event.text} ({duration(event.seconds)})"
        case StepStarted():
            return f"step {event.number}/{event.total} {event.name}"
        case StepFinished():
            how = f"failed with status {event.status}" if event.status else "done"
            return f"step {event.name}: {how} ({duration(event.seconds)})"
        case Transfer():
            return f"{event.what}: {amount(event)}"
        case Message():
            return f"warning: {event.text}" if event.level == "warning" else event.text
        case Output():
            return last_drawing(event.data)
