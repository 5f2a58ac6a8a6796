"""Materialise an artifact once per host: verified, decompressed, sparse files that forks map.

``materialised/<hex of the manifest digest>/`` holds ``base.raw``, ``disk.<bytes>.qcow2`` (the
disk's deltas, as one overlay), ``memory.raw``, ``state.bin``, ``kernel`` and ``initrd``. The
directory appears by one rename after everything in it was verified and fsynced, so its existence is
the proof; nothing is hashed or decompressed on the restore path. What somebody deleted or cut short
afterwards shows in the files' lengths, and is made anew.

``base.raw`` is a hard link to ``.bases/<hex of its content>.raw``: artifacts with the same base, as
the versions of one environment have, share it. A base without another link belongs to nothing.
"""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from smolbuild.core.digest import Digest, digest_value, hex_of, parse_digest
from smolbuild.core.events import Emit, Transfer
from smolbuild.core.files import (
    file_lock,
    fsync_directory,
    private_directory,
    remove_tree,
    require_space,
    try_lock,
)
from smolbuild.model.artifact import ArtifactConfig, Stream
from smolbuild.store.artifact import Artifact
from smolbuild.store.layout import Store
from smolbuild.store.unpack import (
    OnBytes,
    raw_bytes,
    sync_file,
    write_base,
    write_blobs,
    write_deltas,
)

__all__ = [
    "Materialised",
    "forget_materialised",
    "materialise",
    "materialised_digests",
    "materialised_directory",
    "materialising",
]

_LOCK_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Materialised:
    """The files of a verified artifact."""

    directory: Path
    base: Path
    """The raw base of the disk."""
    overlay: Path
    """What lies over it: qcow2."""
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


def materialise(store: Store, artifact: Artifact, root: Path, *, emit: Emit) -> Materialised:
    """Make the artifact's files below ``root``, or return them at once when they are there.

    Two processes that want the same artifact wait for each other and share the result. Idempotent.

    Args:
        store: holds all blobs of the artifact.
        artifact: already verified by whoever calls this for a foreign artifact.
        root: ``Home.materialised``.
        emit: receives ``Transfer`` events.

    Raises:
        VerificationError: a blob is missing or damaged; nothing is left behind.
        HostError: not enough disk space; names the bytes needed.

    """
    final = materialised_directory(root, artifact.manifest.descriptor.digest)
    if not _is_whole(final, artifact.config):
        with store.lease(), _locked(final):
            if not _is_whole(final, artifact.config):
                with _written(store, artifact, root, emit):
                    pass
    return _files(final)


@contextlib.contextmanager
def materialising(
    store: Store, artifact: Artifact, root: Path, *, emit: Emit
) -> Iterator[Materialised]:
    """Give the artifact's files, written anew; they stay when the block ends without an error.

    In the block they lie in a directory of their own, which goes at its end. Of the disk's base the
    file is taken that is there, since it was written from the same packed bytes before. Raises as
    ``materialise`` does.
    """
    final = materialised_directory(root, artifact.manifest.descriptor.digest)
    with store.lease(), _locked(final), _written(store, artifact, root, emit) as files:
        yield files


def forget_materialised(root: Path, manifest: Digest) -> None:
    """Remove the files of a materialised artifact. Idempotent; running forks keep what they map."""
    final = materialised_directory(root, manifest)
    with _locked(final):
        _clear(final, _temporary(final))
    _sweep_bases(root)


@contextlib.contextmanager
def _written(store: Store, artifact: Artifact, root: Path, emit: Emit) -> Iterator[Materialised]:
    """Write the files, and move them to their place after the block; the caller holds the lock."""
    final = materialised_directory(root, artifact.manifest.descriptor.digest)
    temporary = _temporary(final)
    _clear(final, temporary)
    base = _bases(root) / f"{hex_of(_base_digest(artifact.config))}.raw"
    progress = _progress(artifact.config, emit)
    try:
        temporary.mkdir(mode=0o700)
        _link_base(store, artifact, base, _files(temporary).base, progress)
        _require_space(root, *_streams(artifact.config))
        unsized = temporary / "deltas"
        write_deltas(store, artifact, unsized, progress)
        unsized.rename(temporary / f"disk.{unsized.stat().st_size}.qcow2")
        files = _files(temporary)
        write_blobs(
            store,
            artifact,
            memory=files.memory,
            state=files.state,
            kernel=files.kernel,
            initrd=files.initrd,
            progress=progress,
        )
        with ThreadPoolExecutor(1, thread_name_prefix="sync") as pool:
            # Beside the block: what it does with the files need not wait for the disk.
            written = pool.map(sync_file, list(temporary.iterdir()))
            yield files
            for _ in written:
                pass
        fsync_directory(temporary)
        temporary.rename(final)
    except BaseException:
        remove_tree(temporary)
        _sweep_bases(root)
        raise
    fsync_directory(root)


