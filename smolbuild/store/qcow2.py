"""Writing qcow2 overlays, empty or of known blocks, and reading the map of finished ones.

Format: QEMU, docs/interop/qcow2.txt, version 3 without optional features. The header names no
backing file: an overlay is meaningless by itself, and whoever opens it says what lies below
(``-blockdev``), so no path of one host ever gets into a file.
"""

import contextlib
import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from smolbuild.core.errors import MachineError

__all__ = ["CLUSTER", "Extent", "clusters", "create_overlay", "virtual_size", "write_overlay"]

CLUSTER = 65536
"""Cluster size in bytes of the overlays we write."""

_MAGIC = b"QFI\xfb"
_HEADER = struct.Struct(">4sIQIIQIIQQIIQQQQII")
_HEADER_LENGTH = 104
_MAX_SIZE = 1 << 44
_OFFSET = 0x00FF_FFFF_FFFF_FE00
_COMPRESSED = 1 << 62
_COPIED = 1 << 63
"""Set where a table or cluster is used once, which all of ours are."""
_ZERO = 1
_TABLE_ENTRIES = CLUSTER // 8
_COUNTED = CLUSTER // 2
"""Clusters that one refcount block counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A run of clusters that an overlay holds: guest bytes whose content it decides.

    ``data`` lies at ``host_offset`` in the file; ``zero`` reads as zeros and has no host offset.
    The last extent ends with the disk at the latest, in the middle of a cluster if need be.
    """

    guest_offset: int
    length: int
    kind: Literal["data", "zero"]
    host_offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    size: int
    cluster: int
    l1_offset: int
    l1_entries: int


def create_overlay(path: Path, size: int) -> None:
    """Create an empty overlay over a disk of ``size`` bytes, mode 0600, in about 0.1 ms.

    Raises:
        ValueError: the size is no positive multiple of 512, or over 16 TiB.
        OSError: the file exists or cannot be written.

    """
    with write_overlay(path, size, data=(), zeros=()):
        pass


@contextlib.contextmanager
def write_overlay(
    path: Path, size: int, *, data: Collection[int], zeros: Iterable[int]
) -> Iterator[Callable[[int, memoryview], None]]:
    """Create an overlay, mode 0600, that decides the clusters ``data`` and ``zeros``.

    Gives the function ``write(number, content)``, to be called once for each number in ``data``,
    from any thread and in any order, with at most ``CLUSTER`` bytes. Not fsynced.

    Layout: header, refcount table, refcount blocks, first table, second tables, data in order of
    cluster number; one cluster each or more.

    Raises:
        ValueError: the size is no positive multiple of 512, or over 16 TiB; a number is out of
            range or in both.
        OSError: the file exists or cannot be written.

    """
    if not 0 < size <= _MAX_SIZE or size % 512:
        raise ValueError(f"a disk cannot have {size} bytes")
    layout = _layout(size, data, zeros)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _write_tables(descriptor, size, layout)

        def write(number: int, content: memoryview) -> None:
            place = layout.places[number]
            while content:
                done = os.pwrite(descriptor, content, place)
                place, content = place + done, content[done:]

        yield write
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    counts: int
    """Refcount blocks."""
    l1_entries: int
    l1_clusters: int
    tables: Mapping[int, bytearray]
    """Second tables by their index in the first."""
    places: Mapping[int, int]
    """Offset in the file of each data cluster."""
    clusters: int
    """Length of the file."""


