"""Pull an artifact by reference: verified from the signature down before anything is opened."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from smolbuild.core.digest import Digest
from smolbuild.core.errors import RegistryError, VerificationError
from smolbuild.core.events import Emit, silent
from smolbuild.core.files import require_space
from smolbuild.model.artifact import MAX_CONFIG_BYTES, ArtifactConfig, decode_config
from smolbuild.model.oci import (
    BUNDLE_TYPE,
    Descriptor,
    Index,
    Manifest,
    parse_index,
    parse_manifest,
)
from smolbuild.model.reference import Reference
from smolbuild.registry.client import RegistryClient
from smolbuild.registry.transfer import pull_blobs
from smolbuild.store.artifact import Artifact, choose_child, load_artifact, parse_machine
from smolbuild.store.layout import Store
from smolbuild.trust.bundle import MAX_BUNDLE_BYTES
from smolbuild.trust.keys import PublicKey
from smolbuild.trust.statement import SIGN_TYPE
from smolbuild.trust.verify import MAX_CANDIDATES, Evidence, Verified, verify_signed

__all__ = [
    "Head",
    "Pulled",
    "RegistryEvidence",
    "fetch_head",
    "pull_artifact",
    "pull_head",
    "verify_artifact",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """A verified artifact in the local store, and the bytes that came over the wire."""

    artifact: Artifact
    signed_by: PublicKey
    bytes_pulled: int


class RegistryEvidence:
    """Finds signatures in a registry repository (see ``trust.verify.Evidence``)."""

    def __init__(self, client: RegistryClient, repository: str) -> None:
        self._client = client
        self._repository = repository
        self._listed: dict[Digest, tuple[Descriptor, ...]] = {}

    def referrers(self, subject: Digest) -> Sequence[Descriptor]:
        """Return the bundles that the registry lists as referring to ``subject``."""
        return [e for e in self.attached(subject) if e.artifact_type in {None, BUNDLE_TYPE}]

    def attached(self, subject: Digest) -> Sequence[Descriptor]:
        """Return all that the registry lists as referring to ``subject``; it is asked once."""
        if subject not in self._listed:
            self._listed[subject] = self._client.referrers(self._repository, subject)
        return self._listed[subject]

    def manifest(self, descriptor: Descriptor) -> bytes:
        """Return the bytes of a manifest, digest checked."""
        return self._client.get_manifest(self._repository, descriptor.digest)[0]

    def blob(self, descriptor: Descriptor) -> bytes:
        """Return the bytes of a small blob, digest checked."""
        if descriptor.size > MAX_BUNDLE_BYTES:
            raise VerificationError(f"{descriptor.digest} is too large for a signature")
        data = bytearray()
        self._client.pull_blob(self._repository, descriptor, data.extend)
        return bytes(data)


def verify_artifact(
    index: Descriptor, manifest: Descriptor, evidence: Evidence, keys: Mapping[str, PublicKey]
) -> tuple[Verified, Verified]:
    """Check that one of ``keys`` signed both the index and the machine manifest.

    Raises:
        VerificationError: code ``no-keys``, ``unsigned``, ``wrong-key``, ``bad-signature`` …

    """
    if not keys:
        raise VerificationError(
            "no trusted keys: a signature cannot be checked",
            hint="put the publisher's public key, as `smolbuild key show` there prints it, into "
            "keys/ of the state directory as NAME.pub, or name its file with --key",
            code="no-keys",
        )
    first, second = (
        verify_signed(subject, evidence, predicate_type=SIGN_TYPE, keys=keys)
        for subject in (index, manifest)
    )
    return first, second


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The signed top of an artifact in a registry: its index and machine manifest, verified."""

    index: Index
    index_bytes: bytes
    manifest: Manifest
    manifest_bytes: bytes
    signed_by: PublicKey
    attached: Mapping[Digest, tuple[Descriptor, ...]] = field(default_factory=dict)
    """What the registry lists as referring to index and manifest; nothing of it is verified."""


