"""What a plan's base and kernel are called, for people; the key holds their digests alone."""

from pathlib import Path

from smolbuild.core.digest import Digest
from smolbuild.model.artifact import BaseInfo
from smolbuild.model.lock import Lock
from smolbuild.model.smolfile import Dockerfile, Smolfile
from smolbuild.source.select import EngineHeld, LocalImage, select_image

__all__ = ["base_info", "kernel_version"]


def base_info(smolfile: Smolfile, lock: Lock, digest: Digest) -> BaseInfo:
    """Return what the base with this digest is: its kind, its name, and its packages if known.

    Raises:
        UsageError: the Smolfile's image cannot be a base; whoever has its digest knows it can.

    """
    if isinstance(smolfile.base, Dockerfile):
        return BaseInfo(kind="dockerfile", reference=smolfile.base.dockerfile, digest=digest)
    if smolfile.base is not None:
        locked = lock.debian
        packages = {} if locked is None else {each.name: each.version for each in locked.packages}
        return BaseInfo(
            kind="debian", reference=smolfile.base.debian, digest=digest, packages=packages
        )
    image = smolfile.image or ""
    local = isinstance(select_image(image, smolfile.path.parent), LocalImage | EngineHeld)
    if image.startswith("/"):  # where things lie on this host is nobody else's business
        image = Path(image).name
    return BaseInfo(kind="local" if local else "image", reference=image, digest=digest)


def kernel_version(lock: Lock) -> str:
    """Return the version of the kernel's package; empty for a kernel of the user's own."""
    return "" if lock.kernel is None else lock.kernel.version
