"""Connections and bodies with deadlines, below ``session``: what requests and urllib3 leave open.

Importing this module imports requests.
"""

import contextlib
import http.client
import io
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import requests
import requests.adapters
import urllib3
from urllib3.connectionpool import HTTPConnectionPool

from smolbuild.core.clock import Deadline
from smolbuild.registry.retry import CutError, Timeouts

__all__ = ["Adapter", "chunks", "cut_reason", "read_small", "tls_problem"]

_READ = 256 * 1024


def chunks(response: requests.Response, size: int, timeouts: Timeouts) -> Iterator[bytes]:
    """Yield the body of ``response`` as it comes, undecoded, in pieces of at most 256 KiB.

    ``size`` is the length expected: it bounds the time, not the bytes.

    Raises:
        CutError: the connection broke, fell silent, or is slower than the limit.

    """
    deadline = Deadline.after(timeouts.body(size))
    while True:
        try:
            chunk = response.raw.read1(_READ, decode_content=False)
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError) as error:
            raise CutError(cut_reason(error, timeouts)) from error
        if not chunk:
            return
        if deadline.passed():
            raise CutError(f"it sends less than {timeouts.floor // 1024} KiB a second")
        yield chunk


def read_small(response: requests.Response, limit: int, timeouts: Timeouts) -> bytes:
    """Return the body of ``response``, at most ``limit`` + 1 bytes of it.

    Raises:
        CutError: the connection broke, fell silent, or is too slow.

    """
    data = bytearray()
    for chunk in chunks(response, 0, timeouts):
        data += chunk
        if len(data) > limit:
            response.close()
            break
    return bytes(data[: limit + 1])


class Adapter(requests.adapters.HTTPAdapter):
    """An HTTP adapter that knows its open connections and bounds the wait for an answer's head."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.aborted = False
        self._timeouts = timeouts
        self._live: weakref.WeakSet[Any] = weakref.WeakSet()
        super().__init__(pool_connections=4, pool_maxsize=1, max_retries=0)

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> HTTPConnectionPool:
        """Return the pool for a request, made to track its connections."""
        pool: Any = super().get_connection_with_tls_context(*args, **kwargs)
        if not getattr(pool.ConnectionCls, "tracked", False):
            pool.ConnectionCls = self._tracking(pool.ConnectionCls)
        connections: HTTPConnectionPool = pool
        return connections

    def abort(self) -> None:
        """Shut the connections down for good, from any thread; their users get an error."""
        self.aborted = True  # before looking at sockets: a connection just being made looks at it
        for connection in list(self._live):
            sock = getattr(connection, "sock", None)
            if isinstance(sock, socket.socket):
                with contextlib.suppress(OSError):
                    # Not SSLSocket.shutdown, which would pull TLS from under the reading thread.
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _tracking(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def tracked(*args: Any, **kwargs: Any) -> Any:
            connection = make(*args, **kwargs)
            connection.response_class = _BoundedResponse
            self._bound_sending(connection)
            self._live.add(connection)
            return connection

        tracked.tracked = True  # type: ignore[attr-defined]
        return tracked

    def _bound_sending(self, connection: Any) -> None:
        # urllib3 would send the whole request under the limit for connecting, on a new connection
        # as on a used one.
        connect, request, limit = connection.connect, connection.request, self._timeouts.read

        def bounded_connect() -> None:
            connect()
            connection.sock.settimeout(limit)
            if self.aborted:
                raise ConnectionAbortedError

        def bounded_request(*args: Any, **kwargs: Any) -> None:
            if connection.sock is not None:
                connection.timeout = limit
            request(*args, **kwargs)

        connection.connect, connection.request = bounded_connect, bounded_request


class _BoundedResponse(http.client.HTTPResponse):
    """An answer whose head must be complete by a deadline, however slowly its bytes drip in.

    A socket's timeout limits one receive only, and the standard library reads a head byte by byte
    from a buffer that a hostile server can fill one byte at a time, for ever.
    """

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        self._timed = _TimedReader(sock)
        super().__init__(_Readable(self._timed), *args, **kwargs)  # type: ignore[arg-type]

    def begin(self) -> None:
        """Read the head."""
        super().begin()
        self._timed.head_complete()


class _Readable:
    """The one method of a socket that ``http.client.HTTPResponse`` uses."""

    def __init__(self, raw: "_TimedReader") -> None:
        self._raw = raw

    def makefile(self, mode: str) -> io.BufferedReader:
        del mode
        return io.BufferedReader(self._raw)


class _TimedReader(io.RawIOBase):
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._raw: Any = sock.makefile("rb", buffering=0)
        self._timeout = sock.gettimeout()
        # urllib3 has set the read timeout on the socket just before it asks for the answer.
        limit = None if self._timeout is None else 2 * self._timeout
        self._until = None if limit is None else time.monotonic() + limit

    def head_complete(self) -> None:
        if self._until is not None:
            self._until = None
            with contextlib.suppress(OSError):
                self._sock.settimeout(self._timeout)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self._until is not None and self._timeout is not None:
            left = self._until - time.monotonic()
            if left <= 0:
                raise TimeoutError("the head of the answer took too long")
            self._sock.settimeout(min(self._timeout, left))
        count: int | None = self._raw.readinto(buffer)
        return count

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
            super().close()


def cut_reason(error: BaseException, timeouts: Timeouts) -> str:
    """Say in words of our own why an exchange broke off.

    The libraries' messages quote URLs, whose queries may be credentials.
    """
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None:
            break
        if isinstance(seen, urllib3.exceptions.NameResolutionError | socket.gaierror):
            return "its name does not resolve to an address"
        if isinstance(seen, ConnectionRefusedError):
            return "nothing listens there (connection refused)"
        if isinstance(seen, urllib3.exceptions.ProxyError | requests.exceptions.ProxyError):
            return "the HTTP proxy of this machine's environment does not let it through"
        if isinstance(seen, urllib3.exceptions.ConnectTimeoutError) and not isinstance(
            seen, urllib3.exceptions.NewConnectionError
        ):
            return f"no connection within {timeouts.connect:g} s"
        if isinstance(seen, TimeoutError | urllib3.exceptions.ReadTimeoutError):
            return f"no answer within {timeouts.read:g} s"
        inner = getattr(seen, "reason", None) or (seen.args[0] if seen.args else None)
        seen = inner if isinstance(inner, BaseException) else seen.__cause__ or seen.__context__
    return "the connection was cut"


def tls_problem(error: BaseException) -> str:
    """Say what is wrong with a TLS handshake."""
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return "its certificate is not trusted here"
    if "WRONG_VERSION_NUMBER" in text or "record layer failure" in text:
        return "it does not speak TLS"
    return "the handshake failed"
