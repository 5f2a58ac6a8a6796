"""The user's terminal, lent to a program in a guest."""

import contextlib
import dataclasses
import os
import queue
import secrets
import select
import signal
import termios
import threading
import time
import tty
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import IO, Self, cast

from smolbuild.core.errors import MachineError, UsageError
from smolbuild.machine.base import ExecRequest, ExecResult, Machine, Terminal

__all__ = ["SHELL", "interactive"]

SHELL = ("/bin/sh", "-c", 'exec "$(command -v bash || command -v sh)" -i')
"""The command of a shell for a person: the best one that the guest has."""

_LEAVE = b"\x1d"
_LEAVE_TIMES = 3
_LEAVE_SECONDS = 1.0
_LOOK_SECONDS = 0.25
_JOIN_SECONDS = 2.0
_SESSION_SECONDS = 30 * 86400.0


def interactive(
    machine: Machine,
    request: ExecRequest,
    environment: Mapping[str, str],
    *,
    keys: int = 0,
    screen: int = 1,
) -> ExecResult:
    """Run ``request`` in ``machine`` at the user's terminal, to its end.

    Every key goes to the guest; three Ctrl-] within a second leave a program that does not end.
    However this returns, the terminal is as it was before. To be called from the main thread.

    Args:
        machine: where the program runs.
        request: the program; its id, terminal, standard input and timeout are set here.
        environment: TERM is taken from it.
        keys: descriptor that is read.
        screen: descriptor that is written.

    Raises:
        UsageError: ``keys`` is no terminal.
        MachineError: the machine ended, or the program cannot be started.

    """
    if not os.isatty(keys):
        raise UsageError(
            "standard input is no terminal", hint="run this where a person can type into it"
        )
    rows, columns = _size(screen)
    person = _Keys(keys)
    exec_id = request.exec_id or secrets.token_hex(16)
    request = dataclasses.replace(
        request,
        exec_id=exec_id,
        tty=Terminal(rows=rows, columns=columns, kind=environment.get("TERM") or "xterm"),
        stdin=cast("IO[bytes]", person),
        timeout=_SESSION_SECONDS,
    )
    with _raw(keys), _resizing(machine, exec_id, screen) as look_again, person:
        begun = False

        def show(_: str, data: bytes) -> None:
            nonlocal begun
            if not begun:  # it may have changed when nobody in the guest could be told
                begun = True
                look_again()
            _write(screen, data)

        try:
            return machine.exec(request, show)
        except KeyboardInterrupt:
            if not person.left:
                raise
            return ExecResult(exec_id=exec_id, status=128 + signal.SIGHUP)


class _Keys:
    """What the user types, read only as long as the program in the guest is there to get it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._over = threading.Event()
        self._pressed: list[float] = []
        self.left = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def read(self, size: int) -> bytes:
        """Wait for keys; nothing when it is over, or the terminal was hung up."""
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        while not self._over.is_set():
            if not poller.poll(_LOOK_SECONDS * 1000) or self._over.is_set():
                continue
            try:
                data = os.read(self._descriptor, size)
            except OSError:
                return b""
            if self._wants_to_leave(data):
                self.left = True
                self._over.set()
                # Not interrupt_main: that does not wake who waits for the guest.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return b""
            return data
        return b""

    def _wants_to_leave(self, data: bytes) -> bool:
        last = len(data) - len(data.rstrip(_LEAVE))
        if last < len(data):
            self._pressed.clear()
        now = time.monotonic()
        self._pressed = [at for at in self._pressed if now - at < _LEAVE_SECONDS]
        self._pressed += [now] * last
        return len(self._pressed) >= _LEAVE_TIMES


@contextlib.contextmanager
def _raw(descriptor: int) -> Iterator[None]:
    saved = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor, termios.TCSADRAIN)
        yield
    finally:
        # At once: output that is held up (Ctrl-S, a dead line) must not hold this up too.
        with contextlib.suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSANOW, saved)


class _LookAgain:
    """Asks for the terminal's size to be passed on; may be called in a signal handler."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def __call__(self, number: int = 0, frame: FrameType | None = None) -> None:
        del number, frame
        self.queue.put(True)


@contextlib.contextmanager
def _resizing(machine: Machine, exec_id: str, screen: int) -> Iterator[_LookAgain]:
    look_again = _LookAgain()

    def pass_on() -> None:
        while look_again.queue.get():
            rows, columns = _size(screen)
            # Before its start and after its end there is nothing to resize.
            with contextlib.suppress(MachineError):
                machine.resize(exec_id, rows, columns)

    thread = threading.Thread(target=pass_on, name="resize", daemon=True)
    thread.start()
    before = signal.signal(signal.SIGWINCH, look_again)
    try:
        yield look_again
    finally:
        signal.signal(signal.SIGWINCH, before)
        look_again.queue.put(False)
        thread.join(_JOIN_SECONDS)


def _size(screen: int) -> tuple[int, int]:
    try:
        size = os.get_terminal_size(screen)
    except OSError:
        return 24, 80
    return size.lines, size.columns


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
