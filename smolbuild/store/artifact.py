"""Read an artifact of the local store as values: index, machine manifest, config."""

from dataclasses import dataclass

from smolbuild.core.errors import UsageError, VerificationError
from smolbuild.model.artifact import ArtifactConfig, decode_config
from smolbuild.model.oci import (
    ARTIFACT_TYPE,
    CONFIG_TYPE,
    Descriptor,
    Index,
    Manifest,
    parse_index,
    parse_manifest,
)
from smolbuild.store.layout import Store

__all__ = ["Artifact", "choose_child", "load_artifact", "open_artifact"]

_MAX_CONFIG = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One environment artifact: what users pin (the index) and the machine it holds."""

    index: Index
    manifest: Manifest
    config: ArtifactConfig


def choose_child(index: Index) -> Descriptor:
    """Return the descriptor of the machine manifest in ``index``.

    Raises:
        VerificationError: it is not a smolbuild artifact.

    """
    machines = [
        child
        for child in index.manifests
        if ARTIFACT_TYPE in (child.artifact_type, index.artifact_type)
    ]
    if not machines:
        raise VerificationError(
            f"{index.descriptor.digest} is not a smolbuild artifact",
            hint="an image becomes one with `image = …` in a Smolfile and `smolbuild build`",
            code="not-an-artifact",
        )
    return machines[0]


def load_artifact(store: Store, descriptor: Descriptor) -> Artifact:
    """Read index, machine manifest and config; every digest is checked on the way.

    Raises:
        VerificationError: something is missing, damaged or malformed.

    """
    index = parse_index(store.read(descriptor.digest))
    child = choose_child(index)
    manifest = parse_manifest(store.read(child.digest))
    if manifest.config.media_type != CONFIG_TYPE:
        raise VerificationError(f"{child.digest} has no smolbuild machine config")
    config = decode_config(store.read(manifest.config.digest, limit=_MAX_CONFIG))
    return Artifact(index=index, manifest=manifest, config=config)


def open_artifact(store: Store, text: str) -> Artifact:
    """Read the artifact that ``text`` names (see ``Store.resolve``).

    Raises:
        UsageError: nothing or more than one fits.
        VerificationError: as ``load_artifact``.

    """
    descriptor = store.resolve(text)
    if descriptor.artifact_type != ARTIFACT_TYPE and text.startswith("sha256-"):
        raise UsageError(f"{text} names a list of referrers, not an artifact")
    return load_artifact(store, descriptor)
