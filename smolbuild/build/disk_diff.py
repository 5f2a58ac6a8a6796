"""How the files of two disks differ, without a machine and without reading what must be equal.

Versions of one environment share their base and first deltas by digest. A file whose blocks stand
at the same places on both disks, none of them in a part that may differ, is equal unread; all
others are compared byte by byte until they differ.
"""

import bisect
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from smolbuild.model.artifact import DELTA_BLOCK, DiskDelta, DiskStreams
from smolbuild.source.ext4_reader import Ext4, Node
from smolbuild.source.tree import Kind

__all__ = ["FileChange", "FileGroup", "compare_files", "differing_ranges", "summarise"]

Ranges = list[tuple[int, int]]
_NOISE = (
    b"/var/cache",
    b"/var/log",
    b"/var/tmp",
    b"/tmp",
    b"/run",
    b"/root/.cache",
    b"/var/lib/apt/lists",
    b"/var/lib/dpkg/info",
)
"""Directories that are counted in one line each: what changes there rarely says anything."""
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """One name that came, went or is otherwise now."""

    path: str
    kind: str
    """``added``, ``removed`` or ``changed``."""
    what: tuple[str, ...] = ()
    """How it changed, each in a few words: ``content``, ``mode 0644 -> 0755``."""

    def __str__(self) -> str:
        """Return the change as one readable line."""
        sign = {"added": "+", "removed": "-", "changed": "~"}[self.kind]
        return f"{sign} {self.path}" + (f": {', '.join(self.what)}" if self.what else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileGroup:
    """Changes below one directory, counted; or one change, said."""

    path: str
    added: int = 0
    removed: int = 0
    changed: int = 0
    only: FileChange | None = None

    def __str__(self) -> str:
        """Return the group as one readable line."""
        if self.only is not None:
            return str(self.only)
        counts = ((self.added, "added"), (self.removed, "removed"), (self.changed, "changed"))
        return f"  {self.path}: " + ", ".join(f"{n} {word}" for n, word in counts if n)


def differing_ranges(old: DiskStreams, new: DiskStreams) -> Ranges:
    """Return the byte ranges, sorted and apart, outside of which both disks are equal."""
    ranges: Ranges = []
    if old.base != new.base:
        place = 0
        longest = max(old.base.chunks, new.base.chunks, key=len)
        for number, chunk in enumerate(longest):
            same = (
                old.base.chunk_size == new.base.chunk_size
                and number < min(len(old.base.chunks), len(new.base.chunks))
                and old.base.chunks[number].sha256 == new.base.chunks[number].sha256
                and old.base.chunks[number].length == new.base.chunks[number].length
            )
            if not same:
                ranges.append((place, place + chunk.length))
            place += chunk.length
        if old.base.chunk_size != new.base.chunk_size:
            ranges = [(0, max(old.base.size, new.base.size))]
    shared = 0
    for was, now in zip(old.deltas, new.deltas, strict=False):
        if not _same_delta(was, now):
            break
        shared += 1
    for delta in (*old.deltas[shared:], *new.deltas[shared:]):
        for first, count in (*delta.blocks, *delta.zeros):
            ranges.append((first * DELTA_BLOCK, (first + count) * DELTA_BLOCK))
    return _apart(ranges)


def _same_delta(one: DiskDelta, two: DiskDelta) -> bool:
    contents = [[(c.length, c.sha256) for c in each.data.chunks] for each in (one, two)]
    return (one.blocks, one.zeros) == (two.blocks, two.zeros) and contents[0] == contents[1]


def _apart(ranges: Ranges) -> Ranges:
    merged: Ranges = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def compare_files(
    old: tuple[Ext4, Mapping[bytes, Node]],
    new: tuple[Ext4, Mapping[bytes, Node]],
    ranges: Ranges,
) -> tuple[FileChange, ...]:
    """Return what differs between two file systems, sorted by path.

    A new time alone is no difference. Of a directory that came or went, what is in it is said too.

    Args:
        old: the file system and its nodes by path.
        new: the same.
        ranges: where the two disks may differ (see ``differing_ranges``).

    Raises:
        VerificationError: a file system is damaged.

    """
    before, after = old[1], new[1]
    changes = []
    for path in sorted({*before, *after}):
        was, now = before.get(path), after.get(path)
        if was is None or now is None:
            kind = "added" if was is None else "removed"
            changes.append(FileChange(path=_text(path), kind=kind))
            continue
        what = tuple(_differences(old[0], was, new[0], now, ranges))
        if what:
            changes.append(FileChange(path=_text(path), kind="changed", what=what))
    return tuple(changes)


def _differences(old: Ext4, was: Node, new: Ext4, now: Node, ranges: Ranges) -> Iterator[str]:
    if was.kind is not now.kind:
        yield f"{was.kind.value} -> {now.kind.value}"
        return
    if was.mode != now.mode:
        yield f"mode {was.mode:04o} -> {now.mode:04o}"
    if (was.uid, was.gid) != (now.uid, now.gid):
        yield f"owner {was.uid}:{was.gid} -> {now.uid}:{now.gid}"
    if was.target != now.target:
        yield f"target {_text(was.target)} -> {_text(now.target)}"
    if was.device != now.device:
        yield f"device {was.device[0]}:{was.device[1]} -> {now.device[0]}:{now.device[1]}"
    if was.xattrs != now.xattrs:
        yield "attributes"
    if was.kind is Kind.FILE:
        if was.size != now.size:
            yield f"content ({was.size:,} -> {now.size:,} bytes)"
        elif not _equal(old, was, new, now, ranges):
            yield "content"


def _equal(old: Ext4, was: Node, new: Ext4, now: Node, ranges: Ranges) -> bool:
    one, two = old.content_of(was), new.content_of(now)
    segments = [(segment.offset, segment.offset + segment.length) for segment in one.segments]
    # Content without a place of its own on the disk is read. A file of holes only needs none.
    if (
        one.segments == two.segments
        and old.stands_on_disk(one)
        and new.stands_on_disk(two)
        and not any(_meets(ranges, start, end) for start, end in segments)
    ):
        return True
    return all(
        one.read(place, min(_PIECE, one.size - place))
        == two.read(place, min(_PIECE, one.size - place))
        for place in range(0, one.size, _PIECE)
    )


def _meets(ranges: Ranges, start: int, end: int) -> bool:
    place = bisect.bisect_right(ranges, start, key=lambda each: each[1])
    return place < len(ranges) and ranges[place][0] < end


def _text(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


def summarise(changes: Iterable[FileChange], limit: int) -> tuple[FileGroup, ...]:
    """Return at most about ``limit`` lines that say all of ``changes``, large groups as counts."""
    found = list(changes)
    groups = {"/": found} if found else {}
    fixed: dict[str, list[FileChange]] = {}
    while groups:
        path = max(groups, key=lambda each: len(groups[each]))
        members = groups.pop(path)
        parts = _split(path, members)
        small = len(members) <= 1 or path.encode() in _NOISE
        if small or len(groups) + len(fixed) + len(parts) > limit:
            fixed[path] = members
        else:
            groups.update(parts)
    return tuple(_group(path, fixed[path]) for path in sorted(fixed))


def _split(path: str, members: list[FileChange]) -> dict[str, list[FileChange]]:
    parts: dict[str, list[FileChange]] = {}
    depth = 1 if path == "/" else path.count("/") + 1
    for member in members:
        if member.path == path:
            parts.setdefault(posixpath.join(path, "."), []).append(member)
        else:
            parts.setdefault("/".join(member.path.split("/")[: depth + 1]), []).append(member)
    return parts


def _group(path: str, members: list[FileChange]) -> FileGroup:
    counts = {
        kind: sum(m.kind == kind for m in members) for kind in ("added", "removed", "changed")
    }
    only = members[0] if len(members) == 1 else None
    return FileGroup(path=path if only is None else only.path, **counts, only=only)
