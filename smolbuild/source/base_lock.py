"""What a base stands for now, for the lock."""

from dataclasses import dataclass
from pathlib import Path

from smolbuild.core.events import Emit
from smolbuild.model.lock import LockedDebian, LockedDockerfile, LockedImage
from smolbuild.model.smolfile import Dockerfile, Smolfile
from smolbuild.source.base_identity import image_of, local_identity
from smolbuild.source.debian import resolve_debian
from smolbuild.source.docker_context import collect_context
from smolbuild.source.docker_engine import DockerEngine
from smolbuild.source.engine_image import build_dockerfile, lock_held
from smolbuild.source.fetcher import ImageFetcher
from smolbuild.source.registry_image import resolve_image
from smolbuild.source.select import EngineHeld, LocalImage, select_image

__all__ = ["LockedBase", "resolve_base"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedBase:
    """The base's part of a lock: exactly one is set."""

    image: LockedImage | None = None
    debian: LockedDebian | None = None
    dockerfile: LockedDockerfile | None = None


def resolve_base(
    smolfile: Smolfile, *, cache: Path, fetcher: ImageFetcher, docker: DockerEngine, emit: Emit
) -> LockedBase:
    """Return what the Smolfile's base stands for now; of all bases only a Dockerfile is built.

    Raises:
        UsageError: there is no base, or a local image does not exist.
        HostError, BuildError, RegistryError, VerificationError: it cannot be resolved.

    """
    if isinstance(smolfile.base, Dockerfile):
        context = collect_context(smolfile, smolfile.base, cache=cache)
        built = build_dockerfile(smolfile.base, context, docker, emit)
        return LockedBase(dockerfile=built)
    if smolfile.base is not None:
        return LockedBase(debian=resolve_debian(smolfile.base, cache=cache, emit=emit))
    reference = image_of(smolfile)
    source = select_image(reference, smolfile.path.parent)
    if isinstance(source, LocalImage):
        digest = local_identity(source, cache).digest
        return LockedBase(
            image=LockedImage(reference=reference, digest=digest, platform_digest=digest)
        )
    if isinstance(source, EngineHeld):
        return LockedBase(image=lock_held(reference, source.name, docker))
    return LockedBase(image=resolve_image(source.reference, fetcher))
