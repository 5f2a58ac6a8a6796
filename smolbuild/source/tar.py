"""A strict reader of tar archives, for input that nobody vouches for.

Formats: POSIX ustar and pax (IEEE Std 1003.1, "pax Interchange Format"), GNU tar with long names,
base-256 numbers and its sparse formats (old GNU, pax 0.0, 0.1 and 1.0; GNU tar manual, "Storing
Sparse Files"). The standard library's ``tarfile`` is not used here: it recurses on nested headers,
lets foreign exceptions out on malformed ones and treats unknown types as files.

Global pax headers are checked and otherwise ignored, as Docker and containerd do.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from smolbuild.core.errors import BuildError
from smolbuild.source.content import Content, Region, Segment, region_content
from smolbuild.source.tarsparse import gnu_map, pax_1_0_map, pax_map

__all__ = ["TarEntry", "TarKind", "read_tar"]

BLOCK = 512
MAX_ENTRIES = 4_000_000
_MAX_HEADER = 4 << 20
"""Bytes of one pax or long-name header: room for extended attributes of 64 KiB each."""
_MAX_SIZE = 1 << 44
"""16 TiB, the largest file that ext4 holds."""
_XATTR = b"SCHILY.xattr."
_OCTAL = re.compile(rb"[0-7]+")

TarKind = Literal["file", "link", "symlink", "char", "block", "directory", "fifo"]
_KINDS: Mapping[int, TarKind] = {
    ord("0"): "file",
    0: "file",
    ord("7"): "file",
    ord("S"): "file",
    ord("1"): "link",
    ord("2"): "symlink",
    ord("3"): "char",
    ord("4"): "block",
    ord("5"): "directory",
    ord("6"): "fifo",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TarEntry:
    """One member of an archive, names as they stand in it."""

    name: bytes
    kind: TarKind
    mode: int
    uid: int
    gid: int
    mtime: int
    target: bytes
    device: tuple[int, int]
    xattrs: Mapping[bytes, bytes]
    content: Content


@dataclass(slots=True)
class _Extended:
    """What the extended headers before a member say of it."""

    records: dict[bytes, bytes] = field(default_factory=dict)
    sparse: list[tuple[bytes, bytes]] = field(default_factory=list)
    """The repeated records of pax sparse 0.0, in order."""
    name: bytes | None = None
    target: bytes | None = None


def read_tar(region: Region) -> Iterator[TarEntry]:
    """Yield the members of the archive in ``region``, in order, reading headers only.

    Raises:
        BuildError: the archive is malformed or cut short, or a member has an unknown type or a
            negative or impossible number; says which.

    """
    position, extended = 0, _Extended()
    for count in range(MAX_ENTRIES):
        header = _header(region, position)
        if header is None:
            if extended.records or extended.name or extended.target:
                raise BuildError("the archive ends after an extended header")
            return
        kind, size = header[156], _number(header[124:136], "size")
        if kind in b"xgLK":
            position = _extend(region, position + BLOCK, kind, size, extended)
            continue
        try:
            entry, position = _member(region, position + BLOCK, header, extended)
        except BuildError as error:
            name = (extended.name or header[:100].rstrip(b"\0")).decode(errors="replace")
            raise BuildError(f"entry {count} ({name[:200]!r}): {error.message}") from error
        extended = _Extended()
        if entry is not None:
            yield entry
    raise BuildError(f"the archive has more than {MAX_ENTRIES:,} entries")


def _header(region: Region, position: int) -> bytes | None:
    """Return the next header; None at the end (two zero blocks, or the end of the bytes)."""
    header = _block(region, position)
    if header is None:
        return None
    if not any(header):
        second = _block(region, position + BLOCK)
        if second is not None and any(second):
            raise BuildError(f"a lone zero block at byte {position:,} of the archive")
        return None
    stored = _number(header[148:156], "checksum")
    plain = sum(header) - sum(header[148:156]) + 8 * 32
    if stored != plain:
        signed = plain - 256 * sum(1 for byte in header[:148] + header[156:] if byte > 127)
        if stored != signed:
            raise BuildError(f"wrong header checksum at byte {position:,} of the archive")
    return header


def _block(region: Region, position: int) -> bytes | None:
    if position == region.length:
        return None
    if position + BLOCK > region.length:
        raise BuildError(f"the archive is cut short at byte {region.length:,}")
    return region.backing.read(region.offset + position, BLOCK)


def _number(data: bytes, what: str) -> int:
    """Return an octal number, or GNU's base-256 one (two's complement below the marker bit)."""
    if data[0] & 0x80:
        bits = 8 * len(data) - 1
        value = int.from_bytes(data, "big") & ((1 << bits) - 1)
        return value - (1 << bits) if value >> (bits - 1) else value
    text = data.partition(b"\0")[0].strip(b" ")
    if not text:
        return 0
    if not _OCTAL.fullmatch(text):
        raise BuildError(f"{what} {text!r} is not a number")
    return int(text, 8)


def _extend(region: Region, position: int, kind: int, size: int, extended: _Extended) -> int:
    """Take in one extended header and return the position after it."""
    end = _end(region, position, size)
    if size > _MAX_HEADER:
        raise BuildError(f"an extended header of {size:,} bytes")
    data = region.backing.read(region.offset + position, size)
    if kind == ord("L"):
        extended.name = data.partition(b"\0")[0]
    elif kind == ord("K"):
        extended.target = data.partition(b"\0")[0]
    elif kind == ord("x"):
        extended.records, extended.sparse = {}, []
        for key, value in _records(data):
            if value or key.startswith(_XATTR):  # an empty value means: as the plain header says
                extended.records[key] = value
            if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes"):
                extended.sparse.append((key, value))
    else:
        for _ in _records(data):
            pass
    return end


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the ``length key=value`` records of a pax header."""
    position = 0
    while position < len(data) and data[position]:
        space = data.find(b" ", position, position + 12)
        digits = data[position:space]
        if space < 0 or not digits.isdigit():
            raise BuildError("a pax record has no length")
        end = position + int(digits)
        if end > len(data) or end <= space + 1 or data[end - 1] != 0x0A:
            raise BuildError("a pax record has a wrong length")
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not key or not equals:
            raise BuildError("a pax record has no key")
        yield key, value
        position = end


