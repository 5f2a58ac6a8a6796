"""The records of an ext4 image as bytes: inodes, extent trees, directories, attributes, journal.

Formats: the kernel's ``Documentation/filesystems/ext4`` ("Dynamic Structures") and, for the values
of POSIX ACLs, ``fs/ext4/acl.h``; the journal is big-endian (``fs/jbd2``, version 2 superblock).
"""

import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from smolbuild.core.errors import BuildError
from smolbuild.source.ext4_layout import BLOCK, FIXED_TIME, INODE_SIZE, UUID

__all__ = [
    "EXTENTS_FLAG",
    "INLINE_TARGET",
    "Extent",
    "Inode",
    "append_extent",
    "device_numbers",
    "directory_blocks",
    "directory_length",
    "encode_xattrs",
    "extent_levels",
    "extent_root",
    "group_descriptor",
    "journal_superblock",
]

EXTENTS_FLAG = 0x80000
INLINE_TARGET = 60
"""A symbolic link shorter than this stands in its inode."""

_EXTRA = 32
_IN_INODE = INODE_SIZE - 128 - _EXTRA
_XATTR_MAGIC = 0xEA020000
_MAX_EXTENT = 32768
_ROOT_ENTRIES = 4
_BLOCK_ENTRIES = (BLOCK - 12) // 12
_MAX_TIME = 2**31 - 1

_PREFIXES = (
    (b"user.", 1),
    (b"system.posix_acl_access", 2),
    (b"system.posix_acl_default", 3),
    (b"trusted.", 4),
    (b"security.", 6),
)


_Entry = tuple[int, bytes]
"""The first block of the file that an entry of an extent tree maps, and the entry's bytes."""


