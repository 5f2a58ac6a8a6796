"""Where things stand in an ext4 image: groups, tables, journal, and which blocks are free.

Format: the kernel's ``Documentation/filesystems/ext4`` ("High Level Design", "Global Structures").
Blocks are 4 KiB, groups 128 MiB; ``flex_bg`` puts the bitmaps and inode tables of 16 groups side by
side at the start of the first of them, so that file data lies in long runs.
"""

import struct
from dataclasses import dataclass

from smolbuild.core.errors import BuildError

__all__ = [
    "BLOCK",
    "FIRST_INODE",
    "FIXED_TIME",
    "INODE_SIZE",
    "JOURNAL_INODE",
    "UUID",
    "Blocks",
    "Geometry",
    "plan_geometry",
    "superblock",
]

BLOCK = 4096
INODE_SIZE = 256
FIRST_INODE = 11
"""``lost+found``; the ones below are the file system's own."""
JOURNAL_INODE = 8
FIXED_TIME = 1_577_836_800
"""2020-01-01T00:00:00Z: every time that is not a file's own."""
UUID = bytes.fromhex("736d6f6c62756c6d8065787434726f6f")
HASH_SEED = bytes.fromhex("736d6f6c62756c6d8068617368736565")

_GROUP_BLOCKS = 32768
_GROUPS_PER_FLEX = 16
_DESCRIPTOR = 32
_BYTES_PER_INODE = 16384
_INODES_PER_BLOCK = BLOCK // INODE_SIZE
_MAX_INODES_PER_GROUP = 1976 * _INODES_PER_BLOCK
"""So that the tables of 16 groups fit the first of them, beside the longest descriptor table."""
_MIN_BYTES = 4 << 20
_MAX_BYTES = 1 << 44
"""16 TiB: beyond it block numbers need 64 bits."""

