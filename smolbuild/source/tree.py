"""An in-memory file tree: what a base image's layers are merged into before a disk is written.

Nothing of an untrusted image is ever created on the host by name. File content stays where it is (a
region of a tar, a file of a directory) and is only referred to. Names, link targets and extended
attributes are bytes, as the kernel has them.
"""

import enum
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from smolbuild.core.errors import BuildError
from smolbuild.source.content import EMPTY_CONTENT, Content, bytes_content

__all__ = ["MAX_NODES", "Kind", "Node", "Tree", "split_path"]

MAX_NODES = 2_000_000
"""More files than any real image has; a bound on what a hostile one can make us hold."""

_MAX_NAME = 255
_MAX_PATH = 4096
_MAX_LINKS = 40
"""Symbolic links followed in one path, as in Linux."""


class Kind(enum.Enum):
    """What a node is. Sockets have no place in an image and are dropped by the readers."""

    DIRECTORY = "directory"
    FILE = "file"
    SYMLINK = "symlink"
    CHAR = "char"
    BLOCK = "block"
    FIFO = "fifo"


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """An inode. Hard links are several names for one node; equality is identity."""

    kind: Kind
    mode: int = 0o755
    """Permission bits with set-id and sticky (07777)."""
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    """Seconds since the epoch."""
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    content: Content = EMPTY_CONTENT
    target: bytes = b""
    device: tuple[int, int] = (0, 0)
    """Major and minor number."""
    children: dict[bytes, "Node"] = field(default_factory=dict)


def split_path(path: bytes) -> tuple[bytes, ...]:
    """Return the components of an archive's path; a leading ``/`` is stripped, as every tool does.

    Raises:
        BuildError: a ``..``, a NUL, a component over 255 bytes, or more than 4096 bytes in all.

    """
    if len(path) > _MAX_PATH:
        raise BuildError(f"the path has {len(path):,} bytes, more than {_MAX_PATH:,}")
    if b"\0" in path:
        raise BuildError("the path holds a NUL byte")
    parts = tuple(part for part in path.split(b"/") if part not in (b"", b"."))
    for part in parts:
        if part == b"..":
            raise BuildError("the path holds '..'")
        if len(part) > _MAX_NAME:
            raise BuildError(f"a name has {len(part)} bytes, more than {_MAX_NAME}")
    return parts


class Tree:
    """A file tree with a root directory; names in it can never lead outside."""

    def __init__(self) -> None:
        self.root = Node(kind=Kind.DIRECTORY)
        self._made = 1

    def count(self) -> None:
        """Count one node made for this tree.

        Raises:
            BuildError: there are more than ``MAX_NODES``.

        """
        self._made += 1
        if self._made > MAX_NODES:
            raise BuildError(f"the image has more than {MAX_NODES:,} files")

    def directory(self, parts: Sequence[bytes], *, create: bool = False) -> Node:
        """Return the directory at ``parts``, following symbolic links inside this tree only.

        ``..`` in a link's target stops at the root, as in a chroot. With ``create``, missing
        directories are made (0755, owned by root).

        Raises:
            BuildError: a part is missing or no directory, or more than 40 links were followed.

        """
        stack, pending, followed = [self.root], list(reversed(parts)), 0
        while pending:
            part = pending.pop()
            if part in (b"", b"."):
                continue
            if part == b"..":
                if len(stack) > 1:
                    stack.pop()
                continue
            child = stack[-1].children.get(part)
            if child is None:
                child = self._implied(stack[-1], part, create=create)
            if child.kind is Kind.SYMLINK:
                followed += 1
                if followed > _MAX_LINKS:
                    raise BuildError(f"more than {_MAX_LINKS} symbolic links lead to it")
                if child.target.startswith(b"/"):
                    stack = [self.root]
                pending.extend(reversed(child.target.split(b"/")))
            elif child.kind is Kind.DIRECTORY:
                stack.append(child)
            else:
                raise BuildError(f"{os.fsdecode(part)!r} in its path is not a directory")
        return stack[-1]

    def _implied(self, parent: Node, name: bytes, *, create: bool) -> Node:
        if not create:
            raise BuildError(f"{os.fsdecode(name)!r} in its path does not exist")
        if len(name) > _MAX_NAME:
            raise BuildError(f"a name has {len(name)} bytes, more than {_MAX_NAME}")
        self.count()
        child = parent.children[name] = Node(kind=Kind.DIRECTORY)
        return child

    def find(self, path: bytes) -> Node | None:
        """Return the node at ``path`` without following a link at its end; None when missing."""
        *parents, name = split_path(path) or (b"",)
        try:
            parent = self.directory(parents)
        except BuildError:
            return None
        return parent.children.get(name) if name else parent

    def remove(self, path: bytes) -> None:
        """Remove the node at ``path`` and all below it; a missing one is fine. Idempotent."""
        *parents, name = split_path(path)
        try:
            self.directory(parents).children.pop(name, None)
        except BuildError:
            return

    def ensure_directory(self, path: bytes, *, mode: int = 0o755) -> Node:
        """Return the directory at ``path``, links followed, making it with ``mode`` when missing.

        Raises:
            BuildError: something else is in its place.

        """
        known = self._made
        node = self.directory(split_path(path), create=True)
        if self._made != known:
            node.mode = mode
        return node

    def put(self, path: bytes, data: bytes, *, mode: int = 0o644, mtime: int = 0) -> None:
        """Write a file owned by root, in place of whatever was at ``path``.

        Raises:
            BuildError: the parent is no directory.

        """
        *parents, name = split_path(path)
        self.count()
        self.directory(parents, create=True).children[name] = Node(
            kind=Kind.FILE, mode=mode, mtime=mtime, content=bytes_content(data)
        )

    def walk(self) -> Iterator[tuple[bytes, Node]]:
        """Yield every path (``b""`` for the root, else without a leading ``/``) and its node.

        Parents come first, names in byte order: the same tree always gives the same sequence.
        """
        pending = [(b"", self.root)]
        while pending:
            path, node = pending.pop()
            yield path, node
            prefix = path + b"/" if path else b""
            pending.extend(
                (prefix + name, node.children[name]) for name in sorted(node.children, reverse=True)
            )
