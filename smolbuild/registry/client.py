"""A registry as the rest of smolbuild sees it (OCI distribution-spec v1.1).

Everything that arrives is checked here: manifests by digest and size, blobs by digest and length.
An answer that cannot be had is a RegistryError (exit 5), an answer with wrong bytes a
VerificationError (exit 4); an empty list or None is only ever the registry's own word.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self

from smolbuild.core.clock import Clock, SystemClock
from smolbuild.core.digest import Digest
from smolbuild.core.errors import RegistryError
from smolbuild.core.events import Emit, silent
from smolbuild.model.oci import Descriptor
from smolbuild.model.reference import DOCKER_HUB, Reference, is_loopback
from smolbuild.registry import download, manifests, referrers, upload
from smolbuild.registry.credentials import Credentials, load_credentials
from smolbuild.registry.retry import RetryPolicy, Stop, Timeouts
from smolbuild.registry.tokens import Authorizer, pull_scope

if TYPE_CHECKING:
    from smolbuild.registry.session import Endpoint, Session

__all__ = ["RegistryClient", "ca_bundle", "connect"]

_HUB_API = "registry-1.docker.io"
_MAX_THREADS = 32


class RegistryClient:
    """Talks to one registry. Safe to use from any thread; close it, or use it as a context manager.

    Args:
        registry: host and optional port, as in ``Reference.registry``.
        credentials: Docker's logins (see ``load_credentials``); none when omitted.
        plain_http: True for HTTP without TLS, False for TLS; None: HTTP on loopback only.
        ca: path of a CA bundle to trust instead of the default one.
        clock: for back-off and token lifetimes.
        threads: how many blobs ``transfer`` moves at once by default.
        timeouts: limits of one exchange.
        retries: how often and how patiently to try again.

    """

    def __init__(
        self,
        registry: str,
        *,
        credentials: Credentials | None = None,
        plain_http: bool | None = None,
        ca: str | None = None,
        clock: Clock | None = None,
        threads: int = 4,
        timeouts: Timeouts | None = None,
        retries: RetryPolicy | None = None,
        emit: Emit = silent,
    ) -> None:
        self.registry = registry
        self.threads = max(1, min(threads, _MAX_THREADS))
        self._plain_http = is_loopback(registry) if plain_http is None else plain_http
        self._ca = ca
        self._clock = clock or SystemClock()
        self._timeouts = timeouts or Timeouts()
        self._policy = retries or RetryPolicy()
        self._emit = emit
        self._authorizer = Authorizer(
            registry=registry,
            credentials=credentials or Credentials(),
            plain_http=self._plain_http,
            clock=self._clock,
        )
        self._lock = threading.Lock()
        self._idle: list[Session] = []
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; those in use close when they are given back. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()

    def head_manifest(self, reference: Reference) -> Descriptor | None:
        """Return what ``reference`` names now, or None when the registry does not have it.

        The answer is the registry's word: ``get_manifest`` by the digest in it checks the bytes.

        Raises:
            RegistryError: the registry cannot be asked, or refuses.
            VerificationError: it answers a digest with another one.

        """
        with self.session() as session:
            return manifests.head_manifest(session, reference.repository, reference.locator)

    def get_manifest(self, repository: str, reference: str) -> tuple[bytes, Descriptor]:
        """Return the raw bytes of a manifest or index by tag or digest, and their descriptor.

        Raises:
            RegistryError: it is not there (``not-found``), or the registry fails or refuses.
            VerificationError: the bytes do not have the digest asked for or claimed, are more than
                4 MiB, or say that they are of another type.

        """
        with self.session() as session:
            return manifests.get_manifest(session, repository, reference)

    def put_manifest(
        self, repository: str, reference: str, data: bytes, media_type: str
    ) -> Descriptor:
        """Store a manifest or index under a tag or its digest. Idempotent.

        Raises:
            RegistryError: too large, refused (a blob it names is missing, for example), no answer.
            VerificationError: the registry stored it under another digest.

        """
        with self.session() as session:
            return manifests.put_manifest(session, repository, reference, data, media_type)[0]

    def has_blob(self, repository: str, descriptor: Descriptor) -> bool:
        """Return whether the repository has this blob; RegistryError when it cannot be asked."""
        with self.session() as session:
            return upload.has_blob(session, repository, descriptor, scope=pull_scope(repository))

    def mount_blob(self, repository: str, descriptor: Descriptor, source: str) -> bool:
        """Take a blob over from repository ``source`` of the same registry; say whether it worked.

        Idempotent. Raises RegistryError when the registry cannot be asked or refuses to write.
        """
        with self.session() as session:
            return upload.mount_blob(session, repository, descriptor, source)

    def push_blob(
        self,
        repository: str,
        descriptor: Descriptor,
        open_blob: Callable[[], IO[bytes]],
        progress: Callable[[int], None] | None = None,
        *,
        stop: Stop | None = None,
    ) -> None:
        """Upload a blob from a stream that can be opened again; idempotent (``upload.push_blob``).

        ``progress`` receives the bytes done so far.
        """
        with self.session(stop) as session:
            upload.push_blob(
                session, repository, descriptor, open_blob, progress=progress or _quiet, stop=stop
            )

    def pull_blob(
        self,
        repository: str,
        descriptor: Descriptor,
        sink: Callable[[bytes], object] | IO[bytes],
        progress: Callable[[int], None] | None = None,
        *,
        stop: Stop | None = None,
    ) -> None:
        """Download a blob into a function or file; see ``download.pull_blob``.

        What the sink received is verified only when this returns.
        """
        receive = sink if callable(sink) else sink.write
        with self.session(stop) as session:
            download.pull_blob(
                session, repository, descriptor, receive, progress=progress or _quiet, stop=stop
            )

    def referrers(
        self, repository: str, digest: Digest, artifact_type: str | None = None
    ) -> tuple[Descriptor, ...]:
        """Return what the registry says refers to ``digest``; nothing of it is verified.

        Uses the referrers API, or the fallback tag where the registry has none.

        Raises:
            RegistryError: the registry cannot be asked: never an empty answer instead.
            VerificationError: the list is malformed or too long to be honest.

        """
        with self.session() as session:
            return referrers.list_referrers(session, repository, digest, artifact_type)

    def attach(self, repository: str, manifest: bytes) -> Descriptor:
        """Store a manifest that has a ``subject`` by its digest, so that ``referrers`` finds it.

        Its blobs must be there already. Idempotent; also updates the fallback tag's index where the
        registry has no referrers API.

        Raises:
            RegistryError: refused, no answer, or others change the fallback index all the time.

        """
        with self.session() as session:
            return referrers.attach(session, repository, manifest)

    def tags(self, repository: str) -> tuple[str, ...]:
        """Return the repository's tags in the registry's order.

        Raises:
            RegistryError: no such repository (``name-unknown``), or the registry cannot be asked.

        """
        with self.session() as session:
            return manifests.list_tags(session, repository)

    @contextlib.contextmanager
    def session(self, stop: Stop | None = None) -> Iterator["Session"]:
        """Lend a session to the calling thread; ``stop`` breaks what it does."""
        session = self._borrow()
        if stop is not None:
            stop.watch(session)
        try:
            yield session
        finally:
            if stop is not None:
                stop.unwatch(session)
            with self._lock:
                keep = not self._closed and not session.aborted
                if keep:
                    self._idle.append(session)
            if not keep:
                session.close()

    def _borrow(self) -> "Session":
        with self._lock:
            if self._closed:
                raise RegistryError("the registry client is closed", code="closed")
            if self._idle:
                return self._idle.pop()
        from smolbuild.registry.session import Session

        return Session(self._endpoint())

    def _endpoint(self) -> "Endpoint":
        from smolbuild.registry.session import Endpoint

        return Endpoint(
            registry=self.registry,
            host=_HUB_API if self.registry == DOCKER_HUB else self.registry,
            plain_http=self._plain_http,
            verify=self._ca or True,
            timeouts=self._timeouts,
            policy=self._policy,
            clock=self._clock,
            authorizer=self._authorizer,
            emit=self._emit,
        )


def connect(
    registry: str,
    environment: Mapping[str, str],
    *,
    plain_http: bool | None = None,
    clock: Clock | None = None,
    threads: int = 4,
    timeouts: Timeouts | None = None,
    retries: RetryPolicy | None = None,
    emit: Emit = silent,
) -> RegistryClient:
    """Return a client with the logins and the CA bundle that ``environment`` names; no traffic yet.

    ``emit`` hears of each exchange that is tried again.

    Raises:
        UsageError: Docker's configuration is malformed.

    """
    return RegistryClient(
        registry,
        credentials=load_credentials(environment),
        plain_http=plain_http,
        ca=ca_bundle(environment),
        clock=clock,
        threads=threads,
        timeouts=timeouts,
        retries=retries,
        emit=emit,
    )


def ca_bundle(environment: Mapping[str, str]) -> str | None:
    """Return the CA bundle that the usual variables name, the first one set; None: the default."""
    names = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
    return next((environment[name] for name in names if environment.get(name)), None)


def _quiet(done: int) -> None:
    del done
