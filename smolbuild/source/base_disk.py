"""The base of a machine: what it is (cheaply, for the key) and its raw root disk (made once).

A base disk is cached by the digest of what it is made of, under ``cache/base``: the image's or
package set's digest, the disk's size, and the version of the code that lays it out. Two builds that
need the same one wait for each other and share it.
"""

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smolbuild.core.canon import canonical_json
from smolbuild.core.codec import decode, encode
from smolbuild.core.digest import Digest, digest_value, hex_of
from smolbuild.core.errors import UsageError, VerificationError
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
from smolbuild.model.lock import Lock, LockedDebian, LockedImage
from smolbuild.model.smolfile import Smolfile
from smolbuild.source.archive import load_archive
from smolbuild.source.debian import build_debian, debian_digest, resolve_debian
from smolbuild.source.ext4 import EXT4_VERSION, write_ext4
from smolbuild.source.image import ImageConfig, LoadedImage, merge
from smolbuild.source.oci_layout import load_layout, open_layout_directory
from smolbuild.source.registry_image import (
    ImageFetcher,
    load_registry_image,
    pull_layers,
    resolve_image,
)
from smolbuild.source.rootfs import digest_tree, read_rootfs
from smolbuild.source.select import LocalImage, select_image
from smolbuild.source.tree import Tree

__all__ = [
    "BaseDisk",
    "BaseIdentity",
    "LockedBase",
    "base_identity",
    "prepare_base",
    "resolve_base",
]

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
class BaseIdentity:
    """What a base is: its digest for the provenance key, and how it wants to be run."""

    digest: Digest
    config: ImageConfig


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
class LockedBase:
    """The base's part of a lock: exactly one is set."""

    image: LockedImage | None = None
    debian: LockedDebian | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    disk_bytes: int
    digest: Digest
    image_digest: Digest
    config: ImageConfig


def resolve_base(
    smolfile: Smolfile, *, cache: Path, fetcher: ImageFetcher, emit: Emit
) -> LockedBase:
    """Return what the Smolfile's base stands for now; builds and pulls nothing.

    Raises:
        UsageError: there is no base, or a local image does not exist.
        HostError, BuildError, RegistryError, VerificationError: it cannot be resolved.

    """
    if smolfile.base is not None:
        return LockedBase(debian=resolve_debian(smolfile.base, cache=cache, emit=emit))
    reference = _image(smolfile)
    source = select_image(reference, smolfile.path.parent)
    if isinstance(source, LocalImage):
        digest = _local_identity(source, cache).digest
        return LockedBase(
            image=LockedImage(reference=reference, digest=digest, platform_digest=digest)
        )
    return LockedBase(image=resolve_image(source.reference, fetcher))


def base_identity(
    smolfile: Smolfile, lock: Lock, *, cache: Path, fetcher: ImageFetcher
) -> BaseIdentity:
    """Return what the base is, without building it.

    A Debian root and a registry image are what the lock says; a local image is what it is now, read
    as far as needed (manifest and configuration; every file of an unpacked root). Of a registry
    image, manifest and configuration are fetched once and then cached. Idempotent.

    Raises:
        UsageError: there is no base, or the lock has none of its kind.
        BuildError, VerificationError, RegistryError: it cannot be read.

    """
    if smolfile.base is not None:
        if lock.debian is None:
            raise _not_locked()
        return BaseIdentity(digest=debian_digest(smolfile.base, lock.debian), config=ImageConfig())
    source = select_image(_image(smolfile), smolfile.path.parent)
    if isinstance(source, LocalImage):
        return _local_identity(source, cache)
    if lock.image is None:
        raise _not_locked()
    image = load_registry_image(lock.image, cache, fetcher)
    return BaseIdentity(digest=image.digest, config=image.config)


