"""Materialise an artifact once per host: verified, decompressed, sparse files that forks map.

``materialised/<hex of the manifest digest>/`` holds ``disk.raw``, ``memory.raw``, ``state.bin``,
``kernel`` and ``initrd``. The directory appears by one rename after everything in it was verified
and fsynced, so its existence is the proof; nothing is hashed or decompressed on the restore path.
What somebody deleted or cut short afterwards shows in the files' lengths, and is made anew.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from smolbuild.core.digest import Digest, hex_of, parse_digest
from smolbuild.core.events import Emit, Transfer
from smolbuild.core.files import (
    file_lock,
    fsync_directory,
    remove_tree,
    require_space,
)
from smolbuild.model.artifact import ArtifactConfig, DiskDelta, Stream
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

__all__ = [
    "Materialised",
    "forget_materialised",
    "materialise",
    "materialised_digests",
    "materialised_directory",
]

_LOCK_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Materialised:
    """The files of a verified artifact."""

    directory: Path
    disk: Path
    memory: Path
    state: Path
    kernel: Path
    initrd: Path


def materialised_directory(root: Path, manifest: Digest) -> Path:
    """Return where the machine with this manifest digest is or would be materialised."""
    return root / hex_of(manifest)


def materialised_digests(root: Path) -> tuple[Digest, ...]:
    """Return the manifest digests of all machines that are materialised below ``root``."""
    found = []
    for entry in root.iterdir():
        with contextlib.suppress(ValueError):
            found.append(parse_digest(f"sha256:{entry.name}"))
    return tuple(found)


def materialise(
    store: Store, artifact: Artifact, root: Path, *, emit: Emit, force: bool = False
) -> Materialised:
    """Make the artifact's files below ``root``, or return them at once when they are there.

    Two processes that want the same artifact wait for each other and share the result. Idempotent.

    Args:
        store: holds all blobs of the artifact.
        artifact: already verified by whoever calls this for a foreign artifact.
        root: ``Home.materialised``.
        emit: receives ``Transfer`` events.
        force: write them again from the packed bytes even if they are there.

    Raises:
        VerificationError: a blob is missing or damaged; nothing is left behind.
        HostError: not enough disk space; names the bytes needed.

    """
    final = materialised_directory(root, artifact.manifest.descriptor.digest)
    if not force and _is_whole(final, artifact.config):
        return _files(final)
    with (
        store.lease(),
        file_lock(_lock(final), timeout=_LOCK_SECONDS, what=f"materialising {final.name[:12]}"),
    ):
        if not force and _is_whole(final, artifact.config):
            return _files(final)
        temporary = root / f".tmp-{final.name}"
        _clear(final, temporary)
        require_space(root, _raw_bytes(artifact.config), what="materialising the artifact")
        try:
            temporary.mkdir(mode=0o700)
            _write_files(store, artifact, _files(temporary), emit)
            temporary.rename(final)
        finally:
            remove_tree(temporary)
        fsync_directory(root)
    return _files(final)


def forget_materialised(root: Path, manifest: Digest) -> None:
    """Remove the files of a materialised artifact. Idempotent; running forks keep what they map."""
    final = materialised_directory(root, manifest)
    with file_lock(_lock(final), timeout=_LOCK_SECONDS, what=f"materialising {final.name[:12]}"):
        _clear(final, root / f".tmp-{final.name}")


def _clear(final: Path, temporary: Path) -> None:
    """Remove both; the caller holds the lock. No reader ever sees half a directory."""
    remove_tree(temporary)  # left by a process that died here; the lock says it is gone
    with contextlib.suppress(FileNotFoundError):
        final.rename(temporary)
    remove_tree(temporary)


def _lock(final: Path) -> Path:
    return final.with_name(f".{final.name}.lock")


def _files(directory: Path) -> Materialised:
    return Materialised(
        directory=directory,
        disk=directory / "disk.raw",
        memory=directory / "memory.raw",
        state=directory / "state.bin",
        kernel=directory / "kernel",
        initrd=directory / "initrd",
    )


def _is_whole(directory: Path, config: ArtifactConfig) -> bool:
    files = _files(directory)
    lengths = (
        (files.disk, config.shape.disk_bytes),
        (files.memory, config.memory.size),
        (files.state, config.device_state.length),
        (files.kernel, config.kernel.length),
        (files.initrd, config.initrd.length),
    )
    try:
        return all(path.stat().st_size == length for path, length in lengths)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _raw_bytes(config: ArtifactConfig) -> int:
    streams = [config.disk.base, config.memory, *(delta.data for delta in config.disk.deltas)]
    return sum(
        chunk.length for stream in streams for chunk in stream.chunks if chunk.layer is not None
    )


def _write_files(store: Store, artifact: Artifact, files: Materialised, emit: Emit) -> None:
    config, layers = artifact.config, artifact.manifest.layers
    total, done = _raw_bytes(config), 0

    def progress(length: int) -> None:
        nonlocal done
        done += length
        emit(Transfer(what="materialise", done=done, total=total))

    with _sparse_file(files.disk, config.shape.disk_bytes) as write:
        unpack_stream(store, layers, config.disk.base, _counted(write, progress), DISK_CHUNK_TYPE)
        for delta in config.disk.deltas:
            _apply_delta(store, layers, delta, config.disk.base.size, write)
            progress(delta.data.size)
    with _sparse_file(files.memory, config.memory.size) as write:
        unpack_stream(store, layers, config.memory, _counted(write, progress), MEMORY_CHUNK_TYPE)
    for path, blob, media_type, compress in (
        (files.state, config.device_state, DEVICE_STATE_TYPE, True),
        (files.kernel, config.kernel, KERNEL_TYPE, False),
        (files.initrd, config.initrd, INITRD_TYPE, False),
    ):
        data = unpack_blob(store, layers, blob, media_type, compress=compress)
        with _sparse_file(path, len(data)) as write:
            write(0, memoryview(data))
    fsync_directory(files.directory)


def _apply_delta(
    store: Store,
    layers: tuple[Descriptor, ...],
    delta: DiskDelta,
    disk_bytes: int,
    write: Callable[[int, memoryview], None],
) -> None:
    block = delta.block_size
    for first, count in delta.zeros:
        for number in range(first, first + count):
            length = min(block, disk_bytes - number * block)
            write(number * block, memoryview(bytes(length)))
    packed = _Concatenated(store, layers, delta.data)
    for first, count in delta.blocks:
        for number in range(first, first + count):
            # The last block of a disk may be short; its packed form is padded to a whole block.
            data = packed.take(block)
            length = min(block, disk_bytes - number * block)
            write(number * block, data[:length])


class _Concatenated:
    """The raw bytes of a stream, taken from the front; holds one chunk at a time."""

    def __init__(self, store: Store, layers: tuple[Descriptor, ...], stream: Stream) -> None:
        self._chunks = iter(stream.chunks)
        self._read = functools.partial(read_chunk, store, layers, media_type=DISK_CHUNK_TYPE)
        self._rest = memoryview(b"")

    def take(self, length: int) -> memoryview:
        parts = []
        while length:
            if not self._rest:
                self._rest = memoryview(self._read(chunk=next(self._chunks)))
            part = self._rest[:length]
            self._rest = self._rest[len(part) :]
            length -= len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _counted(
    write: Callable[[int, memoryview], None], progress: Callable[[int], None]
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
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
