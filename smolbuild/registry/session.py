"""One HTTP session with a registry: oras-py's ``Registry`` with a transport that can be relied on.

Importing this module costs about 140 ms (oras, requests); ``client`` does it on first use. What
oras brings is kept (session, cookie policy, prefix); every request goes through ``do_request``,
which adds deadlines, bounded retries, the token flow by scope, and redirects that carry no
credentials to another host. A session serves one thread at a time.
"""

import contextlib
import functools
import http.client
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

import oras.provider
import requests
import urllib3

from smolbuild import __version__
from smolbuild.core.clock import Clock
from smolbuild.core.digest import Digest
from smolbuild.core.errors import RegistryError, SmolbuildError
from smolbuild.core.events import Emit, Message
from smolbuild.model.reference import is_loopback
from smolbuild.registry.connection import Adapter, cut_reason, read_small, tls_problem
from smolbuild.registry.problems import Refusal, read_refusal, refused, unreachable
from smolbuild.registry.retry import (
    RETRYABLE,
    CutError,
    RetryPolicy,
    Stop,
    Timeouts,
    backoff,
    pause,
    retry_after,
)
from smolbuild.registry.tokens import Answer, Authorizer, Scope

__all__ = ["Endpoint", "Session"]

_MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_DEFAULT_PORTS = {"http": 80, "https": 443}
_SMALL = 64 * 1024
_MAX_TOKEN_ANSWER = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a registry is and how it is spoken to; shared by all sessions of a client."""

    registry: str
    """As references name it; what errors and logins speak of."""
    host: str
    """The host and port that serve its API."""
    plain_http: bool
    verify: bool | str
    """True, or the path of a CA bundle. Certificates are always verified."""
    timeouts: Timeouts
    policy: RetryPolicy
    clock: Clock
    authorizer: Authorizer
    emit: Emit
    """Hears of each exchange that is tried again."""

    @property
    def origin(self) -> str:
        """Scheme, host and port, as ``https://host:443``."""
        return _origin(f"{'http' if self.plain_http else 'https'}://{self.host}")

    def url(self, path: str) -> str:
        """Return the address of an API path that begins with ``/v2/``."""
        return f"{'http' if self.plain_http else 'https'}://{self.host}{path}"


