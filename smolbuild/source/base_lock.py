"""What a base stands for now, for the lock."""

from dataclasses import dataclass
from pathlib import Path

from smolbuild.core.events import Emit
from smolbuild.model.lock import LockedDebian, LockedImage
from smolbuild.model.smolfile import Smolfile
from smolbuild.source.base_identity import image_of, local_identity
from smolbuild.source.debian import resolve_debian
from smolbuild.source.fetcher import ImageFetcher
from smolbuild.source.registry_image import resolve_image
from smolbuild.source.select import LocalImage, select_image

__all__ = ["LockedBase", "resolve_base"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedBase:
    """The base's part of a lock: exactly one is set."""

    image: LockedImage | None = None
    debian: LockedDebian | None = None


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
    reference = image_of(smolfile)
    source = select_image(reference, smolfile.path.parent)
    if isinstance(source, LocalImage):
        digest = local_identity(source, cache).digest
        return LockedBase(
            image=LockedImage(reference=reference, digest=digest, platform_digest=digest)
        )
    return LockedBase(image=resolve_image(source.reference, fetcher))
