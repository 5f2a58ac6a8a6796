"""Verify an artifact where it is, without opening it."""

from collections.abc import Mapping
from dataclasses import dataclass

from smolbuild.build.pull import fetch_head, verify_artifact
from smolbuild.core.digest import Digest, digest_file
from smolbuild.core.errors import VerificationError
from smolbuild.model.artifact import decode_config
from smolbuild.model.oci import Descriptor
from smolbuild.model.reference import Reference
from smolbuild.registry.client import RegistryClient
from smolbuild.store.artifact import open_artifact
from smolbuild.store.evidence import StoreEvidence
from smolbuild.store.layout import Store
from smolbuild.trust.keys import PublicKey

__all__ = ["Verification", "verify_local", "verify_remote"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was verified, by whom it is signed, and the checks that passed, in order."""

    digest: Digest
    signed_by: PublicKey
    where: str
    checks: tuple[str, ...]


def verify_local(store: Store, text: str, keys: Mapping[str, PublicKey]) -> Verification:
    """Verify an artifact of the local store: signatures, then every blob's length and digest.

    Raises:
        VerificationError: a check failed; says which.
        UsageError: ``text`` names nothing.

    """
    artifact = open_artifact(store, text)
    index, manifest = artifact.index.descriptor, artifact.manifest.descriptor
    signature, _ = verify_artifact(index, manifest, StoreEvidence(store), keys)
    blobs = {blob.digest: blob for blob in (artifact.manifest.config, *artifact.manifest.layers)}
    for blob in blobs.values():
        _check_blob(store, blob)
    return Verification(
        digest=index.digest,
        signed_by=signature.key,
        where="store",
        checks=(
            *_common_checks(index, manifest),
            f"{len(blobs)} blobs: length and digest",
        ),
    )


def verify_remote(
    reference: Reference, client: RegistryClient, keys: Mapping[str, PublicKey]
) -> Verification:
    """Verify an artifact in its registry: signatures, manifests, config, presence of every blob.

    The blobs' content is checked when they are pulled.

    Raises:
        VerificationError: a check failed; says which.
        RegistryError: the registry failed after retries.

    """
    repository = reference.repository
    head = fetch_head(reference, client, keys)
    index, manifest = head.index.descriptor, head.manifest
    config = bytearray()
    client.pull_blob(repository, manifest.config, config.extend)
    decode_config(bytes(config))
    blobs = {blob.digest: blob for blob in manifest.layers}
    for blob in blobs.values():
        if not client.has_blob(repository, blob):
            raise VerificationError(f"the registry lacks blob {blob.digest}", code="missing-blob")
    return Verification(
        digest=index.digest,
        signed_by=head.signed_by,
        where=reference.registry,
        checks=(
            *_common_checks(index, manifest.descriptor),
            f"{len(blobs)} blobs are in the registry (content is checked when pulled)",
        ),
    )


def _common_checks(index: Descriptor, manifest: Descriptor) -> tuple[str, ...]:
    return (
        f"index {index.digest}: digest, signature, subject",
        f"manifest {manifest.digest}: digest, signature, subject",
        "config: digest, format version, chunk maps",
    )


def _check_blob(store: Store, blob: Descriptor) -> None:
    path = store.path(blob.digest)
    if not store.has(blob.digest):
        raise VerificationError(f"the local store lacks blob {blob.digest}", code="missing-blob")
    if not store.has(blob.digest, blob.size):
        raise VerificationError(f"blob {blob.digest} has the wrong length", code="length")
    if digest_file(path) != blob.digest:
        raise VerificationError(
            f"blob {blob.digest} is damaged",
            hint="remove the artifact with `smolbuild rm`, then pull or build it again",
            code="digest",
        )
