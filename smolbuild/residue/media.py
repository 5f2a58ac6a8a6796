"""What is searched: memory, device state and disks, read by the guest's addresses."""

import bisect
import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from smolbuild.core.files import data_extents
from smolbuild.residue.scanner import Segment
from smolbuild.store.qcow2 import Extent
from smolbuild.store.shadow import without_shadowed

__all__ = ["Medium", "across_deltas", "delta_medium", "file_medium", "layered_disk"]

Kind = Literal["memory", "disk", "device state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """Parts of files, each with the address that its first byte has in the guest; in order."""

    kind: Kind
    layer: str
    """The step whose delta it is, ``base``, or empty for what is no disk."""
    segments: tuple[Segment, ...]
    addresses: tuple[int, ...]

    def address(self, segment: int, offset: int) -> int:
        """Return the address of a place."""
        return self.addresses[segment] + offset

    def around(self, segment: int, offset: int, before: int, after: int) -> tuple[bytes, bytes]:
        """Return the bytes before a place and those from it on, as far as they belong together."""
        first = last = segment
        while self.segments[first].joined and first:
            first -= 1
        while last + 1 < len(self.segments) and self.segments[last + 1].joined:
            last += 1
        at = self.address(segment, offset)
        low = max(self.addresses[first], at - before)
        end = self.addresses[last] + self.segments[last].length
        return self._read(low, at, first), self._read(at, min(end, at + after), segment)

    def _read(self, low: int, high: int, index: int) -> bytes:
        index = max(index, bisect.bisect_right(self.addresses, low) - 1)
        parts = []
        while low < high and index < len(self.segments):
            segment = self.segments[index]
            inside = low - self.addresses[index]
            length = min(high - low, segment.length - inside)
            parts.append(_pread(segment.file, segment.offset + inside, length))
            low, index = low + length, index + 1
        return b"".join(parts)


def file_medium(path: Path, kind: Kind, *, layer: str = "") -> Medium:
    """Return the data of ``path``, whose holes need no search."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        extents = list(data_extents(descriptor))
    finally:
        os.close(descriptor)
    return Medium(
        kind=kind,
        layer=layer,
        segments=tuple(Segment(file=path, offset=a, length=b - a) for a, b in extents),
        addresses=tuple(a for a, _ in extents),
    )


def delta_medium(path: Path, layer: str, extents: Sequence[Extent]) -> Medium:
    """Return the clusters of an overlay that ``extents`` names, neighbours in the guest joined."""
    segments, addresses, end = [], [], -1
    for extent in extents:
        if extent.kind != "data":
            continue
        segments.append(
            Segment(
                file=path,
                offset=extent.host_offset,
                length=extent.length,
                joined=extent.guest_offset == end,
            )
        )
        addresses.append(extent.guest_offset)
        end = extent.guest_offset + extent.length
    return Medium(kind="disk", layer=layer, segments=tuple(segments), addresses=tuple(addresses))


@dataclass(slots=True)
class _Layers:
    """A disk as the guest sees it: a raw base and what overlays put over it, highest first."""

    base: Path
    maps: list[tuple[list[int], list[Extent], Path]] = field(default_factory=list)

    def find(self, offset: int) -> tuple[int, Extent | None, Path | None]:
        """Return the layer that decides the byte, its extent and file; -1: the base does."""
        for index, (starts, extents, path) in enumerate(self.maps):
            place = bisect.bisect_right(starts, offset) - 1
            if place >= 0 and offset < extents[place].guest_offset + extents[place].length:
                return index, extents[place], path
        return -1, None, None

    def read(self, offset: int, length: int) -> bytes:
        parts = []
        while length:
            _, extent, path = self.find(offset)
            # Layers change at clusters only.
            part = min(length, 65536 - offset % 65536)
            if extent is None:
                parts.append(_pread(self.base, offset, part))
            elif extent.kind == "zero" or path is None:
                parts.append(bytes(part))
            else:
                parts.append(_pread(path, extent.host_offset + offset - extent.guest_offset, part))
            offset, length = offset + part, length - part
        return b"".join(parts)


def layered_disk(
    base: Path, deltas: Sequence[tuple[Path, Sequence[Extent]]]
) -> Callable[[int, int], bytes]:
    """Return what reads the disk that ``deltas``, lowest first, make of ``base``."""
    layers = _Layers(base)
    for path, extents in reversed(deltas):
        ordered = list(extents)
        layers.maps.append(([extent.guest_offset for extent in ordered], ordered, path))
    return layers.read


def across_deltas(
    deltas: Sequence[tuple[str, Path, Sequence[Extent]]], reach: int
) -> Iterator[Medium]:
    """Yield the places where the disk goes on in another delta, ``reach`` bytes to both sides."""
    shown = without_shadowed([extents for _, _, extents in deltas])
    pieces = sorted(
        (
            (extent.guest_offset, layer, path, extent)
            for (layer, path, _), extents in zip(deltas, shown, strict=True)
            for extent in extents
            if extent.kind == "data"
        ),
        key=lambda piece: piece[0],
    )
    for (_, _, file, left), (border, layer, other, right) in itertools.pairwise(pieces):
        if left.guest_offset + left.length == border and file != other:
            before, after = min(reach, left.length), min(reach, right.length)
            end = left.host_offset + left.length
            yield Medium(
                kind="disk",
                layer=layer,
                segments=(
                    Segment(file=file, offset=end - before, length=before),
                    Segment(file=other, offset=right.host_offset, length=after, joined=True),
                ),
                addresses=(border - before, border),
            )


def _pread(path: Path, offset: int, length: int) -> bytes:
    """Read ``length`` bytes; what lies beyond the file's end is zero."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        return os.pread(descriptor, length, offset).ljust(length, b"\0")