def _layout(size: int, data: Collection[int], zeros: Iterable[int]) -> _Layout:
    last = -(-size // CLUSTER)
    entries = dict.fromkeys(zeros, _ZERO)
    ordered = sorted(data)
    wrong = [number for number in (*ordered, *entries) if not 0 <= number < last]
    if wrong or any(number in entries for number in ordered):
        raise ValueError("a cluster is out of range, or both data and zeros")
    l1_entries = _l1_entries(size, CLUSTER)
    l1_clusters = -(-l1_entries * 8 // CLUSTER)
    indexes = sorted({number // _TABLE_ENTRIES for number in (*ordered, *entries)})
    rest = 2 + l1_clusters + len(indexes) + len(ordered)
    counts = 1
    while counts * _COUNTED < rest + counts:
        counts += 1
    first = (2 + counts + l1_clusters + len(indexes)) * CLUSTER
    places = {number: first + turn * CLUSTER for turn, number in enumerate(ordered)}
    tables = {index: bytearray(CLUSTER) for index in indexes}
    for number, entry in (*entries.items(), *((n, at | _COPIED) for n, at in places.items())):
        index, inside = divmod(number, _TABLE_ENTRIES)
        struct.pack_into(">Q", tables[index], inside * 8, entry)
    return _Layout(
        counts=counts,
        l1_entries=l1_entries,
        l1_clusters=l1_clusters,
        tables=tables,
        places=places,
        clusters=rest + counts,
    )


def _write_tables(descriptor: int, size: int, layout: _Layout) -> None:
    l1_offset = (2 + layout.counts) * CLUSTER
    header = _HEADER.pack(
        _MAGIC, 3, 0, 0, 16, size, 0, layout.l1_entries, l1_offset, CLUSTER, 1, 0, 0, 0, 0, 0, 4,
        _HEADER_LENGTH,
    )  # fmt: skip
    os.ftruncate(descriptor, layout.clusters * CLUSTER)
    os.pwrite(descriptor, header, 0)
    blocks = struct.pack(f">{layout.counts}Q", *(n * CLUSTER for n in range(2, 2 + layout.counts)))
    os.pwrite(descriptor, blocks, CLUSTER)
    os.pwrite(descriptor, struct.pack(">H", 1) * layout.clusters, 2 * CLUSTER)
    table_offset = l1_offset + layout.l1_clusters * CLUSTER
    for turn, (index, table) in enumerate(layout.tables.items()):
        offset = table_offset + turn * CLUSTER
        os.pwrite(descriptor, struct.pack(">Q", offset | _COPIED), l1_offset + index * 8)
        os.pwrite(descriptor, table, offset)


def virtual_size(path: Path) -> int:
    """Return the size in bytes of the disk that the overlay describes.

    Raises:
        MachineError: not an overlay of ours, or a damaged one.
        OSError: it cannot be read.

    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _header(_File(path, descriptor)).size
    finally:
        os.close(descriptor)


def clusters(path: Path) -> Iterator[Extent]:
    """Yield what the overlay holds, in order of guest offset; neighbours in guest and file are one.

    The file is not trusted: every table and cluster must lie inside it.

    Raises:
        MachineError: not an overlay of ours (backing file name, compression, encryption, external
            data, unknown features), not closed cleanly, truncated or damaged.
        OSError: it cannot be read.

    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield from _merged(_entries(_File(path, descriptor)))
    finally:
        os.close(descriptor)


class _File:
    """Reads that fail loudly instead of coming back short."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self.length = os.fstat(descriptor).st_size

    def read(self, offset: int, length: int, what: str) -> bytes:
        if offset < 0 or offset + length > self.length:
            raise self.bad(f"{what} lies outside the file")
        data = bytearray()
        while len(data) < length:
            part = os.pread(self._descriptor, length - len(data), offset + len(data))
            if not part:
                raise self.bad(f"{what} is cut short")
            data += part
        return bytes(data)

    def bad(self, problem: str) -> MachineError:
        return MachineError(
            f"the disk overlay {self.path} is damaged or not ours: {problem}", code="qcow2"
        )


def _header(file: _File) -> _Header:
    magic, version = struct.unpack(">4sI", file.read(0, 8, "the header"))
    if magic != _MAGIC or version != 3:
        raise file.bad("it is no qcow2 file of version 3")
    (
        _, _, backing, _, bits, size, encryption, l1_entries, l1_offset, _, _, _, _,
        incompatible, _, _, _, header_length,
    ) = _HEADER.unpack(file.read(0, _HEADER.size, "the header"))  # fmt: skip
    for wrong, problem in (
        (not 9 <= bits <= 21, "its cluster size is out of range"),
        (not 0 < size <= _MAX_SIZE, "its disk size is out of range"),
        (backing != 0, "it names a backing file"),
        (encryption != 0, "it is encrypted"),
        (incompatible & 1, "it was not closed cleanly"),
        (incompatible & ~1, "it uses features we never ask for"),
        (header_length < _HEADER_LENGTH, "its header is too short"),
    ):
        if wrong:
            raise file.bad(problem)
    cluster = 1 << bits
    needed = _l1_entries(size, cluster)
    if l1_entries < needed:
        raise file.bad("its first table is too short")
    if l1_offset % cluster:
        raise file.bad("its first table is not aligned")
    return _Header(size=size, cluster=cluster, l1_offset=l1_offset, l1_entries=needed)


def _entries(file: _File) -> Iterator[Extent]:
    header = _header(file)
    covered = header.cluster // 8 * header.cluster
    l1 = file.read(header.l1_offset, header.l1_entries * 8, "the first table")
    for index, (entry,) in enumerate(struct.iter_unpack(">Q", l1)):
        offset = entry & _OFFSET
        if offset:
            if offset % header.cluster:
                raise file.bad("a second table is not aligned")
            table = file.read(offset, header.cluster, "a second table")
            yield from _table(file, header, table, index * covered)


def _table(file: _File, header: _Header, table: bytes, first: int) -> Iterator[Extent]:
    if not any(table):
        return
    for index, (entry,) in enumerate(struct.iter_unpack(">Q", table)):
        if not entry:
            continue
        guest = first + index * header.cluster
        length = min(header.cluster, header.size - guest)
        if length <= 0:
            raise file.bad("it holds data beyond the end of the disk")
        if entry & _COMPRESSED:
            raise file.bad("it holds compressed data")
        host = entry & _OFFSET
        if entry & _ZERO:
            yield Extent(guest_offset=guest, length=length, kind="zero")
        elif host:
            if host % header.cluster or host + length > file.length:
                raise file.bad("data lie outside the file")
            yield Extent(guest_offset=guest, length=length, kind="data", host_offset=host)


def _merged(extents: Iterable[Extent]) -> Iterator[Extent]:
    run: Extent | None = None
    for extent in extents:
        if run is None:
            run = extent
        elif (
            extent.kind == run.kind
            and extent.guest_offset == run.guest_offset + run.length
            and (run.kind == "zero" or extent.host_offset == run.host_offset + run.length)
        ):
            run = Extent(
                guest_offset=run.guest_offset,
                length=run.length + extent.length,
                kind=run.kind,
                host_offset=run.host_offset,
            )
        else:
            yield run
            run = extent
    if run is not None:
        yield run


def _l1_entries(size: int, cluster: int) -> int:
    return -(-size // (cluster // 8 * cluster))
