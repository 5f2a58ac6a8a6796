"""Saving and copying guest memory as a sparse file."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from smolbuild.core.errors import HostError
from smolbuild.core.files import data_extents

__all__ = [
    "copy_sparse",
    "keep_file",
    "save_sparse",
]

_CHUNK = 1 << 20
_COPY = 1 << 26
_FICLONE = 0x40049409
"""ioctl of linux/fs.h: share the blocks of a file, copy-on-write, where the file system can."""
_CANNOT = (errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""How kernels and file systems say that they do not copy by themselves."""
_PAGE = 4096
_ZEROS = bytes(_CHUNK)
_ZERO_PAGE = bytes(_PAGE)


def save_sparse(source: Path, target: Path) -> int:
    """Write the content of ``source`` to the new file ``target``.

    Runs of zero pages become holes, also where the source has them allocated: freed guest memory is
    zeroed and need take no space. Returns the bytes of data written. Not atomic, not fsynced.

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
        except OSError as error:
            raise _explained(error, target) from error
    return written


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a sparse file to the new file ``target``, holes and all, in the kernel where it can.

    Where the file system can share blocks, nothing is copied. Not atomic, not fsynced.

    Raises:
        HostError: no space left.
        OSError: a file cannot be read or written, or the target exists.

    """
    with contextlib.ExitStack() as stack:
        reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, reader)
        writer = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        stack.callback(os.close, writer)
        with contextlib.suppress(OSError):
            fcntl.ioctl(writer, _FICLONE, reader)
            return
        try:
            os.ftruncate(writer, os.fstat(reader).st_size)
            for start, end in data_extents(reader):
                _copy_extent(reader, writer, start, end)
        except OSError as error:
            raise _explained(error, target) from error


def _copy_extent(reader: int, writer: int, at: int, end: int) -> None:
    while at < end:
        try:
            done = os.copy_file_range(reader, writer, min(_COPY, end - at), at, at)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            data = os.pread(reader, min(_CHUNK, end - at), at)
            _write(writer, at, memoryview(data))
            done = len(data)
        if done == 0:
            return  # cut short meanwhile; whoever uses the copy sees what is missing
        at += done


def _explained(error: OSError, target: Path) -> Exception:
    if error.errno == errno.ENOSPC:
        return HostError(f"no space left while saving guest memory to {target}", code="no-space")
    return error


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


_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP)


def keep_file(source: Path, target: Path) -> None:
    """Give a file that changes no more a second name, which outlives the first, or a copy.

    Not fsynced.

    Raises:
        HostError: no space left.
        OSError: a file cannot be read or written, or the target exists.

    """
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        save_sparse(source, target)
