"""The residue scan: every form of every secret, and every known shape, in memory and disks."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from smolbuild.residue.forms import forms_of
from smolbuild.residue.media import Medium
from smolbuild.residue.scanner import Find, Needle, Scanner, Segment
from smolbuild.residue.shapes import REACH, SHAPES, Shape, Token
from smolbuild.residue.traces import AROUND, Piece, is_trace, pieces_of

__all__ = ["Residue", "Trace", "search"]

_ENOUGH = 20
"""Traces of one secret in one medium, after which its other finds there are not looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Where something lies that must not: a secret (by name) or a token."""

    secret: str = ""
    """Name; empty for a token."""
    token: Token | None = None
    encoding: str = "raw"
    medium: Medium
    address: int
    """In the guest's memory or on its disk, or in the device state's file."""


Residue = tuple[Trace, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What a needle stands for."""

    secret: str
    what: Piece | Shape


def search(
    scanner: Scanner,
    media: Sequence[Medium],
    secrets: Mapping[str, bytes | bytearray],
    *,
    shapes: bool = True,
    known: Collection[str] = (),
) -> Residue:
    """Return the traces of ``secrets`` in ``media``, and of tokens when ``shapes`` is set.

    Args:
        scanner: searches.
        media: where.
        secrets: values by name.
        shapes: whether tokens and private keys are searched for, too.
        known: fingerprints of tokens that are no trace.

    Raises:
        HostError: the search failed.

    """
    wanted = [
        _Wanted(secret=name, what=piece)
        for name, value in secrets.items()
        for form in forms_of(value)
        for piece in pieces_of(form)
    ]
    if shapes:
        wanted += (_Wanted(secret="", what=shape) for shape in SHAPES)
    needles = [
        Needle(data=item.what.data) if isinstance(item.what, Piece) else item.what.needle
        for item in wanted
    ]
    segments, homes = _all_segments(media)
    traces: dict[tuple[str, str, str, int], Trace] = {}
    counts: dict[tuple[str, int], int] = {}
    for find in scanner.find(needles, segments):
        item, (number, segment) = wanted[find.needle], homes[find.segment]
        if item.secret and counts.get((item.secret, number), 0) >= _ENOUGH:
            continue
        trace = _judged(item, media[number], segment, find)
        if trace is None or (trace.token and trace.token.fingerprint in known):
            continue
        key = (trace.secret or str(trace.token), trace.encoding, trace.medium.kind, trace.address)
        if key not in traces:
            traces[key] = trace
            counts[item.secret, number] = counts.get((item.secret, number), 0) + 1
    return tuple(traces.values())


def _all_segments(media: Sequence[Medium]) -> tuple[list[Segment], list[tuple[int, int]]]:
    """Return the segments of all media, and of each the number of its medium and its own."""
    segments, homes = [], []
    for number, medium in enumerate(media):
        for index, segment in enumerate(medium.segments):
            alone = index == 0 and segment.joined
            segments.append(dataclasses.replace(segment, joined=False) if alone else segment)
            homes.append((number, index))
    return segments, homes


def _judged(item: _Wanted, medium: Medium, segment: int, find: Find) -> Trace | None:
    address = medium.address(segment, find.offset)
    if isinstance(item.what, Shape):
        before, after = medium.around(segment, find.offset, AROUND, REACH)
        token = item.what.token(before, after)
        return None if token is None else Trace(token=token, medium=medium, address=address)
    before, after = medium.around(segment, find.offset, AROUND, AROUND)
    if not is_trace(item.what, before, after, address):
        return None
    begin = max(0, address - item.what.start)
    encoding = item.what.form.encoding
    return Trace(secret=item.secret, encoding=encoding, medium=medium, address=begin)
