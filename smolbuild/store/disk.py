"""The whole disk of a materialised artifact, read without a machine."""

import bisect
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from smolbuild.core.files import data_extents
from smolbuild.store.materialise import Materialised
from smolbuild.store.qcow2 import Extent, clusters

__all__ = ["DiskReader"]


class DiskReader:
    """A raw base and the overlay over it, as one read-only disk. A context manager.

    ``read`` may be called from several threads.

    Raises:
        MachineError: the overlay is damaged.
        OSError: a file cannot be read.

    """

    def __init__(self, base: Path, overlay: Path) -> None:
        extents = list(clusters(overlay))
        self._starts = [extent.guest_offset for extent in extents]
        self._extents = extents
        self._base = os.open(base, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._base).st_size
        """Bytes of the disk."""
        try:
            self._overlay = os.open(overlay, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(self._base)
            raise

    @classmethod
    def of(cls, files: Materialised) -> Self:
        """Open the disk of ``files``."""
        return cls(files.base, files.overlay)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Call it once."""
        os.close(self._overlay)
        os.close(self._base)

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset`` on, holes as zeros; fewer at the disk's end."""
        end = min(offset + length, self.size)
        parts = []
        while offset < end:
            extent, until = self._at(offset)
            wanted = min(end, until) - offset
            parts.append(self._piece(extent, offset, wanted))
            offset += wanted
        return b"".join(parts)

    def data(self) -> Iterator[tuple[int, int]]:
        """Yield ``(start, end)`` of what may hold data, in order; the rest reads as zeros."""
        at = 0
        base = list(data_extents(self._base))
        for extent in self._extents:
            yield from _cut(base, at, extent.guest_offset)
            at = extent.guest_offset + extent.length
            if extent.kind == "data":
                yield extent.guest_offset, at
        yield from _cut(base, at, self.size)

    def _at(self, offset: int) -> tuple[Extent | None, int]:
        """Return the extent that decides the byte at ``offset``, and where the decision ends."""
        place = bisect.bisect_right(self._starts, offset)
        if place:
            extent = self._extents[place - 1]
            if offset < extent.guest_offset + extent.length:
                return extent, extent.guest_offset + extent.length
        return None, self._starts[place] if place < len(self._starts) else self.size

    def _piece(self, extent: Extent | None, offset: int, length: int) -> bytes:
        if extent is None:
            return _pread(self._base, offset, length)
        if extent.kind == "zero":
            return bytes(length)
        return _pread(self._overlay, extent.host_offset + offset - extent.guest_offset, length)


def _cut(ranges: list[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    first = bisect.bisect_left(ranges, start, key=lambda found: found[1])
    for low, high in ranges[first:]:
        if low >= end:
            return
        if max(low, start) < min(high, end):
            yield max(low, start), min(high, end)


def _pread(descriptor: int, offset: int, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = os.pread(descriptor, length - len(data), offset + len(data))
        if not part:
            break
        data += part
    # The last cluster of an overlay may end before its disk's does: the rest is zeros.
    return bytes(data.ljust(length, b"\0"))
