"""in-toto statements (v1) and the predicates that smolbuild writes, as values.

Parsing is as strict as cosign's protojson reader: unknown members of a statement or a subject are
errors, so that everything that is signed is also understood.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from smolbuild.core.canon import Json
from smolbuild.core.digest import Digest, hex_of, parse_digest
from smolbuild.core.errors import VerificationError
from smolbuild.model.oci import encode_json, parse_json_object

__all__ = [
    "MAX_STATEMENT_BYTES",
    "PROVENANCE_TYPE",
    "SIGN_TYPE",
    "STATEMENT_TYPE",
    "TEST_RESULT_TYPE",
    "Builder",
    "Provenance",
    "Resource",
    "Statement",
    "Subject",
    "parse_statement",
    "provenance_statement",
    "result_statement",
    "signature_statement",
]

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
SIGN_TYPE = "https://sigstore.dev/cosign/sign/v1"
PROVENANCE_TYPE = "https://slsa.dev/provenance/v1"
TEST_RESULT_TYPE = "https://in-toto.io/attestation/test-result/v0.1"

MAX_STATEMENT_BYTES = 4 * 1024 * 1024
_MAX_SUBJECTS = 1024
_MAX_DIGESTS = 32
_HEX = re.compile(r"(?:[0-9a-f]{2})+")
_SUBJECT_TEXTS = ("name", "uri", "downloadLocation", "mediaType")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a statement is about. ``annotations`` are signed: repository and tag are put there."""

    digest: Digest
    name: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Json]:
        """Return the JSON object, as cosign writes it (``annotations`` always present)."""
        value: dict[str, Json] = {"name": self.name} if self.name else {}
        value["digest"] = {"sha256": hex_of(self.digest)}
        value["annotations"] = dict(self.annotations)
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """An in-toto statement: ``predicate`` (of type ``predicate_type``) holds for ``subjects``."""

    subjects: tuple[Subject, ...]
    predicate_type: str
    predicate: Mapping[str, Json] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the bytes to sign: compact JSON in the order cosign writes."""
        return encode_json(
            {
                "_type": STATEMENT_TYPE,
                "subject": [subject.to_json() for subject in self.subjects],
                "predicateType": self.predicate_type,
                "predicate": dict(self.predicate),
            }
        )

    def subject(self, digest: Digest) -> Subject | None:
        """Return the subject with ``digest``, or None: the statement is about something else."""
        return next((item for item in self.subjects if item.digest == digest), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """An in-toto ResourceDescriptor: something that was used or made."""

    name: str = ""
    uri: str = ""
    digest: Mapping[str, str] = field(default_factory=dict)
    """Algorithm (``sha256``, ``gitCommit`` …) to lower-case hex."""
    media_type: str = ""
    annotations: Mapping[str, Json] = field(default_factory=dict)

    def to_json(self) -> dict[str, Json]:
        """Return the JSON object; empty members are left out."""
        value: dict[str, Json] = {
            "name": self.name,
            "uri": self.uri,
            "digest": dict(self.digest),
            "mediaType": self.media_type,
            "annotations": dict(self.annotations),
        }
        return {key: item for key, item in value.items() if item}


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """Who built: ``id`` is a URI per trust domain (a laptop is not the CI)."""

    id: str
    version: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """SLSA provenance v1: how an artifact was made; times are RFC 3339, secrets only named."""

    build_type: str
    """Versioned URI of the page that says what the parameters mean."""
    external_parameters: Mapping[str, Json]
    builder: Builder
    internal_parameters: Mapping[str, Json] = field(default_factory=dict)
    resolved_dependencies: Sequence[Resource] = ()
    invocation_id: str = ""
    started_on: str = ""
    finished_on: str = ""
    byproducts: Sequence[Resource] = ()
    extensions: Mapping[str, Json] = field(default_factory=dict)
    """Members named ``smolbuild_…``, put beside the specification's own in ``runDetails``."""

    def to_json(self) -> dict[str, Json]:
        """Return the predicate's JSON object; optional empty members are left out."""
        definition: dict[str, Json] = {
            "buildType": self.build_type,
            "externalParameters": dict(self.external_parameters),
        }
        if self.internal_parameters:
            definition["internalParameters"] = dict(self.internal_parameters)
        if self.resolved_dependencies:
            definition["resolvedDependencies"] = [r.to_json() for r in self.resolved_dependencies]
        builder: dict[str, Json] = {"id": self.builder.id}
        if self.builder.version:
            builder["version"] = dict(self.builder.version)
        metadata = {
            "invocationId": self.invocation_id,
            "startedOn": self.started_on,
            "finishedOn": self.finished_on,
        }
        details: dict[str, Json] = {"builder": builder}
        if any(metadata.values()):
            details["metadata"] = {key: text for key, text in metadata.items() if text}
        if self.byproducts:
            details["byproducts"] = [r.to_json() for r in self.byproducts]
        details.update(self.extensions)
        return {"buildDefinition": definition, "runDetails": details}


