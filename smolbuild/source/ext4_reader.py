"""Read an ext4 image without mounting it and without root: names, files, and whose a block is.

The image is a flat raw disk as a build, a pull or a checkpoint leaves it; a journal that was not
written back is replayed in memory. Nothing is written. What the image says is checked before it is
used, so a damaged or hostile one gives an error and never a hang or a wrong read.
"""

import bisect
import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from smolbuild.core.errors import BuildError, VerificationError
from smolbuild.source.content import Content, FileBacking, Segment, bytes_content
from smolbuild.source.ext4_decode import (
    INLINE_DATA,
    RawInode,
    block_attributes,
    decode_device,
    decode_inode,
    directory_entries,
    has_map,
    inode_attributes,
)
from smolbuild.source.ext4_journal import MAGIC, JournalCopy, replay
from smolbuild.source.ext4_owners import OwnerMap, Place, owner_map
from smolbuild.source.ext4_volume import (
    LARGE_DIRECTORIES,
    FileMap,
    ReadDisk,
    Run,
    Superblock,
    Volume,
    damaged,
    parse_superblock,
)
from smolbuild.source.tree import MAX_NODES, Kind, Tree
from smolbuild.source.tree import Node as TreeNode

__all__ = ["Ext4", "Node", "open_disk"]

