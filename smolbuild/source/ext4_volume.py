"""Below the ext4 reader: superblock, groups, inodes, and where the blocks of a file lie.

Formats: the kernel's ``Documentation/filesystems/ext4``. The image may be damaged or hostile: every
number read from it is checked before it is used, and no loop in it goes unnoticed.
"""

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from smolbuild.core.errors import BuildError, VerificationError

__all__ = [
    "FileMap",
    "ReadDisk",
    "Run",
    "Superblock",
    "Volume",
    "damaged",
    "parse_superblock",
]

ReadDisk = Callable[[int, int], bytes]
"""Returns ``length`` bytes of the disk from byte ``offset``, both in range."""

RECOVER = 0x4
LARGE_DIRECTORIES = 0x4000

_INCOMPAT = {
    0x1: "compression",
    0x8: "journal_dev",
    0x10: "meta_bg",
    0x100: "mmp",
    0x400: "ea_inode",
    0x1000: "dirdata",
    0x10000: "encrypt",
    0x20000: "casefold",
}
"""Features that are not read, by name; ``_READ`` are."""
_READ = 0x2 | RECOVER | 0x40 | 0x80 | 0x200 | 0x2000 | LARGE_DIRECTORIES | 0x8000
_BIGALLOC = 0x200
_LAZY_BITMAPS = 0x10 | 0x400  # gdt_csum, metadata_csum: bitmaps may be left unwritten
_EXTENTS_FLAG = 0x80000
_MAX_DEPTH = 5
_CHUNK = 32 << 10


