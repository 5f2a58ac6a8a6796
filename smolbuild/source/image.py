"""A container image that has been read and checked as far as its manifest and configuration.

Formats: OCI image-spec v1.1 (``manifest.md``, ``layer.md``) and Docker's image specification v1.2,
which is the same where it matters here.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from smolbuild.core.digest import Digest
from smolbuild.core.errors import VerificationError
from smolbuild.model.oci import Manifest
from smolbuild.source.content import Region, verify_region
from smolbuild.source.image_config import MAX_CONFIG_BYTES, ImageConfig, parse_config

__all__ = ["Layer", "LoadedImage", "OpenBlob", "image_from_manifest"]

OpenBlob = Callable[[Digest], contextlib.AbstractContextManager[Region]]
"""Gives the bytes of a blob by its digest; the bytes are not checked yet."""

_MAX_LAYERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer: where its blob is, and the digests it must have."""

    name: str
    """Names it in errors."""
    open: Callable[[], contextlib.AbstractContextManager[Region]]
    digest: Digest | None
    """Of the blob as stored; None in old Docker archives, which only know ``diff_id``."""
    diff_id: Digest
    """Of the uncompressed tar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedImage:
    """An image whose layers can be merged. ``digest`` identifies it in the provenance key."""

    layers: tuple[Layer, ...]
    config: ImageConfig
    digest: Digest
    config_digest: Digest
    """Of the configuration: what Docker calls the image's ID."""


def image_from_manifest(manifest: Manifest, open_blob: OpenBlob, *, what: str) -> LoadedImage:
    """Return the image of ``manifest``, with its configuration read and checked.

    Raises:
        VerificationError: the configuration does not have its digest or does not fit the manifest.
        BuildError: a blob is missing, or the platform is not ours.

    """
    with open_blob(manifest.config.digest) as region:
        data = region.read(limit=MAX_CONFIG_BYTES, what=f"the configuration of {what}")
        verify_region(region, manifest.config.digest, what=f"the configuration of {what}")
    config, diff_ids = parse_config(data, f"the configuration of {what}")
    if len(diff_ids) != len(manifest.layers) or len(diff_ids) > _MAX_LAYERS:
        raise VerificationError(
            f"{what}: {len(manifest.layers)} layers, but {len(diff_ids)} diff ids", code="malformed"
        )
    layers = []
    for descriptor, diff_id in zip(manifest.layers, diff_ids, strict=True):
        layers.append(
            Layer(
                name=f"layer {descriptor.digest} of {what}",
                open=lambda digest=descriptor.digest: open_blob(digest),  # type: ignore[misc]
                digest=descriptor.digest,
                diff_id=diff_id,
            )
        )
    return LoadedImage(
        layers=tuple(layers),
        config=config,
        digest=manifest.descriptor.digest,
        config_digest=manifest.config.digest,
    )