def _link_base(
    store: Store, artifact: Artifact, base: Path, target: Path, progress: OnBytes
) -> None:
    stream = artifact.config.disk.base
    with _locked(base):
        if not _has_size(base, stream.size):
            _require_space(base.parent, stream)
            temporary = base.with_name(f".tmp-{base.name}")
            temporary.unlink(missing_ok=True)  # of a process that died here: the lock says so
            try:
                write_base(store, artifact, temporary, progress)
                sync_file(temporary)
                temporary.rename(base)
            finally:
                temporary.unlink(missing_ok=True)
            fsync_directory(base.parent)
        target.hardlink_to(base)


def _sweep_bases(root: Path) -> None:
    """Remove the bases that belong to nothing, unless somebody is about to link one."""
    for base in _bases(root).glob("*.raw"):
        with try_lock(_lock(base)) as free:
            if free and base.stat().st_nlink == 1:
                base.unlink()


def _base_digest(config: ArtifactConfig) -> Digest:
    """Return the identity of the base's content: of its chunks, not of how they are packed."""
    base = config.disk.base
    content = [[chunk.length, chunk.sha256] for chunk in base.chunks]
    return digest_value("smolbuild.materialised-base.v1", [base.size, base.chunk_size, content])


def _progress(config: ArtifactConfig, emit: Emit) -> OnBytes:
    total = raw_bytes(config.disk.base, *_streams(config))
    lock, done = threading.Lock(), 0

    def progress(length: int) -> None:
        nonlocal done
        with lock:
            done += length
        emit(Transfer(what="materialise", done=done, total=total))

    return progress


def _streams(config: ArtifactConfig) -> tuple[Stream, ...]:
    """Return the streams that an artifact shares with no other."""
    return (config.memory, *(delta.data for delta in config.disk.deltas))


def _require_space(directory: Path, *streams: Stream) -> None:
    require_space(directory, raw_bytes(*streams), what="materialising the artifact")


def _bases(root: Path) -> Path:
    return private_directory(root / ".bases")


def _temporary(final: Path) -> Path:
    return final.with_name(f".tmp-{final.name}")


def _clear(final: Path, temporary: Path) -> None:
    """Remove both; the caller holds the lock. No reader ever sees half a directory."""
    remove_tree(temporary)  # left by a process that died here; the lock says it is gone
    with contextlib.suppress(FileNotFoundError):
        final.rename(temporary)
    remove_tree(temporary)


def _locked(path: Path) -> contextlib.AbstractContextManager[None]:
    return file_lock(_lock(path), timeout=_LOCK_SECONDS, what=f"materialising {path.name[:12]}")


def _lock(final: Path) -> Path:
    return final.with_name(f".{final.name}.lock")


def _files(directory: Path) -> Materialised:
    overlay = next(directory.glob("disk.*.qcow2"), directory / "disk.0.qcow2")
    return Materialised(
        directory=directory,
        base=directory / "base.raw",
        overlay=overlay,
        memory=directory / "memory.raw",
        state=directory / "state.bin",
        kernel=directory / "kernel",
        initrd=directory / "initrd",
    )


def _is_whole(directory: Path, config: ArtifactConfig) -> bool:
    files = _files(directory)
    lengths = (
        (files.base, config.shape.disk_bytes),
        (files.overlay, int(files.overlay.name.split(".")[1])),
        (files.memory, config.memory.size),
        (files.state, config.device_state.length),
        (files.kernel, config.kernel.length),
        (files.initrd, config.initrd.length),
    )
    return all(_has_size(path, length) for path, length in lengths)


def _has_size(path: Path, length: int) -> bool:
    try:
        return path.stat().st_size == length
    except (FileNotFoundError, NotADirectoryError):
        return False
