"""Sign an artifact of the local store: Sigstore bundles over the index and the machine manifest."""

from collections.abc import Sequence

from smolbuild.build.result import Proof
from smolbuild.core.codec import encode
from smolbuild.core.digest import digest_bytes, hex_of
from smolbuild.core.errors import VerificationError
from smolbuild.model.oci import EMPTY, Descriptor, encode_json
from smolbuild.store.artifact import Artifact
from smolbuild.store.evidence import StoreEvidence
from smolbuild.store.layout import Store
from smolbuild.trust.bundle import sign_statement
from smolbuild.trust.keys import Signer
from smolbuild.trust.referrer import referrer_manifest
from smolbuild.trust.statement import (
    SIGN_TYPE,
    Resource,
    Statement,
    result_statement,
    signature_statement,
)
from smolbuild.trust.verify import verify_signed

__all__ = ["add_signature", "sign_artifact"]


def sign_artifact(
    store: Store, artifact: Artifact, signer: Signer, proofs: Sequence[Proof], *, now: float
) -> None:
    """Attach signatures to index and manifest, and the proof's test result to the manifest.

    Idempotent in effect: signing again adds another valid signature.
    """
    index, manifest = artifact.index.descriptor, artifact.manifest.descriptor
    for subject in (index, manifest):
        _attach(store, subject, signature_statement(subject.digest), signer, now)
    _attach(store, manifest, _proof_statement(artifact, proofs), signer, now)


def add_signature(store: Store, artifact: Artifact, signer: Signer, *, now: float) -> bool:
    """Sign an artifact that was built and proven before, unless ``signer`` did; say whether it did.

    Idempotent.
    """
    keys = {signer.public.hint: signer.public}
    added = False
    for subject in (artifact.index.descriptor, artifact.manifest.descriptor):
        try:
            verify_signed(subject, StoreEvidence(store), predicate_type=SIGN_TYPE, keys=keys)
        except VerificationError:
            _attach(store, subject, signature_statement(subject.digest), signer, now)
            added = True
    return added


def _attach(
    store: Store, subject: Descriptor, statement: Statement, signer: Signer, now: float
) -> None:
    bundle = sign_statement(statement, signer)
    store.add_bytes(bundle)
    store.add_bytes(EMPTY)
    store.attach(
        referrer_manifest(
            bundle, subject=subject, predicate_type=statement.predicate_type, created=now
        )
    )


def _proof_statement(artifact: Artifact, proofs: Sequence[Proof]) -> Statement:
    config = artifact.config
    probes = {"services": encode(config.services), "health": encode(config.health)}
    specification = digest_bytes(encode_json(probes))
    return result_statement(
        artifact.manifest.descriptor.digest,
        result="PASSED",
        configuration=[Resource(name="probes", digest={"sha256": hex_of(specification)})],
        passed=[
            *(["health"] if config.health is not None else []),
            *(f"restore-proof fork {n}: {p.ready_ms} ms" for n, p in enumerate(proofs, 1)),
        ],
    )