_ROOT = 2
_SUPERBLOCK = 1024
_MAX_TARGET = 4096
_MAX_INLINE = 65536
_ATTRIBUTE_CACHE = 1024
_KINDS = {
    0x4000: Kind.DIRECTORY,
    0x8000: Kind.FILE,
    0xA000: Kind.SYMLINK,
    0x2000: Kind.CHAR,
    0x6000: Kind.BLOCK,
    0x1000: Kind.FIFO,
}
_SOCKET = 0xC000


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One name in the file system and what it stands for."""

    path: bytes
    """``b"/"`` for the root, else ``b"/etc/passwd"``."""
    kind: Kind
    mode: int
    """Permission bits with set-id and sticky (07777)."""
    uid: int
    gid: int
    size: int
    """Bytes; 0 for devices and pipes."""
    mtime: int
    """Seconds since the epoch."""
    target: bytes
    """Of a symbolic link, else empty."""
    xattrs: Mapping[bytes, bytes]
    """ACLs as system calls have them."""
    device: tuple[int, int]
    """Major and minor number of a device, else (0, 0)."""
    ino: int
    """Two names with one number are hard links of one file."""
    links: int


@dataclass(slots=True)
class _Overlay:
    """The disk with the journal's blocks in place of its own."""

    read_disk: ReadDisk
    block_size: int
    copies: Mapping[int, JournalCopy]
    journal: FileMap

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset`` as they are after the replay."""
        data = self.read_disk(offset, length)
        if len(data) != length:
            raise damaged(f"the disk ends at byte {offset + len(data):,}")
        size = self.block_size
        first, last = offset // size, (offset + length - 1) // size
        if last - first < len(self.copies):
            changed: Iterable[int] = (b for b in range(first, last + 1) if b in self.copies)
        else:
            changed = (b for b in self.copies if first <= b <= last)
        patched: bytearray | None = None
        for block in changed:
            patched = bytearray(data) if patched is None else patched
            content = self._copy(self.copies[block])
            start = block * size - offset
            low, high = max(0, -start), min(size, length - start)
            patched[start + low : start + high] = content[low:high]
        return data if patched is None else bytes(patched)

    def _copy(self, copy: JournalCopy) -> bytes:
        place = _place(self.journal, copy.block)
        data = self.read_disk(place * self.block_size, self.block_size)
        return MAGIC + data[4:] if copy.escaped else data


class Ext4:
    """A read-only ext4 file system of ``size`` bytes that ``read(offset, length)`` gives.

    Raises:
        VerificationError: it is no ext4 file system, or is damaged; by every method.
        BuildError: it uses features that smolbuild does not read.

    """

    def __init__(self, read: ReadDisk, size: int) -> None:
        if size < 2 * _SUPERBLOCK:
            raise damaged("there is no ext4 superblock")
        head = parse_superblock(read(_SUPERBLOCK, _SUPERBLOCK), size)
        self._overlay = _replayed(head, read)
        # The newest superblock and group descriptors may themselves stand in the journal.
        head = parse_superblock(self._overlay.read(_SUPERBLOCK, _SUPERBLOCK), size)
        self._volume = Volume(head, self._overlay.read)
        self._attributes: dict[int, dict[bytes, bytes]] = {}
        self._owners: OwnerMap | None = None

    @property
    def journal_blocks(self) -> int:
        """How many blocks of the disk have their newest content in the journal."""
        return len(self._overlay.copies)

    def walk(self) -> Iterator[Node]:
        """Yield every name, parents first and names in byte order; sockets are left out."""
        for path, inode in self._walk():
            if inode.mode & 0xF000 != _SOCKET:
                yield self._node(path, inode)

    def content(self, node: Node) -> Iterator[bytes]:
        """Yield the content of a regular file in pieces of at most 1 MiB; holes as zeros."""
        return self.content_of(node).chunks()

    def content_of(self, node: Node) -> Content:
        """Return the content of a regular file by reference; it knows where the holes are."""
        return self._content(self._inode(node.ino))

    def stands_on_disk(self, content: Content) -> bool:
        """Return whether each segment of ``content`` names its place on the disk itself.

        Small contents may stand in an inode, and the newest of others in the journal.
        """
        if content.backing is not self._overlay:
            return not content.segments
        size, copies = self._volume.head.block_size, self._overlay.copies
        return not copies or not any(
            block in copies
            for segment in content.segments
            for block in range(
                segment.offset // size, (segment.offset + segment.length - 1) // size + 1
            )
        )

    def owners_of(self, offsets: Iterable[int]) -> Mapping[int, Place]:
        """Return whose each byte of the disk is. The first call looks at every file."""
        if self._owners is None:
            self._owners = owner_map(self._volume, self._walk())
        return self._owners.find(offsets)

    def tree(self) -> Tree:
        """Return everything as a tree whose contents are read from the disk when asked for."""
        tree = Tree()
        made: dict[int, TreeNode] = {}
        for node in self.walk():
            known = made.get(node.ino)
            if known is None:
                known = made[node.ino] = self._tree_node(node)
            if node.path == b"/":
                tree.root = known
                directories = {b"": known}
                continue
            parent, _, name = node.path.rpartition(b"/")
            directories[parent].children[name] = known
            if node.kind is Kind.DIRECTORY:
                directories[node.path] = known
        return tree

    def _tree_node(self, node: Node) -> TreeNode:
        made = TreeNode(
            kind=node.kind,
            mode=node.mode,
            uid=node.uid,
            gid=node.gid,
            mtime=node.mtime,
            xattrs=dict(node.xattrs),
            target=node.target,
            device=node.device,
        )
        if node.kind is Kind.FILE:
            made.content = self.content_of(node)
        return made

    def _inode(self, number: int) -> RawInode:
        return decode_inode(
            self._volume.inode(number),
            number,
            large_directories=bool(self._volume.head.incompat & LARGE_DIRECTORIES),
        )

    def _walk(self) -> Iterator[tuple[bytes, RawInode]]:
        root = self._inode(_ROOT)
        if root.mode & 0xF000 != 0x4000:
            raise damaged("the root is not a directory")
        pending, seen, count = [(b"/", root)], {_ROOT}, 0
        while pending:
            path, inode = pending.pop()
            yield path, inode
            if inode.mode & 0xF000 != 0x4000:
                continue
            prefix = path if path == b"/" else path + b"/"
            below = []
            for name, number in sorted(self._entries(inode)):
                child = self._named(prefix + name, number)
                if child.mode & 0xF000 == 0x4000:
                    if number in seen:
                        raise damaged(f"the directory {_shown(prefix + name)} has two parents")
                    seen.add(number)
                below.append((prefix + name, child))
            count += len(below)
            if count > MAX_NODES:
                raise damaged(f"it has more than {MAX_NODES:,} files")
            pending.extend(reversed(below))

    def _named(self, path: bytes, number: int) -> RawInode:
        head = self._volume.head
        if not head.first_inode <= number <= head.inodes:
            raise damaged(f"{_shown(path)} stands for inode {number:,}, which is not a file's")
        inode = self._inode(number)
        kind = inode.mode & 0xF000
        if not inode.links or (kind not in _KINDS and kind != _SOCKET):
            raise damaged(f"{_shown(path)} stands for inode {number:,}, which is not in use")
        return inode

    def _entries(self, directory: RawInode) -> Iterator[tuple[bytes, int]]:
        number = directory.number
        if directory.flags & INLINE_DATA:
            yield from directory_entries(directory.map[4:], number)
            rest = inode_attributes(directory).get(b"system.data", b"")
            yield from directory_entries(rest, number)
            return
        size = self._volume.head.block_size
        blocks = -(-directory.size // size)
        for run in self._runs(directory):
            if run.written and run.logical < blocks:
                count = min(run.length, blocks - run.logical)
                for block in range(run.start, run.start + count):
                    yield from directory_entries(self._volume.blocks(block, 1), number)

    def _runs(self, inode: RawInode) -> tuple[Run, ...]:
        return self._volume.file_map(inode.data, inode.number).runs

    def _node(self, path: bytes, inode: RawInode) -> Node:
        kind = _KINDS[inode.mode & 0xF000]
        try:
            xattrs = self._xattrs(inode)
            target = self._target(inode) if kind is Kind.SYMLINK else b""
        except VerificationError as error:
            raise VerificationError(
                f"{_shown(path)}: {error.message}", hint=error.hint, code=error.code
            ) from error
        device = kind in (Kind.CHAR, Kind.BLOCK)
        return Node(
            path=path,
            kind=kind,
            mode=inode.mode & 0o7777,
            uid=inode.uid,
            gid=inode.gid,
            size=0 if device or kind is Kind.FIFO else inode.size,
            mtime=inode.mtime,
            target=target,
            xattrs=xattrs,
            device=decode_device(inode.map) if device else (0, 0),
            ino=inode.number,
            links=inode.links,
        )

    def _xattrs(self, inode: RawInode) -> dict[bytes, bytes]:
        found = inode_attributes(inode)
        found.pop(b"system.data", None)
        block = inode.attribute_block
        if block:
            if block not in self._attributes:
                if len(self._attributes) >= _ATTRIBUTE_CACHE:
                    self._attributes.clear()
                data = self._volume.blocks(block, 1)
                self._attributes[block] = block_attributes(data, block)
            found |= self._attributes[block]
        return found

    def _target(self, inode: RawInode) -> bytes:
        if inode.size > _MAX_TARGET:
            raise damaged(f"the symbolic link has {inode.size:,} bytes")
        if inode.flags & INLINE_DATA or has_map(inode):
            return self._content(inode).read(0, inode.size)
        return inode.map[: inode.size]

    def _content(self, inode: RawInode) -> Content:
        if inode.flags & INLINE_DATA:
            if inode.size > _MAX_INLINE:
                raise damaged(f"inode {inode.number:,} cannot hold {inode.size:,} bytes")
            data = inode.map + inode_attributes(inode).get(b"system.data", b"")
            return bytes_content(data[: inode.size].ljust(inode.size, b"\0"))
        if not has_map(inode):
            return bytes_content(b"")
        block = self._volume.head.block_size
        segments = []
        for run in self._runs(inode):
            length = min(run.length * block, inode.size - run.logical * block)
            if run.written and length > 0:
                segments.append(Segment(run.logical * block, run.start * block, length))
        return Content(inode.size, self._overlay, tuple(segments))


def _replayed(head: Superblock, read: ReadDisk) -> _Overlay:
    """Return the disk as it is once the journal is written back."""
    plain = _Overlay(read, head.block_size, {}, FileMap((), ()))
    if not (head.has_journal and head.needs_recovery):
        return plain
    volume = Volume(head, plain.read)
    number = head.journal_inode
    inode = decode_inode(volume.inode(number), number, large_directories=False)
    if inode.mode & 0xF000 != 0x8000:
        raise damaged("the journal is not a file")
    journal, end = volume.file_map(inode.data, number), 0
    for run in journal.runs:
        if run.logical != end or not run.written:
            raise damaged("the journal has holes")
        end += run.length
    copies = replay(lambda block: volume.blocks(_place(journal, block), 1), end, head.block_size)
    if any(block >= head.blocks for block in copies):
        raise damaged("the journal writes outside the disk")
    return _Overlay(read, head.block_size, copies, journal)


def _place(journal: FileMap, block: int) -> int:
    """Return where a block of the journal stands on the disk."""
    run = journal.runs[bisect.bisect_right(journal.runs, block, key=lambda run: run.logical) - 1]
    return run.start + block - run.logical


def _shown(path: bytes) -> str:
    return os.fsdecode(path)


@contextlib.contextmanager
def open_disk(path: Path) -> Iterator[Ext4]:
    """Give the file system on the flat raw image at ``path``; readable inside the block.

    Raises:
        VerificationError: it is no ext4 file system, or is damaged.
        BuildError: it uses features that smolbuild does not read, or is no regular file.

    """
    try:
        backing = FileBacking(path)
    except OSError as error:
        raise BuildError(f"cannot read the disk {path}: {error.strerror}") from error
    with backing:
        yield Ext4(backing.read, backing.size)
