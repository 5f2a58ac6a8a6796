"""Secrets in a program's output and in messages, replaced by ``***``."""

import re
from collections.abc import Iterable

__all__ = ["Masker", "mask_text"]

_MASK = b"***"
_SHORT = 4


class Masker:
    """Replaces each of ``needles`` in one stream of bytes that arrives in pieces.

    What may be the beginning of a needle is held back until it is known whether it is one, so the
    result does not depend on how the stream was cut: it is the whole stream with the leftmost,
    longest needles replaced. ``flush`` gives what is held back at the stream's end.
    """

    def __init__(self, needles: Iterable[bytes]) -> None:
        self._needles = tuple(sorted({n for n in needles if n}, key=lambda n: (-len(n), n)))
        self._pattern = re.compile(b"|".join(map(re.escape, self._needles)), re.DOTALL)
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return what can be shown by now."""
        if not self._needles:
            return data
        held = self._held + data
        shown, at = bytearray(), 0
        until = self._beginning(held, 0)
        while (found := self._pattern.search(held, at)) and found.start() < until:
            shown += held[at : found.start()] + _MASK
            at = found.end()
            if at > until:
                until = self._beginning(held, at)
        shown += held[at:until]
        self._held = held[until:]
        return bytes(shown)

    def flush(self) -> bytes:
        """Return the rest, and begin anew."""
        held, self._held = self._held, b""
        return self._pattern.sub(_MASK, held) if self._needles else held

    def _beginning(self, held: bytes, start: int) -> int:
        """Return the first position from which ``held`` may be the beginning of a longer needle."""
        first = len(held)
        for needle in self._needles:
            low = max(start, len(held) - len(needle) + 1)
            at = held.find(needle[:_SHORT], low)
            while 0 <= at < first and not needle.startswith(held[at:]):
                at = held.find(needle[:_SHORT], at + 1)
            if 0 <= at < first:
                first = at
            for at in range(max(low, len(held) - _SHORT + 1), first):
                if needle.startswith(held[at:]):
                    first = at
                    break
        return first


def mask_text(text: str, needles: Iterable[bytes]) -> str:
    """Return ``text`` with each needle replaced."""
    masker = Masker(needles)
    data = text.encode(errors="surrogateescape")
    return (masker.feed(data) + masker.flush()).decode(errors="surrogateescape")