def damaged(problem: str) -> VerificationError:
    """Return the error for a file system that is not as it must be."""
    return VerificationError(
        f"the root disk's file system is damaged: {problem}",
        hint="rebuild or pull the artifact again",
        code="damaged-filesystem",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Superblock:
    """What the superblock says, checked against the size of the disk. Sizes are in bytes."""

    block_size: int
    blocks: int
    first_block: int
    blocks_per_group: int
    inodes: int
    inodes_per_group: int
    inode_size: int
    first_inode: int
    descriptor_size: int
    compat: int
    incompat: int
    ro_compat: int
    journal_inode: int
    hidden_files: tuple[int, ...]
    """Inodes above the reserved ones that have no name: project quotas, the orphan file."""
    reserved_descriptors: int
    """Blocks kept behind the group descriptors for growth."""
    backups: tuple[int, int]
    """The groups with copies under sparse_super2."""

    @property
    def groups(self) -> int:
        """Number of block groups."""
        return -(-(self.blocks - self.first_block) // self.blocks_per_group)

    @property
    def has_journal(self) -> bool:
        """Whether the file system keeps a journal inside itself."""
        return bool(self.compat & 0x4)

    @property
    def needs_recovery(self) -> bool:
        """Whether the journal counts: the file system is mounted or was not unmounted."""
        return bool(self.incompat & RECOVER)

    def has_copy(self, group: int) -> bool:
        """Return whether ``group`` holds a superblock and descriptors."""
        if group == 0:
            return True
        if self.compat & 0x200:
            return group in self.backups
        if not self.ro_compat & 0x1 or group == 1:
            return True
        return any(_is_power(group, base) for base in (3, 5, 7))


def _is_power(number: int, base: int) -> bool:
    while number % base == 0:
        number //= base
    return number == 1


def parse_superblock(data: bytes, size: int) -> Superblock:
    """Return the superblock in ``data`` (1024 bytes) of a disk of ``size`` bytes.

    Raises:
        VerificationError: it is none, or does not fit the disk.
        BuildError: it uses features that are not read here.

    """

    def number(offset: int, form: str = "I") -> int:
        value: int = struct.unpack_from("<" + form, data, offset)[0]
        return value

    if len(data) != 1024 or number(0x38, "H") != 0xEF53:
        raise damaged("there is no ext4 superblock")
    dynamic = number(0x4C) >= 1
    incompat, ro_compat = number(0x60), number(0x64)
    unread = incompat & ~_READ
    if unread or ro_compat & _BIGALLOC:
        names = [name for bit, name in _INCOMPAT.items() if unread & bit]
        names += ["bigalloc"] if ro_compat & _BIGALLOC else []
        raise BuildError(
            f"the root disk's file system uses {', '.join(names) or f'features {unread:#x}'}, "
            "which smolbuild does not read",
            code="filesystem-features",
        )
    if number(0x18) > 6:
        raise damaged("impossible block size")
    wide = bool(incompat & 0x80)
    head = Superblock(
        block_size=1024 << number(0x18),
        blocks=number(0x4) | (number(0x150) << 32 if wide else 0),
        first_block=number(0x14),
        blocks_per_group=number(0x20),
        inodes=number(0x0),
        inodes_per_group=number(0x28),
        inode_size=number(0x58, "H") if dynamic else 128,
        first_inode=number(0x54) if dynamic else 11,
        descriptor_size=number(0xFE, "H") if wide else 32,
        compat=number(0x5C),
        incompat=incompat,
        ro_compat=ro_compat,
        journal_inode=number(0xE0),
        hidden_files=tuple(filter(None, (number(0x26C), number(0x280)))),
        reserved_descriptors=number(0xCE, "H"),
        backups=(number(0x24C), number(0x250)),
    )
    _check(head, size)
    return head


def _check(head: Superblock, size: int) -> None:
    block = head.block_size
    sound = (
        head.first_block == (1 if block == 1024 else 0)
        and head.first_block < head.blocks
        and head.blocks * block <= size
        and 0 < head.blocks_per_group <= 8 * block
        and 0 < head.inodes_per_group <= 8 * block
        and head.inodes == head.groups * head.inodes_per_group
        and head.inode_size in (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
        and head.inode_size <= block
        and 11 <= head.first_inode <= head.inodes
        and head.descriptor_size in (32, 64, 128, 256, 512, 1024)
    )
    if not sound:
        raise damaged("the numbers in the superblock contradict each other or the disk's size")


@dataclass(frozen=True, slots=True)
class Run:
    """``length`` blocks of a file from block ``logical`` that stand at ``start`` of the disk."""

    logical: int
    start: int
    length: int
    written: bool = True
    """False for blocks that are reserved but read as zeros."""


@dataclass(frozen=True, slots=True)
class FileMap:
    """Where the blocks of one inode are: its data in order, and the blocks of the map itself."""

    runs: tuple[Run, ...]
    index: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """One block group's descriptor."""

    block_bitmap: int
    inode_bitmap: int
    inode_table: int
    bitmap_unwritten: bool


@dataclass(slots=True)
class Volume:
    """The blocks and inodes of a file system, as ``read`` gives them."""

    head: Superblock
    read_disk: ReadDisk
    groups: list[Group] = field(init=False)
    _chunk: Callable[[int], bytes] = field(init=False)

    def __post_init__(self) -> None:
        self._chunk = functools.lru_cache(maxsize=256)(self._read_chunk)
        self.groups = self._read_groups()

    def blocks(self, start: int, count: int) -> bytes:
        """Return ``count`` blocks from ``start``; raises VerificationError outside the disk."""
        self.check(start, count, "a block")
        return self.read_disk(start * self.head.block_size, count * self.head.block_size)

    def check(self, start: int, count: int, what: str) -> None:
        """Raise VerificationError when the blocks do not lie on the disk."""
        if not 0 < start <= start + count <= self.head.blocks:
            raise damaged(f"{what} lies at block {start:,}, outside the disk")

    def _read_groups(self) -> list[Group]:
        head = self.head
        size = head.descriptor_size
        length = head.groups * size
        data = self.blocks(head.first_block + 1, -(-length // head.block_size))
        table = -(-head.inodes_per_group * head.inode_size // head.block_size)
        groups = []
        for number in range(head.groups):
            low = struct.unpack_from("<IIIHHHH", data, number * size)
            high = struct.unpack_from("<III", data, number * size + 32) if size >= 64 else (0, 0, 0)
            places = [a | b << 32 for a, b in zip(low[:3], high, strict=True)]
            for place, count in zip(places, (1, 1, table), strict=True):
                self.check(place, count, f"a table of group {number}")
            lazy = bool(low[6] & 0x2 and head.ro_compat & _LAZY_BITMAPS)
            groups.append(Group(places[0], places[1], places[2], lazy))
        return groups

    def inode_offset(self, number: int) -> int:
        """Return the byte of the disk where inode ``number`` stands."""
        if not 0 < number <= self.head.inodes:
            raise damaged(f"there is no inode {number:,}")
        group, index = divmod(number - 1, self.head.inodes_per_group)
        start = self.groups[group].inode_table * self.head.block_size
        return start + index * self.head.inode_size

    def inode(self, number: int) -> bytes:
        """Return the bytes of inode ``number``; raises VerificationError when there is none."""
        offset = self.inode_offset(number)
        data = self._chunk(offset // _CHUNK)
        at = offset % _CHUNK
        return data[at : at + self.head.inode_size]

    def _read_chunk(self, number: int) -> bytes:
        end = self.head.blocks * self.head.block_size
        start = number * _CHUNK
        return self.read_disk(start, min(_CHUNK, end - start))

    def file_map(self, inode: bytes, number: int) -> FileMap:
        """Return where the blocks of an inode lie; the caller knows that it has a map.

        Raises:
            VerificationError: the map is damaged; names the inode.

        """
        flags = struct.unpack_from("<I", inode, 32)[0]
        walk = _Mapping(self, number)
        if flags & _EXTENTS_FLAG:
            walk.extents(inode[40:100], None)
        else:
            walk.indirect(struct.unpack_from("<15I", inode, 40))
        return FileMap(tuple(walk.runs), tuple(walk.index))

    def used_blocks(self, group: int) -> bytes | None:
        """Return a group's block bitmap; None where none was written because all is free."""
        described = self.groups[group]
        if described.bitmap_unwritten:
            return None
        return self.blocks(described.block_bitmap, 1)


@dataclass(slots=True)
class _Mapping:
    """One inode's block map, while it is read."""

    volume: Volume
    number: int
    runs: list[Run] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)
    _next: int = 0

    def _damaged(self, problem: str) -> VerificationError:
        return damaged(f"inode {self.number:,}: {problem}")

    def _block(self, block: int) -> bytes:
        if block in self._seen:
            raise self._damaged(f"block {block:,} of its map is its own ancestor or sibling")
        self._seen.add(block)
        self.index.append(block)
        return self.volume.blocks(block, 1)

    def extents(self, data: bytes, expected: int | None) -> None:
        magic, entries, _, depth = struct.unpack_from("<HHHH", data)
        if magic != 0xF30A or 12 + 12 * entries > len(data) or depth > _MAX_DEPTH:
            raise self._damaged("its extent tree is malformed")
        if expected is not None and depth != expected:
            raise self._damaged("its extent tree has uneven levels")
        for at in range(12, 12 + 12 * entries, 12):
            if depth:
                _, low, high = struct.unpack_from("<IIH", data, at)
                self.extents(self._block(low | high << 32), depth - 1)
                continue
            logical, length, high, low = struct.unpack_from("<IHHI", data, at)
            written = length <= 32768
            self._add(logical, low | high << 32, length if written else length - 32768, written)

    def _add(self, logical: int, start: int, length: int, written: bool = True) -> None:
        if not length or logical < self._next:
            raise self._damaged("its blocks are out of order")
        self.volume.check(start, length, f"a part of inode {self.number:,}")
        self._next = logical + length
        if self.runs:
            last = self.runs[-1]
            if (last.logical + last.length, last.start + last.length, last.written) == (
                logical,
                start,
                written,
            ):
                self.runs[-1] = Run(last.logical, last.start, last.length + length, written)
                return
        self.runs.append(Run(logical, start, length, written))

    def indirect(self, pointers: tuple[int, ...]) -> None:
        per_block = self.volume.head.block_size // 4
        self._pointers(pointers[:12], 0, 0)
        logical = 12
        for depth in (1, 2, 3):
            self._pointers(pointers[11 + depth : 12 + depth], logical, depth)
            logical += per_block**depth

    def _pointers(self, pointers: tuple[int, ...], logical: int, depth: int) -> None:
        per_block = self.volume.head.block_size // 4
        for block in pointers:
            if block and depth:
                below = struct.unpack(f"<{per_block}I", self._block(block))
                self._pointers(below, logical, depth - 1)
            elif block:
                self._add(logical, block, 1)
            logical += per_block**depth
