"""Blobs from a registry: streamed, length and digest checked on the way, resumed after a cut."""

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from smolbuild.core.errors import VerificationError
from smolbuild.model.oci import Descriptor
from smolbuild.registry.problems import unreachable, wrong_bytes
from smolbuild.registry.retry import PROGRESS_BYTES, CutError, Stop
from smolbuild.registry.tokens import pull_scope

if TYPE_CHECKING:
    import requests

    from smolbuild.registry.session import Session

__all__ = ["pull_blob"]

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")


def pull_blob(
    session: "Session",
    repository: str,
    descriptor: Descriptor,
    sink: Callable[[bytes], object],
    *,
    progress: Callable[[int], None],
    stop: Stop | None = None,
) -> None:
    """Download a blob into ``sink``, checking length and digest while it streams.

    ``sink`` receives the bytes in order, once each, never more than ``descriptor.size``; they are
    verified only when this returns, so whoever owns the sink must not use them before. After a cut
    the rest is asked for by Range.

    Raises:
        VerificationError: wrong length or wrong digest.
        RegistryError: it is not there, it is refused, or too many attempts made no progress.

    """
    what = f"pull of {descriptor.digest} from {repository}"
    hasher = hashlib.sha256()
    received = mark = failures = 0
    ranged = True
    while received < descriptor.size or not failures:
        try:
            for piece in _receive(
                session, repository, descriptor, received, ranged=ranged, stop=stop, what=what
            ):
                hasher.update(piece)
                sink(piece)
                received += len(piece)
                progress(received)
            break
        except CutError as cut:
            ranged = not isinstance(cut, _NoRangeError)
            if received >= mark + PROGRESS_BYTES:
                failures, mark = 0, received
            failures += 1
            if failures >= session.endpoint.policy.attempts:
                raise unreachable(cut, registry=session.endpoint.registry, what=what) from cut
            session.wait(failures, after=cut.after, stop=stop)
    if "sha256:" + hasher.hexdigest() != descriptor.digest:
        raise wrong_bytes(
            f"the content of {descriptor.digest} in {repository} does not have that digest",
            registry=session.endpoint.registry,
            code="digest-mismatch",
        )


class _NoRangeError(CutError):
    """The registry cannot send from an offset: ask for the whole blob and skip what is there."""


def _receive(
    session: "Session",
    repository: str,
    descriptor: Descriptor,
    received: int,
    *,
    ranged: bool,
    stop: Stop | None,
    what: str,
) -> Iterator[bytes]:
    from smolbuild.registry.connection import chunks

    headers = {"Range": f"bytes={received}-"} if received and ranged else {}
    response = session.do_request(
        session.blob_url(repository, descriptor.digest),
        headers=headers,
        stream=True,
        scope=pull_scope(repository),
        stop=stop,
        what=what,
    )
    with response:
        skip = _begin(session, response, descriptor, received, what)
        position = received - skip
        for chunk in chunks(response, descriptor.size, session.endpoint.timeouts):
            if stop is not None:
                stop.check()
            position += len(chunk)
            if position > descriptor.size:
                raise _wrong_length(session, descriptor, "more")
            dropped = min(skip, len(chunk))
            skip -= dropped
            if len(chunk) > dropped:
                yield chunk[dropped:]
    if position < descriptor.size:
        delimited = "Content-Length" in response.headers or "Transfer-Encoding" in response.headers
        if delimited and response.status_code == 200:
            raise _wrong_length(session, descriptor, "fewer")
        raise CutError("it sent only a part")


def _begin(
    session: "Session",
    response: "requests.Response",
    descriptor: Descriptor,
    received: int,
    what: str,
) -> int:
    """Check the head of a download; return how many bytes of its body are there already."""
    status = response.status_code
    if status == 416 and received:
        raise _NoRangeError("it cannot send from an offset")
    if status == 206 and received:
        span = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
        if span is None or int(span[1]) != received or int(span[2]) >= descriptor.size:
            raise _NoRangeError("it sent another range than asked for")
        if span[3] not in {"*", str(descriptor.size)}:
            raise _wrong_length(session, descriptor, "more or fewer")
        return 0
    if status != 200:
        raise session.refusal(response, what)
    length = response.headers.get("Content-Length", str(descriptor.size))
    if length != str(descriptor.size):
        raise _wrong_length(session, descriptor, "more or fewer")
    return received


def _wrong_length(session: "Session", descriptor: Descriptor, how: str) -> VerificationError:
    return wrong_bytes(
        f"the content of {descriptor.digest} has {how} bytes than the {descriptor.size} declared",
        registry=session.endpoint.registry,
        code="wrong-length",
    )
