"""Replay an ext4 journal in memory: which blocks of the disk have a newer content in the journal.

The disk of a checkpoint is that of a mounted file system: what its last transactions changed may
stand only in the journal. Format: the kernel's ``Documentation/filesystems/ext4`` ("Journal
(jbd2)"); the three passes (find the end, collect revocations, replay) are those of
``fs/jbd2/recovery.c``. All numbers are big-endian.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from smolbuild.core.errors import BuildError, VerificationError
from smolbuild.source.ext4_volume import damaged

__all__ = ["MAGIC", "JournalCopy", "replay"]

MAGIC = b"\xc0\x3b\x39\x98"

_DESCRIPTOR, _COMMIT, _REVOKE = 1, 2, 5
_WIDE = 0x2
_CHECKSUMS_2, _CHECKSUMS_3 = 0x8, 0x10
_READ = 0x1 | _WIDE | 0x4 | _CHECKSUMS_2 | _CHECKSUMS_3
_ESCAPED, _SAME_UUID, _LAST = 1, 2, 8


@dataclass(frozen=True, slots=True)
class JournalCopy:
    """Where the newest content of a block stands: a block of the journal."""

    block: int
    """Block number inside the journal."""
    escaped: bool
    """The first four bytes were replaced by zeros; they are ``MAGIC``."""


@dataclass(frozen=True, slots=True)
class _Tag:
    target: int
    flags: int
    checksum: int


@dataclass(frozen=True, slots=True)
class _Record:
    """One block of the log that is no data: its kind, transaction, place and bytes."""

    kind: int
    sequence: int
    block: int
    data: bytes


def replay(read: Callable[[int], bytes], blocks: int, block_size: int) -> dict[int, JournalCopy]:
    """Return what replaying the journal would write: block of the disk -> where its content is.

    Empty when the journal is clean. A transaction without its commit block does not count.

    Args:
        read: returns a block of the journal by its number, ``block_size`` bytes.
        blocks: how many blocks the journal's inode has.
        block_size: bytes.

    Raises:
        VerificationError: the journal is malformed or a block in it does not have its checksum.
        BuildError: it uses features that are not read here.

    """
    log = _Log.open(read, blocks, block_size)
    if log is None:
        return {}
    end = log.end()
    revoked: dict[int, int] = {}
    for record in log.records(end):
        if record.kind == _REVOKE:
            for target in log.revocations(record.data):
                revoked[target] = record.sequence
    copies: dict[int, JournalCopy] = {}
    for record in log.records(end):
        if record.kind != _DESCRIPTOR:
            continue
        place = record.block
        for tag in log.tags(record.data):
            place = log.after(place)
            last = revoked.get(tag.target)
            if last is not None and not _later(record.sequence, last):
                continue
            log.check_data(tag, record.sequence, place)
            copies[tag.target] = JournalCopy(place, bool(tag.flags & _ESCAPED))
    return copies


def _later(one: int, other: int) -> bool:
    """Return whether transaction ``one`` comes after ``other``; their numbers wrap around."""
    return 0 < (one - other) % (1 << 32) < 1 << 31


@dataclass(frozen=True, slots=True)
class _Log:
    read: Callable[[int], bytes]
    first: int
    last: int
    """One past the log's last block."""
    start: int
    sequence: int
    features: int
    seed: int
    block_size: int

    @classmethod
    def open(cls, read: Callable[[int], bytes], blocks: int, block_size: int) -> "_Log | None":
        if blocks < 2:
            raise damaged("the journal has no room")
        data = read(0)
        magic, kind, _, size, length, first, sequence, start = struct.unpack_from(">4s7I", data)
        if magic != MAGIC or kind not in (3, 4):
            raise damaged("the journal has no superblock")
        if start == 0:
            return None
        features = struct.unpack_from(">I", data, 0x28)[0] if kind == 4 else 0
        if features & ~_READ:
            raise BuildError(
                f"the root disk's journal uses features {features & ~_READ:#x}, "
                "which smolbuild does not read",
                code="filesystem-features",
            )
        if size != block_size or not 0 < first < length <= blocks or not first <= start < length:
            raise damaged("the numbers in the journal's superblock contradict each other")
        seed = _crc32c(0xFFFFFFFF, data[0x30:0x40]) if features & 0x18 else 0
        return cls(read, first, length, start, sequence, features, seed, block_size)

    @property
    def _checked(self) -> bool:
        return bool(self.features & (_CHECKSUMS_2 | _CHECKSUMS_3))

    def after(self, block: int, count: int = 1) -> int:
        return self.first + (block - self.first + count) % (self.last - self.first)

    def end(self) -> int:
        """Return the number of the first transaction that was not committed."""
        sequence = self.sequence
        for record in self.records(None):
            if record.kind == _COMMIT:
                sequence = (record.sequence + 1) % (1 << 32)
        return sequence

    def records(self, end: int | None) -> Iterator[_Record]:
        """Yield the log's records up to transaction ``end``, or as far as they go."""
        block, sequence, left = self.start, self.sequence, self.last - self.first
        while left > 0 and (end is None or _later(end, sequence)):
            data = self.read(block)
            magic, kind, found = struct.unpack_from(">4sII", data)
            if magic != MAGIC or found != sequence or not self._intact(kind, data):
                return
            yield _Record(kind, sequence, block, data)
            used = 1
            if kind == _DESCRIPTOR:
                used += sum(1 for _ in self.tags(data))
            elif kind == _COMMIT:
                sequence = (sequence + 1) % (1 << 32)
            elif kind != _REVOKE:
                return
            left -= used
            block = self.after(block, used)

    def _intact(self, kind: int, data: bytes) -> bool:
        if not self._checked:
            return True
        if kind == _COMMIT:
            stored, plain = data[16:20], data[:16] + bytes(4) + data[20:]
        else:
            stored, plain = data[-4:], data[:-4] + bytes(4)
        return int.from_bytes(stored, "big") == _crc32c(self.seed, plain)

    def tags(self, data: bytes) -> Iterator[_Tag]:
        """Yield what a descriptor block says of the data blocks that follow it."""
        at, end = 12, self.block_size - (4 if self._checked else 0)
        wide = bool(self.features & _WIDE)
        if self.features & _CHECKSUMS_3:
            size = 16
        else:
            size = (12 if wide else 8) + (2 if self.features & _CHECKSUMS_2 else 0)
        while at + size <= end:
            if self.features & _CHECKSUMS_3:
                low, flags, high, checksum = struct.unpack_from(">IIII", data, at)
            else:
                low, checksum, flags = struct.unpack_from(">IHH", data, at)
                high = struct.unpack_from(">I", data, at + 8)[0] if wide else 0
            yield _Tag(low | (high << 32 if wide else 0), flags, checksum)
            at += size + (0 if flags & _SAME_UUID else 16)
            if flags & _LAST:
                return

    def revocations(self, data: bytes) -> Iterator[int]:
        """Yield the blocks whose older copies do not count any more."""
        used = struct.unpack_from(">I", data, 12)[0]
        size = 8 if self.features & _WIDE else 4
        if not 16 <= used <= self.block_size:
            raise damaged("a revocation in the journal is malformed")
        for at in range(16, used - size + 1, size):
            yield int.from_bytes(data[at : at + size], "big")

    def check_data(self, tag: _Tag, sequence: int, place: int) -> None:
        if not self._checked:
            return
        found = _crc32c(_crc32c(self.seed, sequence.to_bytes(4, "big")), self.read(place))
        if not self.features & _CHECKSUMS_3:
            found &= 0xFFFF
        if found != tag.checksum:
            raise _bad_checksum(tag.target)


def _bad_checksum(target: int) -> VerificationError:
    return damaged(f"the journal's copy of block {target:,} does not have its checksum")


def _table() -> tuple[int, ...]:
    entries = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # noqa: PLW2901
        entries.append(value)
    return tuple(entries)


_CRC = _table()


def _crc32c(value: int, data: bytes) -> int:
    """Return the Castagnoli CRC as the kernel chains it (no inversion at either end)."""
    table = _CRC
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ value >> 8
    return value
