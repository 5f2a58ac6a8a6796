"""Durations and sizes as people write them in a Smolfile."""

import re

from smolbuild.core.text import counted

__all__ = [
    "DURATION_PATTERN",
    "SIZE_PATTERN",
    "milliseconds",
    "parse_duration",
    "parse_size",
    "spoken",
]

DURATION_PATTERN = r"[ ]*([0-9]{1,12})[ ]*(ms|s|m|h|d)?[ ]*"
SIZE_PATTERN = r"[ ]*([0-9]{1,15})[ ]*([KMGTkmgt]i?[Bb]?|[Bb])?[ ]*"

_DURATION = re.compile(DURATION_PATTERN)
_SIZE = re.compile(SIZE_PATTERN)
_UNITS_MS = {"ms": 1, "s": 1000, "": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LONGEST_MS = 3650 * 86_400_000
_LARGEST = 1 << 50


def parse_duration(value: str | int) -> float:
    """Return the seconds of ``500ms``, ``2s``, ``5m``, ``1h``, ``7d`` or of bare seconds.

    Raises:
        ValueError: junk, negative, or longer than ten years; says what was expected.

    """
    text = str(value) if isinstance(value, int) and abs(value) < 10**12 else value
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError("expected a duration such as 500ms, 2s, 5m, 1h or 7d, or whole seconds")
    count = int(match.group(1)) * _UNITS_MS[match.group(2) or ""]
    if count > _LONGEST_MS:
        raise ValueError("expected a duration of at most ten years")
    return count / 1000


def parse_size(value: str | int) -> int:
    """Return the bytes of ``20GiB``, ``512M`` or of a bare count; suffixes are powers of 1024.

    Raises:
        ValueError: junk, zero, negative or more than 1 PiB; says what was expected.

    """
    text = str(value) if isinstance(value, int) and abs(value) < 10**15 else value
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError("expected a size such as 20GiB, 512MiB or a number of bytes")
    unit = match.group(2) or "b"
    count = int(match.group(1)) << (10 * "bkmgt".index(unit[0].lower()))
    if not 0 < count <= _LARGEST:
        raise ValueError("expected a size above zero and at most 1 PiB")
    return count


def spoken(seconds: float) -> str:
    """Return ``9 days``, ``3 hours``, ``1 minute`` or ``20 seconds``: the largest unit, whole."""
    for noun, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return counted(int(seconds // length), noun)
    return counted(int(seconds), "second")


def milliseconds(seconds: float) -> int:
    """Return ``seconds`` as whole milliseconds: the form in which a duration enters a hash."""
    return round(seconds * 1000)
