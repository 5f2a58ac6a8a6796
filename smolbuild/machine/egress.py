"""The host's side of the allow-list: an HTTP proxy for guests without a network device.

Each connection that a guest program opens to 127.0.0.1:3128 arrives as one socket. One request per
connection is served (``CONNECT`` or an absolute ``http://`` URL), checked against the allow-list,
and carried to the checked address, or through the proxy that the host itself needs.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace

from smolbuild.core.clock import Deadline
from smolbuild.machine.egress_account import Account
from smolbuild.machine.egress_http import (
    HEAD_LIMIT,
    BadRequestError,
    ProxyRequest,
    answer,
    parse_request,
    parse_response,
)
from smolbuild.machine.egress_route import Resolve, Route, open_route, resolve_on_host
from smolbuild.machine.egress_rules import Rules
from smolbuild.machine.relay import copy_bytes, read_head, relay
from smolbuild.model.egress import EgressRecord

__all__ = ["Egress"]

_HEAD_SECONDS = 30.0
_CONNECT_SECONDS = 30.0
_IDLE_SECONDS = 300.0
_MAX_CONNECTIONS = 128
_SETTLE_SECONDS = 5.0


class Egress:
    """The proxy of one machine; denies everything until ``allow``. Safe from any thread.

    Args:
        environment: where the host's own proxy is named (``HTTPS_PROXY``, ``NO_PROXY`` …).
        resolve: gives the addresses of a name, by a deadline.

    """

    def __init__(
        self, *, environment: Mapping[str, str], resolve: Resolve = resolve_on_host
    ) -> None:
        self._environment = environment
        self._resolve = resolve
        self._lock = threading.Condition()
        self._rules = Rules()
        self._account = Account()
        self._open: set[socket.socket] = set()
        self._closed = False

    def allow(self, hosts: tuple[str, ...] | None, cidrs: tuple[str, ...] = ()) -> None:
        """Let these hosts and networks through from now on; None: nothing.

        Raises:
            ValueError: an entry is neither name, pattern, address nor network.

        """
        rules = Rules() if hosts is None else Rules.parse(hosts, cidrs)
        with self._lock:
            self._rules = rules

    def accept(self, connection: socket.socket) -> None:
        """Serve ``connection`` from a thread of its own; returns at once and owns the socket."""
        with self._lock:
            full = self._closed or len(self._open) >= _MAX_CONNECTIONS
            if not full:
                self._open.add(connection)
        if full:
            connection.close()
            return
        threading.Thread(target=self._serve, args=(connection,), name="egress", daemon=True).start()

    def settle(self) -> None:
        """Abort what is open and wait until it is accounted for, at most 5 s."""
        self._abort()
        with self._lock:
            self._lock.wait_for(lambda: not self._open, timeout=_SETTLE_SECONDS)

    def take_records(self) -> tuple[EgressRecord, ...]:
        """Return the requests since the last call; what is open counts as it stands, once."""
        return self._account.take()

    def close(self) -> None:
        """Abort all connections and take no more. Idempotent."""
        with self._lock:
            self._closed = True
        self._abort()

    def _abort(self) -> None:
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError):  # either end went away: there is nobody to tell
                self._answer(connection)
        finally:
            self._forget(connection)
            connection.close()

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
            self._lock.notify_all()

    def _answer(self, guest: socket.socket) -> None:
        deadline = Deadline.after(_HEAD_SECONDS)
        try:
            head, rest = read_head(guest, HEAD_LIMIT, deadline)
            if not head:
                return
            request = parse_request(head)
        except BadRequestError as error:
            _refuse(guest, error)
            return
        record = EgressRecord(host=request.host, port=request.port, url=request.url, status=0)
        number = self._account.begin(record)
        try:
            with self._lock:
                rules = self._rules
            route = open_route(
                request,
                rules,
                environment=self._environment,
                resolve=self._resolve,
                deadline=Deadline.after(_CONNECT_SECONDS),
            )
            with self._closing(route.socket):
                serve = self._tunnel if request.tunnel else self._forward
                record = serve(guest, rest, request, route, record)
        except BadRequestError as error:
            record = replace(record, status=error.status, denied=error.status == 403)
            _refuse(guest, error)
        finally:
            self._account.end(number, record)

    def _tunnel(
        self,
        guest: socket.socket,
        rest: bytes,
        request: ProxyRequest,
        route: Route,
        record: EgressRecord,
    ) -> EgressRecord:
        del request
        guest.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        sent, received = relay(guest, route.socket, first=rest, idle=_IDLE_SECONDS)
        return replace(record, status=200, sent=sent, received=received)

    def _forward(
        self,
        guest: socket.socket,
        rest: bytes,
        request: ProxyRequest,
        route: Route,
        record: EgressRecord,
    ) -> EgressRecord:
        server = route.socket
        try:
            server.settimeout(_IDLE_SECONDS)
            server.sendall(request.head(absolute_host=route.absolute_host, extra=route.headers))
            if request.expects_continue and not rest:
                guest.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            sent = copy_bytes(
                guest, server, first=rest, length=request.body_length, idle=_IDLE_SECONDS
            )
            status = 100
            while status < 200:  # an interim answer is of no use to the guest
                head, first = read_head(server, HEAD_LIMIT, Deadline.after(_IDLE_SECONDS))
                status, clean, length = parse_response(head, request.method)
        except OSError as error:
            raise BadRequestError(502, f"{request.host} broke the connection: {error}") from error
        guest.sendall(clean)
        received = copy_bytes(server, guest, first=first, length=length, idle=_IDLE_SECONDS)
        return replace(record, status=status, sent=sent, received=received)

    @contextlib.contextmanager
    def _closing(self, server: socket.socket) -> Iterator[None]:
        with self._lock:
            self._open.add(server)
        try:
            yield
        finally:
            self._forget(server)
            server.close()


def _refuse(guest: socket.socket, error: BadRequestError) -> None:
    guest.settimeout(_HEAD_SECONDS)
    guest.sendall(answer(error.status, error.text))
    with contextlib.suppress(OSError):
        guest.shutdown(socket.SHUT_WR)
