"""Manifests and tags: raw bytes, checked against digest, size and type."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from smolbuild.core.digest import Digest, digest_bytes, parse_digest
from smolbuild.core.errors import RegistryError, VerificationError
from smolbuild.model.oci import (
    DOCKER_LIST_TYPE,
    DOCKER_MANIFEST_TYPE,
    INDEX_TYPE,
    MANIFEST_TYPE,
    MAX_MANIFEST_BYTES,
    Descriptor,
    parse_json_object,
)
from smolbuild.registry.problems import header_digest, printable, unreachable, wrong_bytes
from smolbuild.registry.retry import CutError
from smolbuild.registry.tokens import Scope, pull_scope, push_scope

if TYPE_CHECKING:
    import requests

    from smolbuild.registry.session import Session

__all__ = [
    "MANIFEST_TYPES",
    "content_type",
    "fetch",
    "fetch_manifest",
    "get_manifest",
    "head_manifest",
    "list_tags",
    "pages",
    "put_manifest",
]

MANIFEST_TYPES = (INDEX_TYPE, MANIFEST_TYPE, DOCKER_LIST_TYPE, DOCKER_MANIFEST_TYPE)
_ACCEPT = ", ".join(MANIFEST_TYPES)
_MAX_TAGS = 100_000
_MAX_PAGES = 1000


def head_manifest(session: "Session", repository: str, reference: str) -> Descriptor | None:
    """Return the descriptor the registry claims for ``reference``; None when it has none."""
    what = f"look-up of {repository} {reference}"
    response = session.do_request(
        _url(session, repository, reference),
        "HEAD",
        headers={"Accept": _ACCEPT},
        stream=True,
        scope=pull_scope(repository),
        what=what,
    )
    if response.status_code == 404:
        session.finish(response)
        return None
    if response.status_code != 200:
        raise session.refusal(response, what)
    session.finish(response)
    claimed, length = header_digest(response.headers), response.headers.get("Content-Length", "")
    if not claimed or not length.isdigit():
        return get_manifest(session, repository, reference)[1]  # a registry that says too little
    _check_claim(session, repository, reference, claimed)
    return Descriptor(
        media_type=_checked_type(session, response.headers, what),
        digest=_parse_claim(session, claimed),
        size=int(length),
    )


def get_manifest(session: "Session", repository: str, reference: str) -> tuple[bytes, Descriptor]:
    """Return raw bytes and descriptor; see ``RegistryClient.get_manifest``."""
    data, headers = fetch_manifest(session, repository, reference)
    return data, _described(session, repository, reference, data, headers)


def fetch_manifest(
    session: "Session", repository: str, reference: str
) -> tuple[bytes, Mapping[str, str]]:
    """Return raw bytes (at most 4 MiB) and headers of a manifest, its type checked and no more."""
    what = f"pull of {repository} {reference}"
    response, data = fetch(
        session,
        _url(session, repository, reference),
        accept=_ACCEPT,
        scope=pull_scope(repository),
        what=what,
    )
    if response.status_code != 200:
        raise session.refusal(response, what)
    _checked_type(session, response.headers, what)
    return data, response.headers


def put_manifest(
    session: "Session",
    repository: str,
    reference: str,
    data: bytes,
    media_type: str,
    *,
    if_match: str | None = None,
) -> tuple[Descriptor, Mapping[str, str]]:
    """Store a manifest and return its descriptor and the answer's headers. Idempotent.

    Raises:
        RegistryError: code ``changed`` when ``if_match`` no longer holds; else as the client says.

    """
    what = f"push of the manifest {reference} to {repository}"
    if len(data) > MAX_MANIFEST_BYTES:
        raise RegistryError(
            f"the manifest has {len(data):,} bytes, but registries take {MAX_MANIFEST_BYTES:,}",
            hint="use larger chunks or a smaller disk",
            code="manifest-too-large",
        )
    digest = digest_bytes(data)
    headers = {"Content-Type": media_type, **({"If-Match": if_match} if if_match else {})}
    response = session.do_request(
        _url(session, repository, reference),
        "PUT",
        data,
        headers,
        stream=True,
        scope=push_scope(repository),
        what=what,
    )
    if response.status_code == 412 and if_match:
        session.finish(response)
        raise RegistryError(f"{reference} in {repository} was changed meanwhile", code="changed")
    if response.status_code not in {200, 201, 202, 204}:
        raise session.refusal(response, what)
    session.finish(response)
    claimed = header_digest(response.headers)
    if claimed and claimed != digest:
        raise wrong_bytes(
            f"it stored the manifest {digest} as {printable(claimed)}",
            registry=session.endpoint.registry,
            code="digest-mismatch",
        )
    return Descriptor(media_type=media_type, digest=digest, size=len(data)), response.headers


def list_tags(session: "Session", repository: str) -> tuple[str, ...]:
    """Return all tags; see ``RegistryClient.tags``."""
    what = f"list of the tags of {repository}"
    url = session.endpoint.url(f"/v2/{repository}/tags/list")
    found: list[str] = []
    for response, data in pages(session, url, scope=pull_scope(repository), what=what):
        if response.status_code != 200:
            raise session.refusal(response, what)
        listed = parse_json_object(data, what).get("tags")
        if listed is not None and not isinstance(listed, list):
            raise VerificationError(f"{what}: tags is not a list", code="malformed")
        found += [tag for tag in listed or () if isinstance(tag, str)]
        if len(found) > _MAX_TAGS:
            raise VerificationError(f"{what}: more than {_MAX_TAGS:,} tags", code="malformed")
    return tuple(found)


def pages(
    session: "Session",
    url: str,
    *,
    scope: Scope,
    what: str,
    accept: str = "application/json",
    most: int = _MAX_PAGES,
) -> "Iterator[tuple[requests.Response, bytes]]":
    """Yield the answer for ``url`` and for each ``Link: <…>; rel="next"``, bodies at most 4 MiB.

    Raises:
        VerificationError: a link leads to another host, or there are more than ``most`` pages.

    """
    for _ in range(most):
        response, data = fetch(session, url, accept=accept, scope=scope, what=what)
        yield response, data
        following = response.links.get("next", {}).get("url")
        if not following:
            return
        url = session.resolve(url, following)
        if not session.is_own(url):
            raise VerificationError(f"{what}: its next page is on another host", code="malformed")
    raise VerificationError(f"{what}: more than {most:,} pages", code="malformed")


def fetch(
    session: "Session", url: str, *, accept: str, scope: Scope, what: str
) -> "tuple[requests.Response, bytes]":
    """GET a small document: the answer, and the body of a 200 (else empty and still unread).

    A body that breaks off is asked for again within the session's retry policy.

    Raises:
        VerificationError: it has more than 4 MiB.
        RegistryError: no complete answer.

    """
    from smolbuild.registry.connection import read_small

    failures = 0
    while True:
        response = session.do_request(
            url, headers={"Accept": accept}, stream=True, scope=scope, what=what
        )
        if response.status_code != 200:
            return response, b""
        length = response.headers.get("Content-Length", "0")
        if length.isdigit() and int(length) > MAX_MANIFEST_BYTES:
            response.close()
            raise _too_large(session, what)
        try:
            with response:
                data = read_small(response, MAX_MANIFEST_BYTES, session.endpoint.timeouts)
        except CutError as cut:
            failures += 1
            if failures >= session.endpoint.policy.attempts:
                raise unreachable(cut, registry=session.endpoint.registry, what=what) from cut
            session.wait(failures)
            continue
        if len(data) > MAX_MANIFEST_BYTES:
            raise _too_large(session, what)
        return response, data


def content_type(headers: Mapping[str, str]) -> str:
    """Return the media type without its parameters."""
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()


def _described(
    session: "Session",
    repository: str,
    reference: str,
    data: bytes,
    headers: Mapping[str, str],
) -> Descriptor:
    digest, media_type = digest_bytes(data), content_type(headers)
    _check_claim(session, repository, reference, digest)
    claimed = header_digest(headers)
    if claimed.startswith("sha256:") and claimed != digest:
        raise _mismatch(session, repository, reference)
    inside = parse_json_object(data, f"{repository} {reference}").get("mediaType", media_type)
    if inside != media_type:
        raise wrong_bytes(
            f"{repository} {reference} is sent as {media_type} but calls itself "
            f"{printable(str(inside), 120)}",
            registry=session.endpoint.registry,
            code="malformed",
        )
    return Descriptor(media_type=media_type, digest=digest, size=len(data))


def _check_claim(session: "Session", repository: str, reference: str, digest: str) -> None:
    with contextlib.suppress(ValueError):
        if parse_digest(reference) != digest:
            raise _mismatch(session, repository, reference)


def _parse_claim(session: "Session", claimed: str) -> Digest:
    try:
        return parse_digest(claimed)
    except ValueError as error:
        raise RegistryError(
            f"{session.endpoint.registry} names content by {printable(claimed, 100)}; only sha256 "
            "digests are supported",
            code="unsupported-digest",
        ) from error


def _checked_type(session: "Session", headers: Mapping[str, str], what: str) -> str:
    media_type = content_type(headers)
    if media_type not in MANIFEST_TYPES:
        raise RegistryError(
            f"{session.endpoint.registry} answered the {what} with "
            f"{printable(media_type, 120) or 'no content type'}, not a manifest or index",
            hint="check that the address is that of an OCI registry, not of a web page or a proxy",
            code="unexpected-type",
        )
    return media_type


def _url(session: "Session", repository: str, reference: str) -> str:
    return session.endpoint.url(f"/v2/{repository}/manifests/{reference}")


def _mismatch(session: "Session", repository: str, reference: str) -> VerificationError:
    return wrong_bytes(
        f"the manifest {reference} of {repository} does not have the digest asked for or claimed",
        registry=session.endpoint.registry,
        code="digest-mismatch",
    )


def _too_large(session: "Session", what: str) -> VerificationError:
    return wrong_bytes(
        f"{what}: it has more than the {MAX_MANIFEST_BYTES:,} bytes allowed",
        registry=session.endpoint.registry,
        code="too-large",
    )