def fetch_head(reference: Reference, client: RegistryClient, keys: Mapping[str, PublicKey]) -> Head:
    """Fetch index and machine manifest of ``reference`` and verify both signatures.

    Raises:
        VerificationError: a check failed.
        RegistryError: the registry failed after retries, or has nothing of this name.

    """
    repository = reference.repository
    top, _ = client.get_manifest(repository, reference.locator)
    index = parse_index(top)
    child = choose_child(index)
    evidence = RegistryEvidence(client, repository)
    signature, _ = verify_artifact(index.descriptor, child, evidence, keys)
    raw, _ = client.get_manifest(repository, child.digest)
    return Head(
        index=index,
        index_bytes=top,
        manifest=parse_machine(raw),
        manifest_bytes=raw,
        signed_by=signature.key,
        attached={d.digest: tuple(evidence.attached(d.digest)) for d in (index.descriptor, child)},
    )


def pull_artifact(
    store: Store,
    reference: Reference,
    client: RegistryClient,
    keys: Mapping[str, PublicKey],
    *,
    emit: Emit,
) -> Pulled:
    """Fetch the artifact that ``reference`` names into ``store``; only what is missing is fetched.

    The order: index bytes by digest, its signature, machine manifest, its signature, config, then
    the blobs, each with length and digest checked while it streams. A name is given last.
    Idempotent.

    Raises:
        VerificationError: a check failed; nothing is named or materialised.
        RegistryError: the registry failed after retries, or has nothing of this name.

    """
    head = fetch_head(reference, client, keys)
    return pull_head(store, head, reference.repository, client, names=(str(reference),), emit=emit)


def pull_head(
    store: Store,
    head: Head,
    repository: str,
    client: RegistryClient,
    *,
    names: Sequence[str],
    emit: Emit,
    accept: Callable[[ArtifactConfig], None] | None = None,
) -> Pulled:
    """Fetch what a verified ``head`` leads to, and name it ``names`` last. Idempotent.

    Args:
        store: receives it; what is there is not fetched.
        head: from ``fetch_head``.
        repository: where it is.
        client: of its registry.
        names: local names.
        emit: receives the progress.
        accept: called with the config before any other blob is fetched; refuses by raising.

    Raises:
        VerificationError: a check failed; nothing is named.
        RegistryError: the registry failed after retries.

    """
    index, manifest = head.index.descriptor, head.manifest
    with store.lease():
        fetched = _pull(store, client, repository, [manifest.config], emit)
        config = decode_config(store.read(manifest.config.digest, limit=MAX_CONFIG_BYTES))
        if accept is not None:
            accept(config)
        fetched += _pull(store, client, repository, list(manifest.layers), emit)
        store.add_bytes(head.manifest_bytes)
        store.add_bytes(head.index_bytes)
        for subject in (index, manifest.descriptor):
            _keep_signatures(
                store, client, repository, subject, head.attached.get(subject.digest, ())
            )
        store.name(index, *names)
        artifact = load_artifact(store, index)
    return Pulled(artifact=artifact, signed_by=head.signed_by, bytes_pulled=fetched)


def _pull(
    store: Store,
    client: RegistryClient,
    repository: str,
    blobs: Sequence[Descriptor],
    emit: Emit,
) -> int:
    missing = {b.digest: b for b in blobs if not store.has(b.digest, b.size)}
    if not missing:
        return 0
    needed = sum(blob.size for blob in missing.values())
    require_space(store.root, needed, what="pulling the artifact")
    return pull_blobs(client, repository, list(missing.values()), store.ingest, emit=emit)


def _keep_signatures(
    store: Store,
    client: RegistryClient,
    repository: str,
    subject: Descriptor,
    attached: Sequence[Descriptor],
) -> None:
    """Copy what refers to ``subject``, so that it verifies later without the registry.

    Anybody may attach anything: what is not there, fits nothing or is large is passed over.
    """
    signatures_first = sorted(attached, key=lambda entry: entry.artifact_type != BUNDLE_TYPE)
    for entry in signatures_first[:MAX_CANDIDATES]:
        try:
            raw, _ = client.get_manifest(repository, entry.digest)
            manifest = parse_manifest(raw)
            blobs = (manifest.config, *manifest.layers)
            ours = manifest.subject is not None and manifest.subject.digest == subject.digest
            if ours and sum(blob.size for blob in blobs) <= MAX_BUNDLE_BYTES:
                _pull(store, client, repository, blobs, silent)
                store.attach(raw)
        except VerificationError:
            continue
        except RegistryError as error:
            if error.code != "not-found":
                raise
