"""Referrers: what is attached to a manifest (distribution-spec v1.1, "Listing Referrers").

Registries without the API keep an index under the tag ``sha256-<hex>``, which clients maintain.
What either of them lists is only a set of candidates: whoever reads one checks its digest and its
subject.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import quote

from smolbuild.core.digest import Digest
from smolbuild.core.errors import RegistryError, UsageError, VerificationError
from smolbuild.model.oci import (
    INDEX_TYPE,
    Descriptor,
    encode_json,
    fallback_tag,
    parse_index,
    parse_manifest,
)
from smolbuild.registry.manifests import (
    content_type,
    fetch_manifest,
    pages,
    put_manifest,
)
from smolbuild.registry.tokens import pull_scope

if TYPE_CHECKING:
    from smolbuild.registry.session import Session

__all__ = ["MAX_REFERRERS", "attach", "list_referrers"]

MAX_REFERRERS = 1000
"""More than this for one subject is refused rather than searched."""
_NO_API = frozenset({400, 404, 405, 406, 501})
_ROUNDS = 5
_MAX_PAGES = 100


def list_referrers(
    session: "Session", repository: str, digest: Digest, artifact_type: str | None
) -> tuple[Descriptor, ...]:
    """Return the candidates, at most ``MAX_REFERRERS``; see ``RegistryClient.referrers``.

    An entry without an artifact type is kept whatever type is asked for: old fallback indexes lack
    it.
    """
    found = _from_api(session, repository, digest, artifact_type)
    if found is None:
        found = _from_tag(session, repository, digest)[0]
    if len(found) > MAX_REFERRERS:
        raise VerificationError(
            f"{digest} in {repository} has {len(found)} referrers, more than the {MAX_REFERRERS} "
            "that are searched",
            code="too-many-referrers",
        )
    distinct = {entry.digest: entry for entry in found}.values()
    return tuple(
        entry
        for entry in distinct
        if artifact_type is None or entry.artifact_type in {None, artifact_type}
    )


def attach(session: "Session", repository: str, data: bytes) -> Descriptor:
    """Store a manifest with a subject and make it findable; see ``RegistryClient.attach``."""
    manifest = parse_manifest(data)
    if manifest.subject is None:
        raise UsageError("only a manifest with a subject can be attached", code="no-subject")
    entry = replace(
        manifest.descriptor,
        artifact_type=manifest.artifact_type or manifest.config.media_type,
        annotations=manifest.annotations,
    )
    _, headers = put_manifest(
        session, repository, entry.digest, data, manifest.descriptor.media_type
    )
    subject = manifest.subject.digest
    # Some registries have sent OCI-Subject without having the API, so its word alone is not enough.
    if headers.get("OCI-Subject") != subject or _from_api(session, repository, subject) is None:
        _enter_in_tag(session, repository, subject, entry)
    return entry


def _from_api(
    session: "Session", repository: str, digest: Digest, artifact_type: str | None = None
) -> list[Descriptor] | None:
    """Return the API's list, or None when the registry has no such API."""
    what = f"list of what refers to {digest} in {repository}"
    query = f"?artifactType={quote(artifact_type, safe='')}" if artifact_type else ""
    url = session.endpoint.url(f"/v2/{repository}/referrers/{digest}{query}")
    found: list[Descriptor] = []
    for response, data in pages(
        session,
        url,
        scope=pull_scope(repository),
        what=what,
        accept=INDEX_TYPE,
        most=_MAX_PAGES,
    ):
        if response.status_code in _NO_API:
            session.finish(response)
            return None
        if response.status_code != 200:
            raise session.refusal(response, what)
        if content_type(response.headers) != INDEX_TYPE:
            return None  # a web page of the service around the registry
        found += parse_index(data, what).manifests
        if len(found) > MAX_REFERRERS:
            break
    return found


def _from_tag(
    session: "Session", repository: str, digest: Digest
) -> tuple[list[Descriptor], str | None]:
    """Return the fallback index's entries and its entity tag."""
    try:
        data, headers = fetch_manifest(session, repository, fallback_tag(digest))
    except RegistryError as error:
        if error.code in {"not-found", "name-unknown"}:
            return [], None
        raise
    if content_type(headers) != INDEX_TYPE:
        return [], headers.get("ETag")  # some registries resolve the tag to the subject itself
    return list(parse_index(data, f"referrers of {digest}").manifests), headers.get("ETag")


def _enter_in_tag(session: "Session", repository: str, subject: Digest, entry: Descriptor) -> None:
    """Add ``entry`` to the fallback index: read, change, write, and read again. Idempotent."""
    for failures in range(1, _ROUNDS + 1):
        listed, etag = _from_tag(session, repository, subject)
        if any(other.digest == entry.digest for other in listed):
            return
        try:
            put_manifest(
                session,
                repository,
                fallback_tag(subject),
                _index([*listed, entry]),
                INDEX_TYPE,
                if_match=etag,
            )
        except RegistryError as error:
            if error.code != "changed":
                raise
        # Where If-Match is not honoured another writer may have overwritten it: look again.
        listed, _ = _from_tag(session, repository, subject)
        if any(other.digest == entry.digest for other in listed):
            return
        session.wait(failures)
    raise RegistryError(
        f"the list of what refers to {subject} in {repository} did not keep a new entry",
        hint="somebody else changes it at the same time; push again",
        code="referrers-conflict",
    )


def _index(entries: Sequence[Descriptor]) -> bytes:
    distinct = {entry.digest: entry for entry in entries}.values()
    return encode_json(
        {
            "schemaVersion": 2,
            "mediaType": INDEX_TYPE,
            "manifests": [entry.to_json() for entry in distinct],
        }
    )