class Session(oras.provider.Registry):
    """An oras ``Registry`` whose requests end in an answer or an error within known time."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(
            hostname=endpoint.host, insecure=endpoint.plain_http, tls_verify=endpoint.verify
        )
        self.endpoint = endpoint
        self._adapter = Adapter(endpoint.timeouts)
        self.session.mount("http://", self._adapter)
        self.session.mount("https://", self._adapter)
        # An explicit no-op keeps requests from putting .netrc entries in place of our header.
        self.session.auth = _no_auth
        self.session.trust_env = not is_loopback(endpoint.host)  # no proxy to this very machine
        self.session.headers.update(
            {"User-Agent": f"smolbuild/{__version__}", "Accept-Encoding": "identity"}
        )

    def blob_url(self, repository: str, digest: Digest) -> str:
        """Return the address of a blob."""
        return self.endpoint.url(f"/v2/{repository}/blobs/{digest}")

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self.session.close()

    def abort(self) -> None:
        """Break the exchange under way in another thread, and any that is tried after it.

        There they end as cut connections. The session can only be closed then.
        """
        self._adapter.abort()

    @property
    def aborted(self) -> bool:
        """Whether ``abort`` was called."""
        return self._adapter.aborted

    def do_request(
        self,
        url: str,
        method: str = "GET",
        data: Any = None,
        headers: dict[str, str] | None = None,
        json: Any = None,
        stream: bool = False,
        *,
        scope: Scope = (),
        retry: bool = True,
        stop: Stop | None = None,
        what: str = "",
    ) -> requests.Response:
        """Send a request and return the answer, whatever its status; the body is still unread.

        Args:
            url: absolute; credentials go along only when it is the registry's own origin.
            method: HTTP method; GET and HEAD follow redirects.
            data: bytes, or an iterable with ``__len__`` that is streamed (then ``retry=False``).
            headers: without ``Authorization``.
            json: value to send as JSON, for oras' own callers.
            stream: False reads the body at once, for oras' own callers.
            scope: what a token must allow; empty takes the registry's word for it.
            retry: try again after cut connections and the statuses in ``RETRYABLE``.
            stop: looked at before every try and during every wait.
            what: what is tried, for errors; the path when empty.

        Raises:
            RegistryError: no answer after all tries, a login is missing, or TLS failed.
            CutError: with ``retry=False`` only: the exchange broke off.
            StoppedError: ``stop`` was set.

        """

        def once() -> requests.Response:
            return self._authorized(
                functools.partial(self._follow, method, url, data, json, dict(headers or {})),
                scope=scope,
                replayable=retry,
            )

        what = what or f"{method} {urlsplit(url).path}"
        response = self._retrying(once, stop=stop, what=what) if retry else _checked(once, stop)
        if not stream:
            response.content  # noqa: B018 - reads and keeps the body, as oras' callers expect
        return response

    def _retrying(
        self, once: Callable[[], requests.Response], *, stop: Stop | None, what: str
    ) -> requests.Response:
        endpoint, failures = self.endpoint, 0
        while True:
            try:
                response = _checked(once, stop)
            except CutError as cut:
                failures += 1
                if failures >= endpoint.policy.attempts:
                    raise unreachable(cut, registry=endpoint.registry, what=what) from cut
                after = None
            else:
                failures += 1
                after = retry_after(response.headers, endpoint.clock.now())
                if (
                    response.status_code not in RETRYABLE
                    or failures >= endpoint.policy.attempts
                    or (after or 0) > endpoint.policy.patience
                ):
                    return response
                response.close()
            self.wait(failures, after=after, stop=stop)

    def finish(self, response: requests.Response) -> bytes:
        """Read the rest of a small answer, so that its connection can be used again, and close it.

        Returns the first 64 KiB of the body; fewer when the connection breaks.
        """
        with response, contextlib.suppress(CutError):
            return read_small(response, _SMALL, self.endpoint.timeouts)
        return b""

    def read_refusal(self, response: requests.Response) -> Refusal:
        """Finish a small answer and return its status with the error codes in it, if any."""
        return read_refusal(response.status_code, self.finish(response))

    def refusal(self, response: requests.Response, what: str) -> SmolbuildError:
        """Finish an answer and return the error that it means."""
        return refused(self.read_refusal(response), registry=self.endpoint.registry, what=what)

    def wait(self, failures: int, *, after: float | None = None, stop: Stop | None = None) -> None:
        """Back off after the given number of failures.

        Raises:
            StoppedError: ``stop`` was set.

        """
        fraction = random.random()  # noqa: S311 - jitter, not a secret
        endpoint = self.endpoint
        seconds = backoff(endpoint.policy, failures=failures, fraction=fraction, after=after)
        text = (
            f"registry {endpoint.registry}: trying again in {seconds:.1f} s (attempt "
            f"{failures + 1} of {endpoint.policy.attempts})"
        )
        endpoint.emit(Message(level="info", text=text))
        pause(endpoint.clock, seconds, stop)

    def _authorized(
        self, send: Callable[[str | None], requests.Response], *, scope: Scope, replayable: bool
    ) -> requests.Response:
        authorizer = self.endpoint.authorizer
        used = authorizer.current(scope, self._exchange)
        response = send(used)
        if response.status_code != 401 or "WWW-Authenticate" not in response.headers:
            return response
        challenge = response.headers["WWW-Authenticate"]
        response.close()
        fresh = authorizer.answer(challenge, scope, used, self._exchange)
        if not replayable:
            raise CutError("the login expired during the transfer")
        return send(fresh)

    def _exchange(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None
    ) -> Answer:
        def once() -> requests.Response:
            return self._send(method, url, body, None, headers)

        with self._retrying(once, stop=None, what="request for a token") as response:
            data = read_small(response, _MAX_TOKEN_ANSWER, self.endpoint.timeouts)
            return Answer(status=response.status_code, body=data[:_MAX_TOKEN_ANSWER])

    def _follow(
        self,
        method: str,
        url: str,
        data: Any,
        json: Any,
        headers: dict[str, str],
        authorization: str | None,
    ) -> requests.Response:
        for _ in range(_MAX_REDIRECTS + 1):
            own = self.is_own(url)
            extra = {"Authorization": authorization} if authorization and own else {}
            response = self._send(method, url, data, json, {**headers, **extra})
            target = response.headers.get("Location")
            if (
                response.status_code not in _REDIRECTS
                or method not in {"GET", "HEAD"}
                or target is None
            ):
                return response
            response.close()
            url = self.resolve(url, target)
        raise RegistryError(
            f"{self.endpoint.registry} redirects in a circle", code="too-many-redirects"
        )

    def resolve(self, base: str, target: str) -> str:
        """Return the absolute address of ``target``, which ``base`` answered with.

        Raises:
            RegistryError: it is not an address, or leads from https to http.

        """
        try:
            url = urljoin(base, target)
            urlsplit(url).port  # noqa: B018 - raises for a port that is no number
        except ValueError as error:
            raise RegistryError(
                f"{self.endpoint.registry} gave an address that cannot be used", code="bad-address"
            ) from error
        self._refuse_downgrade(url)
        return url

    def is_own(self, url: str) -> bool:
        """Return whether ``url`` is on the registry itself."""
        return _origin(url) == self.endpoint.origin

    def _refuse_downgrade(self, url: str) -> None:
        scheme = urlsplit(url).scheme
        if scheme == "https" or (scheme == "http" and self.endpoint.plain_http):
            return
        raise RegistryError(
            f"{self.endpoint.registry} is reached over https but sends on to {scheme or 'nowhere'}",
            hint="the registry, or the proxy before it, is misconfigured; tell its owner",
            code="insecure-redirect",
        )

    def _send(
        self, method: str, url: str, data: Any, json: Any, headers: Mapping[str, str]
    ) -> requests.Response:
        # The adapter is called directly: requests' own send would read the whole body of a
        # redirect into memory and look for .netrc entries for the host it points to.
        timeouts, registry = self.endpoint.timeouts, self.endpoint.registry
        try:
            request = requests.Request(method, url, headers=dict(headers), data=data, json=json)
            prepared = self.session.prepare_request(request)
            settings: dict[str, Any] = {
                **self.session.merge_environment_settings(url, {}, True, self.endpoint.verify, None)
            }
            return self._adapter.send(
                prepared, timeout=(timeouts.connect, timeouts.read), **settings
            )
        except requests.exceptions.SSLError as error:
            raise RegistryError(
                f"no trusted TLS connection to {registry}: {tls_problem(error)}",
                hint="for a private CA set SSL_CERT_FILE or REQUESTS_CA_BUNDLE to its certificate; "
                "a registry without TLS needs --plain-http",
                code="tls",
            ) from error
        except (requests.exceptions.ConnectionError, requests.exceptions.Timeout) as error:
            raise CutError(cut_reason(error, timeouts)) from error
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError) as error:
            if isinstance(error, requests.exceptions.RequestException):
                raise RegistryError(
                    f"{registry}: the address of the {method} request cannot be used",
                    code="bad-address",
                ) from error
            raise CutError(cut_reason(error, timeouts)) from error


def _checked(once: Callable[[], requests.Response], stop: Stop | None) -> requests.Response:
    if stop is not None:
        stop.check()
    return once()


def _no_auth(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request


def _origin(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
        return f"{parts.scheme}://{parts.hostname}:{port}"
    except ValueError:
        return ""
