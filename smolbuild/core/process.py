"""The one module that starts processes.

Argument lists only, never a command line for a shell to read; each child in its own process group,
killed when this one dies.
"""

import contextlib
import functools
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from smolbuild.core.errors import HostError
from smolbuild.core.programs import find_program

__all__ = ["Completed", "die_with_parent", "kill_group", "run", "spawn"]

_IF_CHILD_OF = 'test "$PPID" -eq "$0" && exec "$@"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """What a finished program left: exit status (negative: killed by signal) and its output."""

    status: int
    stdout: bytes
    stderr: bytes


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: bytes | None = None,
    stdout: IO[bytes] | None = None,
) -> Completed:
    """Run ``argv`` to its end and return what it left; a non-zero status is not an error here.

    Args:
        argv: program and arguments; the program is looked up in PATH.
        timeout: seconds; the whole process group is killed after it.
        env: the complete environment; the caller's when None.
        cwd: working directory.
        stdin: bytes to feed; /dev/null when None.
        stdout: file to write standard output to instead of collecting it.

    Raises:
        HostError: the program is missing, or did not end in time.

    """
    child = spawn(
        argv,
        env=env,
        cwd=cwd,
        stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
        stdout=stdout if stdout is not None else subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = child.communicate(input=stdin, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise HostError(
            f"{argv[0]} did not end within {timeout:.0f} s", code="program-timeout"
        ) from error
    finally:
        if child.returncode is None:
            kill_group(child)
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
    return Completed(status=child.returncode, stdout=out or b"", stderr=err or b"")


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int | IO[bytes] = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start ``argv`` in its own process group, killed by the kernel when this process dies.

    Raises:
        HostError: the program is missing.

    """
    program = find_program(argv[0])
    command = [*die_with_parent(os.getpid()), program, *argv[1:]]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            start_new_session=True,
        )

    return _SPAWNER.call(start)


def kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the process group that ``spawn`` made for ``child`` and reap the child. Idempotent."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def die_with_parent(parent: int) -> tuple[str, ...]:
    """Return what to put before a command so that it dies with the process ``parent``.

    The command is not started at all when ``parent`` is gone by then; empty where the system has no
    such means.
    """
    # PR_SET_PDEATHSIG through util-linux, not preexec_fn, which is unsafe in a threaded process.
    setpriv = _setpriv()
    if setpriv is None:
        return ()
    # A parent that was killed before the signal was asked for sends none: so look, once it was.
    return (setpriv, "--pdeathsig", "KILL", "--", "/bin/sh", "-c", _IF_CHILD_OF, str(parent))


@functools.cache
def _setpriv() -> str | None:
    return shutil.which("setpriv") if sys.platform == "linux" else None


_Start = Callable[[], subprocess.Popen[bytes]]
_Outcome = subprocess.Popen[bytes] | BaseException
_Request = tuple[_Start, "queue.SimpleQueue[_Outcome]"]


class _Spawner:
    """Starts all children from one thread that never ends.

    The kernel delivers the parent-death signal when the *thread* that forked ends, not the process;
    a child started from a pool thread would die with that thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()

    def call(self, start: _Start) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._pid != os.getpid():  # first use, or after a fork of this process
                self._pid = os.getpid()
                self._requests = queue.SimpleQueue()
                threading.Thread(
                    target=self._serve, args=(self._requests,), name="spawner", daemon=True
                ).start()
            requests = self._requests
        answer: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        requests.put((start, answer))
        outcome = answer.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    @staticmethod
    def _serve(requests: "queue.SimpleQueue[_Request]") -> None:
        while True:
            start, answer = requests.get()
            try:
                answer.put(start())
            except BaseException as error:  # noqa: BLE001 - handed to the caller, who raises it
                answer.put(error)


_SPAWNER = _Spawner()
