"""The deterministic tar stream of what copies put into the guest."""

import posixpath
from collections.abc import Iterable, Iterator, Mapping

from smolbuild.core.errors import BuildError
from smolbuild.model.declared import DeclaredFiles, FileEntry
from smolbuild.model.smolfile import Copy
from smolbuild.source.tarwriter import END, file_member

__all__ = ["named_owners", "tar_stream"]


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
    yield END


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
        mode = _mode(entry, copy.mode)
        yield from file_member(files.context, entry, name, mode=mode, uid=uid, gid=gid)


def _base(copy: Copy) -> str:
    if copy.source != "." and copy.to.endswith("/"):
        return copy.to + posixpath.basename(copy.source)
    return copy.to


def _below(path: str, source: str) -> str:
    return path if source == "." else path[len(source) + 1 :]


def _mode(entry: FileEntry, mode: int | None) -> int | None:
    if mode is None:
        return None
    # Who may read a file of the copy may also enter its directories.
    return mode | (mode & 0o444) >> 2 if entry.kind == "dir" else mode


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
