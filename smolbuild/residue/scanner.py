"""Search parts of files for many byte strings at once, on every core: ``scan.c`` does the work.

Needles go to it over standard input, because they may be secrets; nothing of them is ever an
argument, a variable or a file.
"""

import bisect
import concurrent.futures
import itertools
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from smolbuild.core.digest import digest_bytes
from smolbuild.core.errors import HostError
from smolbuild.core.process import run
from smolbuild.guest.compile import FLAGS, build_program

__all__ = ["Find", "Needle", "Scanner", "Segment"]

_FLAGS = (*(flag for flag in FLAGS if flag != "-Os"), "-O3")
_SLOWEST = 20e6
"""Bytes per second that even a loaded machine searches; the deadline follows from it."""
_LEAST_SECONDS = 60.0
_SMALLEST_SHARE = 16 << 20
"""Bytes below which another process costs more than it saves."""
_FOUND = struct.Struct("<IQ")
_END = 0xFFFF_FFFF
_NO_SET = bytes(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needle:
    """A byte string, counted where at least ``run`` bytes out of ``follow`` come after it.

    At least three bytes. Not shown: ``repr`` tells the length only.
    """

    data: bytes
    run: int = 0
    follow: bytes = b""

    def __repr__(self) -> str:
        return f"Needle({len(self.data)} bytes)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a file. ``joined``: it goes on where the segment before it ended."""

    file: Path
    offset: int
    length: int
    joined: bool = False


@dataclass(frozen=True, slots=True, order=True)
class Find:
    """Where a needle begins: its index, the segment's, and the offset inside the segment."""

    needle: int
    segment: int
    offset: int


class Scanner:
    """The compiled search.

    Args:
        cache: ``Home.cache``; holds the compiled program.
        workers: processes at once; the cores that this process may use when None.

    """

    def __init__(self, cache: Path, *, workers: int | None = None) -> None:
        source = Path(__file__).with_name("scan.c")
        digest = digest_bytes(source.read_bytes())
        self._program = build_program(cache, "scanner", (source,), digest, _FLAGS)
        self._workers = workers or len(os.sched_getaffinity(0))

    def find(self, needles: Sequence[Needle], segments: Sequence[Segment]) -> list[Find]:
        """Return every place where one of ``needles`` begins, in order; at most a million.

        Raises:
            HostError: the search failed or took far too long; says nothing of the needles.

        """
        starts = [0, *itertools.accumulate(segment.length for segment in segments)]
        if not needles or not starts[-1]:
            return []
        longest = max(len(needle.data) + needle.run for needle in needles)
        shares = max(1, min(self._workers, starts[-1] // _SMALLEST_SHARE))
        cuts = [starts[-1] * n // shares for n in range(shares + 1)]
        encoded = _encode_needles(needles)

        def search(pair: tuple[int, int]) -> list[Find]:
            return list(self._search(encoded, segments, starts, pair, longest))

        with concurrent.futures.ThreadPoolExecutor(shares) as pool:
            found = pool.map(search, itertools.pairwise(cuts))
            return sorted(itertools.chain.from_iterable(found))

    def _search(
        self,
        needles: bytes,
        segments: Sequence[Segment],
        starts: Sequence[int],
        pair: tuple[int, int],
        longest: int,
    ) -> Iterator[Find]:
        """Yield what begins between two positions, counted over all segments."""
        first, end = pair
        share, origins = _share(segments, starts, first, end, longest - 1)
        deadline = max(_LEAST_SECONDS, (end - first) / _SLOWEST)
        request = needles + _encode_segments(share)
        done = run([str(self._program)], timeout=deadline, env=_environment(), stdin=request)
        finds, rest = divmod(len(done.stdout), _FOUND.size)
        searched = sum(segment.length for segment in share)
        if done.status != 0 or rest or done.stdout[-_FOUND.size :] != _FOUND.pack(_END, searched):
            raise HostError(
                f"the search for residue failed with status {done.status}",
                details=done.stderr.decode(errors="replace")[-1000:],
                hint="nothing was packed or published; build again",
                code="residue-scan",
            )
        places = [0, *itertools.accumulate(segment.length for segment in share)]
        for needle, position in _FOUND.iter_unpack(done.stdout[: (finds - 1) * _FOUND.size]):
            index = _place(places, position)
            segment, offset = origins[index]
            at = offset + position - places[index]
            if starts[segment] + at < end:  # what begins later is found by the next share
                yield Find(needle, segment, at)


def _share(
    segments: Sequence[Segment], starts: Sequence[int], first: int, end: int, beyond: int
) -> tuple[list[Segment], list[tuple[int, int]]]:
    """Return the segments of one share, with what follows joined, and where each comes from."""
    share: list[Segment] = []
    origins: list[tuple[int, int]] = []
    for index in range(_place(starts, first), len(segments)):
        segment, start = segments[index], starts[index]
        if start >= end and not (segment.joined and beyond > 0):
            break
        low, high = max(first - start, 0), segment.length
        if start + segment.length > end:
            own = max(end - start, 0)
            high = min(segment.length, own + beyond)
            beyond -= high - own
        share.append(
            Segment(
                file=segment.file,
                offset=segment.offset + low,
                length=high - low,
                joined=segment.joined and low == 0 and bool(share),
            )
        )
        origins.append((index, low))
        if high < segment.length:
            break
    return share, origins


def _place(starts: Sequence[int], position: int) -> int:
    """Return the index of the segment that holds ``position``; empty ones hold nothing."""
    return bisect.bisect_right(starts, position) - 1


def _encode_needles(needles: Sequence[Needle]) -> bytes:
    parts = [struct.pack("<I", len(needles))]
    for needle in needles:
        follow = bytearray(_NO_SET)
        for byte in needle.follow:
            follow[byte >> 3] |= 1 << (byte & 7)
        parts += (struct.pack("<II", len(needle.data), needle.run), bytes(follow), needle.data)
    return b"".join(parts)


def _encode_segments(segments: Sequence[Segment]) -> bytes:
    files = list(dict.fromkeys(segment.file for segment in segments))
    numbers = {file: number for number, file in enumerate(files)}
    parts = [struct.pack("<I", len(files))]
    for file in files:
        path = os.fsencode(file)
        parts += (struct.pack("<I", len(path)), path)
    parts.append(struct.pack("<I", len(segments)))
    parts += (struct.pack("<IIQQ", numbers[s.file], s.joined, s.offset, s.length) for s in segments)
    return b"".join(parts)


def _environment() -> dict[str, str]:
    lanes = os.environ.get("SMOLBUILD_SCAN_LANES")
    return {} if lanes is None else {"SMOLBUILD_SCAN_LANES": lanes}
