"""Crash-safe files: atomic writes, locks that die with their holder, space checks."""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from smolbuild.core.errors import BusyError, HostError, UsageError

__all__ = [
    "atomic_file",
    "data_extents",
    "file_lock",
    "fsync_directory",
    "private_directory",
    "remove_tree",
    "require_file",
    "require_space",
    "sweep_temporaries",
    "try_lock",
    "write_atomic",
]


def private_directory(path: Path) -> Path:
    """Create ``path`` with mode 0700 if it is missing, and return it. Idempotent.

    Missing parents are made too, with the modes that the umask leaves them.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def fsync_directory(path: Path) -> None:
    """Make renames and creations in the directory ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_file(path: Path, *, mode: int = 0o600) -> Iterator[IO[bytes]]:
    """Give a temporary file that takes the place of ``path`` when the block ends without an error.

    A crash at any point leaves the old file or the new one, never a mixture; an error leaves the
    old one. The temporary file is named ``.tmp-*`` in the same directory.

    Raises:
        HostError: the disk is full.
        UsageError: something else than a file has this name: a directory, a device, a pipe.
        OSError: the directory cannot be written.

    """
    import tempfile

    require_file(path)
    descriptor, name = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(stream.fileno(), mode)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise HostError(f"no space left while writing {path}", code="no-space") from error
        raise
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)


def require_file(path: Path) -> None:
    """Check that ``path`` may be replaced by a file: it is one, or nothing is there.

    Raises:
        UsageError: it is a directory, a device, a pipe …; root would replace even /dev/null.

    """
    if path.exists() and not path.is_file():
        raise UsageError(
            f"{path} is there and is not a file", hint="name another", code="not-a-file"
        )


def write_atomic(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace the content of ``path`` with ``data`` durably and atomically. Idempotent."""
    with atomic_file(path, mode=mode) as stream:
        stream.write(data)


@contextlib.contextmanager
def try_lock(path: Path, *, shared: bool = False) -> Iterator[bool]:
    """Hold the flock of ``path`` if it is free, and say whether it is held.

    The lock vanishes with the process, also after kill -9. The file itself stays.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def file_lock(
    path: Path, *, timeout: float, what: str, shared: bool = False, interval: float = 0.05
) -> Iterator[None]:
    """Hold the flock of ``path``, waiting up to ``timeout`` seconds for it.

    Args:
        path: the lock file; created with mode 0600, never removed.
        timeout: seconds to wait.
        what: what the lock protects, for the error message.
        shared: take a shared lock (readers) instead of an exclusive one.
        interval: seconds between tries.

    Raises:
        BusyError: another process still holds it after ``timeout``.

    """
    deadline = time.monotonic() + timeout
    while True:
        with try_lock(path, shared=shared) as held:
            if held:
                yield
                return
        if time.monotonic() >= deadline:
            raise BusyError(
                f"{what} is held by another process after {timeout:.0f} s",
                hint="wait for the other smolbuild command, or stop it",
            )
        time.sleep(interval)


def data_extents(descriptor: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start, end)`` of each part of an open file that may hold data; the rest is holes.

    Raises:
        OSError: the file cannot be read.

    """
    size, at = os.fstat(descriptor).st_size, 0
    while at < size:
        try:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # only a hole is left
            raise
        at = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, at


def require_space(directory: Path, needed: int, *, what: str) -> None:
    """Check that the file system of ``directory`` has ``needed`` bytes free.

    Raises:
        HostError: it has not; names the bytes needed and free.

    """
    existing = directory
    while not existing.exists():
        existing = existing.parent
    import shutil

    free = shutil.disk_usage(existing).free
    if free < needed:
        raise HostError(
            f"{what} needs {needed:,} bytes in {directory}, but only {free:,} are free",
            hint="free some space, run `smolbuild rm`, or set SMOLBUILD_HOME to a larger disk",
            code="no-space",
        )


def remove_tree(path: Path) -> None:
    """Remove ``path`` and all below it; a missing path is fine. Idempotent."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            import shutil

            shutil.rmtree(path)
        else:
            path.unlink()


def sweep_temporaries(directory: Path, *, older_than: float) -> int:
    """Remove the ``.tmp-*`` entries that killed processes left in ``directory``; return how many.

    Only what nobody has written to for ``older_than`` seconds goes. Idempotent, safe beside others.
    """
    swept = 0
    until = time.time() - older_than
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as listing:
        for entry in listing:
            if entry.name.startswith(".tmp-"):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime <= until:
                        remove_tree(Path(entry.path))
                        swept += 1
    return swept
