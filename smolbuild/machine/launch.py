"""Starting a QEMU process with its private sockets, and what is left of it when it ends."""

import contextlib
import os
import socket
import subprocess
import time
from dataclasses import dataclass

from smolbuild.core.clock import Deadline
from smolbuild.core.errors import MachineError
from smolbuild.core.process import kill_group, spawn
from smolbuild.machine.command import Descriptors, Launch, command
from smolbuild.machine.qmp import Qmp
from smolbuild.machine.rundir import RunDirectory
from smolbuild.machine.tail import Tail

__all__ = ["Process", "launch", "milliseconds_since"]

_KERNEL_STARTED = b"Linux version"
_LAST_WORDS_SECONDS = 1.0


@dataclass(slots=True, kw_only=True)
class Process:
    """A QEMU process, our ends of its sockets, and its run directory."""

    child: subprocess.Popen[bytes]
    qmp: Qmp
    agent: socket.socket
    tail: Tail
    directory: RunDirectory
    spawned: float
    """Milliseconds from the request until the process was started."""

    def ended(self, *, within: float = 0.0) -> bool:
        """Return whether QEMU has ended, or does ``within`` seconds."""
        try:
            self.child.wait(timeout=within)
        except subprocess.TimeoutExpired:
            return False
        return True

    def explain(self, what: str, error: MachineError) -> MachineError:
        """Return ``error`` as one that quotes QEMU's last messages and the console's tail."""
        if error.details:
            return error
        ended = self.ended(within=_LAST_WORDS_SECONDS if error.code == "machine-ended" else 0.0)
        if ended:
            self.tail.finish(deadline=Deadline.after(_LAST_WORDS_SECONDS))
        parts = [
            f"--- {name} ---\n{text.strip()}"
            for name, text in (("QEMU", self.tail.errors()), ("console", self.tail.console()))
            if text.strip()
        ]
        status = f" (QEMU ended with status {self.child.returncode})" if ended else ""
        return MachineError(
            f"{what}: {error.message}{status}",
            hint=error.hint,
            code=error.code,
            details="\n".join(parts),
        )

    def kill_engine(self) -> None:
        """Kill QEMU and keep the rest. Idempotent."""
        kill_group(self.child)

    def kill(self) -> None:
        """Kill QEMU, close its sockets, remove its directory. Idempotent."""
        kill_group(self.child)
        self.qmp.close()
        self.agent.close()
        self.tail.finish(deadline=Deadline.after(_LAST_WORDS_SECONDS))
        self.directory.remove()


def launch(wanted: Launch, directory: RunDirectory, requested: float) -> Process:
    """Start QEMU and return at once; it has not greeted yet.

    ``requested`` is the monotonic time that milestones count from.

    Raises:
        HostError: QEMU is not installed.
        OSError: no descriptors or processes left.

    """
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
        pairs = [socket.socketpair() for _ in range(3)]
        for mine, its in pairs:
            ours.callback(mine.close)
            theirs.callback(its.close)
        error_reader, error_writer = os.pipe()
        ours.callback(os.close, error_reader)
        theirs.callback(os.close, error_writer)
        numbers = [its.fileno() for _, its in pairs]
        child = spawn(
            command(wanted, Descriptors(qmp=numbers[0], agent=numbers[1], console=numbers[2])),
            stderr=error_writer,
            pass_fds=numbers,
        )
        ours.callback(kill_group, child)
        directory.record_process(child.pid)
        ours.pop_all()
    qmp, agent, console = (mine for mine, _ in pairs)
    return Process(
        child=child,
        qmp=Qmp(qmp),
        agent=agent,
        tail=Tail(console, error_reader, started=_KERNEL_STARTED),
        directory=directory,
        spawned=milliseconds_since(requested),
    )


def milliseconds_since(start: float) -> float:
    """Return milliseconds since ``start`` on the monotonic clock, to two decimals."""
    return round((time.monotonic() - start) * 1000, 2)