_COMPAT = 0x4 | 0x8 | 0x20  # has_journal, ext_attr, dir_index
_INCOMPAT = 0x2 | 0x40 | 0x200  # filetype, extents, flex_bg
_RO_COMPAT = 0x1 | 0x2 | 0x8 | 0x20 | 0x40  # sparse_super, large_file, huge_file, dir_nlink, isize


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The fixed layout of one image."""

    blocks: int
    groups: int
    inodes_per_group: int
    journal_blocks: int

    @property
    def inodes(self) -> int:
        """Inodes in all groups."""
        return self.groups * self.inodes_per_group

    @property
    def table_blocks(self) -> int:
        """Blocks of one group's inode table."""
        return self.inodes_per_group // _INODES_PER_BLOCK

    @property
    def descriptor_blocks(self) -> int:
        """Blocks of the group descriptors, in each group that has a copy."""
        return -(-self.groups * _DESCRIPTOR // BLOCK)

    def start(self, group: int) -> int:
        """Return the first block of ``group``."""
        return group * _GROUP_BLOCKS

    def length(self, group: int) -> int:
        """Return the number of blocks in ``group``; the last one may be short."""
        return min(_GROUP_BLOCKS, self.blocks - self.start(group))

    def has_copy(self, group: int) -> bool:
        """Return whether ``group`` has a superblock (sparse_super: 0, 1, powers of 3, 5, 7)."""
        if group <= 1:
            return True
        for base in (3, 5, 7):
            power = base
            while power < group:
                power *= base
            if power == group:
                return True
        return False

    def _flex(self, group: int) -> tuple[int, int, int]:
        """Return the first block of the flex group's tables, its groups, and ``group``'s place."""
        first = group // _GROUPS_PER_FLEX * _GROUPS_PER_FLEX
        copy = 1 + self.descriptor_blocks if self.has_copy(first) else 0
        return self.start(first) + copy, min(_GROUPS_PER_FLEX, self.groups - first), group - first

    def block_bitmap(self, group: int) -> int:
        """Return the block of ``group``'s block bitmap."""
        start, _, place = self._flex(group)
        return start + place

    def inode_bitmap(self, group: int) -> int:
        """Return the block of ``group``'s inode bitmap."""
        start, count, place = self._flex(group)
        return start + count + place

    def inode_table(self, group: int) -> int:
        """Return the first block of ``group``'s inode table."""
        start, count, place = self._flex(group)
        return start + 2 * count + place * self.table_blocks

    def inode_offset(self, inode: int) -> int:
        """Return the byte of the image where ``inode`` (1-based) stands."""
        group, index = divmod(inode - 1, self.inodes_per_group)
        return self.inode_table(group) * BLOCK + index * INODE_SIZE

    def reserved(self) -> list[tuple[int, int]]:
        """Return the (start, length) runs of blocks that hold the above, in order."""
        runs = []
        for group in range(self.groups):
            copy = 1 + self.descriptor_blocks if self.has_copy(group) else 0
            length = copy
            if group % _GROUPS_PER_FLEX == 0:
                count = self._flex(group)[1]
                length += count * (2 + self.table_blocks)
            if length:
                runs.append((self.start(group), length))
        return runs


def plan_geometry(size: int, inodes: int) -> Geometry:
    """Return the layout of an image of ``size`` bytes with room for at least ``inodes`` inodes.

    Raises:
        BuildError: the size is below 4 MiB or above 16 TiB, or cannot hold that many inodes.

    """
    if not _MIN_BYTES <= size <= _MAX_BYTES - BLOCK:
        raise BuildError(
            f"a root disk of {size:,} bytes cannot be made: 4 MiB to 16 TiB are possible",
            hint="set `overlay` (GiB) in the Smolfile",
        )
    blocks = size // BLOCK
    groups = -(-blocks // _GROUP_BLOCKS)
    wanted = max(size // _BYTES_PER_INODE, 2 * inodes + FIRST_INODE)
    per_group = -(-wanted // groups)
    per_group = -(-per_group // _INODES_PER_BLOCK) * _INODES_PER_BLOCK
    if per_group > _MAX_INODES_PER_GROUP:
        raise BuildError(
            f"{inodes:,} files do not fit a disk of {size:,} bytes",
            hint="set a larger `overlay` (GiB) in the Smolfile",
            code="disk-too-small",
        )
    geometry = Geometry(
        blocks=blocks,
        groups=groups,
        inodes_per_group=per_group,
        journal_blocks=_journal_blocks(blocks),
    )
    tail = geometry.length(groups - 1)
    last = geometry.reserved()[-1]
    if groups > 1 and tail < 64 + (last[1] if last[0] == geometry.start(groups - 1) else 0):
        # A last group too short for its own tables is left off, as mke2fs does.
        return plan_geometry((groups - 1) * _GROUP_BLOCKS * BLOCK, inodes)
    return geometry


def _journal_blocks(blocks: int) -> int:
    """Return the journal's length: 4 MiB to 64 MiB by the image's size, as mke2fs has it."""
    for limit, journal in ((262_144, 1024), (524_288, 4096), (1_048_576, 8192)):
        if blocks < limit:
            return journal
    return 16384


class Blocks:
    """Hands out free blocks in ascending order and remembers which are used."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._runs = [*geometry.reserved(), (geometry.blocks, 0)]
        self._next_run = 0
        self._cursor = 0
        self._used: list[tuple[int, int]] = geometry.reserved()
        self.free = geometry.blocks - sum(length for _, length in self._used)

    def take(self, count: int) -> list[tuple[int, int]]:
        """Return (start, length) runs of ``count`` free blocks; the caller checked ``free``."""
        if count > self.free:
            raise BuildError("the disk is full", code="disk-too-small")
        self.free -= count
        taken = []
        while count:
            start, length = self._runs[self._next_run]
            room = start - self._cursor
            if room <= 0:
                self._cursor = max(self._cursor, start + length)
                self._next_run += 1
                continue
            run = min(room, count)
            taken.append((self._cursor, run))
            self._cursor += run
            count -= run
        self._used.extend(taken)
        return taken

    def bitmaps(self) -> list[bytearray]:
        """Return each group's block bitmap; the bits past the last block are set."""
        bits = bytearray(self._geometry.groups * _GROUP_BLOCKS // 8)
        for start, length in self._used:
            _set_bits(bits, start, length)
        _set_bits(bits, self._geometry.blocks, len(bits) * 8 - self._geometry.blocks)
        size = _GROUP_BLOCKS // 8
        return [bits[at : at + size] for at in range(0, len(bits), size)]


def _set_bits(bits: bytearray, start: int, length: int) -> None:
    while length and start % 8:
        bits[start // 8] |= 1 << start % 8
        start, length = start + 1, length - 1
    whole = length // 8
    bits[start // 8 : start // 8 + whole] = b"\xff" * whole
    start, length = start + 8 * whole, length - 8 * whole
    while length:
        bits[start // 8] |= 1 << start % 8
        start, length = start + 1, length - 1


def superblock(
    geometry: Geometry, *, group: int, free_blocks: int, free_inodes: int, journal: bytes
) -> bytes:
    """Return the 1024 bytes of the superblock as it stands in ``group``.

    ``journal`` is the block map and size of the journal's inode (68 bytes), kept as a back-up.
    """
    data = bytearray(1024)

    def put(offset: int, form: str, *values: int) -> None:
        struct.pack_into("<" + form, data, offset, *values)

    put(0x00, "IIII", geometry.inodes, geometry.blocks, 0, free_blocks)
    put(0x10, "IIII", free_inodes, 0, 2, 2)
    put(0x20, "III", _GROUP_BLOCKS, _GROUP_BLOCKS, geometry.inodes_per_group)
    put(0x2C, "IIHH", 0, FIXED_TIME, 0, 0xFFFF)
    put(0x38, "HHHH", 0xEF53, 1, 1, 0)
    put(0x40, "IIII", FIXED_TIME, 0, 0, 1)
    put(0x54, "IHH", FIRST_INODE, INODE_SIZE, group)
    put(0x5C, "III", _COMPAT, _INCOMPAT, _RO_COMPAT)
    data[0x68:0x78] = UUID
    data[0x78:0x81] = b"smolbuild"
    put(0xE0, "III", JOURNAL_INODE, 0, 0)
    data[0xEC:0xFC] = HASH_SEED
    put(0xFC, "BBH", 1, 1, 0)  # half_md4; the journal's inode is backed up
    put(0x100, "III", 0x4 | 0x8, 0, FIXED_TIME)  # user_xattr, acl
    data[0x10C : 0x10C + len(journal)] = journal
    put(0x15C, "HHI", 32, 32, 1)  # extra isize; signed directory hashes
    put(0x174, "B", _GROUPS_PER_FLEX.bit_length() - 1)
    return bytes(data)
