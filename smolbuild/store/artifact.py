"""Read an artifact of the local store as values: index, machine manifest, config."""

from smolbuild.core.digest import Digest
from smolbuild.core.errors import VerificationError
from smolbuild.core.values import dataclass
from smolbuild.model.artifact import MAX_CONFIG_BYTES, ArtifactConfig, decode_config
from smolbuild.model.oci import (
    ARTIFACT_TYPE,
    CONFIG_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    Index,
    Manifest,
    parse_index,
    parse_manifest,
)
from smolbuild.store.layout import Store, key_name

__all__ = [
    "Artifact",
    "choose_child",
    "find_whole",
    "load_artifact",
    "load_whole",
    "open_artifact",
    "parse_machine",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One environment artifact: what users pin (the index) and the machine it holds."""

    index: Index
    manifest: Manifest
    config: ArtifactConfig


def choose_child(index: Index) -> Descriptor:
    """Return the descriptor of the machine manifest in ``index`` (see ``parse_machine``).

    Raises:
        VerificationError: there is none.

    """
    machines = [child for child in index.manifests if child.media_type == MANIFEST_TYPE]
    if not machines:
        raise _not_an_artifact(index.descriptor.digest)
    return machines[0]


def parse_machine(data: bytes) -> Manifest:
    """Parse a machine manifest.

    Raises:
        VerificationError: malformed, or the manifest of something else than a machine.

    """
    manifest = parse_manifest(data)
    # The type stands here and not in the index: skopeo drops it there and then refuses to copy.
    if manifest.artifact_type != ARTIFACT_TYPE or manifest.config.media_type != CONFIG_TYPE:
        raise _not_an_artifact(manifest.descriptor.digest)
    return manifest


def load_artifact(store: Store, descriptor: Descriptor) -> Artifact:
    """Read index, machine manifest and config; every digest is checked on the way.

    Raises:
        VerificationError: something is missing, damaged or malformed.

    """
    index = parse_index(store.read(descriptor.digest))
    child = choose_child(index)
    manifest = parse_machine(store.read(child.digest))
    config = decode_config(store.read(manifest.config.digest, limit=MAX_CONFIG_BYTES))
    return Artifact(index=index, manifest=manifest, config=config)


def load_whole(store: Store, descriptor: Descriptor) -> Artifact | None:
    """Return the artifact if nothing of it is missing or cut short, else None.

    Index, manifest and config are read and digested; of the other blobs only the length is seen.
    """
    try:
        artifact = load_artifact(store, descriptor)
    except VerificationError:
        return None
    whole = all(store.has(layer.digest, layer.size) for layer in artifact.manifest.layers)
    return artifact if whole else None


def find_whole(store: Store, key: Digest) -> Artifact | None:
    """Return the artifact with the provenance key ``key`` if all of it is here, else None."""
    found = store.find(key_name(key))
    return None if found is None else load_whole(store, found)


def open_artifact(store: Store, text: str) -> Artifact:
    """Read the artifact that ``text`` names (see ``Store.resolve``).

    Raises:
        UsageError: nothing or more than one fits.
        VerificationError: as ``load_artifact``.

    """
    return load_artifact(store, store.resolve(text))


def _not_an_artifact(digest: Digest) -> VerificationError:
    return VerificationError(
        f"{digest} is not a smolbuild artifact",
        hint="an image becomes one with `image = …` in a Smolfile and `smolbuild build`",
        code="not-an-artifact",
    )
