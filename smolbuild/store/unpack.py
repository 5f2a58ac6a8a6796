"""Write the files of an artifact from its packed bytes: sparse, every byte verified on the way."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from smolbuild.model.artifact import DiskStreams, Stream
from smolbuild.model.oci import (
    DEVICE_STATE_TYPE,
    DISK_CHUNK_TYPE,
    INITRD_TYPE,
    KERNEL_TYPE,
    MEMORY_CHUNK_TYPE,
    Descriptor,
)
from smolbuild.store.artifact import Artifact
from smolbuild.store.chunks import read_chunk, unpack_blob, unpack_stream
from smolbuild.store.layout import Store
from smolbuild.store.qcow2 import write_overlay

__all__ = ["OnBytes", "raw_bytes", "sync_file", "write_base", "write_blobs", "write_deltas"]

OnBytes = Callable[[int], None]
"""Called with each number of raw bytes that were written; from several threads."""


def raw_bytes(*streams: Stream) -> int:
    """Return how many raw bytes ``streams`` hold besides their holes."""
    return sum(
        chunk.length for stream in streams for chunk in stream.chunks if chunk.layer is not None
    )


def write_base(store: Store, artifact: Artifact, path: Path, progress: OnBytes) -> None:
    """Write the base of the disk as a raw, sparse file; not fsynced.

    Raises:
        VerificationError: a blob is missing or damaged.
        OSError: the file exists or cannot be written.

    """
    base, layers = artifact.config.disk.base, artifact.manifest.layers
    with _sparse_file(path, base.size) as write:
        unpack_stream(store, layers, base, _counted(write, progress), DISK_CHUNK_TYPE)


def write_deltas(store: Store, artifact: Artifact, path: Path, progress: OnBytes) -> None:
    """Write all deltas of the disk as one qcow2 overlay over its base; not fsynced.

    Of a block that several deltas hold, the highest one's content is written. Raises as
    ``write_base`` does.
    """
    layers, disk = artifact.manifest.layers, artifact.config.disk
    owners, zeros = _winners(disk)
    with write_overlay(path, disk.base.size, data=owners.keys(), zeros=zeros) as write:
        for turn, delta in enumerate(disk.deltas):
            packed = _Concatenated(store, layers, delta.data)
            # The last block of a disk may be short; its packed form is padded to a whole block.
            for number in _numbers(delta.blocks):
                wins = owners.get(number) == turn
                length = min(delta.block_size, disk.base.size - number * delta.block_size)
                block = packed.take(delta.block_size, wanted=wins)
                if block is not None:
                    write(number, block[:length])
            progress(delta.data.size)


def write_blobs(
    store: Store,
    artifact: Artifact,
    *,
    memory: Path,
    state: Path,
    kernel: Path,
    initrd: Path,
    progress: OnBytes,
) -> None:
    """Write memory (sparse), device state, kernel and initrd; not fsynced.

    Raises as ``write_base`` does.
    """
    config, layers = artifact.config, artifact.manifest.layers
    with _sparse_file(memory, config.memory.size) as write:
        unpack_stream(store, layers, config.memory, _counted(write, progress), MEMORY_CHUNK_TYPE)
    for path, blob, media_type, compress in (
        (state, config.device_state, DEVICE_STATE_TYPE, True),
        (kernel, config.kernel, KERNEL_TYPE, False),
        (initrd, config.initrd, INITRD_TYPE, False),
    ):
        data = unpack_blob(store, layers, blob, media_type, compress=compress)
        with _sparse_file(path, len(data)) as write:
            write(0, memoryview(data))


def sync_file(path: Path) -> None:
    """Write what the kernel still holds of ``path`` to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _winners(disk: DiskStreams) -> tuple[dict[int, int], set[int]]:
    """Return which delta decides each block that holds data, and the blocks that are zero."""
    owners: dict[int, int] = {}
    zeros: set[int] = set()
    for turn, delta in enumerate(disk.deltas):
        for number in _numbers(delta.zeros):
            owners.pop(number, None)
            zeros.add(number)
        for number in _numbers(delta.blocks):
            owners[number] = turn
            zeros.discard(number)
    return owners, zeros


def _numbers(runs: tuple[tuple[int, int], ...]) -> Iterator[int]:
    for first, count in runs:
        yield from range(first, first + count)


class _Concatenated:
    """The raw bytes of a stream, taken from the front; holds one chunk at a time."""

    def __init__(self, store: Store, layers: tuple[Descriptor, ...], stream: Stream) -> None:
        self._chunks = iter(stream.chunks)
        self._read = functools.partial(read_chunk, store, layers, media_type=DISK_CHUNK_TYPE)
        self._rest = memoryview(b"")

    def take(self, length: int, *, wanted: bool) -> memoryview | None:
        """Return the next ``length`` bytes, or step over them."""
        parts = []
        while length:
            if not self._rest:
                self._rest = memoryview(self._read(chunk=next(self._chunks)))
            part = self._rest[:length]
            self._rest = self._rest[len(part) :]
            length -= len(part)
            parts.append(part)
        if not wanted:
            return None
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _counted(
    write: Callable[[int, memoryview], None], progress: OnBytes
) -> Callable[[int, memoryview], None]:
    def counted(offset: int, data: memoryview) -> None:
        write(offset, data)
        progress(len(data))

    return counted


@contextlib.contextmanager
def _sparse_file(path: Path, size: int) -> Iterator[Callable[[int, memoryview], None]]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)

        def write(offset: int, data: memoryview) -> None:
            while data:
                written = os.pwrite(descriptor, data, offset)
                offset, data = offset + written, data[written:]

        yield write
    finally:
        os.close(descriptor)
