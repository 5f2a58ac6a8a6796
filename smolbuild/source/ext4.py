"""Write a file tree as a deterministic ext4 image, in one pass and without root.

Why not mke2fs: the one in Debian 12 (1.47.0) fills a file system from a directory only, so that
owners and devices need root or fakeroot; it takes names in the order readdir gives them and the
current time; and two versions of it give two digests for one tree. Here the same tree and size give
the same bytes on every host: files lie in the order of their names, and every time that is not a
file's own is fixed, as are UUID and hash seed.

What is written: 4 KiB blocks, 256-byte inodes, extents, flex_bg, sparse_super, a journal, in-inode
and block attributes; no checksums. Zero blocks of files become holes. ``e2fsck -fn`` finds nothing.
"""

import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from smolbuild.core.errors import BuildError
from smolbuild.core.files import require_space
from smolbuild.source.content import Content
from smolbuild.source.disk import DiskImage, digest_disk
from smolbuild.source.ext4_layout import (
    BLOCK,
    JOURNAL_INODE,
    Blocks,
    Geometry,
    plan_geometry,
    superblock,
)
from smolbuild.source.ext4_records import (
    EXTENTS_FLAG,
    INLINE_TARGET,
    Extent,
    Inode,
    append_extent,
    device_numbers,
    directory_blocks,
    encode_xattrs,
    extent_levels,
    extent_root,
    group_descriptor,
    journal_superblock,
)
from smolbuild.source.ext4_tree import NumberedTree
from smolbuild.source.tree import Kind, Node, Tree

__all__ = ["EXT4_VERSION", "write_ext4"]

EXT4_VERSION = 1
"""Raised whenever the same tree would give other bytes."""

_MAX_LINKS = 65000
_CHUNK = 1 << 20
_ZEROS = bytes(BLOCK)
_PENDING = 4 << 20

_TYPES = {
    Kind.DIRECTORY: (stat.S_IFDIR, 2),
    Kind.FILE: (stat.S_IFREG, 1),
    Kind.SYMLINK: (stat.S_IFLNK, 7),
    Kind.CHAR: (stat.S_IFCHR, 3),
    Kind.BLOCK: (stat.S_IFBLK, 4),
    Kind.FIFO: (stat.S_IFIFO, 5),
}
"""Mode bits and directory entry type of each kind."""


