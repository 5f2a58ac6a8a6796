"""Which clusters of a chain of overlays are seen: those that no overlay above decides again."""

import bisect
from collections.abc import Iterator, Sequence

from smolbuild.store.qcow2 import Extent

__all__ = ["data_ranges_of", "without_shadowed"]

Range = tuple[int, int]
"""First byte and end."""


def without_shadowed(layers: Sequence[Sequence[Extent]]) -> list[tuple[Extent, ...]]:
    """Return the layers, lowest first, without what a higher one holds, as data or as zeros."""
    hidden: list[Range] = []
    seen: list[tuple[Extent, ...]] = []
    for extents in reversed(layers):
        seen.append(tuple(part for extent in extents for part in _outside(extent, hidden)))
        hidden = _union(hidden, [(e.guest_offset, e.guest_offset + e.length) for e in extents])
    return seen[::-1]


def data_ranges_of(layers: Sequence[Sequence[Extent]]) -> list[Range]:
    """Return the ``(offset, length)`` ranges of the disk of which any layer holds data."""
    ranges: list[Range] = []
    for extents in layers:
        data = [(e.guest_offset, e.guest_offset + e.length) for e in extents if e.kind == "data"]
        ranges = _union(ranges, data)
    return [(low, high - low) for low, high in ranges]


def _outside(extent: Extent, hidden: Sequence[Range]) -> Iterator[Extent]:
    """Yield the parts of ``extent`` that no range of ``hidden``, which is sorted, covers."""
    low, end = extent.guest_offset, extent.guest_offset + extent.length
    first = max(0, bisect.bisect_right(hidden, (low, end)) - 1)
    for start, stop in hidden[first:]:
        if start >= end:
            break
        if start > low:
            yield _part(extent, low, start)
        low = max(low, stop)
    if low < end:
        yield _part(extent, low, end)


def _part(extent: Extent, low: int, high: int) -> Extent:
    skipped = low - extent.guest_offset if extent.kind == "data" else 0
    return Extent(
        guest_offset=low,
        length=high - low,
        kind=extent.kind,
        host_offset=extent.host_offset + skipped,
    )


def _union(one: Sequence[Range], other: Sequence[Range]) -> list[Range]:
    merged: list[Range] = []
    for low, high in sorted([*one, *other]):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged
