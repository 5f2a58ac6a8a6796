"""Digests of declared files, remembered by what the file system says of each file.

A file whose size, mtime, ctime, inode and device are those of its entry has the entry's digest and
is not read. Times alone cannot tell two edits that fall into one tick of the file system's clock
(a few milliseconds; whole seconds on some), so an entry is only made when no later edit can be
confused with it, which is git's rule for "racy" entries, seen from the writing side:

- the file system's own clock is read before the file is, from a new, unnamed file in the same
  directory, so that its granularity and a server's time count as they are;
- mtime and ctime must lie before that moment. The clock has then ticked since the last change, and
  whatever changes the file after it was read gets a later ctime, which nobody can set back;
- the file must be on that file system, and the same before and after it was read.

What does not pass is read again next time. Not seen, as by git and make, is a write through a
memory mapping that the kernel has not accounted for yet, and a clock that was set back to the very
nanosecond of an older change.

The cache is a file per context directory in ``Home.cache/files``: a line that names the format and
the SHA-256 of the rest, then path, stamp and digest of each entry, all ended by NUL. It is replaced
as a whole, so builds at once only cost each other entries; what is damaged is no cache.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from smolbuild.core.digest import Digest, digest_bytes, digest_chunks, hex_of
from smolbuild.core.files import private_directory, write_atomic
from smolbuild.core.values import dataclass

__all__ = ["CLOCK_PREFIX", "digest_files"]

CLOCK_PREFIX = ".smolbuild-clock-"
"""Of the short-lived file that shows the clock of a file system without unnamed files."""

_MAGIC = "smolbuild.stat-cache.v1"
_MAX_ENTRIES = 400_000
_KEPT_CONTEXTS = 64
_READ = 1 << 20
_PARALLEL_FILES = 64
_PARALLEL_BYTES = 8 << 20

_Known = dict[str, tuple[str, str]]
"""Stamp and digest by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A file that was read: its digest, and its stamp if that did not change meanwhile."""

    digest: Digest
    stamp: str | None
    device: int = 0
    changed_ns: int = 0
    """The later of mtime and ctime."""


def digest_files(
    context: Path, found: Mapping[str, os.stat_result], cache: Path | None
) -> dict[str, Digest | OSError]:
    """Return the digest of each regular file in ``found``, or why it cannot be read.

    Idempotent. Files without an entry are read in parallel and get one where that is safe.

    Args:
        context: the directory that paths are relative to.
        found: what ``lstat`` said of each path just now.
        cache: ``Home.cache``; None: read every file.

    """
    entries = None if cache is None else _entries_path(private_directory(cache / "files"), context)
    known = {} if entries is None else _load(entries)
    nothing = ("", "")
    stamps = {path: _stamp(status) for path, status in found.items()}
    digests: dict[str, Digest | OSError] = {}
    unknown = []
    for path, stamp in stamps.items():
        kept, digest = known.get(path, nothing)
        if kept == stamp:
            digests[path] = Digest(digest)
        else:
            unknown.append(path)
    if unknown:
        clock = None if entries is None else _clock(context)
        total = sum(found[path].st_size for path in unknown)
        read = dict(_read_all(context, unknown, total))
        digests |= {p: r.digest if isinstance(r, _Read) else r for p, r in read.items()}
        if entries is not None and clock is not None:
            _remember(entries, known, stamps, read, clock)
    return digests


def _entries_path(directory: Path, context: Path) -> Path:
    return directory / hex_of(digest_bytes(os.fsencode(context)))


def _stamp(status: os.stat_result) -> str:
    return (
        f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino} "
        f"{status.st_dev}"
    )


def _load(path: Path) -> _Known:
    try:
        head, _, body = path.read_bytes().partition(b"\n")
        if head.decode() != f"{_MAGIC} {digest_bytes(body)}":
            return {}
        fields = body.decode("utf-8").split("\0")
    except (OSError, UnicodeDecodeError):
        return {}
    return dict(zip(fields[0::3], zip(fields[1::3], fields[2::3], strict=False), strict=False))


def _remember(
    path: Path,
    known: _Known,
    stamps: Mapping[str, str],
    read: Mapping[str, "_Read | OSError"],
    clock: tuple[int, int],
) -> None:
    device, now = clock
    new = {
        name: (item.stamp, str(item.digest))
        for name, item in read.items()
        if isinstance(item, _Read)
        and item.stamp is not None
        and item.device == device
        and item.changed_ns < now
    }
    if not new:
        return
    merged = known | new
    if len(merged) > _MAX_ENTRIES:  # what other Smolfiles of the directory declare goes first
        merged = {name: entry for name, entry in merged.items() if name in stamps}
    if len(merged) > _MAX_ENTRIES:
        return
    body = "".join(f"{name}\0{stamp}\0{digest}\0" for name, (stamp, digest) in merged.items())
    data = body.encode()
    with contextlib.suppress(OSError):  # a full disk, say: it is only a cache
        write_atomic(path, f"{_MAGIC} {digest_bytes(data)}\n".encode() + data)
        _forget_old(path.parent)


def _forget_old(directory: Path) -> None:
    with os.scandir(directory) as listing:
        ages = sorted((entry.stat().st_mtime_ns, entry.path) for entry in listing)
    for _, old in ages[:-_KEPT_CONTEXTS]:
        Path(old).unlink(missing_ok=True)


def _clock(directory: Path) -> tuple[int, int] | None:
    """Return device and present time (ns) of the file system of ``directory``; None: not known."""
    unnamed = getattr(os, "O_TMPFILE", 0)
    if unnamed:
        with contextlib.suppress(OSError):
            descriptor = os.open(directory, unnamed | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                return _times(descriptor)
            finally:
                os.close(descriptor)
    import tempfile

    try:
        with tempfile.NamedTemporaryFile(prefix=CLOCK_PREFIX, dir=directory) as file:
            return _times(file.fileno())
    except OSError:
        return None  # not writable: files are read every time


def _times(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, min(status.st_mtime_ns, status.st_ctime_ns)


def _read_all(
    context: Path, paths: list[str], total: int
) -> Iterator[tuple[str, "_Read | OSError"]]:
    def read(path: str) -> "_Read | OSError":
        try:
            return _read(context, path)
        except OSError as error:
            return error

    if len(paths) < _PARALLEL_FILES and total < _PARALLEL_BYTES:
        yield from ((path, read(path)) for path in paths)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        yield from zip(paths, pool.map(read, paths, chunksize=64), strict=True)


def _read(context: Path, path: str) -> _Read:
    # What was a file a moment ago may be a symlink or a FIFO now: neither is followed or awaited.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(f"{context}/{path}", flags)
    try:
        before = os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode):
            raise OSError(errno.EINVAL, "it is no longer a regular file", path)
        digest = digest_chunks(iter(lambda: os.read(descriptor, _READ), b""))
        after = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    stamp = _stamp(before)
    return _Read(
        digest=digest,
        stamp=stamp if stamp == _stamp(after) else None,
        device=before.st_dev,
        changed_ns=max(before.st_mtime_ns, before.st_ctime_ns),
    )
