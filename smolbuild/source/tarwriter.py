"""Members of tar archives as bytes: the same member always gives the same ones.

Format: POSIX.1-2001 (pax), written by the standard library; extended attributes as the records
``SCHILY.xattr.NAME`` that every container engine reads.
"""

import hashlib
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from smolbuild.core.digest import Digest
from smolbuild.core.errors import BuildError
from smolbuild.model.declared import FileEntry
from smolbuild.source.tree import Kind, Node, Tree

__all__ = ["END", "MTIME", "file_member", "tree_members"]

BLOCK = 512
END = bytes(2 * BLOCK)
"""What an archive ends with."""
MTIME = 315532800
"""1980-01-01: fixed, and the earliest time that a zip archive made in the guest can hold."""

_CHUNK = 1 << 20
_TYPES = {
    Kind.DIRECTORY: tarfile.DIRTYPE,
    Kind.FILE: tarfile.REGTYPE,
    Kind.SYMLINK: tarfile.SYMTYPE,
    Kind.CHAR: tarfile.CHRTYPE,
    Kind.BLOCK: tarfile.BLKTYPE,
    Kind.FIFO: tarfile.FIFOTYPE,
}


def file_member(
    directory: Path,
    entry: FileEntry,
    name: str,
    *,
    mode: int | None = None,
    uid: int = 0,
    gid: int = 0,
) -> Iterator[bytes]:
    """Yield the member ``name`` for a file of the host, checked against its digest while read.

    Without ``mode`` it is 0644, or 0755 for directories and what its owner may execute.

    Raises:
        BuildError: the file changed since it was digested.

    """
    info = tarfile.TarInfo(name)
    info.mtime, info.uid, info.gid = MTIME, uid, gid
    info.mode = (
        (0o755 if entry.kind == "dir" or entry.executable else 0o644) if mode is None else mode
    )
    if entry.kind == "dir":
        info.type = tarfile.DIRTYPE
    elif entry.kind == "symlink":
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.target or "", 0o777
    else:
        info.size = entry.size
    yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
    if entry.kind == "file":
        yield from _content(directory, entry)


def _content(directory: Path, entry: FileEntry) -> Iterator[bytes]:
    hasher = hashlib.sha256()
    left = entry.size
    try:
        descriptor = os.open(directory / entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
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
    yield bytes(-entry.size % BLOCK)


def _changed(entry: FileEntry, why: str) -> BuildError:
    return BuildError(
        f"{entry.path} changed during the build: {why}",
        hint="build again when nothing writes to the Smolfile's directory",
        code="file-changed",
    )


def tree_members(tree: Tree) -> Iterator[bytes]:
    """Yield every node of ``tree`` as a member, parents first and names in byte order.

    The second and later names of a file are hard links to its first. The root is not a member.

    Raises:
        BuildError: content is not there any more.

    """
    first: dict[int, bytes] = {}
    for path, node in tree.walk():
        if not path:
            continue
        known = first.get(id(node))
        if known is not None:
            yield _header(path, node, link=known)
            continue
        if node.kind is not Kind.DIRECTORY:
            first[id(node)] = path
        yield _header(path, node)
        if node.kind is Kind.FILE:
            yield from node.content.chunks(_CHUNK)
            yield bytes(-node.content.size % BLOCK)


def _header(path: bytes, node: Node, *, link: bytes | None = None) -> bytes:
    info = tarfile.TarInfo(_text(path))
    info.mode, info.uid, info.gid, info.mtime = node.mode, node.uid, node.gid, node.mtime
    if link is not None:
        info.type, info.linkname = tarfile.LNKTYPE, _text(link)
    else:
        info.type = _TYPES[node.kind]
        info.linkname = _text(node.target)
        info.devmajor, info.devminor = node.device
        info.size = node.content.size if node.kind is Kind.FILE else 0
        info.pax_headers = _attributes(node.xattrs)
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _attributes(xattrs: Mapping[bytes, bytes]) -> dict[str, str]:
    return {f"SCHILY.xattr.{_text(name)}": _text(xattrs[name]) for name in sorted(xattrs)}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
