"""The end of what an engine process wrote, console and messages, for errors to quote."""

import contextlib
import os
import selectors
import socket
import threading

from smolbuild.core.clock import Deadline

__all__ = ["Tail"]

_KEEP = 16384
_READ = 65536


class Tail:
    """Reads a machine's console and its engine's standard error, and keeps the end of each.

    A guest that writes without end costs no memory and no disk. One thread per machine reads both
    and ends when both are closed by the engine.

    Args:
        console: our end of the serial console's socket pair; owned by this object.
        errors: our end of the pipe for standard error; owned by this object.
        started: what marks that the guest's kernel runs (``Linux version``).

    """

    def __init__(self, console: socket.socket, errors: int, *, started: bytes) -> None:
        self._console = console
        self._errors = errors
        self._marker = started
        self._kernel_seen = False
        self._news = threading.Event()
        self._kept = {console.fileno(): bytearray(), errors: bytearray()}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read_all, name="console", daemon=True)
        self._thread.start()

    @property
    def kernel_seen(self) -> bool:
        """Whether the guest's kernel has printed its first line."""
        return self._kernel_seen

    def await_kernel(self, seconds: float) -> bool:
        """Wait for the kernel's first line; False when the engine ended or ``seconds`` passed."""
        self._news.wait(seconds)
        return self._kernel_seen

    def console(self) -> str:
        """Return the end of the console, at most 16 KiB."""
        return self._text(self._console_number)

    def errors(self) -> str:
        """Return the end of the engine's messages, at most 16 KiB."""
        return self._text(self._errors)

    def finish(self, *, deadline: Deadline) -> None:
        """Wait until all that the ended engine wrote is read, or ``deadline``."""
        self._thread.join(deadline.left())

    def _read_all(self) -> None:
        with selectors.DefaultSelector() as selector:
            for number in self._kept:
                selector.register(number, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._take(key.fd):
                        selector.unregister(key.fd)
        self._news.set()
        self._console.close()
        with contextlib.suppress(OSError):
            os.close(self._errors)

    def _take(self, number: int) -> bool:
        try:
            data = os.read(number, _READ)
        except OSError:
            return False
        with self._lock:
            kept = self._kept[number]
            if not self.kernel_seen and self._marker in bytes(kept[-len(self._marker) :]) + data:
                self._kernel_seen = True
                self._news.set()
            kept += data
            del kept[:-_KEEP]
        return bool(data)

    @property
    def _console_number(self) -> int:
        return next(iter(self._kept))

    def _text(self, number: int) -> str:
        with self._lock:
            return self._kept[number].decode("utf-8", "replace").replace("\r", "")
