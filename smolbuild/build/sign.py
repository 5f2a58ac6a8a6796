"""Sign an artifact of the local store: Sigstore bundles over the index and the machine manifest."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from smolbuild.build.result import Proof
from smolbuild.core.codec import encode
from smolbuild.core.digest import Digest, digest_bytes, hex_of
from smolbuild.core.errors import VerificationError
from smolbuild.core.events import Emit, Message
from smolbuild.core.files import file_lock, write_atomic
from smolbuild.core.home import Home
from smolbuild.model.oci import EMPTY, Descriptor, encode_json
from smolbuild.store.artifact import Artifact
from smolbuild.store.layout import Store
from smolbuild.trust.bundle import sign_statement
from smolbuild.trust.keys import (
    PublicKey,
    Signer,
    generate_key,
    load_private_key,
    load_public_key,
)
from smolbuild.trust.referrer import referrer_manifest
from smolbuild.trust.statement import (
    SIGN_TYPE,
    Resource,
    Statement,
    result_statement,
    signature_statement,
)
from smolbuild.trust.verify import verify_signed

__all__ = [
    "StoreEvidence",
    "add_signature",
    "make_key",
    "obtain_signer",
    "sign_artifact",
    "signing_key",
    "trusted_keys",
]

DEFAULT_KEY = "default"


def signing_key(home: Home, name: str = DEFAULT_KEY) -> Path:
    """Return where the signing key ``name`` of ``home`` is or would be (``NAME.pem``)."""
    return home.keys / f"{name}.pem"


def make_key(home: Home, name: str = DEFAULT_KEY) -> PublicKey:
    """Make the key pair ``NAME.pem`` (0600) and ``NAME.pub`` in ``home``.

    Raises:
        UsageError: the private key exists already.

    """
    path = signing_key(home, name)
    made = generate_key(path)
    _write_public(path, made)
    return made


def obtain_signer(home: Home, key: Path | None, emit: Emit) -> Signer:
    """Return the signer for ``key``, or the home's default key, made on first use.

    Raises:
        UsageError: the key is unreadable, of the wrong kind, or readable by others.

    """
    if key is not None:
        return load_private_key(key)
    path = signing_key(home)
    with file_lock(home.locks / "key", timeout=10, what="the signing key"):
        if not path.exists():
            made = make_key(home)
            emit(Message(level="info", text=f"made the signing key {path} ({made.fingerprint})"))
        signer = load_private_key(path)
        if not path.with_suffix(".pub").exists():  # killed between the two, or lost
            _write_public(path, signer.public)
    return signer


def _write_public(path: Path, public: PublicKey) -> None:
    write_atomic(path.with_suffix(".pub"), public.pem.encode(), mode=0o644)


def trusted_keys(home: Home, extra: Sequence[Path] = ()) -> Mapping[str, PublicKey]:
    """Return the public keys whose signatures are accepted, by their hint.

    They are ``extra`` where given, else every ``*.pub`` in the home's key directory.

    Raises:
        UsageError: a key file is unreadable or not a P-256 public key.

    """
    paths = list(extra) or sorted(home.keys.glob("*.pub"))
    keys = [load_public_key(path) for path in paths]
    return {key.hint: key for key in keys}


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


class StoreEvidence:
    """Finds signatures in the local store (see ``trust.verify.Evidence``)."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def referrers(self, subject: Digest) -> Sequence[Descriptor]:
        """Return what the store lists as referring to ``subject``."""
        return self._store.referrers(subject)

    def manifest(self, descriptor: Descriptor) -> bytes:
        """Return the bytes of a manifest."""
        return self._read(descriptor)

    def blob(self, descriptor: Descriptor) -> bytes:
        """Return the bytes of a blob."""
        return self._read(descriptor)

    def _read(self, descriptor: Descriptor) -> bytes:
        if not self._store.has(descriptor.digest):
            raise VerificationError(f"{descriptor.digest} is not in the store", code="missing")
        return self._store.read(descriptor.digest)


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
