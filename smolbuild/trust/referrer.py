"""The OCI manifest that ties a Sigstore bundle to its subject, as cosign writes and reads it."""

from dataclasses import replace
from datetime import UTC, datetime

from smolbuild.core.digest import Digest
from smolbuild.core.errors import VerificationError
from smolbuild.model.oci import (
    BUNDLE_TYPE,
    EMPTY,
    EMPTY_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    describe,
    encode_json,
    parse_manifest,
)
from smolbuild.trust.bundle import MAX_BUNDLE_BYTES

__all__ = ["PREDICATE_ANNOTATION", "parse_referrer", "referrer_manifest", "rfc3339"]

PREDICATE_ANNOTATION = "dev.sigstore.bundle.predicateType"
_CONTENT_ANNOTATION = "dev.sigstore.bundle.content"
_CREATED_ANNOTATION = "org.opencontainers.image.created"
_LAYER_PREFIX = "application/vnd.dev.sigstore.bundle"


def referrer_manifest(
    bundle: bytes, *, subject: Descriptor, predicate_type: str, created: float
) -> bytes:
    """Return the manifest bytes for ``bundle`` over ``subject``.

    The blobs ``bundle`` and ``model.oci.EMPTY`` must be in the repository before it is put there.
    ``created`` is in seconds since the epoch.
    """
    bare = replace(subject, artifact_type=None, annotations={}, platform={})
    return encode_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": BUNDLE_TYPE,
            "config": describe(EMPTY, EMPTY_TYPE).to_json(),
            "layers": [describe(bundle, BUNDLE_TYPE).to_json()],
            "subject": bare.to_json(),
            "annotations": {
                _CONTENT_ANNOTATION: "dsse-envelope",
                PREDICATE_ANNOTATION: predicate_type,
                _CREATED_ANNOTATION: rfc3339(created),
            },
        }
    )


def parse_referrer(data: bytes, *, subject: Digest) -> Descriptor:
    """Return the descriptor of the bundle in a referrer manifest.

    Raises:
        VerificationError: malformed, not a bundle's referrer (``not-a-signature``), or attached
            to something else than ``subject`` (``subject-mismatch``).

    """
    manifest = parse_manifest(data, "referrer manifest")
    if len(manifest.layers) != 1 or not manifest.layers[0].media_type.startswith(_LAYER_PREFIX):
        raise VerificationError(
            "referrer manifest: it does not hold exactly one Sigstore bundle",
            code="not-a-signature",
        )
    if manifest.subject is None or manifest.subject.digest != subject:
        raise VerificationError(
            f"the referrer manifest {manifest.descriptor.digest} is not attached to {subject}",
            code="subject-mismatch",
        )
    layer = manifest.layers[0]
    if layer.size > MAX_BUNDLE_BYTES:
        raise VerificationError(f"the bundle {layer.digest} is too large", code="malformed")
    return layer


def rfc3339(seconds: float) -> str:
    """Return a time since the epoch in UTC, with second precision, as RFC 3339 writes it."""
    return datetime.fromtimestamp(int(seconds), tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
