"""Which byte strings betray a secret, and whether a find really is one.

A secret need not lie in one piece. Pages of memory and blocks of a file are apart in the machine's
memory and disk, so a secret that crosses such a border is torn in two; encoders wrap long lines. So
what is searched for are *pieces*: of each form its two halves, of which a single tear leaves one
whole. A half alone is no trace: around it the rest must stand, be cut off by a border of a page or
block, or go on after white space. Of a long form some stretches are searched for that are too rare
to be anything else; each is a trace by itself.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from smolbuild.residue.forms import Form

__all__ = ["AROUND", "Piece", "is_trace", "pieces_of"]

BORDER = 4096
"""Bytes of a page of memory, and of a block of our disks."""
AROUND = 2048
"""Bytes before and after a find that ``is_trace`` wants to see, where there are so many."""

_WHOLE = 16
"""Forms below this many bytes are not halved: a half of them could be chance."""
_LONG = 512
"""Forms above this many bytes may be torn more than once."""
_STRETCH = 48
_STRIDE = 256
_MOST = 64
"""Stretches of one form."""
_LINE = 24
_SPACE = re.compile(rb"(?:\s|\\r|\\n)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a form, at ``start`` in it. ``enough``: it is a trace by itself.

    Not shown: ``repr`` tells neither the part nor the form.
    """

    form: Form
    start: int
    data: bytes
    enough: bool = False

    def __repr__(self) -> str:
        return f"Piece({self.form.encoding}, {len(self.data)} bytes)"


def pieces_of(form: Form) -> tuple[Piece, ...]:
    """Return what to search for to find ``form``, whole or torn once, or any good part of it."""
    data = form.data
    if len(data) < _WHOLE:
        return (Piece(form=form, start=0, data=data),)
    if len(data) <= _LONG:
        half = len(data) // 2
        halves = [
            Piece(form=form, start=0, data=data[:half]),
            Piece(form=form, start=half, data=data[half:]),
        ]
        return (*halves, *_lines(form))
    stretches = [*_lines(form)]
    for start in range(0, len(data) - _STRETCH + 1, _STRIDE):
        part = data[start : start + _STRETCH]
        if _rare(part):
            stretches.append(Piece(form=form, start=start, data=part, enough=True))
    if not stretches:  # all alike: then nothing less than a large part is a trace
        stretches.append(Piece(form=form, start=0, data=data[:_LONG], enough=True))
    return tuple(stretches[:: max(1, len(stretches) // _MOST)])


def _lines(form: Form) -> Iterator[Piece]:
    """Yield the rare lines of a form of many: files are indented, quoted, rewritten by line."""
    at = 0
    for line in form.data.split(b"\n"):
        core = line.strip()
        if len(core) >= _LINE and len(core) < len(form.data) and _rare(core):
            start = at + line.index(core)
            yield Piece(form=form, start=start, data=core[:_LONG], enough=True)
        at += len(line) + 1


def _rare(part: bytes) -> bool:
    """Return whether ``part`` looks random: prose and code repeat their letters, keys do not."""
    different = len(set(part))
    digits = sum(byte in b"0123456789abcdefABCDEF" for byte in part)
    return different * 5 >= min(len(part), 40) * 3 or (digits == len(part) and different >= 10)


def is_trace(piece: Piece, before: bytes, after: bytes, address: int) -> bool:
    """Return whether the find of a piece at ``address`` is a trace of its form.

    Args:
        piece: what was found.
        before: the bytes before it, as far as they belong together.
        after: the bytes from its beginning on.
        address: of its beginning, in memory or on the disk.

    """
    form, start = piece.form.data, piece.start
    if piece.enough:
        return True
    if before.endswith(form[:start]) and after.startswith(form[start:]):
        return True
    return _torn(piece, before, after, address) or _wrapped(piece, before, after)


def _torn(piece: Piece, before: bytes, after: bytes, address: int) -> bool:
    """Whether a border cuts off the rest, and all that lies on this side of it is there."""
    form, start = piece.form.data, piece.start
    to_end = -address % BORDER or BORDER
    head = before.endswith(form[:start]) if start else True
    if head and len(piece.data) <= to_end < len(form) - start:
        return after.startswith(form[start : start + to_end])
    from_start = address % BORDER
    if from_start < start:
        return after.startswith(form[start:]) and before.endswith(form[start - from_start : start])
    return False


def _wrapped(piece: Piece, before: bytes, after: bytes) -> bool:
    """Whether it is all there once line ends, written out or escaped, are left out."""
    form = piece.form.data
    if b"\n" in form or b"\\" in form:
        return False
    reach = len(form) * 2 + 16
    text = before[-reach:] + after[: len(piece.data) + reach]
    return form in _SPACE.sub(b"", text)
