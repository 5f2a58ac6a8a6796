"""The deterministic tar stream of what copies put into the guest."""

import hashlib
import os
import posixpath
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from smolbuild.core.digest import Digest
from smolbuild.core.errors import BuildError
from smolbuild.model.declared import DeclaredFiles, FileEntry
from smolbuild.model.smolfile import Copy

__all__ = ["named_owners", "tar_stream"]

MTIME = 315532800
"""1980-01-01: fixed, and the earliest time that a zip archive made in the guest can hold."""
_CHUNK = 1 << 20
_BLOCK = 512


def named_owners(copies: Iterable[Copy]) -> tuple[str, ...]:
    """Return the owners of ``copies`` that only the guest's own user database can resolve."""
    owners = {copy.owner for copy in copies if copy.owner is not None}
    return tuple(sorted(owner for owner in owners if _numbers(owner) is None))


def tar_stream(
    files: DeclaredFiles,
    copies: Iterable[Copy],
    *,
    owners: Mapping[str, tuple[int, int]] | None = None,
) -> Iterator[bytes]:
    """Yield a tar archive, to be unpacked below ``/``, of what ``copies`` put into the guest.

    The same files and copies always give the same bytes: sorted, fixed mtime, numeric owners. No
    file is held in memory whole, and each is checked against its digest while it is read. A
    directory that holds something is not in the archive itself, unless the copy gives an owner or a
    mode: where it exists in the guest, it stays as it is.

    Args:
        files: what was collected for these copies.
        copies: in the order in which they apply; a later one replaces what an earlier one put.
        owners: uid and gid of each of ``named_owners(copies)``.

    Raises:
        BuildError: a file changed since it was collected, or an owner is not in ``owners``.

    """
    for copy in copies:
        yield from _copy(files, copy, owners or {})
    yield bytes(2 * _BLOCK)


def _copy(
    files: DeclaredFiles, copy: Copy, owners: Mapping[str, tuple[int, int]]
) -> Iterator[bytes]:
    uid, gid = _owner(copy, owners)
    entries = files.under(copy.source)
    base = _base(copy)
    occupied = {posixpath.dirname(entry.path) for entry in entries}
    dressed = copy.owner is not None or copy.mode is not None
    for entry in entries:
        inner = "" if entry.path == copy.source else _below(entry.path, copy.source)
        name = posixpath.join(base, inner).strip("/")
        if not name or (entry.kind == "dir" and entry.path in occupied and not dressed):
            continue
        yield _header(entry, name, mode=_mode(entry, copy.mode), uid=uid, gid=gid)
        if entry.kind == "file":
            yield from _content(files.context, entry)


def _base(copy: Copy) -> str:
    if copy.source != "." and copy.to.endswith("/"):
        return copy.to + posixpath.basename(copy.source)
    return copy.to


def _below(path: str, source: str) -> str:
    return path if source == "." else path[len(source) + 1 :]


def _mode(entry: FileEntry, mode: int | None) -> int:
    if entry.kind == "symlink":
        return 0o777
    if mode is None:
        return 0o755 if entry.kind == "dir" or entry.executable else 0o644
    # Who may read a file of the copy may also enter its directories.
    return mode | (mode & 0o444) >> 2 if entry.kind == "dir" else mode


def _header(entry: FileEntry, name: str, *, mode: int, uid: int, gid: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.mtime, info.mode, info.uid, info.gid = MTIME, mode, uid, gid
    if entry.kind == "dir":
        info.type = tarfile.DIRTYPE
    elif entry.kind == "symlink":
        info.type, info.linkname = tarfile.SYMTYPE, entry.target or ""
    else:
        info.size = entry.size
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def _content(context: Path, entry: FileEntry) -> Iterator[bytes]:
    hasher = hashlib.sha256()
    left = entry.size
    try:
        descriptor = os.open(context / entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            while left:
                chunk = stream.read(min(left, _CHUNK))
                if not chunk:
                    break
                hasher.update(chunk)
                left -= len(chunk)
                yield chunk
            longer = bool(stream.read(1))
    except OSError as error:
        raise _changed(entry, f"it cannot be read: {error.strerror}") from error
    if left or longer or Digest("sha256:" + hasher.hexdigest()) != entry.digest:
        raise _changed(entry, "its content is not the one that was digested")
    yield bytes(-entry.size % _BLOCK)


def _changed(entry: FileEntry, why: str) -> BuildError:
    return BuildError(
        f"{entry.path} changed during the build: {why}",
        hint="build again when nothing writes to the Smolfile's directory",
        code="file-changed",
    )


def _owner(copy: Copy, owners: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    if copy.owner is None:
        return 0, 0
    found = _numbers(copy.owner) or owners.get(copy.owner)
    if found is None:
        raise BuildError(
            f"copy of {copy.source}: the image has no user or group for owner {copy.owner!r}",
            hint="make the user in an earlier step and copy in that step, or give numbers",
            code="unknown-owner",
        )
    return found


def _numbers(owner: str) -> tuple[int, int] | None:
    user, _, group = owner.partition(":")
    numbers = [0 if part == "root" else _number(part) for part in (user, group or user)]
    uid, gid = numbers
    return None if uid is None or gid is None else (uid, gid)


def _number(text: str) -> int | None:
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        return None
    return int(text) if int(text) < 2**32 - 1 else None
