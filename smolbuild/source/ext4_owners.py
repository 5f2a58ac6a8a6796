"""Whose a byte of an ext4 image is: which file's, the journal's, or nobody's."""

import bisect
import enum
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from smolbuild.source.ext4_decode import RawInode, decode_inode, has_map
from smolbuild.source.ext4_volume import Volume

__all__ = ["OwnerMap", "Place", "PlaceKind", "owner_map"]


class PlaceKind(enum.Enum):
    """What a byte of a disk belongs to."""

    FILE = "file"
    DIRECTORY = "directory"
    DELETED = "deleted file"
    """In use, but by no file that has a name: deleted while something holds it open."""
    JOURNAL = "journal"
    METADATA = "metadata"
    FREE = "free block"
    OUTSIDE = "outside the file system"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a byte is. ``path`` starts with ``/``; empty where no one file is meant.

    Metadata has a path when it is the inode or the attributes of that file.
    """

    kind: PlaceKind
    path: bytes = b""

    def __str__(self) -> str:
        """Name the place for people."""
        path = os.fsdecode(self.path)
        if self.kind is PlaceKind.METADATA and path:
            return f"inode of {path}"
        return f"{self.kind.value} {path}".rstrip()


_FREE = Place(kind=PlaceKind.FREE)
_METADATA = Place(kind=PlaceKind.METADATA)
_JOURNAL = Place(kind=PlaceKind.JOURNAL)
_DELETED = Place(kind=PlaceKind.DELETED)
_OUTSIDE = Place(kind=PlaceKind.OUTSIDE)


@dataclass(slots=True)
class OwnerMap:
    """Answers whose a byte is; made once for a disk."""

    volume: Volume
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    inodes: dict[int, bytes] = field(default_factory=dict)
    """Path by inode number."""
    tables: list[tuple[int, int]] = field(default_factory=list)
    """(first byte, group) of each inode table, in order."""
    bitmaps: dict[int, bytes | None] = field(default_factory=dict)

    def find(self, offsets: Iterable[int]) -> Mapping[int, Place]:
        """Return the place of each byte offset of the disk."""
        return {offset: self._place(offset) for offset in offsets}

    def _place(self, offset: int) -> Place:
        head = self.volume.head
        block = offset // head.block_size
        if not 0 <= block < head.blocks:
            return _OUTSIDE
        at = bisect.bisect_right(self.starts, block) - 1
        if at >= 0 and block < self.ends[at]:
            place = self.places[at]
            return self._inode(offset) or place if place is _METADATA else place
        if block < head.first_block:
            return _METADATA
        return _DELETED if self._used(block - head.first_block) else _FREE

    def _inode(self, offset: int) -> Place | None:
        """Return the file whose inode holds the byte, when it is in an inode table at all."""
        head = self.volume.head
        at = bisect.bisect_right(self.tables, offset, key=lambda item: item[0]) - 1
        if at < 0:
            return None
        start, group = self.tables[at]
        index = (offset - start) // head.inode_size
        if index >= head.inodes_per_group:
            return None
        path = self.inodes.get(group * head.inodes_per_group + index + 1)
        return None if path is None else Place(kind=PlaceKind.METADATA, path=path)

    def _used(self, block: int) -> bool:
        group, bit = divmod(block, self.volume.head.blocks_per_group)
        if group not in self.bitmaps:
            self.bitmaps[group] = self.volume.used_blocks(group)
        bitmap = self.bitmaps[group]
        return bitmap is not None and bool(bitmap[bit // 8] >> bit % 8 & 1)


def owner_map(volume: Volume, files: Iterable[tuple[bytes, RawInode]]) -> OwnerMap:
    """Return the map of a disk; ``files`` are the paths and inodes of everything that has a name.

    Raises:
        VerificationError: the map of a file is damaged.

    """
    result = OwnerMap(volume)
    block_size = volume.head.block_size
    result.tables = sorted(
        (group.inode_table * block_size, number) for number, group in enumerate(volume.groups)
    )
    claims = [*_metadata(volume), *_special(volume)]
    for path, inode in files:
        if inode.number in result.inodes:
            continue  # another name of a file already seen
        result.inodes[inode.number] = path
        claims.extend(_claims(volume, path, inode))
    claims.sort(key=lambda claim: claim[:2])
    for start, length, place in claims:
        result.starts.append(start)
        result.ends.append(start + length)
        result.places.append(place)
    return result


_Claim = tuple[int, int, Place]


def _claims(volume: Volume, path: bytes, inode: RawInode) -> Iterator[_Claim]:
    kind = inode.mode & 0xF000
    if inode.attribute_block:
        yield inode.attribute_block, 1, Place(kind=PlaceKind.METADATA, path=path)
    if has_map(inode):
        place = Place(kind=PlaceKind.DIRECTORY if kind == 0x4000 else PlaceKind.FILE, path=path)
        found = volume.file_map(inode.data, inode.number)
        yield from ((run.start, run.length, place) for run in found.runs)
        yield from ((block, 1, place) for block in found.index)


def _metadata(volume: Volume) -> Iterator[_Claim]:
    head = volume.head
    descriptors = -(-head.groups * head.descriptor_size // head.block_size)
    table = -(-head.inodes_per_group * head.inode_size // head.block_size)
    for number, group in enumerate(volume.groups):
        if head.has_copy(number):
            start = head.first_block + number * head.blocks_per_group
            yield start, 1 + descriptors + head.reserved_descriptors, _METADATA
        yield group.block_bitmap, 1, _METADATA
        yield group.inode_bitmap, 1, _METADATA
        yield group.inode_table, table, _METADATA


def _special(volume: Volume) -> Iterator[_Claim]:
    """Yield the blocks of the inodes that have no name: journal, quotas, growth, orphans."""
    head = volume.head
    numbers = {*range(3, head.first_inode), 1, head.journal_inode, *head.hidden_files} - {0}
    for number in sorted(numbers):
        inode = decode_inode(volume.inode(number), number, large_directories=False)
        if not has_map(inode):
            continue
        place = _JOURNAL if number == head.journal_inode else _METADATA
        found = volume.file_map(inode.data, number)
        yield from ((run.start, run.length, place) for run in found.runs)
        yield from ((block, 1, place) for block in found.index)
