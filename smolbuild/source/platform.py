"""From a descriptor to the one manifest for our platform, through nested indexes."""

from collections.abc import Callable, Sequence

from smolbuild.core.digest import Digest, digest_bytes
from smolbuild.core.errors import BuildError, VerificationError
from smolbuild.model.oci import (
    DOCKER_LIST_TYPE,
    INDEX_TYPE,
    Descriptor,
    Manifest,
    parse_index,
    parse_manifest,
)
from smolbuild.source.image_config import ARCHITECTURE

__all__ = ["ReadManifest", "all_platforms", "choose_platform", "platform_manifest"]

ReadManifest = Callable[[Descriptor], bytes]
"""Returns the bytes of a manifest or index; they are not checked yet."""

_MAX_DEPTH = 4


def platform_manifest(descriptor: Descriptor, read: ReadManifest, *, what: str) -> Manifest:
    """Return the manifest that ``descriptor`` is, or that its index has for linux/amd64.

    Raises:
        VerificationError: bytes do not have their digest, or are malformed.
        BuildError: no manifest is for our platform; lists those there are.

    """
    for _ in range(_MAX_DEPTH):
        data = read(descriptor)
        if digest_bytes(data) != descriptor.digest:
            raise VerificationError(
                f"{what}: manifest {descriptor.digest} has other bytes than its digest says",
                hint="the image is damaged or was tampered with: get it anew",
                code="digest-mismatch",
            )
        if descriptor.media_type not in (INDEX_TYPE, DOCKER_LIST_TYPE):
            return parse_manifest(data, what)
        descriptor = choose_platform(parse_index(data, what).manifests, what=what)
    raise VerificationError(f"{what}: indexes nested more than {_MAX_DEPTH} deep", code="malformed")


def all_platforms(index: bytes, *, what: str) -> tuple[tuple[str, Digest], ...]:
    """Return platform and digest of each image in an index, sorted; of several the first counts.

    Raises:
        VerificationError: it is malformed.

    """
    found: dict[str, Digest] = {}
    for item in parse_index(index, what).manifests:
        if item.platform and not _is_attestation(item):
            variant = item.platform.get("variant")
            found.setdefault(
                f"{_platform(item)}/{variant}" if variant else _platform(item), item.digest
            )
    return tuple(sorted(found.items()))


def choose_platform(manifests: Sequence[Descriptor], *, what: str) -> Descriptor:
    """Return the descriptor for linux/amd64; one without a platform counts when it is alone.

    Raises:
        BuildError: there is none, or several without a platform.

    """
    images = [item for item in manifests if not _is_attestation(item)]
    ours = [item for item in images if _platform(item) == f"linux/{ARCHITECTURE}"]
    if ours:
        return ours[0]
    if len(images) == 1 and not images[0].platform:
        return images[0]
    found = ", ".join(sorted({_platform(item) or "unknown" for item in images})) or "none"
    raise BuildError(
        f"{what} has no image for linux/{ARCHITECTURE}; it has: {found}",
        hint=f"use an image that is published for linux/{ARCHITECTURE}",
        code="platform",
    )


def _platform(descriptor: Descriptor) -> str:
    platform = descriptor.platform
    return f"{platform.get('os', '')}/{platform.get('architecture', '')}" if platform else ""


def _is_attestation(descriptor: Descriptor) -> bool:
    kind = descriptor.annotations.get("vnd.docker.reference.type")
    return kind == "attestation-manifest" or descriptor.platform.get("os") == "unknown"
