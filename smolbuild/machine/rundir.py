"""One directory per running machine, which goes when its owner does.

The owner holds the flock of the directory for as long as it lives; the kernel drops it with the
process. A directory whose ``owner`` file exists and whose lock is free is left over, and is swept;
so is one without that file, unless some process is just making one.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
from pathlib import Path

from smolbuild.core.files import file_lock, remove_tree, try_lock
from smolbuild.core.home import Home
from smolbuild.core.values import dataclass

__all__ = ["RunDirectory", "sweep"]

_OWNER = "owner"
_PROCESS = "process.json"
_MAKING = "making-run-directory"
"""A lock: while nobody holds it, no directory is in the making."""
_MAKING_SECONDS = 30.0
_KILL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The private directory (0700) of one machine, owned by this process until ``remove``."""

    path: Path
    _held: list[int]
    """Descriptor of the locked directory; taken out by whoever closes it, so that it is once."""

    @classmethod
    def create(cls, home: Home) -> "RunDirectory":
        """Make a directory with a random name and lock it.

        Raises:
            OSError: it cannot be made.
            BusyError: another command, stopped in the middle of a sweep, holds everybody up.

        """
        path = home.run / os.urandom(6).hex()
        making = home.locks / _MAKING
        with file_lock(making, timeout=_MAKING_SECONDS, what=f"{home.run}", shared=True):
            path.mkdir(mode=0o700)
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Only after the lock is held: a sweep that sees this and gets the lock may remove us.
            (path / _OWNER).touch(mode=0o600)
        return cls(path, [lock])

    @property
    def id(self) -> str:
        """The directory's name: 12 hex digits."""
        return self.path.name

    def record_process(self, pid: int) -> None:
        """Note the engine process, so that a sweep can tell it from a stranger with its pid."""
        record = {"pid": pid, "start": _start_time(pid)}
        (self.path / _PROCESS).write_text(json.dumps(record), encoding="utf-8")

    def remove(self) -> None:
        """Remove the directory and let go of the lock. Idempotent; never raises."""
        with contextlib.suppress(OSError):
            remove_tree(self.path)
        # A number closed twice may by then be another thread's file.
        with contextlib.suppress(OSError, IndexError):
            os.close(self._held.pop())


def sweep(home: Home) -> int:
    """Remove the directories of machines whose owner is gone, and return how many there were.

    An engine process that outlived its owner is killed, if pid, start time and command line are
    still the recorded ones. Costs one directory listing when there is nothing to do. Idempotent,
    and safe beside other sweeps and running machines.
    """
    swept = 0
    for entry in os.scandir(home.run):
        if entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(OSError):
                swept += _sweep_one(home, Path(entry.path))
    return swept


def _sweep_one(home: Home, path: Path) -> bool:
    if (path / _OWNER).exists():
        return _sweep_ownerless(path)
    with try_lock(home.locks / _MAKING) as nobody_makes_one:
        return nobody_makes_one and _sweep_ownerless(path)


def _sweep_ownerless(path: Path) -> bool:
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _kill_recorded(path)
        remove_tree(path)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _kill_recorded(path: Path) -> None:
    try:
        record = json.loads((path / _PROCESS).read_bytes())
        pid, start = int(record["pid"]), str(record["start"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if pid <= 1 or not start or not hasattr(os, "pidfd_open"):
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        handle = os.pidfd_open(pid)
        try:
            # Checked after the handle is open: what was checked is what gets the signal.
            if _start_time(pid) == start and os.fsencode(path) in _command_line(pid):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                select.select([handle], [], [], _KILL_SECONDS)
        finally:
            os.close(handle)


def _start_time(pid: int) -> str:
    """Return the process's start in clock ticks since the host's boot; empty when unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = stat[stat.rfind(")") + 1 :].split()
    return fields[19] if len(fields) > 19 else ""


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
