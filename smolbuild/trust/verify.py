"""Verification of signatures and attestations.

The order of the checks is fixed: manifest by digest, referrers with their subject checked, exactly
one signature over the envelope by a key that the *verifier* names, then the statement's type,
subject and predicate type. Nothing read from a registry is believed before its check.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from smolbuild.core.digest import Digest, digest_bytes
from smolbuild.core.errors import RegistryError, VerificationError
from smolbuild.model.oci import MAX_MANIFEST_BYTES, Descriptor
from smolbuild.trust.bundle import parse_bundle
from smolbuild.trust.keys import PublicKey
from smolbuild.trust.referrer import PREDICATE_ANNOTATION, parse_referrer
from smolbuild.trust.statement import Statement, parse_statement

__all__ = ["MAX_CANDIDATES", "Evidence", "Verified", "verify_bundle", "verify_signed"]

MAX_CANDIDATES = 64
"""Referrers that are looked at for one subject; more are refused rather than searched."""

_TELLING = ("bad-signature", "wrong-key", "predicate-mismatch", "subject-mismatch", "malformed")
"""Codes of failed candidates, the most telling first: what the final error says."""
_ABSENT = ("missing", "not-a-signature")
"""Codes of candidates that turned out not to be there, or not to be signatures at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A statement that passed every check, and the key that signed it."""

    statement: Statement
    key: PublicKey
    bundle: Digest


class Evidence(Protocol):
    """Where signatures are found: a registry repository or the local store. All of it is untrusted.

    A source that cannot be reached raises its own error (RegistryError), never an empty answer, so
    that "unsigned" and "unavailable" stay different. Something listed but absent raises
    VerificationError with code ``missing``.
    """

    def referrers(self, subject: Digest) -> Sequence[Descriptor]:
        """Return the manifests said to refer to ``subject``."""

    def manifest(self, descriptor: Descriptor) -> bytes:
        """Return the bytes of a manifest."""

    def blob(self, descriptor: Descriptor) -> bytes:
        """Return the bytes of a blob, at most ``descriptor.size`` of them."""


def verify_bundle(
    bundle: bytes,
    *,
    subject: Digest,
    predicate_type: str,
    keys: Mapping[str, PublicKey],
) -> Statement:
    """Verify a Sigstore bundle and return its statement.

    Args:
        bundle: the bundle's bytes.
        subject: the manifest digest that the statement must be about.
        predicate_type: the exact type the statement must have.
        keys: the trusted keys by their hint; the bundle's hint only selects one of them.

    Raises:
        VerificationError: with the code of the check that failed: ``malformed``, ``wrong-key``,
            ``bad-signature``, ``subject-mismatch`` or ``predicate-mismatch``.

    """
    return _verify(bundle, subject=subject, predicate_type=predicate_type, keys=keys)[0]


def verify_signed(
    subject: Descriptor,
    evidence: Evidence,
    *,
    predicate_type: str,
    keys: Mapping[str, PublicKey],
) -> Verified:
    """Find one valid statement of ``predicate_type`` about ``subject`` by one of ``keys``.

    Anybody can attach rubbish to a subject, so a candidate that fails is passed over as long as
    another one is valid.

    Raises:
        VerificationError: code ``unsigned`` when nothing is attached; the code of the most telling
            failed check when candidates were found and none is valid (``wrong-key``: signed, but
            not by a key you trust).
        SmolbuildError: whatever ``evidence`` raises when it cannot be read.

    """
    candidates = evidence.referrers(subject.digest)
    if not candidates:
        raise VerificationError(
            f"{subject.digest} is not signed: nothing is attached to it",
            hint="only run it if you know where it comes from; its publisher can sign and push it",
            code="unsigned",
        )
    if len(candidates) > MAX_CANDIDATES:
        raise VerificationError(
            f"{subject.digest} has {len(candidates)} referrers, more than the {MAX_CANDIDATES} "
            "that are searched",
            hint="remove what does not belong there from the registry",
            code="too-many-referrers",
        )
    failures: list[VerificationError] = []
    for candidate in _likely_first(candidates, predicate_type):
        try:
            return _try(candidate, subject.digest, evidence, predicate_type, keys)
        except VerificationError as error:
            failures.append(error)
        except RegistryError as error:
            if error.code != "not-found":
                raise  # the registry failed, which says nothing about signatures
            failures.append(VerificationError(error.message, code="missing"))
    raise _summary(subject.digest, predicate_type, failures)


def _try(
    candidate: Descriptor,
    subject: Digest,
    evidence: Evidence,
    predicate_type: str,
    keys: Mapping[str, PublicKey],
) -> Verified:
    if candidate.size > MAX_MANIFEST_BYTES:
        raise VerificationError(f"the referrer {candidate.digest} is too large", code="malformed")
    manifest = _exact(evidence.manifest(candidate), candidate, "referrer manifest")
    layer = parse_referrer(manifest, subject=subject)
    bundle = _exact(evidence.blob(layer), layer, "bundle")
    statement, key = _verify(bundle, subject=subject, predicate_type=predicate_type, keys=keys)
    return Verified(statement=statement, key=key, bundle=layer.digest)


def _verify(
    data: bytes, *, subject: Digest, predicate_type: str, keys: Mapping[str, PublicKey]
) -> tuple[Statement, PublicKey]:
    bundle = parse_bundle(data)
    key = keys.get(bundle.hint)
    if key is None:
        raise VerificationError(
            f"{subject} is signed by a key you do not trust ({_fingerprint(bundle.hint)})",
            hint="if it is the publisher's, give its public key with --key, or put that into keys/ "
            "of the state directory as NAME.pub",
            code="wrong-key",
        )
    if not key.verify(bundle.signed_bytes, bundle.signature):
        raise VerificationError(
            f"the signature over {subject} is not valid for the key {key.fingerprint}",
            hint="the signature or what it covers was altered; get the artifact again",
            code="bad-signature",
        )
    statement = parse_statement(bundle.payload)
    if statement.subject(subject) is None:
        raise VerificationError(
            f"the signed statement is about {statement.subjects[0].digest}, not about {subject}",
            code="subject-mismatch",
        )
    if statement.predicate_type != predicate_type:
        raise VerificationError(
            f"the signed statement is of type {statement.predicate_type[:120]!r}, "
            f"not {predicate_type!r}",
            code="predicate-mismatch",
        )
    return statement, key


def _exact(data: bytes, descriptor: Descriptor, what: str) -> bytes:
    if len(data) != descriptor.size or digest_bytes(data) != descriptor.digest:
        raise VerificationError(
            f"the bytes of the {what} {descriptor.digest} do not match its digest and size",
            code="digest-mismatch",
        )
    return data


def _likely_first(candidates: Sequence[Descriptor], predicate_type: str) -> list[Descriptor]:
    # The annotation is a hint that saves fetches; a wrong one only costs time.
    distinct = {candidate.digest: candidate for candidate in candidates}.values()
    return sorted(distinct, key=lambda c: c.annotations.get(PREDICATE_ANNOTATION) != predicate_type)


def _summary(
    subject: Digest, predicate_type: str, failures: Sequence[VerificationError]
) -> VerificationError:
    def rank(error: VerificationError) -> int:
        return _TELLING.index(error.code) if error.code in _TELLING else len(_TELLING)

    first = min(failures, key=rank)
    code = "unsigned" if first.code in _ABSENT else first.code
    return VerificationError(
        f"{subject} has no valid {predicate_type} statement by a trusted key: {first.message}",
        hint=first.hint,
        code=code,
        details="\n".join(f"{e.code}: {e.message}" for e in failures if e is not first),
    )


def _fingerprint(hint: str) -> str:
    """Return the hint of a bundle as `key show` names keys, or as it is when it is none of ours."""
    try:
        digest = base64.b64decode(hint, validate=True)
    except ValueError:
        return repr(hint[:64])
    return f"sha256:{digest.hex()}" if len(digest) == 32 else repr(hint[:64])
