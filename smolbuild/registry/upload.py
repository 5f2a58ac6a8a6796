"""Blobs to a registry: streamed, checked against their digest on the way, resumed after a cut.

Nothing here holds more than one piece (256 KiB) of a blob in memory.
"""

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING
from urllib.parse import quote

from smolbuild.core.errors import HostError, RegistryError, VerificationError
from smolbuild.model.oci import Descriptor
from smolbuild.registry.problems import header_digest, refused, unreachable, wrong_bytes
from smolbuild.registry.retry import PROGRESS_BYTES, RETRYABLE, CutError, Stop, retry_after
from smolbuild.registry.tokens import Scope, push_scope

if TYPE_CHECKING:
    import requests

    from smolbuild.registry.session import Session

__all__ = ["OpenBlob", "Progress", "has_blob", "mount_blob", "push_blob"]

OpenBlob = Callable[[], IO[bytes]]
"""Opens a blob's content from its beginning; called again for every attempt, closed after it."""
Progress = Callable[[int], None]
"""Receives how many bytes of the blob are done; may go back after a cut."""

_PIECE = 256 * 1024
_RANGE = re.compile(r"(?:bytes=)?0-(\d{1,19})")
_TAKEN = frozenset({200, 201, 202, 204})
_LOST_UPLOAD = frozenset({400, 404, 409, 410, 412, 416})
"""Answers after which an upload is looked at anew, unless they say that the bytes are wrong."""


def has_blob(
    session: "Session",
    repository: str,
    descriptor: Descriptor,
    *,
    scope: Scope,
    stop: Stop | None = None,
) -> bool:
    """Return whether the repository has the blob with this digest and size.

    Raises:
        RegistryError: the registry cannot be asked, or refuses.

    """
    what = f"look-up of {descriptor.digest} in {repository}"
    url = session.blob_url(repository, descriptor.digest)
    response = session.do_request(url, "HEAD", stream=True, scope=scope, stop=stop, what=what)
    refusal = session.read_refusal(response)
    if refusal.status == 404:
        return False
    if refusal.status != 200:
        raise refused(refusal, registry=session.endpoint.registry, what=what)
    length = response.headers.get("Content-Length")
    return length is None or length == str(descriptor.size)


def mount_blob(session: "Session", repository: str, descriptor: Descriptor, source: str) -> bool:
    """Have the registry take the blob over from repository ``source``, and say whether it did.

    Idempotent. A registry that opens an upload instead is told that it is not wanted.

    Raises:
        RegistryError: the registry cannot be asked, or refuses to write.

    """
    what = f"mount of {descriptor.digest} from {source} in {repository}"
    scope = push_scope(repository, source)
    url = session.endpoint.url(
        f"/v2/{repository}/blobs/uploads/?mount={quote(descriptor.digest)}&from={quote(source)}"
    )
    response = session.do_request(url, "POST", b"", stream=True, scope=scope, what=what)
    refusal = session.read_refusal(response)
    if refusal.status == 201:
        return True
    location = response.headers.get("Location")
    if refusal.status == 202 and location:
        # The registry drops abandoned uploads by itself; this only saves it the wait.
        with contextlib.suppress(CutError, RegistryError):
            upload = session.resolve(url, location)
            session.finish(
                session.do_request(
                    upload, "DELETE", stream=True, scope=scope, retry=False, what=what
                )
            )
    elif refusal.status not in {202, 404}:
        raise refused(refusal, registry=session.endpoint.registry, what=what)
    return False


def push_blob(
    session: "Session",
    repository: str,
    descriptor: Descriptor,
    open_blob: OpenBlob,
    *,
    progress: Progress,
    stop: Stop | None = None,
) -> None:
    """Upload a blob: one streamed PUT, and after a cut the rest from where the registry stands.

    Idempotent: after every failure the registry is asked what it has before anything is sent again,
    so a blob whose last answer was lost is not sent twice.

    Raises:
        VerificationError: the local content is not what the descriptor says.
        RegistryError: the registry refuses it, or too many attempts made no progress.

    """
    upload = _Upload(session, repository, descriptor, open_blob, progress, stop)
    mark = failures = 0
    while True:
        try:
            upload.attempt()
            return
        except CutError as cut:
            failures += 1
            if failures >= session.endpoint.policy.attempts:
                registry = session.endpoint.registry
                raise unreachable(cut, registry=registry, what=upload.what) from cut
            session.wait(failures, after=cut.after, stop=stop)
            if upload.observe(spoiled=isinstance(cut, _SpoiledError)):
                return
        if upload.offset >= mark + PROGRESS_BYTES:
            failures, mark = 0, upload.offset


class _SpoiledError(CutError):
    """What the registry holds of this upload is wrong: begin a new one."""


