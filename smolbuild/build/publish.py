"""Push an artifact: blobs, then manifests, then signatures, and the tag last of all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from smolbuild.core.digest import Digest
from smolbuild.core.errors import UsageError, VerificationError
from smolbuild.core.events import Emit
from smolbuild.model.oci import Descriptor, Manifest, parse_manifest
from smolbuild.model.reference import Reference
from smolbuild.registry.client import RegistryClient
from smolbuild.registry.transfer import push_blobs
from smolbuild.store.artifact import Artifact
from smolbuild.store.layout import Store

__all__ = ["Published", "publish"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Where an artifact was pushed to, and how many bytes went over the wire."""

    reference: Reference
    digest: Digest
    bytes_pushed: int


def publish(
    store: Store,
    artifact: Artifact,
    reference: Reference,
    client: RegistryClient,
    *,
    emit: Emit,
    may_tag: Callable[[], bool] | None = None,
) -> Published:
    """Push ``artifact`` and its signatures to ``reference``; what is there already is skipped.

    The tag moves only after everything it leads to is in the registry and the manifest was read
    back. Idempotent: after a failure, push again. ``may_tag`` is asked right before that; when it
    says no, the tag stays as it is.

    Raises:
        UsageError: the reference names a digest, or the artifact carries no signature.
        RegistryError: the registry failed after retries; the local artifact is intact.
        VerificationError: the local artifact is damaged, or the registry answers other bytes.

    """
    if reference.digest is not None:
        raise UsageError(
            f"{reference}: push to a tag, not to a digest",
            hint="leave out the @sha256:… part",
        )
    repository, tag = reference.repository, reference.tag or "latest"
    index, manifest = artifact.index.descriptor, artifact.manifest.descriptor
    referrers = _referrers(store, index.digest, manifest.digest)
    if not referrers:
        raise UsageError(
            f"{index.digest} carries no signature",
            hint="build it again: a build signs what it made",
            code="unsigned",
        )
    with store.lease():
        wanted: dict[Digest, Descriptor] = {}
        for entry in (artifact.manifest, *(parsed for _, parsed in referrers)):
            for blob in (entry.config, *entry.layers):
                wanted[blob.digest] = blob
        sent = push_blobs(
            client,
            repository,
            [(blob, _opener(store, blob)) for blob in wanted.values()],
            emit=emit,
        )
        data = store.read(manifest.digest)
        client.put_manifest(repository, manifest.digest, data, manifest.media_type)
        top = store.read(index.digest)
        client.put_manifest(repository, index.digest, top, index.media_type)
        for raw, _ in referrers:
            client.attach(repository, raw)
        back, _ = client.get_manifest(repository, index.digest)
        if back != top:
            raise VerificationError(
                f"{reference.registry} does not return the index that was pushed",
                code="pull-back",
            )
        if may_tag is None or may_tag():
            client.put_manifest(repository, tag, top, index.media_type)
    return Published(reference=reference, digest=index.digest, bytes_pushed=sent)


def _referrers(store: Store, *subjects: Digest) -> list[tuple[bytes, Manifest]]:
    found = []
    for subject in subjects:
        for entry in store.referrers(subject):
            raw = store.read(entry.digest)
            found.append((raw, parse_manifest(raw)))
    return found


def _opener(store: Store, blob: Descriptor) -> Callable[[], IO[bytes]]:
    return lambda: store.path(blob.digest).open("rb")
