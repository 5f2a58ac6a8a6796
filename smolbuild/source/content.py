"""File content by reference: where the bytes are, read only when a disk is written."""

import bisect
import itertools
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from smolbuild.core.digest import Digest, digest_chunks
from smolbuild.core.errors import BuildError, VerificationError

__all__ = [
    "EMPTY_CONTENT",
    "Backing",
    "BytesBacking",
    "Content",
    "FileBacking",
    "PathBacking",
    "Region",
    "Segment",
    "bytes_content",
    "region_content",
    "verify_region",
]

_CHUNK = 1 << 20


class Backing(Protocol):
    """Bytes that can be read at any offset, any number of times."""

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes.

        Raises:
            BuildError: they are not there (any more).

        """


class BytesBacking:
    """Bytes in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes; raises BuildError past the end."""
        data = self._data[offset : offset + length]
        if len(data) != length:
            raise BuildError("content ends before its length")
        return data


class FileBacking:
    """An open file, closed by ``close`` or at the end of a ``with`` block."""

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        self.path = path
        self._descriptor = (
            os.open(path, os.O_RDONLY | os.O_CLOEXEC) if descriptor is None else descriptor
        )
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise BuildError(f"{path} is not a regular file")

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes; raises BuildError when the file is shorter."""
        data = os.pread(self._descriptor, length, offset)
        if len(data) == length:
            return data
        parts = [data]
        got = len(data)
        while data and got < length:
            data = os.pread(self._descriptor, length - got, offset + got)
            parts.append(data)
            got += len(data)
        if got != length:
            raise BuildError(f"{self.path} ends at byte {offset + got:,}: it is cut short")
        return b"".join(parts)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class PathBacking:
    """A file of the host that is opened for each read and must not change in between."""

    def __init__(self, path: bytes, status: os.stat_result) -> None:
        self._path = path
        self._seen = _fingerprint(status)

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes; raises BuildError when the file changed or is gone."""
        name = os.fsdecode(self._path)
        try:
            descriptor = os.open(
                self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            )
        except OSError as error:
            raise BuildError(f"cannot read {name}: {error.strerror}") from error
        with FileBacking(Path(name), descriptor) as opened:
            if _fingerprint(os.fstat(descriptor)) != self._seen:
                raise BuildError(f"{name} changed while it was read")
            return opened.read(offset, length)


def _fingerprint(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Segment:
    """``length`` bytes of a file at ``logical`` that are found at ``offset`` of its backing."""

    logical: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a file of ``size`` bytes; what no segment covers reads as zeros."""

    size: int
    backing: Backing
    segments: tuple[Segment, ...]
    """In order and without overlap."""

    def spans(self, grain: int) -> Iterator[tuple[int, int]]:
        """Yield the (start, end) ranges, aligned down and up to ``grain``, that hold data."""
        start = end = 0
        for segment in self.segments:
            first = segment.logical // grain * grain
            last = -(-(segment.logical + segment.length) // grain) * grain
            if first > end:
                if end > start:
                    yield start, end
                start = first
            end = max(end, last)
        if end > start:
            yield start, end

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes at ``offset``, zeros for holes and past the end.

        Raises:
            BuildError: the backing lost or changed them.

        """
        if len(self.segments) == 1:  # nearly every file
            only = self.segments[0]
            wanted = min(length, only.length - offset)
            if only.logical == 0 and wanted > 0:
                return self.backing.read(only.offset + offset, wanted).ljust(length, b"\0")
        result = bytearray(length)
        begin = max(0, bisect.bisect_right(self.segments, offset, key=_logical) - 1)
        for segment in itertools.islice(self.segments, begin, None):
            if segment.logical >= offset + length:
                break
            first = max(offset, segment.logical)
            last = min(offset + length, segment.logical + segment.length)
            if first < last:
                data = self.backing.read(segment.offset + first - segment.logical, last - first)
                result[first - offset : last - offset] = data
        return bytes(result)

    def chunks(self, length: int = _CHUNK) -> Iterator[bytes]:
        """Yield the whole content in pieces of at most ``length`` bytes, holes as zeros."""
        for offset in range(0, self.size, length):
            yield self.read(offset, min(length, self.size - offset))


def _logical(segment: Segment) -> int:
    return segment.logical


EMPTY_CONTENT = Content(0, BytesBacking(b""), ())


def bytes_content(data: bytes) -> Content:
    """Return ``data`` as content."""
    return Content(len(data), BytesBacking(data), (Segment(0, 0, len(data)),) if data else ())


def region_content(backing: Backing, offset: int, length: int) -> Content:
    """Return ``length`` bytes of ``backing`` as content."""
    return Content(length, backing, (Segment(0, offset, length),) if length else ())


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a backing: a blob in a file of its own, or inside an archive."""

    backing: Backing
    offset: int
    length: int

    def chunks(self, length: int = _CHUNK) -> Iterator[bytes]:
        """Yield the bytes in order, at most ``length`` at a time.

        Raises:
            BuildError: the file is shorter.

        """
        for start in range(0, self.length, length):
            yield self.backing.read(self.offset + start, min(length, self.length - start))

    def read(self, *, limit: int, what: str) -> bytes:
        """Return all bytes of a small region.

        Raises:
            BuildError: it has more than ``limit`` bytes, or the file is shorter.

        """
        if self.length > limit:
            raise BuildError(f"{what} has {self.length:,} bytes, more than the {limit:,} allowed")
        return self.backing.read(self.offset, self.length)


def verify_region(region: Region, digest: Digest, *, what: str) -> None:
    """Check the bytes of ``region`` against ``digest``.

    Raises:
        VerificationError: they differ.
        BuildError: the file is shorter than the region.

    """
    found = digest_chunks(region.chunks())
    if found != digest:
        raise VerificationError(
            f"{what} has the digest {found} instead of {digest}",
            hint="the image is damaged or was tampered with: get it anew",
            code="digest-mismatch",
        )
