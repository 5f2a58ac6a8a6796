"""Saving guest memory as a sparse file."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from smolbuild.core.errors import HostError
from smolbuild.core.files import data_extents

__all__ = ["save_sparse"]

_CHUNK = 1 << 20
_PAGE = 4096
_ZEROS = bytes(_CHUNK)
_ZERO_PAGE = bytes(_PAGE)


def save_sparse(source: Path, target: Path) -> int:
    """Write the content of ``source`` to the new file ``target``, and fsync it.

    Runs of zero pages become holes, also where the source has them allocated: freed guest memory is
    zeroed and need take no space. Returns the bytes of data written. Not atomic.

    Raises:
        HostError: no space left.
        OSError: a file cannot be read or written, or the target exists.

    """
    written = 0
    with contextlib.ExitStack() as stack:
        reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, reader)
        writer = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        stack.callback(os.close, writer)
        try:
            os.ftruncate(writer, os.fstat(reader).st_size)
            for offset, data in _data(reader):
                _write(writer, offset, data)
                written += len(data)
            os.fsync(writer)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise HostError(
                    f"no space left while saving guest memory to {target}", code="no-space"
                ) from error
            raise
    return written


def _data(reader: int) -> Iterator[tuple[int, memoryview]]:
    """Yield the runs of pages that hold anything but zeros."""
    # Compared as bytearray and bytes: memcmp, a hundred times faster than through memoryviews.
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    for start, end in data_extents(reader):
        offset = start - start % _PAGE
        while offset < end:
            length = os.preadv(reader, [view[: min(_CHUNK, end - offset)]], offset)
            if length == 0:
                return
            if length < _CHUNK or buffer != _ZEROS:
                for first, last in _runs(buffer, length):
                    yield offset + first, view[first:last]
            offset += length


def _runs(buffer: bytearray, length: int) -> Iterator[tuple[int, int]]:
    run: int | None = None
    for at in range(0, length, _PAGE):
        last = min(at + _PAGE, length)
        if buffer.startswith(_ZEROS[: last - at] if last - at < _PAGE else _ZERO_PAGE, at):
            if run is not None:
                yield run, at
                run = None
        elif run is None:
            run = at
    if run is not None:
        yield run, length


def _write(writer: int, offset: int, data: memoryview) -> None:
    while data:
        count = os.pwrite(writer, data, offset)
        offset, data = offset + count, data[count:]
