"""Decompress a blob into an unnamed file, hashing what goes in and what comes out.

The result has no name on the host: it vanishes with its last descriptor, also after kill -9.
"""

import contextlib
import hashlib
import io
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from smolbuild.core.digest import Digest
from smolbuild.core.errors import BuildError
from smolbuild.core.files import require_space
from smolbuild.source.content import FileBacking, Region

__all__ = ["MAX_UNPACKED", "Compression", "compression_of", "unpacked"]

MAX_UNPACKED = 64 << 30
"""Bytes of one decompressed layer; larger than any real one, and a bound for a bomb."""
_CHUNK = 1 << 20
_SPACE_STEP = 256 << 20
_SPACE_MARGIN = 64 << 20
_MAX_WINDOW = 1 << 27

Compression = str
"""``""`` (none), ``gzip``, ``zstd``, or the name of one that is not supported."""

_MAGIC: tuple[tuple[bytes, Compression], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"\x04\x22\x4d\x18", "lz4"),
)


def compression_of(region: Region) -> Compression:
    """Return how ``region`` is compressed, by its first bytes, not by what anybody calls it."""
    head = region.backing.read(region.offset, min(6, region.length))
    return next((name for magic, name in _MAGIC if head.startswith(magic)), "")


@contextlib.contextmanager
def unpacked(
    region: Region, work: Path, *, what: str, limit: int = MAX_UNPACKED
) -> Iterator[tuple[Region, Digest | None]]:
    """Give the decompressed bytes of ``region`` and their digest (None when it was not compressed).

    Args:
        region: the blob; not compressed, gzip or zstd.
        work: directory whose file system takes the decompressed bytes.
        what: names the blob in errors.
        limit: bytes the result may have.

    Raises:
        BuildError: unknown compression, damaged data, or more than ``limit`` bytes.
        HostError: no space in ``work``.

    """
    compression = compression_of(region)
    if not compression:
        yield region, None
        return
    if compression not in ("gzip", "zstd"):
        raise BuildError(
            f"{what} is compressed with {compression}, which is not supported",
            hint="compress it with gzip or zstd, or not at all",
        )
    require_space(work, region.length + _SPACE_MARGIN, what=what)
    with tempfile.TemporaryFile(dir=work, prefix=".tmp-layer-") as file:
        hasher, size = hashlib.sha256(), 0
        for chunk in _decompressed(region, compression, what):
            if size // _SPACE_STEP != (size + len(chunk)) // _SPACE_STEP:
                require_space(work, _SPACE_STEP + _SPACE_MARGIN, what=what)
            size += len(chunk)
            if size > limit:
                raise BuildError(f"{what} unpacks to more than {limit:,} bytes", code="bad-layer")
            hasher.update(chunk)
            file.write(chunk)
        file.flush()
        with FileBacking(Path(f"unpacked {what}"), os.dup(file.fileno())) as backing:
            yield Region(backing, 0, size), Digest("sha256:" + hasher.hexdigest())


def _decompressed(region: Region, compression: Compression, what: str) -> Iterator[bytes]:
    try:
        if compression == "gzip":
            yield from _gzip(region)
        else:
            yield from _zstd(region)
    except (EOFError, zlib.error) as error:
        raise BuildError(f"{what} is damaged: {error}", code="bad-layer") from error


def _gzip(region: Region) -> Iterator[bytes]:
    engine = zlib.decompressobj(wbits=31)
    for data in region.chunks():
        pending = data
        while pending:
            if engine.eof:
                pending = pending.lstrip(b"\0")  # padding that some writers leave
                if not pending:
                    break
                engine = zlib.decompressobj(wbits=31)
            yield engine.decompress(pending, _CHUNK)
            pending = engine.unused_data if engine.eof else engine.unconsumed_tail
    while not engine.eof:
        rest = engine.decompress(engine.unconsumed_tail, _CHUNK)
        if not rest and not engine.eof:
            raise EOFError("the compressed data is cut short")
        yield rest


class _Reader(io.RawIOBase):
    """The bytes of a region as a stream."""

    def __init__(self, region: Region) -> None:
        self._region, self._at = region, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        left = self._region.length - self._at
        wanted = left if size < 0 else min(size, left)
        data = self._region.backing.read(self._region.offset + self._at, wanted)
        self._at += wanted
        return data


def _zstd(region: Region) -> Iterator[bytes]:
    import zstandard

    engine = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    try:
        with engine.stream_reader(
            cast("IO[bytes]", _Reader(region)), read_across_frames=True
        ) as stream:
            while chunk := stream.read(_CHUNK):
                yield chunk
    except zstandard.ZstdError as error:
        raise EOFError(str(error)) from error
