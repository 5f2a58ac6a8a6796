"""Sign an artifact of the local store: Sigstore bundles over the index and the machine manifest."""

from collections.abc import Sequence

from smolbuild.core.errors import VerificationError
from smolbuild.model.oci import EMPTY, Descriptor
from smolbuild.store.artifact import Artifact
from smolbuild.store.evidence import StoreEvidence
from smolbuild.store.layout import Store
from smolbuild.trust.bundle import sign_statement
from smolbuild.trust.keys import Signer
from smolbuild.trust.referrer import referrer_manifest
from smolbuild.trust.statement import (
    SIGN_TYPE,
    Statement,
    signature_statement,
)
from smolbuild.trust.verify import verify_signed

__all__ = ["add_signature", "sign_artifact"]


def sign_artifact(
    store: Store, artifact: Artifact, signer: Signer, attested: Sequence[Statement], *, now: float
) -> None:
    """Attach signatures to index and manifest, and what is ``attested`` of the manifest to it.

    Idempotent in effect: signing again adds another valid signature.
    """
    index, manifest = artifact.index.descriptor, artifact.manifest.descriptor
    for subject in (index, manifest):
        _attach(store, subject, signature_statement(subject.digest), signer, now)
    for statement in attested:
        _attach(store, manifest, statement, signer, now)


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