class _Upload:
    """One blob on its way: where its upload is, and how many bytes of it the registry has."""

    def __init__(
        self,
        session: "Session",
        repository: str,
        descriptor: Descriptor,
        open_blob: OpenBlob,
        progress: Progress,
        stop: Stop | None,
    ) -> None:
        self.what = f"push of {descriptor.digest} to {repository}"
        self.offset = 0
        self._session = session
        self._repository = repository
        self._descriptor = descriptor
        self._open = open_blob
        self._progress = progress
        self._stop = stop
        self._scope = push_scope(repository)
        self._url = ""

    def attempt(self) -> None:
        """Send what the registry does not have yet, and have the blob stored.

        Raises:
            CutError: it may work after another look.

        """
        if not self._url:
            self._begin()
        rest: bytes | _Body = b""
        if self.offset < self._descriptor.size:
            rest = _Body(
                self._descriptor, self._open, self.offset, progress=self._progress, stop=self._stop
            )
        if self.offset and rest:
            span = f"{self.offset}-{self._descriptor.size - 1}"
            response = self._send("PATCH", self._url, rest, {"Content-Range": span})
            self._url = self._session.resolve(
                self._url, response.headers.get("Location") or self._url
            )
            rest = b""
        joint = "&" if "?" in self._url else "?"
        final = f"{self._url}{joint}digest={quote(self._descriptor.digest)}"
        claimed = header_digest(self._send("PUT", final, rest, {}).headers)
        if claimed and claimed != self._descriptor.digest:
            raise wrong_bytes(
                f"it stored {self._descriptor.digest} as something else",
                registry=self._session.endpoint.registry,
                code="digest-mismatch",
            )

    def observe(self, *, spoiled: bool) -> bool:
        """Ask the registry how far the upload got; return True when the blob is there already.

        Registries append whatever is sent, wherever it was meant for: only their own word on the
        offset counts. Without a clear word a new upload is begun.
        """
        session = self._session
        if has_blob(
            session, self._repository, self._descriptor, scope=self._scope, stop=self._stop
        ):
            self._progress(self._descriptor.size)
            return True
        url, self._url, self.offset = self._url, "", 0
        if url and not spoiled:
            response = session.do_request(
                url, stream=True, scope=self._scope, stop=self._stop, what=self.what
            )
            session.finish(response)
            span = _RANGE.fullmatch(response.headers.get("Range", "").strip())
            # "0-0" may mean no byte or one.
            if response.status_code in _TAKEN and span is not None and int(span[1]) > 0:
                done = int(span[1]) + 1
                if done <= self._descriptor.size:
                    self._url = session.resolve(url, response.headers.get("Location") or url)
                    self.offset = done
        self._progress(self.offset)
        return False

    def _begin(self) -> None:
        session = self._session
        url = session.endpoint.url(f"/v2/{self._repository}/blobs/uploads/")
        response = session.do_request(
            url, "POST", b"", stream=True, scope=self._scope, stop=self._stop, what=self.what
        )
        refusal, location = session.read_refusal(response), response.headers.get("Location")
        if refusal.status != 202 or not location:
            raise refused(refusal, registry=session.endpoint.registry, what=self.what)
        self._url, self.offset = session.resolve(url, location), 0

    def _send(
        self, method: str, url: str, data: "bytes | _Body", headers: dict[str, str]
    ) -> "requests.Response":
        session = self._session
        response = session.do_request(
            url,
            method,
            data,
            {"Content-Type": "application/octet-stream", **headers},
            stream=True,
            scope=self._scope,
            retry=False,
            stop=self._stop,
            what=self.what,
        )
        refusal = session.read_refusal(response)
        if refusal.status in _TAKEN:
            return response
        after = retry_after(response.headers, session.endpoint.clock.now())
        if (after or 0) <= session.endpoint.policy.patience:
            wrong = not {"DIGEST_INVALID", "SIZE_INVALID"}.isdisjoint(refusal.codes)
            if wrong and self.offset:
                raise _SpoiledError("it put the resumed upload together wrongly")
            if refusal.status in RETRYABLE or (refusal.status in _LOST_UPLOAD and not wrong):
                reason = f"it answered with status {refusal.status}"
                raise CutError(reason, status=refusal.status, after=after)
        raise refused(refusal, registry=session.endpoint.registry, what=self.what)


class _Body:
    """A request body that streams a blob from ``offset`` on, checking it against its descriptor."""

    def __init__(
        self,
        descriptor: Descriptor,
        open_blob: OpenBlob,
        offset: int,
        *,
        progress: Progress,
        stop: Stop | None,
    ) -> None:
        self._descriptor = descriptor
        self._open = open_blob
        self._offset = offset
        self._progress = progress
        self._stop = stop

    def __len__(self) -> int:
        return self._descriptor.size - self._offset

    def __iter__(self) -> Iterator[bytes]:
        hasher, done, size = hashlib.sha256(), 0, self._descriptor.size
        for piece in self._pieces():
            hasher.update(piece)
            done += len(piece)
            if done > size:
                break
            # The last piece is held back until the whole is known to be right, also when resuming.
            if done == size and "sha256:" + hasher.hexdigest() != self._descriptor.digest:
                raise self._damaged("another digest")
            if self._stop is not None:
                self._stop.check()
            if done > self._offset:
                yield piece[-(done - self._offset) :] if done - len(piece) < self._offset else piece
                self._progress(done)
        if done != size:
            raise self._damaged("more bytes" if done > size else f"{done} bytes")

    def _pieces(self) -> Iterator[bytes]:
        # A local read error must not look like a network error to the HTTP libraries.
        try:
            with self._open() as stream:
                while piece := stream.read(_PIECE):
                    yield piece
        except OSError as error:
            raise HostError(
                f"cannot read the local blob {self._descriptor.digest}: {error.strerror}"
            ) from error

    def _damaged(self, has: str) -> VerificationError:
        return VerificationError(
            f"the local blob {self._descriptor.digest} is damaged: it has {has} "
            f"(expected {self._descriptor.size} bytes with that digest)",
            hint="remove the artifact with `smolbuild rm` and build or pull it again",
            code="local-damage",
        )
