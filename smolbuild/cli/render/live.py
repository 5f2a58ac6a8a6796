"""The live display: finished lines scroll up, what is going on is drawn anew below them.

Each picture goes to the terminal in one write, over the last one and without erasing it first, so
that nothing flickers. Nothing is drawn before the first step runs or a moment has passed: a build
of which nothing changed is over by then, and has no use for it.
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

from smolbuild.cli.render.board import Board, Line, Mark
from smolbuild.cli.render.words import duration
from smolbuild.core.events import Event, StepStarted

__all__ = ["Display", "live_display"]

_DELAY_SECONDS = 0.15
_TICK_SECONDS = 0.1
_JOIN_SECONDS = 5.0
_MORE_CELLS = 8
"""Less than this is not worth a cut piece of the last output line."""
_TIME_CELLS = 24
"""On a terminal narrower than this the name matters more than the time."""
_COLOURS = {Mark.DONE: "32", Mark.CACHED: "36", Mark.FAILED: "31", Mark.WARNING: "33"}
_SIGNS = {Mark.DONE: "✓", Mark.CACHED: "✓", Mark.FAILED: "✗", Mark.NOTE: " ", Mark.WARNING: "!"}
_ASCII_SIGNS = {**_SIGNS, Mark.DONE: "+", Mark.CACHED: "+", Mark.FAILED: "x"}
_WHEEL = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_ASCII_WHEEL = "|/-\\"


@contextlib.contextmanager
def live_display(stream: TextIO, environment: Mapping[str, str]) -> Iterator["Display"]:
    """Give the display on the terminal ``stream``; what still runs when the block fails, failed."""
    display = Display(
        stream,
        colour=not environment.get("NO_COLOR"),
        size=lambda: _size_of(stream),
    )
    over = threading.Event()
    ticker = threading.Thread(target=_tick, args=(display, over), name="progress", daemon=True)
    ticker.start()
    try:
        yield display
    except BaseException:
        display.fail()
        raise
    finally:
        over.set()
        display.begin.set()
        ticker.join(_JOIN_SECONDS)
        display.close()


def _tick(display: "Display", over: threading.Event) -> None:
    display.begin.wait(_DELAY_SECONDS)
    while not over.is_set():
        display.refresh()
        over.wait(_TICK_SECONDS)


class Display:
    """An ``Emit`` that keeps a picture on a terminal; ``refresh`` draws it.

    Args:
        stream: the terminal.
        colour: whether to use colours.
        size: returns the terminal's present size.
        now: the clock that durations are taken from.

    """

    def __init__(
        self,
        stream: TextIO,
        *,
        colour: bool,
        size: Callable[[], os.terminal_size],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.begin = threading.Event()
        """Set when there is something that is worth a picture."""
        self._stream = stream
        self._colour = colour
        self._size = size
        self._now = now
        self._lock = threading.Lock()
        self._board = Board()
        self._drawn: list[int] = []
        self._pictures = 0
        self._ran = False
        self._fancy = _can_write(stream, "".join(_SIGNS.values()) + _WHEEL + "…")

    def __call__(self, event: Event) -> None:
        """Take note of ``event``; it is on the screen from the next refresh on."""
        with self._lock:
            self._board.apply(event, self._now())
            self._ran = self._ran or (isinstance(event, StepStarted) and not event.cached)
        if self._ran:
            self.begin.set()

    def fail(self) -> None:
        """Show what is going on as failed."""
        with self._lock:
            self._board.fail(self._now())

    def refresh(self) -> None:
        """Draw the picture as it is now; a terminal that is gone is nobody's error."""
        with self._lock:
            self._pictures += 1
            self._draw(self._board.take_finished(), self._board.running(self._now()))

    def close(self) -> None:
        """Leave finished lines only; of a picture that was never drawn, only what was said."""
        with self._lock:
            finished = self._board.take_finished()
            if not (self._pictures or self._ran):
                said = (Mark.NOTE, Mark.WARNING)
                finished = [line for line in finished if line.mark in said]
            self._draw(finished, [])

    def _draw(self, finished: list[Line], running: list[Line]) -> None:
        size = self._size()
        running = running[-max(1, size.lines - 2) :]
        # Most terminals wrap lines anew when they become narrower; then there are more to go up.
        above = sum(max(1, -(-cells // size.columns)) for cells in self._drawn)
        above = min(above, size.lines - 1)
        rows = [self._compose(line, size.columns - 1) for line in running]
        kept = [self._permanent(line, size.columns - 1) for line in finished]
        if not (rows or kept or above):
            return
        # Without automatic wrapping a character that is wider here than we think does no harm.
        text = (f"\x1b[{above}A" if above else "") + "\r"
        text += "".join(f"{row}\x1b[K\n" for row in kept)
        text += "\x1b[?7l" + "".join(f"{row}\x1b[K\n" for row, _ in rows) + "\x1b[?7h\x1b[J"
        self._drawn = [cells for _, cells in rows]
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()

    def _permanent(self, line: Line, cells: int) -> str:
        if line.mark in (Mark.NOTE, Mark.WARNING):  # whole, however long
            text = line.text if line.mark is Mark.WARNING else f"  {line.text}"
            text = text.replace("\n", "\x1b[K\n")
            return self._painted(text, _COLOURS.get(line.mark, ""))
        return self._compose(line, cells)[0]

    def _compose(self, line: Line, cells: int) -> tuple[str, int]:
        """Return the line in at most ``cells`` cells of the screen, and how many it takes."""
        took = "" if line.seconds is None else f"  {duration(line.seconds)}"
        if cells < _TIME_CELLS:
            took = ""
        text = f"{self._sign(line.mark)} {_flat(line.text)}"
        text, used = _cut(text, cells - len(took), self._dots())
        used += len(took)
        more = ""
        if line.more and cells - used >= _MORE_CELLS:
            more, width = _cut(f"  {_flat(line.more)}", cells - used, self._dots())
            used += width
        colour = _COLOURS.get(line.mark, "")
        return self._painted(text, colour) + took + self._painted(more, "2" if more else ""), used

    def _sign(self, mark: Mark) -> str:
        if mark is Mark.RUNNING:
            wheel = _WHEEL if self._fancy else _ASCII_WHEEL
            return wheel[self._pictures % len(wheel)]
        return (_SIGNS if self._fancy else _ASCII_SIGNS)[mark]

    def _dots(self) -> str:
        return "…" if self._fancy else "~"

    def _painted(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour and code else text


def _cut(text: str, cells: int, dots: str) -> tuple[str, int]:
    """Return the beginning of ``text`` that fits into ``cells``, and the cells that it takes."""
    from rich.cells import cell_len, set_cell_size

    width = cell_len(text)
    if width <= cells:
        return text, width
    if cells < 1:
        return "", 0
    return set_cell_size(text, cells - 1) + dots, cells


def _flat(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ")


def _size_of(stream: TextIO) -> os.terminal_size:
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        size = shutil.get_terminal_size()
    # A terminal that does not know its size says 0.
    return os.terminal_size((max(size.columns or 80, 10), max(size.lines or 24, 3)))


def _can_write(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
