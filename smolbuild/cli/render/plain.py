"""Plain lines, for logs: each step under a header of its own, its output marked with its name."""

import threading
import time
from collections.abc import Callable
from typing import TextIO

from smolbuild.cli.render.words import last_drawing, line
from smolbuild.core.events import (
    Event,
    Output,
    StepFinished,
    StepStarted,
    Transfer,
)

__all__ = ["PlainLines"]

_TRANSFER_SECONDS = 5.0
_LONG_LINE = 4096


class PlainLines:
    """An ``Emit`` that writes whole lines; with ``github`` also the group marks of its runner.

    The runner obeys what begins with ``::``, and ``##[`` anywhere in a line. A guest's output never
    begins a line here, and its ``##[`` is taken apart.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        github: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._github = github
        self._now = now
        self._lock = threading.Lock()
        self._shown: dict[str, float] = {}
        self._partial: dict[str, bytes] = {}
        self._numbers: dict[str, str] = {}
        self._group = False

    def __call__(self, event: Event) -> None:
        """Write what ``event`` has to say."""
        with self._lock:
            match event:
                case StepStarted(cached=True):
                    self._say(f"{line(event)}: cached")
                case StepStarted():
                    self._numbers[event.name] = f"{event.number}/{event.total} "
                    self._open_group(line(event))
                case StepFinished():
                    self._flush(event.name)
                    self._say(line(event).replace("step ", f"step {self._number(event)}", 1))
                    self._close_group()
                case Output():
                    self._output(event)
                case Transfer():
                    self._transfer(event)
                case _:
                    self._say(line(event))

    def close(self) -> None:
        """Write last lines that had no end, and close the group of a step that did not end."""
        with self._lock:
            for source in tuple(self._partial):
                self._flush(source)
            self._close_group()

    def _number(self, event: StepFinished) -> str:
        return self._numbers.pop(event.name, "")

    def _output(self, event: Output) -> None:
        *whole, rest = (self._partial.pop(event.source, b"") + event.data).split(b"\n")
        if len(rest) > _LONG_LINE:
            rest = rest.rpartition(b"\r")[2]  # what was drawn over is of no interest
        while len(rest) > _LONG_LINE:  # a line without end is cut, not kept
            whole.append(rest[:_LONG_LINE])
            rest = rest[_LONG_LINE:]
        self._partial[event.source] = rest
        for part in whole:
            self._marked(event.source, part)

    def _flush(self, source: str) -> None:
        if rest := self._partial.pop(source, b""):
            self._marked(source, rest)

    def _marked(self, source: str, data: bytes) -> None:
        self._say(f"  {source} | {last_drawing(data)}")

    def _transfer(self, event: Transfer) -> None:
        now = self._now()
        if now - self._shown.setdefault(event.what, now) >= _TRANSFER_SECONDS:
            self._shown[event.what] = now
            self._say(f"  {line(event)}")

    def _open_group(self, title: str) -> None:
        self._close_group()
        if self._github:
            self._write(f"::group::{' '.join(title.split())}")
            self._group = True
        else:
            self._say(title)

    def _close_group(self) -> None:
        if self._group:
            self._write("::endgroup::")
            self._group = False

    def _say(self, text: str) -> None:
        self._write("\n".join(map(_harmless, text.split("\n"))) if self._github else text)

    def _write(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def _harmless(text: str) -> str:
    text = text.replace("##[", "# #[")
    return f"| {text}" if text.lstrip().startswith("::") else text