def _end(region: Region, position: int, size: int) -> int:
    """Return the position after ``size`` bytes of data and their padding."""
    if not 0 <= size <= _MAX_SIZE:
        raise BuildError(f"impossible size {size:,}")
    if position + size > region.length:
        raise BuildError(f"its {size:,} bytes of data are cut short by the archive's end")
    return min(position + -(-size // BLOCK) * BLOCK, region.length)


def _member(
    region: Region, position: int, header: bytes, extended: _Extended
) -> tuple[TarEntry | None, int]:
    records = extended.records
    name = _name(header, extended)
    kind = _KINDS.get(header[156])
    if header[156] == 0 and name.endswith(b"/"):  # how archives before POSIX mark directories
        kind = "directory"
    if kind is None and header[156] != ord("V"):
        raise BuildError(f"unknown entry type {chr(header[156])!r}")
    size = _pax_number(records, b"size", _number(header[124:136], "size"))
    if kind not in ("file", None):
        size = 0  # it means nothing there, and no data follows
    content, position = _content(region, position, size, header, extended)
    if kind is None:  # a volume label
        return None, position
    device = (_number(header[329:337], "major"), _number(header[337:345], "minor"))
    if kind in ("char", "block") and not (0 <= device[0] < 1 << 12 and 0 <= device[1] < 1 << 20):
        raise BuildError(f"impossible device number {device[0]}:{device[1]}")
    entry = TarEntry(
        name=name,
        kind=kind,
        mode=_number(header[100:108], "mode") & 0o7777,
        uid=_owner(_pax_number(records, b"uid", _number(header[108:116], "uid")), "uid"),
        gid=_owner(_pax_number(records, b"gid", _number(header[116:124], "gid")), "gid"),
        mtime=_mtime(records, _number(header[136:148], "mtime")),
        target=_target(header, extended),
        device=device,
        xattrs={
            key.removeprefix(_XATTR): value
            for key, value in records.items()
            if key.startswith(_XATTR)
        },
        content=content,
    )
    return entry, position


def _name(header: bytes, extended: _Extended) -> bytes:
    for key in (b"GNU.sparse.name", b"path"):
        if key in extended.records:
            return extended.records[key]
    if extended.name is not None:
        return extended.name
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _target(header: bytes, extended: _Extended) -> bytes:
    if b"linkpath" in extended.records:
        return extended.records[b"linkpath"]
    if extended.target is not None:
        return extended.target
    return header[157:257].partition(b"\0")[0]


def _content(
    region: Region, position: int, size: int, header: bytes, extended: _Extended
) -> tuple[Content, int]:
    """Return the member's content and the position of the next header."""
    records = extended.records
    real = _pax_number(
        records, b"GNU.sparse.realsize", _pax_number(records, b"GNU.sparse.size", -1)
    )
    begin, pairs = position, None
    if header[156] == ord("S"):
        real = _number(header[483:495], "real size")
        pairs, begin = gnu_map(region, position, header)
    elif records.get(b"GNU.sparse.major") == b"1":
        _end(region, position, size)
        pairs, begin = pax_1_0_map(region, position, size)
        size -= begin - position
        position = begin
    elif b"GNU.sparse.map" in records or extended.sparse:
        pairs = pax_map(records.get(b"GNU.sparse.map"), extended.sparse)
    end = _end(region, begin, size)
    offset = region.offset + begin
    if pairs is None:
        return region_content(region.backing, offset, size), end
    return _sparse(region, offset, size, real, pairs), end


def _sparse(
    region: Region, offset: int, size: int, real: int, pairs: list[tuple[int, int]]
) -> Content:
    if not 0 <= real <= _MAX_SIZE:
        raise BuildError(f"impossible size {real:,} of a sparse file")
    segments, used, last = [], 0, 0
    for logical, length in pairs:
        if length < 0 or logical < last or logical + length > real:
            raise BuildError("the map of a sparse file is out of order or out of range")
        if length:
            segments.append(Segment(logical, offset + used, length))
        used, last = used + length, logical + length
    if used > size:
        raise BuildError("the map of a sparse file is longer than its data")
    return Content(real, region.backing, tuple(segments))


def _pax_number(records: Mapping[bytes, bytes], key: bytes, default: int) -> int:
    text = records.get(key)
    if text is None:
        return default
    if not text.isdigit() or len(text) > 20:
        raise BuildError(f"{key.decode(errors='replace')} {text[:30]!r} is not a number")
    return int(text)


def _owner(value: int, what: str) -> int:
    if not 0 <= value < 0xFFFFFFFF:
        raise BuildError(f"impossible {what} {value}")
    return value


def _mtime(records: Mapping[bytes, bytes], default: int) -> int:
    text = records.get(b"mtime")
    if text is None:
        return default
    match = re.fullmatch(rb"(-?[0-9]{1,18})(?:\.[0-9]*)?", text)
    if match is None:
        raise BuildError(f"mtime {text[:30]!r} is not a time")
    return int(match[1])
