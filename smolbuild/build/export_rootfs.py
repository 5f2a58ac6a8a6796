"""An artifact's disk as a directory of the host.

The names come from a machine that ran somebody's code: nothing is created through a path, only by
one name in a directory that was just made and is held open, so no link in the tree leads outside.
"""

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from smolbuild.core.errors import HostError, UsageError
from smolbuild.core.events import Emit, Transfer
from smolbuild.core.files import require_space
from smolbuild.source.tree import Kind, Node, Tree

__all__ = ["Losses", "export_rootfs"]

_CHUNK = 1 << 20
_SET_ID = 0o6000
_MAX_DEPTH = 256
"""Each level holds a directory open."""
_FORMAT = {Kind.CHAR: 0o020000, Kind.BLOCK: 0o060000}


@dataclass(slots=True)
class Losses:
    """What the directory could not take over from the disk: how many, and the first of each."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, what: str, path: bytes) -> None:
        """Count one."""
        self.counts[what] = self.counts.get(what, 0) + 1
        self.first.setdefault(what, os.fsdecode(path))

    def sentences(self) -> Sequence[str]:
        """Return one sentence for each kind of loss."""
        return [
            f"{what}: {count} (the first is {self.first[what]})"
            for what, count in self.counts.items()
        ]


def export_rootfs(tree: Tree, path: Path, *, owners: bool, emit: Emit) -> Losses:
    """Write ``tree`` below ``path``, which must not exist or be empty; it appears when complete.

    Modes and times are kept. With ``owners`` (only root can) so are owners, devices and extended
    attributes; without, all belongs to the caller, and what would then mean something else is left
    out: devices, attributes, and the set-user-id and set-group-id bits.

    Raises:
        UsageError: something is at ``path``.
        HostError: no space, or the file system refuses something.

    """
    if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
        raise UsageError(
            f"{path} exists and is not an empty directory",
            hint="name another, or remove it; --force does not remove directories",
            code="exists",
        )
    if not path.parent.is_dir():
        raise UsageError(f"there is no directory {path.parent}", code="no-directory")
    total = sum({id(node): node.content.size for _, node in tree.walk()}.values())
    require_space(path.parent, total, what=f"writing {path.name}")
    staging = Path(tempfile.mkdtemp(prefix=f".tmp-{path.name}-", dir=path.parent))
    try:
        writer = _Writer(owners=owners, emit=emit, total=total, top=os.open(staging, os.O_RDONLY))
        try:
            writer.write(tree)
        finally:
            os.close(writer.top)
        staging.rename(path)
    except OSError as error:
        raise HostError(
            f"cannot write {path}: {error.strerror} ({error.filename or 'there'})", code="export"
        ) from error
    finally:
        _remove(staging)
    return writer.losses


def _remove(directory: Path) -> None:
    """Remove what was begun, directories without permissions too."""
    for place, names, _ in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                Path(place, name).chmod(0o700, follow_symlinks=False)
    shutil.rmtree(directory, ignore_errors=True)


@dataclass(slots=True, kw_only=True)
class _Writer:
    owners: bool
    emit: Emit
    total: int
    top: int
    losses: Losses = field(default_factory=Losses)
    done: int = 0
    made: dict[int, bytes] = field(default_factory=dict)
    """The first path of each file, by its identity."""

    def write(self, tree: Tree) -> None:
        self._directory(tree.root, self.top, b"")
        self._dress_open(tree.root, self.top, b"/")

    def _directory(self, directory: Node, descriptor: int, path: bytes) -> None:
        if path.count(b"/") > _MAX_DEPTH:
            raise HostError(f"directories nest more than {_MAX_DEPTH} deep", code="export")
        for name in sorted(directory.children):
            child, below = directory.children[name], path + b"/" + name
            if child.kind is not Kind.DIRECTORY:
                self._file(child, name, descriptor, below)
                continue
            os.mkdir(name, 0o700, dir_fd=descriptor)
            with _opened(name, os.O_RDONLY | os.O_DIRECTORY, descriptor) as inner:
                self._directory(child, inner, below)
                self._dress_open(child, inner, below)

    def _file(self, node: Node, name: bytes, parent: int, path: bytes) -> None:
        first = self.made.get(id(node))
        if first is not None:
            self._link(first, name, parent)
        elif node.kind is Kind.FILE:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with _opened(name, flags, parent) as descriptor:
                self._content(node, descriptor)
                self._dress_open(node, descriptor, path)
        elif node.kind is Kind.SYMLINK:
            os.symlink(node.target, name, dir_fd=parent)
            self._dress_closed(node, name, parent, path)
        elif node.kind is Kind.FIFO:
            os.mkfifo(name, 0o600, dir_fd=parent)
            self._dress_closed(node, name, parent, path)
        elif not self.owners:
            self.losses.add("devices left out", path)
            return
        else:
            os.mknod(name, _FORMAT[node.kind] | 0o600, os.makedev(*node.device), dir_fd=parent)
            self._dress_closed(node, name, parent, path)
        self.made.setdefault(id(node), path)

    def _link(self, first: bytes, name: bytes, parent: int) -> None:
        *above, last = first.split(b"/")[1:]
        with contextlib.ExitStack() as stack:
            place = self.top
            for part in above:
                place = stack.enter_context(_opened(part, os.O_RDONLY | os.O_DIRECTORY, place))
            os.link(last, name, src_dir_fd=place, dst_dir_fd=parent, follow_symlinks=False)

    def _content(self, node: Node, descriptor: int) -> None:
        os.ftruncate(descriptor, node.content.size)
        for start, end in node.content.spans(1):
            for offset in range(start, end, _CHUNK):
                data = memoryview(node.content.read(offset, min(_CHUNK, end - offset)))
                at = offset
                while data:
                    written = os.pwrite(descriptor, data, at)
                    data, at = data[written:], at + written
        self.done += node.content.size
        self.emit(Transfer(what="export", done=self.done, total=self.total))

    def _dress_open(self, node: Node, descriptor: int, path: bytes) -> None:
        if self.owners:
            os.chown(descriptor, node.uid, node.gid)
        os.chmod(descriptor, self._mode(node, path))
        self._attributes(node, path, functools.partial(os.setxattr, descriptor))
        os.utime(descriptor, (node.mtime, node.mtime))

    def _dress_closed(self, node: Node, name: bytes, parent: int, path: bytes) -> None:
        """Dress what cannot be opened; its name is below a directory that is held open."""
        place = b"/proc/self/fd/%d/" % parent + name
        if self.owners:
            os.chown(name, node.uid, node.gid, dir_fd=parent, follow_symlinks=False)
        if node.kind is not Kind.SYMLINK:
            os.chmod(name, self._mode(node, path), dir_fd=parent)
        put = functools.partial(os.setxattr, place, follow_symlinks=False)
        self._attributes(node, path, put)
        times = (node.mtime, node.mtime)
        os.utime(name, times, dir_fd=parent, follow_symlinks=False)

    def _mode(self, node: Node, path: bytes) -> int:
        if self.owners or not node.mode & _SET_ID:
            return node.mode
        self.losses.add("set-id bits left out", path)
        return node.mode & ~_SET_ID

    def _attributes(self, node: Node, path: bytes, put: Callable[[bytes, bytes], None]) -> None:
        for name, value in sorted(node.xattrs.items()):
            if not self.owners:
                self.losses.add("extended attributes left out", path)
                continue
            try:
                put(name, value)
            except OSError:
                self.losses.add(f"the file system refuses the attribute {os.fsdecode(name)}", path)


@contextlib.contextmanager
def _opened(name: bytes, flags: int, parent: int) -> Iterator[int]:
    descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