def signature_statement(digest: Digest, annotations: Mapping[str, str] | None = None) -> Statement:
    """Return cosign's plain signature statement over the manifest or index ``digest``.

    cosign's own statement names no repository and no tag: pass them as ``annotations``, which are
    signed and which ``cosign verify -a key=value`` can ask for.
    """
    subject = Subject(digest=digest, annotations=dict(annotations or {}))
    return Statement(subjects=(subject,), predicate_type=SIGN_TYPE)


def provenance_statement(digest: Digest, made: Provenance) -> Statement:
    """Return the SLSA provenance statement for ``digest``."""
    return Statement(
        subjects=(Subject(digest=digest),), predicate_type=PROVENANCE_TYPE, predicate=made.to_json()
    )


def result_statement(
    digest: Digest,
    *,
    result: Literal["PASSED", "WARNED", "FAILED"],
    configuration: Sequence[Resource],
    passed: Sequence[str] = (),
    warned: Sequence[str] = (),
    failed: Sequence[str] = (),
) -> Statement:
    """Return the in-toto test-result statement for ``digest``: health check and restore proof.

    ``configuration`` names what was tested with, by digest (the probe's specification).
    """
    predicate: dict[str, Json] = {
        "result": result,
        "configuration": [item.to_json() for item in configuration],
        "passedTests": list(passed),
        "warnedTests": list(warned),
        "failedTests": list(failed),
    }
    return Statement(
        subjects=(Subject(digest=digest),), predicate_type=TEST_RESULT_TYPE, predicate=predicate
    )


def parse_statement(payload: bytes) -> Statement:
    """Parse the signed payload of an envelope.

    Raises:
        VerificationError: code ``malformed``; says which member.

    """
    value = parse_json_object(payload, "statement", limit=MAX_STATEMENT_BYTES)
    unknown = value.keys() - {"_type", "subject", "predicateType", "predicate"}
    if unknown:
        _bad(f"unknown member {min(unknown)[:80]!r}")
    if value.get("_type") != STATEMENT_TYPE:
        _bad(f"_type is {str(value.get('_type'))[:120]!r}")
    predicate_type = value.get("predicateType")
    if not isinstance(predicate_type, str) or not predicate_type:
        _bad("predicateType is missing")
    predicate = value.get("predicate", {})  # cosign before 3.0.5 left it out
    if not isinstance(predicate, dict):
        _bad("predicate is not an object")
    subjects = value.get("subject")
    if not isinstance(subjects, list) or not 0 < len(subjects) <= _MAX_SUBJECTS:
        _bad(f"subject is not a list of 1 to {_MAX_SUBJECTS} entries")
    return Statement(
        subjects=tuple(_subject(item) for item in subjects),
        predicate_type=predicate_type,
        predicate=predicate,
    )


def _subject(value: object) -> Subject:
    if not isinstance(value, dict):
        _bad("a subject is not an object")
    unknown = value.keys() - {*_SUBJECT_TEXTS, "digest", "annotations", "content"}
    if unknown:
        _bad(f"unknown member {min(unknown)[:80]!r} in a subject")
    if any(not isinstance(value.get(key, ""), str) for key in (*_SUBJECT_TEXTS, "content")):
        _bad("a subject's text is not a string")
    digests = value.get("digest")
    if not isinstance(digests, dict) or not 0 < len(digests) <= _MAX_DIGESTS:
        _bad(f"a subject's digest is not an object of 1 to {_MAX_DIGESTS} entries")
    if not all(isinstance(text, str) and _HEX.fullmatch(text) for text in digests.values()):
        _bad("a subject's digest is not lower-case hex")
    annotations = value.get("annotations", {})
    if not isinstance(annotations, dict):
        _bad("a subject's annotations are not an object")
    try:
        digest = parse_digest(f"sha256:{digests.get('sha256')}")
    except ValueError as error:
        raise VerificationError(
            "statement: a subject has no sha256 digest", code="malformed"
        ) from error
    texts = {key: text for key, text in annotations.items() if isinstance(text, str)}
    return Subject(digest=digest, name=str(value.get("name", "")), annotations=texts)


def _bad(problem: str) -> NoReturn:
    raise VerificationError(f"statement: {problem}", code="malformed")