def write_ext4(tree: Tree, path: Path, size: int) -> DiskImage:
    """Write ``tree`` as an ext4 image of ``size`` bytes to ``path``, sparse and synced.

    ``lost+found`` is added where it is missing. The file appears at ``path`` only when it is
    complete. Idempotent: the same tree and size give the same bytes.

    Args:
        tree: what the image holds; not changed.
        path: where the image goes; a file there is replaced.
        size: bytes; rounded down to whole blocks inside the image.

    Raises:
        BuildError: the tree does not fit (names the bytes needed), or holds what ext4 cannot.
        HostError: the host's file system has not enough space.

    """
    numbered = NumberedTree.of(tree)
    geometry = plan_geometry(size, len(numbered.nodes))
    needed = _check_size(numbered, geometry, size)
    require_space(path.parent, needed * BLOCK, what="the root disk")
    descriptor, name = tempfile.mkstemp(prefix=".tmp-disk-", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb", buffering=0):
            os.ftruncate(descriptor, size)
            _Writer(numbered, geometry, _Image(descriptor)).write()
            os.fsync(descriptor)
        digest = digest_disk(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return DiskImage(path=path, size=size, digest=digest)


def _check_size(numbered: NumberedTree, geometry: Geometry, size: int) -> int:
    """Return the most blocks the image can take (holes not counted); raise when it has fewer."""
    needed = geometry.journal_blocks
    for _, node in numbered.nodes:
        if node.kind is Kind.DIRECTORY:
            needed += numbered.directory_blocks(node)
        elif node.kind is Kind.FILE:
            data = sum(end - start for start, end in node.content.spans(BLOCK)) // BLOCK
            needed += data + data // 256
        elif node.kind is Kind.SYMLINK and len(node.target) >= INLINE_TARGET:
            needed += 1
        needed += bool(node.xattrs)
    free = Blocks(geometry).free
    if needed > free:
        bytes_needed = size + (needed - free) * BLOCK
        raise BuildError(
            f"the root disk has {size:,} bytes, but its files need about {bytes_needed:,}",
            hint=f"set `overlay = {-(-bytes_needed // (1 << 30))}` or more in the Smolfile",
            code="disk-too-small",
        )
    return needed


class _Image:
    """The image file; writes that follow one another are joined."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._parts: list[bytes | memoryview] = []
        self._start = self._end = 0

    def write(self, offset: int, data: bytes | memoryview) -> None:
        if offset != self._end or self._end - self._start > _PENDING:
            self.flush()
            self._start = self._end = offset
        self._parts.append(data)
        self._end += len(data)

    def flush(self) -> None:
        data = memoryview(b"".join(self._parts))
        offset = self._start
        while data:
            written = os.pwrite(self._descriptor, data, offset)
            data, offset = data[written:], offset + written
        self._parts.clear()
        self._start = self._end


@dataclass(slots=True)
class _Writer:
    numbered: NumberedTree
    geometry: Geometry
    image: _Image
    blocks: Blocks = field(init=False)
    inodes: dict[int, bytes] = field(default_factory=dict)
    directories: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = Blocks(self.geometry)
        self.directories = [0] * self.geometry.groups

    def write(self) -> None:
        journal = self._journal()
        # Directories first and together, so that looking up a path reads few places.
        for number, node in self.numbered.nodes:
            if node.kind is Kind.DIRECTORY:
                self._node(number, node)
        for number, node in self.numbered.nodes:
            if node.kind is not Kind.DIRECTORY:
                self._node(number, node)
        self._tables()
        self._groups(journal)
        self.image.flush()

    def _journal(self) -> bytes:
        """Write the journal's inode and first block; return the superblock's back-up of it."""
        extents = self._extents(self.geometry.journal_blocks)
        mapped, extra = self._map(extents)
        self.image.write(extents[0].start * BLOCK, journal_superblock(self.geometry.journal_blocks))
        size = self.geometry.journal_blocks * BLOCK
        self.inodes[JOURNAL_INODE] = Inode(
            mode=stat.S_IFREG | 0o600,
            size=size,
            blocks=self.geometry.journal_blocks + extra,
            flags=EXTENTS_FLAG,
            map=mapped,
        ).encode()
        return mapped + (size >> 32).to_bytes(4, "little") + size.to_bytes(4, "little")

    def _node(self, number: int, node: Node) -> None:
        try:
            size, mapped, used, flags = self._body(number, node)
            inside, block = encode_xattrs(node.xattrs)
        except BuildError as error:
            raise BuildError(
                f"{self.numbered.name(node)}: {error.message}", hint=error.hint
            ) from error
        attribute_block = 0
        if block:
            attribute_block = self.blocks.take(1)[0][0]
            self.image.write(attribute_block * BLOCK, block)
        self.inodes[number] = Inode(
            mode=_TYPES[node.kind][0] | node.mode & 0o7777,
            uid=node.uid,
            gid=node.gid,
            size=size,
            mtime=node.mtime,
            links=self._links(number, node),
            blocks=used + bool(block),
            flags=flags,
            map=mapped,
            attributes=inside,
            attribute_block=attribute_block,
        ).encode()

    def _body(self, number: int, node: Node) -> tuple[int, bytes, int, int]:
        """Write what the node holds; return its size, map, blocks and flags."""
        if node.kind is Kind.DIRECTORY:
            return self._directory(number, node)
        if node.kind is Kind.FILE:
            extents, count = self._file(node.content)
            mapped, extra = self._map(extents)
            return node.content.size, mapped, count + extra, EXTENTS_FLAG
        if node.kind is Kind.SYMLINK:
            size = len(node.target)
            if size < INLINE_TARGET:
                return size, node.target.ljust(60, b"\0"), 0, 0
            extents = self._extents(1)
            self.image.write(extents[0].start * BLOCK, node.target.ljust(BLOCK, b"\0"))
            return size, self._map(extents)[0], 1, EXTENTS_FLAG
        if node.kind is Kind.FIFO:
            return 0, bytes(60), 0, 0
        return 0, device_numbers(*node.device), 0, 0

    def _directory(self, number: int, node: Node) -> tuple[int, bytes, int, int]:
        numbers = self.numbered.numbers
        entries = [(b".", number, 2), (b"..", self.numbered.parents[number], 2)]
        entries += [
            (name, numbers[id(child)], _TYPES[child.kind][1])
            for name, child in self.numbered.entries(node)
        ]
        count = self.numbered.directory_blocks(node)
        data = memoryview(directory_blocks(entries, count))
        extents = self._extents(count)
        for item in extents:
            first = item.logical * BLOCK
            self.image.write(item.start * BLOCK, data[first : first + item.length * BLOCK])
        self.directories[(number - 1) // self.geometry.inodes_per_group] += 1
        mapped, extra = self._map(extents)
        return count * BLOCK, mapped, count + extra, EXTENTS_FLAG

    def _links(self, number: int, node: Node) -> int:
        links = self.numbered.links[number]
        if links <= _MAX_LINKS:
            return links
        if node.kind is Kind.DIRECTORY:
            return 1  # dir_nlink: more than can be counted
        raise BuildError(f"{self.numbered.name(node)} has {links:,} hard links")

    def _file(self, content: Content) -> tuple[list[Extent], int]:
        """Write the blocks of a file that are not all zeros; return their extents and number."""
        extents: list[Extent] = []
        count = 0
        for start, end in content.spans(BLOCK):
            for offset in range(start, end, _CHUNK):
                data = content.read(offset, min(_CHUNK, end - offset))
                for first, last in _runs(data):
                    count += last - first
                    self._run(extents, offset // BLOCK + first, data, first, last)
        return extents, count

    def _run(self, extents: list[Extent], logical: int, data: bytes, first: int, last: int) -> None:
        view = memoryview(data)
        for start, length in self.blocks.take(last - first):
            self.image.write(start * BLOCK, view[first * BLOCK : (first + length) * BLOCK])
            append_extent(extents, Extent(logical, start, length))
            logical, first = logical + length, first + length

    def _extents(self, count: int) -> list[Extent]:
        """Take ``count`` blocks for a file without holes."""
        extents: list[Extent] = []
        logical = 0
        for start, length in self.blocks.take(count):
            append_extent(extents, Extent(logical, start, length))
            logical += length
        return extents

    def _map(self, extents: list[Extent]) -> tuple[bytes, int]:
        """Return the inode's map, and how many blocks of an extent tree were written for it."""
        levels = [
            [start + i for start, length in self.blocks.take(count) for i in range(length)]
            for count in extent_levels(extents)
        ]
        mapped, written = extent_root(extents, levels)
        for block, data in written:
            self.image.write(block * BLOCK, data)
        return mapped, len(written)

    def _tables(self) -> None:
        last = max(self.inodes)
        empty = bytes(256)
        for group in range(self.geometry.groups):
            first = group * self.geometry.inodes_per_group + 1
            numbers = range(first, min(first + self.geometry.inodes_per_group, last + 1))
            if numbers:
                data = b"".join(self.inodes.get(number, empty) for number in numbers)
                self.image.write(self.geometry.inode_table(group) * BLOCK, data)

    def _groups(self, journal: bytes) -> None:
        geometry, per_group = self.geometry, self.geometry.inodes_per_group
        used = max(self.inodes)  # numbers are given out without gaps, the reserved ten are taken
        descriptors = b""
        for group, bitmap in enumerate(self.blocks.bitmaps()):
            self.image.write(geometry.block_bitmap(group) * BLOCK, bytes(bitmap))
            taken = min(max(used - group * per_group, 0), per_group)
            inode_bits = (1 << taken) - 1 | ((1 << 8 * BLOCK) - 1) >> per_group << per_group
            self.image.write(
                geometry.inode_bitmap(group) * BLOCK, inode_bits.to_bytes(BLOCK, "little")
            )
            descriptors += group_descriptor(
                bitmap=geometry.block_bitmap(group),
                inodes=geometry.inode_bitmap(group),
                table=geometry.inode_table(group),
                free_blocks=8 * BLOCK - int.from_bytes(bitmap, "little").bit_count(),
                free_inodes=per_group - taken,
                directories=self.directories[group],
            )
        for group in range(geometry.groups):
            if geometry.has_copy(group):
                head = superblock(
                    geometry,
                    group=group,
                    free_blocks=self.blocks.free,
                    free_inodes=geometry.inodes - used,
                    journal=journal,
                )
                start = geometry.start(group) * BLOCK
                self.image.write(start + (1024 if group == 0 else 0), head)
                self.image.write(start + BLOCK, descriptors)


def _runs(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the (first, last) runs of blocks in ``data`` that are not all zeros."""
    first = None
    count = len(data) // BLOCK
    for index in range(count):
        if data[index * BLOCK : (index + 1) * BLOCK] == _ZEROS:
            if first is not None:
                yield first, index
                first = None
        elif first is None:
            first = index
    if first is not None:
        yield first, count
