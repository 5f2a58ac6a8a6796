"""An unpacked root file system in a directory of the host.

Everything is read with ``lstat``; no link is followed and nothing outside is looked at. Sockets are
left out. Owners: for a user other than root, that user and group become 0 in the image (who else
could have unpacked it); every other owner, and all owners when root reads, are kept as they are.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from smolbuild.core.canon import Json, canonical_json
from smolbuild.core.digest import Digest
from smolbuild.core.errors import BuildError
from smolbuild.source.content import Content, PathBacking, Segment
from smolbuild.source.tree import Kind, Node, Tree

__all__ = ["digest_tree", "read_rootfs"]

_DOMAIN = b"smolbuild.tree.v1\0"
_KINDS = {
    stat.S_IFDIR: Kind.DIRECTORY,
    stat.S_IFREG: Kind.FILE,
    stat.S_IFLNK: Kind.SYMLINK,
    stat.S_IFCHR: Kind.CHAR,
    stat.S_IFBLK: Kind.BLOCK,
    stat.S_IFIFO: Kind.FIFO,
}
_PREFIXES = (b"user.", b"trusted.", b"security.", b"system.posix_acl_")
_HOST_LABELS = (b"security.selinux", b"security.evm", b"security.ima")
"""Written by the host's own kernel, not by whoever made the root."""


def read_rootfs(directory: Path) -> Tree:
    """Return the tree of ``directory``; file content is read later, and must not change until then.

    Raises:
        BuildError: something in it cannot be read, or disappears meanwhile.

    """
    tree = Tree()
    owners = _Owners()
    seen: dict[tuple[int, int], Node] = {}
    try:
        base = os.fsencode(directory)
        tree.root = _node(base, os.lstat(base), owners)
        pending = [(base, tree.root)]
        while pending:
            path, parent = pending.pop()
            for name in os.listdir(path):  # noqa: PTH208 - names are bytes
                below = path + b"/" + name
                status = os.lstat(below)
                if stat.S_IFMT(status.st_mode) not in _KINDS:
                    continue
                tree.count()
                node = seen.get((status.st_dev, status.st_ino)) or _node(below, status, owners)
                parent.children[name] = node
                if node.kind is Kind.DIRECTORY:
                    pending.append((below, node))
                elif status.st_nlink > 1:
                    seen[status.st_dev, status.st_ino] = node
    except OSError as error:
        raise BuildError(
            f"cannot read {os.fsdecode(error.filename or directory)}: {error.strerror}",
            hint="make it readable for the user who builds; nothing may be left out silently",
            code="unreadable",
        ) from error
    return tree


class _Owners:
    """Maps the invoking user and group to root."""

    def __init__(self) -> None:
        self._uid, self._gid = os.geteuid(), os.getegid()

    def uid(self, uid: int) -> int:
        return 0 if uid == self._uid else uid  # root is 0 already

    def gid(self, gid: int) -> int:
        return 0 if gid == self._gid and self._uid != 0 else gid


def _node(path: bytes, status: os.stat_result, owners: _Owners) -> Node:
    kind = _KINDS[stat.S_IFMT(status.st_mode)]
    node = Node(
        kind=kind,
        mode=stat.S_IMODE(status.st_mode),
        uid=owners.uid(status.st_uid),
        gid=owners.gid(status.st_gid),
        mtime=int(status.st_mtime),
        xattrs=_xattrs(path),
    )
    if kind is Kind.FILE:
        if not os.access(path, os.R_OK):
            raise PermissionError(13, "permission denied", os.fsdecode(path))
        size = status.st_size
        node.content = Content(
            size, PathBacking(path, status), (Segment(0, 0, size),) if size else ()
        )
    elif kind is Kind.SYMLINK:
        node.target = os.readlink(path)  # noqa: PTH115 - names are bytes
    elif kind in (Kind.CHAR, Kind.BLOCK):
        node.device = os.major(status.st_rdev), os.minor(status.st_rdev)
    return node


def _xattrs(path: bytes) -> dict[bytes, bytes]:
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return {}
        raise
    found = {}
    for text in names:
        name = os.fsencode(text)
        if name.startswith(_PREFIXES) and name not in _HOST_LABELS:
            found[name] = os.getxattr(path, text, follow_symlinks=False)
    return found


def digest_tree(tree: Tree) -> Digest:
    """Return the canonical digest of a tree.

    In it: paths, kinds, modes, owners, content, link targets, hard links, attributes. Not
    in it: times, and the order in which a directory lists its names. Reads every file.

    Raises:
        BuildError: a file cannot be read or changed.

    """
    hasher = hashlib.sha256(_DOMAIN)
    first: dict[int, bytes] = {}
    for path, node in tree.walk():
        known = first.setdefault(id(node), path)
        row: Json = (
            [_text(path), "link", _text(known)]
            if known != path
            else [_text(path), node.kind.value, *_facts(node)]
        )
        hasher.update(canonical_json(row) + b"\n")
    return Digest("sha256:" + hasher.hexdigest())


def _facts(node: Node) -> Iterator[Json]:
    yield from (node.mode, node.uid, node.gid)
    yield [[_text(name), _text(value)] for name, value in sorted(node.xattrs.items())]
    if node.kind is Kind.FILE:
        content = hashlib.sha256()
        for chunk in node.content.chunks():
            content.update(chunk)
        yield content.hexdigest()
    elif node.kind is Kind.SYMLINK:
        yield _text(node.target)
    elif node.kind in (Kind.CHAR, Kind.BLOCK):
        yield list(node.device)


def _text(data: bytes) -> str:
    """Return bytes as text, one character each: every name has exactly one form."""
    return data.decode("latin-1")