@dataclass(frozen=True, slots=True)
class Extent:
    """``length`` blocks of a file at ``logical`` that stand at block ``start`` of the image."""

    logical: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inode:
    """One inode; ``blocks`` counts all that belong to it, those of its map and attributes too."""

    mode: int
    """With the file type's bits."""
    uid: int = 0
    gid: int = 0
    size: int = 0
    mtime: int = FIXED_TIME
    links: int = 1
    blocks: int = 0
    flags: int = 0
    map: bytes = bytes(60)
    attributes: bytes = b""
    attribute_block: int = 0

    def encode(self) -> bytes:
        """Return the inode's 256 bytes."""
        mtime = min(max(self.mtime, 0), _MAX_TIME)
        sectors = self.blocks * (BLOCK // 512)
        head = struct.pack(
            "<HHIIIIIHHIII",
            self.mode,
            self.uid & 0xFFFF,
            self.size & 0xFFFFFFFF,
            FIXED_TIME,
            FIXED_TIME,
            mtime,
            0,
            self.gid & 0xFFFF,
            self.links,
            sectors & 0xFFFFFFFF,
            self.flags,
            0,
        )
        tail = struct.pack(
            "<IIIIHHHHHH", 0, self.attribute_block, self.size >> 32, 0, sectors >> 32, 0,
            self.uid >> 16, self.gid >> 16, 0, 0,
        )  # fmt: skip
        extra = struct.pack("<HHIIIIIII", _EXTRA, 0, 0, 0, 0, FIXED_TIME, 0, 0, 0)
        return head + self.map + tail + extra + self.attributes.ljust(_IN_INODE, b"\0")


def device_numbers(major: int, minor: int) -> bytes:
    """Return the block map of a device node: the old 16-bit form where it fits, else the new."""
    if major < 256 and minor < 256:
        return struct.pack("<II", major << 8 | minor, 0).ljust(60, b"\0")
    new = (minor & 0xFF) | major << 8 | (minor & ~0xFF) << 12
    return struct.pack("<II", 0, new).ljust(60, b"\0")


def append_extent(extents: list[Extent], new: Extent) -> None:
    """Add ``new`` to a file's extents; lengthen the last one where ``new`` goes on with it."""
    if extents:
        last = extents[-1]
        if (
            last.logical + last.length == new.logical
            and last.start + last.length == new.start
            and last.length + new.length <= _MAX_EXTENT
        ):
            extents[-1] = Extent(last.logical, last.start, last.length + new.length)
            return
    while new.length > _MAX_EXTENT:
        extents.append(Extent(new.logical, new.start, _MAX_EXTENT))
        new = Extent(new.logical + _MAX_EXTENT, new.start + _MAX_EXTENT, new.length - _MAX_EXTENT)
    extents.append(new)


def extent_levels(extents: Sequence[Extent]) -> list[int]:
    """Return how many blocks each level of the extent tree needs below the inode, leaves first."""
    levels, entries = [], len(extents)
    while entries > _ROOT_ENTRIES:
        entries = -(-entries // _BLOCK_ENTRIES)
        levels.append(entries)
    return levels


def extent_root(
    extents: Sequence[Extent], levels: Sequence[Sequence[int]]
) -> tuple[bytes, list[tuple[int, bytes]]]:
    """Return the map that stands in the inode, and the (block, bytes) of the tree below it.

    ``levels`` names the blocks to use, as many on each level as ``extent_levels`` says.
    """
    entries = [
        (item.logical, struct.pack("<IHHI", item.logical, item.length, 0, item.start))
        for item in extents
    ]
    written = []
    for depth, blocks in enumerate(levels):
        above = []
        for block, group in zip(blocks, _batches(entries), strict=True):
            written.append((block, _extent_node(group, _BLOCK_ENTRIES, depth).ljust(BLOCK, b"\0")))
            above.append((group[0][0], struct.pack("<IIHH", group[0][0], block, 0, 0)))
        entries = above
    return _extent_node(entries, _ROOT_ENTRIES, len(levels)).ljust(60, b"\0"), written


def _batches(entries: Sequence[_Entry]) -> Iterator[Sequence[_Entry]]:
    for at in range(0, len(entries), _BLOCK_ENTRIES):
        yield entries[at : at + _BLOCK_ENTRIES]


def _extent_node(entries: Sequence[_Entry], room: int, depth: int) -> bytes:
    header = struct.pack("<HHHHI", 0xF30A, len(entries), room, depth, 0)
    return header + b"".join(data for _, data in entries)


def directory_length(names: Iterable[bytes]) -> int:
    """Return how many blocks a directory with these entries needs besides ``.`` and ``..``."""
    blocks, used = 1, 24
    for name in names:
        need = _entry_length(name)
        if used + need > BLOCK:
            blocks, used = blocks + 1, 0
        used += need
    return blocks


def directory_blocks(entries: Iterable[tuple[bytes, int, int]], blocks: int) -> bytes:
    """Return a directory's content: (name, inode, type) in order, padded to ``blocks`` blocks."""
    done: list[bytes] = []
    part = bytearray()
    last = 0
    for name, inode, kind in entries:
        need = _entry_length(name)
        if len(part) + need > BLOCK:
            struct.pack_into("<H", part, last + 4, BLOCK - last)
            done.append(bytes(part).ljust(BLOCK, b"\0"))
            part = bytearray()
        last = len(part)
        part += struct.pack("<IHBB", inode, need, len(name), kind) + name
        part += bytes(last + need - len(part))
    struct.pack_into("<H", part, last + 4, BLOCK - last)
    done.append(bytes(part).ljust(BLOCK, b"\0"))
    empty = struct.pack("<IHBB", 0, BLOCK, 0, 0).ljust(BLOCK, b"\0")
    return b"".join(done) + empty * (blocks - len(done))


def _entry_length(name: bytes) -> int:
    return (8 + len(name) + 3) & ~3


def group_descriptor(
    *, bitmap: int, inodes: int, table: int, free_blocks: int, free_inodes: int, directories: int
) -> bytes:
    """Return the 32 bytes of a group descriptor."""
    return struct.pack(
        "<IIIHHHHIHHHH", bitmap, inodes, table, free_blocks, free_inodes, directories, 0, 0, 0, 0,
        0, 0,
    )  # fmt: skip


def journal_superblock(blocks: int) -> bytes:
    """Return the first block of an empty, clean journal of ``blocks`` blocks."""
    head = struct.pack(">IIIIIIIIIIII", 0xC03B3998, 4, 0, BLOCK, blocks, 1, 1, 0, 0, 0, 0, 0)
    return (head + UUID + struct.pack(">I", 1)).ljust(BLOCK, b"\0")


@dataclass(frozen=True, slots=True)
class _Attribute:
    index: int
    name: bytes
    value: bytes

    @property
    def length(self) -> int:
        """Bytes of its entry and its padded value."""
        return _padded(16 + len(self.name)) + _padded(len(self.value))

    @property
    def hash(self) -> int:
        """The kernel's hash of one entry."""
        value = 0
        for byte in self.name:
            value = ((value << 5) ^ (value >> 27) ^ byte) & 0xFFFFFFFF
        padded = self.value.ljust(_padded(len(self.value)), b"\0")
        for (word,) in struct.iter_unpack("<I", padded):
            value = ((value << 16) ^ (value >> 16) ^ word) & 0xFFFFFFFF
        return value


@dataclass(slots=True)
class _Area:
    """A place for attributes: in the inode, or a block of its own."""

    room: int
    attributes: list[_Attribute] = field(default_factory=list)

    def add(self, attribute: _Attribute) -> bool:
        if attribute.length > self.room:
            return False
        self.room -= attribute.length
        self.attributes.append(attribute)
        return True

    def encode(self, start: int, size: int) -> bytes:
        """Return ``size`` bytes: entries, an end mark, and from the back the values."""
        entries, values, end = b"", b"", size
        for item in self.attributes:
            stored = item.value.ljust(_padded(len(item.value)), b"\0")
            end -= len(stored)
            values = stored + values
            entries += struct.pack(
                "<BBHIII",
                len(item.name),
                item.index,
                end + start if stored else 0,
                0,
                len(item.value),
                item.hash,
            ) + item.name.ljust(_padded(16 + len(item.name)) - 16, b"\0")
        return entries + bytes(size - len(entries) - len(values)) + values


def encode_xattrs(xattrs: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    """Return what stands in the inode and what in a block of its own; each may be empty.

    Raises:
        BuildError: a name is of no namespace that ext4 has, an ACL is malformed, or all together
            are longer than an inode and a block.

    """
    inode, block = _Area(_IN_INODE - 8), _Area(BLOCK - 36)
    for attribute in sorted(
        (_attribute(name, value) for name, value in xattrs.items()),
        key=lambda item: (item.index, len(item.name), item.name),
    ):
        if not inode.add(attribute) and not block.add(attribute):
            raise BuildError("its extended attributes do not fit ext4 (about 4 KiB together)")
    inside = b""
    if inode.attributes:
        inside = struct.pack("<I", _XATTR_MAGIC) + inode.encode(0, _IN_INODE - 4)
    if not block.attributes:
        return inside, b""
    total = 0
    for attribute in block.attributes:
        total = ((total << 16) ^ (total >> 16) ^ attribute.hash) & 0xFFFFFFFF
    header = struct.pack("<IIIIIIII", _XATTR_MAGIC, 1, 1, total, 0, 0, 0, 0)
    return inside, header + block.encode(32, BLOCK - 32)


def _attribute(name: bytes, value: bytes) -> _Attribute:
    for prefix, index in _PREFIXES:
        if name.startswith(prefix) and (index not in (2, 3) or name == prefix):
            rest = name.removeprefix(prefix)
            if len(rest) > 255 or (index in (1, 4, 6) and not rest):
                break
            return _Attribute(index, rest, _acl(value) if index in (2, 3) else value)
    raise BuildError(f"ext4 cannot hold the extended attribute {os.fsdecode(name)!r}")


def _acl(value: bytes) -> bytes:
    """Turn an ACL as system calls have it (version 2) into what ext4 stores (version 1)."""
    if len(value) < 4 or len(value) % 8 != 4 or value[:4] != b"\2\0\0\0":
        raise BuildError("a POSIX ACL is malformed")
    result = struct.pack("<I", 1)
    for tag, permissions, owner in struct.iter_unpack("<HHI", value[4:]):
        result += struct.pack("<HH", tag, permissions)
        if tag in (0x02, 0x08):  # a named user, a named group
            result += struct.pack("<I", owner)
        elif tag not in (0x01, 0x04, 0x10, 0x20):
            raise BuildError("a POSIX ACL is malformed")
    return result


def _padded(length: int) -> int:
    return (length + 3) & ~3
