"""Render events on standard error: live on a terminal, plain lines elsewhere, or JSON lines."""

import contextlib
import dataclasses
import json
import sys
import threading
import time
from collections.abc import Iterator

from smolbuild.core.events import (
    Emit,
    Event,
    Message,
    Output,
    PhaseFinished,
    PhaseStarted,
    StepFinished,
    StepStarted,
    Transfer,
    silent,
)
from smolbuild.core.text import visible

__all__ = ["progress"]

_TRANSFER_SECONDS = 5.0
_LINE = 100


@contextlib.contextmanager
def progress(kind: str) -> Iterator[Emit]:
    """Give the ``Emit`` for ``--progress kind`` (``auto``, ``plain``, ``json``, ``none``)."""
    if kind == "none":
        yield silent
    elif kind == "json":
        yield _json_lines()
    elif kind == "auto" and sys.stderr.isatty():
        with _terminal() as emit:
            yield emit
    else:
        yield _plain_lines()


def _json_lines() -> Emit:
    lock = threading.Lock()

    def emit(event: Event) -> None:
        value: dict[str, object] = {"event": type(event).__name__, **dataclasses.asdict(event)}
        if isinstance(event, Output):
            value["data"] = event.data.decode("utf-8", "backslashreplace")
        with lock:
            print(json.dumps(value), file=sys.stderr, flush=True)

    return emit


def _plain_lines() -> Emit:
    lock = threading.Lock()
    shown: dict[str, float] = {}
    partial: dict[str, bytes] = {}

    def emit(event: Event) -> None:
        with lock:
            if isinstance(event, Transfer):
                now = time.monotonic()
                if now - shown.setdefault(event.what, now) < _TRANSFER_SECONDS:
                    return
                shown[event.what] = now
            if isinstance(event, Output):
                *lines, rest = (partial.pop(event.source, b"") + event.data).split(b"\n")
                partial[event.source] = rest[-4096:]
                for line in lines:
                    _say(f"  {event.source} | {_text(line)}")
                return
            _say(_line(event))

    return emit


@contextlib.contextmanager
def _terminal() -> Iterator[Emit]:
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, highlight=False)
    title = ""
    with console.status("") as status:

        def emit(event: Event) -> None:
            nonlocal title
            match event:
                case PhaseStarted() | StepStarted(cached=False):
                    title = _line(event)
                    status.update(escape(title))
                case Output():
                    last = _text(event.data.strip().rpartition(b"\n")[2])[:_LINE]
                    status.update(f"{escape(title)} [dim]{escape(last)}[/dim]")
                case Transfer():
                    status.update(escape(f"{title} {_line(event).strip()}"))
                case Message(level="warning"):
                    console.print(f"[yellow]{escape(_line(event))}[/yellow]")
                case _:
                    console.print(escape(_line(event)))

        yield emit


def _line(event: Event) -> str:
    # A message may quote what an image, a guest or a registry says.
    return visible(_words(event))


def _words(event: Event) -> str:
    match event:
        case PhaseStarted():
            return f"{event.phase}: {event.text}"
        case PhaseFinished():
            return f"{event.phase}: {event.text} ({event.seconds:.1f} s)"
        case StepStarted():
            state = "cached" if event.cached else "running"
            return f"step {event.number}/{event.total} {event.name}: {state}"
        case StepFinished():
            return f"step {event.name}: done ({event.seconds:.1f} s)"
        case Transfer():
            total = f" of {event.total / 1e6:.1f}" if event.total else ""
            return f"  {event.what}: {event.done / 1e6:.1f}{total} MB"
        case Message():
            return f"warning: {event.text}" if event.level == "warning" else event.text
        case Output():
            return _text(event.data)


def _text(data: bytes) -> str:
    # Of a line that a program drew over and over, the last drawing counts.
    text = data.decode("utf-8", "backslashreplace").rstrip("\r").rpartition("\r")[2]
    return visible(text)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
