"""The raw root disk of a base, made once.

A base disk is cached by the digest of what it is made of, under ``cache/base``: the image's or
package set's digest, the disk's size, and the version of the code that lays it out. Two builds that
need the same one wait for each other and share it.
"""

import contextlib
import json
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from smolbuild.core.canon import canonical_json
from smolbuild.core.codec import decode, encode
from smolbuild.core.digest import Digest, digest_value, hex_of
from smolbuild.core.errors import VerificationError
from smolbuild.core.events import Emit, Message, PhaseFinished, PhaseStarted
from smolbuild.core.files import (
    file_lock,
    fsync_directory,
    private_directory,
    remove_tree,
    try_lock,
    write_atomic,
)
from smolbuild.core.text import counted
from smolbuild.model.lock import Lock
from smolbuild.model.smolfile import Base, Dockerfile, Smolfile
from smolbuild.source.base_identity import (
    BaseIdentity,
    base_identity,
    image_of,
    not_locked,
    open_local_image,
)
from smolbuild.source.debian import build_debian
from smolbuild.source.docker_engine import DockerEngine
from smolbuild.source.engine_image import open_saved
from smolbuild.source.ext4 import EXT4_VERSION, write_ext4
from smolbuild.source.fetcher import ImageFetcher
from smolbuild.source.image_config import ImageConfig
from smolbuild.source.merge import merge
from smolbuild.source.registry_image import (
    load_registry_image,
    pull_layers,
)
from smolbuild.source.rootfs import digest_tree, read_rootfs
from smolbuild.source.select import EngineHeld, LocalImage, select_image
from smolbuild.source.tree import Tree

__all__ = ["BaseDisk", "has_base", "prepare_base"]

_VERSION = 1
_LOCK_TIMEOUT = 7200.0
_DISK = "root.img"
_RECORD = "base.json"
_GIB = 1 << 30

_GUEST_DIRECTORIES = (
    (b"proc", 0o555),
    (b"sys", 0o555),
    (b"dev", 0o755),
    (b"run", 0o755),
    (b"tmp", 0o1777),
)
"""What the guest agent mounts on; made where an image lacks it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseDisk:
    """A base's root disk: raw, sparse, never written to again."""

    path: Path
    disk_bytes: int
    digest: Digest
    """``digest_disk`` of the raw image."""
    image_digest: Digest
    """``BaseIdentity.digest``."""
    config: ImageConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    disk_bytes: int
    digest: Digest
    image_digest: Digest
    config: ImageConfig


def has_base(image: Digest, disk_bytes: int, *, cache: Path) -> bool:
    """Return whether the root disk of the base with this digest is cached."""
    directory = cache / "base" / hex_of(_key(image, disk_bytes))
    return _read_record(directory) is not None


def _key(image: Digest, disk_bytes: int) -> Digest:
    return digest_value(
        "smolbuild.base-disk.v1",
        {"base": image, "bytes": disk_bytes, "layout": [_VERSION, EXT4_VERSION]},
    )


def prepare_base(
    smolfile: Smolfile,
    lock: Lock,
    *,
    cache: Path,
    fetcher: ImageFetcher,
    docker: DockerEngine,
    emit: Emit,
) -> BaseDisk:
    """Return the base's root disk, from the cache or made now.

    Idempotent: the same Smolfile and lock give the same bytes. A crash leaves nothing that another
    call would take for a disk.

    Args:
        smolfile: names the base and the disk's size (``overlay`` GiB).
        lock: what the base was resolved to.
        cache: the cache directory (``Home.cache``); temporary files go there too.
        fetcher: reads from registries.
        docker: the Docker engine, asked for bases that are its images.
        emit: receives the phase ``base`` and what tools write.

    Raises:
        UsageError: there is no base, or the lock has none of its kind.
        BuildError: the image or the packages cannot be made into a disk.
        VerificationError: something does not have its digest.
        HostError: a program, the network or space is missing.
        RegistryError: the image cannot be pulled.
        BusyError: another build has been making the same base for two hours.

    """
    identity = base_identity(smolfile, lock, cache=cache, fetcher=fetcher, docker=docker)
    disk_bytes = smolfile.overlay * _GIB
    key = _key(identity.digest, disk_bytes)
    shelf = private_directory(cache / "base")
    directory = shelf / hex_of(key)
    record = _read_record(directory)
    if record is None:
        with file_lock(shelf / f".{hex_of(key)}.lock", timeout=_LOCK_TIMEOUT, what="the base disk"):
            record = _read_record(directory)
            if record is None:
                remove_tree(directory)  # what somebody damaged; a machine that uses it keeps it
                record = _make(
                    smolfile, lock, identity, disk_bytes, directory, cache, fetcher, docker, emit
                )
    return BaseDisk(
        path=directory / _DISK,
        disk_bytes=record.disk_bytes,
        digest=record.digest,
        image_digest=record.image_digest,
        config=record.config,
    )