def prepare_base(
    smolfile: Smolfile, lock: Lock, *, cache: Path, fetcher: ImageFetcher, emit: Emit
) -> BaseDisk:
    """Return the base's root disk, from the cache or made now.

    Idempotent: the same Smolfile and lock give the same bytes. A crash leaves nothing that another
    call would take for a disk.

    Args:
        smolfile: names the base and the disk's size (``overlay`` GiB).
        lock: what the base was resolved to.
        cache: the cache directory (``Home.cache``); temporary files go there too.
        fetcher: reads from registries.
        emit: receives the phase ``base`` and what tools write.

    Raises:
        UsageError: there is no base, or the lock has none of its kind.
        BuildError: the image or the packages cannot be made into a disk.
        VerificationError: something does not have its digest.
        HostError: a program, the network or space is missing.
        RegistryError: the image cannot be pulled.
        BusyError: another build has been making the same base for two hours.

    """
    identity = base_identity(smolfile, lock, cache=cache, fetcher=fetcher)
    disk_bytes = smolfile.overlay * _GIB
    key = digest_value(
        "smolbuild.base-disk.v1",
        {"base": identity.digest, "bytes": disk_bytes, "layout": [_VERSION, EXT4_VERSION]},
    )
    shelf = private_directory(cache / "base")
    directory = shelf / hex_of(key)
    record = _read_record(directory)
    if record is None:
        with file_lock(shelf / f".{hex_of(key)}.lock", timeout=_LOCK_TIMEOUT, what="the base disk"):
            record = _read_record(directory)
            if record is None:
                remove_tree(directory)  # what somebody damaged; a machine that uses it keeps it
                record = _make(
                    smolfile, lock, identity, disk_bytes, directory, cache, fetcher, emit
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
    emit: Emit,
) -> _Record:
    started = time.monotonic()
    emit(PhaseStarted(phase="base", text=f"base {_title(smolfile)}"))
    _sweep(directory)
    staging = Path(tempfile.mkdtemp(prefix=f".tmp-{directory.name}-", dir=directory.parent))
    try:
        with contextlib.ExitStack() as resources:
            tree = _tree(smolfile, lock, identity, staging, cache, resources, fetcher, emit)
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
    emit: Emit,
) -> Tree:
    """Return the base's file tree; it must be what ``identity`` says."""
    if smolfile.base is not None and lock.debian is not None:
        return build_debian(
            smolfile.base, lock.debian, cache=cache, work=staging, resources=resources, emit=emit
        )
    source = select_image(_image(smolfile), smolfile.path.parent)
    if isinstance(source, LocalImage):
        if source.kind == "rootfs":
            tree = read_rootfs(source.path)
            _unchanged(digest_tree(tree), identity.digest, source.path)
            return tree
        image = resources.enter_context(_local_image(source, staging))
        _unchanged(image.digest, identity.digest, source.path)
        return merge(image, staging, resources, emit)
    if lock.image is None:
        raise _not_locked()
    image = load_registry_image(lock.image, cache, fetcher)
    pull_layers(image, emit)
    return merge(image, staging, resources, emit)


@contextlib.contextmanager
def _local_image(source: LocalImage, work: Path) -> Iterator[LoadedImage]:
    if source.kind == "layout":
        yield load_layout(
            open_layout_directory(source.path), source.selector, what=str(source.path)
        )
    else:
        with load_archive(source.path, source.selector, work) as image:
            yield image


def _local_identity(source: LocalImage, cache: Path) -> BaseIdentity:
    if source.kind == "rootfs":
        return BaseIdentity(digest=digest_tree(read_rootfs(source.path)), config=ImageConfig())
    with _local_image(source, private_directory(cache)) as image:
        return BaseIdentity(digest=image.digest, config=image.config)


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


def _image(smolfile: Smolfile) -> str:
    if smolfile.image is None:
        raise UsageError(
            f"{smolfile.path}: there is no base to build on",
            hint="set `image`, or `debian` in [smolbuild.base]",
            code="no-base",
        )
    return smolfile.image


def _title(smolfile: Smolfile) -> str:
    if smolfile.base is None:
        return smolfile.image or ""
    packages = counted(len(smolfile.base.packages), "package")
    return f"Debian {smolfile.base.debian} with {packages}"


def _not_locked() -> UsageError:
    return UsageError(
        "the lock does not have the base of this Smolfile", hint="run `smolbuild lock`", code="lock"
    )
