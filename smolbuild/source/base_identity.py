"""What a base is, cheaply: its digest for the provenance key, and how it wants to be run.

Every plan asks this and few builds make a disk of it (``source.base_disk``), so what reads images
is imported only for bases that are images.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from smolbuild.core.digest import Digest
from smolbuild.core.errors import UsageError
from smolbuild.core.files import private_directory
from smolbuild.core.values import dataclass
from smolbuild.model.lock import Lock, LockedRun
from smolbuild.model.smolfile import Dockerfile, Smolfile
from smolbuild.source.debian_identity import debian_digest
from smolbuild.source.docker_engine import DockerEngine
from smolbuild.source.fetcher import ImageFetcher
from smolbuild.source.image_config import ImageConfig
from smolbuild.source.select import EngineHeld, LocalImage, select_image

if TYPE_CHECKING:
    from smolbuild.source.image import LoadedImage

__all__ = [
    "BaseIdentity",
    "base_identity",
    "has_local_base",
    "image_of",
    "local_identity",
    "not_locked",
    "open_local_image",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseIdentity:
    """What a base is: its digest for the provenance key, and how it wants to be run."""

    digest: Digest
    config: ImageConfig


def base_identity(
    smolfile: Smolfile,
    lock: Lock,
    *,
    cache: Path,
    fetcher: ImageFetcher,
    docker: DockerEngine,
) -> BaseIdentity:
    """Return what the base is, without building it.

    A Debian root, a Dockerfile and a registry image are what the lock says; a local image is what
    it is now, read as far as needed (manifest and configuration; every file of an unpacked root),
    and so is one in a Docker engine that answers. Of a registry image, manifest and configuration
    are fetched once and then cached. Idempotent.

    Raises:
        UsageError: there is no base, or the lock has none of its kind.
        BuildError, VerificationError, RegistryError, HostError: it cannot be read.

    """
    if isinstance(smolfile.base, Dockerfile):
        if lock.dockerfile is None:
            raise not_locked()
        return _identity(lock.dockerfile.image, lock.dockerfile.run)
    if smolfile.base is not None:
        if lock.debian is None:
            raise not_locked()
        return BaseIdentity(digest=debian_digest(smolfile.base, lock.debian), config=ImageConfig())
    source = select_image(image_of(smolfile), smolfile.path.parent)
    if isinstance(source, LocalImage):
        return local_identity(source, cache)
    if isinstance(source, EngineHeld):
        from smolbuild.source.engine_image import held_now

        return _identity(*held_now(source.name, lock.image, docker))
    if lock.image is None:
        raise not_locked()
    from smolbuild.source.registry_image import load_registry_image

    image = load_registry_image(lock.image, cache, fetcher)
    return BaseIdentity(digest=image.digest, config=image.config)


def has_local_base(smolfile: Smolfile) -> bool:
    """Return whether the base is of this host, which a new look at a registry does not change.

    An image in a file, a directory or a Docker engine is what it is now, and a Dockerfile is built
    when its context changed.

    Raises:
        UsageError: there is no base, or the image does not exist.

    """
    if smolfile.base is not None:
        return isinstance(smolfile.base, Dockerfile)
    source = select_image(image_of(smolfile), smolfile.path.parent)
    return isinstance(source, LocalImage | EngineHeld)


def _identity(digest: Digest, run: LockedRun) -> BaseIdentity:
    config = ImageConfig(
        env=run.env,
        workdir=run.workdir,
        user=run.user,
        entrypoint=run.entrypoint,
        cmd=run.cmd,
    )
    return BaseIdentity(digest=digest, config=config)


def local_identity(source: LocalImage, cache: Path) -> BaseIdentity:
    """Return what a local image is now, read as far as needed.

    Raises:
        BuildError, VerificationError: it cannot be read.

    """
    if source.kind == "rootfs":
        from smolbuild.source.rootfs import digest_tree, read_rootfs

        return BaseIdentity(digest=digest_tree(read_rootfs(source.path)), config=ImageConfig())
    with open_local_image(source, private_directory(cache)) as image:
        return BaseIdentity(digest=image.digest, config=image.config)


@contextlib.contextmanager
def open_local_image(source: LocalImage, work: Path) -> Iterator["LoadedImage"]:
    """Give the image of a layout or archive; ``work`` takes what has to be decompressed."""
    if source.kind == "layout":
        from smolbuild.source.oci_layout import load_layout, open_layout_directory

        yield load_layout(
            open_layout_directory(source.path), source.selector, what=str(source.path)
        )
    else:
        from smolbuild.source.archive import load_archive

        with load_archive(source.path, source.selector, work) as image:
            yield image


def image_of(smolfile: Smolfile) -> str:
    """Return the image that the Smolfile names.

    Raises:
        UsageError: it names none.

    """
    if smolfile.image is None:
        raise UsageError(
            f"{smolfile.path}: there is no base to build on",
            hint="set `image`, or `debian` or `dockerfile` in [smolbuild.base]",
            code="no-base",
        )
    return smolfile.image


def not_locked() -> UsageError:
    """Return the error of a lock that lacks what the Smolfile asks for."""
    return UsageError(
        "the lock does not have the base of this Smolfile", hint="run `smolbuild lock`", code="lock"
    )