def _make(
    smolfile: Smolfile,
    lock: Lock,
    identity: BaseIdentity,
    disk_bytes: int,
    directory: Path,
    cache: Path,
    fetcher: ImageFetcher,
    docker: DockerEngine,
    emit: Emit,
) -> _Record:
    started = time.monotonic()
    emit(PhaseStarted(phase="base", text=f"base {_title(smolfile)}"))
    _sweep(directory)
    staging = Path(tempfile.mkdtemp(prefix=f".tmp-{directory.name}-", dir=directory.parent))
    try:
        with contextlib.ExitStack() as resources:
            tree = _tree(smolfile, lock, identity, staging, cache, resources, fetcher, docker, emit)
            for path, mode in _GUEST_DIRECTORIES:
                tree.ensure_directory(path, mode=mode)
            emit(Message(level="info", text=f"writing a root disk of {smolfile.overlay} GiB"))
            disk = write_ext4(tree, staging / _DISK, disk_bytes)
        record = _Record(
            disk_bytes=disk.size,
            digest=disk.digest,
            image_digest=identity.digest,
            config=identity.config,
        )
        write_atomic(staging / _RECORD, canonical_json(encode(record)))
        staging.rename(directory)
        fsync_directory(directory.parent)
    finally:
        # A killed installation may write for a moment longer; what stays is swept later.
        shutil.rmtree(staging, ignore_errors=True)
    seconds = time.monotonic() - started
    emit(PhaseFinished(phase="base", text=f"root disk {disk.digest[:19]}", seconds=seconds))
    return record


def _sweep(directory: Path) -> None:
    """Remove what crashed builds left in the cache; the caller holds the lock of ``directory``."""
    for path in directory.parent.glob(".tmp-*"):
        key = path.name.split("-")[1]
        if key == directory.name:
            shutil.rmtree(path, ignore_errors=True)
            continue
        with try_lock(directory.parent / f".{key}.lock") as free:
            if free:
                shutil.rmtree(path, ignore_errors=True)


def _tree(
    smolfile: Smolfile,
    lock: Lock,
    identity: BaseIdentity,
    staging: Path,
    cache: Path,
    resources: contextlib.ExitStack,
    fetcher: ImageFetcher,
    docker: DockerEngine,
    emit: Emit,
) -> Tree:
    """Return the base's file tree; it must be what ``identity`` says."""
    if isinstance(smolfile.base, Dockerfile):
        saved = open_saved(identity.digest, docker, staging, emit)
        return merge(resources.enter_context(saved), staging, resources, emit)
    if smolfile.base is not None and lock.debian is not None:
        return build_debian(
            smolfile.base, lock.debian, cache=cache, work=staging, resources=resources, emit=emit
        )
    source = select_image(image_of(smolfile), smolfile.path.parent)
    if isinstance(source, LocalImage):
        if source.kind == "rootfs":
            tree = read_rootfs(source.path)
            _unchanged(digest_tree(tree), identity.digest, source.path)
            return tree
        image = resources.enter_context(open_local_image(source, staging))
        _unchanged(image.digest, identity.digest, source.path)
        return merge(image, staging, resources, emit)
    if isinstance(source, EngineHeld):
        saved = open_saved(identity.digest, docker, staging, emit)
        return merge(resources.enter_context(saved), staging, resources, emit)
    if lock.image is None:
        raise not_locked()
    image = load_registry_image(lock.image, cache, fetcher)
    pull_layers(image)
    return merge(image, staging, resources, emit)


def _unchanged(found: Digest, wanted: Digest, path: Path) -> None:
    if found != wanted:
        raise VerificationError(
            f"{path} changed while it was read",
            hint="build again when nothing writes to it any more",
            code="base-changed",
        )


def _read_record(directory: Path) -> _Record | None:
    """Return the record of a disk that is there as it was written, as far as its length tells."""
    try:
        record = decode(_Record, json.loads((directory / _RECORD).read_bytes()), _RECORD)
        whole = (directory / _DISK).stat().st_size == record.disk_bytes
    except (FileNotFoundError, ValueError, VerificationError):
        return None
    return record if whole else None


def _title(smolfile: Smolfile) -> str:
    if not isinstance(smolfile.base, Base):
        return smolfile.image or (smolfile.base.dockerfile if smolfile.base else "")
    packages = counted(len(smolfile.base.packages), "package")
    return f"Debian {smolfile.base.debian} with {packages}"
