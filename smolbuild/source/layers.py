"""Apply the layers of an image onto a tree (OCI image-spec v1.1, ``layer.md``).

What a real file system would refuse is refused here too, and what would let an entry out of the
root cannot be expressed: a parent that is a symbolic link is resolved inside the tree, as
containerd and umoci do it. A leading ``/`` is stripped. Whiteouts hide what lower layers hold,
never what the same layer adds, in whatever order the entries come. AUFS metadata (``.wh..wh.*``
besides the opaque marker) is skipped.
"""

import os
from dataclasses import dataclass, field

from smolbuild.core.errors import BuildError
from smolbuild.source.content import Region
from smolbuild.source.tar import TarEntry, TarKind, read_tar
from smolbuild.source.tree import Kind, Node, Tree, split_path

__all__ = ["apply_layer"]

_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_AUFS = b".wh..wh."
_NAMESPACES = (b"user.", b"trusted.", b"security.")
_ACLS = (b"system.posix_acl_access", b"system.posix_acl_default")
_MAX_TARGET = 4095

_KINDS: dict[TarKind, Kind] = {
    "file": Kind.FILE,
    "symlink": Kind.SYMLINK,
    "char": Kind.CHAR,
    "block": Kind.BLOCK,
    "directory": Kind.DIRECTORY,
    "fifo": Kind.FIFO,
}


def apply_layer(tree: Tree, region: Region, *, what: str) -> None:
    """Apply the uncompressed layer tar in ``region`` onto ``tree``; ``what`` names it in errors.

    Not idempotent by itself: the tree is left half changed by an error and must be thrown away.

    Raises:
        BuildError: the archive is malformed or hostile; names ``what`` and the entry.

    """
    layer = _Layer(tree=tree)
    try:
        for entry in read_tar(region):
            try:
                layer.apply(entry)
            except BuildError as error:
                raise BuildError(f"entry {os.fsdecode(entry.name)!r}: {error.message}") from error
    except BuildError as error:
        raise BuildError(
            f"{what}: {error.message}",
            hint="the image is damaged or was made to do harm: get it anew from its publisher",
            code="bad-layer",
        ) from error


@dataclass(slots=True)
class _Layer:
    tree: Tree
    fresh: dict[int, set[bytes]] = field(default_factory=dict)
    """Names that this layer put into each directory, by the directory's identity."""
    hidden: set[tuple[int, bytes]] = field(default_factory=set)
    """Whiteouts done; a second one of the same name finds nothing more to hide."""
    kept: list[Node] = field(default_factory=list)
    """Directories in the two above, held so that no identity is used twice."""

    def apply(self, entry: TarEntry) -> None:
        parts = split_path(entry.name)
        if not parts:
            if entry.kind != "directory":
                raise BuildError("the root is not a directory")
            _describe(self.tree.root, entry)
            return
        *parents, name = parts
        if any(part.startswith(_AUFS) for part in parents):
            return
        if name.startswith(_WHITEOUT):
            self._whiteout(parents, name)
            return
        parent = self.tree.directory(parents, create=True)
        if entry.kind == "link":
            self._put(parent, name, self._link_target(entry))
        elif entry.kind == "directory" and _is_directory(parent.children.get(name)):
            _describe(parent.children[name], entry)
            self._mark(parent, name)
        else:
            self._put(parent, name, self._node(entry))

    def _node(self, entry: TarEntry) -> Node:
        if entry.kind == "symlink" and not 0 < len(entry.target) <= _MAX_TARGET:
            raise BuildError(f"a symbolic link to {len(entry.target):,} bytes")
        if entry.kind == "symlink" and b"\0" in entry.target:
            raise BuildError("a symbolic link to a name with a NUL byte")
        self.tree.count()
        node = Node(kind=_KINDS[entry.kind])
        _describe(node, entry)
        if node.kind is Kind.FILE:
            node.content = entry.content
        elif node.kind is Kind.SYMLINK:
            node.target = entry.target
        elif node.kind in (Kind.CHAR, Kind.BLOCK):
            node.device = entry.device
        return node

    def _link_target(self, entry: TarEntry) -> Node:
        shown = os.fsdecode(entry.target)
        *parents, name = split_path(entry.target) or (b"",)
        try:
            node = self.tree.directory(parents).children.get(name)
        except BuildError as error:
            raise BuildError(f"a hard link to {shown!r}: {error.message}") from error
        if node is None:
            raise BuildError(f"a hard link to {shown!r}, which does not exist")
        if node.kind is Kind.DIRECTORY:
            raise BuildError(f"a hard link to the directory {shown!r}")
        return node

    def _put(self, parent: Node, name: bytes, node: Node) -> None:
        parent.children[name] = node
        self._mark(parent, name)

    def _mark(self, parent: Node, name: bytes) -> None:
        if id(parent) not in self.fresh:
            self.kept.append(parent)
        self.fresh.setdefault(id(parent), set()).add(name)

    def _whiteout(self, parents: list[bytes], name: bytes) -> None:
        try:
            parent = self.tree.directory(parents)
        except BuildError:
            return  # nothing there to hide
        if (id(parent), name) in self.hidden:
            return
        self.hidden.add((id(parent), name))
        self.kept.append(parent)
        if name == _OPAQUE:
            self._hide_lower(parent)
        elif not name.startswith(_AUFS):
            hidden = name.removeprefix(_WHITEOUT)
            if hidden in (b"", b".", b".."):
                raise BuildError("a whiteout of no file")
            self._hide(parent, hidden)

    def _hide_lower(self, directory: Node) -> None:
        """Hide everything below ``directory`` that this layer did not add."""
        pending = [directory]
        while pending:
            here = pending.pop()
            for name in list(here.children):
                if self._holds_fresh(here, name):
                    if here.children[name].kind is Kind.DIRECTORY:
                        pending.append(here.children[name])
                else:
                    del here.children[name]

    def _hide(self, parent: Node, name: bytes) -> None:
        child = parent.children.get(name)
        if child is None:
            return
        if not self._holds_fresh(parent, name):
            del parent.children[name]
        elif child.kind is Kind.DIRECTORY:
            self._hide_lower(child)

    def _holds_fresh(self, parent: Node, name: bytes) -> bool:
        """Return whether this layer added the entry or something below it."""
        if name in self.fresh.get(id(parent), ()):
            return True
        pending = [parent.children[name]]
        while pending:
            node = pending.pop()
            if self.fresh.get(id(node)):
                return True
            pending.extend(c for c in node.children.values() if c.kind is Kind.DIRECTORY)
        return False


def _is_directory(node: Node | None) -> bool:
    return node is not None and node.kind is Kind.DIRECTORY


def _describe(node: Node, entry: TarEntry) -> None:
    node.mode, node.uid, node.gid, node.mtime = entry.mode, entry.uid, entry.gid, entry.mtime
    # Other namespaces (another system's, or NFS's) mean nothing to the guest's file system.
    node.xattrs = {
        key: value
        for key, value in entry.xattrs.items()
        if key.startswith(_NAMESPACES) or key in _ACLS
    }
